r"""How much device memory a training step of each recipe takes: `python -m benchmarks.recipes --help`.

    python -m benchmarks.recipes --target h100:8 train/configs/8b/*.toml --json benchmarks/results/compile-recipes.json
    python -m benchmarks.recipes --target v6e:2x4 train/configs/8b/llada-d2f.toml
    python -m benchmarks.recipes --target v6e:4x4 train/configs/8b/llada2-sft.toml optimizer.accumulate=4 \
        compute.mesh.fsdp=16

compiles the step with a run's own settings (`benchmarks.compile --what train`) and prints the line for the recipe's
head. On TPUs, where layers are a loop, all of them are compiled; on GPUs, where they are not, 4 and 6, and the model's
need is extrapolated from both, where layers are alike.

The second line is a step's model FLOPs utilisation as `benchmarks.predict` would have it: a model of the compiled
program, which nothing has checked. The lower number has no transfer between devices overlap with anything, the higher
one all of them with everything.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
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
ABOUT = ("config", "target", "mesh", "model", "layers", "batch", "accumulate", "length", "implementation", "jax")
KEPT = (*ABOUT, *SIZES, "memory_bytes", *SECONDS)
FEW, MORE = 4, 6  # layers whose difference is that of a layer


def extended(few: Mapping[str, Any], more: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The row of a model of this many layers, extrapolated from two smaller ones."""
    share = (layers - few["layers"]) / (more["layers"] - few["layers"])
    line = {name: few[name] + share * (more[name] - few[name]) for name in (*SIZES, *SECONDS) if name in few}
    line |= {name: round(line[name]) for name in SIZES}
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
        result = bench.report(bench.parser().parse_args(arguments), functools.partial(step_seconds, chip))
        return {name: result[name] for name in KEPT}

    alike = published_config(read_config(path).model.init).gemma is None
    if kind not in bench.GPUS or not alike:
        return [compiled(0)]
    few, more = compiled(FEW), compiled(MORE)
    return [few, more, extended(few, more, published_config(more["model"]).num_layers)]


def step_seconds(chip: predict.Chip, setting: bench.Setting, program: hlo.Program, root: hlo.Loop) -> dict[str, float]:
    """What a step takes by `predict.turn`, and by its model FLOPs alone at the peak of all devices."""
    assert setting.run is not None
    devices = setting.mesh.size
    found = predict.turn(program, root, chip, devices)
    model = step_flops(setting.run, setting.config, setting.run.data.length) / chip.flops / devices
    return {"busy_seconds": found["busy"] + found["gaps"], "sent_seconds": found["sent"], "model_seconds": model}


def utilisation(row: Mapping[str, Any]) -> tuple[float, float]:
    """Model FLOPs utilisation where no transfer overlaps, and where all do."""
    busy, sent, model = (row[name] for name in SECONDS)
    return model / (busy + sent), model / max(busy, sent)


def line(row: Mapping[str, Any]) -> str:
    """The line in the head of a recipe."""
    argument, temporary, peak = (f"{row[name] / bench.GIB:.1f}" for name in SIZES)
    of = f"{row['memory_bytes'] / bench.GIB:.0f}"
    by = "" if (name := row.get("implementation", "auto")) == "auto" else f", {name}"
    start = f"#   {row['target']:<12} {row['mesh']:<8} {peak:>5} of {of}"
    return f"{start} (arguments {argument}, temporary {temporary}){by}"


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in order, later ones instead of earlier ones of the same program."""
    names = ("config", "target", "layers", "length")
    key = lambda row: (*(row[name] for name in names), row.get("implementation", "auto"))
    return [dict(row) for _, row in sorted({key(row): row for row in (*old, *new)}.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; 2 after a mistake, which is printed as one sentence."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("configs", nargs="+", metavar="FILE", help="recipes, and settings that they are changed by")
    made.add_argument("--target", required=True, metavar="NAME", help="as of benchmarks.compile, such as v6e:2x4")
    made.add_argument("--json", type=Path, metavar="FILE", help="put the rows into this file's list")
    bench.add_implementation(made)
    options = made.parse_args(arguments)
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
