"""Every rule x cache policy x smoothing x early stop in a ragged batch, for LLaDA and LLaDA-MoE: each cell gives the
tokens of its rows alone. And what the parts of dInfer promise one by one."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
from conftest import assert_same_row, refuses
from jax.sharding import PartitionSpec
from test_engine import BLOCK, EOS, GEN, MASK, ROWS, RULES, first_layers, run

from dllm_jax import Model, batch_sharding, make_mesh, param_shardings
from dllm_jax.pytree import pytree
from samplers import (
    EB,
    NI,
    BlockSampler,
    Credit,
    DualCache,
    Dynamic,
    FastDllmV2,
    Hierarchical,
    NoCache,
    PrefixCache,
    Result,
    Rule,
    Sampling,
    Smoothing,
    Threshold,
    TopK,
    VicinityCache,
    sample,
    sample_jit,
    stop_on,
)
from samplers.caches import CACHES as POLICIES
from samplers.rules import RULES as KNOWN
from samplers.rules.base import BlockView
from samplers.text.prompts import pad_prompts
from samplers.tokens.predictions import Predictions

CELLS: dict[str, Rule] = {
    **{name: RULES[name] for name in ("llada", "dream", "topk", "factor", "eb")},
    "threshold": Threshold(0.7, tolerance=1e-5, skip_masks=True),
    "credit": Credit(0.6),
    "hierarchical": Hierarchical(0.8, 0.3),
    "dynamic": Dynamic(0.7, 3),
    "fast-dllm-v2": FastDllmV2(0.7),
}
CACHES: dict[str, Any] = {
    "none": NoCache(),
    "prefix": PrefixCache(refresh_every=3),
    "dual": DualCache(),
    "vicinity": VicinityCache(prefix_look=4, after_look=6, warmup=2),
}
GEN_LENGTHS = (24, 24, 19, 10)  # also such that end within a block


@pytree()
class AnyOf(Rule):
    """All rules in one program, told apart by a number that is data: so a cell of the matrix compiles nothing."""

    rules: tuple[Rule, ...]
    number: jax.Array

    reads_logits = True

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return tuple(rule.init(batch, width, vocab_size) for rule in self.rules)

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        found = [rule.adjust(logits, view, part) for rule, part in zip(self.rules, state, strict=True)]
        return self._choose([adjusted for adjusted, _ in found]), tuple(part for _, part in found)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        found = [rule.decide(predictions, view, part) for rule, part in zip(self.rules, state, strict=True)]
        return self._choose([select for select, _ in found]), tuple(part for _, part in found)

    def _choose(self, options: list[jax.Array]) -> jax.Array:
        return jax.lax.select_n(self.number, *options)


def test_the_matrix_has_every_rule_and_policy() -> None:
    """A new rule or policy must join it."""
    elsewhere = {NI} | {rule for rule in KNOWN.values() if rule.revises}  # in test_ni and test_revising
    missing = set(KNOWN.values()) - elsewhere - {type(rule) for rule in CELLS.values()}
    assert not missing, f"add to CELLS in this file, with numbers at which it works: {missing}"
    general = {policy for policy in POLICIES.values() if not getattr(policy, "in_order", False)}
    missing = general - {type(policy) for policy in CACHES.values()}  # the others in test_block_diffusion
    assert not missing, f"add to CACHES in this file: {missing}"


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 1)


@pytest.fixture(scope="module")
def llada_moe(lladamoe_tiny) -> Model:
    return first_layers(lladamoe_tiny, 1)


@pytest.fixture(scope="module")
def dream(dream_tiny) -> Model:
    return first_layers(dream_tiny, 1)


def sampler_of(cache: str, smooth: bool, rule: Rule, stop: bool = True, **options: Any) -> BlockSampler:
    token = EOS if stop else MASK  # the mask token is never written: never an end
    return BlockSampler(
        rule,
        gen_length=GEN,
        block_length=BLOCK,
        cache=CACHES[cache],
        smoothing=Smoothing() if smooth else None,
        stop=stop_on([token], vocab_size=136),
        **options,
    )


def numbered(number: int) -> AnyOf:
    return AnyOf(tuple(CELLS.values()), jnp.int32(number))


def check_ran_well(result: Result, cache: str, stop: bool) -> None:
    """Nothing is left masked or written twice, blocks come in order, forwards and updates add up."""
    for row, length in enumerate(GEN_LENGTHS):
        at, nfe = result.decoded_at[row], result.nfe[row]
        assert (result.tokens[row] != MASK).all() and at.max() < nfe
        assert stop or (at[:length] >= 0).all()
        assert (at[length:] == -1).all()
        starts = [block[block >= 0] for block in np.split(at, range(BLOCK, GEN, BLOCK))]
        starts = [block for block in starts if len(block)]
        assert all(ahead.max() < behind.min() for ahead, behind in itertools.pairwise(starts))
        updates, full = result.cache_updates[row], result.full_forwards[row]
        if cache == "none":
            assert (updates, full) == (0, nfe)
        else:
            assert 0 < updates <= full < nfe or nfe <= len(starts) + 2


@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llada", "llada_moe"])
def test_every_cell_is_its_rows_alone(request, family: str, cache: str, smooth: bool) -> None:
    """One row per cell, each in its turn. Smooth cells also align their blocks to the prompt's start."""
    some = {"llada": {"none smooth", "prefix plain", "dual plain", "vicinity smooth"}, "llada_moe": {"dual plain"}}
    if f"{cache} {'smooth' if smooth else 'plain'}" not in some[family] and not request.config.getoption("--goldens"):
        pytest.skip("run by make goldens")
    model = request.getfixturevalue(family)
    for (number, rule), stop in itertools.product(enumerate(CELLS), (False, True)):
        sampler = sampler_of(cache, smooth, numbered(number), stop, align_blocks=smooth)
        together = run(model, sampler, gen_lengths=jnp.asarray(GEN_LENGTHS))
        if not smooth:  # whose blocks begin elsewhere
            check_ran_well(together, cache, stop)
        row = (number + 2 * stop) % 4
        alone = run(model, sampler, rows=(row,), gen_lengths=jnp.asarray(GEN_LENGTHS[row : row + 1]))
        for field in ("tokens", "decoded_at", "nfe", "cache_updates", "lengths"):
            mine, theirs = getattr(together, field)[row], getattr(alone, field)[0]
            np.testing.assert_array_equal(mine, theirs, err_msg=f"{rule}, stop {stop}, row {row}: {field}")


