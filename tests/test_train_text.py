"""Real text: what becomes of files, columns and conversations; the cache; the order of rows; batches of one length."""

import collections
import dataclasses
import itertools
import json
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDENS
from train_toys import LLADA, Listed, Reverse, dllm_jax_example, model_fields, of_lengths, run_config, settings

import dllm_jax
import train
from dllm_jax import Denoiser, DllmError
from dllm_jax.params.specs import init_params
from dllm_jax.text.tokenizer import encode_text, load_tokenizer
from train.config import DataPart
from train.data import Rows, Setup, cache, checks
from train.data.checks import drop_bad_examples
from train.data.files import arrayrecord, datasets, jsonl, parquet, text
from train.data.fingerprint import data_fingerprint
from train.data.heldout import heldout_draw, split_heldout
from train.data.order import permute
from train.losses import Batch
from train.objectives import OBJECTIVES, objective_of
from train.settings import build_settings
from train.setup import read_parts

PAIRS = [{"question": f"{i} + {i}?", "solution": str(2 * i), "source": "sums"} for i in range(60)]
COLUMNS = {"prompt": "question", "answer": "solution"}


def setup_of(folder, *, family="llada-8b-base", checkpoint="llada-tiny", added=(), end=None, length=16):
    """A tokenizer of ASCII characters, with more special tokens; `end` is the one that ends a turn."""
    config = dllm_jax.published_config(family).replace(
        vocab_size=140, eos_id=128, pad_id=128, mask_id=129, bos_id=None, end_ids=(128,)
    )
    tokenizer = load_tokenizer(GOLDENS / "checkpoints" / checkpoint, config)
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    if end:
        config = config.replace(end_ids=(128, tokenizer.convert_tokens_to_ids(end)))
    return Setup(config, tokenizer, length, cache=folder / "cache")


@pytest.fixture
def setup(tmp_path):
    return setup_of(tmp_path)


def write_lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def tokens_of(source):
    """Every example as (prompt, answer, given)."""
    examples = [source.example(i) for i in range(len(source))]
    return [
        (e.prompt_ids.tolist(), e.answer_ids.tolist(), None if e.given is None else e.given.tolist()) for e in examples
    ]


def shown(setup, example):
    """The text of an example, what is learned in brackets."""
    parts, learned = [], False
    given = np.zeros(len(example.answer_ids), bool) if example.given is None else example.given
    given = [*[True] * len(example.prompt_ids), *given, True]
    for known, token in zip(given, [*example.prompt_ids, *example.answer_ids, None], strict=True):
        if known == learned:
            parts.append("]" if learned else "[")
        learned = not known
        parts.append("" if token is None else setup.tokenizer.decode([token]))
    return "".join(parts)


# What files hold


def test_every_format_gives_the_same_examples(tmp_path, setup):
    sources = {"jsonl": jsonl(setup, path=write_lines(tmp_path / "pairs.jsonl", PAIRS), columns=COLUMNS)}
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(PAIRS)
    for number, part in enumerate((table.slice(0, 25), table.slice(25))):
        tables.write_table(part, tmp_path / f"pairs-{number}.parquet", row_group_size=7)
    sources["parquet"] = parquet(setup, path=str(tmp_path), columns=COLUMNS)
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    library.Dataset.from_list(PAIRS).save_to_disk(tmp_path / "saved")
    sources["saved"] = datasets(setup, path=str(tmp_path / "saved"), columns=COLUMNS)
    wanted = [
        (encode_text(setup.tokenizer, pair["question"]), [*encode_text(setup.tokenizer, pair["solution"]), 128], None)
        for pair in PAIRS
    ]
    for name, source in sources.items():
        assert tokens_of(source) == wanted, name
    assert sources["jsonl"].name(3) == f"{tmp_path / 'pairs.jsonl'} line 4"
    assert sources["parquet"].name(25) == f"{tmp_path / 'pairs-1.parquet'} row 1"
    assert sources["jsonl"].lengths().tolist() == [len(p) + len(a) for p, a, _ in wanted]


