"""What the device could do and what it does: measured ceilings, time per forward, and where an engine step's time goes.

Two ceilings are measured on the device of the run: the rate of a large copy (bytes read plus bytes written) and of a
large matrix product in the model's dtype. A forward is timed as one of many in a single compiled loop whose iterations
depend on each other, so that launching costs what it costs inside a generation. `benchmarks.sample --roofline` calls
this; nothing here knows about command lines or files.
"""

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax import Denoiser, ModelConfig
from dllm_jax.models.denoiser import Span
from dllm_jax.models.kv_cache import write_rows
from dllm_jax.params.quantized import num_bytes
from dllm_jax.params.specs import abstract_params
from samplers import BlockSampler, BlockState, DualCache, TopK
from samplers.tokens.predictions import predict, readout

Row = dict[str, Any]
STAGES = ("window", "head", "scores", "step")
PARTS = ("window", "head", "scores", "bookkeeping")  # what each stage adds to the one before
QUIET_CORES = 0.1
MOST_REPEATS, LEAST_COUNT = 50, 4


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates measured on the device of the run.

    Attributes:
        copy: bytes per second of a large copy, read and write counted.
        matmul: floating-point operations per second of a large matrix product.
        copy_bytes, matmul_size: how large they were.
    """

    copy: float
    matmul: float
    copy_bytes: int
    matmul_size: int


def timed(call: Callable[[], Any], patience: float = 0.0) -> tuple[float, float | None]:
    """Wall time of one call, and how many cores other processes kept busy meanwhile (None where that is unknown).

    Args:
        patience: for this many seconds, wait until the rest of the machine is idle before the call, and repeat
            a call that was disturbed.
    """
    deadline = time.perf_counter() + patience
    while True:
        while time.perf_counter() < deadline and _is_disturbed(*_others_busy(lambda: time.sleep(0.5))):
            pass
        timing = _others_busy(lambda: jax.block_until_ready(call()))
        if time.perf_counter() >= deadline or not _is_disturbed(*timing):
            return timing


def _is_disturbed(seconds: float, others: float | None) -> bool:
    return (others or 0.0) * seconds > QUIET_CORES * seconds + 0.02  # the system counts in hundredths of a second


def _others_busy(call: Callable[[], Any]) -> tuple[float, float | None]:
    start, before = time.perf_counter(), _cpu_seconds()
    call()
    seconds, after = time.perf_counter() - start, _cpu_seconds()
    if before is None or after is None:
        return seconds, None
    return seconds, max(0.0, (after - before) / seconds)


def _cpu_seconds() -> float | None:
    """CPU time of everything on this machine but this process, time taken by its host included."""
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    user, nice, system, _, _, *rest = map(int, path.read_text().split("\n", 1)[0].split()[1:9])
    own = os.times()
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def measure_ceilings(dtype: str, *, quick: bool = False, repeats: int = 5, patience: float = 0.0) -> Ceilings:
    """Both ceilings, each the best of the repeats: a ceiling is what the device can do, not what it mostly did."""
    best = lambda call: min(timed(call, patience)[0] for _ in range(repeats))
    gpu = jax.default_backend() != "cpu"
    copy_bytes = 2**22 if quick else 2**32 if gpu else 2**28
    size = 256 if quick else 8192 if gpu else 2048
    return Ceilings(_copy_rate(copy_bytes, best), _matmul_rate(dtype, size, best), copy_bytes, size)


def _copy_rate(num_bytes: int, best: Callable[[Callable[[], Any]], float], calls: int = 8) -> float:
    # Into memory that exists already (a donated buffer): fresh pages would be timed otherwise.
    copy = jax.jit(lambda source, target: source + 1, donate_argnums=1, keep_unused=True)
    source = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    target = copy(source, jnp.zeros_like(source))

    def run() -> jax.Array:
        nonlocal target
        for _ in range(calls):  # queued, so that their launches overlap
            target = copy(source, target)
        return target

    run()
    return calls * 2 * num_bytes / best(run)


def _matmul_rate(dtype: str, size: int, best: Callable[[Callable[[], Any]], float], count: int = 8) -> float:
    # Random values (zeros can run faster), scaled so that the product of products stays in range.
    x, w = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    w = w / math.sqrt(size)
    chain = jax.jit(lambda x, w: lax.fori_loop(0, count, lambda _, x: x @ w, x))
    jax.block_until_ready(chain(x, w))
    return count * 2 * size**3 / best(lambda: chain(x, w))


def forward_flops(config: ModelConfig, batch: int, fed: int, keys: int, kept: int) -> int:
    """Floating-point operations of one forward's matrix products, head included.

    Args:
        fed: positions that are run per row; keys: positions they attend to; kept: positions whose logits are wanted
            (the last layer computes no query and no feed-forward for the others).
    """
    width, queries, pairs = config.embed_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(index: int) -> int:
        asking = kept if index == config.num_layers - 1 else fed
        projections = fed * 2 * pairs + asking * 2 * queries
        return 2 * (projections * width + asking * (2 * keys * queries + 3 * width * _hidden_width(config, index)))

    head = 2 * kept * width * config.vocab_size
    return batch * (sum(layer(index) for index in range(config.num_layers)) + head)


def _hidden_width(config: ModelConfig, index: int) -> int:
    """Hidden units of a layer's feed-forward part that each token goes through."""
    experts = config.experts
    if experts is None or index in experts.dense_layers:
        return config.mlp_dim
    return experts.per_token * experts.dim + (experts.shared_dim or 0)


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the weights that one forward reads: all but the table of input embeddings, of which it reads rows."""
    params = abstract_params(config, dtype)
    if not config.tied_embeddings:
        del params["embed.embedding"]
    return num_bytes(params)


def cache_bytes(config: ModelConfig, dtype: str, batch: int, length: int) -> int:
    """Bytes of the keys and values that a windowed forward reads."""
    return 2 * config.num_layers * batch * length * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Setting:
    """One shape to measure at: everything is static, and all rows are `prompt_length` long."""

    denoiser: Denoiser
    batch: int
    prompt_length: int
    gen_length: int
    block_length: int

    @property
    def length(self) -> int:
        """Positions of the key/value buffers."""
        return self.prompt_length + self.gen_length

    @property
    def dtype(self) -> str:
        """The parameters' dtype."""
        return self.denoiser.dtype.name

    @property
    def sampler(self) -> BlockSampler:
        """One token per step, so that a block holds as many like steps as it can."""
        return BlockSampler(TopK(1), gen_length=self.gen_length, block_length=self.block_length, cache=DualCache())

    @property
    def most_steps(self) -> int:
        """Steps of a block, less the last, which would leave it."""
        return max(self.block_length - 1, 1)


