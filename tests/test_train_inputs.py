"""Data that is read and rows that are made of it; and every mistake is one sentence before anything is written."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from train_toys import (
    LLADA,
    Listed,
    Reverse,
    dllm_jax_example,
    model_fields,
    run_config,
    settings,
    spoil_gradients,
    write_toml,
)

import dllm_jax
import train
from dllm_jax import DllmError
from dllm_jax.suggestions import nearest
from dllm_jax.text.tokenizer import encode_chat
from train.__main__ import main
from train.config import DataPart, ModelPart
from train.data import Rows, Setup, make_referenced
from train.data.checks import drop_bad_examples
from train.data.files import jsonl, text
from train.objectives import read_config
from train.setup import model_config


def rows_of(examples, kind="sft", **part):
    part = {"length": 10, "shuffle": False} | part
    return Rows(Listed(examples), DataPart(**part), kind, LLADA, seed=0)


def test_rows_are_padded_with_end_tokens_that_are_learned():
    example = dllm_jax_example([1, 2], [3, 4, 5], np.array([False, True, False]))
    row = rows_of([example])(0)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 20, 20, 20, 20, 20]
    assert row.targets.tolist() == [False, False, True, False] + [True] * 6 and row.length == 10
    row = rows_of([example], answer_length=4)(0)
    assert row.targets.sum() == 3 and row.length == 6
    row = rows_of([example], pad=False)(0)
    assert row.targets.sum() == 2 and row.length == 5
    row = rows_of([example], kind="pretrain", pad=False)(0)
    assert row.targets.sum() == 5


def test_rows_of_random_length():
    rows = rows_of([dllm_jax_example([], np.arange(10))], kind="pretrain", random_length=0.5)
    made = [rows(i) for i in range(400)]
    lengths = np.array([row.length for row in made])
    assert all(row.targets.sum() == row.length for row in made)
    assert 0.35 < np.mean(lengths < 10) < 0.6 and lengths.min() == 1


def test_every_epoch_is_another_order_of_all_examples():
    rows = rows_of([dllm_jax_example([i], [i]) for i in range(9)], shuffle=True)
    epochs = [[rows.index(9 * epoch + i) for i in range(9)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == [rows.index(9 + i) for i in range(9)]
    endless = Rows(Reverse(), DataPart(length=12), "sft", LLADA, seed=0)
    assert [endless.index(i) for i in (0, 7, 10**12)] == [0, 7, 10**12]


def test_text_is_packed_and_json_lines_are_encoded(tmp_path, llada_tiny):
    setup = Setup(llada_tiny.config, llada_tiny.tokenizer, 16, cache=tmp_path / "cache")
    eos, encode = llada_tiny.config.eos_id, llada_tiny.tokenizer.encode
    (tmp_path / "b.txt").write_text("second document, rather long")
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    stream = [*encode("one"), eos, *encode("two"), eos, *encode("second document, rather long"), eos]
    source = text(setup, path=str(tmp_path), separator="\n\n")
    assert len(source) == len(stream) // 16
    assert source.example(1).answer_ids.tolist() == stream[16:32]

    file = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes "}]
    entries = [
        {"prompt": "Q", "answer": "A"},
        {"prompt": [1, 2], "answer": [3]},
        {"messages": messages},
        {"text": "abc"},
        {"ids": [7] * 40},
    ]
    file.write_text("\n\n".join(map(json.dumps, entries)))
    made = [jsonl(setup, path=str(file)).example(i) for i in range(5)]
    assert (made[0].prompt_ids.tolist(), made[0].answer_ids.tolist()) == (encode("Q"), [*encode("A"), eos])
    assert made[1].answer_ids.tolist() == [3]
    assert made[2].prompt_ids.tolist() == encode_chat(llada_tiny.tokenizer, messages[:1])
    assert made[2].answer_ids.tolist() == [*encode("Yes"), llada_tiny.config.end_ids[-1]]
    assert made[3].answer_ids.tolist() == encode("abc") and not len(made[3].prompt_ids)
    assert len(jsonl(setup, path=str(file), drop_long=True)) < 5
    assert len(jsonl(setup, path=str(file), concatenate=True).example(0).answer_ids) == 16


@pytest.mark.parametrize("name", ["llada-tiny-text", "8b/llada-sft-lora"])
def test_example_configs_run_in_miniature(name, tmp_path, llada_tiny):
    config = train.read_config(f"{train.__path__[0]}/configs/{name}.toml")
    assert config.out == f"runs/{Path(name).name}"
    if name == "llada-tiny-text":
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "a.txt").write_text("Tom has 12 books. Tom buys 23. " * 20)
        changes = {
            "model.config.embed_dim": 16,
            "model.config.num_layers": 1,
            "model.config.mlp_dim": 16,
            "data.options.path": str(tmp_path / "texts"),
            "data.cache": str(tmp_path / "cache"),
            "data.length": 32,
            "model.tokenizer": f"{train.__path__[0]}/../evals/tokenizers/word-problems",
        }
    else:
        (tmp_path / "answers.jsonl").write_text('{"prompt": "Q", "answer": "A"}\n' * 9)
        changes = {
            "model.init": str(llada_tiny.folder),
            "data.options.path": str(tmp_path / "answers.jsonl"),
            "data.cache": str(tmp_path / "cache"),
            "data.length": 32,
            "data.bucket": 16,
            "compute.mesh.fsdp": 2,
            "lora.rank": 2,
            "objective.chunk": 16,
            "optimizer.accumulate": 2,
        }
    changes |= {"out": str(tmp_path / "run"), "steps": 2, "optimizer.batch": 8, "optimizer.warmup": 1}
    arguments = [f"{key}={value}" for key, value in changes.items()]
    path = f"{train.__path__[0]}/configs/{name}.toml"
    assert main(["masked-diffusion", "--config", path, "--no-progress", "log.mfu=false", *arguments]) == 0
    if name == "llada-tiny-text":
        assert dllm_jax.load(tmp_path / "run" / "model").tokenizer.encode("Tom")
    else:
        assert train.load_adapters(tmp_path / "run" / "adapters")[1].rank == 2


FIVE = LLADA.replace(vocab_size=5, eos_id=4, pad_id=4, mask_id=3, bos_id=2, end_ids=(4,))
MISTAKES = {
    "unknown key": ({"optimizer__lrr": 1.0}, "'optimizer.lr'"),
    "another library's key": (
        {"optimizer__learning_rate": 1.0},
        "'optimizer.lr'",
    ),
    "unknown part": ({"optimiser": {}}, "'optimizer'"),
    "wrong type": ({"optimizer__batch": 1.5}, "optimizer.batch"),
    "bool": ({"data__pad": "no"}, "data.pad"),
    "choice": ({"objective__kind": "sfd"}, "'sfd'"),
    "range": ({"optimizer__b1": 2.0}, "optimizer.b1"),
    "no steps": ({"steps": 0}, "steps is 0"),
    "accumulate": ({"optimizer__accumulate": 3}, "optimizer.accumulate 3"),
    "warm-up": ({"optimizer__warmup": 7}, "optimizer.warmup 7"),
    "ema": ({"checkpoint__weights": "ema"}, "optimizer.ema"),
    "model field": ({"model__config": {"embed_dims": 8}}, "'model.config.embed_dim'"),
    "model type": ({"model__config": {"embed_dim": "8"}}, "model.config.embed_dim"),
    "published": ({"model__published": "llada-9b"}, "'llada-9b'"),
    "verifier": ({"model__published": "qwen2.5-0.5b", "model__config": {}}, "train autoregressive"),
    "init and config": ({"model__init": "x"}, "model.init x"),
    "no init": ({"model__init": "nowhere", "model__config": {}}, "nowhere"),
    "tokenizer": ({"model__tokenizer": "nowhere"}, "model.tokenizer nowhere"),
    "mesh axis": ({"compute__mesh": {"pipe": 2}}, "'pipe'"),
    "mesh size": ({"compute__mesh": {"data": 16}}, "16 devices"),
    "mesh zero": ({"compute__mesh": {"data": 0}}, "at least 1"),
    "mesh rows": ({"compute__mesh": {"data": 8}, "optimizer__batch": 4}, "8 devices"),
    "mesh split": ({"compute__mesh": {"tensor": 5}}, "5 devices"),
    "no source": ({"data__source": ""}, "data.source"),
    "unknown source": ({"data__source": "textt"}, "'textt'"),
    "no module": ({"data__source": "nowhere:x"}, "nowhere:x"),
    "no source made": ({"data__source": "builtins:dict"}, "'builtins:dict'"),
    "source options": ({"data__options": {"digit": 3}}, "train_toys:Reverse"),
    "no file": ({"data__source": "jsonl", "data__options": {"path": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "no path": ({"data__source": "jsonl"}, "data.options.path"),
    "file option": ({"data__source": "jsonl", "data__options": {"paht": "x"}}, "'data.options.path'"),
    "too long": ({"data__length": 9}, "example 0"),
    "long prompt": ({"data__length": 5}, "example 0"),
    "canvas": ({"data__answer_length": 4}, "data.answer_length 4"),
    "context": ({"data__length": 64}, "data.length 64"),
    "vocabulary": ({"model__config": model_fields(FIVE)}, "vocabulary of 5"),
    "mask learned": ({"model__config": model_fields(LLADA.replace(mask_id=3))}, "mask token 3"),
    "random length": ({"data__random_length": 0.5}, "data.random_length"),
    "lora without base": ({"lora__rank": 2}, "model.init"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_settings_are_one_sentence(name, tmp_path, capsys):
    """It names the setting, or what is wrong in it."""
    changes, offending = MISTAKES[name]
    path = write_toml(tmp_path / "run.toml", settings(tmp_path / "out", **changes))
    assert main(["masked-diffusion", "--config", str(path), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and offending in error
    assert not (tmp_path / "out").exists()


def test_a_longer_context_is_all_that_may_differ_from_a_checkpoint(llada_tiny):
    part = ModelPart(init=str(llada_tiny.folder), config={"max_length": 999, "rope_theta": 5e5})
    assert model_config(part) == llada_tiny.config.replace(max_length=999, rope_theta=5e5)
    with pytest.raises(DllmError, match=r"remove model.config.num_layers \(only max_length and rope_theta may differ"):
        model_config(dataclasses.replace(part, config={"max_length": 999, "num_layers": 1}))
    with pytest.raises(DllmError, match="model.config.max_length"):
        model_config(dataclasses.replace(part, config={"max_length": "long"}))


def test_settings_stand_where_one_likes(tmp_path, capsys):
    path = write_toml(tmp_path / "run.toml", settings(tmp_path / "out"))
    arguments = ["masked-diffusion", "steps=2", "--config", str(path), "optimizer.warmup=1", "--no-progress"]
    assert main([*arguments, "checkpoint.every=2", "--allow-change", "optimizer.lr", "log.every=1"]) == 0
    found = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (found["steps"], found["optimizer"]["warmup"], found["checkpoint"]["every"]) == (2, 1, 2)
    assert found["log"]["every"] == 1
    for wrong in ("--cofig=x", "log.every"):
        capsys.readouterr()
        assert main([*arguments, wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert main(["plot", "--run", str(tmp_path / "out"), "--out", str(tmp_path / "x.svg"), "a=b"]) == 2
    assert "unrecognized arguments: a=b" in capsys.readouterr().err


def test_text_without_a_tokenizer_is_refused_by_its_line(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"ids": [1]}\n{"text": "x"}')
    source = jsonl(Setup(LLADA, None, 8, cache=tmp_path / "cache"), path=str(tmp_path))
    with pytest.raises(DllmError, match="line 2.*model.tokenizer"):
        drop_bad_examples(source, DataPart(length=8), "pretrain", LLADA)


def test_other_mistakes(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    source = {"data__source": "jsonl", "data__options": {"path": str(tmp_path / "empty.jsonl")}}
    source["data__cache"] = str(tmp_path / "cache")
    with pytest.raises(DllmError, match="has no examples"):
        train.train(run_config(tmp_path / "out", **source))
    with pytest.raises(DllmError, match="empty; give every example"):
        rows_of([dllm_jax_example([], [])])(0)
    with pytest.raises(DllmError, match="less than one row"):
        jsonl(Setup(LLADA, None, 8, cache=tmp_path / "cache"), path=str(tmp_path / "empty.jsonl"), concatenate=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(DllmError, match="holds something that is no training run"):
        train.train(run_config(tmp_path / "other"))
    with pytest.raises(DllmError, match="is a file"):
        train.train(run_config(tmp_path / "empty.jsonl"))
    (tmp_path / "bad.toml").write_text("steps = = 3")
    for path, sentence in (("bad.toml", "not valid TOML"), ("none.toml", "could not be read")):
        with pytest.raises(DllmError, match=sentence):
            read_config(tmp_path / path)
    (tmp_path / "short.toml").write_text("steps = 300")
    for overrides, sentence in (
        ([], "out is not set"),
        (["out"], "'out' is no setting"),
        (["steps.x=1"], "is a value"),
    ):
        with pytest.raises(DllmError, match=sentence):
            read_config(tmp_path / "short.toml", overrides)
    changes = ["out=runs/x", "optimizer.lr=3", "model.config={num_layers = 2}"]
    config = read_config(tmp_path / "short.toml", changes)
    assert (config.out, config.optimizer.lr, config.model.config) == ("runs/x", 3.0, {"num_layers": 2})
    for arguments, sentence in (
        (["write-model", "--run", str(tmp_path), "--out", str(tmp_path / "m")], "is no training run"),
        (["merge-lora", "--base", str(tmp_path), "--adapters", "x", "--out", str(tmp_path / "m")], "no params folder"),
        (["masked-diffusion", "--config", "x", "--processes", "2"], "belong together"),
        (["masked-diffusion", "--config", str(tmp_path / "short.toml"), "out=x", "--process", "2"], "belong together"),
        ([], "arguments are required"),
    ):
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(DllmError, match="holds no adapters"):
        train.load_adapters(tmp_path)
    with pytest.raises(DllmError, match="write it like module:name"):
        make_referenced("train_toys:nothing", {})


def test_a_diverged_run_stops_and_keeps_its_last_state(tmp_path, monkeypatch):
    out = tmp_path / "run"
    config = run_config(out, steps=9, optimizer__clip=0.0, optimizer__skip=0, checkpoint__every=2, log__every=3)
    spoil_gradients(monkeypatch, 5, 6, 7)
    with pytest.raises(DllmError, match="the grad norm of step 5 is nan; state 4 is kept"):
        train.train(config)
    monkeypatch.undo()
    outcome = train.train(config)
    assert (outcome.started, outcome.step) == (4, 9)
    with pytest.raises(DllmError, match=r"optimizer.clip = 0.0, not 1.0"):
        train.train(run_config(out, steps=9, optimizer__skip=0, checkpoint__every=2))
    monkeypatch.setattr(train.trainer.States, "load", lambda *_: (_ for _ in ()).throw(DllmError("unused")))
    with pytest.raises(DllmError, match="exists already"):
        train.write_weights(config, outcome.folder)
    other = run_config(tmp_path / "lora", model={"init": str(outcome.folder)}, lora={"rank": 2, "targets": ["*.attn"]})
    with pytest.raises(DllmError, match="matches no parameter"):
        train.train(other)
    norms = run_config(tmp_path / "lora", model={"init": str(outcome.folder)}, lora={"rank": 2, "targets": ["*norm*"]})
    with pytest.raises(DllmError, match="is no projection"):
        train.train(norms)


@pytest.mark.parametrize(
    "name, found",
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("data.batch_size", "data.batch"),
        ("rollout.stepz", "rollout.steps"),
        ("data.steps", "rollout.steps"),
        ("lenght", "data.length"),
        ("optimizer.colour", None),
    ],
)
def test_the_nearest_setting(name, found):
    known = ["optimizer.final_ratio", "optimizer.lr", "router.lr", "data.batch", "data.length", "rollout.steps"]
    assert nearest(name, known) == found
