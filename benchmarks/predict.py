"""Tokens per second that compiled programs promise on absent devices: `python -m benchmarks.predict --help`.

Compiles a generation with 2 and with 4 layers, counts what each turn of its loops moves, multiplies and sends, draws
the line through both to all layers, and divides by the data sheet's rates (`CHIPS`) and assumed latencies. **Nothing
is run: a model that no measurement has checked.** It says:

* A kernel on a GPU takes the longer of its bytes over the memory's rate and its FLOPs over the peak, and `GAP` more.
  On a TPU kernels overlap with transfers, so a turn takes the longest of all bytes, all FLOPs and the compiler's own
  cycles.
* A collective goes round a ring of its devices in both directions, of two over one link, and overlaps with nothing;
  each hop costs `HOP`.
* Whenever the host of a GPU reads a predicate, the device waits for `READ`; in a command buffer it reads none.
* Experts are balanced: one round of each layer's. A kernel that XLA did not make counts by its bytes alone.
* All rows keep pace. A block takes as many forwards as it has tokens over `tokens_per_forward`. With the dual cache
  the first of a block is a full one, of one row at a time; with the exact cache a row has one full forward, and the
  first of every later block runs two blocks.

    python -m benchmarks.predict --target h100 --model llada-8b-instruct --json benchmarks/results/predicted.json
    python -m benchmarks.predict --show benchmarks/results/predicted.json
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import compile as programs
from benchmarks import hlo, roofline
from benchmarks.command import status_of
from dllm_jax import DllmError, published_config
from dllm_jax.parallel.sharding import batch_parts

GAP, READ, HOP = 1e-6, 1e-5, 1e-6
"""Seconds between two kernels of a GPU, for a read by its host, and for one hop between chips: assumed."""
LAYERS = (2, 4)
P, G = 256, 256


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one device, by its data sheet.

    Attributes:
        flops: of bfloat16 products, per second.
        memory: bytes per second.
        ring: bytes per second that a chip sends to both neighbours of a ring, or a GPU through its switch.
        clock: cycles per second of a TPU, by its FLOPs: no data sheet has it.
        source: where the numbers are from.
    """

    flops: float
    memory: float
    ring: float
    clock: float
    source: str


CHIPS = {
    "v5e": Chip(197e12, 819e9, 100e9, 1.5e9, "cloud.google.com/tpu/docs/v5e: 400 GB/s over 4 ports, both directions"),
    "v6e": Chip(918e12, 1640e9, 200e9, 1.75e9, "cloud.google.com/tpu/docs/v6e: 800 GB/s over 4 ports, both directions"),
    "v5p": Chip(
        459e12, 2765e9, 200e9, 1.75e9, "cloud.google.com/tpu/docs/v5p: 1200 GB/s over 6 ports, both directions"
    ),
    "h100": Chip(
        989e12, 3350e9, 450e9, 0.0, "nvidia.com, H100 SXM data sheet: dense bfloat16, NVLink in one direction"
    ),
}


@dataclasses.dataclass(frozen=True)
class Usage:
    """How a model is sampled from.

    Attributes:
        tokens_per_forward: published.
        source: where, and for what.
        mesh: of eight chips; key/value heads are split whole.
    """

    sampler: str
    block_length: int
    tokens_per_forward: float
    source: str
    mesh: str = "tensor=8"


MODELS = {
    "llada-8b-instruct": Usage("threshold:cache=dual", 32, 2.77, "Fast-dLLM, dual cache, GSM8K, measured by d3LLM"),
    "llada2.0-mini": Usage(
        "threshold:cache=exact", 32, 2.6, "its report, threshold 0.95, mean of 33 tasks", "expert=2,tensor=4"
    ),
    "sdar-8b-chat": Usage("threshold:cache=exact", 4, 2.0, "its report: dynamic 'more than twice' static, 30B"),
}
COMPILERS = {"h100": ("jax", "jax-cuda12-pjrt"), **dict.fromkeys(("v5e", "v6e", "v5p"), ("jax", "libtpu"))}
TARGETS, BATCHES = ("h100", "v5e:2x4", "v6e:2x4"), (1, 8, 32, 128)
PUBLISHED = (
    ("SGLang, LLaDA2.1-mini, H20", {1: 592, 8: 1923, 32: 2853, 128: 3412}, "sglang issue 33322"),
    ("tpu-inference, Fast-dLLM v2, v7x, TP4 x DP2", {32: 9920}, "tpu-inference 3440; autoregressive 4790"),
    ("SGLang, d3LLM, H100", {1: 545}, "d3LLM"),
)
"""Tokens per second by clients, of other models on other devices."""

