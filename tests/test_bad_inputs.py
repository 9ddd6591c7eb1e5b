"""Every mistake in what a person passes ends in one sentence that says what to change, before anything is compiled.

Broken checkpoints have their own table in test_bad_checkpoints.py.
"""

import dataclasses
import io
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax
from dllm_jax import DllmError, FunctionDenoiser
from samplers import (
    EB,
    BlockSampler,
    Dream,
    Edit,
    Engine,
    Factor,
    LLaDA,
    NoCache,
    PipelineSampler,
    Sampling,
    Threshold,
    TopK,
    generate,
    make_sampler,
    sample,
    sample_jit,
    stop_on,
    stream,
)
from samplers.cli import sample as cli
from samplers.viewer.terminal import LiveView

NAN = float("nan")
PROMPT = jnp.array([[81, 58, 32]], jnp.int32)
TWO = jnp.tile(PROMPT, (2, 1))


@pytest.fixture(scope="module")
def models(llada_tiny, dream_tiny, qwen2_tiny, goldens):
    return SimpleNamespace(
        llada=llada_tiny,
        dream=dream_tiny,
        qwen2=qwen2_tiny,
        bare=dataclasses.replace(llada_tiny, tokenizer=None),
        random=dllm_jax.Model(llada_tiny.config, {}, None, name="some-size"),
        unconverted=goldens / "checkpoints" / "llada-tiny",
    )


