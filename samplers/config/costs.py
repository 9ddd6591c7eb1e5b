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
from dllm_jax.kernels.attention import QUERIES
from dllm_jax.kernels.dispatch import kernels_run, one_device
from dllm_jax.models.denoiser import Span
from dllm_jax.models.kv_cache import KVCache, LayerKV
from dllm_jax.params.quantized import num_bytes
from dllm_jax.params.specs import forms
from dllm_jax.pytree import pytree
from samplers.config.factory import CanvasSampler
from samplers.tokens.predictions import TILE_ELEMENTS


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
    model: Model, sampler: CanvasSampler, batch: int, prompt_length: int, *, kernels: bool | None = None
) -> Costs:
    """What a sampler takes to answer `batch` prompts of up to `prompt_length` tokens together.

    Args:
        model: with parameters or their shapes, as `dllm_jax.checkpoints.loading.load_shapes` gives them.
        kernels: whether kernels of our own run; by default whether they do on this machine's device.
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
    return Costs(
        batch,
        prompt_length,
        rows,
        sampler.forwards(prompt_length),
        num_bytes(model.params) + (num_bytes(verifier) if verifier is not None else 0),
        buffers,
        num_bytes(state) - buffers,
        work_of(model, sampler, batch, rows, _kernels_run(denoiser) if kernels is None else kernels),
    )


def _kernels_run(denoiser: Denoiser) -> bool:
    with one_device(denoiser.one_device):
        return kernels_run(denoiser.dtype, None)


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

    def denoise(self, canvas: jax.Array, soft: jax.Array, start: jax.Array, kv: KVCache) -> tuple[jax.Array, KVCache]:
        self.shapes[canvas.shape[1]] = canvas.shape[0]  # all rows, where the encoder before it ran one after another
        return super().denoise(canvas, soft, start, kv)


def _is_layer(part: Any) -> bool:
    return isinstance(part, LayerKV)


def work_of(model: Model, sampler: Any, batch: int, rows: Mapping[int, int], kernels: bool) -> int:
    """Bytes that a step needs besides weights and buffers: one layer's activations and, where no kernel keeps them on
    the chip, scores of attention; or a quantized kernel, where that is written out; and what the vocabulary is read by.

    Args:
        rows: as in `Costs`.
        kernels: whether kernels of our own run.
    """
    config, size = model.config, model.denoiser.dtype.itemsize
    layer = size * (2 * _hidden(config) + 4 * config.embed_dim)
    scores = 0 if kernels else 4 * config.num_heads * max(rows)
    forward = max(count * (run * layer + min(run, QUERIES) * scores) for run, count in rows.items())
    written_out = max((math.prod(model.params[name].shape) for name in forms(config)), default=0) * size
    return max(forward, 0 if kernels else written_out) + _readout(model, sampler, batch)


def _readout(model: Model, sampler: Any, batch: int) -> int:
    """Bytes of logits, and of the part of the vocabulary head that a tile of them needs, which GPUs copy."""
    rule, positions, words = getattr(sampler, "rule", None), batch * sampler.width, model.config.vocab_size
    reads = rule is None or rule.reads_logits or rule.reads_hidden or getattr(sampler, "smoothing", None) is not None
    if reads or positions * words <= TILE_ELEMENTS:
        return 4 * positions * words
    return 4 * TILE_ELEMENTS + TILE_ELEMENTS // positions * model.config.embed_dim * model.denoiser.dtype.itemsize


def _hidden(config: ModelConfig) -> int:
    """Hidden units of the widest feed-forward part that a token goes through."""
    experts = config.experts
    routed = 0 if experts is None else experts.per_token * (experts.dim + config.embed_dim) + (experts.shared_dim or 0)
    return max(config.mlp_dim or 0, routed)
