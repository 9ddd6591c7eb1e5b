"""Checks of an unmasking rule or a cache policy of your own: whether it keeps the library's promises.

    from samplers.testing import check_cache, check_rule

    print(check_rule(Lead(0.9)))  # what was checked; an AssertionError says in one sentence what fails, and where
    print(check_cache(EverySecond()))

The models are tiny and random: the checks say nothing about how good the rule or the policy is.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError, first_line
from dllm_jax.families import published_config
from dllm_jax.models.denoiser import Denoiser, DenoiserLike
from dllm_jax.params.specs import init_params
from dllm_jax.pytree import pytree
from dllm_jax.testing import require
from samplers.caches import CACHES, CachePolicy, ForwardRequest, NoCache, Outcome, SubBlockCache
from samplers.caches.base import full_forward
from samplers.engine.program import number_dtypes_of, numbers_of, with_numbers
from samplers.loops.block import BlockSampler, BlockState
from samplers.rules import Edit, Threshold
from samplers.rules.base import Rule
from samplers.sampler import Result, sample_jit, stream
from samplers.tokens.noise import row_keys
from samplers.tokens.smoothing import Smoothing

TINY = published_config("llada-8b-base").replace(
    vocab_size=24,
    embed_dim=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=256,
    eos_id=20,
    pad_id=20,
    mask_id=21,
    bos_id=22,
    end_ids=(20,),
    dtype="float32",
)
"""The model for rules, with full attention."""

BLOCKS = TINY.replace(family="llada2", attention="block", block_length=4)
"""The block diffusion model, for caches that need one."""

DEEPER = TINY.replace(num_layers=2)
"""The model for cache policies: keys and values of a single layer would depend on their own token alone."""

SHIFTED = DEEPER.replace(family="dream", shift=True)
"""A model that does not predict the first position."""

PROMPT_LENGTHS = (9, 5, 6)
STEPS_PER_POSITION = 20  # a generation that takes more never ends


def check_rule(
    rule: Rule,
    *,
    caches: Sequence[str] = tuple(CACHES),
    denoiser: DenoiserLike | None = None,
    gen_length: int = 16,
    block_length: int = 4,
    key: jax.Array | None = None,
) -> list[str]:
    """Runs a rule on a few rows of different lengths, with every cache policy that suits it.

    The promises of every rule: it can be traced; each number may be one for all rows or one per row; every generation
    ends; every forward on a row decides something, unless the rule bounds its forwards by `most_steps`; final tokens
    never change, and only a rule that `revises` changes what it wrote, in its active block; a row is the same alone and
    with others; the compiled loop equals its steps one by one; and the same keys give the same result.

    Args:
        rule: choose numbers at which some forwards commit one position and some several, so that mistakes show.
        caches: names of cache policies, with their defaults.
        denoiser: the model; by default `TINY`, and `BLOCKS` for caches of block diffusion models, with random weights.
        gen_length, block_length: of the generations; a schedule of steps needs a multiple of their quotient.
        key: of the random numbers; `jax.random.key(0)` by default.

    Returns:
        The names of the checks that ran, in order, then those of the caches. A cache that the sampler refuses by a
        `DllmError` is left out, unless all are refused.

    Raises:
        AssertionError: one sentence with what fails, the cache and, where it can, the row, position and forward.
        DllmError: for numbers that the rule itself refuses, and names that are not cache policies.
    """
    name = type(rule).__name__
    require(isinstance(rule, Rule), f"a {name} is no rule; derive its class from samplers.Rule")
    _require_pytree(rule)
    if unknown := [cache for cache in caches if cache not in CACHES]:
        raise DllmError(f"no cache policy is called {unknown[0]!r}; choose one of {', '.join(CACHES)}")
    rule.check(gen_length, gen_length // block_length)
    key = jax.random.key(0) if key is None else key

    def make_case(cache: str) -> _Case:
        policy: CachePolicy = CACHES[cache]()
        model = denoiser or _model_for(policy, 1, block_length, key)
        return _make_case(f"{name} with cache {cache!r}", rule, policy, model, gen_length, block_length, key)

    checked: list[str] = []
    ran: list[str] = []
    for cache, case in _accept_cases(caches, make_case):
        found = _check_steps(case)
        _check_loop(case, found)
        if not ran:
            checked = ["tracing", "a row alone"]
            _check_alone(case, found)
            if numbers_of(rule):
                checked.append("numbers per row")
                _check_numbers(case, found)
        ran.append(cache)
    return checked + ran


def check_cache(
    policy: CachePolicy,
    *,
    exact: bool = False,
    denoiser: DenoiserLike | None = None,
    gen_length: int = 16,
    block_length: int = 4,
    key: jax.Array | None = None,
) -> list[str]:
    """Runs a cache policy on a few rows of different lengths, with rules that need different things of it.

    The promises of every policy: it can be traced; a row's first forward is a full one; a full forward gives the hidden
    states of the model over everything; each forward runs all of the active block, within `Outcome.low` and `high`;
    only full forwards count as rebuilding buffers, and rows that have ended count none; a row is the same alone and
    with others; and the compiled loop equals its steps one by one. The rules are `threshold`; `edit`, which changes
    written tokens of the active block; and `threshold` with smoothing, which feeds embeddings and needs the hidden
    states of all positions that run.

    Args:
        policy: choose numbers at which it does all that it can within a few forwards.
        exact: whether generations must equal those of `NoCache`, forward by forward, except with smoothing, which
            carries over hidden states.
        denoiser: the model; by default `DEEPER`, also `SHIFTED` with `threshold`, and `BLOCKS` for a policy that is
            `in_order`; all with random weights.
        gen_length, block_length: of the generations.
        key: of the random numbers; `jax.random.key(0)` by default.

    Returns:
        The names of the cases that ran, in order. A case that is refused by a `DllmError` is left out, unless all are.

    Raises:
        AssertionError: one sentence with what fails, the rule and, where it can, the row and forward.
        DllmError: for numbers that the policy itself refuses.
    """
    name = type(policy).__name__
    methods = all(callable(getattr(policy, method, None)) for method in ("init", "predict"))
    require(
        methods and not isinstance(policy, type),
        f"a {name} is no cache policy; give it init and predict, or derive its class from BlockCache",
    )
    _require_pytree(policy)
    key = jax.random.key(0) if key is None else key
    model = denoiser or _model_for(policy, DEEPER.num_layers, block_length, key)

    cases: dict[str, tuple[Rule, Smoothing | None, DenoiserLike]] = {
        "threshold": (Threshold(), None, model),
        "edit": (Edit(), None, model),
        "smoothing": (Threshold(), Smoothing(), model),
    }
    if denoiser is None and not _is_in_order(policy):
        cases["threshold, shifted"] = (Threshold(), None, _random_model(SHIFTED, key))

    def make_case(label: str) -> _Case:
        rule, smoothing, model = cases[label]
        return _make_case(f"{name} with {label}", rule, policy, model, gen_length, block_length, key, smoothing)

    ran: list[str] = []
    for label, case in _accept_cases(cases, make_case):
        found = _check_steps(case.with_cache(_CheckedPolicy(policy)))
        _check_loop(case, found)
        _check_alone(case, found)
        if exact and case.sampler.smoothing is None:
            wanted = case.with_cache(NoCache()).sample()
            _require_same(
                case, "it gives another result than no cache", found, wanted, range(len(PROMPT_LENGTHS)), _TOKENS
            )
        ran.append(label)
    return ran


def _require_pytree(part: Any) -> None:
    leaf = jax.tree_util.all_leaves([part])
    require(not leaf, f"a {type(part).__name__} is no pytree; decorate its class with dllm_jax.pytree.pytree")


def _accept_cases(names: Iterable[str], make_case: Callable[[str], "_Case"]) -> Iterator[tuple[str, "_Case"]]:
    """The cases that are not refused, one by one; raises the first DllmError if all are."""
    refused: DllmError | None = None
    taken = False
    for name in names:
        try:
            case = make_case(name)
        except DllmError as error:
            refused = refused or error
            continue
        taken = True
        yield name, case
    if refused and not taken:
        raise refused


@dataclasses.dataclass(frozen=True)
class _Case:
    """A rule with a cache policy, and the rows to generate.

    Attributes:
        name: of both, for error messages.
        sampler, denoiser: of the generation.
        prompt: [B, P].
        rows: arguments of `sample` that have a row axis, by name.
    """

    name: str
    sampler: BlockSampler
    denoiser: DenoiserLike
    prompt: jax.Array
    rows: Mapping[str, Any]

    def of_rows(self, rows: Sequence[int]) -> "_Case":
        """The case with these rows."""
        chosen = jnp.asarray(rows)
        return dataclasses.replace(
            self, prompt=self.prompt[chosen], rows={name: x[chosen] for name, x in self.rows.items()}
        )

    def with_cache(self, policy: CachePolicy) -> "_Case":
        """The case with another policy."""
        return dataclasses.replace(self, sampler=dataclasses.replace(self.sampler, cache=policy))

    def sample(self) -> Result:
        """The compiled loop's result, on the host."""
        found: Result = jax.device_get(sample_jit(self.sampler, self.denoiser, self.prompt, **self.rows))
        return found


