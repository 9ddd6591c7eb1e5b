"""A sampler's error on data: forced tokens change nothing else, parts equal a plain loop's, and theory holds."""

import csv
import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, assert_equal, one_error, refuses
from test_combinations import CACHES, CELLS, numbered
from test_engine import BLOCK, GEN, ROWS, first_layers, keys
from test_evals_tasks import config_for
from train_toys import DREAM, LLADA

import evals
from dllm_jax import DllmError, FunctionDenoiser, random_model
from dllm_jax.checkpoints import checkpoint
from dllm_jax.indicator import IndicatorConfig, init_indicator
from evals import __main__ as cli
from evals.decomposition import PARTS
from evals.sampler import parse_sampler
from evals.tasks import Example, Task, Verdict, make_task
from samplers import (
    APD,
    NI,
    BlockSampler,
    LeftRight,
    PipelineSampler,
    Remask,
    Renoise,
    Sampling,
    Smoothing,
    Threshold,
    TopK,
    sample_jit,
)
from samplers.caches import ExactCache
from samplers.config.registry import owners_of
from samplers.text.prompts import pad_prompts

BLOCKS = LLADA.replace(family="llada2", attention="block", block_length=4)
INDICATOR = init_indicator(IndicatorConfig(1, 8, 16, 16, 4, 2), jax.random.key(5))


def far_from_uniform(config):
    model = random_model(config, key=1)
    return dataclasses.replace(model, params={name: x * 25 if x.ndim > 1 else x for name, x in model.params.items()})


# Forced tokens -------------------------------------------------------------------------------------------------------


def check_own_tokens_again(denoiser, sampler, prompt, lengths, **options):
    """A sampler that is forced to write what it writes anyway does everything as before; other tokens are written as
    they are."""
    options = {"key": keys(len(lengths)), **options}
    plain = jax.device_get(sample_jit(sampler, denoiser, prompt, lengths, **options))
    forced = lambda target: dataclasses.replace(
        sampler, sampling=dataclasses.replace(sampler.sampling, target=jnp.asarray(target, jnp.int32))
    )
    again = jax.device_get(sample_jit(forced(plain.tokens), denoiser, prompt, lengths, **options))
    for field in dataclasses.fields(plain):
        assert_equal(getattr(again, field.name), getattr(plain, field.name), field.name)
    other = np.random.default_rng(0).integers(0, 20, plain.tokens.shape)
    found = jax.device_get(sample_jit(forced(other), denoiser, prompt, lengths, **options))
    written = found.decoded_at >= 0
    np.testing.assert_array_equal(found.tokens[written], other[written])
    assert written.all() and np.isfinite(found.logprobs).all()
    assert not np.allclose(found.logprobs, plain.logprobs)


@pytest.mark.parametrize(
    "cache, smooth", [("none", False), ("prefix", False), ("dual", False), ("vicinity", False), ("dual", True)]
)
def test_every_rule_and_cache_may_be_forced(llada_tiny, cache, smooth):
    denoiser = first_layers(llada_tiny, 1).denoiser
    prompt, lengths = pad_prompts(ROWS, 96)
    smoothing = Smoothing() if smooth else None
    for number in range(len(CELLS)):
        rule = numbered(number)
        sampler = BlockSampler(rule, GEN, BLOCK, CACHES[cache], smoothing, align_blocks=smooth)
        check_own_tokens_again(denoiser, sampler, prompt, lengths)


