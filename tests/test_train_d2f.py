"""D2F's objective by its properties, whole runs on one device and on eight, adapters in the hub's format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDENS
from train_toys import DREAM, LLADA, run_config, settings, write_toml

import convert
import dllm_jax
import train
from dllm_jax import Denoiser, DllmError
from dllm_jax.params.specs import init_params
from train.__main__ import main
from train.losses import Batch
from train.objectives.d2f import D2F, BlockDraws, D2FConfig, D2FPart, block_ratios
from train.settings import build_settings

B, T = 4, 13


def make_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (B, T))
    tokens[:, 10:] = LLADA.eos_id
    targets = np.arange(T) >= np.array([3, 0, 5, 1])[:, None]
    return Batch(jnp.asarray(tokens), jnp.asarray(targets), jnp.full(B, T))


def denoiser_of(config, seed=1):
    params = init_params(config, jax.random.key(seed), dtype="float32")
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


@pytest.mark.parametrize("schedule", ["monotone", "random"])
def test_shares_stay_within_their_bounds(schedule):
    rng = np.random.default_rng(0)
    draws = BlockDraws(*(jnp.asarray(rng.random(shape), jnp.float32) for shape in ((500,), (500, 4), (500, 1))))
    ratios = np.asarray(block_ratios(draws, jnp.full(500, 5), schedule, 0.2, 0.7))
    assert ratios.min() >= 0.2
    assert ratios.max() < 0.7 + 1e-6
    assert (np.diff(ratios, axis=1) >= 0).all() == (schedule == "monotone")
    middle = {"monotone": 0.5 * (0.45 + 0.7), "random": 0.45}[schedule]  # between the first, and the bound
    assert abs(ratios[:, -1].mean() - middle) < 0.02


def test_only_the_answer_is_masked():
    denoiser, batch = Denoiser(DREAM, {}), make_batch()
    for padding in (True, False):
        objective = D2F(D2FPart(block_length=4, end_padding=padding, low=1.0, high=1.0))
        noised = objective.corrupt(jax.random.key(0), batch, denoiser)
        wanted = np.asarray(batch.targets) & (np.arange(T) >= 1) & (padding | (np.arange(T) < 10))
        assert ((np.asarray(noised.weights) == 1.0) == wanted).all()
        assert ((np.asarray(noised.inputs) == DREAM.mask_id) == wanted).all()


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_chunks_and_groups_change_nothing(config):
    """And a student that sees everything in one block is its own teacher."""
    batch, base, student = make_batch(), denoiser_of(config), denoiser_of(config, seed=2)
    noised = D2F(D2FPart(block_length=4)).corrupt(jax.random.key(3), batch, base)

    @jax.jit
    def values(params, noised):
        def of(chunk, groups, block_length=4):
            objective = D2F(D2FPart(block_length=block_length, chunk=chunk))
            loss = lambda params: objective.loss(Denoiser(config, params), base, noised, groups=groups)
            return jax.value_and_grad(loss, has_aux=True)(params)

        whole = D2F(D2FPart(block_length=T)).loss(base, base, noised._replace(prompt_lengths=jnp.zeros(B, jnp.int32)))
        return of(64, 1), of(6, 2), whole[1]["kl"]

    (one, gradient), (other, pieces), same = values(dict(student.params), noised)
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    np.testing.assert_allclose(one[1]["kl"], other[1]["kl"], rtol=1e-5)
    for name in gradient:
        np.testing.assert_allclose(gradient[name], pieces[name], atol=1e-4, err_msg=name)
    assert one[1]["kl"] > 0.1
    np.testing.assert_allclose(same, 0.0, atol=1e-5)


def d2f_settings(out, base, **changes):
    values = settings(out, lora={"rank": 2, "alpha": 2.0, "dropout": 0.2}, objective={"block_length": 3}, **changes)
    return values | {"model": {"init": str(base)}}


def test_a_block_diffusion_model_teaches_what_it_decodes_with():
    """A student that is its teacher still errs where it sees masks before the block, and nowhere else."""
    config = LLADA.replace(attention="block", block_length=4)
    denoiser, batch = denoiser_of(config), make_batch()
    batch = Batch(*(jnp.pad(x, ((0, 0), (0, 3))) for x in batch[:2]), batch.lengths)
    objective = D2F(D2FPart(block_length=4, low=0.5))
    noised = objective.corrupt(jax.random.key(0), batch, denoiser)
    assert not noised.prompt_lengths.any()
    for row, prompt in enumerate((3, 0, 5, 1)):
        first = jnp.arange(T + 3) < prompt // 4 * 4 + 4  # the block in which the answer begins
        of_row = jax.tree.map(lambda x, row=row: x[row : row + 1], noised)
        for weights, exact in ((jnp.where(first, 1.0, 0.0), True), (jnp.where(first, 0.0, 1.0), False)):
            part = of_row._replace(weights=of_row.weights * weights)
            kl = objective.loss(denoiser, denoiser, part)[1]["kl"]
            assert (abs(kl) < 1e-5) == exact


def test_runs_on_one_device_and_on_eight(tmp_path, capsys):
    train.train(run_config(tmp_path / "base", steps=2, checkpoint__every=2))
    base = tmp_path / "base" / "model"
    curves = []
    for name, mesh in (("one", {}), ("eight", {"data": 2, "fsdp": 2, "tensor": 2})):
        path = write_toml(tmp_path / f"{name}.toml", d2f_settings(tmp_path / name, base, compute__mesh=mesh))
        assert main(["d2f", "--config", str(path), "--no-progress"]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curves.append([(json.loads(line)["loss"], json.loads(line)["kl"]) for line in lines])
    np.testing.assert_allclose(*curves, rtol=1e-3, atol=1e-6)
    out = tmp_path / "one" / "adapters"
    config, part, adapters, named = train.load_adapters(out)
    assert (part.rank, part.alpha, part.dropout, named) == (2, 2.0, 0.2, str(base))
    assert len(adapters) == 2 * 4 * config.num_layers
    assert json.loads((out / "adapter_config.json").read_text())["target_modules"] == [
        "attn_out",
        "k_proj",
        "q_proj",
        "v_proj",
    ]
    assert main(["write-model", "--run", str(tmp_path / "one"), "--out", str(tmp_path / "again")]) == 0
    again = train.load_adapters(tmp_path / "again")[2]
    assert all((adapters[name] == again[name]).all() for name in adapters)
    values = d2f_settings(tmp_path / "x", base)
    with pytest.raises(DllmError, match="lora.rank"):
        build_settings(D2FConfig, values | {"lora": {"rank": 0}})
    with pytest.raises(DllmError, match="lora.dropout"):
        build_settings(D2FConfig, values | {"lora": {"rank": 2, "dropout": 1.0}})
    with pytest.raises(DllmError, match="objective.block_length"):
        build_settings(D2FConfig, values | {"objective": {"block_length": 0}})


def test_published_adapters_are_merged_or_kept_apart(tmp_path, llada_tiny, dream_tiny, capsys):
    source, base = GOLDENS / "d2f-lora-llada-tiny", llada_tiny.folder
    arguments = ["d2f-lora", "--source", str(source), "--base", str(base)]
    from convert.__main__ import main as convert_main

    assert convert_main([*arguments, "--out", str(tmp_path / "merged")]) == 0
    assert convert_main([*arguments, "--out", str(tmp_path / "apart"), "--apart"]) == 0
    assert "rank 4 for 16 matrices" in capsys.readouterr().out
    train.merge_adapters(base, tmp_path / "apart", tmp_path / "later")
    first, second = (dllm_jax.load(tmp_path / name).params for name in ("merged", "later"))
    name = "layers.3.attn.o_proj.kernel"
    assert (first[name] == second[name]).all()
    assert not np.allclose(first[name], llada_tiny.params[name])
    with pytest.raises(DllmError, match="belongs to no matrix of a dream model"):
        convert.convert_adapters(source, dream_tiny.folder, tmp_path / "x")
    values = json.loads((source / "adapter_config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    for change, sentence in (
        ({"base_model_name_or_path": "x/LLaDA-8B-Base"}, "pass --any-base"),
        ({"use_dora": True}, "use_dora = true is not implemented"),
        ({"r": 8}, "the model and r = 8 need floats"),
    ):
        (other / "adapter_config.json").write_text(json.dumps(values | change))
        with pytest.raises(DllmError, match=sentence):
            convert.convert_adapters(other, base, tmp_path / "x")
