"""Properties of the engine that hold for every rule and cache policy, on the tiny trained checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same_row

import dllm_jax
import samplers
from dllm_jax import FunctionDenoiser, Model, make_mesh
from dllm_jax.models.transformer import param_specs
from dllm_jax.pytree import pytree
from samplers import (
    EB,
    BlockSampler,
    Credit,
    Dream,
    DualCache,
    Factor,
    Hierarchical,
    LLaDA,
    NoCache,
    PrefixCache,
    Result,
    Rule,
    Sampling,
    Threshold,
    TopK,
    VicinityCache,
    sample,
    sample_jit,
    stop_on,
    stream,
)
from samplers.text.prompts import pad_prompts

QUESTIONS = [
    "Q: Tom has 12 books. Tom buys 23.\nA: ",
    "Q: Kim has 31 shells. Kim buys 25. Kim gets 3 times as many.\nA: ",
    "Q: Ann has 9.\nA: ",
    "Q: Bob has 49 books. Bob gives 12. Bob gives 3.\nA: ",
]
ROWS = [[ord(char) for char in question] for question in QUESTIONS]
EOS, MASK, GEN, BLOCK = 128, 129, 24, 8

RULES = {
    "llada": LLaDA(GEN),
    "llada-random": LLaDA(GEN // 2, remasking="random"),
    "dream": Dream(GEN),
    "dream-origin": Dream(GEN // 2, alg="origin"),
    "dream-alg-temp": Dream(GEN // 4, alg="topk_margin", alg_temp=0.5),
    "topk": TopK(2, proxy="margin"),
    "threshold": Threshold(0.7),
    "threshold-capped": Threshold(0.3, steps=GEN // 2),
    "factor": Factor(1.2),
    "eb": EB(0.3, proxy="entropy"),
    "eb-random": EB(0.3, proxy="random"),
}
CACHES = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
# every rule with one policy, every policy with two rules: a rule sees only logits, so the full product adds nothing
GRID = [(rule, "dual") for rule in RULES] + [(rule, cache) for rule in ("eb", "dream") for cache in ("none", "prefix")]


def first_layers(model: Model, number: int) -> Model:
    """The model cut to its first layers: quick to compile, and its predictions still vary."""
    config = model.config.replace(num_layers=number)
    params = {name: model.params[name] for name in param_specs(config)}
    return dataclasses.replace(model, config=config, params=params)


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 2)


@pytest.fixture(scope="module")
def dream(dream_tiny) -> Model:
    return first_layers(dream_tiny, 2)


def sampler_of(rule: str, cache: str, **options) -> BlockSampler:
    return BlockSampler(RULES[rule], gen_length=GEN, block_length=BLOCK, cache=CACHES[cache], **options)


def keys(number: int) -> jax.Array:
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(7), i))(jnp.arange(number))


def run(model, sampler: BlockSampler, rows=tuple(range(4)), width: int = 96, **options) -> Result:
    prompt, lengths = pad_prompts([ROWS[row] for row in rows], width)
    return jax.device_get(
        sample_jit(sampler, model.denoiser, prompt, lengths, key=keys(4)[jnp.asarray(rows)], **options)
    )


@pytest.mark.parametrize(("rule", "cache"), GRID)
def test_progress_and_nothing_twice(llada, rule: str, cache: str) -> None:
    """Every position is committed exactly once, blocks in order, and no forward of an active row is wasted."""
    result = run(llada, sampler_of(rule, cache))
    assert (result.tokens != MASK).all()
    for row in range(4):
        at = result.decoded_at[row]
        assert at.min() >= 0 and at.max() < result.nfe[row]
        if rule != "dream-origin":  # chance may commit nothing
            assert len(np.unique(at)) == result.nfe[row]
        blocks = at.reshape(-1, BLOCK)
        assert (blocks.min(axis=1)[1:] > blocks.max(axis=1)[:-1]).all()
        assert result.full_forwards[row] == (result.nfe[row] if cache == "none" else GEN // BLOCK)


@pytest.mark.parametrize(("rule", "cache"), GRID)
def test_rows_are_independent(llada, rule: str, cache: str) -> None:
    """A row is the same in another slot and beside other neighbours (one program serves all, so this is cheap)."""
    sampler = sampler_of(rule, cache)
    together = run(llada, sampler)
    for rows in ((3, 0, 2, 1), (2, 2, 2, 3)):
        other = run(llada, sampler, rows=rows)
        for slot, row in enumerate(rows):
            assert_same_row(together, row, other, slot)


@pytest.mark.parametrize(("rule", "cache"), [("eb", "dual"), ("llada-random", "prefix")])
def test_batch_equals_single(llada, rule: str, cache: str) -> None:
    """Ragged prompts in one batch: each row is what it is alone, also with another padding."""
    sampler = sampler_of(rule, cache)
    together = run(llada, sampler)
    for row in range(4):
        assert_same_row(together, row, run(llada, sampler, rows=(row,)), 0)
    assert_same_row(together, 2, run(llada, sampler, rows=(2,), width=32), 0)


def test_batch_equals_single_dream_with_stop(dream) -> None:
    """The shifted family, sampled with temperature and top-p, rows ending at different times."""
    stop = stop_on([EOS], sequences=[[35, 35]], vocab_size=136)
    sampler = sampler_of("eb", "dual", stop=stop, sampling=Sampling(temperature=0.6, top_p=0.9))
    together = run(dream, sampler)
    for row in range(4):
        assert_same_row(together, row, run(dream, sampler, rows=(row,)), 0)


def test_eb_s_distribution_without_and_with_a_temperature(llada) -> None:
    """Without one both are the model's; a low one leaves no entropy; gamma=inf writes every block at once."""
    at = lambda score_from, temperature, gamma=0.3: run(
        llada,
        BlockSampler(
            EB(gamma, score_from=score_from),
            gen_length=GEN,
            block_length=BLOCK,
            cache=CACHES["dual"],
            sampling=Sampling() if temperature is None else Sampling(temperature=temperature),
        ),
    )
    raw, greedy = at("raw", None), at("sampling", None)
    for row in range(4):
        assert_same_row(raw, row, greedy, row)
    cold = at("sampling", jnp.asarray([0.02, 0.02, 1.0, 1.0]))
    warm = at("raw", jnp.asarray([0.02, 0.02, 1.0, 1.0]))
    assert (cold.nfe[:2] < warm.nfe[:2]).all()
    for row in (2, 3):  # at temperature 1 they are one distribution
        np.testing.assert_array_equal(cold.tokens[row], warm.tokens[row])
        np.testing.assert_array_equal(cold.decoded_at[row], warm.decoded_at[row])
    assert (at("sampling", 0.8, jnp.inf).nfe == GEN // BLOCK).all()


@pytest.mark.parametrize(("fixture", "cache"), [("llada", "dual"), ("dream", "prefix")])
def test_last_block_may_be_shorter(request, fixture: str, cache: str) -> None:
    """gen_length 20 with blocks of 8: the short block's window reaches back without touching what is cached there."""
    model = request.getfixturevalue(fixture)
    sampler = BlockSampler(Threshold(0.8), gen_length=20, block_length=8, cache=CACHES[cache])
    whole = run(model, sampler, rows=(0, 1))
    assert (whole.tokens != MASK).all() and whole.full_forwards.tolist() == [3, 3]
    # the last block alone, after the first two were decoded: the same start, the same refresh, a window of its length
    for row in (0, 1):
        prompt, lengths = pad_prompts([ROWS[row] + whole.tokens[row, :16].tolist()], 96)
        tail = BlockSampler(Threshold(0.8), gen_length=4, cache=CACHES[cache])
        alone = sample_jit(tail, model.denoiser, prompt, lengths)
        np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row, 16:])
        wanted = whole.decoded_at[row, 16:]
        np.testing.assert_array_equal(alone.decoded_at[0] - alone.decoded_at[0].min(), wanted - wanted.min())


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_are_exact_where_they_should_be(llada, cache: str) -> None:
    """Blocks of one token are decoded by their refreshing forward; without a prompt one block is the whole window."""
    ones = {
        name: run(llada, BlockSampler(TopK(1), gen_length=8, block_length=1, cache=CACHES[name]), rows=(0, 1))
        for name in (cache, "none")
    }
    for field in ("tokens", "decoded_at", "nfe", "full_forwards"):
        np.testing.assert_array_equal(getattr(ones[cache], field), getattr(ones["none"], field))
    assert ones[cache].cache_updates.tolist() == [8, 8]
    empty = jnp.zeros((1, 32), jnp.int32), jnp.zeros((1,), jnp.int32)
    whole = {
        name: sample_jit(BlockSampler(EB(0.5), gen_length=GEN, cache=CACHES[name]), llada.denoiser, *empty)
        for name in (cache, "none")
    }
    np.testing.assert_array_equal(whole[cache].decoded_at, whole["none"].decoded_at)
    np.testing.assert_array_equal(whole[cache].tokens, whole["none"].tokens)


