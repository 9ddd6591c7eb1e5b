"""Prompts before their first step: read in pieces between steps, from where a kept prompt ends.

For block diffusion models under the exact cache, and for others under a cache with a `prompt_block_length`: there keys
and values of a prompt's complete blocks depend on nothing that follows. They are read into buffers of their own, a
piece for each call of the engine, so that a long prompt does not hold up the requests that run. Prompts that begin
alike share what they share: the longest common beginning of a kept prompt is copied instead of read.
"""

import collections
import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import DllmError, Model
from dllm_jax.models.denoiser import Denoiser, Span, block_causal
from dllm_jax.models.kv_cache import put_rows, with_room
from samplers.caches.base import BlockCache
from samplers.checks import check_length, check_whole
from samplers.config.factory import CanvasSampler
from samplers.loops.block import BlockSampler
from samplers.text.prompts import bucket_length

USUAL_BYTES, USUAL_CHUNK = 256 << 20, 512

LEAST_KEPT = 32
"""Tokens of the shortest beginning that is kept."""

LEAST_WIDTH = 64
"""Positions of the narrowest piece that has a program of its own."""


@dataclasses.dataclass
class Prefix:
    """A prompt's complete blocks.

    Attributes:
        tokens: [N] int32.
        kv: their keys and values, in buffers of N positions or more.
    """

    tokens: np.ndarray
    kv: Any

    @property
    def size(self) -> int:
        """Bytes of the buffers."""
        return sum(x.nbytes for x in jax.tree.leaves(self.kv))


