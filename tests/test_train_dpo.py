"""DPO by VRPO's estimates: the formula, pairs as files hold them, and runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_text import CHATML, setup_of
from train_toys import DREAM, LLADA, Listed, batch_of_rows, dllm_jax_example, settings

import train
from dllm_jax import Denoiser, DllmError
from dllm_jax.checkpoints.checkpoint import save
from dllm_jax.params.specs import init_params
from train.config import DataPart
from train.data import Rows
from train.data.files import jsonl
from train.objectives.dpo import Dpo, DpoConfig, DpoPart
from train.settings import build_settings

T = 16
PAIRS = [([1, 2], [3, 4, 20], [5, 20]), ([6], [7, 20], [8, 9, 10, 11, 20]), ([2, 3, 4], [1, 1], [9])]


def pair(prompt, chosen, rejected):
    """As a data file's entry becomes an example."""
    answer = [*chosen, *prompt, *rejected]
    given = np.zeros(len(answer), bool)
    given[len(chosen) : len(chosen) + len(prompt)] = True
    return dllm_jax_example(prompt, answer, given)


def batch_of(pairs):
    rows = Rows(
        Listed([pair(*each) for each in pairs]), DataPart(length=T, pad=False, shuffle=False), "pairs", LLADA, 0
    )
    return batch_of_rows(rows, len(pairs))


def test_both_answers_have_a_canvas():
    part = DataPart(length=T, answer_length=5, shuffle=False)
    row = Rows(Listed([pair([1, 2], [3, 20], [4, 5, 20])]), part, "pairs", LLADA, 0)(0)
    assert row.tokens.tolist() == [1, 2, 3, 20, 20, 20, 20, 1, 2, 4, 5, 20, 20, 20, 20, 20] and row.length == 14
    assert np.flatnonzero(row.targets).tolist() == [2, 3, 4, 5, 6, 9, 10, 11, 12, 13]
    buckets = DataPart(length=T, answer_length=5, shuffle=False, bucket=7)
    assert Rows(Listed([pair([1, 2], [3, 20], [4, 5, 20])]), buckets, "pairs", LLADA, 0).width(0) == 14
    assert [x.tolist() for x in row.documents] == [[0] * 7 + [7] * 9, [7] * 7 + [14] * 9]


def model(config, seed):
    params = init_params(config, jax.random.key(seed), dtype="float32")
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


def bound(denoiser, prompt, answer, inputs, weights):
    """B of one answer, from a row that holds nothing else: float64 on the host."""
    tokens = np.array([[*prompt, *answer]])
    total = 0.0
    for masked, weight in zip(inputs, weights, strict=True):
        logits = np.asarray(denoiser(jnp.asarray(masked[None]), jnp.asarray([tokens.shape[1]])), np.float64)[0]
        log = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log -= logits.max(-1, keepdims=True)
        total += sum(weight[i] * log[i, token] for i, token in enumerate(tokens[0]) if weight[i])
    return total


@pytest.mark.parametrize("chunk", [0, 6])
@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_loss_is_the_formula(config, chunk):
    """Each answer alone after its prompt, under the masks that both models see."""
    learner, base, batch = model(config, 1), model(config, 2), batch_of(PAIRS)
    objective = Dpo(DpoPart(beta=0.1, samples=3, eps=0.3, sft=0.5, chunk=chunk))
    noised = objective.corrupt(jax.random.key(4), batch, learner)
    inputs, weights = np.asarray(noised.inputs), np.asarray(noised.weights)
    losses, margins, learned = [], [], []
    for row, (prompt, chosen, rejected) in enumerate(PAIRS):
        cut, end = len(prompt) + len(chosen), 2 * len(prompt) + len(chosen) + len(rejected)
        gained = []
        for answer, span in ((chosen, slice(0, cut)), (rejected, slice(cut, end))):
            own = [bound(each, prompt, answer, inputs[row, :, span], weights[row, :, span]) for each in (learner, base)]
            gained.append(own[0] - own[1])
            learned.append(-own[0] / (len(answer)))
        margins.append(0.1 * (gained[0] - gained[1]))
        losses.append(np.log1p(np.exp(-margins[-1])) + 0.5 * learned[-2])
    loss, metrics = jax.jit(lambda: objective.loss(learner, base, noised, groups=1))()
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)
    np.testing.assert_allclose(metrics["margin"], np.mean(margins), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["cross_entropy"], np.mean(learned[::2]), rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(np.array(margins) > 0))
    assert np.std(margins) > 1e-3
    assert not (noised.inputs == LLADA.mask_id)[~np.broadcast_to(batch.targets[:, None], inputs.shape)].any()


def test_a_model_that_is_its_reference_has_learned_nothing():
    """log 2, and a gradient that raises the better answer's bound and lowers the worse one's."""
    learner, batch = model(LLADA, 1), batch_of(PAIRS)
    objective = Dpo(DpoPart(samples=4, eps=0.3))
    noised = objective.corrupt(jax.random.key(4), batch, learner)
    loss = lambda params: objective.loss(Denoiser(LLADA, params), learner, noised)
    (value, before), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(learner.params)
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    after = loss({name: x - 1e-3 * gradient[name] for name, x in learner.params.items()})[1]
    np.testing.assert_allclose(before["margin"], 0, atol=1e-5)
    assert after["margin"] > 1e-4


