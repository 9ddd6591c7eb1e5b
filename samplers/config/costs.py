"""What a generation needs before anything is loaded or compiled: positions that a forward runs, forwards, memory.

Shapes are traced, not estimated: parameters, buffers and states are what the program will have, and the positions of
forwards come from a traced step. What a compiler adds is arithmetic (`Costs.work`); `python -m benchmarks.memory
--check` reports how far off that is.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax import Denoiser, Model, ModelConfig
from dllm_jax.kernels.attention import ATTENTION, CAUSAL, FUSED_FROM
from dllm_jax.kernels.attention.xla import QUERIES
from dllm_jax.kernels.dispatch import before_ampere, choose, on_device, platform_of
from dllm_jax.models.denoiser import Span
from dllm_jax.models.kv_cache import KVCache, LayerKV
from dllm_jax.params.quantized import num_bytes
from dllm_jax.params.specs import forms
from dllm_jax.pytree import pytree
from samplers.config.factory import CanvasSampler
from samplers.tokens.predictions import TILE_ELEMENTS, TILES_IN_ONE


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a batch of generations takes. Memory is in bytes, of all devices together.

    Attributes:
        batch, prompt_length: B rows, each with room for a prompt of that length.
        rows: positions of a row that forwards run, ascending -> how many rows run together. The last is a full
            forward, others are windows.
        forwards: fewest and most forwards of a row, if no end token ends it before.
        weights: of the model, and of a verifier.
        buffers: keys and values.
        state: all else that is carried from step to step.
        work: what one step holds besides, by arithmetic.
    """

    batch: int
    prompt_length: int
    rows: Mapping[int, int]
    forwards: tuple[int, int]
    weights: int
    buffers: int
    state: int
    work: int

    @property
    def positions(self) -> tuple[int, ...]:
        """What forwards run of a row, ascending."""
        return tuple(self.rows)

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.weights + self.buffers + self.state + self.work


def costs_of(
    model: Model,
    sampler: CanvasSampler,
    batch: int,
    prompt_length: int,
    *,
    scores: bool | None = None,
    written_out: bool | None = None,
) -> Costs:
    """What a sampler takes to answer `batch` prompts of up to `prompt_length` tokens together.

    Args:
        model: with parameters or their shapes, as `dllm_jax.checkpoints.loading.load_shapes` gives them.
        scores, written_out: as of `work_of`; by default as on this machine's device.
    """
    shapes = _ForwardShapes()
    denoiser = _RecordingDenoiser(**vars(model.denoiser), shapes=shapes)
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, prompt_length), (batch,)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    begin = lambda sampler, denoiser, tokens, lengths, key: sampler.init(denoiser, tokens, lengths, key=key)
    state = jax.eval_shape(begin, sampler, denoiser, tokens, lengths, key)
    shapes.clear()  # what reads the prompt is no forward that decodes
    jax.eval_shape(lambda sampler, denoiser, state: sampler.step(denoiser, state), sampler, denoiser, state)
    layers = [x for x in jax.tree.leaves(state, is_leaf=_is_layer) if _is_layer(x)]
    rows = {positions: shapes[positions] for positions in sorted(shapes)}
    buffers, verifier = num_bytes(layers), getattr(sampler, "verifier", None)
    shared = verifier is not None and getattr(verifier.denoiser, "params", None) is model.params
    scores = _has_scores(denoiser, max(rows)) if scores is None else scores
    written_out = _writes_out(denoiser) if written_out is None else written_out
    return Costs(
        batch,
        prompt_length,
        rows,
        sampler.forwards(prompt_length),
        num_bytes(model.params) + (0 if verifier is None or shared else num_bytes(verifier)),
        buffers,
        num_bytes(state) - buffers,
        work_of(model, sampler, batch, rows, scores=scores, written_out=written_out),
    )


def _has_scores(denoiser: Denoiser, positions: int) -> bool:
    """Whether a full forward on this machine's first device has no kernel of attention."""
    config, dtype = denoiser.config, denoiser.dtype
    shapes = [(1, positions, heads, config.head_dim) for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    of_query = config.is_causal or config.has_blocks or config.has_canvas
    visible = jax.ShapeDtypeStruct((1, positions if of_query else 1), jnp.int32)
    operands = *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), visible
    device, operation = denoiser.device or jax.local_devices()[0], CAUSAL if config.is_causal else ATTENTION
    with on_device(device):
        return positions < FUSED_FROM or platform_of(device) not in choose(operation, operands, denoiser.layout)


