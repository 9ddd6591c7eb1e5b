"""NI sampling: the indicator's files, the rule with every cache policy, lossless orders, trajectories as data."""

import dataclasses
import functools
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDENS, assert_same_row, one_error, refuses
from golden_ni import mergeable_steps, merged_order
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import BLOCK, EOS, GEN, MASK, ROWS, first_layers, keys, run
from test_evals_tasks import config_for
from train_toys import Listed

import convert.__main__ as convert_cli
import evals.__main__ as evals_cli
from convert.indicator import convert_indicator, export_indicator
from dllm_jax import Denoiser, Model, random_model
from dllm_jax.checkpoints import checkpoint
from dllm_jax.indicator import Indicator, IndicatorConfig, init_indicator, load_indicator, save_indicator
from dllm_jax.params.specs import init_params
from evals import trajectories
from evals.oracle import oracle
from evals.tasks import make_task
from samplers import (
    EB,
    NI,
    RULES,
    BlockSampler,
    Credit,
    Dream,
    DualCache,
    Factor,
    Hierarchical,
    LLaDA,
    NoCache,
    PipelineSampler,
    PrefixCache,
    Remask,
    Sampling,
    Smoothing,
    Threshold,
    TopK,
    VicinityCache,
    make_sampler,
    parse_sampler,
    sample_jit,
    stop_on,
)
from samplers.config.explain import list_settings
from samplers.config.registry import title
from samplers.config.sampler_config import configure
from samplers.rules import Dynamic, FastDllmV2
from samplers.testing import TINY, check_rule
from samplers.text.prompts import pad_prompts
from samplers.tokens.predictions import ranked
from train.trajectory import best_tokens, merge_steps, step_numbers, trajectory_of

best_compiled = jax.jit(best_tokens)
unordered = jax.jit(functools.partial(merge_steps, ordered=False))
SOURCE = GOLDENS / "ni-indicator-llada-tiny.safetensors"
SUDOKU = "sudoku:box_rows=2,box_columns=2"
CACHES = {
    "none": NoCache(),
    "prefix": PrefixCache(),
    "dual": DualCache(),
    "vicinity": VicinityCache(prefix_look=4, after_look=6, warmup=2),
}


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 1)


@pytest.fixture(scope="module")
def dream(dream_tiny) -> Model:
    return first_layers(dream_tiny, 1)


@pytest.fixture(scope="module")
def indicator(ni_indicator) -> Indicator:
    return load_indicator(ni_indicator)


def sampler_of(rule: NI | Threshold, cache: str = "none", **options) -> BlockSampler:
    return BlockSampler(rule, gen_length=GEN, block_length=BLOCK, cache=CACHES[cache], **options)


@pytest.mark.parametrize("size, count", [(1000, 7), (997, 30), (5000, 1), (64, 64), (40, 16)])
def test_ranking_in_two_searches_is_top_k(size, count):
    rng = np.random.default_rng(size)
    rows = [
        rng.normal(size=(2, size)),
        rng.integers(0, 3, (2, size)),  # many equals
        np.where(rng.random((2, size)) < 0.9, -np.inf, rng.normal(size=(2, size))),  # fewer than count are finite
        np.sort(rng.normal(size=(2, size))),  # the best are neighbours
        np.full((2, size), -np.inf),
    ]
    logits = jnp.asarray(np.stack(rows), jnp.float32)
    for found, wanted in zip(ranked(logits, count), jax.lax.top_k(logits, count), strict=True):
        np.testing.assert_array_equal(found, wanted)


# The indicator and its files -----------------------------------------------------------------------------------------


def state_dict(source) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(source)