@pytest.mark.parametrize("cache", CACHES)
def test_compiled_loop_equals_python_loop(llada, cache: str) -> None:
    sampler = sampler_of("threshold", cache)
    prompt, lengths = pad_prompts(ROWS, 96)
    *_, last = stream(sampler, llada.denoiser, prompt, lengths, key=keys(4))
    stepped = jax.device_get(sampler.result(llada.denoiser, last))
    compiled = run(llada, sampler)
    for row in range(4):
        assert_same_row(stepped, row, compiled, row)


def test_states_of_a_stream_only_grow(llada) -> None:
    """What a step committed stays as it is in every later state."""
    sampler = sampler_of("eb", "dual")
    prompt, lengths = pad_prompts(ROWS, 96)
    before = None
    for state in stream(sampler, llada.denoiser, prompt, lengths):
        canvas = jax.tree.map(np.array, state.canvas)  # a step takes the state before it
        if before is not None:
            kept = before.tokens != MASK
            np.testing.assert_array_equal(canvas.tokens[kept], before.tokens[kept])
            assert (canvas.nfe == before.nfe + ~before.done).all()
        before = canvas
    assert not lengths.is_deleted() and not prompt.is_deleted()


def test_one_program_without_callbacks(llada) -> None:
    """A generation is one compiled call: its jaxpr holds the loop and nothing that talks to the host."""
    prompt, lengths = pad_prompts(ROWS, 96)
    sampler = sampler_of("threshold", "dual", stop=stop_on([EOS], vocab_size=136))
    text = str(jax.make_jaxpr(sample)(sampler, llada.denoiser, prompt, lengths, key=jax.random.key(0)))
    assert "while" in text
    assert "callback" not in text and "device_put" not in text


