"""Examples that are never trained on: a share of a finite source, chosen by their tokens."""

import hashlib

import numpy as np
from tqdm import tqdm

from dllm_jax.errors import DllmError
from train.data.checks import Subset
from train.data.order import permute
from train.data.source import ExampleLike, Source, count_examples, draws_of

_ORDER = (5,)  # key of the permutation of `choose_examples`


def split_heldout(source: Source, share: float, *, progress: bool = False) -> tuple[Source, Source]:
    """A source without the examples that are held out, and these.

    An example's tokens decide (`heldout_draw`), and neither its place nor other examples. So none moves to the other
    side when a file grows, and equal examples are on one side.

    Args:
        share: of the examples, in (0, 1).
        progress: show a bar.

    Raises:
        DllmError: for an endless source, and where one side would be empty.
    """
    count = count_examples(source)
    if count is None:
        raise DllmError(
            "data.heldout is for data with an end, and this has none; set it to 0, and watch.source to other data"
        )
    draws = draws_of(source, shown="held out" if progress else None)
    if draws is None:
        numbers = tqdm(range(count), desc="held out", unit=" examples", delay=1.0, disable=not progress)
        draws = np.fromiter((heldout_draw(source.example(i)) for i in numbers), np.uint64, count)
    held = draws / 2.0**64 < share
    if held.all() or not held.any():
        where = "no example" if not held.any() else "all examples"
        raise DllmError(f"data.heldout {share:g} holds out {where} of {count}; choose another share, or watch.source")
    return Subset(source, np.flatnonzero(~held)), Subset(source, np.flatnonzero(held))


def heldout_draw(example: ExampleLike) -> int:
    """A number in [0, 2^64) that depends on an example's tokens alone."""
    prompt, answer = (np.asarray(ids, "<i4") for ids in (example.prompt_ids, example.answer_ids))
    content = len(prompt).to_bytes(8, "little") + prompt.tobytes() + answer.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def choose_examples(source: Source, rows: int) -> Source:
    """`rows` examples, each once, the same every time; all of a finite source that has fewer."""
    count = count_examples(source)
    if count is None:
        return Subset(source, np.arange(rows))
    if count <= rows:
        return source
    return Subset(source, np.sort([permute(place, count, _ORDER) for place in range(rows)]))
