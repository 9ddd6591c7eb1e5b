"""Training data: sources of examples by number, and rows of fixed shape made from them.

text          plain text files, packed into full rows (pre-training)
jsonl         JSON lines with prompt and answer, messages, text or ids
parquet       Parquet files with such columns
arrayrecord   ArrayRecord files of such JSON
datasets      data sets of Hugging Face's hub, or saved by its `datasets`
trajectories  generations with the step that wrote each token, by `python -m evals trajectories`
mixture       several of these, some of them more often than others
module:name   whatever that callable makes: a `Source`, or a task with `source("train")`
"""

import types
from collections.abc import Callable, Mapping

from train.data.files import arrayrecord, datasets, jsonl, parquet, text
from train.data.rows import Row, Rows
from train.data.shards import trajectories
from train.data.source import (
    Example,
    ExampleLike,
    Setup,
    Source,
    count_examples,
    in_words,
    make_referenced,
    source_of_split,
)
from train.data.workers import Loader

SOURCES: Mapping[str, Callable[..., Source]] = types.MappingProxyType(
    {
        "text": text,
        "jsonl": jsonl,
        "parquet": parquet,
        "arrayrecord": arrayrecord,
        "datasets": datasets,
        "trajectories": trajectories,
    }
)

__all__ = [
    "SOURCES",
    "Example",
    "ExampleLike",
    "Loader",
    "Row",
    "Rows",
    "Setup",
    "Source",
    "count_examples",
    "in_words",
    "make_referenced",
    "source_of_split",
]