@pytest.fixture
def compiled():
    """Names of the programs of ours that were compiled; jnp's single operations have other names."""
    names = []

    def listen(event, seconds, *, fun_name="", **rest):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name in ("jit(sample)", "jit(<lambda>)"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compiling_would_be_noticed(compiled):
    jax.jit(lambda x: x + 1)(1.0)
    assert compiled == ["jit(<lambda>)"]


class Adjusting(Threshold):
    def adjust(self, logits, view, state):
        return logits, state


def start(model, sampler=None, prompt=PROMPT, **options):
    """The first state of a generation that was set up by hand."""
    sampler = BlockSampler(Threshold(), 16) if sampler is None else sampler
    return sampler.init(model.denoiser, prompt, **options)


def run(model, sampler=None, prompt=PROMPT, prompt_lengths=None, **options):
    """The same by the compiled loop."""
    sampler = BlockSampler(Threshold(), 16) if sampler is None else sampler
    return sample_jit(sampler, model.denoiser, prompt, prompt_lengths, **options)


LOAD = {
    "missing folder": (
        lambda m: dllm_jax.load("no/such/model"),
        "no checkpoint at no/such/model and none of that name",
    ),
    "misspelt folder": (
        lambda m: dllm_jax.load(f"{m.llada.folder}s"),
        "; did you mean 'llada-tiny'?",
    ),
    "a file": (lambda m: dllm_jax.load(__file__), "no checkpoint at "),
    "name too long": (lambda m: dllm_jax.load("x" * 5000), "none of that name"),
    "unconverted folder": (lambda m: dllm_jax.load(m.unconverted), "is not a converted checkpoint"),
    "integer dtype": (lambda m: dllm_jax.load(m.llada.folder, dtype="int8"), "dtype int8 is not supported; use one of"),
    "dtype of no kind": (lambda m: dllm_jax.load(m.llada.folder, dtype="half-ish"), "dtype half-ish is not supported"),
    "rules without a mesh": (
        lambda m: dllm_jax.load(m.llada.folder, rules={}),
        "sharding rules were given without a mesh",
    ),
    "unknown size": (lambda m: dllm_jax.random_model("llada-9b"), "no published model is called 'llada-9b'; choose"),
}

NAMES = {
    "unknown rule": (
        lambda m: generate(m.llada, "a", rule="best"),
        "no unmasking rule is called 'best'; choose one of",
    ),
    "unknown cache": (lambda m: generate(m.llada, "a", cache="big"), "no cache policy is called 'big'; choose one of"),
    "option of another rule": (
        lambda m: generate(m.llada, "a", gamma=1),
        "sampler threshold has no option 'gamma'; it has threshold, steps",
    ),
    "option of another cache": (
        lambda m: make_sampler(m.llada, "eb", warmup=1),
        "; warmup is an option of vicinity",
    ),
    "unknown option": (
        lambda m: make_sampler(m.llada, "eb", size=1),
        "sampler eb has no option 'size'; it has gamma",
    ),
    "misspelt option": (
        lambda m: generate(m.llada, "a", treshold=0.9),
        "sampler threshold has no option 'treshold'; did you mean 'threshold'?",
    ),
    "misspelt option of a spec": (
        lambda m: make_sampler(m.llada, "d2f:tauadd=0.1"),
        "sampler d2f has no option 'tauadd'; did you mean 'tau_add'?",
    ),
    "another library's name": (lambda m: generate(m.llada, "a", max_new_tokens=9), "did you mean 'gen_length'?"),
    "two rules": (
        lambda m: generate(m.llada, "a", rule="topk", sampler="eb"),
        "eb and rule=topk both name the rule; leave one of them out",
    ),
    "a denoiser of one's own": (
        lambda m: generate(m.llada.denoiser, [[1]]),
        "model is of type Denoiser; samplers.sample_jit(sampler, denoiser, prompt) runs a denoiser of your own",
    ),
    "no model": (lambda m: generate("llada", "a"), "model is of type str; load one by dllm_jax.load"),
    "missing option": (lambda m: make_sampler(m.llada, "ni"), "rule ni needs indicator; pass indicator=..."),
    "no threshold": (lambda m: make_sampler(m.llada, threshold=None), "threshold of rule threshold is None; leave it"),
    "no rule": (lambda m: make_sampler(m.llada, rule=None), "rule is None; give a rule's name or a rule object"),
    "a rule's class": (lambda m: make_sampler(m.llada, rule=Threshold), "give a rule's name or a rule object"),
    "a cache's class": (lambda m: make_sampler(m.llada, cache=NoCache), "give a policy's name, such as 'none', or a"),
    "no cache": (lambda m: make_sampler(m.llada, cache=None), "cache is None; give a policy's name, such as 'none'"),
    "options beside a rule": (
        lambda m: make_sampler(m.llada, rule=EB(), gamma=1.0),
        "sampler EB has no option 'gamma'; it has refresh_every",
    ),
    "options beside a sampler": (
        lambda m: generate(m.llada, "a", sampler=make_sampler(m.llada), top_k=1, cache="none"),
        "options cache, top_k have no effect beside a sampler",
    ),
}

RULE_NUMBERS = {
    "negative threshold": (Threshold(-0.1), "threshold is -0.1; it must be at least 0"),
    "threshold in percent": (
        Threshold(90),
        "threshold is 90; it is a probability, such as 0.9; write inf",
    ),
    "threshold above 1": (Threshold(2), "threshold is 2; it is a probability, such as 0.9; write inf"),
    "threshold of edits in percent": (Edit(0.9, 90.0), "editing_threshold is 90; it is a probability, such as 0.9"),
    "threshold NaN": (Threshold(NAN), "threshold is nan; it must be at least 0"),
    "threshold as text": (Threshold("0.9"), "threshold is the string '0.9'; give a number"),
    "threshold of numpy": (Threshold(np.float32(-1)), "threshold is -1; it must be at least 0"),
    "negative factor": (Factor(-1.0), "factor is -1; it must be at least 0"),
    "negative gamma": (EB(-1.0), "gamma is -1; it must be at least 0"),
    "gamma NaN": (EB(NAN), "gamma is nan; it must be at least 0"),
    "unknown proxy": (EB(proxy="doubt"), "proxy 'doubt' is unknown; choose one of confidence, entropy, margin"),
    "k of 0": (TopK(0), "k is 0; it must be at least 1"),
    "k of one and a half": (TopK(1.5), "k is 1.5; it must be a whole number"),
    "unknown proxy of topk": (TopK(proxy="luck"), "proxy 'luck' is unknown"),
    "no steps": (LLaDA(0), "steps is 0; it must be at least 1"),
    "half a step": (LLaDA(7.5), "steps is 7.5; it must be a whole number"),
    "steps the blocks cannot share": (LLaDA(5), "steps 5 is not a multiple of the 2 blocks; choose a multiple"),
    "steps of a threshold": (Threshold(steps=3), "steps 3 is not a multiple of the 2 blocks"),
    "unknown remasking": (
        LLaDA(8, remasking="high"),
        "remasking 'high' is unknown; choose one of low_confidence, random",
    ),
    "unknown alg": (Dream(8, alg="best"), "alg 'best' is unknown; choose one of origin, maskgit_plus"),
    "eps above 1": (Dream(8, eps=1.5), "eps is 1.5; it must be between 0 and 1"),
    "negative eps": (Dream(8, eps=-1e-3), "eps is -0.001; it must be between 0 and 1"),
    "alg_temp of 0": (Dream(8, alg_temp=0), "alg_temp is 0; it must be above 0"),
    "negative alg_temp": (Dream(8, alg_temp=-1.0), "alg_temp is -1; it must be at least 0"),
    "alg_temp NaN": (Dream(8, alg_temp=NAN), "alg_temp is nan"),
}

SAMPLER_NUMBERS = {
    "gen_length of 0": (dict(gen_length=0), "gen_length is 0; it must be at least 1"),
    "negative gen_length": (dict(gen_length=-8), "gen_length is -8; it must be at least 1"),
    "gen_length of 16.5": (dict(gen_length=16.5), "gen_length is 16.5; it must be a whole number"),
    "gen_length as text": (dict(gen_length="16"), "gen_length is the string '16'; give a number"),
    "no gen_length": (dict(gen_length=None), "gen_length is None; it must be a whole number"),
    "gen_length NaN": (dict(gen_length=NAN), "gen_length is nan"),
    "block above gen_length": (dict(block_length=17), "block_length 17 must be between 1 and gen_length 16"),
    "block_length of 0": (dict(block_length=0), "block_length is 0; it must be at least 1"),
    "negative block_length": (dict(block_length=-1), "block_length is -1; it must be at least 1"),
    "block_length of 8.0": (dict(block_length=8.0), "block_length is 8.0; it must be a whole number"),
    "canvas below gen_length": (
        dict(canvas_length=15),
        "canvas_length 15 is below gen_length 16; it counts the prompt",
    ),
    "canvas of no length": (dict(canvas_length=0), "canvas_length is 0; it must be at least 1"),
    "negative temperature": (dict(sampling=Sampling(-1.0)), "temperature is -1; it must be at least 0"),
    "temperature NaN": (dict(sampling=Sampling(NAN)), "temperature is nan; it must be at least 0"),
    "top_p above 1": (dict(sampling=Sampling(1.0, top_p=1.1)), "top_p is 1.1; it must be between 0 and 1"),
    "top_k of 0": (dict(sampling=Sampling(1.0, top_k=0)), "top_k is 0; it must be at least 1"),
    "top_k of 2.5": (dict(sampling=Sampling(1.0, top_k=2.5)), "top_k is 2.5; it must be a whole number"),
    "guidance NaN": (dict(guidance=NAN), "guidance is nan; it must be at least 0"),
}

OPTIONS = {
    "gen_length": (dict(gen_length=0), "gen_length is 0; it must be at least 1"),
    "block_length": (dict(block_length="8"), "block_length is the string '8'; give a number"),
    "list of lengths": (dict(block_length=[8]), "block_length is [8]; it must be a whole number"),
    "negative block_length": (dict(block_length=-8), "block_length is -8; it must be at least 1"),
    "temperature": (dict(temperature=NAN), "temperature is nan"),
    "top_p": (dict(top_p=-0.1), "top_p is -0.1; it must be between 0 and 1"),
    "guidance": (dict(guidance=-1.0), "guidance is -1; it must be at least 0"),
    "empty stop string": (dict(stop=[""]), "a stop string is empty; leave it out"),
    "stop as a plain string": (dict(stop="Q:"), "stop is 'Q:'; give a list of strings or token ids"),
    "stop as a plain id": (dict(stop=128), "stop is 128; give a list of strings or token ids"),
    "stop id out of range": (dict(stop=[136]), "stop token 136 lies outside the vocabulary of 136 tokens"),
    "stop that is no id": (dict(stop=[1.5]), "stop token 1.5 is no token id; give whole numbers"),
    "suppressed id out of range": (dict(suppress=[-1]), "suppress token -1 lies outside the vocabulary"),
    "suppressed ids as text": (dict(suppress="abc"), "suppress is 'abc'; give a list of token ids"),
    "suppressed text of two tokens": (
        dict(suppress=["ab"]),
        "suppress text 'ab' is 2 tokens, which other texts need as well; name texts that are one token",
    ),
    "suppressed text of no token": (dict(suppress=[""]), "suppress text '' is 0 tokens"),
    "deferred id out of range": (dict(defer=[500]), "defer token 500 lies outside the vocabulary"),
    "batch_size": (dict(batch_size=0), "batch_size is 0; it must be at least 1"),
    "batch_size of 1.5": (dict(batch_size=1.5), "batch_size is 1.5; it must be a whole number"),
    "negative seed": (dict(seed=-1), "seed is -1; it must be between 0 and 4294967295"),
    "no seed": (dict(seed=None), "seed is None; it must be a whole number"),
    "huge seed": (dict(seed=2**64), "it must be between 0 and 4294967295"),
    "too long for the context": (
        dict(gen_length=512),
        "a prompt of 1 tokens and a canvas up to position 513 exceed the",
    ),
    "canvas too long for the context": (dict(canvas_length=600), "up to position 600 exceed the 512 tokens llada-tiny"),
}

PROMPTS = {
    "empty text": (lambda m: generate(m.llada, ""), "the prompt is empty; give a prompt of at least one token"),
    "no tokens": (lambda m: generate(m.llada, [[]]), "the prompt is empty"),
    "mask token by name": (
        lambda m: generate(m.llada, "a<|mask|>b"),
        "the prompt contains the mask token; to fill gaps",
    ),
    "mask token by id": (lambda m: generate(m.llada, [[65, 129]]), "the prompt contains the mask token"),
    "token out of range": (
        lambda m: generate(m.llada, [[65, 136]]),
        "prompt token 136 lies outside the vocabulary of 136",
    ),
    "negative token": (lambda m: generate(m.llada, [[-1]]), "prompt token -1 lies outside the vocabulary"),
    "fraction of a token": (
        lambda m: generate(m.llada, [[65.5]]),
        "prompt token 65.5 is no token id; give whole numbers",
    ),
    "array of floats": (lambda m: generate(m.llada, [np.ones(3)]), "prompt token 1.0 is no token id"),
    "array of rank 2": (lambda m: generate(m.llada, [np.ones((1, 3), int)]), "prompt token [1, 1, 1] is no token id"),
    "bytes": (lambda m: generate(m.llada, [b"abc"]), "a prompt is a string, a list of token ids or a list of messages"),
    "no prompts": (lambda m: generate(m.llada, None), "prompts is None; give a string or a list of prompts"),
    "a dictionary of prompts": (lambda m: generate(m.llada, {"a": 1}), "prompts is {'a': 1}; give a string or a list"),
    "a path for a model": (lambda m: generate("llada-tiny", "a"), "model is of type str; load one by dllm_jax.load"),
    "tokens without their list": (
        lambda m: generate(m.llada, [65, 66]),
        "prompts is [65, 66]; token ids of one prompt are a list in a list, [[65, 66]]",
    ),
    "an array of tokens without its list": (
        lambda m: generate(m.llada, jnp.asarray([65, 66])),
        "are a list in a list, [[65, 66]]",
    ),
    "a truth for a token": (lambda m: generate(m.llada, [[65, True]]), "prompt token True is no token id"),
    "a truth for a stop token": (lambda m: generate(m.llada, "a", stop=[True]), "stop token True is no token id"),
    "a message without its list": (
        lambda m: generate(m.llada, [{"role": "user", "content": "a"}]),
        "a prompt is a string, a list of token ids or a list of messages, not {'content'",
    ),
    "unknown role": (
        lambda m: generate(m.llada, [[{"role": "boss", "content": "a"}]]),
        "message 0 has the unknown role 'boss'",
    ),
    "characters outside the vocabulary": (
        lambda m: generate(m.llada, "日本"),
        "cannot be expressed in this vocabulary",
    ),
    "long prompt": (lambda m: generate(m.llada, "x" * 500), "a prompt of 500 tokens and a canvas up to position 756"),
    "text without a tokenizer": (lambda m: generate(m.bare, "a"), "has no tokenizer, so text cannot be used"),
    "chat without a tokenizer": (
        lambda m: generate(m.bare, "a", chat=True),
        "has no tokenizer, so text cannot be used",
    ),
    "stop text without a tokenizer": (lambda m: generate(m.bare, [[65]], stop=["x"]), "has no tokenizer"),
    "text for random weights": (lambda m: generate(m.random, "a"), "the random model some-size has no tokenizer"),
    "autoregressive model": (lambda m: generate(m.qwen2, "a"), "a qwen2 model has no mask token and cannot denoise"),
    "delay of the live view": (lambda m: LiveView(delay=-1.0), "delay is -1; it must be at least 0"),
}

BY_HAND = {
    "prompt of floats": (
        lambda m: start(m.llada, prompt=jnp.ones((1, 3))),
        "prompt is float32[1, 3]; it must be integer",
    ),
    "prompt of rank 1": (
        lambda m: start(m.llada, prompt=PROMPT[0]),
        "prompt is int32[3]; it must be integer token ids",
    ),
    "shifted model without a prompt": (
        lambda m: start(m.dream, prompt=jnp.zeros((1, 0), jnp.int32)),
        "cannot predict its very first position; give a prompt of at least one token",
    ),
    "autoregressive model": (lambda m: start(m.qwen2), "a qwen2 model has no mask token and cannot denoise"),
    "lengths of another shape": (
        lambda m: start(m.llada, prompt_lengths=jnp.array([3, 3])),
        "prompt_lengths has shape [2]; it must be [1], one per row",
    ),
    "lengths of floats": (
        lambda m: start(m.llada, prompt_lengths=jnp.array([3.0])),
        "prompt_lengths is float32; it must hold integers",
    ),
    "length of 0": (
        lambda m: start(m.dream, prompt=TWO, prompt_lengths=[3, 0]),
        "prompt length 0 of row 1 is impossible; it must be between 1 and 3",
    ),
    "length above the width": (
        lambda m: start(m.llada, prompt=TWO, prompt_lengths=np.array([4, 3])),
        "prompt length 4 of row 0 is impossible; it must be between 0 and 3",
    ),
    "given of another shape": (
        lambda m: start(m.llada, given=jnp.zeros((1, 8), jnp.int32)),
        "given has shape [1, 8]; it must be [1, 16], the generation of every row",
    ),
    "given tokens outside the vocabulary": (
        lambda m: start(m.llada, given=jnp.full((1, 16), 10**6)),
        "given token 1000000 of row 0, position 0, lies outside the vocabulary of 136 tokens",
    ),
    "negative given tokens, compiled": (
        lambda m: run(m.llada, given=jnp.full((1, 16), -1)),
        "given token -1 of row 0",
    ),
    "given tokens outside the vocabulary, of a request": (
        lambda m: Engine(m.llada, gen_length=16).request([65], given=[65] * 15 + [10**6]),
        "given token 1000000 of row 0, position 15, lies outside",
    ),
    "given floats, of a request": (
        lambda m: Engine(m.llada, gen_length=16).request([65], given=[65.5] * 16),
        "given is float64; it must be integer token ids",
    ),
    "numbers of rows as a list": (
        lambda m: run(m.llada, BlockSampler(Threshold([0.5]), 16)),
        "rule.threshold is [0.5]; give one number, or a jnp.array",
    ),
    "one token for mask and end": (
        lambda m: FunctionDenoiser(lambda tokens, _: jax.nn.one_hot(tokens, 19), mask_id=18, eos_id=18),
        "mask_id and eos_id are both 18",
    ),
    "given of floats": (
        lambda m: start(m.llada, given=jnp.zeros((1, 16))),
        "given is float32; it must be integer token ids",
    ),
    "adjust that nobody asks": (
        lambda m: start(m.llada, BlockSampler(Adjusting(), 16)),
        "Adjusting.adjust is never asked; set reads_logits = True in the class",
    ),
    "name for a rule": (lambda m: start(m.llada, BlockSampler("eb", 16)), "rule is 'eb'; give a rule object, such as"),
    "name for a cache": (
        lambda m: start(m.llada, BlockSampler(EB(), 16, cache="dual")),
        "cache is 'dual'; give a policy object, such as DualCache()",
    ),
    "no sampling": (
        lambda m: start(m.llada, BlockSampler(EB(), 16, sampling=None)),
        "sampling is None; give a Sampling",
    ),
    "key that is a seed": (lambda m: start(m.llada, key=0), "make one by jax.random.key(seed)"),
    "key of the old kind": (
        lambda m: start(m.llada, key=jnp.zeros(2, jnp.uint32)),
        "key is no typed key, nor [1] of them",
    ),
    "too many keys": (lambda m: start(m.llada, key=jax.random.split(jax.random.key(0))), "key has shape [2]; give one"),
    "shape inside jit": (
        lambda m: sample_jit(BlockSampler(Threshold(), 16), m.llada.denoiser, PROMPT[0]),
        "prompt is int32[3]; it must be integer token ids",
    ),
    "autoregressive model inside jit": (
        lambda m: sample_jit(BlockSampler(Threshold(), 16), m.qwen2.denoiser, PROMPT),
        "cannot denoise; use it as a verifier",
    ),
    "temperature without a key": (
        lambda m: sample_jit(BlockSampler(Threshold(), 16, sampling=Sampling(0.5)), m.llada.denoiser, PROMPT),
        "this sampler draws random numbers and was given none; pass key=jax.random.key(seed)",
    ),
    "random order without a key": (
        lambda m: sample(BlockSampler(LLaDA(16, remasking="random"), 16), m.llada.denoiser, PROMPT),
        "pass key=jax.random.key(seed)",
    ),
    "lengths of another shape in a stream": (
        lambda m: next(stream(BlockSampler(Threshold(), 16), m.llada.denoiser, PROMPT, jnp.array([1, 2]))),
        "prompt_lengths has shape [2]; it must be [1], one per row",
    ),
    "prompt lengths above the width, compiled": (
        lambda m: run(m.llada, prompt=TWO, prompt_lengths=[3, 99]),
        "prompt length 99 of row 1 is impossible; it must be between 0 and 3",
    ),
    "gen lengths above the sampler's, compiled": (
        lambda m: run(m.llada, gen_lengths=jnp.array([17])),
        "gen length 17 of row 0 is impossible; it must be between 1 and 16",
    ),
    "tokens outside the vocabulary": (
        lambda m: run(m.llada, prompt=TWO.at[1, 2].set(5000)),
        "prompt token 5000 of row 1, position 2, lies outside the vocabulary of 136 tokens",
    ),
    "negative tokens": (lambda m: sample(BlockSampler(EB(), 16), m.llada.denoiser, -PROMPT), "lies outside the vocab"),
    "rows longer than the model's context": (
        lambda m: run(m.llada, prompt=jnp.ones((1, 5000), jnp.int32)),
        "a prompt of 5000 tokens and a canvas up to position 5016 exceed the 512 tokens the model was trained for",
    ),
    "one row longer than the model's context": (
        lambda m: next(
            stream(BlockSampler(EB(), 16), m.llada.denoiser, jnp.ones((2, 510), jnp.int32), jnp.array([9, 505]))
        ),
        "a prompt of 505 tokens and a canvas up to position 521 exceed",
    ),
    "rows of different lengths": (lambda m: run(m.llada, prompt=[[1, 2], [3]]), "prompt is no array; pad rows to one"),
    "numbers for another number of rows": (
        lambda m: run(m.llada, BlockSampler(Threshold(jnp.array([0.5, 0.9])), 16)),
        "rule.threshold has shape [2]; it must be one number, or [1], one per row",
    ),
    "temperatures for another number of rows": (
        lambda m: run(m.llada, BlockSampler(EB(), 16, sampling=Sampling(jnp.ones(3))), key=jax.random.key(0)),
        "sampling.temperature has shape [3]; it must be one number, or [1]",
    ),
    "keys for another number of rows, compiled": (
        lambda m: run(m.llada, key=jax.random.split(jax.random.key(0), 3)),
        "key has shape [3]; give one key, or [1], one per row of the prompt",
    ),
    "model for a denoiser": (
        lambda m: sample_jit(BlockSampler(EB(), 16), m.llada, PROMPT),
        "denoiser is a Model; pass model.denoiser",
    ),
    "function for a denoiser": (
        lambda m: sample_jit(BlockSampler(EB(), 16), len, PROMPT),
        "make one of your function by dllm_jax.FunctionDenoiser",
    ),
    "denoiser that is no pytree": (
        lambda m: sample_jit(BlockSampler(EB(), 16), SimpleNamespace(forward=len), PROMPT),
        "a SimpleNamespace is no pytree; decorate its class with dllm_jax.pytree.pytree",
    ),
    "rule for a sampler": (lambda m: run(m.llada, Threshold()), "give one, such as BlockSampler(Threshold(0.9), gen"),
    "class for a rule": (lambda m: run(m.llada, BlockSampler(EB, 16)), "give a rule object, such as Threshold()"),
    "name for a rule of a pipeline": (
        lambda m: run(m.llada, PipelineSampler(16, 8, rule="eb")),
        "rule is 'eb'; give a number, an array, or an object such as Threshold()",
    ),
    "empty stop sequence": (
        lambda m: stop_on(sequences=[[]], vocab_size=136),
        "a stop sequence is empty; leave it out",
    ),
    "stop string without bytes": (lambda m: stop_on(strings=["a"], vocab_size=136), "a stop string needs a tokenizer"),
}

CALLS = [
    *LOAD.items(),
    *NAMES.items(),
    *(
        (f"rule: {name}", (lambda m, rule=rule: BlockSampler(rule, 16, 8), text))
        for name, (rule, text) in RULE_NUMBERS.items()
    ),
    *(
        (
            f"sampler: {name}",
            (lambda m, numbers=numbers: BlockSampler(**{"rule": TopK(), "gen_length": 16, **numbers}), text),
        )
        for name, (numbers, text) in SAMPLER_NUMBERS.items()
    ),
    *(
        (f"option: {name}", (lambda m, numbers=numbers: generate(m.llada, "a", **numbers), text))
        for name, (numbers, text) in OPTIONS.items()
    ),
    *((f"prompt: {name}", call) for name, call in PROMPTS.items()),
    *((f"by hand: {name}", call) for name, call in BY_HAND.items()),
]


@pytest.mark.parametrize("call, sentence", [pytest.param(*entry, id=name) for name, entry in CALLS])
def test_calls(models, compiled, call, sentence):
    with pytest.raises(DllmError) as caught:
        call(models)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value) and not compiled


