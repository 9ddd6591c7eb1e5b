r"""Memory, transfers and utilisation of a training step of each recipe: `python -m benchmarks.recipes --help`.

    python -m benchmarks.recipes --target h100:8 train/configs/8b/*.toml --json benchmarks/results/compile-recipes.json
    python -m benchmarks.recipes --target v6e:2x4 train/configs/8b/llada-d2f.toml
    python -m benchmarks.recipes --target v6e:4x4 train/configs/8b/llada2-sft.toml optimizer.accumulate=4 \
        compute.mesh.fsdp=16
    python -m benchmarks.recipes --show benchmarks/results/compile-recipes.json

compiles the step with a run's own settings (`benchmarks.compile --what train`) and prints the line for the recipe's
head. On TPUs, where layers are a loop, all of them are compiled; on GPUs, where they are not, 4 and 6, and the model's
need is extrapolated from both, where layers are alike.

The second line is a step's model FLOPs utilisation as `benchmarks.predict` would have it: a model of the compiled
program, which nothing has checked. The lower number has no transfer between devices overlap with anything, the higher
one all of them with everything. A kernel of attention takes what its bytes take, and its FLOPs at peak.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import compile as bench
from benchmarks import hlo, predict
from benchmarks.command import status_of
from dllm_jax import DllmError, published_config
from train import read_config
from train.logs import step_flops

SIZES = ("argument_bytes", "temporary_bytes", "peak_bytes")
SECONDS = ("busy_seconds", "sent_seconds", "model_seconds")
FIGURES = (*SECONDS, "sent_bytes")
ABOUT = ("config", "target", "mesh", "model", "layers", "batch", "accumulate", "length", "implementation", "jax")
KEPT = (*ABOUT, *SIZES, "memory_bytes", *FIGURES)
FEW, MORE = 4, 6  # layers whose difference is that of a layer


def extended(few: Mapping[str, Any], more: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The row of a model of this many layers, extrapolated from two smaller ones."""
    share = (layers - few["layers"]) / (more["layers"] - few["layers"])
    line = {name: few[name] + share * (more[name] - few[name]) for name in (*SIZES, *FIGURES) if name in few}
    line |= {name: round(line[name]) for name in (*SIZES, "sent_bytes") if name in line}
    return {**more, **line, "layers": layers, "from": [few["layers"], more["layers"]]}


def rows_of(path: str, target: str, settings: Sequence[str] = (), implementation: str = "auto") -> list[dict[str, Any]]:
    """What is compiled of a recipe for a target, and last the whole model's.

    Args:
        settings: of training, as after `python -m train`, that differ from the recipe's.
        implementation: as of `benchmarks.compile`.

    Raises:
        DllmError: as `benchmarks.compile.report`, and for a target without rates.
    """
    kind = target.partition(":")[0]
    if kind not in predict.CHIPS:
        raise DllmError(f"--target {target!r} has no rates here; name one of {', '.join(predict.CHIPS)}")
    chip = predict.CHIPS[kind]

    def compiled(layers: int) -> dict[str, Any]:
        arguments = ["--target", target, "--what", "train", "--config", path, "--layers", str(layers), *settings]
        arguments += ["--implementation", implementation]
        result = bench.report(bench.parser().parse_args(arguments), functools.partial(step_figures, chip))
        return {name: result[name] for name in KEPT}

    alike = published_config(read_config(path).model.init).gemma is None
    if kind not in bench.GPUS or not alike:
        return [compiled(0)]
    few, more = compiled(FEW), compiled(MORE)
    return [few, more, extended(few, more, layers_of(more["model"]))]


def step_figures(chip: predict.Chip, setting: bench.Setting, program: hlo.Program, root: hlo.Loop) -> dict[str, float]:
    """What a step takes by `predict.turn`, and by its model FLOPs alone at the peak of all devices; and the bytes that
    a device receives."""
    assert setting.run is not None
    devices = setting.mesh.size
    found = predict.turn(program, root, chip, devices)
    attention = over_turns(root, lambda loop: sum(hlo.attention_flops(program, each) for each in loop.run))
    sent = over_turns(root, lambda loop: sum(size for _, size in loop.collectives.values()))
    busy = found["busy"] + found["gaps"] + attention / chip.flops
    model = step_flops(setting.run, setting.config, setting.run.data.length) / chip.flops / devices
    return {"busy_seconds": busy, "sent_seconds": found["sent"], "model_seconds": model, "sent_bytes": sent}