def test_splits_of_data_sets(tmp_path, setup, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    library.disable_progress_bars()
    parts = {"train": library.Dataset.from_list(PAIRS[:9]), "test": library.Dataset.from_list(PAIRS[9:12])}
    library.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    count = lambda folder, **options: len(datasets(setup, path=str(tmp_path / folder), columns=COLUMNS, **options))
    assert (count("saved"), count("saved", split="test")) == (9, 3)
    with pytest.raises(DllmError, match="'dev'.*data.options.split"):
        count("saved", split="dev")
    (tmp_path / "repository").mkdir()
    write_lines(tmp_path / "repository" / "train.jsonl", PAIRS)
    assert (count("repository"), count("repository", split="train[:5]")) == (60, 5)
    with pytest.raises(DllmError, match="is no data set that datasets can load"):
        count("repository", split="dev")


def test_array_records(tmp_path, setup):
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, part in enumerate((PAIRS[:33], PAIRS[33:])):
        writer = ArrayRecordWriter(str(tmp_path / f"pairs-{number}.array_record"), "group_size:1")
        for pair in part:
            writer.write(json.dumps(pair).encode())
        writer.close()
    found = arrayrecord(setup, path=str(tmp_path), columns=COLUMNS)
    lines = jsonl(setup, path=write_lines(tmp_path / "pairs.jsonl", PAIRS), columns=COLUMNS)
    assert tokens_of(found) == tokens_of(lines) and found.name(33).endswith("pairs-1.array_record record 1")
    (tmp_path / "broken.array_record").write_bytes(b"no records")
    with pytest.raises(DllmError, match="broken.array_record"):
        arrayrecord(setup, path=str(tmp_path / "broken.array_record"))


def test_missing_packages_are_named(monkeypatch, setup):
    for source, module in ((parquet, "pyarrow.parquet"), (datasets, "datasets")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(DllmError, match=r"dllm_jax\[data\]"):
            source(setup, path="x")


def test_mistakes_name_columns_and_lines(tmp_path, setup):
    path = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(DllmError, match="line 1.*'question'"):
        jsonl(setup, path=path)
    with pytest.raises(DllmError, match="line 1.*'answers'"):
        jsonl(setup, path=path, columns={"prompt": "question", "answer": "answers"})
    with pytest.raises(DllmError, match="'target'"):
        jsonl(setup, path=path, columns={"target": "solution"})
    bad = [{"text": "ok"}, {"text": "ß"}, {"text": 3}, {"text": "ok"}, {"messages": "Hi"}]
    source = jsonl(setup, path=write_lines(tmp_path / "bad.jsonl", bad))
    assert [answer for _, answer, _ in tokens_of(source)] == [[111, 107]] * 2
    assert [fault.split(": ")[0][-6:] for fault in source.faults] == ["line 2", "line 3", "line 5"]
    assert "'ß' cannot be expressed in this vocabulary" in source.faults[0]
    long = jsonl(setup, path=write_lines(tmp_path / "long.jsonl", [{"text": "ok"}, {"text": "much " * 9}]))
    with pytest.raises(DllmError, match="long.jsonl line 2"):
        Rows(long, DataPart(length=16, shuffle=False), "sft", setup.config, 0)(1)
    canvas = dataclasses.replace(setup, canvas=9)
    path = write_lines(
        tmp_path / "fits.jsonl", [{"prompt": "x" * n, "answer": "y" * m} for n, m in ((7, 8), (7, 9), (8, 1), (20, 1))]
    )
    assert len(jsonl(setup, path=path, drop_long=True)) == 2 and len(jsonl(canvas, path=path, drop_long=True)) == 1
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"no table")
    with pytest.raises(DllmError, match="x.parquet"):
        parquet(setup, path=str(tmp_path))


def test_packing_loses_nothing_but_the_last_row(tmp_path, setup):
    documents = ["one", "two, rather longer than a row", "", "three"]
    stream = [i for d in documents for i in [*encode_text(setup.tokenizer, d), 128]]
    path = write_lines(tmp_path / "documents.jsonl", [{"text": document} for document in documents])
    source = jsonl(setup, path=path, concatenate=True)
    assert len(source) == len(stream) // 16
    assert [i for row in tokens_of(source) for i in row[1]] == stream[: len(source) * 16]
    (tmp_path / "documents.txt").write_text("--".join(documents))
    stream = [i for d in documents if d for i in [*encode_text(setup.tokenizer, d), 128]]
    source = text(setup, path=str(tmp_path), separator="--")
    assert [i for row in tokens_of(source) for i in row[1]] == stream[: len(source) * 16]
    # Pairs have an end token of their own already, and prompts in packed rows are given.
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "abc", "answer": "de"}] * 8)
    row = jsonl(setup, path=path, concatenate=True).example(0)
    assert row.answer_ids.tolist() == [97, 98, 99, 100, 101, 128] * 2 + [97, 98, 99, 100]
    assert row.given.tolist() == [True, True, True, False, False, False] * 2 + [True, True, True, False]


