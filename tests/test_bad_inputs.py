"""Every mistake in what a person passes ends in one sentence that names it, before anything is compiled.

Each entry is a name that the sentence has, and a call. Broken checkpoints have a table in test_bad_checkpoints.py.
"""

import dataclasses
import io
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_error, refuses

import dllm_jax
from dllm_jax import FunctionDenoiser
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


LOAD = [
    ("no/such/model", lambda m: dllm_jax.load("no/such/model")),
    ("did you mean 'llada-tiny'", lambda m: dllm_jax.load(f"{m.llada.folder}s")),
    ("test_bad_inputs.py", lambda m: dllm_jax.load(__file__)),
    ("xxx", lambda m: dllm_jax.load("x" * 5000)),
    ("llada-tiny", lambda m: dllm_jax.load(m.unconverted)),
    ("dtype int8", lambda m: dllm_jax.load(m.llada.folder, dtype="int8")),
    ("dtype half-ish", lambda m: dllm_jax.load(m.llada.folder, dtype="half-ish")),
    ("mesh", lambda m: dllm_jax.load(m.llada.folder, rules={})),
    ("'llada-9b'", lambda m: dllm_jax.random_model("llada-9b")),
]

NAMES = [
    ("'best'", lambda m: generate(m.llada, "a", rule="best")),
    ("'big'", lambda m: generate(m.llada, "a", cache="big")),
    ("'gamma'", lambda m: generate(m.llada, "a", gamma=1)),
    ("vicinity", lambda m: make_sampler(m.llada, "eb", warmup=1)),  # which has such an option
    ("'size'", lambda m: make_sampler(m.llada, "eb", size=1)),
    ("did you mean 'threshold'", lambda m: generate(m.llada, "a", treshold=0.9)),
    ("did you mean 'tau_add'", lambda m: make_sampler(m.llada, "d2f:tauadd=0.1")),
    ("did you mean 'gen_length'", lambda m: generate(m.llada, "a", max_new_tokens=9)),
    ("rule=topk", lambda m: generate(m.llada, "a", rule="topk", sampler="eb")),
    ("sample_jit", lambda m: generate(m.llada.denoiser, [[1]])),  # the way for a denoiser
    ("dllm_jax.load", lambda m: generate("llada-tiny", "a")),
    ("indicator", lambda m: make_sampler(m.llada, "ni")),
    ("threshold is None", lambda m: make_sampler(m.llada, threshold=None)),
    ("rule is None", lambda m: make_sampler(m.llada, rule=None)),
    ("rule", lambda m: make_sampler(m.llada, rule=Threshold)),
    ("policy", lambda m: make_sampler(m.llada, cache=NoCache)),
    ("cache is None", lambda m: make_sampler(m.llada, cache=None)),
    ("'gamma'", lambda m: make_sampler(m.llada, rule=EB(), gamma=1.0)),
    ("cache, top_k", lambda m: generate(m.llada, "a", sampler=make_sampler(m.llada), top_k=1, cache="none")),
]

RULES = {
    "threshold": [*map(Threshold, (-0.1, 90, 2, NAN, "0.9", np.float32(-1)))],
    "editing_threshold": [Edit(0.9, 90.0)],
    "factor": [Factor(-1.0)],
    "gamma": [EB(-1.0), EB(NAN)],
    "proxy": [EB(proxy="doubt"), TopK(proxy="luck")],
    "k is": [TopK(0), TopK(1.5)],
    "steps": [LLaDA(0), LLaDA(7.5), LLaDA(5), Threshold(steps=3)],  # two blocks share them
    "remasking": [LLaDA(8, remasking="high")],
    "alg '": [Dream(8, alg="best")],
    "eps": [Dream(8, eps=1.5), Dream(8, eps=-1e-3)],
    "alg_temp": [Dream(8, alg_temp=0), Dream(8, alg_temp=-1.0), Dream(8, alg_temp=NAN)],
}

FIELDS = [
    *({"gen_length": length} for length in (0, -8, 16.5, "16", None, NAN)),
    *({"block_length": length} for length in (17, 0, -1, 8.0)),
    *({"canvas_length": length} for length in (15, 0)),
    {"guidance": NAN},
]