def test_the_published_weights_and_back(tmp_path, indicator, capsys) -> None:
    assert convert_cli.main(["ni-indicator", "--source", str(SOURCE), "--out", str(tmp_path / "out")]) == 0
    assert f"an indicator of {indicator.config.num_params:,} parameters" in capsys.readouterr().out
    found = load_indicator(tmp_path / "out")
    assert found.config == indicator.config
    jax.tree.map(np.testing.assert_array_equal, found.params, indicator.params)
    assert convert_cli.main(["verify", "--source", str(SOURCE), "--checkpoint", str(tmp_path / "out")]) == 0
    assert convert_cli.main(["export", "--checkpoint", str(tmp_path / "out"), "--out", str(tmp_path / "back")]) == 0
    back = state_dict(tmp_path / "back" / "indicator.safetensors")
    jax.tree.map(np.testing.assert_array_equal, back, state_dict(SOURCE))
    told = json.loads((tmp_path / "back" / "indicator.json").read_text())
    assert told == json.loads(SOURCE.with_suffix(".json").read_text())


def test_a_pickle_needs_pytorch(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "indicator.pth").write_bytes(b"")
    with refuses("indicator.pth", "PyTorch"):
        convert_indicator(tmp_path / "indicator.pth", tmp_path / "out")


def test_other_tensors_are_refused_and_nothing_is_left(tmp_path) -> None:
    from safetensors.numpy import save_file

    whole, path = state_dict(SOURCE), tmp_path / "broken.safetensors"

    def check(name: str, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, path)
        with refuses(name):
            convert_indicator(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    check("hidden_states_proj.weight", {"a": whole["out_layer.1.bias"]})
    check("backbone.1.mlp.0.bias", {k: v for k, v in whole.items() if "1.mlp.0.b" not in k})
    check("another", {**whole, "another": whole["out_layer.1.bias"]})
    check("NaN", {**whole, "out_layer.1.bias": np.full(2, np.nan, np.float32)})
    (tmp_path / "broken.json").write_text('{"depth": 3}')
    check("depth", whole)


def test_files_of_an_indicator(tmp_path, indicator) -> None:
    save_indicator(tmp_path / "a", indicator)
    again = load_indicator(tmp_path / "a", "bfloat16")
    assert again.config == indicator.config and again.params["head.bias"].dtype == jnp.bfloat16
    export_indicator(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    assert convert_indicator(tmp_path / "b", tmp_path / "c") == indicator.config
    with refuses(str(tmp_path / "a")):
        save_indicator(tmp_path / "a", indicator)
    with refuses(str(tmp_path)):
        load_indicator(tmp_path)
    (tmp_path / "a" / "indicator.json").write_text(json.dumps({**dataclasses.asdict(indicator.config), "width": 25}))
    with refuses("config"):
        load_indicator(tmp_path / "a")
    (tmp_path / "a" / "indicator.json").write_text('{"depth": -1}')
    with refuses("depth"):
        load_indicator(tmp_path / "a")


# The rule ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["prefix", "vicinity"])
def test_rows_are_independent(llada, indicator, compiled, cache: str) -> None:
    """Ragged prompts and canvases, an end token; the indicator acts as far ahead as a forward runs."""
    rule = NI(indicator, threshold=0.9, indicator_threshold=0.4, scope="rest")
    sampler = sampler_of(rule, cache, stop=stop_on([EOS], vocab_size=136))
    gen_lengths = jnp.asarray([24, 24, 19, 10])
    together = run(llada, sampler, gen_lengths=gen_lengths)
    for row in range(4):
        alone = run(llada, sampler, rows=(row,), gen_lengths=gen_lengths[row : row + 1])
        assert_same_row(together, row, alone, 0)
    # numbers and parameters are data: nothing is compiled for others
    compiled.clear()
    other = Indicator(indicator.config, {name: 0.5 * x for name, x in indicator.params.items()})
    run(llada, dataclasses.replace(sampler, rule=NI(other, 0.8, 0.7, scope="rest")), gen_lengths=gen_lengths)
    assert not compiled


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_an_indicator_that_never_or_always_agrees(llada, indicator, cache: str) -> None:
    """Above its threshold never: the threshold rule. Always: a forward writes all that it runs."""
    run_rule = lambda rule: run(llada, sampler_of(rule, cache))
    never, plain = run_rule(NI(indicator, 0.8, 1.0, scope="rest")), run_rule(Threshold(0.8))
    for row in range(4):
        assert_same_row(never, row, plain, row)
    always = run_rule(NI(indicator, 0.8, 0.0, scope="rest"))
    assert (always.nfe == 1).all() and (always.decoded_at == 0).all()  # the first forward runs everything
    block = run_rule(NI(indicator, 0.8, 0.0, scope="block"))
    assert (block.nfe == GEN // BLOCK).all()
    auto = run_rule(NI(indicator, 0.8, 0.0))
    np.testing.assert_array_equal(auto.nfe, always.nfe if cache == "none" else block.nfe)


BASES = {
    "llada": LLaDA(8),
    "dream": Dream(8, alg="topk_margin"),
    "dream-origin": Dream(8, alg="origin"),
    "topk": TopK(2, proxy="random"),
    "threshold": Threshold(0.6, skip_masks=True),
    "factor": Factor(0.8),
    "eb": EB(0.4, score_from="sampling"),
    "credit": Credit(0.6),
    "hierarchical": Hierarchical(0.8, 0.4),
    "dynamic": Dynamic(0.6, steps=2),
    "fast-dllm-v2": FastDllmV2(0.5),
}


def tiny_indicator(seed: int = 1) -> Indicator:
    sizes = {"hidden_dim": TINY.embed_dim, "embed_dim": TINY.embed_dim, "num_values": 4, "num_tokens": 2}
    return init_indicator(IndicatorConfig(depth=1, width=8, **sizes), jax.random.key(seed))


@pytest.mark.parametrize("name", BASES)
def test_a_base_rule_with_a_silent_indicator_is_that_rule(name) -> None:
    """Tokens, forwards and the forward of every position, under every cache policy."""
    params = init_params(TINY, jax.random.key(0), dtype="float32")
    denoiser = Denoiser(TINY, {name: x * 150 if x.ndim > 1 else x for name, x in params.items()})
    prompt, lengths = jax.random.randint(jax.random.key(2), (4, 9), 0, 20), jnp.asarray([9, 5, 6, 9])
    for cache in CACHES.values():
        make = lambda rule, cache=cache: BlockSampler(rule, gen_length=16, block_length=8, cache=cache)
        results = [
            jax.device_get(sample_jit(make(rule), denoiser, prompt, lengths, key=keys(4)))
            for rule in (BASES[name], NI(tiny_indicator(), indicator_threshold=1.0, base=BASES[name]))
        ]
        assert (results[0].nfe > 2).any()
        for row in range(4):
            assert_same_row(*(one for result in results for one in (result, row)))


def test_a_base_rule_with_a_state_inside_the_pipeline(llada, indicator) -> None:
    """Credit adjusts logits and remembers each block; silent, the indicator changes nothing of that."""
    results = [
        run(llada, PipelineSampler(GEN, BLOCK, tau_add=0.2, tau_act=0.6, threshold=0.5, rule=rule))
        for rule in (Credit(0.6), NI(indicator, indicator_threshold=1.0, base=Credit(0.6)))
    ]
    for row in range(4):
        assert_same_row(results[0], row, results[1], row)


def test_every_rule_that_fits_is_tried_as_a_base() -> None:
    fits = {name for name, kind in RULES.items() if not (kind.revises or kind.reads_hidden)}
    assert fits <= BASES.keys() and all(isinstance(BASES[name], RULES[name]) for name in fits)


@pytest.mark.parametrize("name", ["credit", "dream-origin", "eb"])
def test_a_base_rule_keeps_the_promises_of_rules(name) -> None:
    """One with adjusted logits and a state, one whose forwards may commit nothing, and one with a number alone; the
    indicator commits as well, and wherever its forwards reach."""
    rule = NI(tiny_indicator(), indicator_threshold=0.5, scope="rest", base=BASES[name])
    checked = check_rule(rule, caches=["none", "prefix", "dual"], key=jax.random.key(1))
    assert checked == ["tracing", "a row alone", "numbers per row", "none", "prefix", "dual"]


def test_a_base_rule_by_its_name(llada, ni_indicator) -> None:
    """Its options are written as the indicator's own; those of the published base rule make way for them."""
    made = lambda text: make_sampler(llada, text.replace("FOLDER", str(ni_indicator))).rule
    assert made("ni:indicator=FOLDER,base=eb,gamma=0.2,indicator_threshold=0.7").base == EB(0.2)
    assert made("ni:indicator=FOLDER,base=threshold,threshold=0.4,tolerance=0.1").base == Threshold(0.4, tolerance=0.1)
    assert made("ni:indicator=FOLDER,base=dream,alg=topk_margin,gen_length=32").base == Dream(32, "topk_margin")
    assert made("ni:indicator=FOLDER,threshold=0.4").base is None
    nested = "d2f:rule=ni,indicator=FOLDER,base=threshold,rule_threshold=0.4,threshold=0.8"
    assert made(nested).base == Threshold(0.4)
    parsed = parse_sampler("ni:indicator=x,base=eb,gamma=0.2,proxy=margin")
    assert str(parsed) == "ni:indicator=x,base=eb,gamma=0.2,proxy=margin"
    assert parsed.numbers == {"gamma": 0.2} and parsed.series == "ni:indicator=x,base=eb,proxy=margin"
    assert title(BlockSampler(NI(tiny_indicator(), base=EB(0.2, "margin")), 8)).endswith(
        "base=(eb gamma=0.2 proxy=margin) × none"
    )
    options = {"sampler": "ni", "indicator": str(ni_indicator), "base": "eb", "gamma": 0.2}
    published = dataclasses.replace(llada, generation=options)
    assert (
        make_sampler(published).rule.base == EB(0.2) and make_sampler(published, proxy="margin").rule.base.gamma == 0.2
    )
    assert make_sampler(published, "ni", base="factor").rule.base == Factor()
    settings = {one.name: one.value for one in list_settings(configure(published, None, {}))}
    assert settings["base"] == "eb" and settings["gamma"] == "0.2" and "steps" not in settings
    for base, named in (("ni", "ni"), ("remask", "Remask"), ("edit", "Edit"), ("none", "'none'")):
        with refuses(named):
            make_sampler(llada, "ni", indicator=str(ni_indicator), base=base)
    with refuses("'threshold'"):
        make_sampler(llada, "ni", indicator=str(ni_indicator), base="eb", threshold=0.9)
    with refuses("generation.json", "own:Rule"):
        make_sampler(dataclasses.replace(published, generation={**published.generation, "base": "own:Rule"}))


def test_the_shifted_family(dream) -> None:
    """Another shape of indicator, aligned blocks, smoothing and a short prompt; in a batch as alone."""
    dim = dream.config.embed_dim
    config = IndicatorConfig(1, 8, dim, dim, num_values=0, num_tokens=2, probabilities=False, mix=True)
    rule = NI(init_indicator(config, jax.random.key(3)), 0.9, 0.5, scope="rest")
    sampler = sampler_of(rule, "dual", smoothing=Smoothing(), align_blocks=True)
    together = run(dream, sampler)
    assert (together.tokens != MASK).all() and (together.decoded_at >= 0).all()
    for row in (0, 3):
        assert_same_row(together, row, run(dream, sampler, rows=(row,)), 0)
    prompt, lengths = jnp.zeros((4, 96), jnp.int32), jnp.asarray([1, 2, 8, 9])
    assert (np.asarray(sample_jit(sampler, dream.denoiser, prompt, lengths, key=keys(4)).tokens) != MASK).all()


def test_guidance_temperature_and_deferred_tokens(llada, indicator) -> None:
    """The indicator writes best tokens, whatever is drawn, and no deferred one; guided, it reads one half."""
    rule = NI(indicator, None, 0.3, steps=GEN)
    drawn = Sampling(temperature=1.0, defer=jnp.asarray([EOS]))
    result = run(llada, sampler_of(rule, "none", guidance=0.5, sampling=drawn))
    assert (result.tokens != MASK).all() and (result.nfe < GEN).all()
    exact = run(llada, sampler_of(dataclasses.replace(rule, indicator_threshold=1.0), guidance=0.5, sampling=drawn))
    assert (exact.nfe == GEN).all()
    greedy = run(llada, sampler_of(rule, guidance=0.5, sampling=dataclasses.replace(drawn, temperature=0.0)))
    for row in range(4):  # what the first forward's indicator wrote is the best token, as without any temperature
        ahead = (result.decoded_at[row, BLOCK:] == 0) & (greedy.decoded_at[row, BLOCK:] == 0)
        assert (result.tokens[row, BLOCK:] == greedy.tokens[row, BLOCK:])[ahead].all()
        assert (result.tokens[row, BLOCK:] != EOS)[result.decoded_at[row, BLOCK:] == 0].all()


def test_mistakes_are_one_sentence(llada, indicator, tmp_path) -> None:
    with refuses("indicator"):
        make_sampler(llada, "ni")
    with refuses(str(tmp_path)):
        make_sampler(llada, "ni", indicator=str(tmp_path))
    with refuses("indicator_threshold"):
        sampler_of(NI(indicator, indicator_threshold=1.5))
    with refuses("scope 'all'"):
        sampler_of(NI(indicator, scope="all"))
    for named, base in (("'eb'", "eb"), ("base Remask", Remask(8)), ("base NI", NI(indicator))):
        with refuses(named):
            sampler_of(NI(indicator, base=base))
    for number in ({"threshold": 0.5}, {"steps": 24}):
        with refuses(next(iter(number)), "EB"):
            sampler_of(NI(indicator, base=EB(), **number))
    small = init_indicator(IndicatorConfig(1, 4, 6, 6, 2, 2), jax.random.key(0))
    with refuses("6 and 6"):
        run(llada, sampler_of(NI(small)))
    wide = init_indicator(dataclasses.replace(indicator.config, num_values=500), jax.random.key(0))
    with refuses("500"):
        run(llada, sampler_of(NI(wide)))


# The merging criterion -----------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data())
def test_the_criterion_in_words(data: st.DataObject) -> None:
    """Whole steps from the next one on, up to the first with a wrong prediction, and the next in any case."""
    step = np.asarray(data.draw(st.lists(st.integers(-1, 5), min_size=12, max_size=12)), np.int32)
    right = np.asarray(data.draw(st.lists(st.booleans(), min_size=12, max_size=12)))
    step = np.asarray(step_numbers(jnp.asarray(step)[None])[0])
    count = step.max() + 1
    reached = data.draw(st.integers(0, max(count - 1, 0)))
    end = reached
    while end < count and (end == reached or right[step == end].all()):
        end += 1
    if reached < count and not right[step == reached].all():
        end = reached + 1
    label, until = mergeable_steps(step[None], right[None], jnp.asarray([reached]))
    assert int(until[0]) == end
    assert (np.asarray(label[0]) == ((step >= reached) & (step < end))).all()


def test_step_numbers_close_gaps() -> None:
    decoded_at = jnp.asarray([[5, -1, 3, 3, 9], [-1, -1, -1, -1, -1], [0, 1, 2, 3, 4]])
    assert step_numbers(decoded_at).tolist() == [[1, -1, 0, 0, 2], [-1] * 5, [0, 1, 2, 3, 4]]


def test_the_lossless_order_reproduces_the_trajectory(llada) -> None:
    """Replayed by hand: every step writes what its own forward predicts, every position is written once."""
    sampler = sampler_of(Threshold(0.8), stop=stop_on([EOS], vocab_size=136))
    prompt, lengths = pad_prompts(ROWS, 96)
    result, gen_lengths = run(llada, sampler, gen_lengths=jnp.asarray([24, 24, 19, 10])), jnp.asarray([24, 24, 19, 10])
    trajectory = trajectory_of(result, prompt, lengths, mask_id=MASK, gen_lengths=gen_lengths)
    order = jax.device_get(merged_order(llada.denoiser, trajectory))
    assert (order.forced == 0).all() and (order.steps <= result.nfe).all() and (order.steps < result.nfe).any()
    np.testing.assert_array_equal(order.step >= 0, result.decoded_at >= 0)
    np.testing.assert_array_equal(order.step.max(axis=1) + 1, order.steps)
    canvas = np.full((4, GEN), MASK)
    for number in range(order.steps.max()):
        best = np.asarray(best_compiled(llada.denoiser, trajectory, jnp.asarray(canvas)))
        canvas = np.where(order.step == number, best, canvas)
    np.testing.assert_array_equal(canvas, trajectory.tokens)


def test_the_unordered_oracle_by_brute_force(llada, dream) -> None:
    """Every forward writes all positions that it predicts rightly, in any order; the trajectory's next step if there
    are none. Final tokens that the model does not predict make such forwards."""
    forced = 0
    for model, sampler in ((llada, sampler_of(Threshold(0.8))), (dream, sampler_of(Threshold(0.5), "dual"))):
        prompt, lengths = pad_prompts(ROWS, 96)
        gen_lengths = jnp.asarray([24, 24, 19, 10])
        result = run(model, sampler, gen_lengths=gen_lengths)
        trajectory = trajectory_of(result, prompt, lengths, mask_id=MASK, gen_lengths=gen_lengths)
        wrong = dataclasses.replace(trajectory, tokens=trajectory.tokens.at[:, 3].set(7))
        for one in (trajectory, wrong):
            found = jax.device_get(unordered(model.denoiser, one))
            tokens, step = np.asarray(one.tokens), np.asarray(one.step)
            left, wanted, count = step >= 0, np.full((4, GEN), -1), np.zeros((2, 4), int)
            while left.any():
                canvas = np.where(left, MASK, tokens)
                right = left & (np.asarray(best_compiled(model.denoiser, one, jnp.asarray(canvas))) == tokens)
                for row in np.flatnonzero(left.any(axis=1)):
                    now = right[row]
                    if not now.any():
                        now, count[1, row] = left[row] & (step[row] == step[row][left[row]].min()), count[1, row] + 1
                    wanted[row, now], count[0, row] = count[0, row], count[0, row] + 1
                    left[row] &= ~now
            np.testing.assert_array_equal(found.step, wanted)
            np.testing.assert_array_equal((found.steps, found.forced), count)
            forced += count[1].sum()
        ordered = jax.device_get(merged_order(model.denoiser, trajectory))
        assert unordered(model.denoiser, trajectory).steps.sum() < ordered.steps.sum()
    assert forced > 0


@pytest.fixture(scope="module")
def sudoku(tmp_path_factory):
    model = random_model(config_for(make_task(SUDOKU)), key=3)
    folder = tmp_path_factory.mktemp("models") / "random-sudoku"
    checkpoint.save(folder, model.config, model.params.items())
    return folder, dataclasses.replace(model, name="random-sudoku")


def test_the_oracle_of_a_task(sudoku, tmp_path, capsys) -> None:
    folder, model = sudoku
    what = ["--model", str(folder), "--task", SUDOKU, "--sampler", "topk:k=1", "--n", "5", "--batch-size", "3"]
    assert evals_cli.main(["oracle", *what, "--results", str(tmp_path / "rows.jsonl"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(5))
    assert told["nfe"] == np.mean([row["nfe"] for row in rows]) and told["forced"] == 0
    assert told["unordered_steps"] == np.mean([row["unordered_steps"] for row in rows])
    assert 1 <= told["unordered_steps"] <= told["nfe"] and 0 <= told["unordered_forced"] <= 1
    assert told["speed_up"] == sum(row["nfe"] for row in rows) / sum(row["merged_steps"] for row in rows)
    report = oracle(model, SUDOKU, "topk:k=1", n=5, batch_size=5)
    assert [vars(row) for row in report.rows] == rows  # whatever the batch
    assert evals_cli.main(["oracle", *what]) == 0
    said = capsys.readouterr().out
    assert "all of them lossless" in said and f"{told['unordered_steps']:.2f} without the order" in said


# Trajectories as data ------------------------------------------------------------------------------------------------


def read(folder) -> dict[str, np.ndarray]:
    loaded = [shard.load() for shard in trajectories.shards(folder)]
    return {name: np.concatenate([one[name] for one in loaded]) for name in loaded[0]}


def test_trajectories_survive_kills(sudoku, tmp_path, monkeypatch, capsys) -> None:
    """Killed before and amid writing a shard, with another batch size afterwards: the same as in one go."""
    folder, _ = sudoku
    what = ["trajectories", "--model", str(folder), "--task", SUDOKU, "--sampler", "topk:k=2", "--no-progress"]
    assert evals_cli.main([*what, "--out", str(tmp_path / "a"), "--n", "10", "--batch-size", "4"]) == 0
    assert "10 prompts sampled, 10 there" in capsys.readouterr().out
    whole = read(tmp_path / "a")
    cut = [*what, "--out", str(tmp_path / "b"), "--batch-size", "4", "--shard-size", "3"]
    replace, calls = os.replace, []

    def killed(*paths):
        if str(paths[1]).endswith(".npz"):
            calls.append(paths)
            if len(calls) in (2, 3):
                raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", killed)
    statuses = [evals_cli.main([*cut, "--n", n]) for n in ("7", "7", "7", "10", "10")]
    assert statuses == [130, 130, 0, 0, 0]
    assert [(s.first, s.end) for s in trajectories.shards(tmp_path / "b")] == [(0, 3), (3, 6), (6, 7), (7, 10)]
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "b"), whole)

    split = [*what, "--out", str(tmp_path / "c"), "--n", "4", "--batch-size", "4", "--mesh"]
    assert evals_cli.main([*split, "data=2,fsdp=2"]) == 0
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[: len(x)]), read(tmp_path / "c"), whole)
    capsys.readouterr()
    for axes, name in (("data=3", "--batch-size"), ("rows=2", "'rows'"), ("data:2", "data:2")):
        assert evals_cli.main([*split, axes]) == 2 and name in one_error(capsys)

    task = make_task(SUDOKU)
    first = task.example("train", 0)
    batch = trajectories.shards(tmp_path / "b")[0].trajectories([0, 2])
    assert batch.tokens.shape == (2, task.answer_width) and batch.prompt_lengths[0] >= len(first.prompt_ids)
    given = np.asarray(first.given)
    assert (batch.tokens[0][given] == first.answer_ids[given]).all()
    assert ((batch.step[0] == -1) == given).all() and batch.steps[0] == batch.step[0].max() + 1


def test_trajectories_of_prompts_with_an_end(llada, tmp_path) -> None:
    """What an end token left unwritten is a mask without a step."""
    from train.data import Example

    source = Listed([Example(np.asarray(row, np.int32), np.zeros(0, np.int32)) for row in ROWS])
    sampler = sampler_of(Threshold(0.8), "dual", stop=stop_on([EOS], vocab_size=136))
    collect = lambda **options: trajectories.collect(
        llada, sampler, source, tmp_path, about={"model": "x"}, progress=False, batch_size=4, **options
    )
    assert (collect(), collect()) == (4, 0)
    (shard,) = trajectories.shards(tmp_path)
    found = shard.trajectories()
    np.testing.assert_array_equal(found.tokens == MASK, found.step == -1)
    assert [found.prompt[i, : found.prompt_lengths[i]].tolist() for i in range(4)] == ROWS
    with refuses("seed"):
        collect(seed=1)
    with refuses("n is 0"):
        collect(n=0)
    shard.path.rename(tmp_path / "trajectories-00000002-00000006.npz")
    with refuses("prompt 0"):
        collect()
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    with refuses(str(other)):
        trajectories.collect(llada, sampler, source, other, about={})