# Conversations

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Yes? "},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
CHATML = ("<|im_start|>", "<|im_end|>")
ROLES = ("<role>", "</role>", "<|role_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
HELPFUL = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
TEMPLATES = {
    "llada": (
        {"end": "<|eot_id|>", "added": HEADERS},
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "[Yes?<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "[So long<|eot_id|>]",
    ),
    "qwen2": (
        {"family": "qwen2.5-0.5b", "checkpoint": "qwen2-tiny", "end": "<|im_end|>", "added": CHATML},
        HELPFUL + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes?<|im_end|>]"
        "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[So long<|im_end|>]",
    ),
    "dream": (
        {"family": "dream-7b-base", "checkpoint": "dream-tiny", "end": "<|im_end|>", "added": CHATML},
        HELPFUL + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes?<|im_end|>]"
        "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[So long<|im_end|>]",
    ),
    "sdar": (
        {"family": "sdar-1.7b-chat", "checkpoint": "sdar-tiny", "end": "<|im_end|>", "added": CHATML},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes?<|im_end|>]"
        "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[So long<|im_end|>]",
    ),
    # LLaDA2's generations stop at its end of text alone.
    "llada2": (
        {"family": "llada2.0-mini", "checkpoint": "llada2-tiny", "added": ROLES},
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>[Yes?<|role_end|>]"
        "<role>HUMAN</role>Bye<|role_end|><role>ASSISTANT</role>[So long<|role_end|><|endoftext|>]",
    ),
    # Where the template's words are no tokens, nothing but the model's own end ends a turn.
    "characters": (
        {"family": "sdar-1.7b-chat", "checkpoint": "sdar-tiny"},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes?]<|im_end|>"
        "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[So long<|endoftext|>]",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_behind_a_message_is_learned(name, tmp_path):
    made, wanted = TEMPLATES[name]
    setup = setup_of(tmp_path, **made)
    path = write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}])
    example = jsonl(setup, path=path).example(0)
    assert shown(setup, example) == wanted
    # Each turn by itself: the prompt is what sampling asks for, and nothing comes behind.
    first, second = tokens_of(jsonl(setup, path=path, turns="each"))
    assert first[0] == dllm_jax.text.tokenizer.encode_chat(setup.tokenizer, TALK[:1])
    stripped = [{**message, "content": message["content"].strip()} for message in TALK[:3]]
    assert second[0] == dllm_jax.text.tokenizer.encode_chat(setup.tokenizer, stripped)
    assert first[2] is None and second[2] is None
    assert tokens_of(jsonl(setup, path=path, turns="last")) == [second]
    assert (second[0] + second[1])[len(second[0]) :] == [*example.prompt_ids, *example.answer_ids][len(second[0]) :]
    row = Rows(jsonl(setup, path=path), DataPart(length=400, shuffle=False), "sft", setup.config, 0)(0)
    learned = setup.tokenizer.decode(row.tokens[row.targets & (np.arange(400) < len(second[0] + second[1]))])
    assert learned == "".join(part.split("]")[0] for part in wanted.split("[")[1:])