Numbers = dict[str, float]
"""Of one turn of a loop: bytes, flops, and seconds `busy`, `sent`, `gaps`, `reads`."""


def turn(program: hlo.Program, loop: hlo.Loop, chip: Chip, devices: int, reads: float = 0.0) -> Numbers:
    """What a turn takes, loops within included with their turns (one where that is not known), but for a step's
    forwards."""
    work = hlo.work(program, loop)
    moved, flops = (float(sum(kind)) for kind in zip(*work, strict=True)) if work else (0.0, 0.0)
    if chip.clock:
        busy, gaps = max(moved / chip.memory, flops / chip.flops, loop.cycles / chip.clock), 0.0
    else:
        busy, gaps = sum(max(a / chip.memory, b / chip.flops) for a, b in work), GAP * len(work)
    sent = sum(send_seconds(each, chip, hlo.group_size(each, devices)) for each in loop.sent)
    total = {"bytes": moved, "flops": flops, "busy": busy, "sent": sent, "gaps": gaps, "reads": reads * READ}
    for inner in loop.inner:
        if loop.name != "step" or inner.name not in programs.FORWARDS:
            total = add(total, turn(program, inner, chip, devices), inner.counted or 1)
    return total


def send_seconds(each: hlo.Instruction, chip: Chip, devices: int) -> float:
    """Seconds of a collective over a ring of its devices, in both directions where there are more than two."""
    kind, size = each.opcode.removesuffix("-start"), hlo.received(each)
    if kind == "collective-permute":
        return HOP + size / chip.ring
    phases = 2 if kind == "all-reduce" else 1  # reduce, then gather
    rate = chip.ring if devices > 2 else chip.ring / 2
    return phases * (HOP * devices / 2 + size / rate * (devices - 1) / devices)


def add(a: Numbers, b: Numbers, times: float = 1.0) -> Numbers:
    """a + times b."""
    return {name: a[name] + times * b[name] for name in a}


def extrapolate(small: Numbers, large: Numbers, layers: int) -> Numbers:
    """All layers, by the line through the two layer counts that were compiled."""
    few, more = LAYERS
    return add(small, add(large, small, -1.0), (layers - few) / (more - few))


def seconds(turn: Numbers) -> float:
    """Of a turn."""
    return turn["busy"] + turn["sent"] + turn["gaps"] + turn["reads"]


def count_turns(usage: Usage, rows: float, tokens_per_forward: float) -> Numbers:
    """Turns of each loop in a generation, `rows` of them one after another where a row runs alone."""
    forwards, blocks = G / tokens_per_forward, G / usage.block_length
    if "cache=exact" in usage.sampler:
        return {"step": forwards, "full": rows, "window": forwards - blocks, "window of two blocks": blocks - 1}
    return {"step": forwards, "full": rows * blocks, "window": forwards - blocks}


def generation_seconds(turns: Mapping[str, float], loops: Mapping[str, Numbers]) -> float:
    """Of a generation of all rows, without the little that is before and after its loop."""
    return sum(count * seconds(loops[name]) for name, count in turns.items())


def describe(options: argparse.Namespace, batch: int, layers: int) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """A program's figures, and its loops' turns by name."""
    usage, kind = MODELS[options.model], options.target.partition(":")[0]
    mesh = programs.mesh_of(programs.devices_of(options.target), options.mesh)
    config = published_config(options.model).replace(num_layers=layers)
    setting = programs.Setting(
        config, mesh, batch, P, G, usage.block_length, "bfloat16", usage.sampler, implementation=options.implementation
    )
    built, launched = programs.compile_launches("sample", setting, options.xla)
    program, root = programs.parse(built)
    found = programs.describe(built, setting, launched, (program, root))
    (step,) = (loop for loop in root.inner if loop.name == "step")
    reads = next(row["host_reads"] for row in found["loops"] if row["loop"] == "step")
    loops = {"step": turn(program, step, CHIPS[kind], mesh.size, sum(reads or [0]) / 2)}
    for loop in step.inner:
        if loop.name in programs.FORWARDS:
            name = loop.name if loop.name not in loops else f"{loop.name} of two blocks"
            loops[name] = turn(program, loop, CHIPS[kind], mesh.size)
    return {**found, "batch_parts": batch_parts(mesh), "devices": mesh.size}, loops


