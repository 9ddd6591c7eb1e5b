"""Several sources as one, some of them more often than others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dllm_jax.errors import DllmError
from train.data.source import (
    ExampleLike,
    Source,
    count_examples,
    draws_of,
    example_name,
    lengths_of,
    prompt_lengths_of,
)


class Mixture:
    """A finite source: the examples of others, of each so many times.

    Its parts follow one another, as examples are shuffled later. A part with a rest, such as the half of 1.5 epochs,
    has evenly spaced examples once more.

    Attributes:
        sources: S finite sources.
        epochs: [S], how often each source's examples come; at least one example of each does.
    """

    def __init__(self, sources: Sequence[Source], epochs: Sequence[float]) -> None:
        self.sources, self.epochs = tuple(sources), tuple(epochs)
        self._counts = [_count(source) for source in sources]
        numbers = [max(round(n * times), 1) for n, times in zip(self._counts, epochs, strict=True)]
        self._ends = np.cumsum(numbers)
        self._starts = self._ends - numbers

    @property
    def identity(self) -> list[Any] | None:
        """What changes where one of the sources does; None where one does not know."""
        found = [getattr(source, "identity", None) for source in self.sources]
        return None if None in found else [found, self.epochs]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def example(self, index: int) -> ExampleLike:
        """Example `index`."""
        source, number = self._find(index)
        return source.example(number)

    def name(self, index: int) -> str:
        """What it is called in its source."""
        return example_name(*self._find(index))

    def lengths(self) -> np.ndarray | None:
        """Tokens of each example, [N], where all sources know."""
        return self._join(lengths_of)

    def prompts(self) -> np.ndarray | None:
        """Tokens of each example's prompt, [N], where all sources know."""
        return self._join(prompt_lengths_of)

    def draws(self, *, shown: str | None) -> np.ndarray | None:
        """`train.data.heldout.heldout_draw` of each example, [N], where all sources keep them."""
        return self._join(lambda source: draws_of(source, shown=shown))

    def _find(self, index: int) -> tuple[Source, int]:
        place = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[place], int(self._numbers(place, index - self._starts[place]))

    def _numbers(self, place: int, at: Any) -> Any:
        """Numbers of a source's examples that stand at these of its places here."""
        count = self._counts[place]
        whole, rest = divmod(int(self._ends[place] - self._starts[place]), count)
        return np.where(at < whole * count, at % count, (at - whole * count) * count // max(rest, 1))

    def _join(self, of: Callable[[Source], np.ndarray | None]) -> np.ndarray | None:
        found, parts = list(map(of, self.sources)), self._ends - self._starts
        known = [values for values in found if values is not None]
        if len(known) < len(found):
            return None
        return np.concatenate([x[self._numbers(i, np.arange(parts[i]))] for i, x in enumerate(known)])


def epochs_of(weights: Sequence[float], counts: Sequence[int]) -> list[float]:
    """How often each of S sources' examples come where its share of all is to be as its weight, and each comes at
    least once."""
    often = [weight / count for weight, count in zip(weights, counts, strict=True)]
    return [each / min(often) for each in often]


def _count(source: Source) -> int:
    if (count := count_examples(source)) is None:
        raise DllmError("a source of a mixture has no end; give its entry in data.options.sources a number to `take`")
    return count
