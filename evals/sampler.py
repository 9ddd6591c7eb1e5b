"""The samplers of a sweep: specs (`samplers.config.sampler_config`) and grids."""

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax import spec
from dllm_jax.errors import DllmError
from samplers.config.sampler_config import SamplerConfig, parse_sampler, parse_samplers, read_options

__all__ = ["SamplerConfig", "all_samplers", "parse_sampler", "parse_samplers", "read_grid", "unique"]


def read_grid(path: str | Path) -> list[SamplerConfig]:
    """The samplers of a TOML file: tables `[[sampler]]` with options, each a value or a list of values.

    `sampler` names the sampler and `model` what it runs; without `sampler`, `rule` is the name. So `sampler = "d2f"`
    may come with the `rule` that decides in its blocks.

    Raises:
        DllmError: for a file that cannot be read, is not like that, or names no sampler.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("sampler")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DllmError(f"the grid {path} could not be read ({error})") from None
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise DllmError(f"the grid {path} has no [[sampler]] tables; write one per rule, with lists of values")
    return list(itertools.chain.from_iterable(_of_table(table, path) for table in tables))


def unique(samplers: Iterable[SamplerConfig]) -> list[SamplerConfig]:
    """The samplers without repetitions, those of one series together."""
    by_series: dict[str, dict[str, SamplerConfig]] = {}
    for sampler in samplers:
        by_series.setdefault(sampler.series, {})[str(sampler)] = sampler
    return [sampler for group in by_series.values() for sampler in group.values()]


def _of_table(table: Mapping[str, Any], path: str | Path) -> list[SamplerConfig]:
    key = "sampler" if "sampler" in table else "rule"
    name, model = table.get(key), table.get("model")
    if not isinstance(name, str):
        advice = f'write rule = "eb", or another\'s name, or sampler = "d2f" (what was found: {name!r})'
        raise DllmError(f"the grid {path} has a [[sampler]] without a name; {advice}")
    if model is not None and not isinstance(model, str):
        raise DllmError(f"the grid {path}: model {model!r} is no folder or name; write one per [[sampler]]")
    lists = {k: v if isinstance(v, list) else [v] for k, v in table.items() if k not in (key, "model")}
    products = itertools.product(*lists.values())
    texts = [{k: spec.format_value(v) for k, v in zip(lists, values, strict=True)} for values in products]
    return [read_options(name, options, model=model) for options in texts]


def all_samplers(texts: Sequence[str], grid: str | Path | None = None) -> list[SamplerConfig]:
    """The samplers of several specs and of a grid's file.

    Raises:
        DllmError: as `parse_samplers` and `read_grid`, and when there are none.
    """
    found = [sampler for text in texts for sampler in parse_samplers(text)]
    found += read_grid(grid) if grid is not None else []
    if not found:
        raise DllmError("no sampler was given; pass --sampler RULE:OPTION=VALUE, or a file by --grid")
    return unique(found)
