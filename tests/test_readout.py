"""The vocabulary read in tiles: the same as read at once, and nothing larger than a tile exists."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import programs_in
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import Denoiser, make_mesh
from dllm_jax.models.transformer import Tile
from dllm_jax.params.low_rank import LowRankKernel
from samplers import EB, BlockSampler, KeyNoise, Sampling, Threshold, TopK, sample
from samplers.tokens import predictions
from samplers.tokens.guidance import Guided
from samplers.tokens.noise import Purpose
from samplers.tokens.predictions import Predictions, logprobs_of, most_probable, predict, readout
from samplers.tokens.predictions import given as scores_of

ROWS, WIDTH, V = 2, 3, 136
FIELDS = [field.name for field in dataclasses.fields(Predictions)]
STEP, POSITIONS = jnp.asarray([4, 9]), jnp.tile(jnp.arange(WIDTH), (ROWS, 1))
KEYS = jax.random.split(jax.random.key(5), ROWS)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of eight entries of every part."""
    monkeypatch.setattr(predictions, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(predictions, "LANES", 1)


def draw(ids: jax.Array) -> jax.Array:
    return KeyNoise(KEYS).uniform(Purpose.TOKENS, STEP, POSITIONS, ids)


def assert_same(found: Predictions, wanted: Predictions) -> None:
    for field in FIELDS:
        mine, theirs = getattr(found, field), getattr(wanted, field)
        if mine.dtype == jnp.float32:
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6, err_msg=field)
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=field)


def some_logits(seed: int, ties: bool) -> jax.Array:
    """With ties: few different values, so that equals, the largest among them, lie in several tiles."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, WIDTH, V)) * 4
    logits = np.round(logits / 2) * 2 if ties else logits
    return jnp.asarray(np.where(rng.random(logits.shape) < 0.1, -np.inf, logits), jnp.float32)


SETTINGS = [
    ("raw", 70, 1, {}),
    ("raw", 0, 4, {"suppress": jnp.asarray([0, 40, 135]), "defer": jnp.arange(30, 90)}),
    ("raw", 135, 4, {"temperature": 0.7, "suppress": jnp.asarray([1, 2]), "defer": jnp.arange(60)}),
    ("sampling", 70, 4, {"temperature": jnp.asarray([0.0, 1.3])}),
    ("raw", 5, 1, {"temperature": 1.1, "top_p": jnp.asarray([0.3171, 1.0])}),
    ("sampling", 0, 4, {"temperature": jnp.asarray([0.9, 0.0]), "top_p": 0.0, "defer": jnp.arange(30, 90)}),
    ("sampling", 135, 1, {"top_p": 0.9411, "top_k": 7}),
    ("sampling", 33, 4, {"temperature": 0.8, "top_k": jnp.asarray([1, V]), "suppress": jnp.asarray([40])}),
]


@pytest.mark.parametrize("parts", [1, 4])
def test_logprobs_of_tokens_in_tiles(small_tiles, parts: int) -> None:
    logits, tokens = some_logits(3, False), jnp.asarray([[0, 70, 135], [7, 8, 33]])
    found = jax.jit(lambda logits: logprobs_of(scores_of(logits, parts), tokens))(logits)
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    broken = jax.jit(lambda logits: logprobs_of(scores_of(logits, parts), tokens))(logits.at[1, 1, 40].set(jnp.nan))
    assert np.argwhere(np.isnan(broken)).tolist() == [[1, 1]]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_most_probable_tokens_in_tiles(small_tiles, parts: int, count: int) -> None:
    """Of the whole distribution, without the mask token; tiles may be narrower than what is asked for."""
    logits, mask = some_logits(4, False).at[..., 9].set(30.0), 9
    ids, logprobs = jax.jit(lambda logits: most_probable(scores_of(logits, parts), count, mask))(logits)
    wanted = np.array(jax.nn.log_softmax(logits))
    wanted[..., mask] = -np.inf
    order = np.argsort(-wanted, axis=-1)[..., :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, order, axis=-1), rtol=1e-5)


def predictor(score_from: str, mask_id: int, parts: int, sampling: Sampling):
    """A compiled `predict`, for the tiles that there are now."""

    def run(logits: jax.Array, sampling: Sampling) -> Predictions:
        return predict(scores_of(logits, parts), sampling, mask_id=mask_id, score_from=score_from, draw=draw)

    return jax.jit(run).lower(some_logits(0, False), sampling).compile()


@pytest.mark.parametrize(("score_from", "mask_id", "parts", "numbers"), SETTINGS)
def test_tiled_equals_untiled(monkeypatch, score_from: str, mask_id: int, parts: int, numbers: dict) -> None:
    sampling = Sampling(**numbers)
    whole = predictor(score_from, mask_id, 1, sampling)
    monkeypatch.setattr(predictions, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(predictions, "LANES", 2)
    assert scores_of(some_logits(0, False), parts).width == 16
    tiled = predictor(score_from, mask_id, parts, sampling)

    @settings(max_examples=20)
    @given(st.integers(0, 999), st.booleans())
    def same(seed: int, ties: bool) -> None:
        logits = some_logits(seed, ties)
        wanted = whole(logits, sampling)
        assert_same(tiled(logits, sampling), wanted)
        assert not (wanted.token == mask_id).any()

    same()


def test_tiles_within_shard_map(small_tiles) -> None:
    """Rows and their keys on two devices, the sampling's numbers on both."""
    logits, sampling = some_logits(3, False), Sampling(temperature=0.9, top_p=0.8, top_k=20)

    def run(logits: jax.Array, keys: jax.Array) -> Predictions:
        noise = lambda ids: KeyNoise(keys).uniform(Purpose.TOKENS, STEP[:1], POSITIONS[:1], ids)
        return predict(scores_of(logits), sampling, mask_id=9, score_from="sampling", draw=noise)

    split = jax.sharding.PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(run, mesh=make_mesh(data=2), in_specs=(split, split), out_specs=split))
    rows = [jax.jit(run)(logits[row : row + 1], KEYS[row : row + 1]) for row in range(ROWS)]
    assert_same(mapped(logits, KEYS), jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows))


