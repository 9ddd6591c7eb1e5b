"""Rows of several examples: none sees another, and a packed batch is its examples in rows of their own."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_block import FAST, SDAR, TWO, L, denoiser_of
from test_train_run import one_step
from test_train_text import setup_of
from train_toys import DREAM, LLADA, Listed, batch_of_rows, dllm_jax_example, run_config, settings

import train
from dllm_jax import Denoiser, DllmError
from train.config import DataPart
from train.data import Rows, Setup
from train.data.files import jsonl, text
from train.data.packing import Packing
from train.losses import Batch, Documents
from train.objectives.autoregressive import Autoregressive, AutoregressivePart
from train.objectives.block_diffusion import BlockDiffusion, BlockDiffusionConfig, BlockDiffusionPart
from train.objectives.masked_diffusion import MaskedDiffusion, MaskedDiffusionPart
from train.settings import build_settings
from train.setup import read_parts

T = 24
CAUSAL = LLADA.replace(family="qwen2", attention="causal", shift=True, qkv_bias=True, mask_id=None)
OBJECTIVES = {
    "llada": (LLADA, MaskedDiffusion(MaskedDiffusionPart(eps=0.3))),
    "dream": (DREAM, MaskedDiffusion(MaskedDiffusionPart(eps=0.3))),
    "annealed": (DREAM, MaskedDiffusion(MaskedDiffusionPart(eps=0.3, anneal_attention=5))),
    "smoothing": (LLADA, MaskedDiffusion(MaskedDiffusionPart(eps=0.3, smoothing=0.5))),
    "causal": (CAUSAL, Autoregressive(AutoregressivePart())),
    "sdar": (SDAR, BlockDiffusion(BlockDiffusionPart(low=0.3, loss="bound", noise="sequence"))),
    "fast-dllm-v2": (FAST, BlockDiffusion(BlockDiffusionPart(low=0.3, high=0.9, complementary=True, fill="mask"))),
    "annealed-blocks": (FAST, BlockDiffusion(BlockDiffusionPart(low=0.3, anneal_attention=5))),
    "in-flight": (TWO, BlockDiffusion(BlockDiffusionPart(low=0.3, complementary=True, in_flight=2))),
}


def examples(count=6, longest=11):
    """Examples of 2 to 11 tokens, with prompts of 0 to 3."""
    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(0, 20, size)
    return [dllm_jax_example(draw(i % 4), draw(2 + (5 * i) % (longest - 4))) for i in range(count)]


def packed_rows(config, source, in_flight=1):
    part = DataPart(length=T, pad=False, pack=True, shuffle=False)
    return Rows(Listed(source), part, "sft", config, seed=0, in_flight=in_flight)


def apart(noised):
    """The same with every document in a row of its own."""
    first, end, spans = *map(np.asarray, noised.documents), []
    for row, length in enumerate(np.asarray(noised.lengths)):
        starts = np.unique(first[row, :length])
        spans += [(row, start, end[row, start]) for start in starts]

    def cut(x):
        pad = lambda part: np.pad(part, [*[(0, 0)] * (part.ndim - 1), (0, T - part.shape[-1])])
        return jnp.asarray(np.stack([pad(np.asarray(x)[row][..., start:stop]) for row, start, stop in spans]))

    lengths = jnp.asarray([stop - start for _, start, stop in spans], jnp.int32)
    fields = {name: cut(x) for name, x in noised._asdict().items() if x is not None and np.ndim(x) > 1}
    for name in ("alpha", "ahead"):
        if getattr(noised, name, None) is not None:
            fields[name] = jnp.asarray([getattr(noised, name)[row] for row, *_ in spans])
    nothing = {name: None for name in ("documents", "examples") if hasattr(noised, name)}
    return noised._replace(**{**fields, "lengths": lengths, **nothing})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_packed_batch_is_its_examples_in_rows_of_their_own(name):
    """The same masks, the same loss and gradient."""
    config, objective = OBJECTIVES[name]
    denoiser = denoiser_of(config)
    batch = batch_of_rows(packed_rows(config, examples(), objective.in_flight), 2)
    assert len(np.unique(np.asarray(batch.documents.first[0]))) > 1
    assert (np.asarray(batch.documents.first) % ((config.block_length or 1) * objective.in_flight) == 0).all()
    noised = objective.at_step(objective.corrupt(jax.random.key(2), batch, denoiser), jnp.int32(2))
    alone = apart(noised)
    assert len(alone.lengths) == 6 and int(jnp.sum(alone.weights > 0)) == int(jnp.sum(noised.weights > 0)) > 5

    def gradient(noised):
        loss = lambda params: objective.loss(Denoiser(config, params), denoiser, noised)[0]
        return jax.jit(jax.value_and_grad(loss))(denoiser.params)

    (loss, found), (wanted_loss, wanted) = gradient(noised), gradient(alone)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert wanted_loss > 0.5
    for parameter in wanted:
        np.testing.assert_allclose(found[parameter], wanted[parameter], rtol=1e-3, atol=1e-5, err_msg=parameter)


@pytest.mark.parametrize("config", [LLADA, DREAM, CAUSAL, SDAR], ids=lambda config: config.family)
def test_no_document_sees_another(config):
    denoiser, batch = denoiser_of(config), batch_of_rows(packed_rows(config, examples()), 2)
    first = np.asarray(batch.documents.first[0])
    middle = np.unique(first)[1]

    def hidden(tokens):
        found, *_ = denoiser.forward_with_routing(tokens, batch.documents.end, None, since=batch.documents.first)
        return np.asarray(found[0])

    changed = batch.tokens.at[0].set(jnp.where(first == middle, (batch.tokens[0] + 1) % 20, batch.tokens[0]))
    before, after = hidden(batch.tokens), hidden(changed)
    shown = first if not config.shift else np.concatenate((first[:1], first[:-1]))  # a shifted entry is the one before
    np.testing.assert_array_equal(before[shown != middle], after[shown != middle])
    assert np.abs(before - after)[shown == middle].max() > 1e-3


def test_documents_have_masks_of_their_own():
    """Each document's probability is uniform, and those of a row's documents are independent."""
    rows, width = 4000, 16
    first = jnp.broadcast_to(jnp.where(jnp.arange(width) < 8, 0, 8), (rows, width))
    batch = Batch(
        jnp.zeros((rows, width), jnp.int32),
        jnp.ones((rows, width), bool),
        jnp.full(rows, width),
        None,
        Documents(first, first + 8),
    )
    for stratified in (False, True):
        objective = MaskedDiffusion(MaskedDiffusionPart(eps=0.25, stratified=stratified))
        noised = objective.corrupt(jax.random.key(0), batch, Denoiser(LLADA, {}))
        weights = np.asarray(noised.weights).reshape(rows, 2, 8)
        chosen = (weights > 0).any(-1).all(-1)
        share = 1 / (8 * weights[chosen].max(-1))  # t, of documents with a mask: more often where it is large
        assert share.min() >= 0.25 - 1e-6 and share.max() <= 1 + 1e-6
        masked = (weights > 0).mean(-1)
        np.testing.assert_allclose(masked.mean(0), 0.625, atol=0.02)
        assert abs(np.corrcoef(masked[:, 0], masked[:, 1])[0, 1]) < 0.06
        assert noised.examples.tolist() == [2] * rows


def test_pretraining_counts_positions_alike():
    """Each row once, whatever its documents' lengths."""
    batch = batch_of_rows(packed_rows(LLADA, examples()), 2)
    noised = Autoregressive(AutoregressivePart(kind="pretrain")).corrupt(None, batch, Denoiser(CAUSAL, {}))
    weights = np.asarray(noised.weights)
    assert noised.examples is None
    for row in weights:
        np.testing.assert_allclose(row[row > 0], 1 / (row > 0).sum())