def test_numbers_prompts_and_seeds_compile_nothing(llada, compiled) -> None:
    stop = stop_on([EOS], vocab_size=136)

    def call(threshold: float, temperature: float, rows: tuple[int, int], seed: int) -> None:
        sampler = BlockSampler(
            Threshold(threshold),
            gen_length=16,
            block_length=8,
            cache=DualCache(),
            sampling=Sampling(temperature=temperature, top_p=0.8 + temperature / 10),
            stop=stop,
        )
        prompt, lengths = pad_prompts([ROWS[row] for row in rows], 96)
        sample_jit(sampler, llada.denoiser, prompt, lengths, key=jax.random.key(seed))

    call(0.9, 0.3, (0, 2), 0)
    compiled.clear()
    call(0.5, 0.0, (1, 3), 1)
    call(0.7, 1.0, (2, 0), 2)
    assert not compiled


def test_vmap_over_a_rules_numbers(llada) -> None:
    """A sweep in one call equals the calls one by one; numbers may also differ by row."""
    thresholds = jnp.asarray([0.3, 0.6, 0.95])
    prompt, lengths = pad_prompts(ROWS[:2], 96)

    def at(threshold: jax.Array) -> Result:
        sampler = BlockSampler(Threshold(threshold), gen_length=GEN, block_length=BLOCK, cache=DualCache())
        return sample(sampler, llada.denoiser, prompt, lengths)

    sweep = jax.device_get(jax.jit(jax.vmap(at))(thresholds))
    single = [jax.device_get(jax.jit(at)(threshold)) for threshold in thresholds]
    assert len({int(result.nfe[0]) for result in single}) > 1
    for i, result in enumerate(single):
        for row in range(2):
            assert_same_row(jax.tree.map(lambda x, i=i: x[i], sweep), row, result, row)
    by_row = jax.device_get(jax.jit(at)(jnp.asarray([0.3, 0.95])))
    assert_same_row(by_row, 0, single[0], 0)
    assert_same_row(by_row, 1, single[2], 1)