SHORT = np.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0], [3, 1, 4, 1, 5, 0]]), np.array([6, 3, 5])
LOOPS = {
    "threshold": (LLADA, BlockSampler(Threshold(0.5), 12, 4, CACHES["dual"])),
    "guidance": (DREAM, BlockSampler(Threshold(0.5), 12, 4, guidance=1.5)),
    "ni-ahead": (LLADA, BlockSampler(NI(INDICATOR, 0.6, 0.5, scope="rest"), 12, 4)),
    "ni-prefix": (LLADA, BlockSampler(NI(INDICATOR, 0.6, 0.5, scope="rest"), 12, 4, CACHES["prefix"])),
    "ni-block": (LLADA, BlockSampler(NI(INDICATOR, 0.6, 0.5, scope="block"), 12, 4, CACHES["dual"])),
    "d2f": (DREAM, PipelineSampler(12, 4, threshold=0.4)),
    "d2f-ni": (LLADA, PipelineSampler(12, 4, threshold=0.4, rule=NI(INDICATOR, 0.6, 0.5))),
    "d2f-blocks": (BLOCKS, PipelineSampler(12, 4, align_blocks=True, threshold=0.4, rule=NI(INDICATOR, 0.6, 0.5))),
    "blocks": (BLOCKS, BlockSampler(Threshold(0.5), 12, 4, ExactCache(), align_blocks=True)),
    "sub-blocks": (BLOCKS, BlockSampler(TopK(2), 12, 4, ExactCache(), align_blocks=True, sub_block_length=2)),
    "leftright": (DREAM, LeftRight(12, tokens_per_step=3, window=4, lookahead=6)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_may_be_forced(name):
    config, sampler = LOOPS[name]
    sampler = dataclasses.replace(
        sampler, **({"end_ids": jnp.zeros((0,), jnp.int32)} if name.startswith("d2f") else {})
    )
    check_own_tokens_again(far_from_uniform(config).denoiser, sampler, *map(jnp.asarray, SHORT))


def test_what_revises_is_not_forced(llada_tiny):
    forced = Sampling(target=jnp.zeros((1, 8), jnp.int32))
    with refuses("target", "revises"):
        BlockSampler(Remask(4), 8, sampling=forced)
    with refuses("target", "revises"):
        Renoise(8, block_length=8, sampling=forced)
    with refuses("apd", "target"):
        APD(None, 8, sampling=forced)


def test_a_target_is_no_option():
    assert "target" not in owners_of(BlockSampler, {"rule": "eb"})
    with refuses("target"):
        parse_sampler("eb:target=1")


# Against a plain loop ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Toy(Task):
    """Prompts and answers of random tokens, of any lengths; answers end at token 20, and not all at their last."""

    name = "toy"
    stops = True

    def example(self, split, index):
        draws = np.random.default_rng(index)
        answer = np.append(draws.integers(0, 20, 3 + 2 * (index % 5)), 20)
        return Example(draws.integers(0, 20, 2 + index % 5), answer)

    def verify(self, example, ids):
        return Verdict(False, False, False)

    def show(self, ids):
        return str(list(ids))

    prompt_width = 8
    answer_width = 13

    def bind(self, model):
        return self


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def by_hand(log_probabilities, target, counted, decoded_at, mask_id):
    """The parts of one answer in float64, one forward after another.

    Args:
        log_probabilities: (canvas tokens [G]) -> [G, V].
        target, counted, decoded_at: [G]; what was given has -1.
    """
    sums = dict.fromkeys(("marginal", "chain", "bound", "wrong_together", "wrong_one_by_one"), 0.0)
    for step in sorted({int(at) for at in decoded_at[counted]}):
        canvas = np.where(decoded_at < step, target, mask_id)
        among = [i for i in range(len(target)) if counted[i] and decoded_at[i] == step]
        best = lambda row: int(np.argmax(np.where(np.arange(len(row)) == mask_id, -np.inf, row)))
        logs = log_probabilities(canvas)
        entropies = [-(np.exp(logs[i]) * logs[i]).sum() for i in among]
        sums["bound"] += sum(entropies) - max(entropies)
        for i in among:
            sums["marginal"] -= logs[i][target[i]]
            sums["wrong_together"] += best(logs[i]) != target[i]
        while among:
            logs = log_probabilities(canvas)
            i = max(among, key=lambda i: (logs[i][best(logs[i])], -i))
            sums["chain"] -= logs[i][target[i]]
            sums["wrong_one_by_one"] += best(logs[i]) != target[i]
            canvas[i] = target[i]
            among.remove(i)
    return sums


def visible_by_hand(kind, length, prompt, end):
    """[length], how many positions each sees."""
    ends = {
        "full": lambda i: end,
        "causal": lambda i: i + 1,
        "blocks": lambda i: 4 * (i // 4 + 1),
        "after-prompt": lambda i: prompt if i < prompt else prompt + 4 * ((i - prompt) // 4 + 1),
    }[kind]
    return np.minimum([ends(i) for i in range(length)], end)


CASES = {
    "one": ("topk:k=1", LLADA, "full"),
    "four": ("topk:k=4", LLADA, "full"),
    "context": ("topk:k=3,canvas_length=30", LLADA, "full"),
    "dual": ("threshold:threshold=0.5,cache=dual,block_length=4", LLADA, "full"),
    "smoothing": ("threshold:threshold=0.5,smoothing=true", LLADA, "full"),
    "eb": ("eb:gamma=1.0", DREAM, "full"),
    "blocks": ("topk:k=2,block_length=4", BLOCKS, "blocks"),
    "d2f": ("d2f:block_length=4,threshold=0.3", LLADA, "after-prompt"),
    "leftright": ("leftright:tokens_per_step=3", DREAM, "full"),
    "causal": ("leftright", DREAM.replace(family="qwen2", attention="causal"), "causal"),
}
EXACT = set(CASES) - {"dual", "smoothing"}


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_a_plain_loop(name):
    spec, config, kind = CASES[name]
    model, task, n = far_from_uniform(config), Toy(), 5
    found = evals.decompose(model, task, spec, n=n, batch_size=3, progress=False)
    sampler = dataclasses.replace(parse_sampler(spec).with_options(ignore_eos=True).for_canvas(task).build(model))
    end_of_context = sampler.canvas_length or 0
    look = jax.jit(lambda tokens, visible: model.denoiser.logits(model.denoiser.forward(tokens, visible)[0]))
    for row in found.rows:
        example = task.example("test", row.index)
        prompt, length = len(example.prompt_ids), sampler.gen_length
        target = np.append(example.answer_ids, [20] * length)[:length].astype(np.int32)
        counted = np.arange(length) <= np.argmax(target == 20)
        forced = dataclasses.replace(sampler, sampling=Sampling(target=jnp.asarray(target[None])))
        padded = np.zeros((1, 8), np.int32)
        padded[0, :prompt] = example.prompt_ids
        result = jax.device_get(sample_jit(forced, model.denoiser, padded, jnp.asarray([prompt])))
        end = max(prompt + length, end_of_context)
        visible = visible_by_hand(kind, 32, prompt, end)[None].astype(np.int32)

        def log_probabilities(canvas, example=example, prompt=prompt, length=length, visible=visible):
            tokens = np.full((1, 32), model.config.mask_id, np.int32)
            tokens[0, : prompt + length] = np.concatenate([example.prompt_ids, canvas])
            return log_softmax(look(tokens, visible)[0, prompt : prompt + length])

        wanted = by_hand(log_probabilities, target, counted, result.decoded_at[0], model.config.mask_id)
        close = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
        close(row.model_error, wanted["chain"])
        close(row.joint_error, wanted["marginal"] - wanted["chain"])
        close(row.nats, -result.logprobs[0, counted].sum(dtype=np.float64))
        close(row.bound, wanted["bound"])
        assert row.wrong_together == wanted["wrong_together"] and row.wrong_one_by_one == wanted["wrong_one_by_one"]
        assert row.positions == counted.sum() and row.all_forwards == result.nfe[0]
        assert row.forwards == len(np.unique(result.decoded_at[0, counted]))
        assert sum(step.written for step in row.steps) == row.positions
        close(sum(step.joint_error for step in row.steps), row.joint_error)
        assert row.nats == pytest.approx(row.model_error + row.joint_error + row.approximation_error, rel=1e-12)
        if name in EXACT:
            assert abs(row.approximation_error) < 1e-2
    if name in ("one", "causal"):
        assert all(row.joint_error == 0 == row.bound for row in found.rows)
    if name not in EXACT:
        assert max(abs(row.approximation_error) for row in found.rows) > 0.1
    if name in ("four", "eb", "blocks", "d2f"):
        assert max(abs(row.joint_error) for row in found.rows) > 0.1
    for part in PARTS:
        assert getattr(found, part) == pytest.approx(np.mean([getattr(row, part) for row in found.rows]))


def test_a_batch_is_its_rows():
    model = far_from_uniform(LLADA)
    each = [
        evals.decompose(model, Toy(), "eb:gamma=1.0,cache=dual,block_length=4", n=5, batch_size=size, progress=False)
        for size in (1, 3)
    ]
    for one, *others in zip(*(found.rows for found in each), strict=True):
        for other in others:
            for name in (*PARTS, "forwards", "positions", "wrong_together", "wrong_one_by_one", "index"):
                assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-4, abs=1e-4), name


# A joint distribution that is known ----------------------------------------------------------------------------------

V = 3
"""Tokens 0 to V - 1, the mask V and the end V + 1; three positions."""
ASSIGNMENTS = np.array(list(itertools.product(range(V), repeat=3)))


def conditionals(joint, tokens, lengths):
    """The exact conditionals of a joint distribution, log p [V, V, V]: logits [B, 3, V + 2]."""
    logs = joint.reshape(-1)
    everywhere = (tokens[:, None] == ASSIGNMENTS) | (tokens[:, None] == V)  # [B, V^3, 3]
    found = []
    for i in range(3):
        others = everywhere[..., [j for j in range(3) if j != i]].all(axis=-1)
        each = [jnp.where(others & (ASSIGNMENTS[:, i] == v), logs, -jnp.inf) for v in range(V)]
        found.append(jnp.stack([jax.nn.logsumexp(x, axis=-1) for x in each], axis=-1))
    return jnp.pad(jnp.stack(found, axis=1), ((0, 0), (0, 0), (0, 2)), constant_values=-200.0)


def padded_conditionals(joint, tokens, lengths):
    """The same for sequences of any length, of which the first three positions count."""
    return jnp.pad(conditionals(joint, tokens[:, :3], lengths), ((0, 0), (0, tokens.shape[1] - 3), (0, 0)))


@dataclasses.dataclass(frozen=True)
class Enumerated(Toy):
    """Every sequence of three tokens."""

    name = "enumerated"
    stops = False
    answer_width = 3

    def example(self, split, index):
        return Example(np.zeros(0, int), ASSIGNMENTS[index])

    def count(self, split):
        return len(ASSIGNMENTS)


def entropy(p):
    p = p[p > 0]
    return -(p * np.log(p)).sum()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_joint_error_is_mutual_information_and_at_most_the_bound(k, seed):
    logs = np.random.default_rng(seed).normal(0, 2, (V, V, V))
    logs -= np.log(np.exp(logs).sum())
    p = np.exp(logs)
    denoiser = FunctionDenoiser(padded_conditionals, V, V + 1, jnp.asarray(logs, jnp.float32))
    config = LLADA.replace(vocab_size=V + 2, mask_id=V, eos_id=V + 1, pad_id=V + 1, bos_id=V, end_ids=(V + 1,))
    model = SimpleNamespace(config=config, denoiser=denoiser, params={"p": denoiser.params}, name="p", layout=None)
    found = evals.decompose(model, Enumerated(), f"topk:k={k}", batch_size=9, progress=False)
    weights = p.reshape(-1)
    np.testing.assert_allclose([row.model_error for row in found.rows], -np.log(weights), rtol=1e-4, atol=1e-4)
    expected = lambda name: sum(w * getattr(row, name) for w, row in zip(weights, found.rows, strict=True))
    singles = [entropy(p.sum(axis=tuple(j for j in range(3) if j != i))) for i in range(3)]
    if k == 3:
        assert expected("joint_error") == pytest.approx(sum(singles) - entropy(p), abs=1e-4)
        assert expected("bound") == pytest.approx(sum(singles) - max(singles), abs=1e-4)
    if k == 2:  # the two of which the model is surest
        sure = [p.sum(axis=tuple(j for j in range(3) if j != i)).max() for i in range(3)]
        last = int(np.argmin(sure))
        pair = [entropy(p.sum(axis=tuple(j for j in range(3) if j != i))) for i in range(3) if i != last]
        assert expected("joint_error") == pytest.approx(sum(pair) - entropy(p.sum(axis=last)), abs=1e-4)
    assert expected("bound") >= expected("joint_error") > (0 if k > 1 else -1e-6)
    assert expected("nats") == pytest.approx(entropy(p) + expected("joint_error"), abs=1e-4)
    assert max(abs(row.approximation_error) for row in found.rows) < 1e-4


# What is recorded ----------------------------------------------------------------------------------------------------

RESULTS = ROOT / "evals" / "results"


def test_the_page_quotes_what_was_measured():
    measured = {row["sampler"]: row for row in csv.DictReader((RESULTS / "decompose-long-problems/results.csv").open())}
    text = (ROOT / "docs" / "decompose.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| (.*\+-.*) \|$", text, re.MULTILINE)
    assert len(quoted) == 10
    for sampler, forwards, parts in quoted:
        row = measured[sampler]
        assert float(forwards) == pytest.approx(float(row["forwards"]), abs=0.05)
        for name, part in zip(PARTS[1:], parts.split(" | "), strict=True):
            value, error = map(float, part.split(" +- "))
            assert (value, error) == pytest.approx((float(row[name]), float(row[f"{name}_stderr"])), abs=0.0051)
    picture = (ROOT / "docs" / "images" / "decompose.png").read_bytes()
    assert picture == (RESULTS / "decompose-long-problems" / "decompose.png").read_bytes()


@pytest.mark.parametrize("name", ["decompose-long-problems", "decompose-sudoku"])
def test_recorded_parts_add_up(name):
    for row in csv.DictReader((RESULTS / name / "results.csv").open()):
        nats, *parts = (float(row[part]) for part in PARTS[:4])
        assert nats == pytest.approx(sum(parts), abs=1e-9)


# Bad input, and the command ------------------------------------------------------------------------------------------

SUDOKU = "sudoku:box_rows=2,box_columns=2"


@pytest.fixture(scope="module")
def sudoku():
    return far_from_uniform(config_for(make_task(SUDOKU)))


@pytest.mark.parametrize(
    "spec, names",
    [
        ("remask:steps=4", ["remask", "revises"]),
        ("edit", ["edit", "revises"]),
        ("topk:temperature=0.5", ["temperature", "leave it out"]),
        ("topk:fill_after_eos=true", ["fill_after_eos", "leave it out"]),
        ("topk:ignore_eos=true", ["ignore_eos", "leave it out"]),
        ("topk:gen_length=4", ["example 1", "6 tokens", "gen_length is 4"]),
        ("topk@elsewhere", ["topk", "model"]),
    ],
)
def test_what_cannot_be_decomposed_is_refused_in_one_sentence(spec, names):
    with refuses(*names):
        evals.decompose(far_from_uniform(LLADA), Toy(), spec, n=2, progress=False)


def test_stop_strings_are_refused():
    with refuses("stop", "leave it out"):
        evals.decompose(far_from_uniform(LLADA), Toy(), parse_sampler("topk").with_options(stop=["x"]), n=2)


def test_examples_need_a_reference():
    class Open(Toy):
        def example(self, split, index):
            return Example(np.array([1, 2]), np.zeros(0, int))

    with refuses("toy", "reference"):
        evals.decompose(far_from_uniform(LLADA), Open(), "topk", n=2, progress=False)


def test_texts_of_a_file_are_answers(llada_tiny, tmp_path):
    """Of a question with one target its tokens count, and an end token where there is room for one."""
    lines = [{"prompt": "1 + 1 =", "target": text} for text in ("two", "2", "one more than one")]
    file = tmp_path / "questions.jsonl"
    write = lambda lines: file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(lines)
    lengths = [len(llada_tiny.tokenizer.encode(line["target"], add_special_tokens=False)) for line in lines]
    longest = max(lengths)
    task = f"text:file={file},gen_length={longest}"
    found = evals.decompose(llada_tiny, task, "topk:k=2", progress=False)
    assert [row.positions for row in found.rows] == [min(length + 1, longest) for length in lengths]
    assert min(lengths) < longest and found.nats > 0
    write([*lines, {"prompt": "1 + 1 =", "target": ["2", "two"]}])
    with refuses("one right answer"):
        evals.decompose(llada_tiny, task, "topk:k=2", progress=False)


def test_logits_that_are_not_finite_are_refused():
    model = random_model(LLADA, key=1)
    broken = dataclasses.replace(model, params={name: x * jnp.nan for name, x in model.params.items()})
    with pytest.raises(DllmError, match="not finite"):
        evals.decompose(broken, Toy(), "topk:k=4", n=2, progress=False)


def test_what_is_given_does_not_count(sudoku):
    found = evals.decompose(sudoku, SUDOKU, "topk:k=3", n=4, batch_size=4, progress=False)
    for row in found.rows:
        example = make_task(SUDOKU).example("test", row.index)
        assert row.positions == (~example.given).sum() < len(example.given)
        assert row.forwards == row.all_forwards == -(-row.positions // 3)


def test_the_command(sudoku, tmp_path, capsys):
    checkpoint.save(tmp_path / "model", sudoku.config, sudoku.params.items())
    what = ["decompose", "--model", tmp_path / "model", "--task", SUDOKU, "--n", 3, "--out", tmp_path / "out"]
    arguments = [*map(str, what), "--sampler", "topk:k=1|3", "--sampler", "eb:gamma=1"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "eb:gamma=1\n" in printed and "3 samplers" in printed
    assert (tmp_path / "out" / "decompose.png").read_bytes().startswith(b"\x89PNG")
    summaries = json.loads((tmp_path / "out" / "results.json").read_text())["decompositions"]
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    steps = list(csv.DictReader((tmp_path / "out" / "steps.csv").open()))
    assert [row["sampler"] for row in rows] == ["topk:k=1", "topk:k=3", "eb:gamma=1"]
    one = evals.decompose(sudoku, SUDOKU, "topk:k=3", n=3, progress=False)
    for name, value in one.summary().items():
        if isinstance(value, float):
            assert float(rows[1][name] if name in rows[1] else summaries[1][name]) == pytest.approx(value, abs=1e-4)
    for row in rows:
        own = [step for step in steps if step["sampler"] == row["sampler"]]
        forwards = sum(int(step["forwards"]) for step in own)
        assert forwards / 3 == pytest.approx(float(row["forwards"]))
        joint = sum(int(step["forwards"]) * float(step["joint_error"]) for step in own) / 3
        assert joint == pytest.approx(float(row["joint_error"]), abs=1e-6)
    assert cli.main([*arguments, "--sampler", "remask"]) == 2
    assert "revises" in one_error(capsys)
    assert cli.main([*map(str, what)]) == 2
    assert "no sampler" in one_error(capsys)