OPTIONS = [
    *({"gen_length": length} for length in (0, 512)),  # the model has a context of 512
    *({"block_length": length} for length in ("8", [8], -8)),
    *({"temperature": value} for value in (NAN, -1.0)),
    *({"top_p": value} for value in (-0.1, 1.1)),
    *({"top_k": value} for value in (0, 2.5)),
    {"guidance": -1.0},
    *({"stop": value} for value in ([""], "Q:", 128, [136], [1.5], [True])),
    *({"suppress": value} for value in ([-1], "abc", ["ab"], [""])),
    {"defer": [500]},
    *({"batch_size": value} for value in (0, 1.5)),
    *({"seed": value} for value in (-1, None, 2**64)),
]

PROMPTS = [
    ("empty", lambda m: generate(m.llada, "")),
    ("empty", lambda m: generate(m.llada, [[]])),
    ("mask token", lambda m: generate(m.llada, "a<|mask|>b")),
    ("mask token", lambda m: generate(m.llada, [[65, 129]])),
    ("token 136", lambda m: generate(m.llada, [[65, 136]])),
    ("token -1", lambda m: generate(m.llada, [[-1]])),
    ("token 65.5", lambda m: generate(m.llada, [[65.5]])),
    ("token 1.0", lambda m: generate(m.llada, [np.ones(3)])),
    ("token [1, 1, 1]", lambda m: generate(m.llada, [np.ones((1, 3), int)])),
    ("token True", lambda m: generate(m.llada, [[65, True]])),
    ("messages", lambda m: generate(m.llada, [b"abc"])),
    ("prompts is None", lambda m: generate(m.llada, None)),
    ("{'a': 1}", lambda m: generate(m.llada, {"a": 1})),
    ("[[65, 66]]", lambda m: generate(m.llada, [65, 66])),
    ("[[65, 66]]", lambda m: generate(m.llada, jnp.asarray([65, 66]))),
    ("{'content'", lambda m: generate(m.llada, [{"role": "user", "content": "a"}])),
    ("'boss'", lambda m: generate(m.llada, [[{"role": "boss", "content": "a"}]])),
    ("vocabulary", lambda m: generate(m.llada, "日本")),
    ("500 tokens", lambda m: generate(m.llada, "x" * 500)),
    ("position 600", lambda m: generate(m.llada, "a", canvas_length=600)),
    ("tokenizer", lambda m: generate(m.bare, "a")),
    ("tokenizer", lambda m: generate(m.bare, "a", chat=True)),
    ("tokenizer", lambda m: generate(m.bare, [[65]], stop=["x"])),
    ("some-size", lambda m: generate(m.random, "a")),
    ("qwen2", lambda m: generate(m.qwen2, "a")),
    ("delay", lambda m: LiveView(delay=-1.0)),
]