def test_inside_other_peoples_jit_scan_and_shard_map(llada) -> None:
    sampler = sampler_of("threshold", "dual", stop=stop_on([EOS], vocab_size=136))
    prompt, lengths = pad_prompts(ROWS, 96)
    expected = jax.device_get(sample_jit(sampler, llada.denoiser, prompt, lengths))

    def scanned(prompts: jax.Array, all_lengths: jax.Array) -> Result:
        body = lambda total, row: (total + 1, sample(sampler, llada.denoiser, row[0][None], row[1][None]))
        return jax.lax.scan(body, 0, (prompts, all_lengths))[1]

    result = jax.device_get(jax.jit(scanned)(prompt, lengths))
    for row in range(4):
        assert_same_row(jax.tree.map(lambda x, row=row: x[row], result), 0, expected, row)

    mesh = make_mesh(data=4)
    split = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(
        lambda denoiser, prompts, all_lengths: sample(sampler, denoiser, prompts, all_lengths),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), split, split),
        out_specs=split,
    )
    result = jax.device_get(jax.jit(mapped)(*jax.device_get((llada.denoiser, prompt, lengths))))
    for row in range(4):
        assert_same_row(result, row, expected, row)


@pytest.mark.parametrize(
    ("fixture", "axes", "rules"),
    [
        ("llada_tiny", {"data": 2, "fsdp": 2, "tensor": 2}, dllm_jax.ShardingRules()),
        ("dream_tiny", {"tensor": 4}, dllm_jax.ShardingRules(kv_heads=None)),  # two do not split over four devices
    ],
    ids=["llada", "dream"],
)
def test_sharded_equals_one_device(request, fixture: str, axes: dict[str, int], rules) -> None:
    """Parameters restored into shards, the prompt batch split over the data axes: the same tokens."""
    model = request.getfixturevalue(fixture)
    mesh = make_mesh(**axes)
    sharded = dllm_jax.load(model.folder, mesh=mesh, rules=rules)
    sampler = sampler_of("eb", "dual")
    expected = run(model, sampler)
    prompt, lengths = jax.device_put(pad_prompts(ROWS, 96), dllm_jax.batch_sharding(mesh, rules))
    result = jax.device_get(sample_jit(sampler, sharded.denoiser, prompt, lengths, key=keys(4)))
    for row in range(4):
        assert_same_row(result, row, expected, row)