COMMANDS = {
    "no model": (["a"], "no model was named; pass --model"),
    "missing model": (["a", "--model", "no/such/model"], "no checkpoint at no/such/model"),
    "unconverted model": (["a", "--model", "UNCONVERTED"], "is not a converted checkpoint"),
    "dtype": (["a", "--model", "LLADA", "--dtype", "int8"], "dtype int8 is not supported"),
    "autoregressive model": (["a", "--model", "QWEN2"], "a qwen2 model has no mask token and cannot denoise"),
    "unknown rule": (["a", "--model", "LLADA", "--rule", "best"], "no unmasking rule is called 'best'; choose one of"),
    "unknown cache": (["a", "--model", "LLADA", "--cache", "big"], "no cache policy is called 'big'; choose one of"),
    "option of another rule": (
        ["a", "--model", "LLADA", "--rule", "eb", "--k", "2"],
        "sampler eb has no option 'k'; it has",
    ),
    "unknown option": (["a", "--model", "LLADA", "--speed=9"], "unrecognized arguments: --speed=9; see python -m"),
    "abbreviated option": (["a", "--model", "LLADA", "--thresh=1"], "unrecognized arguments: --thresh=1"),
    "a folder that a rule needs": (
        ["a", "--model", "LLADA", "--rule", "ni"],
        "pass indicator=..., in a shell --indicator",
    ),
    "option without its value": (
        ["a", "--model", "LLADA", "--threshold"],
        "argument --threshold: expected one argument",
    ),
    "text for a number": (
        ["a", "--model", "LLADA", "--threshold", "high"],
        "threshold 'high' is no number",
    ),
    "fraction for a whole number": (
        ["a", "--model", "LLADA", "--steps", "7.5"],
        "steps '7.5' is no whole number",
    ),
    "text for a length": (
        ["a", "--model", "LLADA", "--gen-length", "many"],
        "sampler threshold: gen_length 'many' is no whole number",
    ),
    "NaN": (["a", "--model", "LLADA", "--threshold", "nan"], "threshold is nan; it must be at least 0"),
    "negative threshold": (["a", "--model", "LLADA", "--threshold", "-1"], "threshold is -1; it must be at least 0"),
    "unknown alg": (
        ["a", "--model", "LLADA", "--rule", "dream", "--alg", "x"],
        "alg 'x' is unknown; choose one of",
    ),
    "negative block_length": (
        ["a", "--model", "LLADA", "--block-length", "-4"],
        "block_length is -4; it must be at least 1",
    ),
    "gen_length": (["a", "--model", "LLADA", "--gen-length", "0"], "gen_length is 0; it must be at least 1"),
    "temperature": (["a", "--model", "LLADA", "--temperature", "nan"], "temperature is nan; it must be at least 0"),
    "top_p": (["a", "--model", "LLADA", "--top-p", "2"], "top_p is 2; it must be between 0 and 1"),
    "top_k": (["a", "--model", "LLADA", "--top-k", "0"], "top_k is 0; it must be at least 1"),
    "cfg": (["a", "--model", "LLADA", "--cfg", "-1"], "guidance is -1; it must be at least 0"),
    "seed": (
        ["a", "--model", "LLADA", "--seed", "4294967296"],
        "seed is 4294967296; it must be between 0 and 4294967295",
    ),
    "batch_size": (["a", "--model", "LLADA", "--batch-size", "0"], "batch_size is 0; it must be at least 1"),
    "delay": (["a", "--model", "LLADA", "--delay", "-1"], "delay is -1; it must be at least 0"),
    "stop id": (["a", "--model", "LLADA", "--stop-id", "136"], "stop token 136 lies outside the vocabulary"),
    "empty stop": (["a", "--model", "LLADA", "--stop", ""], "a stop string is empty; leave it out"),
    "canvas_length": (["a", "--model", "LLADA", "--canvas-length", "9"], "canvas_length 9 is below gen_length 256"),
    "long generation": (
        ["a", "--model", "LLADA", "--gen-length", "900"],
        "up to position 901 exceed the 512 tokens llada-tiny was trained for; shorten one of them; a gen_length of 480 "
        "fits behind such a prompt",
    ),
    "empty prompt": (["", "--model", "LLADA"], "the prompt is empty; give a prompt of at least one token"),
    "mask in the prompt": (["a<|mask|>", "--model", "LLADA"], "the prompt contains the mask token"),
    "half a surrogate pair": (["a\udc80", "--model", "LLADA"], "cannot be expressed in this vocabulary"),
    "empty standard input": (["--model", "LLADA"], "the prompt is empty"),
    "two sources of prompts": (
        ["a", "--model", "LLADA", "--prompts", "-"],
        "both on the command line and by --prompts",
    ),
    "missing file": (["--model", "LLADA", "--prompts", "no/such/file"], "no/such/file could not be read"),
    "folder for a file": (["--model", "LLADA", "--prompts", "TMP"], "could not be read"),
    "file that is no text": (
        ["--model", "LLADA", "--prompts", "TMP/bytes"],
        "bytes line 1: not valid UTF-8 (invalid start byte at byte 0)",
    ),
    "file without prompts": (
        ["--model", "LLADA", "--prompts", "TMP/blank"],
        "blank has no prompts; write one per line",
    ),
    "line that is no JSON": (
        ["--model", "LLADA", "--prompts", "TMP/broken.jsonl"],
        "broken.jsonl line 2: not valid JSON",
    ),
    "line without a prompt": (
        ["--model", "LLADA", "--prompts", "TMP/keys.jsonl"],
        'keys.jsonl line 1: it must be an object with either "prompt" or "messages"',
    ),
    "prompt that is a number": (
        ["--model", "LLADA", "--prompts", "TMP/number.jsonl"],
        "line 1: a prompt must be a text, token ids or messages, not 5",
    ),
    "deep JSON": (["--model", "LLADA", "--prompts", "TMP/deep.jsonl"], "deep.jsonl line 1: not valid JSON"),
    "bad message": (["--model", "LLADA", "--prompts", "TMP/role.jsonl"], "message 0 has no role"),
}
FILES = {
    "bytes": b"\xff\xfe\xfd",
    "blank": b"\n \r\n",
    "broken.jsonl": b'\n{"prompt": \n',
    "keys.jsonl": b'{"question": "a"}\n',
    "number.jsonl": b'{"prompt": 5}\n',
    "deep.jsonl": b"[" * 100_000,
    "role.jsonl": b'{"messages": [{"content": "a"}]}\n',
}


@pytest.fixture(scope="module")
def places(models, tmp_path_factory):
    """What the capital words in a command stand for."""
    folder = tmp_path_factory.mktemp("prompts")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    found = {
        "UNCONVERTED": models.unconverted,
        "LLADA": models.llada.folder,
        "QWEN2": models.qwen2.folder,
        "TMP": folder,
    }
    return {word: str(place) for word, place in found.items()}


@pytest.mark.parametrize("arguments, sentence", COMMANDS.values(), ids=COMMANDS.keys())
def test_commands(places, compiled, capsys, monkeypatch, arguments, sentence):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for word, place in places.items():
        arguments = [place + text.removeprefix(word) if text.startswith(word) else text for text in arguments]
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and sentence in err
    assert err.count("\n") == 1 and not compiled