BY_HAND = [
    ("float32[1, 3]", lambda m: start(m.llada, prompt=jnp.ones((1, 3)))),
    ("int32[3]", lambda m: start(m.llada, prompt=PROMPT[0])),
    ("at least one token", lambda m: start(m.dream, prompt=jnp.zeros((1, 0), jnp.int32))),
    ("qwen2", lambda m: start(m.qwen2)),
    ("prompt_lengths", lambda m: start(m.llada, prompt_lengths=jnp.array([3, 3]))),
    ("prompt_lengths", lambda m: start(m.llada, prompt_lengths=jnp.array([3.0]))),
    ("length 0 of row 1", lambda m: start(m.dream, prompt=TWO, prompt_lengths=[3, 0])),
    ("length 4 of row 0", lambda m: start(m.llada, prompt=TWO, prompt_lengths=np.array([4, 3]))),
    ("given", lambda m: start(m.llada, given=jnp.zeros((1, 8), jnp.int32))),
    ("given", lambda m: start(m.llada, given=jnp.zeros((1, 16)))),
    ("token 1000000 of row 0, position 0", lambda m: start(m.llada, given=jnp.full((1, 16), 10**6))),
    ("token -1 of row 0", lambda m: run(m.llada, given=jnp.full((1, 16), -1))),
    ("position 15", lambda m: Engine(m.llada, gen_length=16).request([65], given=[65] * 15 + [10**6])),
    ("given", lambda m: Engine(m.llada, gen_length=16).request([65], given=[65.5] * 16)),
    ("rule.threshold", lambda m: run(m.llada, BlockSampler(Threshold([0.5]), 16))),
    ("18", lambda m: FunctionDenoiser(lambda tokens, _: jax.nn.one_hot(tokens, 19), mask_id=18, eos_id=18)),
    ("reads_logits", lambda m: start(m.llada, BlockSampler(Adjusting(), 16))),  # without which nobody asks it
    ("'eb'", lambda m: start(m.llada, BlockSampler("eb", 16))),
    ("'dual'", lambda m: start(m.llada, BlockSampler(EB(), 16, cache="dual"))),
    ("sampling", lambda m: start(m.llada, BlockSampler(EB(), 16, sampling=None))),
    ("key", lambda m: start(m.llada, key=0)),
    ("key", lambda m: start(m.llada, key=jnp.zeros(2, jnp.uint32))),
    ("key", lambda m: start(m.llada, key=jax.random.split(jax.random.key(0)))),
    ("int32[3]", lambda m: run(m.llada, prompt=PROMPT[0])),
    ("verifier", lambda m: run(m.qwen2)),
    ("key=", lambda m: run(m.llada, BlockSampler(Threshold(), 16, sampling=Sampling(0.5)))),
    ("key=", lambda m: sample(BlockSampler(LLaDA(16, remasking="random"), 16), m.llada.denoiser, PROMPT)),
    (
        "prompt_lengths",
        lambda m: next(stream(BlockSampler(Threshold(), 16), m.llada.denoiser, PROMPT, jnp.array([1, 2]))),
    ),
    ("length 99 of row 1", lambda m: run(m.llada, prompt=TWO, prompt_lengths=[3, 99])),
    ("length 17 of row 0", lambda m: run(m.llada, gen_lengths=jnp.array([17]))),
    ("token 5000 of row 1, position 2", lambda m: run(m.llada, prompt=TWO.at[1, 2].set(5000))),
    ("token -81", lambda m: sample(BlockSampler(EB(), 16), m.llada.denoiser, -PROMPT)),
    ("5000 tokens", lambda m: run(m.llada, prompt=jnp.ones((1, 5000), jnp.int32))),
    (
        "505 tokens",
        lambda m: run(m.llada, prompt=jnp.ones((2, 510), jnp.int32), prompt_lengths=jnp.array([9, 505])),
    ),
    ("prompt", lambda m: run(m.llada, prompt=[[1, 2], [3]])),
    ("rule.threshold", lambda m: run(m.llada, BlockSampler(Threshold(jnp.array([0.5, 0.9])), 16))),
    (
        "sampling.temperature",
        lambda m: run(m.llada, BlockSampler(EB(), 16, sampling=Sampling(jnp.ones(3))), key=jax.random.key(0)),
    ),
    ("key", lambda m: run(m.llada, key=jax.random.split(jax.random.key(0), 3))),
    ("model.denoiser", lambda m: sample_jit(BlockSampler(EB(), 16), m.llada, PROMPT)),
    ("FunctionDenoiser", lambda m: sample_jit(BlockSampler(EB(), 16), len, PROMPT)),
    ("SimpleNamespace", lambda m: sample_jit(BlockSampler(EB(), 16), SimpleNamespace(forward=len), PROMPT)),
    ("BlockSampler", lambda m: run(m.llada, Threshold())),
    ("rule", lambda m: run(m.llada, BlockSampler(EB, 16))),
    ("'eb'", lambda m: run(m.llada, PipelineSampler(16, 8, rule="eb"))),
    ("stop sequence", lambda m: stop_on(sequences=[[]], vocab_size=136)),
    ("stop string", lambda m: stop_on(strings=["a"], vocab_size=136)),
]