def test_a_cell_is_the_rule_itself(llada) -> None:
    """The matrix's way of switching rules changes nothing."""
    number = list(CELLS).index("credit")
    one, other = (run(llada, sampler_of("dual", False, rule)) for rule in (numbered(number), CELLS["credit"]))
    for row in range(4):
        assert_same_row(one, row, other, row)


@pytest.mark.parametrize("cache", ["prefix", "vicinity"])
def test_the_shifted_family_combines_as_well(dream, cache: str) -> None:
    """Aligned blocks, smoothing, temperature; after a one-token prompt the first block begins where nothing can run."""
    sampler = sampler_of(cache, True, CELLS["hierarchical"], align_blocks=True, sampling=Sampling(temperature=0.7))
    together = run(dream, sampler)
    for row in (0, 2):
        assert_same_row(together, row, run(dream, sampler, rows=(row,)), 0)
    prompt, lengths = jnp.zeros((4, 96), jnp.int32), jnp.asarray([1, 2, 8, 9])
    short = sample_jit(sampler, dream.denoiser, prompt, lengths, key=jax.random.key(0))
    assert (np.asarray(short.tokens) != MASK).all()


def test_a_generation_that_ends_within_a_block(llada) -> None:
    """Cut off by `gen_lengths` it is what a sampler of just that length gives."""
    cache, rows, length = "vicinity", (0, 1), 2 * BLOCK + 3
    cut = run(llada, sampler_of(cache, False, EB(0.5)), rows=rows, gen_lengths=jnp.full((2,), length))
    exact = BlockSampler(EB(0.5), length, BLOCK, CACHES[cache], stop=stop_on([EOS], vocab_size=136))
    whole = run(llada, exact, rows=rows)
    for field in ("tokens", "decoded_at"):
        np.testing.assert_array_equal(getattr(cut, field)[:, :length], getattr(whole, field))
    np.testing.assert_array_equal(cut.nfe, whole.nfe)


def plain(cache: Any, rule: Rule = Threshold(0.7), **options: Any) -> BlockSampler:  # noqa: B008
    return BlockSampler(rule, gen_length=GEN, block_length=BLOCK, cache=cache, **options)


def test_vicinity_without_neighbours_is_the_dual_cache(llada) -> None:
    alone = run(llada, plain(VicinityCache(prefix_look=0, after_look=0, warmup=0)))
    dual = run(llada, plain(DualCache()))
    for row in range(4):
        assert_same_row(alone, row, dual, row)


def test_vicinity_that_sees_everything_is_exact(llada) -> None:
    """Warm-up without end, or a neighbourhood that holds the whole sequence: no approximation is left."""
    exact = run(llada, plain(NoCache()))
    for policy in (VicinityCache(warmup=1000), VicinityCache(prefix_look=200, after_look=200)):
        found = run(llada, plain(policy))
        for field in ("tokens", "decoded_at", "nfe"):
            np.testing.assert_array_equal(getattr(found, field), getattr(exact, field))


