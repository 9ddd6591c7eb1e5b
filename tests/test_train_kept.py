"""Which states of a run stay, through interruptions too, and what is written of them."""

import numpy as np
import pytest
from train_toys import run_config

import dllm_jax
import train
from dllm_jax import DllmError
from train.__main__ import main
from train.config import CheckpointPart
from train.logs import Evaluation
from train.run_dir import WATCH_SECONDS
from train.states import States

LOSSES = {0: 9.0, 2: 1.0, 4: 5.0, 6: 2.0, 8: 7.0, 10: np.nan, 12: 3.0}
SETTINGS = {
    "steps": 12,
    "optimizer__warmup": 0,
    "checkpoint": {"every": 2, "keep": 1, "keep_every": 8, "best": 2, "metric": "heldout_loss"},
    "watch": {"every": 2, "source": "train_toys:finite", "rows": 8},
}


@pytest.fixture
def losses(monkeypatch):
    """Evaluations that report `LOSSES`; the others of the run's metrics stay as they are."""
    told = lambda state: {"heldout_loss": LOSSES[int(state.step)], WATCH_SECONDS: 1.0}
    monkeypatch.setattr("train.evaluation.Watch.__call__", lambda self, state, frozen: Evaluation(told(state), []))


def metrics_of(out, part=SETTINGS["checkpoint"]):
    with States(out / "state", CheckpointPart(**part), clean=False) as states:
        assert states.steps == list(states.metrics)
        return states.metrics, states.best


def test_the_latest_every_and_the_best_states_stay(tmp_path, losses):
    config = run_config(tmp_path / "run", **SETTINGS)
    train.train(config)
    metrics, best = metrics_of(tmp_path / "run")
    assert metrics == {step: {"heldout_loss": LOSSES[step]} for step in (2, 6, 8, 12)} and best == 2
    write = ["write-model", "--run", str(tmp_path / "run"), "--out"]
    assert main([*write, str(tmp_path / "best"), "--best"]) == main([*write, str(tmp_path / "two"), "--step", "2"]) == 0
    assert main([*write, str(tmp_path / "last")]) == 0
    kernels = [dllm_jax.load(tmp_path / name).params["lm_head.kernel"] for name in ("best", "two", "last", "run/model")]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    np.testing.assert_array_equal(kernels[2], kernels[3])
    assert np.any(kernels[0] != kernels[2])
    with pytest.raises(DllmError, match="keeps no state of step 4; there are 2, 6, 8, 12"):
        train.write_weights(config, tmp_path / "none", step=4)


def test_interruptions_change_nothing_about_what_stays(tmp_path, losses, monkeypatch):
    """A signal at the step of an evaluation, whose state is one of the best; later a failure between two states."""
    config = run_config(tmp_path / "run", **SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr("train.multihost_stop.StopRequest.after", lambda self, step: step == 6)  # as after a signal
        with pytest.raises(train.Interrupted, match="after step 6"):
            train.train(config)
    assert list(metrics_of(tmp_path / "run")[0]) == [2, 6]
    with monkeypatch.context() as patch:
        patch.setattr("train.multihost_stop.StopRequest.after", lambda self, step: 1 // (11 - step) > 1)
        with pytest.raises(ZeroDivisionError):
            train.train(config)
    assert train.train(config).started in (8, 10)
    assert metrics_of(tmp_path / "run") == ({step: {"heldout_loss": LOSSES[step]} for step in (2, 6, 8, 12)}, 2)


def test_the_metric_may_change_when_a_run_resumes(tmp_path, losses):
    """States without the new one are the worst."""
    train.train(run_config(tmp_path / "run", **SETTINGS | {"steps": 8}))
    changed = SETTINGS["checkpoint"] | {"metric": "heldout_cross_entropy", "best": 1, "keep_every": 0}
    train.train(run_config(tmp_path / "run", **SETTINGS | {"checkpoint": changed}))
    metrics, best = metrics_of(tmp_path / "run", changed)
    assert best is None and 12 in metrics
    config = run_config(tmp_path / "run", **SETTINGS | {"checkpoint": changed})
    with pytest.raises(DllmError, match="has no best state, as none has 'heldout_cross_entropy'"):
        train.write_weights(config, tmp_path / "none", step="best")
    with pytest.raises(DllmError, match="has no best state, as checkpoint.best is 0"):
        train.write_weights(run_config(tmp_path / "run", steps=12, optimizer__warmup=0), tmp_path / "none", step="best")


def test_high_scores_are_better_and_equal_ones_newer(tmp_path):
    part = CheckpointPart(keep=1, best=2, metric="accuracy")
    with States(tmp_path, part, clean=True) as states:
        for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1), (5, None)):
            states.save(step, {"x": np.zeros(2)}, {}, {} if accuracy is None else {"accuracy": accuracy, "nfe": 8.0})
        assert states.steps == [2, 3, 5] and states.best == 3 and states.metrics[5] == {}
    with States(tmp_path, part, clean=True) as states:
        assert states.steps == [2, 3, 5] and states.best == 3 and states.latest == 5


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("heldout_loss", True),
        ("heldout_ema_cross_entropy", True),
        ("heldout_kl", True),
        ("heldout_ema_auc", False),
        ("accuracy", False),
        ("tokens_per_forward", False),
        ("nfe", True),
        ("own_perplexity", True),
    ],
)
def test_which_numbers_are_better(metric, lower):
    assert CheckpointPart(metric=metric).lower_is_better == lower
