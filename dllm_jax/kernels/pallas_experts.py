"""The experts' products on NVIDIA GPUs: a kernel, in Pallas by Triton, over tiles of rows that go to one expert.

Rows are taken from where they lie and results put where they belong, by a table of numbers for every tile, so that
nothing is sorted or padded but the numbers. A tile reads its expert's matrix in place, as it is stored; the tiles of an
expert run at about the same time, so that its matrix comes from memory about once.

Shape letters: N tokens, A assignments of tokens to experts, E experts, M their matrices side by side, R rows of a tile.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as for_gpu

from dllm_jax.params.products import Table

Backend = Literal["cuda", "interpret"]

LEAST, MOST = 16, 128
"""Rows of a tile: Triton's products have at least 16, and 128 are enough for arithmetic to hide what is read."""

WIDTH, DEPTH = 128, 128
"""Columns of a tile, those of all its matrices together, and bytes of a row that are read at a time: three such reads
of 128 rows fit the 99 KiB of shared memory that the smallest GPUs since Ampere have (compiled for compute capability
8.9), and no register is spilled."""


class Tiles(NamedTuple):
    """Which rows run together.

    Attributes:
        places: [tiles, R] int32, the numbers of a tile's assignments; A where it has fewer.
        expert: [tiles] int32, whose they are; E where the tile has none.
    """

    places: jax.Array
    expert: jax.Array


def fits(shape: tuple[int, ...]) -> bool:
    """Whether the kernel takes experts of this shape, [E, 2, D, F] or a device's part of it: Triton's products are over
    powers of two, and its offsets have 32 bits."""
    return min(_part(size, LEAST) for size in shape[2:]) == LEAST and math.prod(shape) < 2**31


def _part(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to `most`, which is one."""
    return math.gcd(size, most)


def experts(backend: Backend, x: jax.Array, order: jax.Array, sizes: jax.Array, w_in: Table, w_out: Table) -> jax.Array:
    """(silu(x gate) * (x up)) w_out of every assignment, [A, D] in the dtype of x, with float32 sums.

    Assignment a is of token a // (A / N). What belongs to no expert here is not written.

    Args:
        backend: "cuda", or "interpret", which runs one operation after the other on any platform.
        x: [N, D] bfloat16 or float32.
        order: [A] int32, the assignments sorted by expert.
        sizes: [E] int32, how many each expert has; those after all of them belong to no expert here.
        w_in: [E, 2, D, F], gate first; w_out: [E, F, D]; either may be in int8.
    """
    tiles = _tiles(order, sizes)
    hidden = _product(backend, x, tiles, w_in, len(order))
    return _product(backend, hidden, tiles, jax.tree.map(lambda x: x[:, None], w_out), len(order))


def _tiles(order: jax.Array, sizes: jax.Array) -> Tiles:
    """Every expert's assignments in tiles of their own, as many as any sizes need.

    They have about twice as many rows as an expert gets on average, so that most experts' matrices pass once.
    """
    total, num_experts = len(order), len(sizes)
    rows = min(MOST, max(LEAST, pl.next_power_of_2(2 * total // num_experts)))
    counts = (sizes + rows - 1) // rows
    starts, ends = jnp.cumsum(sizes) - sizes, jnp.cumsum(counts)  # in assignments, in tiles
    number = jnp.arange(total // rows + min(total, num_experts))
    expert = jnp.sum(ends <= number[:, None], axis=1, dtype=jnp.int32)
    rank = (number - (ends - counts)[expert])[:, None] * rows + jnp.arange(rows)
    at = jnp.minimum(starts[expert][:, None] + rank, total - 1)
    return Tiles(jnp.where(rank < sizes[expert][:, None], order[at], total), expert)


def _product(backend: Backend, x: jax.Array, tiles: Tiles, tables: Table, total: int) -> jax.Array:
    """[N, in] times [E, M, in, out] -> [A, out]; of two matrices the silu of the first product times the second."""
    kernel, *scales = jax.tree.leaves(tables)
    _, num, inputs, outputs = kernel.shape
    width, depth = _part(outputs, WIDTH // num), _part(inputs, DEPTH // max(x.dtype.itemsize, kernel.dtype.itemsize))
    rows = tiles.places.shape[1]
    whole = lambda x: pl.BlockSpec(x.shape, lambda c, t: (0,) * x.ndim)
    columns = lambda x: pl.BlockSpec((*x.shape[:-1], width), lambda c, t: (*(0,) * (x.ndim - 1), c))
    out = jax.ShapeDtypeStruct((total, outputs), x.dtype, manual_axis_type=_varies(x, *tiles, kernel))
    call = pl.pallas_call(
        functools.partial(_tile, depth, total // len(x)),
        grid=(outputs // width, len(tiles.expert)),  # the first of them runs side by side
        in_specs=[
            whole(tiles.expert),
            pl.BlockSpec((None, rows), lambda c, t: (t, 0)),
            whole(x),
            *map(columns, (kernel, *scales)),
        ],
        out_specs=columns(out),
        out_shape=out,
        compiler_params=for_gpu.CompilerParams(num_warps=4 if rows < MOST else 8, num_stages=3),
        interpret=backend == "interpret",
        name="experts",
    )
    return call(tiles.expert, tiles.places, x, kernel, *scales)


def _varies(*arrays: jax.Array) -> Any:
    """What a result of these varies over, in a caller's `shard_map`."""
    types = [jax.typeof(x).manual_axis_type for x in arrays]
    return types[0].update(varying=frozenset().union(*(each.varying for each in types)))


def _tile(depth: int, per_row: int, *refs: Any) -> None:
    expert_ref, places_ref, x_ref, kernel_ref, *scale_refs, out_ref = refs
    expert, places = expert_ref[pl.program_id(1)], places_ref[...]

    @pl.when(expert < kernel_ref.shape[0])
    def _() -> None:
        row = lax.div(jnp.minimum(places, out_ref.shape[0] - 1), per_row)  # any, where there is none

        def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = pl.ds(i * depth, depth)
            x = x_ref[row, at]
            product = lambda m: jnp.dot(
                x, kernel_ref[expert, m, at, :].astype(x.dtype), preferred_element_type=jnp.float32
            )
            return tuple(total + product(m) for m, total in enumerate(sums))

        nothing = jnp.zeros((len(places), kernel_ref.shape[3]), jnp.float32)
        steps = x_ref.shape[1] // depth
        sums = lax.fori_loop(0, steps, add, (nothing,) * kernel_ref.shape[1])
        if scale_refs:
            sums = tuple(total * scale_refs[0][expert, m, 0, :] for m, total in enumerate(sums))
        y = sums[0] if len(sums) == 1 else jax.nn.silu(sums[0]) * sums[1]
        to = out_ref.at[places[:, None], jnp.arange(y.shape[1])[None]]
        for_gpu.store(to, y.astype(out_ref.dtype), mask=(places < out_ref.shape[0])[:, None])