def start_state(setting: Setting) -> BlockState:
    """The state in the first block with its buffers filled, by random numbers: from here, steps run windows."""

    def begin(sampler: BlockSampler, denoiser: Denoiser) -> BlockState:
        prompt = jnp.arange(setting.batch * setting.prompt_length).reshape(setting.batch, -1) % 97
        state = sampler.init(denoiser, prompt)
        kv = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), state.cache.kv)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, kv=kv, built_for=state.block))

    return jax.jit(begin)(setting.sampler, setting.denoiser)


def _full(setting: Setting, denoiser: Denoiser, state: BlockState) -> BlockState:
    lengths, span = _span(setting, state)
    hidden, _ = denoiser.forward(state.canvas.tokens, lengths, outputs=span)
    return _feed_back(denoiser, state, denoiser.logits(hidden)[..., 0])


def _upto(stage: str, setting: Setting, denoiser: Denoiser, state: BlockState) -> BlockState:
    """An engine step's work up to a stage. What comes out is fed back in, so that no part of it can be left out."""
    if stage == "step":
        return setting.sampler.step(denoiser, state)
    lengths, span = _span(setting, state)
    hidden, kv = denoiser.forward(state.canvas.tokens, lengths, at=span, kv=state.cache.kv)
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, kv=kv))
    if stage == "window":
        return _feed_back(denoiser, state, hidden[..., 0])
    if stage == "head":
        return _feed_back(denoiser, state, denoiser.logits(hidden)[..., 0])
    sampler = setting.sampler
    scores = readout(denoiser, hidden)
    found = predict(scores, sampler.sampling, mask_id=denoiser.mask_id, score_from="raw", draw=None)
    return _feed_back(denoiser, state, found.confidence + found.token)


def _span(setting: Setting, state: BlockState) -> tuple[jax.Array, Span]:
    start = state.canvas.prompt_lengths
    return start + setting.gen_length, Span(start, setting.block_length)


def _feed_back(denoiser: Denoiser, state: BlockState, values: jax.Array) -> BlockState:
    """Writes tokens made from values [B, W] into the block. Behind a barrier: XLA might compute only what is used."""
    values = lax.optimization_barrier(values)
    tokens = (jnp.abs(values.astype(jnp.float32)) * 1000).astype(jnp.int32) % denoiser.vocab_size
    canvas = state.canvas
    tokens = write_rows(canvas.tokens, tokens, canvas.prompt_lengths)
    return dataclasses.replace(state, canvas=dataclasses.replace(canvas, tokens=tokens))