def by_sorting(z: np.ndarray, top_p: float | None, top_k: int | None) -> np.ndarray | None:
    """What survives by the definition; None where rounding could decide."""
    ordered = np.sort(z.astype(np.float64), axis=-1)[..., ::-1]
    count = np.full(z.shape[:-1], z.shape[-1])
    if top_p is not None:
        total = np.cumsum(np.exp(ordered - ordered[..., :1]), axis=-1)
        total /= total[..., -1:]
        if np.abs(total[..., :-1] - top_p).min() < 1e-5:
            return None
        count = 1 + (total[..., :-1] <= top_p).sum(axis=-1)
    if top_k is not None:
        count = np.minimum(count, top_k)
    return z >= np.take_along_axis(ordered, count[..., None] - 1, axis=-1)


values = st.lists(
    st.sampled_from([-math.inf, -20.0, -1.5, -0.0, 0.0, 1e-3, 0.5, 0.5, 2.0, 3.0]), min_size=12, max_size=12
)


@settings(max_examples=60)
@given(
    values, st.sampled_from([None, 0.0, 0.123, 0.5, 0.87, 0.999]), st.sampled_from([None, 1, 2, 5, 12]), st.booleans()
)
def test_search_equals_sorting(values, top_p, top_k, tiles) -> None:
    """Ties, both zeros and -inf; in tiles and at once."""
    z = np.asarray(values, np.float32)[None, None]
    wanted = by_sorting(z, top_p, top_k) if np.isfinite(z).any() else None
    if wanted is None or (top_p is None and top_k is None):
        return
    np.testing.assert_array_equal(searched(z, Sampling(top_p=top_p, top_k=top_k), tiles), wanted)


@functools.partial(jax.jit, static_argnums=2)
def searched(z, sampling, tiles):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "TILE_ELEMENTS", 1)
        patch.setattr(predictions, "LEAST_LANES", 1)
        patch.setattr(predictions, "LANES", 5 if tiles else 12)
        return predictions.kept(z, sampling)