def over_turns(loop: hlo.Loop, of: Callable[[hlo.Loop], int]) -> int:
    """A number of a loop's own turn, and those of the loops within in each of theirs (one where that is not known)."""
    return of(loop) + sum((inner.counted or 1) * over_turns(inner, of) for inner in loop.inner)


def utilisation(row: Mapping[str, Any]) -> tuple[float, float]:
    """Model FLOPs utilisation where no transfer overlaps, and where all do."""
    busy, sent, model = (row[name] for name in SECONDS)
    return model / (busy + sent), model / max(busy, sent)


def line(row: Mapping[str, Any]) -> str:
    """The line in the head of a recipe."""
    argument, temporary, peak = (f"{row[name] / bench.GIB:.1f}" for name in SIZES)
    of = f"{row['memory_bytes'] / bench.GIB:.0f}"
    start = f"#   {row['target']:<12} {row['mesh']:<8} {peak:>5} of {of}"
    return f"{start} (arguments {argument}, temporary {temporary}){asked(row)}"


def asked(row: Mapping[str, Any]) -> str:
    """The implementation that was asked for, behind a comma."""
    return "" if row["implementation"] == "auto" else f", {row['implementation']}"


COLUMNS = (
    "recipe",
    "rows a device, at a time",
    "devices",
    "arguments, GiB",
    "temporary",
    "peak",
    "received in a step",
    "kernels, s",
    "transfers, s",
    "model FLOPs utilisation",
)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: the programs of all layers; "-" for figures that a row was not compiled with."""
    return predict.markdown(COLUMNS, [cells(row) for row in rows if row["layers"] == layers_of(row["model"])])


def cells(row: Mapping[str, Any]) -> list[str]:
    """A program's line of the table."""
    devices = math.prod(int(pair.partition("=")[2]) for pair in row["mesh"].split(","))
    gib = lambda name: f"{row[name] / bench.GIB:.1f}"
    figures = ["-"] * 4
    if "sent_bytes" in row:
        seconds = (f"{row[name]:.1f}" for name in SECONDS[:2])
        figures = [gib("sent_bytes"), *seconds, "{:.0%} to {:.0%}".format(*utilisation(row))]
    return [
        f"`{row['config']}`",
        f"{row['batch'] // row['accumulate'] // devices} x {row['length']}, {row['accumulate']} times",
        f"`{row['target']}` `{row['mesh']}`{asked(row)}",
        gib("argument_bytes"),
        gib("temporary_bytes"),
        f"{gib('peak_bytes')} of {row['memory_bytes'] / bench.GIB:.0f}",
        *figures,
    ]


def layers_of(model: str) -> int:
    """All layers of a published model."""
    return published_config(model).num_layers


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in order, later ones instead of earlier ones of the same program."""
    names = ("config", "target", "mesh", "layers", "length", "implementation")
    key = lambda row: tuple(row[name] for name in names)
    return [dict(row) for _, row in sorted({key(row): row for row in (*old, *new)}.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; 2 after a mistake, which is printed as one sentence."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("configs", nargs="*", metavar="FILE", help="recipes, and settings that they are changed by")
    made.add_argument("--target", default="", metavar="NAME", help="as of benchmarks.compile, such as v6e:2x4")
    made.add_argument("--json", type=Path, metavar="FILE", help="put the rows into this file's list")
    made.add_argument("--show", type=Path, metavar="FILE", help="print this file's table, and compile nothing")
    bench.add_implementation(made)
    options = made.parse_args(arguments)
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return 0
    if not options.configs:
        made.error("name the recipes, such as train/configs/8b/llada-sft-full.toml")
    bench.compile_here()
    return status_of(lambda: _compile(options))


def _compile(options: argparse.Namespace) -> None:
    settings = [text for text in options.configs if "=" in text]
    for path in (text for text in options.configs if "=" not in text):
        rows = rows_of(path, options.target, settings, options.implementation)
        low, high = utilisation(rows[-1])
        print(f"{path}\n{line(rows[-1])}\nmodel FLOPs utilisation {low:.0%} to {high:.0%}", flush=True)
        if options.json:
            before = json.loads(options.json.read_text()) if options.json.exists() else []
            options.json.write_text(json.dumps(merged(before, rows), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