def test_explicit_mesh_of_the_caller(llada) -> None:
    """A caller whose mesh has Explicit axes gets the same tokens."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    sampler = sampler_of("threshold", "dual")
    expected = run(llada, sampler)
    prompt, lengths = pad_prompts(ROWS, 96)
    with jax.set_mesh(mesh):
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        denoiser = jax.device_put(llada.denoiser, replicated)
        prompt, lengths = jax.device_put((prompt, lengths), split)
        result = jax.device_get(jax.jit(sample)(sampler, denoiser, prompt, lengths))
    for row in range(4):
        assert_same_row(result, row, expected, row)


def test_guidance_combines_with_a_cache(llada) -> None:
    """Scale 0 is no guidance; a scale gives something else."""
    cache = "dual"
    plain = run(llada, sampler_of("topk", cache), rows=(0, 1))
    zero = run(llada, sampler_of("topk", cache, guidance=0.0), rows=(0, 1))
    strong = run(llada, sampler_of("topk", cache, guidance=3.0), rows=(0, 1))
    assert_same_row(plain, 0, zero, 0)
    assert_same_row(plain, 1, zero, 1)
    assert (strong.tokens != plain.tokens).any()


def test_given_tokens_stay(llada) -> None:
    """Infilling: tokens the canvas comes with are context and are never written."""
    full = run(llada, sampler_of("topk", "none"), rows=(0,))
    given = np.full((1, GEN), MASK)
    given[0, [0, 3, 9, 10, 11, 12, 13, 14, 15, 8, 23]] = 55
    result = run(llada, sampler_of("topk", "dual"), rows=(0,), given=jnp.asarray(given))
    kept = given[0] != MASK
    assert (result.tokens[0][kept] == 55).all() and (result.decoded_at[0][kept] == -1).all()
    assert (result.decoded_at[0][~kept] >= 0).all()
    assert result.full_forwards[0] == 2, "the block that came complete needs no forward"
    assert full.full_forwards[0] == full.nfe[0]


def test_rows_may_end_early(llada) -> None:
    """A canvas that ends inside the room for it is the canvas of that length, block by block, in one program."""
    sampler = sampler_of("llada", "dual", stop=stop_on([EOS], vocab_size=136))
    result = run(llada, sampler, gen_lengths=jnp.asarray([24, 20, 8, 3]))
    for row, length in enumerate([24, 20, 8, 3]):
        exact = BlockSampler(
            LLaDA(GEN), gen_length=length, block_length=min(BLOCK, length), cache=DualCache(), stop=sampler.stop
        )
        alone = run(llada, exact, rows=(row,))
        np.testing.assert_array_equal(result.tokens[row, :length], alone.tokens[0])
        np.testing.assert_array_equal(result.decoded_at[row, :length], alone.decoded_at[0])
        assert (result.decoded_at[row, length:] == -1).all() and result.nfe[row] == alone.nfe[0]


def test_stop_ends_a_row_and_changes_no_text(llada_tiny) -> None:
    """With a stop the text up to it is what the full run gives, for fewer forwards."""
    free = run(llada_tiny, sampler_of("llada", "none"))
    stop = stop_on([EOS], sequences=[[46, 32]], vocab_size=136)
    stopped = run(llada_tiny, sampler_of("llada", "none", stop=stop))
    for row in range(4):
        length = stopped.lengths[row]
        np.testing.assert_array_equal(stopped.tokens[row, :length], free.tokens[row, :length])
        text = "".join(map(chr, free.tokens[row]))
        wanted = min(text.find(end) % 1000 for end in (". ", chr(EOS)))
        assert length == min(wanted, GEN)
    assert (stopped.nfe <= free.nfe).all() and stopped.nfe.sum() < free.nfe.sum()


def test_fill_after_eos(llada_tiny) -> None:
    """Everything behind the first end token becomes it, and costs no forward."""
    long = BlockSampler(Threshold(0.8), gen_length=64, block_length=16, cache=DualCache())
    filled = dataclasses.replace(long, fill_after_eos=True)
    one, other = run(llada_tiny, long), run(llada_tiny, filled)
    for row in range(4):
        behind = np.arange(64) > other.lengths[row]
        assert (other.tokens[row][behind] == EOS).all()
    assert other.nfe.sum() < one.nfe.sum()


def test_temperature_draws_by_key(llada) -> None:
    sampler = sampler_of("threshold", "dual", sampling=Sampling(temperature=1.0))
    prompt, lengths = pad_prompts(ROWS, 96)
    draw = lambda seed: sample_jit(sampler, llada.denoiser, prompt, lengths, key=jax.random.key(seed)).tokens
    np.testing.assert_array_equal(draw(1), draw(1))
    assert (np.asarray(draw(1)) != np.asarray(draw(2))).any()
    cold = dataclasses.replace(sampler, sampling=Sampling(temperature=0.0))
    greedy = dataclasses.replace(sampler, sampling=Sampling())
    np.testing.assert_array_equal(run(llada, cold).tokens, run(llada, greedy).tokens)


def test_suppressed_tokens_are_never_written(llada) -> None:
    plain = run(llada, sampler_of("topk", "none"), rows=(0,))
    digit = int(plain.tokens[0, 0])
    without = run(llada, sampler_of("topk", "none", sampling=Sampling(suppress=jnp.asarray([digit]))), rows=(0,))
    assert digit not in without.tokens[0]


def test_canvas_length_is_context(llada) -> None:
    """Masks behind the generation change the predictions, are never written, and rows stay strangers."""
    padded = sampler_of("eb", "prefix", canvas_length=128)
    result = run(llada, padded)
    assert (result.tokens != run(llada, sampler_of("eb", "prefix")).tokens).any()
    for row in range(4):
        assert_same_row(result, row, run(llada, padded, rows=(row,), width=64), 0)


@pytest.mark.parametrize("cache", [DualCache(), VicinityCache(prefix_look=4, after_look=4, warmup=1)])
def test_rows_never_wait(llada, cache) -> None:
    """A ragged batch takes as many steps as its slowest row forwards, though rows enter blocks at different times."""
    sampler = BlockSampler(Threshold(0.7), gen_length=GEN, block_length=BLOCK, cache=cache)
    prompt, lengths = pad_prompts(ROWS, 96)
    states = stream(sampler, llada.denoiser, prompt, lengths, gen_lengths=jnp.asarray([24, 24, 19, 10]))
    for steps, state in enumerate(states):  # noqa: B007
        last = state
    assert steps == int(last.canvas.nfe.max()) and len(set(last.canvas.nfe.tolist())) > 1
    for row in range(4):
        alone = run(llada, sampler, rows=(row,), gen_lengths=jnp.asarray([[24, 24, 19, 10][row]]))
        assert int(alone.nfe[0]) == int(last.canvas.nfe[row])


@pytree()
class Idle(Rule):
    """Commits nothing, ever."""

    def decide(self, predictions, view, state):
        return view.undecided & False, state


BREAKS, FINE = 7, 8


def told(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Logits of a model that breaks, as float16 overflows do, once eight tokens stand behind a prompt of `BREAKS`."""
    logits = jax.nn.one_hot((tokens + jnp.arange(tokens.shape[1])) % 12, 16) * 4.0
    written = (tokens != 15).sum(axis=1) - (tokens.shape[1] - lengths) - 1
    broken = (tokens[:, 0] == BREAKS) & (written >= 8)
    return jnp.where(broken[:, None, None] & (jnp.arange(tokens.shape[1]) == 10)[:, None], jnp.nan, logits)