class Loop:
    """Dependent iterations of one body in one compiled program, their number a run-time argument."""

    def __init__(self, body: Callable[[Denoiser, Any], Any], denoiser: Denoiser, state: Any, most: int):
        def run(denoiser: Denoiser, state: Any, count: jax.Array) -> Any:
            return lax.fori_loop(0, count, lambda _, carry: body(denoiser, carry), state)

        self._arguments, self._most, self._count = (denoiser, state), most, 1
        start = time.perf_counter()
        self._program = jax.jit(run).lower(denoiser, state, 1).compile()
        self.compile_seconds = time.perf_counter() - start

    def calibrate(self, target_seconds: float) -> float:
        """Chooses the number of iterations so that a call takes about the target; returns what it will take."""
        self.seconds()  # the first call also loads the program
        seconds = self.seconds()
        self._count = min(self._most, max(LEAST_COUNT, round(target_seconds / seconds)))
        return seconds * self._count

    def seconds(self, patience: float = 0.0) -> float:
        """Seconds per iteration of one call."""
        return timed(lambda: self._program(*self._arguments, self._count), patience)[0] / self._count


def in_turns(
    loops: Mapping[str, Loop], repeats: int, target_seconds: float, patience: float = 0.0
) -> dict[str, list[float]]:
    """Seconds per iteration of every loop, measured in turns: what else the machine does then hits all alike.

    Loops that cannot run for the target time in one call are called more often than `repeats`.
    """
    longest = max(loop.calibrate(target_seconds) for loop in loops.values())
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(max(repeats, min(MOST_REPEATS, round(target_seconds / longest)))):
        for name, loop in loops.items():
            times[name].append(loop.seconds(patience))
    return times


def measure_forwards(
    setting: Setting,
    ceilings: Ceilings,
    *,
    split: bool,
    repeats: int = 5,
    target_seconds: float = 0.5,
    patience: float = 0.0,
) -> tuple[list[Row], Row | None]:
    """Times a full forward and a block's windowed one, both with the vocabulary head on the block.

    Args:
        split: also time the other stages of a step; they are programs of their own to compile.

    Returns:
        One row per forward, and the split of a step (None without `split`).
    """
    state = start_state(setting)
    stages: Iterable[str] = STAGES if split else ("head",)
    bodies = {"full": functools.partial(_full, setting)}
    bodies |= {stage: functools.partial(_upto, stage, setting) for stage in stages}
    loops = {name: Loop(body, setting.denoiser, state, setting.most_steps) for name, body in bodies.items()}
    times = in_turns(loops, repeats, target_seconds, patience)
    rows = [_forward_row(setting, ceilings, name, times[key]) for name, key in (("full", "full"), ("window", "head"))]
    return rows, _split_row(setting, times) if split else None


def _forward_row(setting: Setting, ceilings: Ceilings, name: str, times: list[float]) -> Row:
    config, batch, windowed = setting.denoiser.config, setting.batch, name == "window"
    fed = setting.block_length + int(config.shift) if windowed else setting.length
    flops = forward_flops(config, batch, fed, setting.length, setting.block_length)
    weights = weight_bytes(config, setting.dtype)
    cached = cache_bytes(config, setting.dtype, batch, setting.length) if windowed else 0
    seconds = statistics.median(times)
    floor = max((weights + cached) / ceilings.copy, flops / ceilings.matmul)
    return {
        "forward": name,
        "batch": batch,
        "positions": fed,
        "seconds": seconds,
        "seconds_min": min(times),
        "weight_bytes": weights,
        "cache_bytes": cached,
        "bytes_per_second": (weights + cached) / seconds,
        "fraction_of_copy": (weights + cached) / seconds / ceilings.copy,
        "flops": flops,
        "flops_per_second": flops / seconds,
        "fraction_of_matmul": flops / seconds / ceilings.matmul,
        "bound": "bytes" if floor * ceilings.matmul > flops else "flops",
        "fraction_of_floor": floor / seconds,
    }


def _split_row(setting: Setting, times: Mapping[str, list[float]]) -> Row:
    """Each part as the difference of two programs that differ by it.

    Of each program the least time, which other work on the machine disturbs least; a part smaller than what is left of
    the noise may still come out negative.
    """
    upto = {stage: min(times[stage]) for stage in STAGES}
    before = [0.0, *upto.values()]
    parts = {f"{part}_seconds": upto[stage] - past for part, stage, past in zip(PARTS, STAGES, before, strict=False)}
    return {"batch": setting.batch, **parts, "step_seconds": upto["step"]}