CALLS = [
    *LOAD,
    *NAMES,
    *((name, lambda m, rule=rule: BlockSampler(rule, 16, 8)) for name, rules in RULES.items() for rule in rules),
    *(
        (name, lambda m, field=field: BlockSampler(**{"rule": TopK(), "gen_length": 16, **field}))
        for field in FIELDS
        for name in field
    ),
    *((name, lambda m, option=option: generate(m.llada, "a", **option)) for option in OPTIONS for name in option),
    *PROMPTS,
    *BY_HAND,
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name[:20]}-{i}" for i, (name, _) in enumerate(CALLS)])
def test_calls(models, compiled, name, call):
    with refuses(name):
        call(models)
    assert not compiled


ON_LLADA = [
    ("'best'", ["--rule", "best"]),
    ("'big'", ["--cache", "big"]),
    ("'k'", ["--rule", "eb", "--k", "2"]),
    ("--speed=9", ["--speed=9"]),
    ("--thresh=1", ["--thresh=1"]),
    ("--indicator", ["--rule", "ni"]),
    ("--threshold", ["--threshold"]),
    ("'high'", ["--threshold", "high"]),
    ("'7.5'", ["--steps", "7.5"]),
    ("'many'", ["--gen-length", "many"]),
    ("threshold is nan", ["--threshold", "nan"]),
    ("alg 'x'", ["--rule", "dream", "--alg", "x"]),
    ("block_length", ["--block-length", "-4"]),
    ("gen_length", ["--gen-length", "0"]),
    ("temperature", ["--temperature", "nan"]),
    ("guidance", ["--cfg", "-1"]),
    ("seed", ["--seed", "4294967296"]),
    ("batch_size", ["--batch-size", "0"]),
    ("delay", ["--delay", "-1"]),
    ("token 136", ["--stop-id", "136"]),
    ("stop string", ["--stop", ""]),
    ("canvas_length", ["--canvas-length", "9"]),
    ("a gen_length of 480", ["--gen-length", "900"]),
    ("--prompts", ["--prompts", "-"]),  # and a prompt on the command line
]
COMMANDS = [
    ("--model", ["a"]),
    ("no/such/model", ["a", "--model", "no/such/model"]),
    ("llada-tiny", ["a", "--model", "UNCONVERTED"]),
    ("qwen2", ["a", "--model", "QWEN2"]),
    *((name, ["a", "--model", "LLADA", *options]) for name, options in ON_LLADA),
    ("empty", ["", "--model", "LLADA"]),
    ("mask token", ["a<|mask|>", "--model", "LLADA"]),
    ("vocabulary", ["a\udc80", "--model", "LLADA"]),
    ("empty", ["--model", "LLADA"]),  # as standard input is
    ("no/such/file", ["--model", "LLADA", "--prompts", "no/such/file"]),
    ("read", ["--model", "LLADA", "--prompts", "TMP"]),
    *(
        (name, ["--model", "LLADA", "--prompts", f"TMP/{name.split(' ')[0]}"])
        for name in ("bytes line 1", "broken.jsonl line 2", "keys.jsonl line 1", "number.jsonl line 1")
    ),
    ("deep.jsonl line 1", ["--model", "LLADA", "--prompts", "TMP/deep.jsonl"]),
    ("message 0", ["--model", "LLADA", "--prompts", "TMP/role.jsonl"]),
]
FILES = {
    "bytes": b"\xff\xfe\xfd",
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
    found = {"UNCONVERTED": models.unconverted, "LLADA": models.llada.folder, "QWEN2": models.qwen2.folder}
    return {word: str(place) for word, place in (found | {"TMP": folder}).items()}


@pytest.mark.parametrize(("name", "arguments"), COMMANDS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(COMMANDS)])
def test_commands(places, compiled, capsys, monkeypatch, name, arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for word, place in places.items():
        arguments = [place + text.removeprefix(word) if text.startswith(word) else text for text in arguments]
    assert cli.main(arguments) == 2
    assert name in one_error(capsys)
    assert not compiled
