"""Mixtures: how often each source's examples come, and that a mixture is a source like another."""

import collections
import json

import numpy as np
import pytest
from train_toys import Listed, Reverse, dllm_jax_example, run_config

import train
from dllm_jax import DllmError
from train.data.heldout import split_heldout
from train.data.mixture import Mixture, epochs_of
from train.setup import read_parts


def source(first, count):
    """Examples whose first token says which they are."""
    return Listed([dllm_jax_example([first + i], [i % 7, 20]) for i in range(count)])


def times(mixture):
    return collections.Counter(int(mixture.example(i).prompt_ids[0]) for i in range(len(mixture)))


def test_each_source_comes_as_often_as_it_should():
    mixture = Mixture([source(0, 10), source(100, 4), source(200, 8)], [1, 2.5, 0.25])
    found = times(mixture)
    assert len(mixture) == 10 + 10 + 2
    assert [found[i] for i in range(10)] == [1] * 10
    assert sorted(found[100 + i] for i in range(4)) == [2, 2, 3, 3]
    assert [200 + i for i in range(8) if found[200 + i]] == [200, 204]  # evenly spaced


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [0.2, 5]])
def test_weights_are_shares_of_the_examples(weights):
    sources = [source(0, 300), source(1000, 40)]
    mixture = Mixture(sources, epochs_of(weights, [300, 40]))
    found = times(mixture)
    share = sum(n for first, n in found.items() if first < 1000) / len(mixture)
    np.testing.assert_allclose(share, weights[0] / sum(weights), atol=0.01)
    assert len(found) == 340 and min(found.values()) == 1  # each comes, and no more often than it has to


def test_what_sources_know_a_mixture_knows(tmp_path):
    path = lambda name, count: lines(tmp_path / f"{name}.jsonl", range(count))
    entries = [entry(path("a", 12), epochs=1.5), entry(path("b", 5), epochs=2)]
    rows = read_parts(config(tmp_path, entries)).rows
    mixture = rows.source
    lengths = [len(e.prompt_ids) + len(e.answer_ids) for e in map(mixture.example, range(len(mixture)))]
    assert len(mixture) == 28 and mixture.lengths().tolist() == lengths and mixture.prompts().tolist() == [1] * 28
    assert mixture.name(18) == f"{tmp_path / 'b.jsonl'} line 1" and mixture.name(12) == f"{tmp_path / 'a.jsonl'} line 1"
    assert mixture.identity is not None
    kept, held = split_heldout(mixture, 0.3)
    tokens = lambda source: {tuple(source.example(i).answer_ids.tolist()) for i in range(len(source))}
    assert len(kept) + len(held) == 28 and not tokens(kept) & tokens(held)  # no example on both sides


def lines(path, numbers, **more):
    entries = ({"prompt": [i % 10], "answer": [i % 10, (i // 3) % 10, *[9] * (i % 5)], **more} for i in numbers)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def entry(path, **more):
    return {"source": "jsonl", "options": {"path": path}, **more}


def config(tmp_path, entries, name="run", **changes):
    data = {"source": "mixture", "options": {"sources": entries}, "length": 16, "pad": False}
    return run_config(tmp_path / name, data={**data, "cache": str(tmp_path / "cache")}, **changes)


def test_a_mixture_may_hold_another(tmp_path):
    path = lines(tmp_path / "a.jsonl", range(6))
    inner = {"source": "mixture", "options": {"sources": [entry(path, epochs=2)]}, "epochs": 0.5}
    assert len(read_parts(config(tmp_path, [inner, entry(path, epochs=1)])).rows.source) == 12


def test_a_run_of_a_mixture(tmp_path):
    """Of a file, a stream of text rows and an endless source's first examples; packed, and resumed."""
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(json.dumps({"ids": list(range(1 + i % 9))}) + "\n" for i in range(20)))
    entries = [
        entry(lines(tmp_path / "a.jsonl", range(30)), weight=2),
        entry(str(ids), weight=1),
        {"source": "train_toys:Reverse", "take": 9, "weight": 0.5},
    ]
    changes = {"optimizer__batch": 4, "data__pack": True, "steps": 4}
    of = lambda name, **more: config(tmp_path, entries, name, **{**changes, **more})
    whole = train.train(of("whole"))
    train.train(of("half", steps=2))
    assert train.train(of("half")).metrics["loss"] == whole.metrics["loss"] > 0
    data = json.loads((tmp_path / "whole/data.json").read_text())
    assert data["examples"] == 40 + 20 + 10 and data["rows"] < 45  # of 30, 20 and 9
    bucketed = config(tmp_path, entries, data__bucket=4, optimizer__batch=4)
    assert len({read_parts(bucketed).rows.width(position) for position in range(0, 59, 4)}) > 1


def test_bad_examples_of_a_part_are_named(tmp_path):
    good, bad = lines(tmp_path / "good.jsonl", range(9)), tmp_path / "bad.jsonl"
    lines(bad, range(3))
    bad.write_text(bad.read_text() + json.dumps({"prompt": [1], "answer": [2] * 40}) + "\n")
    entries = [entry(good, weight=1), entry(str(bad), weight=1)]
    with pytest.raises(DllmError, match=r"bad.jsonl line 4 has 41 tokens and data.length is 16"):
        train.train(config(tmp_path, entries))
    with pytest.warns(UserWarning, match="1 of 4 examples are bad: 1 too long"):
        train.train(config(tmp_path, entries, data__on_bad="drop", steps=1, checkpoint__every=1, optimizer__warmup=1))
    assert "bad.jsonl line 4" in (tmp_path / "run/dropped.txt").read_text()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "a mixture has data.options.sources, a list of tables"),
        ([{"source": "train_toys:Reverse", "weight": 1}], "has no end; .*`take`"),
        ([{"source": "jsonl", "weight": 1}], r"data.options.sources\[0\].options.path is not set"),
        ([{"source": "jsonl", "wight": 1}], r"data.options.sources\[0\] has no wight; it takes source, options"),
        ([{"source": "train_toys:finite", "weight": 1}, {"source": "train_toys:finite"}], "give all of them one"),
        ([{"source": "train_toys:finite", "weight": 1}, {"source": "train_toys:finite", "epochs": 1}], "all of them"),
        ([{"source": "train_toys:finite", "weight": 0}], r"sources\[0\].weight is 0; give a number above 0"),
        ([{"source": "none", "weight": 1}], "no data source is called 'none'"),
        ([{"source": "train_toys:finite", "weight": 1, "take": 21}], "take is 21, and the source has 20 examples"),
    ],
)
def test_bad_settings(tmp_path, entries, message):
    with pytest.raises(DllmError, match=message):
        train.train(config(tmp_path, entries))
    assert not (tmp_path / "run").exists() and Reverse().example(0) is not None