def test_refreshing_in_time_adds_full_forwards(llada) -> None:
    """One at each block's start and at every third iteration; windows in between."""
    often, rarely = (run(llada, plain(DualCache(every), TopK(1))) for every in (3, None))
    assert (rarely.cache_updates == GEN // BLOCK).all()
    assert (often.cache_updates > rarely.cache_updates).all() and (often.nfe == rarely.nfe).all()
    with refuses("refresh_every"):
        plain(DualCache(0))


def test_smoothing_of_no_weight_is_none(llada) -> None:
    """EB has no threshold that smoothing could raise, so nothing is left of it."""
    nothing = Smoothing(weight=0.0, initial=0.0, growth=0.0)
    smooth, hard = (run(llada, plain(CACHES["vicinity"], EB(0.5), smoothing=one)) for one in (nothing, None))
    for field in ("tokens", "decoded_at", "nfe", "full_forwards"):
        np.testing.assert_array_equal(getattr(smooth, field), getattr(hard, field))


def test_smoothing_is_what_it_says(llada) -> None:
    """Against a Python loop over the model's own forwards, without a cache."""
    smoothing, rule = Smoothing(), TopK(2)
    found = run(llada, plain(NoCache(), rule, smoothing=smoothing), rows=(1,))
    denoiser = llada.denoiser
    prompt = ROWS[1]
    tokens = np.asarray([prompt + [MASK] * GEN])
    soft = np.zeros((1, tokens.shape[1], llada.config.embed_dim), np.float32)
    forward = jax.jit(lambda inputs: denoiser.logits(denoiser.forward(inputs, length)[0]))
    length = jnp.asarray([tokens.shape[1]])
    for t in range(int(found.nfe[0])):
        inputs = np.asarray(denoiser.embed(jnp.asarray(tokens))) + np.where((tokens == MASK)[..., None], soft, 0)
        logits = np.asarray(forward(jnp.asarray(inputs)))
        newly = np.flatnonzero(found.decoded_at[0] == t)
        best = np.where(np.arange(136) == MASK, -np.inf, logits[0, len(prompt) + newly]).argmax(axis=-1)
        assert found.tokens[0, newly].tolist() == best.tolist()
        tokens[0, len(prompt) + newly] = best
        soft = np.asarray(denoiser.expected_embedding(jnp.asarray(logits))) * float(smoothing.alpha(jnp.asarray(t)))


def test_smoothing_holds_no_more_logits_than_a_block(llada) -> None:
    """No array of [positions, vocabulary] beyond the active block's, in any policy."""
    prompt, lengths = jnp.zeros((1, 40), jnp.int32), jnp.asarray([40])
    for policy in CACHES.values():
        jaxpr = str(jax.make_jaxpr(sample)(plain(policy, smoothing=Smoothing()), llada.denoiser, prompt, lengths))
        widths = {shape for shape in range(1, 128) if f"f32[1,{shape},136]" in jaxpr}
        assert widths == {BLOCK}


def test_guidance_of_no_scale_is_none(llada) -> None:
    guided, free = (run(llada, sampler_of("vicinity", True, EB(0.5), guidance=g)) for g in (0.0, None))
    for row in range(4):
        assert_same_row(guided, row, free, row)


def test_unrolling_wastes_forwards_and_changes_no_token(llada_tiny) -> None:
    shape = {"gen_length": GEN, "block_length": BLOCK}
    lazy = run(
        llada_tiny, official.DInfer(Threshold(0.7), **shape, cache=official.DInferDual(), most=4, per_iteration=2)
    )
    eager = run(llada_tiny, plain(DualCache()))
    np.testing.assert_array_equal(lazy.tokens, eager.tokens)
    assert (lazy.nfe >= eager.nfe).all() and (lazy.nfe > eager.nfe).any()


def test_aligned_blocks_of_an_aligned_prompt_change_nothing(llada) -> None:
    prompt = jnp.asarray([ROWS[0][:16]] * 2)
    results = [
        sample_jit(plain(policy, align_blocks=align), llada.denoiser, prompt)
        for policy, align in itertools.product((PrefixCache(), VicinityCache()), (True, False))
    ]
    for aligned, free in (results[:2], results[2:]):
        np.testing.assert_array_equal(aligned.tokens, free.tokens)
        np.testing.assert_array_equal(aligned.decoded_at, free.decoded_at)


def test_on_a_mesh_it_is_the_same(llada) -> None:
    """Smoothing, vicinity and credit: batch and heads split by the compiler, the batch by hand in `shard_map`."""
    sampler = sampler_of("vicinity", True, CELLS["credit"])
    expected = run(llada, sampler)
    prompt, lengths = pad_prompts(ROWS, 96)
    mesh = make_mesh(data=2, tensor=2)
    params = jax.device_put(dict(llada.params), param_shardings(llada.config, mesh))
    split = dataclasses.replace(llada, params=params).denoiser
    placed = jax.device_put((prompt, lengths), batch_sharding(mesh))
    mapped = jax.jit(
        jax.shard_map(
            lambda denoiser, prompt, lengths: sample(sampler, denoiser, prompt, lengths),
            mesh=make_mesh(data=4),
            in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
            out_specs=PartitionSpec("data"),
        )
    )
    by_hand = mapped(*jax.device_get((llada.denoiser, prompt, lengths)))
    for found in (sample_jit(sampler, split, *placed), by_hand):
        for row in range(4):
            assert_same_row(jax.device_get(found), row, expected, row)