@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.parametrize("score_from", ["raw", "sampling"])
@pytest.mark.parametrize("tiles", [False, True])
def test_scores_that_are_no_numbers_are_harmless(request, tiles: bool, score_from: str, temperature) -> None:
    if tiles:
        request.getfixturevalue("small_tiles")
    logits = some_logits(0, False)
    logits = logits.at[0, 0, 77].set(jnp.nan).at[0, 1, 9].set(jnp.inf).at[0, 2].set(-jnp.inf).at[1, 0, 5:].set(-jnp.inf)
    options = {"mask_id": 0, "score_from": score_from, "draw": draw}
    for top_p in (None, 0.9):
        found = predict(scores_of(logits), Sampling(temperature=temperature, top_p=top_p), **options)
        assert found.finite.tolist() == [[False, False, False], [True, True, True]]
        assert found.token[0].tolist() == [1, 1, 1]
        for field, worst in [("confidence", 0), ("max_probability", 0), ("margin", -1), ("entropy", math.log(V))]:
            np.testing.assert_allclose(getattr(found, field)[0], worst, rtol=1e-6, err_msg=field)
            assert np.isfinite(getattr(found, field)).all(), field
        assert not found.mask_wins[0].any()
    nothing = predict(scores_of(logits), Sampling(suppress=jnp.arange(V), temperature=temperature), **options)
    assert np.isfinite(nothing.entropy).all() and not nothing.confidence.any() and (nothing.token == 1).all()


def test_draws_do_not_depend_on_batch_tile_or_slot() -> None:
    ids, noise = jnp.arange(V, dtype=jnp.int32), KeyNoise(KEYS)
    at = lambda source, step, place, ids: np.asarray(source.uniform(Purpose.TOKENS, step, place, ids))
    whole = at(noise, STEP, POSITIONS, ids)
    assert ((whole > 0) & (whole < 1)).all() and len(np.unique(whole)) > 0.99 * whole.size
    np.testing.assert_array_equal(at(noise, STEP, POSITIONS, ids[7:30:2]), whole[..., 7:30:2])
    np.testing.assert_array_equal(at(noise, STEP, POSITIONS[:, ::-1], ids), whole[:, ::-1])
    np.testing.assert_array_equal(at(KeyNoise(KEYS[1:]), STEP[1:], POSITIONS[1:, 1:], ids), whole[1:, 1:])
    assert not (at(noise, STEP, POSITIONS, None)[..., None] == whole).any()
    for some in (ids, None):  # as blocks beside each other are drawn
        one = lambda place, some=some: noise.uniform(Purpose.TOKENS, STEP, place[:, None], some)
        mapped = jax.vmap(one, in_axes=1, out_axes=1)(POSITIONS)
        np.testing.assert_array_equal(mapped[:, :, 0], at(noise, STEP, POSITIONS, some))


def test_draws_are_uniform_and_unrelated() -> None:
    noise, place = KeyNoise(jax.random.key(0)[None]), jnp.arange(40)[None]
    found = np.asarray(noise.uniform(Purpose.TOKENS, jnp.zeros(1, int), place, jnp.arange(5000)))[0]
    assert abs(found.mean() - 0.5) < 0.003 and abs(found.var() - 1 / 12) < 0.001
    related = np.corrcoef(found)[np.triu_indices(40, 1)]
    assert np.abs(related).max() < 5 / math.sqrt(5000)
    assert abs(np.corrcoef(found[:, 1:].ravel(), found[:, :-1].ravel())[0, 1]) < 5 / math.sqrt(found.size)