def default_mesh(model: str, target: str) -> str:
    """That of all eight chips, or one device."""
    return MODELS[model].mesh if target.endswith(":2x4") else "tensor=1"


def how(row: Mapping[str, Any]) -> str:
    """The options that a setting differs by from the model's first one on a target, empty for that itself."""
    mesh = [f"--mesh {row['mesh']}"] if row["mesh"] != default_mesh(row["model"], row["target"]) else []
    implementation = [f"--implementation {row['implementation']}"] if row["implementation"] != "auto" else []
    xla = ",".join(f"{name}={value}" for name, value in row["xla"].items())
    return " ".join([*mesh, *implementation, *([f"--xla {xla}"] if xla else [])])


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one setting from another, in the order of the file."""
    return row["model"], row["target"], row["mesh"], row["implementation"], sorted(row["xla"].items()), row["batch"]


def predict(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """The prediction of one setting."""
    usage, kind = MODELS[options.model], options.target.partition(":")[0]
    config, chip = published_config(options.model), CHIPS[kind]
    (small, few), (large, more) = (describe(options, batch, layers) for layers in LAYERS)
    loops = {name: extrapolate(few[name], more[name], config.num_layers) for name in few}
    line = lambda name: extrapolate({name: small[name]}, {name: large[name]}, config.num_layers)[name]
    devices, rows, length = small["devices"], batch / small["batch_parts"], P + G
    read = roofline.weight_bytes(config, "bfloat16") + roofline.cache_bytes(config, "bfloat16", batch, length)
    flops = roofline.forward_flops(config, batch, usage.block_length, length, usage.block_length)
    floor = max(read / devices / chip.memory, flops / devices / chip.flops)
    speed = lambda tokens: G * batch / generation_seconds(count_turns(usage, rows, tokens), loops)
    return {
        "target": options.target,
        "mesh": options.mesh,
        "model": options.model,
        "batch": batch,
        "implementation": options.implementation,
        "xla": options.xla,
        "versions": {name: metadata.version(name) for name in COMPILERS[kind]},
        "peak_bytes": line("peak_bytes"),
        "fits": line("peak_bytes") <= programs.MEMORY[kind] * programs.GIB,
        "host_reads": next(row["host_reads"] for row in small["loops"] if row["loop"] == "step"),
        "kv_copies": sum(row["kv_copies"] for row in small["loops"] if row["depth"]),
        "weight_copies": sum(row["weight_copies"] for row in small["loops"] if row["depth"]),
        "loops": loops,
        "window_floor_seconds": floor,
        "tokens_per_second_at_1": speed(1.0),
        "tokens_per_forward": usage.tokens_per_forward,
        "tokens_per_second": speed(usage.tokens_per_forward),
    }


COLUMNS = (
    "model",
    "target",
    "rows",
    "window, ms",
    "its floor",
    "full",
    "rest of a step",
    "peak, GiB",
    "tokens/s at 1 per forward",
    "at the published number per forward",
)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [columns, ["---"] * len(columns), *rows])


def cells(row: Mapping[str, Any]) -> list[Any]:
    """A prediction's line of the long table."""
    milliseconds = {name: f"{1e3 * seconds(turn):.2f}" for name, turn in row["loops"].items()}
    return [
        row["model"],
        f"{row['target']} {row['mesh']} {how({**row, 'mesh': default_mesh(row['model'], row['target'])})}".rstrip(),
        row["batch"],
        milliseconds["window"],
        f"{1e3 * row['window_floor_seconds']:.2f}",
        milliseconds["full"],
        milliseconds["step"],
        f"{row['peak_bytes'] / programs.GIB:.1f}" + ("" if row["fits"] else ", does not fit"),
        f"{row['tokens_per_second_at_1']:,.0f}",
        f"{row['tokens_per_second']:,.0f} at {row['tokens_per_forward']:g}",
    ]