def _is_in_order(policy: CachePolicy) -> bool:
    """Whether a policy is for block diffusion models."""
    return getattr(policy, "in_order", False)


def _model_for(policy: CachePolicy, layers: int, block_length: int, key: jax.Array) -> Denoiser:
    """A random model that suits a policy."""
    config = BLOCKS.replace(block_length=block_length) if _is_in_order(policy) else TINY
    return _random_model(config.replace(num_layers=layers), key)


def _make_case(
    name: str,
    rule: Rule,
    policy: CachePolicy,
    denoiser: DenoiserLike,
    gen_length: int,
    block_length: int,
    key: jax.Array,
    smoothing: Smoothing | None = None,
) -> _Case:
    """A case; raises DllmError for parts that cannot be combined, AssertionError for parts that cannot be traced."""
    halves = block_length // 2 if isinstance(policy, SubBlockCache) else None
    sampler = BlockSampler(
        rule,
        gen_length,
        block_length,
        policy,
        smoothing,
        align_blocks=_is_in_order(policy),
        sub_block_length=halves or None,
    )
    batch, width = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)
    tokens = jax.random.randint(key, (2, batch, max(width, gen_length)), 0, denoiser.vocab_size)
    tokens = jnp.where((tokens == denoiser.mask_id) | (tokens == denoiser.eos_id), 0, tokens)
    given = jnp.arange(gen_length) == jnp.asarray([1, gen_length, gen_length // 2])[:, None]
    rows = {
        "prompt_lengths": jnp.asarray(PROMPT_LENGTHS),
        "gen_lengths": jnp.asarray([gen_length, gen_length, gen_length - block_length // 2]),
        "given": jnp.where(given, tokens[1, :, :gen_length], denoiser.mask_id),
        "key": row_keys(key, batch),
    }
    case = _Case(name, sampler, denoiser, tokens[0, :, :width], rows)
    advice = "its methods are traced, so no Python `if` on arrays, and what decides about the program is static"
    state = _require_traceable(case, advice, lambda: jax.eval_shape(_init_state, sampler, denoiser, case.prompt, rows))
    after = _require_traceable(
        case, advice, lambda: jax.eval_shape(lambda s, d, x: s.step(d, x), sampler, denoiser, state)
    )
    for was, now in ((state.rule, after.rule), (state.cache, after.cache)):
        shapes = f"{_shapes(was)} by init and {_shapes(now)} after a step"
        require(_shapes(was) == _shapes(now), f"{case.name}: its state is {shapes}; both must be alike")
    return case


def _init_state(sampler: Any, denoiser: Any, prompt: Any, rows: Any) -> Any:
    return sampler.init(denoiser, prompt, **rows)


def _require_traceable(case: _Case, advice: str, trace: Callable[[], Any]) -> Any:
    try:
        return trace()
    except (DllmError, AssertionError):
        raise
    except Exception as error:  # a user's code may raise anything
        message = first_line(error).rstrip(".")
        raise AssertionError(f"{case.name} cannot be traced ({message}); {advice}") from error


def _shapes(tree: Any) -> str:
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree))


def _random_model(config: ModelConfig, key: jax.Array) -> Denoiser:
    """A model with random weights that are not all tiny, so that it is confident of some tokens and not of others.

    Queries and keys are smaller: scores of hundreds would make much of rounding, which differs between batches.
    """
    params = init_params(config, key, dtype="float32")
    scale = lambda name: 30 if "q_proj" in name or "k_proj" in name else 150
    return Denoiser(config, {name: x * scale(name) if x.ndim > 1 else x for name, x in params.items()})


# Step by step --------------------------------------------------------------------------------------------------------


class _Snapshot(NamedTuple):
    """A copy of a state on the host: arrays [B, ...], of the generation [B, G]."""

    prompt: np.ndarray
    tokens: np.ndarray
    active: np.ndarray
    undecided: np.ndarray
    written: np.ndarray
    nfe: np.ndarray
    done: np.ndarray


def _take_snapshot(case: _Case, state: BlockState) -> _Snapshot:
    """A snapshot of copies, because a step works in place."""
    sampler, prompts, canvas = case.sampler, np.asarray(case.rows["prompt_lengths"]), state.canvas
    rows, position = np.array(canvas.tokens), np.arange(sampler.gen_length)
    before = prompts % sampler.width if sampler.align_blocks else prompts * 0
    active = (before[:, None] + position) // sampler.width == np.array(state.block)[:, None]
    prompt = np.where(np.arange(rows.shape[1]) < prompts[:, None], rows, -1)
    tokens = np.take_along_axis(rows, prompts[:, None] + position, axis=1)
    return _Snapshot(
        prompt, tokens, active, *map(np.array, (canvas.undecided, canvas.decoded_at >= 0, canvas.nfe, canvas.done))
    )


def _check_steps(case: _Case) -> Result:
    """Checks every step and the end; returns the result on the host."""
    sampler, most = case.sampler, STEPS_PER_POSITION * case.sampler.gen_length
    states: Iterator[BlockState] = stream(sampler, case.denoiser, case.prompt, **case.rows)
    state = next(states)
    now = _take_snapshot(case, state)
    for number, state in enumerate(states):
        require(number < most, f"{case.name} has not ended after {most} forwards; bound them by most_steps")
        before, now = now, _take_snapshot(case, state)
        _check_step(case, before, now)
    for row, nfe in enumerate(now.nfe.tolist()):
        own = dataclasses.replace(sampler, gen_length=int(case.rows["gen_lengths"][row]))
        bound = own.forwards(int(case.rows["prompt_lengths"][row]))[1]
        advice = "correct most_steps, or forwards"
        require(
            nfe <= bound, f"{case.name}: row {row} took {nfe} forwards, but forwards says at most {bound}; {advice}"
        )
    if isinstance(sampler.cache, _CheckedPolicy):
        _check_forwards(case, state.cache)
    _require_nowhere(case, now.undecided, "is still undecided at the end", now)
    wrong = (now.tokens < 0) | (now.tokens >= case.denoiser.vocab_size) | (now.tokens == case.denoiser.mask_id)
    _require_nowhere(case, wrong & now.written, "holds a mask, or no token of the vocabulary, at the end", now)
    result: Result = jax.device_get(sampler.result(case.denoiser, state))
    return result


def _check_step(case: _Case, before: _Snapshot, after: _Snapshot) -> None:
    """Checks what one forward changed."""
    rule = case.sampler.rule
    may = before.undecided | (before.written & before.active if rule.revises else np.zeros_like(before.undecided))
    changed = (
        (before.tokens != after.tokens) | (before.undecided != after.undecided) | (before.written & ~after.written)
    )
    ways = "" if rule.revises else "; commit undecided positions alone, or set revises = True"
    _require_nowhere(case, changed & ~may, f"was final, and is changed{ways}", after)
    require(bool((before.prompt == after.prompt).all()), f"{case.name} changes the prompt")
    ran = ~before.done
    stuck = ran & ~(before.undecided & ~after.undecided).any(axis=1)
    bounded = type(rule).most_steps is not Rule.most_steps
    sentence = f"{case.name}: a forward on row {int(np.argmax(stuck))} decides nothing; bound forwards by most_steps"
    require(bounded or not stuck.any(), sentence)


def _require_nowhere(case: _Case, where: np.ndarray, sentence: str, state: _Snapshot) -> None:
    """Raises AssertionError for positions [B, G] at which a sentence holds."""
    if where.any():
        row, position = (int(index) for index in np.unravel_index(np.argmax(where), where.shape))
        place = f"position {position} of row {row}, whose forwards are {int(state.nfe[row])},"
        raise AssertionError(f"{case.name}: {place} {sentence}")


# The forwards of a policy --------------------------------------------------------------------------------------------

TOLERANCE = 1e-3  # of hidden states, as a share of the largest number among them

_FAULTS = (
    "is its first, but no full one; nothing is stored that it could read",
    "counts as a full one, but gives other hidden states than the model over everything",
    "runs only a part of the active block, by its low and high; they begin where the block does, or before",
    "counts for a row that has ended",
    "counts as one that stored all keys and values, but not as a full one",
)


@pytree()
class _CheckedPolicy:
    """A policy, and of each row the first forward at which each promise is broken."""

    policy: CachePolicy

    @property
    def in_order(self) -> bool:
        return _is_in_order(self.policy)

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> tuple[Any, jax.Array]:
        """The policy's state, and the forwards of faults [B, faults] int32, -1 for none."""
        return self.policy.init(denoiser, batch, length), jnp.full((batch, len(_FAULTS)), -1)

    def predict(self, denoiser: DenoiserLike, request: ForwardRequest, state: tuple[Any, jax.Array]) -> Outcome:
        outcome = self.policy.predict(denoiser, request, state[0])
        whole, _ = full_forward(denoiser, request)
        positions = jnp.arange(request.length) if request.all_positions else request.span.positions
        last = request.lengths if request.all_positions else request.block_end
        ran = (positions >= request.block_start[:, None]) & (positions < jnp.minimum(outcome.high, last)[:, None])
        apart = jnp.where(ran[..., None], jnp.abs(outcome.hidden - whole), 0.0).max(axis=(1, 2))
        found = [
            request.active & ~outcome.full & (request.nfe == 0),
            request.active & outcome.full & ~(apart <= TOLERANCE * jnp.abs(whole).max()),
            request.active & ((outcome.low > request.block_start) | (outcome.high < request.block_end)),
            outcome.full & ~request.active,
            outcome.updated & ~outcome.full,
        ]
        first = jnp.where(jnp.stack(found, axis=1) & (state[1] < 0), request.nfe[:, None], state[1])
        return outcome._replace(state=(outcome.state, first))


def _check_forwards(case: _Case, state: tuple[Any, jax.Array]) -> None:
    """Raises AssertionError for a broken promise of a checked policy."""
    for sentence, first in zip(_FAULTS, np.array(state[1]).T, strict=True):
        row = int(np.argmax(first >= 0))
        require(bool((first < 0).all()), f"{case.name}: forward {int(first[row])} of row {row} {sentence}")


# Against other runs --------------------------------------------------------------------------------------------------

_TOKENS = ("tokens", "decoded_at", "nfe", "edits")
_FIELDS = (*_TOKENS, "full_forwards", "cache_updates")


def _require_same(
    case: _Case, what: str, found: Result, wanted: Result, rows: Sequence[int], fields: Sequence[str] = _FIELDS
) -> None:
    """Raises AssertionError unless the rows of one result are these rows of another."""
    for name in fields:
        mine, other = np.asarray(getattr(found, name)), np.asarray(getattr(wanted, name))[list(rows)]
        if not np.array_equal(mine, other):
            slot, *position = (int(index) for index in np.argwhere(mine != other)[0])
            place = f"row {rows[slot]}" + (f", position {position[0]}" if position else "")
            numbers = f"{name} is {mine[slot, *position]}, not {other[slot, *position]}"
            raise AssertionError(f"{case.name}: {what}: at {place} {numbers}")


def _check_loop(case: _Case, found: Result) -> None:
    """Compares the compiled loop with single steps and with itself, and rows with other neighbours."""
    rows = range(len(PROMPT_LENGTHS))
    loop = case.sample()
    _require_same(case, "the compiled loop gives another result than its steps one by one", loop, found, rows)
    _require_same(case, "the same keys give another result", case.sample(), loop, rows)
    for order in ([1, 2, 0], *([row] * len(rows) for row in rows)):
        what = "a row differs with other rows in the batch"
        _require_same(case, what, case.of_rows(order).sample(), found, order)


def _check_alone(case: _Case, found: Result) -> None:
    """Checks a batch of one row without padding."""
    row = 1
    alone = case.of_rows([row])
    alone = dataclasses.replace(alone, prompt=alone.prompt[:, : PROMPT_LENGTHS[row]])
    result = _require_traceable(
        case, "it must take any number of rows, so use per_row and axes, not sizes", alone.sample
    )
    _require_same(case, "a row alone differs", result, found, [row])


def _check_numbers(case: _Case, found: Result) -> None:
    """Checks numbers of one value for each row."""
    rule, batch = case.sampler.rule, len(PROMPT_LENGTHS)
    pairs = zip(numbers_of(rule), number_dtypes_of(rule), strict=True)
    numbers = [np.full(batch, number, dtype) for number, dtype in pairs]
    rows = dataclasses.replace(case, sampler=dataclasses.replace(case.sampler, rule=with_numbers(rule, numbers)))
    result = _require_traceable(case, "a number may be [B], so use per_row(self.number) against [B, W]", rows.sample)
    _require_same(case, "with equal numbers for each row it gives another result", result, found, range(batch))
