"""What a generation needs on which device: a table of models, weights, canvases and batches.

Shapes are traced (`samplers.config.costs`), nothing is loaded or run, so it takes seconds a row on any machine.

    python -m benchmarks.memory                                       # the table of docs/memory.md
    python -m benchmarks.memory llada-8b-instruct --batch 16 --length 4096
    python -m benchmarks.memory my-model --quantize int8              # a converted checkpoint: a folder or a name
    python -m benchmarks.memory --check benchmarks/results/compile-*.json    # against what compilers allocated
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.command import status_of
from benchmarks.compile import GIB, MEMORY
from dllm_jax import PUBLISHED, DllmError, Model, published_config
from dllm_jax.checkpoints.loading import load_shapes
from dllm_jax.params.specs import abstract_params
from samplers import make_sampler
from samplers.config.costs import Costs, costs_of, work_of

MODELS = (
    *("llada-8b-instruct", "dream-7b-instruct", "llada-moe-7b-a1b-instruct", "llada2.0-mini", "sdar-1.7b-chat"),
    *("sdar-8b-chat", "sdar-30b-a3b-chat", "fast-dllm-v2-1.5b", "fast-dllm-v2-7b", "nemotron-diffusion-3b"),
    *("nemotron-diffusion-8b", "nemotron-diffusion-14b", "diffusion-gemma-26b"),
)
DEVICES: Mapping[str, float] = {**MEMORY, "l4": 22.0, "a100-40": 39.0, "a100-80": 79.0}
"""GiB that a program can have; of L4 and A100, for which nothing was compiled, a little less than the data sheet's."""
BEFORE_AMPERE = ("t4",)
SHARE = 0.97
"""The share of a device's memory that a program may take to count as fitting: the arithmetic errs by less."""


def outlined(name: str, quantize: Any, dtype: str, layers: int | None = None) -> Model:
    """A model of shapes alone.

    Args:
        layers: number of a published size's layers, all by default.
    """
    if name not in PUBLISHED:
        return load_shapes(name, dtype=dtype, quantize=quantize)
    config = published_config(name).replace(quantize=quantize)
    config = config if layers is None else config.replace(num_layers=layers)
    return Model(config, abstract_params(config, dtype), None, name)


def needed(name: str, quantize: Any, batch: int, length: int, gen_length: int) -> tuple[Costs, Costs]:
    """What a model takes with its usual sampler: its own blocks and cache, or 32 positions and the dual cache, with
    attention in XLA's operations. First in bfloat16, then in float16, in which quantized kernels are written out.

    Args:
        name: of a published size, or a converted checkpoint.
        length: positions of a row, of which `gen_length` are generated.

    Raises:
        DllmError: for unknown names, and models that cannot be quantized this way.
    """
    model = outlined(name, quantize, "bfloat16")
    sampler = make_sampler(model, gen_length=gen_length, ignore_eos=True)
    costs = costs_of(model, sampler, batch, length - gen_length, scores=True, written_out=False)
    work = work_of(model, sampler, batch, costs.rows, scores=True, written_out=True)  # float16 has bfloat16's bytes
    return costs, dataclasses.replace(costs, work=work)


def row_of(name: str, quantize: Any, batch: int, length: int, gen_length: int) -> dict[str, Any]:
    """One row of the table, in bytes, and the devices that it fits on."""
    costs, old = needed(name, quantize, batch, length, gen_length)
    needs = {device: (old if device in BEFORE_AMPERE else costs).total for device in DEVICES}
    by_size = sorted(DEVICES, key=DEVICES.__getitem__)
    fits = [device for device in by_size if needs[device] <= SHARE * DEVICES[device] * GIB]
    parts = {part: getattr(costs, part) for part in ("weights", "buffers", "state", "work", "total")}
    about = {"model": name, "quantize": quantize, "batch": batch, "length": length, "gen_length": gen_length}
    return {**about, **parts, "total_float16": old.total, "fits": fits}


def compared(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The arithmetic against generations that `benchmarks.compile` compiled for one device, read from its files."""
    entries = itertools.chain.from_iterable(json.loads(path.read_text()) for path in files)
    samples = (entry for entry in entries if entry.get("what") == "sample" and entry["mesh"] == "tensor=1")
    return [_compared(entry) for entry in samples]


def _compared(entry: Mapping[str, Any]) -> dict[str, Any]:
    model = outlined(entry["model"], entry.get("quantize"), entry["dtype"], entry["layers"])
    options = {"gen_length": entry["gen_length"], "block_length": entry["block_length"], "ignore_eos": True}
    sampler = make_sampler(model, entry["sampler"], **options)
    old = entry["target"] in BEFORE_AMPERE
    # Entries without the name of an implementation were compiled with kernels of attention that this library had.
    scores = old or entry.get("implementation") in ("auto", "xla")
    costs = costs_of(model, sampler, entry["batch"], entry["prompt_length"], scores=scores, written_out=old)
    peak = entry["peak_bytes"]
    return {"title": entry["title"], "arithmetic": costs.total, "compiled": peak, "off": costs.total / peak - 1}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table, in Markdown."""
    columns = ("weights", "buffers", "work", "total", "total_float16")
    print(f"| model | weights as | rows x positions | {' | '.join(columns)} | fits |")
    print("|---" * (len(columns) + 4) + "|")
    for row in rows:
        sizes = " | ".join(f"{row[column] / GIB:.2f}" for column in columns)
        shape = f"{row['batch']} x {row['length']}"
        fits = ", ".join(row["fits"]) or "none"
        print(f"| {row['model']} | {row['quantize'] or 'bfloat16'} | {shape} | {sizes} | {fits} |")


def show_compared(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the arithmetic against what was compiled, in Markdown."""
    print("| program | arithmetic, GiB | compiled, GiB | off |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['title']} | {row['arithmetic'] / GIB:.2f} | {row['compiled'] / GIB:.2f} | {row['off']:+.1%} |")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add(
        "models",
        nargs="*",
        metavar="MODEL",
        help="published sizes, or converted checkpoints",
    )
    add("--quantize", nargs="+", default=["none", "int8", "int4"], choices=["none", "int8", "int4"])
    add("--batch", nargs="+", type=int, default=[1, 16], metavar="N")
    add("--length", nargs="+", type=int, default=[768], metavar="N", help="positions of a row, prompt included")
    add("--gen-length", type=int, default=256, metavar="N", help="how many of these are generated")
    add("--check", nargs="+", type=Path, metavar="FILE", help="compare with these files of benchmarks.compile instead")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    return made


def report(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows.

    Raises:
        DllmError: for unknown models and impossible shapes.
    """
    if options.check:
        return compared(options.check)
    if min(options.batch) < 1 or min(options.length) <= options.gen_length:
        raise DllmError("--batch must be at least 1, and --length above --gen-length, as it counts the prompt")
    bits = [None if name == "none" else name for name in options.quantize]
    found = []
    for name, quantize, batch, length in itertools.product(
        options.models or MODELS, bits, options.batch, options.length
    ):
        found.append(row_of(name, quantize, batch, length, options.gen_length))
        print(f"{name} {quantize} {batch} x {length}", file=sys.stderr)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows; 0, or 2 after a mistake."""
    options = parser().parse_args(arguments)
    return status_of(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> None:
    rows = report(options)
    (show_compared if options.check else show)(rows)
    if options.json:
        about = {"jax": jax.__version__, "devices": dict(DEVICES), "share": SHARE}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