def test_a_question_and_its_answer_are_a_conversation(tmp_path):
    setup = setup_of(tmp_path, end="<|eot_id|>", added=HEADERS)
    named = {"user": "question", "assistant": "solution"}
    row = {"question": TALK[0]["content"], "solution": TALK[1]["content"], "more": 3}
    pair = jsonl(setup, path=write_lines(tmp_path / "pair.jsonl", [row]), columns=named)
    talk = jsonl(setup, path=write_lines(tmp_path / "talk.jsonl", [{"messages": TALK[:2]}]))
    assert tokens_of(pair) == tokens_of(talk)
    with pytest.raises(DllmError, match="line 1: .*content"):
        jsonl(setup, path=write_lines(tmp_path / "pair.jsonl", [row | {"solution": None}]), columns=named)


def test_conversations_that_cannot_be_learned(tmp_path):
    setup = setup_of(tmp_path, end="<|eot_id|>", added=HEADERS)
    for messages, sentence in (
        (TALK[:1], "line 1: the last message is the user's; end with one of the assistant"),
        ([], "line 1: the conversation has no messages"),
        ([{"role": "bot", "content": "x"}], "line 1: message 0 has the unknown role 'bot'"),
    ):
        with pytest.raises(DllmError, match=sentence):
            jsonl(setup, path=write_lines(tmp_path / "talk.jsonl", [{"messages": messages}]))
    path = write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}])
    setup.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] if loop.last else '-' }}{% endfor %}"
    with pytest.raises(DllmError, match="leaves out or rewrites messages of the assistant"):
        jsonl(setup, path=path)
    setup.tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DllmError, match="data.options.turns"):
        jsonl(setup, path=path)
    assert len(jsonl(setup, path=path, turns="each")) == 2


# The cache


@pytest.fixture
def small_batches(monkeypatch):
    """Texts are encoded few at a time; the list of how many at a time."""
    encoded, encode = [], cache.encode_texts
    monkeypatch.setattr(cache, "_CHARACTERS", 700)
    monkeypatch.setattr(cache, "encode_texts", lambda *args: encoded.append(len(args[1])) or encode(*args))
    return encoded


def files_of(folder):
    (found,) = folder.glob("cache/*")
    return {name: (found / name).read_bytes() for name in (cache.TOKENS, cache.INDEX, cache.FAULTS)}


def test_text_is_tokenised_once(tmp_path, setup, small_batches):
    path = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    wanted = tokens_of(jsonl(setup, path=path, columns=COLUMNS))
    assert len(small_batches) > 5 and sum(small_batches) == 120
    small_batches.clear()
    again = lambda **changes: jsonl(setup, path=path, **({"columns": COLUMNS} | changes))
    assert tokens_of(again()) == wanted and len(again(drop_long=True)) == 60 and not small_batches
    assert isinstance(again().tokens.base, np.memmap)
    longer = Setup(setup.config, setup.tokenizer, 99, cache=setup.cache)
    jsonl(longer, path=path, columns=COLUMNS)
    assert not small_batches  # the length of rows is no matter of tokens
    again(concatenate=True)
    again(columns={"text": "question"})
    assert sum(small_batches) == 180 and len(list(setup.cache.iterdir())) == 3
    small_batches.clear()
    os.utime(path, ns=(1, 1))
    again()
    assert sum(small_batches) == 120
    setup.tokenizer.add_tokens(["+"])
    again()
    assert sum(small_batches) == 240 and len(list(setup.cache.iterdir())) == 5


