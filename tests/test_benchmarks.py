"""The benchmarks run and count right; what they time is looked at by people, never by a test."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_error
from test_train_grpo import CANVAS, MASK, config_of
from train_toys import LLADA

import dllm_jax
from benchmarks import attention, compare, data, estimates, first_call, on_gpu, roofline
from benchmarks import sample as bench
from dllm_jax.models.denoiser import Span
from dllm_jax.models.kv_cache import slice_rows, write_rows

ROOT = Path(__file__).parents[1]
CONFIG = LLADA.replace(  # shifted, the more general case
    vocab_size=160,
    embed_dim=32,
    head_dim=16,
    mlp_dim=64,
    max_length=4096,
    shift=True,
    eos_id=150,
    pad_id=150,
    mask_id=151,
    bos_id=152,
    end_ids=(150,),
)


def test_the_page_names_results_that_exist():
    rows = [row for row in (ROOT / "benchmarks/README.md").read_text().splitlines() if row.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w/][\w/.*-]*)`", row.split("|")[-2])]
    assert len(names) > 15
    for name in names:
        folder = "." if name.startswith("evals/") else "benchmarks" if "/" in name else "benchmarks/results"
        assert list((ROOT / folder).glob(name)), name


@pytest.fixture(scope="module")
def job():
    return bench.Job(dllm_jax.random_model(CONFIG), gen_length=16, block_length=8, ignore_eos=True)


def finite_and_positive(row, names):
    return all(math.isfinite(row[name]) and row[name] > 0 for name in names)


@pytest.fixture(scope="module")
def programs():
    return bench.Programs()


@pytest.fixture(scope="module")
def prompts(job):
    prompt, lengths = bench.make_prompts(job.model, 2, 5)
    return prompt, lengths - jnp.array([0, 2])


def test_rows_have_numbers_and_baselines(job, programs, prompts):
    group = bench.Group("threshold", 2, ["none", "dual"], bench.BASELINES, repeats=2)
    *_, rows = bench.measure_group(job, group, *prompts, programs)
    rows = bench.with_ratios(rows)
    assert [(row["engine"], row["cache"]) for row in rows] == group.entries()
    for row in rows:
        assert finite_and_positive(row, ["seconds", "tokens_per_second", "forwards_per_second", "nfe", "vs_ar"])
        assert row["tokens"] == 16 and row["repeats"] == len(row["seconds_all"]) == 2
        assert row["full_forwards"] + row["window_forwards"] == row["nfe"]
        assert row["engine"] == "ar" or finite_and_positive(row, ["vs_python_loop", "vs_none"])
    loop = rows[2]
    assert loop["engine"] == "python-loop" and loop["same_tokens"] == 1.0 and loop["vs_python_loop"] == 1.0


def test_python_loop_writes_the_tokens_of_the_compiled_generation(job, programs, prompts):
    sampler, denoiser = job.sampler("topk:k=3", "dual"), job.model.denoiser
    compiled = programs.contender("sample", bench.sample, sampler, denoiser, *prompts).run()
    looped = bench.python_loop(sampler, denoiser, *prompts).run()
    np.testing.assert_array_equal(compiled.tokens, looped.tokens)
    np.testing.assert_array_equal(compiled.nfe, [6, 6])


def test_autoregressive_baseline_is_greedy_decoding(job, prompts):
    (prompt, lengths), denoiser = prompts, job.model.denoiser
    result = jax.jit(bench.autoregressive, static_argnums=0)(16, denoiser, prompt, lengths)
    whole = write_rows(jnp.pad(prompt, ((0, 0), (0, 16))), result.tokens, lengths)
    causal = dllm_jax.Denoiser(denoiser.config.replace(attention="causal", shift=False), denoiser.params)
    greedy = jnp.argmax(jax.jit(lambda model, tokens: model(tokens))(causal, whole), axis=-1)
    np.testing.assert_array_equal(slice_rows(greedy, lengths - 1, 16), result.tokens)


def test_one_program_serves_all_numbers_of_a_rule(job, programs, prompts):
    make = lambda rule: programs.contender(
        "sample", bench.sample, job.sampler(rule, "dual"), job.model.denoiser, *prompts
    )
    contenders = [make("topk:k=2"), make("topk:k=4")]
    assert [int(contender.run().nfe[0]) for contender in contenders] == [8, 4]
    assert contenders[0].compile_seconds == contenders[1].compile_seconds


def test_forwards_against_ceilings():
    ceilings = roofline.measure_ceilings("float32", quick=True, repeats=2)
    assert ceilings.copy > 0 and ceilings.matmul > 0
    denoiser = dllm_jax.random_model(CONFIG.replace(num_layers=1)).denoiser
    setting = roofline.Setting(denoiser, 1, 8, 16, 8)
    rows, split = roofline.measure_forwards(setting, ceilings, split=True, repeats=2, target_seconds=0.01)
    assert [row["forward"] for row in rows] == ["full", "window"]
    for row in rows:
        assert finite_and_positive(row, ["seconds", "flops_per_second", "fraction_of_matmul", "fraction_of_floor"])
    assert finite_and_positive(split, ["window_seconds", "step_seconds"])
    parts = [split[f"{part}_seconds"] for part in roofline.PARTS]
    assert math.isclose(sum(parts), split["step_seconds"])


def test_counted_operations_and_bytes_are_those_of_the_program(job):
    config, denoiser = job.model.config, job.model.denoiser
    start = jnp.zeros((2,), jnp.int32) + 8
    tokens = jnp.zeros((2, 24), jnp.int32)
    forward = lambda denoiser: denoiser.logits(denoiser.forward(tokens, start + 16, outputs=Span(start, 8))[0])
    dots = jax.jit(forward).lower(denoiser).cost_analysis()["flops"]
    # XLA also counts what is not a matrix product: norms, rotations, softmax.
    assert 1.0 < dots / roofline.forward_flops(config, 2, 24, 24, 8) < 1.35
    sizes = {name: array.nbytes for name, array in job.model.params.items()}
    assert roofline.weight_bytes(config, "float32") == sum(sizes.values()) - sizes["embed.embedding"]
    cache = sum(x.nbytes for x in jax.tree.leaves(denoiser.empty_cache(2, 24)))
    assert roofline.cache_bytes(config, "float32", 2, 24) == cache


def test_plan_of_a_gpu_and_what_time_does_not_allow(job, tmp_path):
    options = bench.parser().parse_args(["--suite", "gpu"])
    plan = bench.make_plan(options)
    assert plan[0] == bench.Forwards(1) and {part.batch for part in plan} == {1, 8, 32}
    bench.run(plan, job, bench.Report({}, tmp_path / "out.json", time_limit=-1.0), None)
    assert len(json.loads((tmp_path / "out.json").read_text())["skipped"]) == len(plan)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--rules", "thresold"], "'thresold'"),
        (["--rules", "threshold", "--caches", "dul"], "'dul'"),
        (["--rules", "eb", "--baselines", "x"], "'x'"),
        ([], "--rules"),
        (["--rules", "eb", "--model", "tiny", "--layers", "1"], "--layers"),
    ],
)
def test_mistakes_are_sentences(arguments, name, capsys):
    assert bench.main(arguments) == 2
    assert name in one_error(capsys)


def test_command_line_writes_json_and_csv(tmp_path):
    lengths = ["--gen-length", "16", "--block-length", "8", "--repeats", "1"]
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    choice = ["--rules", "topk:k=8", "--caches", "none,dual", "--baselines", ""]
    command = [sys.executable, "-m", "benchmarks.sample", *choice, *lengths, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["model"] == "llada-tiny" and found["weights"] == "checkpoint" and found["notes"]
    assert len(found["rows"]) == 2 == len((tmp_path / "out.csv").read_text().splitlines()) - 1


def test_two_checkouts_are_compared_by_medians():
    """Above 1 is better in every column; rows that only one has are left out."""
    row = {"engine": "compiled", "rule": "eb", "cache": "dual", "batch": 1}
    report = lambda speed, compiled: {
        "rows": [
            {**row, "tokens_per_second": speed, "nfe": 8.0, "compile_seconds": compiled},
            {**row, "batch": int(speed), "tokens_per_second": 1.0, "nfe": 1.0, "compile_seconds": 1.0},
            {**row, "rule": "ar", "tokens_per_second": None, "nfe": 1.0, "compile_seconds": 1.0},
        ]
    }
    (found,) = compare.compared([report(10.0, 4.0), report(30.0, 6.0)], [report(40.0, 2.0), report(50.0, 3.0)])
    ratios = [found[f"{name}_ratio"] for name in ("tokens_per_second", "nfe", "compile_seconds")]
    assert ratios == [45.0 / 20.0, 1.0, 5.0 / 2.5] and found["tokens_per_second_old"] == 20.0


def test_attention_is_right_by_its_own_benchmark(tmp_path, capsys):
    """Interpreted, which says nothing about speed; and no kernels run on this platform."""
    options = ["--interpret", "--shapes", "1x64x80x4x2x64", "--repeats", "1", "--calls", "1"]
    assert attention.main([*options, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["gradient"] for row in rows] == [False, True] * 2 and all(row["kernel_error"] < 1e-5 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5
    for arguments, name in (([], "cpu"), (["--shapes", "1x2"], "1x2")):
        assert attention.main(arguments) == 2 and name in one_error(capsys)


def test_a_gpu_s_steps_go_on_where_one_fails(tmp_path, monkeypatch, capsys):
    """And without a GPU nothing is begun."""
    assert on_gpu.main([str(tmp_path / "none")]) == 2
    assert "this Python cannot measure a GPU" in capsys.readouterr().out and not (tmp_path / "none").exists()
    monkeypatch.setattr(on_gpu, "CHECK", "pass")
    commands = {"one": (60, "--help"), "two": (60, "--nothing"), "slow": (0, "--help")}
    steps = {name: on_gpu.Step(limit, ("json.tool", option), ()) for name, (limit, option) in commands.items()}
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    assert on_gpu.run(tmp_path, list(steps)) == ["two (2)", "slow (not done after 0 s)"]
    assert "usage" in (tmp_path / "one.log").read_text()
    capsys.readouterr()
    assert on_gpu.run(tmp_path, ["one", "two"]) == ["two (2)"]
    assert "one: there already" in capsys.readouterr().out
    told = json.loads((tmp_path / "on_gpu.json").read_text())
    assert {name: one["status"] for name, one in told.items()} == {"one": 0, "two": 2, "slow": "not done after 0 s"}
    assert "| two | failed: 2 |" in (tmp_path / "on_gpu.md").read_text()


def test_a_gpu_s_steps_are_rehearsed_from_end_to_end(tmp_path):
    """With small shapes on this machine, so that nothing fails on a GPU that a CPU would show."""
    assert on_gpu.main([str(tmp_path), "--rehearse"]) == 0
    told = json.loads((tmp_path / "on_gpu.json").read_text())
    assert list(told) == list(on_gpu.STEPS) and all(one["result"] for one in told.values())
    assert [row["same"] for row in told["tokens"]["result"]["rows"]] == [1.0] * 4
    assert told["doctor"]["result"]["ok"]
    page = (tmp_path / "on_gpu.md").read_text()
    assert "A rehearsal" in page and all(f"| {name} | ran |" in page for name in on_gpu.STEPS)


def test_the_seconds_of_a_gpu_s_steps_are_ten_minutes():
    assert sum(step.seconds for step in on_gpu.STEPS.values()) <= 600


def test_first_calls_are_rehearsed(llada_tiny, tmp_path, capsys):
    """Two samplers, each in two processes of its own; what the model refuses is a row with the reason."""
    file = tmp_path / "first.json"
    given = ["--model", str(llada_tiny.folder), "--gen-length", "8", "--json", str(file)]
    assert first_call.main([*given, "--sampler", "topk", "--sampler", "renoise"]) == 0
    topk, renoise = json.loads(file.read_text())["rows"]
    assert finite_and_positive(topk, ["empty", "kept", "next", "load"]) and topk["sampler"] == "topk"
    assert topk["saved"] == 1 - topk["kept"] / topk["empty"]
    assert renoise.keys() == {"sampler", "refused"} and "llada" in renoise["refused"]
    table = capsys.readouterr().out
    assert "topk" in table and renoise["refused"] in table
    assert first_call.main([*given, "--sampler", "topp"]) == 2 and "topp" in one_error(capsys)


def test_data_is_measured_without_processes(tmp_path):
    path = tmp_path / "data.json"
    arguments = ["--workers", "0", "--repeats", "2", "--seconds", "0.05", "--megabytes", "0.6", "--json", str(path)]
    assert data.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    numbers = [row.keys() & {"start", "speed", "own_cpu"} for row in rows]
    assert [len(names) for names in numbers] == [2, 3, 3, 1] and all(row["n"] == 2 for row in rows)
    assert all(0 < row[name][0] <= row[name][1] <= row[name][2] for row in rows for name in row.keys() & numbers[1])


def test_estimates_of_log_probabilities(tmp_path):
    """That of the empty canvas is one forward, and the gradient of the exact one is training's."""
    run, state, batch = estimates.completions(config_of(tmp_path, objective={"states": CANVAS}))
    exact, gradient = estimates.estimate(run, state, batch, 1, 0.0)
    empty, _ = estimates.estimate(run, state, batch, 0, 0.0)
    tokens, drawn = np.asarray(batch.tokens[0]), np.asarray(batch.drawn[0])
    inputs = jnp.where(batch.step[0] >= 0, MASK, tokens)
    logits = run.stepper.learner(state.trained, {})(inputs, batch.lengths[0])
    log = jax.nn.log_softmax(logits.at[..., MASK].set(-jnp.inf))
    own = np.take_along_axis(np.asarray(log), tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(empty, np.where(drawn, own, 0).sum(axis=1) / drawn.sum(axis=1), atol=1e-5)
    assert np.abs(exact - empty).max() > 1e-3
    noised = run.stepper.add_noise(batch, jax.random.key(0), jnp.int32(0))
    trained, _ = run.stepper.gradient(state.trained, {}, noised, jax.random.key(1))
    np.testing.assert_allclose(estimates.cosine(gradient, trained), 1, rtol=1e-5)
    found = estimates.compared(np.asarray([0.5, 0.1, 0.2, 0.2]), np.asarray([0.4, 0.3, 0.2, 0.2]), 2)
    np.testing.assert_allclose([found["bias"], found["bias_stderr"]], [-0.025, 0.025])
    np.testing.assert_array_equal(estimates.ranks(np.asarray([0.5, 0.1, 0.2, 0.2])), [4, 1, 2.5, 2.5])