class PrefixStore:
    """Prefixes within a number of bytes; those that were used longest ago go first.

    A prompt is kept if less than half of it was found, or if it continues a kept one, whose place it takes: so the
    turns of a conversation are one entry, and so are many questions after one long instruction.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept = collections.OrderedDict[int, Prefix]()  # the one that was used last is the last
        self._count = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes in use."""
        return sum(prefix.size for prefix in self._kept.values())

    def find(self, tokens: np.ndarray) -> tuple[Prefix | None, int]:
        """The prefix with the longest common beginning, and the length of that."""
        shared = {number: _common(prefix.tokens, tokens) for number, prefix in self._kept.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is None or shared[best] == 0:
            return None, 0
        self._kept.move_to_end(best)
        return self._kept[best], shared[best]

    def takes(self, tokens: np.ndarray, size: int) -> bool:
        """Whether a prompt of some bytes is to be kept."""
        most = max((_common(old.tokens, tokens) for old in self._kept.values()), default=0)
        new = 2 * most < len(tokens) or (bool(self._continued(tokens)) and most < len(tokens))
        return new and len(tokens) >= LEAST_KEPT and size <= self._most

    def keep(self, prefix: Prefix) -> None:
        """Keeps a prefix, and drops others until there is room."""
        for number in self._continued(prefix.tokens):
            del self._kept[number]
        self._kept[self._count] = prefix
        self._count += 1
        while self.size > self._most:
            self._kept.popitem(last=False)

    def _continued(self, tokens: np.ndarray) -> list[int]:
        """The kept prompts that this one begins with."""
        return [n for n, old in self._kept.items() if _common(old.tokens, tokens) == len(old.tokens)]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens of the longest common beginning."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(np.argmax(differ)) if differ.any() else length


@dataclasses.dataclass
class Reading:
    """A prompt that is being read.

    Attributes:
        tokens: [1, P] int32.
        whole: N, positions of its complete blocks.
        read: of these, those whose keys and values are in the buffers.
        kv: buffers of P positions.
    """

    tokens: np.ndarray
    whole: int
    read: int
    kv: Any

    @property
    def done(self) -> bool:
        """Whether it is read."""
        return self.read == self.whole


class Prefill:
    """Reads the prompts of an engine.

    Attributes:
        chunk: positions that may be read at once.
        store: kept prefixes.
    """

    def __init__(
        self, model: Model, sampler: CanvasSampler, prompt_length: int, chunk: int | None, most_bytes: int
    ) -> None:
        """
        Args:
            prompt_length: P, of the longest prompt.
            chunk: positions that are read at once, rounded up to whole blocks; None reads a prompt at once.
            most_bytes: of kept prefixes; 0 keeps none.

        Raises:
            DllmError: for what does not support it.
        """
        check_length("prefill_chunk", chunk, optional=True)
        check_whole("prefix_cache", most_bytes, 0)
        if not supports_prefill(model, sampler):
            raise DllmError(
                "prefix_cache and prefill_chunk need a block diffusion model under the exact cache, or a "
                "prompt_block_length, without guidance and smoothing, on devices that share each row; leave them out"
            )
        self._sampler = cast(BlockSampler, sampler)
        self._cache = cast(BlockCache, self._sampler.cache)
        self._denoiser: Denoiser = model.denoiser.in_blocks(self._sampler.block_length)
        self._block = self._cache.prompt_blocks(self._denoiser) or 1
        self._length = self._whole_blocks(prompt_length)
        self.chunk = min(self._whole_blocks(chunk or prompt_length), self._length)
        self._widths = [self.chunk]  # of pieces, each of which is a program
        while self._widths[-1] >= 2 * max(LEAST_WIDTH, self._block):
            self._widths.append(self._whole_blocks(-(-self._widths[-1] // 2)))
        self.store = PrefixStore(most_bytes)

    def reads(self, prompt: list[int]) -> bool:
        """Whether a prompt is read: it has complete blocks."""
        return self._whole(prompt) > 0

    def begin(self, prompt: list[int]) -> Reading:
        """A prompt that is to be read, from what is kept of it."""
        whole = self._whole(prompt)
        tokens = np.zeros((1, self._length), np.int32)
        tokens[0, : len(prompt)] = prompt
        prefix, count = self.store.find(tokens[0, :whole])
        count = count // self._block * self._block
        if prefix is None or not count:
            return Reading(tokens, whole, 0, self._denoiser.empty_cache(1, self._length))
        return Reading(tokens, whole, count, _widened(prefix.kv, self._length - prefix.kv[0].key.shape[1]))

    def read(self, reading: Reading, room: int) -> int:
        """Reads the next piece, and keeps the prompt after the last.

        Args:
            room: positions to read at most.

        Returns:
            Positions that were read.
        """
        count = min(room // self._block * self._block, reading.whole - reading.read)
        if count > 0:
            width = next(width for width in reversed(self._widths) if width >= count)
            bounds = np.asarray([[reading.read], [reading.read + count]], np.int32)
            read = _read_first if reading.read == 0 else _read_next
            reading.kv = read(self._denoiser, reading.kv, reading.tokens, *bounds, self._block, width)
            reading.read += count
            if reading.done:
                self._keep(reading)
        return max(count, 0)

    def _keep(self, reading: Reading) -> None:
        width = min(bucket_length(reading.whole), self._length)
        size = sum(x.nbytes for x in jax.tree.leaves(reading.kv)) * width // self._length
        if self.store.takes(tokens := reading.tokens[0, : reading.whole], size):
            self.store.keep(Prefix(tokens, _narrowed(reading.kv, width)))

    def _whole(self, prompt: list[int]) -> int:
        """Positions of a prompt that are read."""
        (first_block, _), *_ = self._sampler.blocks(len(prompt))
        return int(self._cache.kept(self._denoiser, first_block))

    def _whole_blocks(self, length: int) -> int:
        return max(-(-length // self._block), 1) * self._block


def supports_prefill(model: Model, sampler: CanvasSampler) -> bool:
    """Whether prompts of a sampler can be read before its first step."""
    if not isinstance(sampler, BlockSampler) or not isinstance(sampler.cache, BlockCache):
        return False
    blocks = sampler.cache.prompt_blocks(model.denoiser)
    whole_rows = model.denoiser.batch_parts == 1
    return blocks is not None and sampler.guidance is None and sampler.smoothing is None and whole_rows


@functools.partial(jax.jit, static_argnums=(5, 6), donate_argnums=1)
def _read_first(
    denoiser: Denoiser, kv: Any, tokens: jax.Array, low: jax.Array, high: jax.Array, block: int, width: int
) -> Any:
    """The buffers with the keys and values of the first `width` positions, in blocks; `low` is 0."""
    visible = jnp.minimum(block_causal(width, low, block), high[:, None])
    _, new = denoiser.forward(tokens[:, :width], visible, outputs=Span(low + denoiser.min_prompt_length, 1))
    return jax.tree.map(lambda old, new: put_rows(old, new, jnp.zeros(1, jnp.int32)), kv, new)


@functools.partial(jax.jit, static_argnums=(5, 6), donate_argnums=1)
def _read_next(
    denoiser: Denoiser, kv: Any, tokens: jax.Array, low: jax.Array, high: jax.Array, block: int, width: int
) -> Any:
    """The buffers with the keys and values of positions [low, high), `width` at most, in blocks."""
    width = min(width, tokens.shape[1] - denoiser.min_prompt_length)
    span = Span(jnp.minimum(low, tokens.shape[1] - width), width)
    write = (span.positions >= low[:, None]) & (span.positions < high[:, None])
    visible = jnp.minimum(block_causal(tokens.shape[1], jnp.zeros_like(low), block), high[:, None])
    return denoiser.forward(tokens, visible, at=span, kv=kv, write=write, outputs=Span(span.start, 1))[1]


@functools.partial(jax.jit, static_argnums=1)
def _narrowed(kv: Any, width: int) -> Any:
    return jax.tree.map(lambda x: x[:, :width], kv)


_widened = jax.jit(with_room, static_argnums=1)
