"""Learning rates over a run, and what the optimiser remembers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_run import assert_same, latest_state, lines, one_step
from train_toys import run_config

import train
from dllm_jax import DllmError
from train.config import OptimizerPart
from train.optimizer import learning_rate, make_optimizer


def test_the_schedule_of_lladas_fine_tuning():
    """From 0 to 2.5e-5 in 50 steps, and to 2.5e-6 in the last tenth (arXiv 2502.09992, appendix B)."""
    rate = learning_rate(OptimizerPart(lr=2.5e-5, warmup=50, schedule="wsd"), 3000)
    told = {0: 0.0, 25: 1.25e-5, 50: 2.5e-5, 1500: 2.5e-5, 2700: 2.5e-5, 2850: 1.375e-5, 3000: 2.5e-6}
    np.testing.assert_allclose([rate(step) for step in told], list(told.values()), rtol=1e-5)


def test_schedules_at_their_ends():
    part = OptimizerPart(lr=1.0, warmup=10, final_ratio=0.1)
    of = lambda steps=110, **changes: learning_rate(dataclasses.replace(part, **changes), steps)
    for schedule, middle, end in (
        ("cosine", 0.55, 0.1),
        ("linear", 0.55, 0.1),
        ("constant", 1.0, 1.0),
        ("wsd", 1.0, 0.1),
    ):
        rate = of(schedule=schedule)
        np.testing.assert_allclose([rate(i) for i in (0, 5, 10, 60, 110)], [0, 0.5, 1, middle, end], atol=1e-6)
        assert of(schedule=schedule, warmup=0)(0) == 1.0
    short, long = of(110, schedule="wsd", decay=0.2), of(1100, schedule="wsd", decay=0.2)
    assert [short(i) for i in range(88)] == [long(i) for i in range(88)]  # a run that goes on has lost nothing
    np.testing.assert_allclose([short(88), short(99), short(110)], [1.0, 0.55, 0.1], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"decay": 0.2}, 'optimizer.decay is for optimizer.schedule "wsd", and it is "cosine"'),
        ({"schedule": "wsd", "decay": 0.9}, "optimizer.warmup 2 and optimizer.decay 0.9 of 6 steps are longer"),
        ({"schedule": "cosin"}, "optimizer.schedule is 'cosin'; choose one of cosine, wsd, linear, constant"),
        ({"moments": "bfloat16", "b2": 0.999}, "optimizer.b2 is 0.999, and bfloat16 moments round away"),
        ({"moments": "float16"}, "optimizer.moments is 'float16'; choose one of"),
    ],
)
def test_mistakes(changes, sentence, tmp_path):
    with pytest.raises(DllmError, match=sentence):
        run_config(tmp_path, **{f"optimizer__{name}": value for name, value in changes.items()})


@pytest.mark.parametrize("name", ["optimizer.lr", "optimizer.clip", "lora.alpha", "router.z"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e39, 10**400])  # 1e39 is infinite in float32
def test_a_number_that_is_not_finite_is_refused(name, value, tmp_path):
    with pytest.raises(DllmError, match=name):
        run_config(tmp_path, **{name.replace(".", "__"): value})
    if isinstance(value, float):  # not through a file
        table, field = name.split(".")
        config = run_config(tmp_path)
        part = dataclasses.replace(getattr(config, table), **{field: value})
        with pytest.raises(DllmError, match=name):
            dataclasses.replace(config, **{table: part})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_moments_take_half_the_memory_and_change_little(name, tmp_path):
    found = {}
    for moments in ("float32", "bfloat16"):
        state, metrics = one_step(run_config(tmp_path, optimizer__name=name, optimizer__moments=moments), steps=3)
        paths = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
        kept = [x for path, x in paths if getattr(path[-1], "key", "") in state.trained]
        assert {x.dtype.name for x in kept} == {moments}
        assert {x.dtype.name for x in state.trained.values()} == {"float32"}
        found[moments] = sum(x.nbytes for x in kept), metrics
    assert 2 * found["bfloat16"][0] == found["float32"][0] > 0
    plain, rounded = (found[moments][1] for moments in ("float32", "bfloat16"))
    assert plain[:2] == rounded[:2] and plain[2] != rounded[2]  # the rate is 0 at first; then it reads what was rounded
    np.testing.assert_allclose(plain[2]["loss"], rounded[2]["loss"], rtol=1e-2)


def test_moments_are_rounded_and_constants_of_muon_are_not():
    part = OptimizerPart(name="muon", moments="bfloat16", warmup=0)
    params = {"layers.0.w.kernel": jnp.ones((4, 4)), "a.scale": jnp.ones(4)}
    plain, rounded = (make_optimizer(dataclasses.replace(part, moments=m), 10) for m in ("float32", "bfloat16"))
    gradient = {name: jax.random.normal(jax.random.key(0), x.shape) for name, x in params.items()}
    (_, one), (_, other) = (o.update(gradient, o.init(params), params) for o in (plain, rounded))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for path, x in jax.tree_util.tree_flatten_with_path(one)[0]:
        y = dict(jax.tree_util.tree_flatten_with_path(other)[0])[path]
        wanted = x.astype(y.dtype) if getattr(path[-1], "key", "") in params else x
        np.testing.assert_array_equal(wanted, y)


def test_a_run_with_bfloat16_moments_goes_on_bit_for_bit(tmp_path):
    changes = {"optimizer__moments": "bfloat16", "optimizer__schedule": "wsd", "optimizer__decay": 0.5}
    train.train(run_config(tmp_path / "whole", steps=6, **changes))
    config = run_config(tmp_path / "cut", steps=6, checkpoint__keep=9, **changes)
    train.train(config)
    for entry in ("state/6", "model"):
        (tmp_path / "cut" / entry).rename(tmp_path / entry.replace("/", "-"))
    assert train.train(config).started == 3
    assert_same(latest_state(tmp_path / "cut"), latest_state(tmp_path / "whole"))
    rates = [line["lr"] for line in lines(tmp_path / "cut")]
    np.testing.assert_allclose(rates, [5e-3, 1e-2, 1e-2, 4e-3], rtol=1e-5)  # of steps 2, 3, 4 and 6
    with pytest.raises(DllmError, match="optimizer.moments = 'bfloat16', not 'float32'"):
        train.train(run_config(tmp_path / "cut", steps=6, **changes | {"optimizer__moments": "float32"}))
