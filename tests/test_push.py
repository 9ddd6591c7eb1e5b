"""`python -m convert push` against a hub on this machine: what arrives, what the card says, and every refusal."""

import json
import re
import shutil
from pathlib import Path

import hub_files
import huggingface_hub
import jax
import numpy as np
import pytest
from conftest import one_error, refuses
from hub_server import TOKEN, Hub
from huggingface_hub import constants
from test_convert import assert_same_params, source_of
from train_toys import LLADA, run_config

import convert
import train
from convert.__main__ import main
from convert.adapters import read_adapters
from dllm_jax.checkpoints import checkpoint
from dllm_jax.indicator import CONFIG_FILE as INDICATOR_FILE
from dllm_jax.models.transformer import num_params
from dllm_jax.params.specs import init_params
from train.trainable import provenance

BASE = {"family": "llada", "source": "someone/llada-tiny", "revision": "0123abcd"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, in Rust
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of a repository."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        download = hub_files.copy("llada-tiny", folder / "snapshots" / BASE["revision"])
        patch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(download))
        convert.convert("llada", BASE["source"], folder / "converted")
    (folder / "converted" / "generation.json").write_text('{"gen_length": 16, "rule": "topk"}')
    params = init_params(LLADA, jax.random.key(1))
    checkpoint.save(folder / "toy", LLADA, params.items(), source=BASE)
    return folder


@pytest.fixture(scope="module")
def run(models):
    """The folder of a run that trains from random weights."""
    watched = {"data__source": "train_toys:finite", "data__heldout": 0.3, "watch__every": 2}
    return train.train(run_config(models / "run", steps=3, checkpoint__every=2, **watched)).folder.parent


@pytest.fixture(scope="module")
def adapters(models):
    """The result of a run of adapters."""
    base = {"init": str(models / "toy")}
    return train.train(run_config(models / "lora", steps=2, model=base, lora={"rank": 2, "alpha": 4.0})).folder


def card_of(folder):
    """(front matter, text) of a model card."""
    card = huggingface_hub.ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    return card.data.to_dict(), card.text