@pytest.mark.parametrize(
    "rule", [*RULES.values(), Credit(0.6), Hierarchical(), Idle()], ids=lambda rule: str(rule)[:18]
)
def test_it_ends_with_a_broken_model_and_says_so(rule: Rule) -> None:
    """Whatever the rule: the row, the forward, and the other row is as it is alone."""
    denoiser = FunctionDenoiser(told, mask_id=15, eos_id=14)
    sampler = BlockSampler(rule, gen_length=GEN, block_length=BLOCK)
    both = sample_jit(sampler, denoiser, jnp.asarray([[BREAKS], [FINE]]), key=keys(2))
    assert (np.asarray(both.tokens) != 15).all() and (np.asarray(both.decoded_at) >= 0).all()
    assert int(both.nfe.max()) <= GEN
    at = int(both.broken_at[0])
    assert at >= 0 and int((np.asarray(both.decoded_at[0]) < at).sum()) >= 8
    assert int(both.broken_at[1]) == -1
    alone = sample_jit(sampler, denoiser, jnp.asarray([[FINE]]), key=keys(2)[1:])
    assert_same_row(jax.device_get(both), 1, jax.device_get(alone), 0)


def test_a_broken_model_is_told_in_one_sentence(llada) -> None:
    name = "layers.0.mlp.down_proj.kernel"
    params = {**llada.params, name: llada.params[name].at[0, 0].set(jnp.nan)}
    model = dataclasses.replace(llada, params=params)
    sentence = r"the logits of row 0 \(and those of 1 others\) were not finite in forward 0: .*check its weights"
    with pytest.warns(RuntimeWarning, match=sentence):
        samplers.generate(model, [ROWS[0], ROWS[1]], rule="eb", gen_length=8, block_length=8)


def test_what_cannot_be_known_is_not_refused(llada) -> None:
    """What lies behind a row's length may be anything, and inside a program values are nobody's to look at."""
    sampler, prompt = sampler_of("threshold", "dual"), jnp.full((1, 32), 70)
    wild = prompt.at[:, 20:].set(-1)
    one, other = (sample_jit(sampler, llada.denoiser, tokens, jnp.asarray([20])) for tokens in (prompt, wild))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    for wrap in (jax.jit, jax.vmap):
        run = wrap(lambda tokens, length: sample(sampler, llada.denoiser, tokens, length).nfe)
        axis = (None,) if wrap is jax.vmap else ()
        assert jax.eval_shape(run, jnp.full((1, 32), 5000)[axis], jnp.asarray([99])[axis]).shape[-1] == 1