@pytest.mark.parametrize("turns", ["all", "each"])
def test_tokenising_goes_on_where_it_was_killed(turns, tmp_path, small_batches):
    entries = [{"messages": TALK}, {"text": "x" * 50}, {"text": 3}] * 9
    wanted = tmp_path / "wanted"
    (tmp_path / "data").mkdir()
    path = write_lines(tmp_path / "data" / "data.jsonl", entries)
    assert len(jsonl(setup_of(wanted), path=path, turns=turns).faults) == 9
    whole, texts = files_of(wanted), sum(small_batches)
    index = np.frombuffer(whole[cache.INDEX], cache.RECORD)
    for cut in (0, 1, 5 * cache.RECORD.itemsize + 7, 12 * cache.RECORD.itemsize, len(whole[cache.INDEX])):
        setup = setup_of(tmp_path / str(cut))
        killed = whole | {cache.INDEX: whole[cache.INDEX][:cut]}  # what it speaks of was written before it
        jsonl(setup, path=path, turns=turns)  # for the folder's name
        (folder,) = setup.cache.iterdir()
        (folder / cache.ABOUT).unlink()
        for name, content in killed.items():
            (folder / name).write_bytes(content)
        small_batches.clear()
        assert len(jsonl(setup, path=path, turns=turns).faults) == 9
        assert files_of(tmp_path / str(cut)) == whole
        assert sum(small_batches) <= texts and (sum(small_batches) < texts / 4 or cut < 300)
    assert len(index) == (36 if turns == "each" else 27)


def test_an_interrupt_keeps_what_was_tokenised(tmp_path, setup, small_batches, monkeypatch):
    path = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    encode = cache.encode_texts

    def interrupted(*args):
        if sum(small_batches) > 60:
            raise KeyboardInterrupt
        return encode(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "encode_texts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jsonl(setup, path=path, columns=COLUMNS)
    before = sum(small_batches)
    assert len(jsonl(setup, path=path, columns=COLUMNS)) == 60
    assert 120 <= sum(small_batches) <= 122 and before > 60


def test_one_process_tokenises_and_the_others_wait(tmp_path, setup, small_batches, monkeypatch, capsys):
    path = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    encode = cache.encode_texts
    monkeypatch.setattr(cache, "encode_texts", lambda *args: time.sleep(0.02) or encode(*args))
    found = []
    work = lambda: found.append(tokens_of(jsonl(setup, path=path, columns=COLUMNS)))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] and sum(small_batches) == 120
    assert "another process tokenises the data" in capsys.readouterr().err


def test_a_damaged_cache_is_named(tmp_path, setup):
    path = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    jsonl(setup, path=path, columns=COLUMNS)
    (folder,) = setup.cache.iterdir()
    os.truncate(folder / cache.TOKENS, 40)
    with pytest.raises(DllmError, match="is damaged .*; remove it"):
        jsonl(setup, path=path, columns=COLUMNS)
    (tmp_path / "file").write_text("")
    with pytest.raises(DllmError, match="data.cache"):
        jsonl(Setup(setup.config, setup.tokenizer, 16, cache=tmp_path / "file"), path=path, columns=COLUMNS)


