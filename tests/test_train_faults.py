"""Faults of data, numbers and disks: what each of them does to a run, and that none costs more than the steps since the
last state."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_run import assert_same, latest_state, lines
from train_toys import LLADA, Listed, dllm_jax_example, run_config, settings, spoil_gradients, write_toml

import train
from dllm_jax import DllmError, random_model
from dllm_jax.checkpoints import checkpoint
from train.__main__ import main
from train.config import CheckpointPart, DataPart
from train.data import Setup
from train.data.checks import drop_bad_examples
from train.data.files import jsonl
from train.data.shards import Trajectories
from train.optimizer import learning_rate
from train.run_dir import RunFolder
from train.states import CHECKSUMS_FILE, States
from train.step import Stepper
from train.trainer import write_weights

SMALL = {"model__config__num_layers": 1}
GOOD = '{"prompt": "Q", "answer": "A"}'
LONG = "x" * 40
DEEP = "[" * 100_000

# The line of a file between good ones -> what is said of it, with its name; None: there is nothing wrong with it.
LINES = {
    "no JSON": ("{", "is not valid JSON"),
    "torn": ('{"prompt": "Q", "answ', "is not valid JSON"),
    "two objects": (GOOD + GOOD, "is not valid JSON"),
    "deep": (DEEP, "is not valid JSON"),
    "NUL": ('{"text": "a\0b"}', "is not valid JSON"),
    "NUL, escaped": ('{"text": "a\\u0000b"}', None),
    "no UTF-8": (b'{"text": "\xff"}', "is not valid JSON"),
    "lone surrogate": ('{"text": "a\\ud800b"}', "cannot be expressed in this vocabulary"),
    "list": ("[1]", "is no object"),
    "number": ("3", "is no object"),
    "null": ("null", "is no object"),
    "no column": ('{"question": "Q"}', "has ['question']; it needs"),
    "half of the columns": ('{"prompt": "Q"}', "has ['prompt']; it needs"),
    "a number for a text": ('{"prompt": "Q", "answer": 3}', "'3' is neither a text nor a list"),
    "null for a text": ('{"prompt": null, "answer": "A"}', "'None' is neither a text nor a list"),
    "fractions": ('{"ids": [1.5]}', "is neither a text nor a list"),
    "bools": ('{"ids": [true]}', "is neither a text nor a list"),
    "ids that there are not": ('{"ids": [1, 999999]}', "has token ids outside the vocabulary"),
    "negative ids": ('{"ids": [-1]}', "has token ids outside the vocabulary"),
    "conversation of the user": ('{"messages": [{"role": "user", "content": "x"}]}', "end with one of the assistant"),
    "conversation of nobody": ('{"messages": []}', "the conversation has no messages"),
    "empty answer": ('{"prompt": "Q", "answer": ""}', "has an empty answer"),
    "no answer": ('{"prompt": [1, 2], "answer": []}', "has an empty answer"),
    "empty text": ('{"text": ""}', "is empty"),
    "mask": ('{"prompt": "Q", "answer": [MASK]}', "has the mask token"),
    "long prompt": (f'{{"prompt": "{LONG}", "answer": "A"}}', "has a prompt of "),
    "long answer": (f'{{"prompt": "Q", "answer": "{LONG}"}}', "which do not fit data.length 16"),
    "no room for the canvas": ('{"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9], "answer": [1]}', "which do not fit"),
    "huge": (f'{{"text": "{"tall " * 200_000}"}}', "which do not fit"),
    "blank": ("  ", None),
    "Windows": (GOOD + "\r", None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where tokens are kept."""
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named_and_dropped_or_refused(name, tmp_path, llada_tiny):
    line, sentence = LINES[name]
    line = line if isinstance(line, bytes) else line.replace("MASK", str(llada_tiny.config.mask_id)).encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode())
    part = lambda on_bad: DataPart(length=16, answer_length=8, on_bad=on_bad)
    source = jsonl(Setup(llada_tiny.config, llada_tiny.tokenizer, 16, 8), path=str(path))
    check = lambda on_bad: drop_bad_examples(source, part(on_bad), "sft", llada_tiny.config)
    if sentence is None:
        assert check("refuse") == (source, None)
        return
    with pytest.raises(DllmError) as error:
        check("refuse")
    told = str(error.value)
    assert f"{path} line 2" in told and sentence in told and 'data.on_bad="drop"' in told and "\n" not in told
    left, faults = check("drop")
    assert (len(left), faults.count, len(faults.sentences)) == (2, 3, 1) and faults.sentences[0].startswith(
        f"{path} line 2"
    )
    assert [left.example(i).answer_ids.tolist() for i in (0, 1)] == [source.example(0).answer_ids.tolist()] * 2