# Which examples stand together


@pytest.mark.parametrize(("width", "align"), [(32, 1), (32, 8), (96, 32)])
def test_packing(width, align):
    rng = np.random.default_rng(width)
    lengths = rng.integers(0, 2 * width, 500)
    packing = Packing(lengths, width, align)
    pieces = [packing.row(number) for number in range(len(packing))]
    up = lambda size: -(-size // align) * align
    assert all(0 < sum(up(p.end - p.start) for p in row[:-1]) + row[-1].end - row[-1].start <= width for row in pieces)
    taken = sorted((p.example, p.start, p.end) for row in pieces for p in row)
    for example, length in enumerate(lengths):
        spans = [(start, end) for number, start, end in taken if number == example]
        assert [0, *(end for _, end in spans)][: len(spans)] == [start for start, _ in spans]
        assert (spans[-1][1] if spans else 0) == length
    np.testing.assert_allclose(packing.padding, 1 - lengths.sum() / (width * len(packing)))
    assert packing.padding < 0.1 + (align > 1) * 0.2
    assert len(packing) >= np.ceil(lengths.sum() / width)


def test_packing_fills_rows_that_can_be_full():
    assert len(Packing(np.array([7, 1, 5, 3, 2, 6]), 8)) == 3
    assert [len(Packing(np.array(sizes), 8)) for sizes in ([], [8], [0, 0], [9])] == [0, 1, 0, 2]
    groups = Packing(np.array([1, 13, 4, 7, 14]), 14, align=4)  # the last group of a row is not whole
    assert [[piece.example for piece in groups.row(number)] for number in range(len(groups))] == [[1], [4], [0, 3], [2]]


def test_rows_of_several_examples():
    source = [dllm_jax_example([1, 2], [3, 4, 20]), dllm_jax_example([5], [6]), dllm_jax_example([], list(range(8)))]
    rows = Rows(Listed(source), DataPart(length=16, pad=False, pack=True, shuffle=False), "sft", LLADA, seed=0)
    row = rows(0)
    assert rows.count == 1 and row.tokens.tolist() == [1, 2, 3, 4, 20, 5, 6, *range(8), 20] and row.length == 15
    assert np.flatnonzero(row.targets).tolist() == [2, 3, 4, 6, *range(7, 15)]
    first, end = row.documents
    assert first.tolist() == [0] * 5 + [5] * 2 + [7] * 9 and end.tolist() == [5] * 5 + [7] * 2 + [15] * 9
    np.testing.assert_allclose(rows.padding, 1 / 16)
    part = DataPart(length=24, answer_length=8, pack=True, shuffle=False)
    row = Rows(Listed(source[:2]), part, "sft", LLADA, seed=0)(0)  # each with its canvas
    assert row.tokens.tolist() == [1, 2, 3, 4, *[20] * 6, 5, 6, *[20] * 12] and row.length == 19
    assert np.flatnonzero(row.targets).tolist() == [*range(2, 10), *range(11, 19)]
    row = Rows(Listed(source), DataPart(length=24, pad=False, pack=True, shuffle=False), "sft", SDAR, seed=0)(0)
    assert np.unique(row.documents[0]).tolist() == [0, 8, 12] and row.length == 20  # in whole blocks


# Runs


def lines(tmp_path, count=40):
    """JSON lines of documents of 1 to 40 tokens."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"ids": [i % 10] * (1 + i % 40)}) + "\n" for i in range(count)))
    return {"source": "jsonl", "options": {"path": str(path)}, "cache": str(tmp_path / "cache")}


def packed(tmp_path, **changes):
    data = {**lines(tmp_path), "length": 16, "pack": True, "pad": False}
    return {"data": data, "objective__kind": "pretrain", "optimizer__batch": 4, **changes}


def test_a_run_of_packed_documents_resumes(tmp_path):
    """Long documents are cut, an end token stands after each, and a stopped run ends as one that was not."""
    changes = packed(tmp_path, data__heldout=0.1, watch__every=3, watch__rows=8)
    whole = train.train(run_config(tmp_path / "whole", **changes))
    assert whole.metrics["loss"] > 0 and "heldout_loss" in (tmp_path / "whole/metrics.jsonl").read_text()
    train.train(run_config(tmp_path / "half", **{**changes, "steps": 3}))
    half = train.train(run_config(tmp_path / "half", **changes))
    assert half.started == 3 and half.metrics["loss"] == whole.metrics["loss"]
    about = json.loads((tmp_path / "whole/data.json").read_text())
    assert 0 < about["padding"] < 0.2 and about["rows"] > 20


def test_a_mesh_changes_nothing_of_packed_rows(tmp_path):
    data = packed(tmp_path)
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    found, wanted = (one_step(run_config(tmp_path, compute__mesh=axes, **data)) for axes in (mesh, {}))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_texts_are_documents(tmp_path):
    """Instead of one stream, with an end token after each; answers stay as they are."""
    in_words = dataclasses.replace(setup_of(tmp_path), pack=True)
    (tmp_path / "book.txt").write_text("one\n\ntwo, three\n\nfour")
    found = text(in_words, path=str(tmp_path / "book.txt"), separator="\n\n")
    assert found.lengths().tolist() == [4, 11, 5] and found.example(0).answer_ids[-1] == in_words.config.eos_id
    setup = Setup(LLADA, None, 16, cache=tmp_path / "cache", pack=True)
    path = lines(tmp_path)["options"]["path"]
    assert jsonl(setup, path=path).example(2).answer_ids.tolist() == [2, 2, 2, 20]
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": [1], "answer": [2, 3]}\n')
    assert jsonl(setup, path=str(answers)).example(0).answer_ids.tolist() == [2, 3]  # as without packing
    with pytest.raises(DllmError, match="data.options.concatenate joins them; set one"):
        jsonl(setup, path=path, concatenate=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__bucket": 8}, "data.pack fills rows with whole examples; set data.bucket to 0"),
        ({"data__random_length": 0.5, "objective__kind": "pretrain"}, "set data.random_length to 0"),
        ({"data__pad": True}, "set data.pad to false, or data.answer_length"),
        ({}, "the source is endless; set it to false"),
    ],
)
def test_bad_settings(tmp_path, changes, message):
    with pytest.raises(DllmError, match=message):
        train.train(run_config(tmp_path / "run", **{"data__pack": True, "data__pad": False, **changes}))
    assert not (tmp_path / "run").exists()


def test_an_objective_of_single_examples_refuses(tmp_path):
    from train.objectives.d2f import D2FConfig

    values = settings(tmp_path / "run", data__pack=True, data__pad=False, objective__target="data")
    with pytest.raises(DllmError, match="train d2f takes one example a row; set data.pack to false"):
        train.train(build_settings(D2FConfig, values))


def test_blocks_begin_with_documents(tmp_path):
    """A block diffusion run of packed documents; all of its blocks are those of one document."""
    from train_toys import model_fields

    changes = packed(tmp_path, model__config=model_fields(SDAR, "sdar-8b-chat"), model__published="sdar-8b-chat")
    config = build_settings(BlockDiffusionConfig, settings(tmp_path / "run", **changes, steps=2))
    assert train.train(config).metrics["loss"] > 0
    assert dataclasses.asdict(config)["data"]["pack"] and L == 4
    for in_flight in (1, 2):  # and groups of blocks do
        changed = dataclasses.replace(config, objective=BlockDiffusionPart(kind="pretrain", in_flight=in_flight))
        rows = read_parts(changed).rows
        first = np.concatenate([rows(number).documents[0] for number in range(rows.count)])
        assert (first % (L * in_flight) == 0).all() and first.max() == 16 - L * in_flight