def table(text, title):
    """The rows of a table of a card."""
    rows = re.search(rf"^#+ {title}\n\n\| \| \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    return dict(re.findall(r"^\| (.*?) \| (.*) \|$", rows, re.MULTILINE))


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_bit_for_bit(hub, models, tmp_path, capsys):
    arguments = [str(models / "converted"), "--to", "me/tiny", "--private", "--license", "mit", "--message", "First"]
    assert main(["push", *arguments, "--no-progress"]) == 0
    files = hub.repositories["me/tiny"]["main"]
    assert (hub.messages, hub.private) == (["First"], {"me/tiny"})
    printed = capsys.readouterr().out
    for name in files.keys() - {".gitattributes"}:
        assert re.search(rf"^ +{len(files[name]):,} bytes  {re.escape(name)}$", printed, re.MULTILINE)
    assert f"{hub.url}/me/tiny/commit/1" in printed
    got = hub.download("me/tiny", tmp_path / "got")
    convert.convert("llada", got, tmp_path / "back")
    assert_same_params(models / "converted", tmp_path / "back")
    assert checkpoint.load_config(tmp_path / "back") == checkpoint.load_config(models / "converted")
    assert checkpoint.load_generation(tmp_path / "back") == {"gen_length": 16, "rule": "topk"}
    front, text = card_of(got)
    assert front == {
        "library_name": "dllm_jax",
        "license": "mit",
        "base_model": BASE["source"],
        "pipeline_tag": "text-generation",
        "tags": ["dllm_jax", "llada", "diffusion-language-model"],
    }
    config, about = checkpoint.load_config(got.parent / "back"), table(text, "Model")
    assert (about["Family"], about["Parameters"]) == (config.family, f"{num_params(config):,}")
    assert about["Vocabulary"] == f"{config.vocab_size:,} tokens"
    assert about["Longest context"].startswith(f"{config.max_length:,} tokens")
    assert "someone/llada-tiny) at commit `0123abcd`" in text and '"gen_length": 16' in text
    assert "python -m convert llada --source me/tiny --out tiny\n" in text and "Training" not in text


def test_a_branch_and_a_card_of_ones_own(hub, models, tmp_path):
    card = tmp_path / "card.md"
    card.write_text("---\nlicense: mit\n---\n\n# Mine\n")
    options = ["--to", "me/tiny", "--revision", "small", "--card", str(card), "--dtype", "bfloat16", "--no-progress"]
    assert main(["push", str(models / "converted"), *options]) == 0
    branches = hub.repositories["me/tiny"]
    assert branches["main"] == {".gitattributes": b""} and branches["small"]["README.md"] == card.read_bytes()
    arrays = hub_files.tensors(hub.download("me/tiny", tmp_path / "got", "small"))
    assert {x.dtype.name for x in arrays.values()} == {"bfloat16"}


def test_a_second_push_is_one_commit_that_removes_what_the_first_left(hub, models):
    files = hub.repositories.setdefault("me/tiny", {"main": {}})["main"]
    others = ("notes.txt", "model/extra.safetensors", "model-old.safetensors")
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    files |= dict.fromkeys([*stale, "model.safetensors", *others], b"old")
    convert.push(models / "converted", "me/tiny", private=True)
    assert len(hub.messages) == 1 and not set(stale) & files.keys() and not hub.private
    assert [files[name] for name in others] == [b"old"] * 3 and len(files["model.safetensors"]) > 1000
    before = dict(files)
    hub.refuses["/commit/"] = 500
    with refuses("me/tiny was not pushed", "500"):
        convert.push(models / "toy", "me/tiny")
    assert hub.repositories["me/tiny"]["main"] == before


def test_adapters_come_back_bit_for_bit(hub, models, adapters, tmp_path):
    files = hub.repositories.setdefault("me/lora", {"main": {}})["main"]
    files["model.safetensors"] = b"of another push"
    pushed = convert.push(adapters, "me/lora")
    assert set(pushed.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert "model.safetensors" in files
    got = hub.download("me/lora", tmp_path / "got")
    wanted, found = (read_adapters(folder, LLADA) for folder in (adapters, got))
    assert (found.rank, found.alpha, found.base) == (wanted.rank, wanted.alpha, BASE["source"])
    assert found.values.keys() == wanted.values.keys()
    for name, value in wanted.values.items():
        np.testing.assert_array_equal(found.values[name], value)
    convert.convert_adapters(got, models / "toy", tmp_path / "merged")  # as the card says
    front, text = card_of(got)
    assert (front["library_name"], front["base_model"]) == ("peft", BASE["source"]) and "lora" in front["tags"]
    about, training = table(text, "Model"), table(text, "Training")
    assert about["Adapters"] == f"{sum(x.size for x in wanted.values.values()):,} parameters of rank 2, alpha 4"
    assert about["Parameters of the base"] == f"{num_params(LLADA):,}" and training["Steps"] == "2"
    assert str(models) not in text and str(models) not in (got / "adapter_config.json").read_text()
    with refuses("--dtype float32"):
        convert.push(adapters, "me/lora", dtype="float32")


def test_adapters_of_a_base_that_the_hub_does_not_know(hub, models, run, adapters, tmp_path):
    folder = shutil.copytree(adapters, tmp_path / "adapters")
    hub_files.edit_json(folder / "adapter_config.json", base_model_name_or_path=str(run / "model"))
    with refuses(str(run / "model"), "--base-model USER/NAME"):
        convert.push(folder, "me/lora")
    convert.push(folder, "me/lora", base_model="me/base", dry_run=True, out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert "Training" not in card_of(tmp_path / "out")[1] and hub.requests == []


# --- what the card says -----------------------------------------------------------------------------------------------


def test_a_trained_checkpoint_says_how(hub, models, run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["push", str(run / "model"), "--to", "me/run", "--dry-run", "--out", str(out)]) == 0
    assert "nothing uploaded" in capsys.readouterr().out and hub.requests == []
    front, text = card_of(out)
    assert "base_model" not in front and "license" not in front and "Trained from random weights." in text
    settings = json.loads((run / "run.json").read_text())
    shown = json.loads(re.search(r"```json\n(.*?)\n```\n\n</details>", text, re.DOTALL)[1])
    assert shown == settings | {"out": "run"} and str(models) not in text
    training = table(text, "Training")
    assert training["Command"] == "`python -m train masked-diffusion`" and training["Steps"] == "3"
    assert training["Seed"] == str(settings["seed"]) and "train_toys:finite" in training["Data"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last, evaluation = ([line for line in lines if name in line][-1] for name in ("loss", "heldout_loss"))
    assert float(table(text, "Training metrics after step 3")["`loss`"]) == last["loss"]
    assert float(table(text, "Evaluation after step 3")["`heldout_loss`"]) == evaluation["heldout_loss"]
    assert "samplers" not in text.partition("## Usage")[2]  # it has no tokenizer to read a prompt with


def test_only_the_run_of_the_result_is_told(models, run, tmp_path):
    moved = shutil.copytree(run / "model", tmp_path / "model")
    text = convert.model_card.model_card(moved, LLADA, "me/run")
    assert table(text, "Training") == {"Steps": "3", "Weights": "last step"} and "Evaluation" not in text
    for name in ("run.json", "result.json", "metrics.jsonl"):
        shutil.copyfile(run / name, tmp_path / name)
    with (tmp_path / "metrics.jsonl").open("a") as file:  # of the same run, which goes on
        file.write('{"step": 9, "loss": 0.125}\n')
    text = convert.model_card.model_card(moved, LLADA, "me/run")
    assert "Training metrics after step 3" in text and "0.125" not in text
    data = {"source": "jsonl", "options": {"path": "/home/me/a|b.jsonl"}}
    hub_files.edit_json(tmp_path / "run.json", data=data)
    text = convert.model_card.model_card(moved, LLADA, "me/run")
    assert table(text, "Training")["Data"] == r'`jsonl`, {"path": "a\|b.jsonl"}' and "/home" not in text
    hub_files.edit_json(tmp_path / "result.json", step=9)
    assert "Command" not in convert.model_card.model_card(moved, LLADA, "me/run")


def test_the_base_is_the_one_that_was_trained(models, adapters, tmp_path):
    for name, init in (("tuned", models / "toy"), ("again", tmp_path / "tuned")):
        source = provenance(run_config(tmp_path / "run", model={"init": str(init)}), 1)
        checkpoint.save(tmp_path / name, LLADA, init_params(LLADA, jax.random.key(2)).items(), source=source)
    assert convert.model_card.find_base(tmp_path / "tuned") == BASE["source"]
    assert convert.model_card.find_base(tmp_path / "again") is None
    train.merge_adapters(models / "toy", adapters, tmp_path / "merged")
    text = convert.model_card.model_card(
        tmp_path / "merged", LLADA, "me/merged", base=convert.model_card.find_base(tmp_path / "merged")
    )
    assert "Low-rank adapters were merged" in text and f"base_model: {BASE['source']}" in text


def test_the_usage_is_one_that_works(tmp_path):
    convert.convert("qwen2", source_of("qwen2"), tmp_path / "qwen2")
    config = checkpoint.load_config(tmp_path / "qwen2")
    text = convert.model_card.model_card(tmp_path / "qwen2", config, "me/causal")
    assert "diffusion" not in text and "python -m samplers" not in text  # which refuse a model without a mask token
    with_mask = config.replace(mask_id=config.vocab_size - 1)
    text = convert.model_card.model_card(tmp_path / "qwen2", with_mask, "me/causal")
    assert text.endswith('"your prompt" --model causal --sampler leftright\n```\n')


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_found_before_anything_is_uploaded(hub, models, run, tmp_path, capsys):
    convert.convert("llada", source_of("llada"), tmp_path / "int4", quantize="int4")
    (tmp_path / "indicator").mkdir()
    (tmp_path / "indicator" / INDICATOR_FILE).write_text("{}")
    (tmp_path / "bad.md").write_text("---\na: [\n---\n")
    model = str(models / "converted")
    mistakes = [
        ([model, "--to", "tiny"], ["'tiny'", "USER/tiny"]),
        ([model, "--to", "me/ti ny"], ["'me/ti ny'", "USER/NAME"]),
        ([model, "--to", "a/b/c"], ["'a/b/c'", "USER/NAME"]),
        ([model, "--to", "me/tiny", "--base-model", "base"], ["USER/base"]),
        ([str(tmp_path / "none"), "--to", "me/tiny"], [str(tmp_path / "none")]),
        ([str(run), "--to", "me/tiny"], ["training run", str(run / "model")]),
        ([str(tmp_path / "int4"), "--to", "me/tiny"], ["int4", "cannot be pushed", "made from"]),
        ([str(tmp_path / "indicator"), "--to", "me/tiny"], ["indicator", "convert export"]),
        ([model, "--to", "me/tiny", "--dry-run"], ["--out"]),
        ([model, "--to", "me/tiny", "--card", str(tmp_path / "gone.md")], ["gone.md"]),
        ([model, "--to", "me/tiny", "--card", str(tmp_path / "bad.md")], ["bad.md", "model card"]),
        ([model, "--to", "me/tiny", "--card", str(tmp_path / "bad.md"), "--license", "mit"], ["--license mit"]),
    ]
    for arguments, words in mistakes:
        assert main(["push", *arguments]) == 2, arguments
        said = one_error(capsys)
        assert not [word for word in words if word not in said], said
    assert hub.requests == []


def test_without_a_token(hub, models, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    with refuses("no token", "hf auth login", "HF_TOKEN"):
        convert.push(models / "converted", "me/tiny")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with refuses("does not accept the token", "HF_TOKEN"):
        convert.push(models / "converted", "me/tiny")
    assert hub.repositories == {}


def test_a_hub_that_refuses_or_is_not_there(hub, models, monkeypatch, capsys):
    hub.refuses["/api/repos/create"] = 403
    hub.refuses["/api/models/others/tiny"] = 404
    assert main(["push", str(models / "converted"), "--to", "others/tiny", "--no-progress"]) == 2
    assert "does not let this token write to others/tiny" in one_error(capsys)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert main(["push", str(models / "converted"), "--to", "me/tiny", "--no-progress"]) == 2
    assert "check the connection" in one_error(capsys) and hub.repositories == {}


def test_a_folder_that_is_there_is_not_overwritten(models, adapters, tmp_path):
    out = tmp_path / "out"
    for folder in (models / "converted", adapters):
        convert.push(folder, "me/tiny", dry_run=True, out=out, overwrite=True)
        with refuses(str(out), "--overwrite"):
            convert.push(folder, "me/tiny", dry_run=True, out=out)
    assert sorted(path.name for path in Path(out).iterdir())[0] == "README.md"