def test_many_bad_lines_are_counted_and_the_first_are_named(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(['{"ids": [1]}', "[]"] * 4 + ['{"ids": [1, 2, 3]}'] * 3))
    source = jsonl(Setup(LLADA, None, 2), path=str(path))
    look = lambda on_bad: drop_bad_examples(source, DataPart(length=2, on_bad=on_bad), "pretrain", LLADA)
    first = " .* ".join(f"line {number}: it is" for number in (2, 4, 6, 8))
    with pytest.raises(DllmError, match=f"{first} .* line 9 has .*; and 2 more; 7"):
        look("refuse")
    assert str(look("drop")[1]) == "7 of 11 examples are bad: 4 unreadable, 3 too long"
    monkeypatch.setattr("train.data.checks._LISTED", 5)
    assert look("drop")[1].listing().splitlines()[4:] == [
        f"{path} line 9 has 3 tokens and data.length is 2; raise it",
        "and 2 more",
    ]


def test_what_drop_long_leaves_out_has_no_room_for_its_canvas(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": [1] * prompt, "answer": [2] * answer} for prompt in range(1, 13) for answer in range(1, 12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for canvas in (0, 4):
        part = DataPart(length=10, answer_length=canvas, on_bad="drop")
        read = lambda drop, canvas=canvas: jsonl(Setup(LLADA, None, 10, canvas), path=str(path), drop_long=drop)
        (kept, faults), (other, found) = (drop_bad_examples(read(drop), part, "sft", LLADA) for drop in (True, False))
        assert faults is None and len(kept) == len(other) and found.kinds == {"too long": len(rows) - len(kept)}
        assert "too long" in str(found) and found.sentences[-1].startswith(f"{path} line 132 has ")


CODE = {
    "raises": (lambda: {}["x"], "example 1 cannot be made (KeyError: 'x')"),
    "floats": (lambda: dllm_jax_example([1.0], [2.0]), "example 1 has a prompt that is no list of token ids"),
    "words": (lambda: dllm_jax_example(["a"], ["b"]), "example 1 has a prompt that is no list of token ids"),
    "a table": (lambda: dllm_jax_example([[1]], [2]), "example 1 has a prompt that is no list of token ids"),
    "clues of another length": (lambda: dllm_jax_example([1], [2, 3], [True]), "an answer of 2 tokens and 1 of given"),
    "nothing but clues": (lambda: dllm_jax_example([1], [2], [True]), "has nothing to learn"),
    "nothing at all": (lambda: None, "cannot be made (AttributeError"),
}


class Coded(Listed):
    def example(self, index):
        made = super().example(index)
        return made() if callable(made) else made


@pytest.mark.parametrize("name", CODE)
def test_what_a_source_of_ones_own_does_wrong(name):
    make, sentence = CODE[name]
    good = dllm_jax_example([1], [2])
    source = Coded([good, make, good])
    with pytest.raises(DllmError) as error:
        drop_bad_examples(source, DataPart(length=8), "sft", LLADA)
    assert sentence in str(error.value)
    left, faults = drop_bad_examples(source, DataPart(length=8, on_bad="drop"), "sft", LLADA)
    assert len(left) == 2 and faults.bad == [1] and left.name(1) == "example 2"


FILES = {
    "empty": (b"", "has no examples"),
    "blank lines": (b"\n\n \n", "has no examples"),
    "nothing good": (b"{\n" * 3, "line 1: it is not valid JSON"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9, "line 1: it is not valid JSON"),
    "nothing that fits": (b'{"ids": [1, 2, 3]}\n' * 2 + b"[]", "line 3: it is no object", "1 unreadable, 2 too long"),
    "a folder": (None, "could not be read"),
}


@pytest.mark.parametrize("on_bad", ["refuse", "drop"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_good_line_is_refused_before_anything_is_written(name, on_bad, tmp_path, capsys):
    content, *sentences = FILES[name]
    path = tmp_path / "data.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    options = {"path": str(tmp_path / "data.json*")}
    data = {"source": "jsonl", "options": options, "length": 2, "on_bad": on_bad}
    config = write_toml(tmp_path / "run.toml", settings(tmp_path / "out", data=data, **SMALL))
    assert main(["masked-diffusion", "--config", str(config), "--no-progress"]) == 2
    told = capsys.readouterr().err
    assert all(sentence in told for sentence in sentences) and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_endless_source_cannot_drop(tmp_path):
    with pytest.raises(DllmError, match='"drop" is for data with an end'):
        train.train(run_config(tmp_path / "out", data__on_bad="drop"))


def test_what_a_long_check_found_is_kept_as_long_as_the_source_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.checks._SLOW", 0.0)
    looked = []
    source = Coded([lambda i=i: looked.append(i) or dllm_jax_example([1] * i, [2]) for i in range(1, 9)])
    source.identity = "one"
    look = lambda **part: drop_bad_examples(source, DataPart(**{"length": 6, "on_bad": "drop", **part}), "sft", LLADA)
    first, again = look(), look()
    assert first[1] == again[1] and first[1].bad == [5, 6, 7] and len(again[0]) == 5 and len(looked) == 8
    assert look(length=7)[1].bad == [6, 7] and len(looked) == 16
    source.identity = "two"
    look()
    assert len(looked) == 24
    for path in (tmp_path / "home" / "checks").iterdir():
        path.write_text("{")
    assert look()[1] == first[1] and len(looked) == 32


def test_a_run_without_its_bad_lines_is_one_of_the_good_ones(tmp_path, capsys):
    good = [json.dumps({"prompt": [i, 2], "answer": [3, i]}) for i in range(9)]
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    (tmp_path / "bad.jsonl").write_text("\n".join([*good[:4], "{", *good[4:], json.dumps({"ids": [1] * 20})]))
    data = {"source": "jsonl", "length": 12, "on_bad": "drop"}
    for name in ("good", "bad"):
        options = {"path": str(tmp_path / f"{name}.jsonl")}
        values = settings(tmp_path / name, data=data | {"options": options}, steps=3, **SMALL)
        config = write_toml(tmp_path / f"{name}.toml", values)
        assert main(["masked-diffusion", "--config", str(config), "--no-progress"]) == 0
    assert_same(latest_state(tmp_path / "good"), latest_state(tmp_path / "bad"))
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "warning: 2 of 11 examples are bad: 1 unreadable, 1 too long; they are left out, see "
        f"{tmp_path / 'bad' / 'dropped.txt'}"
    ]
    first, second = (tmp_path / "bad" / "dropped.txt").read_text().splitlines()
    assert "bad.jsonl line 5: it is not valid JSON" in first
    assert second == f"{tmp_path / 'bad.jsonl'} line 11 has 20 tokens and data.length is 12; raise it"


# Runs. Every one of them saves after steps 2 and 4, and is to have six.


def config_of(out, **changes):
    return run_config(out, **{"steps": 6, "checkpoint__every": 2, "log__every": 1, **SMALL, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train.train(config_of(out))
    return out


def cut(whole, out, step=4):
    """A copy of it as it was after a kill that came behind the state of a step."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    for state in (out / "state").iterdir():
        if int(state.name) > step:
            shutil.rmtree(state)
    return out


def goes_on(out, whole):
    """Going on ends as if nothing had happened."""
    outcome = train.train(config_of(out))
    assert_same(latest_state(out), latest_state(whole))
    losses = lambda folder: [(line["step"], line.get("loss")) for line in lines(folder)]
    assert losses(out) == losses(whole)
    return outcome.started


def torn(out):
    path = out / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def ahead(out):
    """Nothing: the log tells of steps 5 and 6 already, as it is written before the state."""


def half_saved(out):
    half = out / "state" / "6.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "manifest.ocdbt").write_bytes(b"half")


def no_log(out):
    (out / "metrics.jsonl").unlink()


def foreign(out):
    (out / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text() + "[1]\nNaN\n\xff\n")


def half_model(out):
    (out / ".model.partial").mkdir()


KILLS = {
    "between line and state": ahead,
    "amid a line": torn,
    "amid a state": half_saved,
    "log with other lines": foreign,
    "amid the model": half_model,
}


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_goes_on_from_its_last_state(name, whole, tmp_path):
    out = cut(whole, tmp_path / "run")
    KILLS[name](out)
    assert goes_on(out, whole) == 4


def test_a_log_that_is_lost_costs_itself_alone(whole, tmp_path):
    out = cut(whole, tmp_path / "run")
    no_log(out)
    assert train.train(config_of(out)).started == 4
    assert_same(latest_state(out), latest_state(whole))
    assert [line["step"] for line in lines(out)] == [5, 6]


def test_a_full_disk_at_a_state_keeps_the_last(whole, tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    out, save = tmp_path / "run", ocp.training.Checkpointer.save_async

    def full(self, step, *rest, **options):
        if step == 4:
            raise OSError(28, "No space left on device")
        return save(self, step, *rest, **options)

    monkeypatch.setattr(ocp.training.Checkpointer, "save_async", full)
    with pytest.raises(DllmError, match="the disk of .* is full"):
        train.train(config_of(out))
    monkeypatch.undo()
    assert goes_on(out, whole) == 2


def test_a_state_that_fails_in_the_background_ends_the_run_soon(whole, tmp_path, monkeypatch):
    """Its step is past then; the state before it stays."""
    from orbax.checkpoint import v1 as ocp

    class Failed:
        def result(self):
            raise OSError(28, "No space left on device")

    out, save = tmp_path / "run", ocp.training.Checkpointer.save_async
    full = lambda self, step, *rest, **options: Failed() if step == 4 else save(self, step, *rest, **options)
    monkeypatch.setattr(ocp.training.Checkpointer, "save_async", full)
    with pytest.raises(DllmError, match="the disk of .* is full"):
        train.train(config_of(out))
    monkeypatch.undo()
    assert [line["step"] for line in lines(out)][-1] < 6
    assert goes_on(out, whole) == 2


def test_a_state_is_that_of_its_step_whatever_becomes_of_its_buffers(tmp_path):
    arrays = {str(i): jnp.arange(2e5) * i for i in range(20)}
    wanted = jax.tree.map(np.array, arrays)
    step = jax.jit(lambda arrays: jax.tree.map(lambda x: x - 1e6, arrays), donate_argnums=0)
    with States(tmp_path, CheckpointPart(), clean=True) as states:
        for number in (1, 2):
            states.save(number, arrays, {})
            arrays = jax.block_until_ready(step(arrays))
        assert states.latest == 2
        for number in (1, 2):
            found = states.arrays(number, {name: name for name in arrays})
            assert len(found) == 20
            for name, value in found.items():
                np.testing.assert_array_equal(value, wanted[name] - np.float32(1e6 * (number - 1)), err_msg=name)


def test_a_full_disk_at_the_log_keeps_the_last_state(whole, tmp_path):
    out = cut(whole, tmp_path / "run")
    log = out / "metrics.jsonl"
    kept = log.read_text()
    config = config_of(out)
    original = RunFolder.resume_logs

    def resume_logs(self, step, data, **options):
        original(self, step, data, **options)
        log.unlink()
        log.symlink_to("/dev/full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "resume_logs", resume_logs)
        with pytest.raises(DllmError, match="the disk of .*metrics.jsonl is full") as error:
            train.train(config)
        assert "--out" not in str(error.value)  # which this command lacks
    log.unlink()
    log.write_text(kept)
    assert goes_on(out, whole) == 4


def test_a_full_disk_at_the_model_keeps_the_last_state(whole, tmp_path, monkeypatch):
    out = cut(whole, tmp_path / "run")

    def full(*_, **__):
        raise DllmError("the disk is full")

    monkeypatch.setattr(train.trainable.checkpoint, "save", full)
    with pytest.raises(DllmError, match="is full"):
        train.train(config_of(out))
    monkeypatch.undo()
    outcome = train.train(config_of(out))
    assert outcome.started == 6 and outcome.folder.is_dir()
    assert_same(latest_state(out), latest_state(whole))


def test_a_damaged_state_is_told_and_the_one_before_is_there(whole, tmp_path):
    out = cut(whole, tmp_path / "run", step=6)
    (damaged,) = [path for path in (out / "state").iterdir() if path.name == "6"]
    for path in damaged.rglob("*"):
        if path.is_file() and path.name != "_CHECKPOINT_METADATA":
            path.write_bytes(b"\0")
    with pytest.raises(DllmError, match="state/6 .*damaged .*; remove it"):
        train.train(config_of(out))
    (damaged / CHECKSUMS_FILE).unlink()
    with pytest.raises(DllmError, match="state/6 could not be read; remove it") as error:
        train.train(config_of(out))
    assert "\n" not in str(error.value)
    shutil.rmtree(damaged)
    assert goes_on(out, whole) == 4


def test_bytes_that_change_in_a_state_are_found_and_the_state_before_is_there(whole, tmp_path):
    out = cut(whole, tmp_path / "run", step=6)
    damaged = out / "state" / "6"
    largest = max((path for path in damaged.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    largest.write_bytes(content)
    with pytest.raises(DllmError, match=f"state/6 .*damaged in {largest.relative_to(damaged)}.*; remove it .* state 4"):
        train.train(config_of(out))
    with pytest.raises(DllmError, match="state/6 .*damaged"):
        write_weights(config_of(out), tmp_path / "model")
    shutil.rmtree(damaged)
    assert goes_on(out, whole) == 4


def test_a_state_without_checksums_is_read(whole, tmp_path):
    """Such as one that an earlier version wrote."""
    out = cut(whole, tmp_path / "run")
    (out / "state" / "4" / CHECKSUMS_FILE).unlink()
    assert goes_on(out, whole) == 4


FOLDERS = {
    "damaged settings": (lambda out: (out / "run.json").write_text("{"), "run.json could not be read"),
    "settings that are a folder": (lambda out: as_folder(out / "run.json"), "holds something that is no training run"),
    "log that is a folder": (lambda out: as_folder(out / "metrics.jsonl"), "metrics.jsonl could not be written"),
}


def as_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_used_is_one_sentence(name, whole, tmp_path):
    harm, sentence = FOLDERS[name]
    out = cut(whole, tmp_path / "run")
    harm(out)
    with pytest.raises(DllmError, match=sentence):
        train.train(config_of(out))
    with States(out / "state", CheckpointPart(), clean=False) as states:
        assert states.latest == 4


def test_one_gradient_that_is_not_finite_is_skipped_and_counted(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    spoil_gradients(monkeypatch, 3)
    train.train(config_of(out, log__every=2, optimizer__ema=0.9))
    state = latest_state(out)
    assert state["step"] == 6 and all(np.isfinite(x).all() for x in state.values())
    assert state["optimizer:1:0:count"] == 5
    assert [(line["step"], line.get("skipped", 0)) for line in lines(out)] == [(2, 0), (4, 1), (6, 0)]
    mean = np.mean([line["loss"] for line in lines(whole)[:2]])
    assert lines(out)[0]["loss"] == pytest.approx(mean, rel=1e-5) and np.isfinite(lines(out)[1]["loss"])


def test_gradients_that_stay_not_finite_end_the_run(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    spoil_gradients(monkeypatch, 3, 5, 6)
    with pytest.raises(DllmError, match="the grad norm of step 6 is nan, after 1 that were skipped; state 4 is kept"):
        train.train(config_of(out, optimizer__skip=1))
    monkeypatch.undo()
    assert lines(out)[2]["skipped"] == 1 and "loss" not in lines(out)[2]
    changed = config_of(out, optimizer__skip=1, optimizer__lr=1e-3, optimizer__clip=0.0)
    with pytest.raises(DllmError, match=r"optimizer.lr = 0.01, not 0.001; restore .* --allow-change optimizer.lr"):
        train.train(changed)
    outcome = train.train(changed, allow_change=["optimizer.lr", "optimizer.clip"])
    assert outcome.started == 4 and np.isfinite(outcome.metrics["loss"])


ABSURD = {"optimizer__lr": 1e30, "optimizer__warmup": 0, "optimizer__clip": 0.0}


def test_an_update_that_explodes_is_no_success(tmp_path):
    """The loss and the gradient of its step are finite; those of the steps after it are not."""
    with pytest.raises(DllmError, match="after step 6.*no state was written"):
        train.train(config_of(tmp_path / "late", **ABSURD))
    for name in ("model", "state/2", "state/6"):
        assert not (tmp_path / "late" / name).exists()
    with pytest.raises(DllmError, match="after step 1.*no state was written"):
        train.train(config_of(tmp_path / "soon", checkpoint__every=1, **ABSURD))
    assert not list((tmp_path / "soon" / "state").glob("[0-9]*"))


@pytest.mark.parametrize("harm", [jnp.nan, 1e5])
def test_an_update_that_spoils_the_weights_keeps_the_state_before(harm, whole, tmp_path, monkeypatch):
    out, update = tmp_path / "run", Stepper._update

    def spoilt(self, gradient, state):
        factor = jnp.where(state.step == 4, harm, 1.0)
        found = update(self, gradient, state)
        return dataclasses.replace(found, trained=jax.tree.map(lambda x: x * factor, found.trained))

    monkeypatch.setattr(Stepper, "_update", spoilt)
    with pytest.raises(DllmError, match="after step 5.*state 4 is kept"):
        train.train(config_of(out, checkpoint__every=1, checkpoint__keep=1))
    spoil_gradients(monkeypatch, 6)  # the run ends amid skipped steps
    with pytest.raises(DllmError, match="after step 6.*state 4 is kept"):
        train.train(config_of(out))
    assert not (out / "model").exists()
    monkeypatch.undo()
    assert [path.name for path in (out / "state").iterdir()] == ["4"]
    assert train.train(config_of(out)).started == 4
    assert_same(latest_state(out), latest_state(whole))


def test_no_state_is_written_while_steps_are_skipped(tmp_path, monkeypatch):
    """The first step that is not skipped writes the one that was due; a row of skips is never resumed in its midst."""
    out, written, save = tmp_path / "run", [], States.save
    monkeypatch.setattr(States, "save", lambda self, step, *rest: (written.append(step), save(self, step, *rest)))
    spoil_gradients(monkeypatch, 3, 4)
    train.train(config_of(out))
    assert written == [2, 5, 6]
    with States(out / "state", CheckpointPart(), clean=False) as states:
        assert [states.notes(step)["skipped"] for step in states.steps] == [2, 2]
    monkeypatch.undo()
    spoil_gradients(monkeypatch, 7, 8, 9, 10)
    for _ in range(2):
        with pytest.raises(DllmError, match="after 2 that were skipped; state 6 is kept.*from state 5"):
            train.train(config_of(out, steps=10, optimizer__skip=2), allow_change=["optimizer.skip"])


def test_a_run_of_which_most_steps_were_skipped_before_it_was_resumed_is_no_success(tmp_path, monkeypatch):
    out = tmp_path / "run"
    spoil_gradients(monkeypatch, 1, 2, 3, 5)
    for _ in range(2):  # at once, and with nothing left to do
        with pytest.raises(DllmError, match="4 of 6 steps were skipped"):
            train.train(config_of(out))
        assert not (out / "model").exists()


def test_the_schedule_goes_by_the_steps_that_the_log_tells_of(tmp_path, monkeypatch):
    spoil_gradients(monkeypatch, 2, 3)
    train.train(config_of(tmp_path / "run"))
    state = latest_state(tmp_path / "run")
    assert (state["optimizer:1:2:count"], state["optimizer:1:0:count"]) == (6, 4)  # of the schedule, of the moments
    rate = learning_rate(config_of(tmp_path).optimizer, 6)
    assert lines(tmp_path / "run")[-1]["lr"] == pytest.approx(float(rate(5)), rel=1e-5)


def test_weights_that_are_not_finite_end_the_run(tmp_path):
    model = random_model(LLADA.replace(num_layers=1), key=3)
    params = dict(model.params)
    params["lm_head.kernel"] = params["lm_head.kernel"].at[0, 0].set(jnp.nan)
    checkpoint.save(tmp_path / "model", model.config, params.items())
    config = run_config(tmp_path / "run", model={"init": str(tmp_path / "model")}, optimizer__skip=2)
    with pytest.raises(DllmError, match="the loss of step 3 is nan, after 2 .* whether the weights of model.init"):
        train.train(config)


def test_settings_that_change_are_in_the_log(whole, tmp_path, capsys):
    out = cut(whole, tmp_path / "run")
    path = str(write_toml(tmp_path / "run.toml", settings(out, steps=6, checkpoint__every=2, log__every=1, **SMALL)))
    what = ["masked-diffusion", "--config", path, "--no-progress"]
    for more, sentence in (
        (["seed=1"], "--allow-change seed"),
        (["seed=1", "--allow-change", "sede"], "'seed'"),
        (["lora.rank=1", "--allow-change", "lora.rank"], "lora.rank cannot change"),
        (["optimizer.ema=0.9", "--allow-change", "optimizer.ema"], "optimizer.ema = 0.0, not 0.9"),
        (["steps=5"], "steps = 6, not 5"),
        (["steps=3", "--allow-change", "steps"], "has done 4 steps; set steps to 4 or more"),
    ):
        assert main([*what, *more]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["block-diffusion", *what[1:], "objective.block_length=4"]) == 2
    assert "is one of python -m train masked-diffusion" in capsys.readouterr().err
    changed = ["steps=8", "optimizer.lr=1e-3", "optimizer.clip=0.0"]
    allowed = ["--allow-change", "optimizer.lr", "--allow-change", "optimizer.clip"]
    assert main([*what, *changed, *allowed]) == 0
    told = lines(out)
    changes = {"steps": [6, 8], "optimizer.lr": [0.01, 0.001], "optimizer.clip": [1.0, 0.0]}
    assert told[4] == {"step": 4, "changed": changes}
    assert [line["step"] for line in told] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert told[5]["lr"] < 1e-3 < told[3]["lr"]
    assert json.loads((out / "run.json").read_text())["optimizer"]["clip"] == 0.0
    assert main([*what, *changed]) == 0  # the run is one with these settings now
    assert "nothing was left to do" in capsys.readouterr().out


def test_reading_trajectories_that_are_gone_is_told_by_name(tmp_path):
    from test_train_compression import write_folder

    folder = write_folder(tmp_path / "trajectories")
    source = Trajectories(folder, correct=False)
    before = source.identity
    second = sorted(folder.glob("*.npz"))[1]
    second.write_bytes(second.read_bytes()[:100])
    assert source.identity != before
    left, faults = drop_bad_examples(source, DataPart(length=12, on_bad="drop"), "sft", LLADA)
    assert len(left) == 4 and faults.kinds == {"unreadable": 3} and str(second) in faults.sentences[0]
