"""The fingerprint of data, by which a resumed run recognises them: the number of examples, and a digest of some."""

import hashlib
from typing import Any

import numpy as np

from train.data.source import Source, count_examples

_SAMPLE = 64  # examples that are read


def data_fingerprint(source: Source) -> dict[str, Any]:
    """The number of examples, and a digest of 64 of them.

    The 64 are spread evenly from the first to the last, and read whole: tokens, what is given, steps of trajectories.
    Of an endless source, the first example alone is read. An edit that changes neither the number nor one of the 64
    goes unnoticed.

    Returns:
        JSON: "examples", None of an endless source, and "digest".
    """
    count = count_examples(source)
    numbers = [0] if count is None else np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.int64)).tolist()
    digest = hashlib.blake2b(digest_size=16)
    for number in numbers:
        example = source.example(number)
        for values in (example.prompt_ids, example.answer_ids, example.given, getattr(example, "step", None)):
            array = np.asarray([] if values is None else values, "<i8")
            digest.update(array.size.to_bytes(8, "little", signed=True) + array.tobytes())
    return {"examples": count, "digest": digest.hexdigest()}
