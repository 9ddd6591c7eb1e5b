"""Log-probabilities of tokens in canvases with open places, by forwards over batches of rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import Model
from dllm_jax.models.denoiser import Denoiser, DenoiserLike, Span
from dllm_jax.models.kv_cache import slice_rows, with_room
from dllm_jax.parallel.sharding import batch_sharding
from samplers.decisions.questions import Question, Row
from samplers.text.prompts import bucket_length, next_power
from samplers.tokens.noise import KeyNoise, Purpose, token_of
from samplers.tokens.predictions import logprobs_of, readout

Scores = dict[tuple[int, int], float]
"""Log-probabilities of a row's wanted tokens, by place and token."""


def read_rows(
    model: Model, rows: Sequence[tuple[Question, Row]], batch_size: int, progress: Callable[[int], Any] | None
) -> list[Scores]:
    """Scores in the rows' order; rows of like lengths run together."""
    found: list[Scores] = [{} for _ in rows]
    order = sorted(range(len(rows)), key=lambda at: len(rows[at][0].prompt) + len(rows[at][1].body), reverse=True)
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        for number, scores in zip(numbers, _read_batch(model, [rows[at] for at in numbers], batch_size), strict=True):
            found[number] = scores
        if progress is not None:
            progress(len(numbers))
    return found


def _read_batch(model: Model, rows: Sequence[tuple[Question, Row]], batch_size: int) -> list[Scores]:
    """One forward. Shapes are rounded up to powers of two or buckets, so that few programs are compiled."""
    denoiser, config, layout = model.denoiser, model.config, model.layout
    count = batch_size if layout is not None else min(next_power(len(rows)), batch_size)
    filled = [*rows, *[rows[0]] * (count - len(rows))]
    starts = np.asarray([len(question.prompt) for question, _ in filled], np.int32)
    if config.has_canvas:
        width = config.block_length or 0
        room, ends = bucket_length(int(starts.max())) + width, starts + width
    else:
        ends = starts + np.asarray([len(row.body) for _, row in filled], np.int32)
        room = min(bucket_length(int(ends.max())), config.max_length)
        width = min(next_power(int((ends - starts).max())), room - denoiser.min_prompt_length)
    tokens = np.full((count, room), denoiser.eos_id, np.int32)
    places = np.zeros((count, next_power(max(len(row.wanted) for _, row in rows))), np.int32)
    widest = max(len(ids) for _, row in rows for ids in row.wanted.values())
    wanted = np.zeros((*places.shape, next_power(widest)), np.int32)
    for at, (question, row) in enumerate(filled):
        end = starts[at] + len(row.body)
        tokens[at, :end] = [*question.prompt, *row.body]
        places[at, : len(row.wanted)] = [*row.wanted]
        for slot, ids in enumerate(row.wanted.values()):
            wanted[at, slot, : len(ids)] = ids
    arrays = (tokens, starts, ends, places, wanted)
    if layout is not None:
        arrays = jax.device_put(arrays, batch_sharding(layout.mesh, layout.rules))
    keys = jnp.stack([question.key for question, _ in filled])
    logprobs = np.asarray(_read(denoiser, *arrays, keys, width=width))
    return [
        {
            (place, token): float(value)
            for place, ids, own in zip(row.wanted, row.wanted.values(), values, strict=False)
            for token, value in zip(ids, own, strict=False)
        }
        for (_, row), values in zip(rows, logprobs, strict=False)
    ]


@functools.partial(jax.jit, static_argnames="width")
def _read(
    denoiser: DenoiserLike,
    tokens: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    places: jax.Array,
    wanted: jax.Array,
    keys: jax.Array,
    *,
    width: int,
) -> jax.Array:
    """Log-probabilities of tokens in the canvases of one forward.

    Args:
        tokens: [B, S] int32, prompt and canvas of each row, -1 in open places.
        starts, ends: [B] int32, the canvas's first position and the one after its last.
        places: [B, R] int32, places of a canvas.
        wanted: [B, R, C] int32, tokens at each.
        keys: [B], of the random tokens in open places of a model without a mask token.
        width: positions from `starts` on that hold every canvas.

    Returns:
        [B, R, C] float32, in nats.
    """
    model = denoiser if isinstance(denoiser, Denoiser) else None
    if model is not None and model.config.has_canvas:
        first, hidden = starts, _denoise(model, tokens, starts, keys, width)
    else:
        first, visible = jnp.minimum(starts, tokens.shape[1] - width), ends
        if model is not None and model.config.has_causal_context:  # its prompt reads causally, its canvas sees all
            position = jnp.arange(tokens.shape[1])
            visible = jnp.where(position < starts[:, None], position + 1, ends[:, None])
        inputs = jnp.where(tokens < 0, denoiser.mask_id, tokens)
        hidden, _ = denoiser.forward(inputs, visible, outputs=Span(first, width))
    own = jnp.take_along_axis(hidden, (places + (starts - first)[:, None])[..., None], axis=1)
    return logprobs_of(readout(denoiser, own), wanted)


def _denoise(model: Denoiser, tokens: jax.Array, starts: jax.Array, keys: jax.Array, width: int) -> jax.Array:
    """Hidden states [B, L, D] of canvases with random tokens in open places, by one step of the decoder."""
    canvas = slice_rows(tokens, starts, width)
    place = jnp.broadcast_to(jnp.arange(width), canvas.shape)
    drawn = KeyNoise(keys).uniform(Purpose.CANVAS, jnp.zeros_like(starts), place)
    canvas = jnp.where(canvas < 0, token_of(drawn, model.vocab_size), canvas)
    _, read = model.forward(tokens[:, : tokens.shape[1] - width], starts)
    soft = jnp.zeros((*canvas.shape, model.config.embed_dim), model.dtype)
    return model.denoise(canvas, soft, starts, with_room(read, width))[0]