def _writes_out(denoiser: Denoiser) -> bool:
    """Whether this machine's first device has a quantized kernel in full before a product."""
    return jax.local_devices()[0].platform == "cpu" or before_ampere() or denoiser.dtype == jnp.float16


def device_memory() -> int | None:
    """Bytes of the first device, or of the host where it computes; None where it is unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        known = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= getattr(os, "sysconf_names", {}).keys()
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
    return (device.memory_stats() or {}).get("bytes_limit")


class _ForwardShapes(dict[int, int]):
    """Positions of forwards -> the fewest rows that run that many: shapes are also traced of a batch that runs row by
    row. Compared by identity, so that it can be static."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def record(self, rows: int, positions: int) -> None:
        self[positions] = min(rows, self.get(positions, rows))


@pytree(static=("config", "layout", "scan", "shapes"))
class _RecordingDenoiser(Denoiser):
    """A denoiser that records the shapes of its forwards as they are traced."""

    shapes: _ForwardShapes = dataclasses.field(default_factory=_ForwardShapes)

    def forward(self, inputs: jax.Array, visible: jax.Array, **options: Any) -> tuple[jax.Array, KVCache]:
        at = options.get("at")
        width = inputs.shape[1] if at is None else at.width if isinstance(at, Span) else at.shape[1]
        self.shapes.record(inputs.shape[0], width)
        return super().forward(inputs, visible, **options)

    def denoise(
        self, canvas: jax.Array, soft: jax.Array, start: jax.Array, kv: KVCache, **options: Any
    ) -> tuple[jax.Array, KVCache]:
        self.shapes[canvas.shape[1]] = canvas.shape[0]  # all rows, where the encoder before it ran one after another
        return super().denoise(canvas, soft, start, kv, **options)


def _is_layer(part: Any) -> bool:
    return isinstance(part, LayerKV)


def work_of(model: Model, sampler: Any, batch: int, rows: Mapping[int, int], *, scores: bool, written_out: bool) -> int:
    """Bytes that a step needs besides weights and buffers: one layer's activations and, where no kernel keeps them on
    the chip, scores of attention; or a quantized kernel, where that is written out; and what the vocabulary is read by.

    Args:
        rows: as in `Costs`.
        scores: attention is in XLA's operations, which have the scores of some queries in memory.
        written_out: quantized kernels are made whole before a product: on CPU, on GPUs before Ampere, in float16.
    """
    config, size = model.config, model.denoiser.dtype.itemsize
    layer = size * (2 * _hidden(config) + 4 * config.embed_dim)
    of_query = 4 * config.num_heads * max(rows) if scores else 0
    forward = max(count * (run * layer + min(run, QUERIES) * of_query) for run, count in rows.items())
    largest = max((math.prod(model.params[name].shape) for name in forms(config)), default=0) * size
    return max(forward, largest if written_out else 0) + _readout(model, sampler, batch)


def _readout(model: Model, sampler: Any, batch: int) -> int:
    """Bytes of logits, and of the part of the vocabulary head that a tile of them needs, which GPUs copy."""
    rule, positions, words = getattr(sampler, "rule", None), batch * sampler.width, model.config.vocab_size
    reads = rule is None or rule.reads_logits or rule.reads_hidden or getattr(sampler, "smoothing", None) is not None
    if reads or positions * words <= TILES_IN_ONE * TILE_ELEMENTS:
        return 4 * positions * words
    return 4 * TILE_ELEMENTS + TILE_ELEMENTS // positions * model.config.embed_dim * model.denoiser.dtype.itemsize


def _hidden(config: ModelConfig) -> int:
    """Hidden units of the widest feed-forward part that a token goes through."""
    experts = config.experts
    routed = 0 if experts is None else experts.per_token * (experts.dim + config.embed_dim) + (experts.shared_dim or 0)
    return max(config.mlp_dim or 0, routed)
