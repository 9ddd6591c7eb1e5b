"""Which kernels get adapters, and adapters that start from adapters."""

import json
import shutil

import jax
import numpy as np
import pytest
from train_toys import LLADA, run_config

import dllm_jax
import train
from dllm_jax import DllmError
from train.config import LoraPart
from train.lora import target_names


@pytest.mark.parametrize(
    ("model", "targets", "wanted"),
    [
        ("llada-8b-base", ["attention"], "attn.k_proj attn.o_proj attn.q_proj attn.v_proj"),
        ("llada-8b-base", ["mlp"], "mlp.down_proj mlp.gate_proj mlp.up_proj"),
        (
            "llada-8b-base",
            ["all-linear", "!*.[kv]_proj.*"],
            "attn.o_proj attn.q_proj mlp.down_proj mlp.gate_proj mlp.up_proj",
        ),
        (
            "llada-8b-base",
            ["all-linear", "!mlp", "lm_head.kernel"],
            "attn.k_proj attn.o_proj attn.q_proj attn.v_proj lm_head",
        ),
        ("llada-moe-7b-a1b-base", ["all-linear"], "attn.k_proj attn.o_proj attn.q_proj attn.v_proj"),
        ("llada2.0-mini", ["*.shared.*.kernel"], "mlp.shared.down_proj mlp.shared.gate_proj mlp.shared.up_proj"),
    ],
)
def test_words_and_exceptions(model, targets, wanted):
    names = target_names(dllm_jax.published_config(model), LoraPart(rank=1, targets=tuple(targets)))
    layers = {
        name.removesuffix(".kernel").split(".", 2)[-1] if name.startswith("layers") else "lm_head" for name in names
    }
    assert sorted(layers) == wanted.split() and len(names) == len(set(names))


@pytest.mark.parametrize(
    ("model", "targets", "sentence"),
    [
        ("llada-moe-7b-a1b-base", ["mlp"], "'mlp' matches no parameter.*; the weights of experts take no adapters"),
        ("llada-moe-7b-a1b-base", ["*.mlp.w_in"], "layers.0.mlp.w_in, weights of experts, which take no adapters"),
        ("llada-8b-base", ["embed.*"], "embed.embedding, which is no projection"),
        ("llada-8b-base", ["!mlp"], "lora.targets leaves no kernel; name one before"),
        ("llada-8b-base", ["attention", "!*.z_proj.*"], "'!\\*.z_proj.\\*' matches no parameter"),
    ],
)
def test_targets_that_cannot_be(model, targets, sentence):
    with pytest.raises(DllmError, match=sentence):
        target_names(dllm_jax.published_config(model), LoraPart(rank=1, targets=tuple(targets)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, a run of adapters to it, and a second one that starts from them."""
    folder = tmp_path_factory.mktemp("lora")
    train.train(run_config(folder / "base", steps=2))
    of = lambda name, **lora: run_config(
        folder / name,
        model={"init": str(folder / "base" / "model")},
        lora={"rank": 2, "alpha": 4.0, **lora},
        optimizer={"batch": 8, "lr": 1e-2, "warmup": 0, "schedule": "constant"},
    )
    first = train.train(of("first")).folder
    return folder, of, first


def test_a_second_run_begins_where_the_first_ended(runs):
    """What it starts from is what the first wrote, bit for bit; from there it is a run of its own: fresh moments."""
    folder, of, first = runs
    config = of("second", init=str(first))
    written = train.load_adapters(first)[2]
    parts = train.trainer.read_parts(config)
    fresh = train.trainer.Run(config, parts, placement(config, parts)).initial_state()
    assert fresh.step == 0 and not any(np.any(x) for x in jax.tree.leaves(fresh.optimizer) if x.ndim > 1)
    for name, value in written.items():
        np.testing.assert_array_equal(fresh.trained[name], value)
    outcome = train.train(config)
    assert train.train(config).started == outcome.step == 6
    trained = train.load_adapters(outcome.folder)[2]
    assert trained.keys() == written.keys() and all(np.any(trained[name] != written[name]) for name in written)
    losses = lambda name: [
        json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses("second")[0] < losses("first")[0]
    with pytest.raises(DllmError, match="lora.init = .*, not ''"):
        train.train(of("second"))


def placement(config, parts):
    return train.trainer.placement_of(config, parts.model, train.trainer.training_mesh(config))


def test_on_a_mesh_they_lie_where_the_kernels_do(runs):
    _, of, first = runs
    config = of("meshed", init=str(first))
    config = train.config.dataclasses.replace(config, compute=train.config.ComputePart(mesh={"fsdp": 2, "tensor": 2}))
    parts = train.trainer.read_parts(config)
    place = placement(config, parts)
    fresh = train.trainer.Run(config, parts, place).initial_state()
    for name, value in train.load_adapters(first)[2].items():
        np.testing.assert_array_equal(fresh.trained[name], value)
        assert fresh.trained[name].sharding == place.trained[name]


def test_adapters_that_do_not_fit_are_refused(runs, tmp_path):
    folder, of, first = runs
    other = shutil.copytree(folder / "base" / "model", tmp_path / "other")
    for changes, sentence in (
        ({"rank": 4}, "adapters of rank 2, and lora.rank is 4; set it to 2"),
        ({"alpha": 8.0}, "adapters of alpha 4, and lora.alpha is 8; set it to 4"),
        ({"targets": ["mlp"]}, "has an adapter for layers.0.attn.k_proj.kernel"),
        ({"targets": ["all-linear"]}, "has no adapter for layers.0.mlp.down_proj.kernel"),
        ({"init": str(folder / "first")}, "holds no adapters"),
        ({"rank": 0}, "lora.init names adapters to start from, and lora.rank is 0"),
    ):
        with pytest.raises(DllmError, match=sentence):
            train.train(of("bad", **{"init": str(first), **changes}))
    changed = run_config(
        tmp_path / "run", model={"init": str(other)}, lora={"rank": 2, "alpha": 4.0, "init": str(first)}
    )
    with pytest.raises(DllmError, match="was trained on .*base/model, and model.init is .*other; give that model"):
        train.train(changed)
    assert not (folder / "bad").exists() and LLADA.embed_dim == 16