@dataclasses.dataclass(frozen=True)
class Split(Denoiser):
    """As if the vocabulary lay on four devices."""

    @property
    def vocab_parts(self) -> int:
        return 4


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_heads_tiles_are_columns_of_its_logits(request, family: str, parts: int) -> None:
    denoiser = request.getfixturevalue(f"{family}_tiny").denoiser
    hidden = jax.random.normal(jax.random.key(1), (ROWS, WIDTH, denoiser.config.embed_dim))
    tile = Tile(jnp.asarray(5), 9)
    adapted = dict(denoiser.params)
    if (name := "lm_head.kernel") in adapted:
        shape = adapted[name].shape
        a, b = jnp.ones((shape[0], 2)), jax.random.normal(jax.random.key(2), (2, shape[1]))
        adapted[name] = LowRankKernel(adapted[name], a, b, None, 0.5, 0.0)
    for params in (denoiser.params, adapted):
        made = (Split if parts == 4 else Denoiser)(denoiser.config, params)
        ids = readout(made, hidden).ids(tile)
        size = made.vocab_size // parts
        assert ids.tolist() == [part * size + 5 + j for part in range(parts) for j in range(9)]
        np.testing.assert_allclose(made.logits(hidden, tile), made.logits(hidden)[..., ids], atol=1e-5)
        guided = Guided(made, 0.5)
        both = jnp.concatenate([hidden, hidden[:, ::-1]], axis=-1)
        np.testing.assert_allclose(guided.logits(both, tile), guided.logits(both)[..., ids], atol=1e-5)


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of all arrays that a program makes, those of the programs in it included."""
    made = (out for part in programs_in(jaxpr) for equation in part.eqns for out in equation.outvars)
    return {tuple(getattr(out.aval, "shape", ())) for out in made}


DRAWN = Sampling(temperature=0.8, top_p=0.9)


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("rule", [Threshold(0.9), EB(0.5), TopK(1)], ids=lambda rule: type(rule).__name__)
def test_a_generation_holds_no_more_than_a_tile(small_tiles, llada_tiny, rule, sampling) -> None:
    """Two rows of blocks of 12 positions, tiles of 8: nothing but parameters, and what has one entry for each id, knows
    how large the vocabulary is."""
    denoiser, rows, block = llada_tiny.denoiser, 2, 12
    sampler = BlockSampler(rule, gen_length=32, block_length=block, sampling=sampling)
    program = jax.make_jaxpr(sample)(sampler, denoiser, jnp.ones((rows, 8), jnp.int32), key=jax.random.key(0))
    shapes, config = shapes_in(program.jaxpr), denoiser.config
    assert (rows, block, 8) in shapes
    known = {x.size for x in denoiser.params.values()}
    assert not [shape for shape in shapes if config.vocab_size in shape and math.prod(shape) not in known]
    of_block = {shape[2] for shape in shapes if shape[:2] == (rows, block) and len(shape) == 3}
    assert max(of_block - {config.embed_dim, config.mlp_dim, block}) == 8  # rules compare positions with each other


def test_a_generation_is_the_same_in_tiles(small_tiles, llada_tiny, monkeypatch) -> None:
    prompt = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)

    def tokens(**options):
        sampler = BlockSampler(Threshold(0.9), gen_length=16, block_length=8, **options)
        return np.asarray(jax.jit(sample)(sampler, llada_tiny.denoiser, prompt, key=jax.random.key(0)).tokens)

    for options in ({}, {"sampling": DRAWN}):
        monkeypatch.setattr(predictions, "TILE_ELEMENTS", 1)
        tiled = tokens(**options)
        jax.clear_caches()
        monkeypatch.setattr(predictions, "TILE_ELEMENTS", 2**23)
        np.testing.assert_array_equal(tiled, tokens(**options))
        jax.clear_caches()


def test_logits_of_up_to_256_mib_are_one_tile() -> None:
    """A GPU copies the head's part of a smaller tile; LLaDA-8B's blocks of 8 rows fit, those of 32 do not."""
    width = lambda batch, **known: predictions.Readout(pytest.fail, (batch, 32), 126464, **known).width
    assert width(1) == width(8) == 126464 and width(8, parts=8) == 126464 // 8
    assert width(32) == 8192 and width(32, parts=8) == 1024 and width(8, simultaneous=4) == 8192