# The order of rows


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 255, 256, 257, 1000])
def test_a_shuffle_is_a_permutation(count):
    orders = [[permute(place, count, (0, key)) for place in range(count)] for key in range(3)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 5 or orders[0] != orders[1] != orders[2]


def test_shuffles_are_uniform():
    found = collections.Counter(tuple(permute(place, 4, (key,)) for place in range(4)) for key in range(960))
    assert len(found) == 24 and sum((n - 40) ** 2 / 40 for n in found.values()) < 50  # chi squared, p < 0.001
    first = np.array([permute(0, 10**12, (key,)) for key in range(400)])
    assert abs(first.mean() / 10**12 - 0.5) < 0.06 and len(set(first)) == 400


class OfLengths:
    """A source of examples of given lengths, each of a token of its own."""

    def __init__(self, lengths):
        self._lengths = np.asarray(lengths)

    def __len__(self):
        return len(self._lengths)

    def example(self, index):
        return dllm_jax_example([], np.full(self._lengths[index], index % 19))

    def lengths(self):
        return self._lengths


@pytest.mark.parametrize(("count", "batch"), [(64, 8), (61, 8), (8, 8), (7, 8), (3, 8), (50, 1), (23, 7)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_buckets_hold_every_row_once_an_epoch(count, batch, shuffle):
    lengths = np.random.default_rng(count).integers(1, 33, count)
    part = DataPart(length=30, bucket=8, shuffle=shuffle, pad=False)
    rows = Rows(OfLengths(lengths.clip(max=30)), part, "sft", LLADA, seed=1, batch=batch)
    found = [rows.index(position) for position in range(5 * count)]
    epochs = [found[start : start + count] for start in range(0, 5 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == (5 if shuffle else 1) or count < 20 or count % batch
    needed, widths = lengths.clip(max=30)[found], [rows.width(position) for position in range(5 * count)]
    for start in range(0, 5 * count - batch, batch):
        width = min(-(-int(needed[start : start + batch].max()) // 8) * 8, 30)
        assert set(widths[start : start + batch]) == {width}
        assert rows(start).tokens.shape == (width,)
    if count >= 50:
        assert np.mean(widths) < needed.mean() + 8  # no more than the rounding, and where two buckets meet


def test_buckets_fill_rows_up_to_the_longest_as_LLaDA_does():
    examples = [dllm_jax_example([1], [2] * length) for length in (2, 3, 9, 10)]
    rows = Rows(Listed(examples), DataPart(length=20, bucket=4, shuffle=False), "sft", LLADA, 0, batch=2)
    assert [rows(i).tokens.tolist() for i in range(2)] == [[1, 2, 2, 20], [1, 2, 2, 2]]
    assert [(row.length, row.targets.sum()) for row in map(rows, range(4))] == [(4, 3), (4, 3), (12, 11), (12, 11)]
    canvas = DataPart(length=20, bucket=4, shuffle=False, answer_length=10)
    row = Rows(Listed(examples), canvas, "sft", LLADA, 0, batch=2)(0)
    assert (len(row.tokens), row.length, row.targets.sum()) == (12, 11, 10)
    endless = Rows(Reverse(), DataPart(length=20, bucket=4), "sft", LLADA, 0)
    with pytest.raises(DllmError, match="data.bucket"):
        endless(0)


def test_buckets_hold_whole_blocks():
    config = build_settings(
        OBJECTIVES["block-diffusion"].config, settings("x", objective={"block_length": 4}, data__bucket=6)
    )
    with pytest.raises(DllmError, match="data.bucket 6 .* 8"):
        read_parts(config)


CASES = {
    "masked-diffusion": {},
    "autoregressive": {"model": {"config": model_fields(LLADA.replace(attention="causal", family="qwen2"))}},
    "block": {"objective": {"block_length": 4}},
    "row": {"objective": {"block_length": 4, "noise": "sequence", "wrong": 0.2, "complementary": True, "high": 0.9}},
    "d2f": {"objective": {"block_length": 4, "target": "data"}},
}


@pytest.mark.parametrize("name", CASES)
def test_how_long_rows_are_changes_no_loss(name):
    command = {"block": "block-diffusion", "row": "block-diffusion"}.get(name, name)
    config = build_settings(OBJECTIVES[command].config, settings("x", **CASES[name]))
    model = LLADA.replace(num_layers=1, attention="causal" if name == "autoregressive" else LLADA.attention)
    if command == "block-diffusion":
        model = model.replace(attention="block", block_length=4)
    denoiser = Denoiser(model, init_params(model, jax.random.key(0), dtype="float32"))
    part = DataPart(length=32, bucket=8, pad=False, shuffle=False)
    rows = Rows(OfLengths([5, 7, 12, 13]), part, "sft", model, 0, batch=4)
    made = [rows(i) for i in range(4)]
    batch = lambda width: Batch(
        jnp.stack([jnp.pad(row.tokens, (0, width - 16), constant_values=20) for row in made]),
        jnp.stack([jnp.pad(row.targets, (0, width - 16)) for row in made]),
        jnp.array([row.length for row in made]),
    )
    objective = objective_of(config)

    @jax.jit
    def loss(batch):
        noised = objective.corrupt(jax.random.key(3), batch, denoiser)
        return objective.loss(denoiser, denoiser, noised, groups=1, remat=None, sharding=None)

    losses = [loss(batch(width)) for width in (16, 32)]
    assert made[0].tokens.shape == (16,) and losses[0][0] > 1
    for short, long in zip(*map(jax.tree.leaves, losses), strict=True):
        np.testing.assert_allclose(short, long, rtol=2e-6)


def test_a_run_in_buckets_has_the_losses_of_a_padded_one_and_goes_on_exactly(tmp_path, monkeypatch):
    config = lambda name: run_config(
        tmp_path / name, steps=9, log__every=1, checkpoint__every=2, data=of_lengths(tmp_path, tmp_path / "cache")
    )
    losses = lambda name: [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
    train.train(config("whole"))
    row = Rows.__call__

    def failing(self, position):
        if position >= 5 * 8:
            raise OSError("the disk is gone")
        return row(self, position)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "__call__", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            train.train(config("parts"))
    assert train.train(config("parts")).started == 4
    monkeypatch.setattr(Rows, "width", lambda self, position: 32)
    train.train(config("padded"))
    assert losses("parts") == losses("whole")
    np.testing.assert_allclose(losses("padded"), losses("whole"), rtol=1e-4)


def test_rows_are_those_of_any_process(tmp_path):
    """Whoever asks, in whatever order, from a cache of its own."""

    def rows(cache):
        config = run_config("x", data=of_lengths(tmp_path, tmp_path / cache))
        return read_parts(config).rows

    one, (first, second) = rows("a"), (rows("b"), rows("a"))
    mine = [(first if i % 8 < 4 else second, i) for i in range(80)]
    found = {i: part(i) for part, i in reversed(mine)}
    for i in range(80):
        for left, right in zip(found[i], one(i), strict=True):
            np.testing.assert_array_equal(left, right)


# How a run starts: of tokenised data nothing is done example by example ----------------------------------------------


class Plain:
    """A source as others write them: examples one by one, and nothing more."""

    def __init__(self, source):
        self._source, self.faults = source, source.faults

    def __len__(self):
        return len(self._source)

    def example(self, index):
        return self._source.example(index)

    def name(self, index):
        return self._source.name(index) if hasattr(self._source, "name") else f"example {index}"


def random_entries(seed, count):
    """Pairs and documents of token ids, many of them bad: empty, too long, nothing but ends, with masks."""
    rng = np.random.default_rng(seed)
    some = lambda most: rng.choice([*range(6), LLADA.mask_id, LLADA.eos_id], rng.integers(0, most)).tolist()
    pairs = [{"prompt": some(6), "answer": some(9)} for _ in range(count)]
    return [
        *pairs,
        *({"ids": some(14)} for _ in range(count // 2)),
        {"ids": [999]},
        {"prompt": [1], "answer": [20, 20]},
    ]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", ["sft", "pretrain", "prompts"])
def test_a_scan_finds_what_looking_at_each_example_finds(kind, pack, tmp_path, monkeypatch):
    """The same faults and the same held-out examples, whatever the size of the pieces."""
    setup = Setup(LLADA, None, 12, cache=tmp_path / "cache")
    source = jsonl(setup, path=write_lines(tmp_path / "lines.jsonl", random_entries(len(kind), 300)), concatenate=pack)
    for canvas, piece in itertools.product((0, 12 if pack else 5), (1, 50, 10**6)):
        monkeypatch.setattr(cache, "_PIECE", piece)
        part = DataPart(length=10 if canvas == 5 else 12, answer_length=canvas, on_bad="drop")
        look = lambda source, part=part: drop_bad_examples(source, part, kind, LLADA)
        (left, found), (other, wanted) = look(source), look(Plain(source))
        assert found == wanted and (pack or len(found.kinds) > 1)
        numbers = lambda source: [example.tobytes() for side in split_heldout(source, 0.3) for example in answers(side)]
        for file in tmp_path.glob("cache/*/draws*"):
            file.unlink()
        assert numbers(left) == numbers(other) and len(left) == len(other)
    drop_long = jsonl(setup, path=str(tmp_path / "lines.jsonl"), drop_long=True)
    assert len(drop_long.draws()) == len(drop_long)
    assert all(drop_long.draws()[i] == heldout_draw(drop_long.example(i)) for i in range(len(drop_long)))


def answers(source):
    return [np.concatenate((e.prompt_ids, e.answer_ids)) for e in map(source.example, range(len(source)))]


@pytest.mark.parametrize("pack", [False, True])
def test_a_start_looks_at_no_more_examples_of_more_data(pack, tmp_path, monkeypatch):
    """What is held out is hashed once; the next start, in this process or another, reads what was kept."""
    counts, made = [], []
    for source in (cache.TokenisedExamples, cache.StreamRows):
        example = source.example
        monkeypatch.setattr(source, "example", lambda self, i, of=example: made.append(i) or of(self, i))
    for count in (1000, 4000):
        path = write_lines(
            tmp_path / f"{count}.jsonl", [{"prompt": [i % 9], "answer": [i % 7] * 4} for i in range(count)]
        )
        data = {"source": "jsonl", "options": {"path": path, "concatenate": pack}, "cache": str(tmp_path / "cache")}
        data |= {"length": 12, "heldout": 0.2, "bucket": 4} | ({} if pack else {"answer_length": 6})
        config = run_config(tmp_path / "out", data=data, watch={"every": 2, "rows": 5})
        first, _ = read_parts(config).check_examples(config, progress=False)
        data_fingerprint(first.rows.source)
        counts.append(len(made))
        made.clear()
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_heldout_draws", None)
            again, _ = read_parts(config).check_examples(config, progress=False)
        made.clear()
        assert len(again.rows.source) == len(first.rows.source) < count
    assert counts[0] == counts[1] < 100


def test_of_large_data_ids_are_looked_at_as_they_come(tmp_path, monkeypatch):
    """Lengths are all checked before the first step; a mask token is found when its row is made, and named."""
    monkeypatch.setattr(checks, "_MOST", 20)
    entries = [{"prompt": [1], "answer": [i % 9, 2]} for i in range(20)]
    bad, long = {"prompt": [1], "answer": [LLADA.mask_id]}, {"prompt": [1], "answer": [3] * 20}
    config = lambda name, **more: run_config(
        tmp_path / "out", data={"source": "jsonl", "options": {"path": str(tmp_path / name)}, "length": 12, **more}
    )
    write_lines(tmp_path / "long.jsonl", [*entries, long])
    with pytest.raises(DllmError, match="long.jsonl line 21"):
        read_parts(config("long.jsonl")).check_examples(config("long.jsonl"), progress=False)
    write_lines(tmp_path / "bad.jsonl", [*entries, bad])
    parts, faults = read_parts(config("bad.jsonl")).check_examples(config("bad.jsonl"), progress=False)
    assert not faults and not parts.rows.checked
    with pytest.raises(DllmError, match="bad.jsonl line 21"):
        for position in range(21):
            parts.rows(position)
    dropping = config("bad.jsonl", on_bad="drop")
    parts, (faults,) = read_parts(dropping).check_examples(dropping, progress=False)
    assert faults.kinds == {"with a mask token": 1} and len(parts.rows.source) == 20 and parts.rows.checked