def first_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[tuple[Any, ...], Mapping[str, Any]]:
    """The settings without options of their own, by model, target and rows."""
    return {(row["model"], row["target"], row["batch"]): row for row in rows if not how(row)}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: tokens per second at the published number per forward, by model, target and rows."""
    found = first_of(rows)

    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return "-"
        return f"{row['tokens_per_second']:,.0f}" if row["fits"] else "does not fit"

    lines = [
        [
            f"{model}, `{usage.sampler}`, {usage.tokens_per_forward:g} a forward",
            f"{target} `{default_mesh(model, target)}`",
            *(cell(found.get((model, target, batch))) for batch in BATCHES),
        ]
        for model, usage in MODELS.items()
        for target in TARGETS
    ]
    return markdown(["model", "target", *(f"{batch} row{'s' * (batch > 1)}" for batch in BATCHES)], lines)


def variants(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what other options make of a setting."""
    first = first_of(rows)
    lines = []
    for row in rows:
        before = first.get((row["model"], row["target"], row["batch"]))
        if how(row) and before is not None:
            both = before, row
            times = [
                "{:.2f} to {:.2f}".format(*(1e3 * seconds(x["loops"][name]) for x in both))
                for name in ("window", "full")
            ]
            speeds = "{:,.0f} to {:,.0f}".format(*(x["tokens_per_second"] for x in both))
            lines.append([row["model"], row["target"], f"`{how(row)}`", row["batch"], *times, speeds])
    return markdown(["model", "target", "options", "rows", "window, ms", "full", "tokens/s"], lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the predictions, and what is published of other models on other devices."""
    published = [[system, *each, source] for system, speeds, source in PUBLISHED for each in speeds.items()]
    published = [[system, clients, f"{speed:,}", source] for system, clients, speed, source in published]
    others = "Published, of other models on other devices:"
    long = markdown(COLUMNS, list(map(cells, rows)))
    return "\n\n".join(
        [summary(rows), variants(rows), long, others, markdown(["system", "clients", "tokens/s", "source"], published)]
    )


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--target", metavar="NAME", help="h100, v5e:2x4 or v6e:2x4, or another topology of theirs")
    add("--mesh", metavar="AXIS=N,...", help="default: one H100, and all of eight chips")
    add("--model", default="llada-8b-instruct", choices=sorted(MODELS), metavar="NAME", help=", ".join(MODELS))
    add("--batch", default="1,8,32,128", metavar="N,...", help="rows (default: 1,8,32,128)")
    programs.add_implementation(made)
    add("--xla", default="", metavar="NAME=VALUE,...", help="options of XLA's compiler")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="add to this file, in place of what it has of a setting",
    )
    add("--show", type=Path, metavar="FILE", help="print this file's tables, and compile nothing")
    return made


def report(options: argparse.Namespace) -> None:
    """Predicts and prints.

    Raises:
        DllmError: for a target without rates, a mesh or a batch that is none, and a program that the compiler refuses.
    """
    if options.show:
        print(table(json.loads(options.show.read_text())["rows"]))
        return
    kind = (options.target or "").partition(":")[0]
    if kind not in CHIPS:
        raise DllmError(f"--target {options.target} has no rates here; name one of {', '.join(CHIPS)}, as in v5e:2x4")
    options.mesh = options.mesh or default_mesh(options.model, options.target)
    pairs = [pair.partition("=") for pair in options.xla.split(",") if pair]
    if not all(value for _, _, value in pairs):
        raise DllmError(f"--xla {options.xla} is no list of options; write it like xla_gpu_enable_triton_gemm=false")
    options.xla = {name: value for name, _, value in pairs}
    try:
        batches = [int(batch) for batch in options.batch.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise DllmError(f"--batch {options.batch} is no list of rows; write numbers from 1 on, such as 1,8,32")
    for batch in batches:
        row = predict(options, batch)
        print(markdown(COLUMNS, [cells(row)]).splitlines()[2], flush=True)
        if options.json:
            known = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
            rows = sorted([*(one for one in known if key(one) != key(row)), row], key=key)
            assumed = {"gap": GAP, "read": READ, "hop": HOP, "layers": LAYERS, "prompt_length": P, "gen_length": G}
            about = {"assumed": assumed, "chips": {name: dataclasses.asdict(chip) for name, chip in CHIPS.items()}}
            about |= {"models": {name: dataclasses.asdict(usage) for name, usage in MODELS.items()}}
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 after a mistake, which is printed as one sentence."""
    options = parser().parse_args(arguments)
    programs.compile_here()
    return status_of(lambda: report(options))


if __name__ == "__main__":
    sys.exit(main())