def test_draws():
    """n shares of masks for each answer, evenly spread where they are stratified."""
    batch = batch_of([([1], [*range(7)], [*range(7)])] * 2000)
    of = lambda **options: Dpo(DpoPart(samples=4, eps=0.2, **options)).corrupt(
        jax.random.key(0), batch, model(LLADA, 1)
    )
    plain, spread = (np.asarray(of(stratified=stratified).weights) for stratified in (False, True))
    for weights in (plain, spread):
        np.testing.assert_allclose((weights > 0)[..., 1:8].mean(), 0.6, atol=0.01)
        np.testing.assert_allclose(weights[..., 1:8].sum((1, 2)).mean(), 7, rtol=0.02)  # unbiased: one for each token
    whole = (spread[..., 1:8] > 0).any(-1).all(-1)  # where each copy has a mask, which tells its t
    u = np.sort((1 / (4 * spread[whole][..., 1:8].max(-1)) - 0.2) / 0.8, axis=-1)
    np.testing.assert_allclose(np.diff(u, axis=-1), 0.25, atol=1e-5)


# Data and runs


def write(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def test_pairs_of_every_form_are_the_same(tmp_path):
    """Texts, messages with a prompt, and whole conversations, as the hub's preference data have them."""
    setup = setup_of(
        tmp_path, family="sdar-1.7b-chat", checkpoint="sdar-tiny", end="<|im_end|>", added=CHATML, length=64
    )
    said = lambda role, text: {"role": role, "content": text}
    ask, good, bad = said("user", "Why?"), said("assistant", "Because."), said("assistant", "No.")
    forms = [
        {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        {"prompt": "Why?", "chosen": [good], "rejected": [bad]},
        {"chosen": [ask, good], "rejected": [ask, bad]},
    ]
    source = jsonl(setup, path=write(tmp_path / "messages.jsonl", forms))
    first, *others = (source.example(index) for index in range(3))
    assert first.given.sum() == len(first.prompt_ids) > 3  # the prompt comes twice
    for other in others:
        assert first.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert first.answer_ids.tolist() == other.answer_ids.tolist()
    text = jsonl(setup, path=write(tmp_path / "texts.jsonl", [{"prompt": "Why? ", "chosen": "a", "rejected": "b"}]))
    assert text.example(0).answer_ids[-1] == 128


def config(tmp_path, entries, base, **changes):
    data = {"source": "jsonl", "options": {"path": write(tmp_path / "pairs.jsonl", entries)}, "length": T}
    values = settings(tmp_path / "run", data={**data, "cache": str(tmp_path / "cache")}, **changes)
    values["model"] = {"init": str(base)}
    return build_settings(DpoConfig, values)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save(folder, LLADA, init_params(LLADA, jax.random.key(0), dtype="float32").items())
    return folder


def entries(count=24):
    """The better answer repeats the prompt's digit, the worse one another."""
    return [{"prompt": [i % 10], "chosen": [i % 10] * 2, "rejected": [(i + 3) % 10] * 2} for i in range(count)]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_prefers_what_is_better(tmp_path, base, rank):
    """And a stopped one ends as one that was not; adapters and all weights."""
    changes = {"steps": 30, "optimizer__lr": 1e-2, "objective__samples": 4, "lora__rank": rank, "log__every": 30}
    changes |= {"checkpoint__every": 15, "data__heldout": 0.2, "watch__every": 30, "lora__targets": ["all-linear"]}
    whole = train.train(config(tmp_path, entries(), base, **changes))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    held = [line for line in lines if "heldout_loss" in line]
    assert abs(held[0]["heldout_margin"]) < 1e-5 and held[0]["heldout_loss"] == pytest.approx(np.log(2))
    assert whole.metrics["accuracy"] > 0.5 and whole.metrics["margin"] > 0.05
    (tmp_path / "again").mkdir()
    train.train(config(tmp_path / "again", entries(), base, **{**changes, "steps": 15, "watch__every": 15}))
    again = train.train(config(tmp_path / "again", entries(), base, **changes))
    assert again.started == 15


def test_a_mesh_changes_nothing(tmp_path, base):
    changes = {"steps": 2, "optimizer__warmup": 1, "checkpoint__every": 2, "log__every": 2, "optimizer__lr": 1e-2}
    metrics = []
    for mesh in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        folder = tmp_path / f"mesh{len(mesh)}"
        folder.mkdir()
        changes |= {"compute__mesh": mesh, "objective__chunk": 8}
        metrics.append(train.train(config(folder, entries(), base, **changes)).metrics)
    for name in ("loss", "margin", "chosen", "rejected", "cross_entropy", "grad_norm"):
        np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        ({"prompt": [1], "answer": [2]}, {}, "line 1 is no pair of answers to a prompt; give it prompt, chosen and"),
        ({"prompt": [], "chosen": [1], "rejected": [2]}, {}, "is no pair of answers to a prompt"),
        ({"prompt": [1], "chosen": [], "rejected": [2]}, {}, "is no pair of answers to a prompt"),
        (
            {"prompt": [1], "chosen": [2] * 9, "rejected": [3] * 9},
            {},
            "needs 20 positions for both answers and data.length is 16",
        ),
        (entries()[0], {"data__pad": True}, "with dpo the next answer begins there; set data.pad to false, or"),
        (
            entries()[0],
            {"data__pad": True, "data__answer_length": 1},
            "an answer of 2 tokens and data.answer_length is 1",
        ),
        (entries()[0], {"data__pack": True}, "train dpo takes one example a row"),
    ],
)
def test_bad_data_and_settings(tmp_path, base, entry, changes, message):
    with pytest.raises(DllmError, match=message):
        train.train(config(tmp_path, [entry], base, **changes))
    assert not (tmp_path / "run").exists()
