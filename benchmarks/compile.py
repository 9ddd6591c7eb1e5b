"""What XLA makes of a program for an absent device: `python -m benchmarks.compile --help`.

Compiles for a TPU, an H100 or a T4 on any machine and reads the result: memory of each device, what every loop's body
copies and sends, loops within the forward, predicates that a GPU's host reads, and on TPU the compiler's own estimate
of cycles (asynchronous transfers, collectives and Pallas kernels are not in it, so compare versions of one program
by it, not programs with each other). Nothing is run.

    python -m benchmarks.compile --target v5e:2x2 --mesh tensor=4 --batch 8
    python -m benchmarks.compile --target h100 --what window --layers 2 --json window.json
    python -m benchmarks.compile --target v6e:2x4 --what train --layers 0 --config train/configs/8b/llada-sft-lora.toml

A step of training is that of a run's settings, in which `model.init` names a published model; `key=value` after the
options changes them as `python -m train` does. --mesh is theirs by default.

A TPU needs `jax[tpu]` (libtpu), a GPU `jax[cuda12-local]` and `nvidia-cuda-nvcc-cu12`, in environments of their own:
`make compile-check` makes them.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from benchmarks import hlo
from dllm_jax import PUBLISHED, Denoiser, DllmError, Model, ModelConfig, published_config, use_kernels
from dllm_jax.kernels import tokamax
from dllm_jax.kernels.dispatch import Name
from dllm_jax.models.denoiser import Span
from dllm_jax.parallel.sharding import Layout, ShardingRules, batch_parts, batch_sharding, param_shardings
from dllm_jax.params.quantized import QuantizedKernel
from dllm_jax.params.specs import abstract_params
from samplers import make_sampler, sample
from samplers.command_buffers import COMMAND_BUFFERS
from samplers.tokens.predictions import Sampling, predict, readout
from train import read_config
from train.config import TrainConfig
from train.losses import Batch
from train.objectives import objective_of
from train.setup import adapt_config
from train.step import Stepper
from train.trainable import WholeModel
from train.trainer import placement_of

GIB = 2**30
MEMORY = {"v5e": 15.75, "v6e": 31.25, "v5p": 95.0, "h100": 79.1, "t4": 14.7}
"""GiB that a program may use of each kind of device."""

GPUS = {name: Path(__file__).parent / "targets" / f"{name}.txtpb" for name in ("h100", "t4")}
CUDA_FLAGS = "--xla_gpu_autotune_level=0"  # nothing can be autotuned
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}  # or libtpu looks for its machine
LAUNCHES = ".thunk_sequence_after_thunk_passes.txt"
WHAT = ("sample", "full", "window", "train")
FORWARDS = ("full", "window")
CALLS = {"cudnn": "__cudnn$fmha", **hlo.PALLAS}
"""What each implementation is in a compiled program; XLA may have kernels of its own that look like the TPU's."""


def devices_of(target: str) -> list[Any]:
    """The devices of an absent machine: "h100", "h100:8", "t4", or a TPU's topology such as "v5e:2x2".

    Raises:
        DllmError: for an unknown target, or where the compiler for it is not installed.
    """
    kind, _, size = target.partition(":")
    if kind not in MEMORY:
        raise DllmError(f"no target is called {target!r}; give h100, t4, or a TPU such as v5e:2x2")
    os.environ.update(ENVIRONMENT)
    try:
        if kind in GPUS:
            os.environ["XLA_FLAGS"] = f"{CUDA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
            text = GPUS[kind].read_text()
            return topologies.get_topology_desc(
                platform="cuda", target_config=text, topology=f"1x1x{size or 1}"
            ).devices
        return topologies.get_topology_desc(target, "tpu").devices
    except Exception as error:  # whatever a missing plug-in raises
        extra = "jax[cuda12-local] and nvidia-cuda-nvcc-cu12" if kind in GPUS else "jax[tpu]"
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DllmError(f"nothing here compiles for {target} ({first}); install {extra}") from None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compiled.

    Attributes:
        config: of the model.
        mesh: the absent devices.
        batch, prompt_length, gen_length, block_length: shapes of the generation.
        dtype: of the weights.
        sampler: a spec, such as "threshold:cache=dual".
        run: settings of training; rows have prompt_length + gen_length tokens, `batch` of them are computed at a time.
        implementation: of attention and experts. "auto" is "xla" for an absent device: cuDNN does not compile without
            the GPU, and no other kernel is used before it was tried.
    """

    config: ModelConfig
    mesh: Mesh
    batch: int
    prompt_length: int
    gen_length: int
    block_length: int
    dtype: str
    sampler: str
    run: TrainConfig | None = None
    implementation: Name = "auto"

    @classmethod
    def of(cls, run: TrainConfig, mesh: Mesh, layers: int = 0, implementation: Name = "auto") -> "Setting":
        """That of a step of training, with some layers of the model or all (0)."""
        rows = run.optimizer.batch // run.optimizer.accumulate
        return cls(model_of(run, layers), mesh, rows, 0, run.data.length, 1, run.compute.dtype, "", run, implementation)

    @property
    def length(self) -> int:
        """S."""
        return self.prompt_length + self.gen_length

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Integers that are split like a batch."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh))

    def denoiser(self) -> Denoiser:
        """The model without its weights."""
        params = abstract_params(self.config, self.dtype, param_shardings(self.config, self.mesh))
        if self.mesh.size > 1:
            return Denoiser(self.config, params, Layout(self.mesh))
        return Denoiser(self.config, params, device=self.mesh.devices.flat[0])

    def kv_shape(self) -> hlo.Shape:
        """A device's part of a layer's buffer of keys."""
        config, parts = self.config, Layout(self.mesh).parts("kv_heads")
        rows = self.batch // batch_parts(self.mesh)
        return _name(self.dtype), (rows, self.length, config.num_kv_heads // parts, config.head_dim)

    def weight_shapes(self) -> set[hlo.Shape]:
        """A device's part of every matrix, but for routers, whose copies cost next to nothing."""
        named = self.denoiser().params.items()
        params = jax.tree.leaves([param for name, param in named if not name.endswith("router")])
        shapes = {(_name(param.dtype.name), param.sharding.shard_shape(param.shape)) for param in params}
        return {shape for shape in shapes if len(shape[1]) > 1 and min(shape[1]) > 1}

    def kernel_shapes(self) -> set[hlo.Shape]:
        """A device's part of every quantized matrix as products would have it, none where nothing is quantized."""
        kernels = [param for param in self.denoiser().params.values() if isinstance(param, QuantizedKernel)]
        shapes = set()
        for kernel in kernels:
            stored = kernel.values.shape
            sizes = zip(kernel.shape, stored, kernel.values.sharding.shard_shape(stored), strict=True)
            shapes.add((_name(self.dtype), tuple(full * part // size for full, size, part in sizes)))
        return shapes


def _name(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "s8"}[dtype]


def compiled(what: str, setting: Setting, options: Mapping[str, str] | None = None) -> Any:
    """The compiled program: a whole generation, a forward over everything, one over a block, or a step of training.

    Forwards end with what is read off the block's logits, and hand on the buffers.

    Args:
        options: of XLA's compiler, for this program.
    """
    with use_kernels(setting.implementation):
        return lowered(what, setting).compile(compiler_options=dict(options) if options else None)


def compile_launches(what: str, setting: Setting, options: Mapping[str, str] | None = None) -> tuple[Any, str]:
    """The same, and the text of what a GPU's host launches, empty for other devices: XLA puts kernels into command
    buffers after it has printed the program.

    Raises:
        DllmError: for a program or an option that the compiler refuses.
    """
    device = setting.mesh.devices.flat[0]
    try:
        if device.platform != "gpu":
            return compiled(what, setting, options), ""
        with tempfile.TemporaryDirectory() as folder:
            program = compiled(what, setting, {**(options or {}), "xla_dump_to": folder})
            (file,) = Path(folder).glob(f"*{LAUNCHES}")
            return program, file.read_text()
    except jax.errors.JaxRuntimeError as error:
        raise DllmError(f"the compiler for {device.device_kind} refuses: {str(error).splitlines()[0]}") from None


def lowered(what: str, setting: Setting) -> Any:
    """The program before it is compiled."""
    if setting.run is not None:
        return training_step(setting.run, setting.config, setting.mesh)
    denoiser, (B, S, W) = setting.denoiser(), (setting.batch, setting.length, setting.block_length)
    if what == "sample":
        model = Model(setting.config, dict(denoiser.params), None, "absent")
        options = {"gen_length": setting.gen_length, "block_length": W, "ignore_eos": True}
        sampler = make_sampler(model, setting.sampler, **options)
        key = jax.eval_shape(lambda: jax.random.key(0)) if setting.config.has_canvas else None
        prompt = setting.ints(B, setting.prompt_length), setting.ints(B)
        return jax.jit(sample).lower(sampler, denoiser, *prompt, key=key)

    def read(denoiser: Denoiser, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = predict(readout(denoiser, hidden), Sampling(), mask_id=denoiser.mask_id, score_from="raw", draw=None)
        return found.token, found.confidence

    def full(denoiser: Denoiser, tokens: jax.Array, lengths: jax.Array, start: jax.Array) -> Any:
        hidden, kv = denoiser.forward(tokens, lengths, outputs=Span(start, W))
        return read(denoiser, hidden), kv

    def window(denoiser: Denoiser, tokens: jax.Array, lengths: jax.Array, start: jax.Array, kv: Any) -> Any:
        hidden, kv = denoiser.forward(tokens, lengths, at=Span(start, W), kv=kv)
        return read(denoiser, hidden), kv

    arguments = (denoiser, setting.ints(B, S), setting.ints(B), setting.ints(B))
    if what == "full":
        return jax.jit(full).lower(*arguments)
    kv = jax.eval_shape(lambda: denoiser.empty_cache(B, S))
    split = ShardingRules().spec(("batch", None, "kv_heads", "head_dim"), setting.mesh)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(setting.mesh, split))
    return jax.jit(window, donate_argnums=4).lower(*arguments, jax.tree.map(place, kv))


def model_of(config: TrainConfig, layers: int = 0) -> ModelConfig:
    """The model that a run trains, by its name alone: the last part of `model.init` is that of a published one.

    Args:
        layers: of the model; 0 for all.

    Raises:
        DllmError: for another name, and for a model that the run cannot train.
    """
    name = Path(config.model.init).name
    if name not in PUBLISHED:
        raise DllmError(
            f"model.init is {config.model.init!r}, which is not the name of a published model; write "
            "model.init=llada-8b-base after the options"
        )
    model = adapt_config(published_config(name), config.model.adapt) if config.model.adapt else published_config(name)
    if not layers:
        return objective_of(config).fit_model(model, config)
    return objective_of(config).fit_model(model.replace(num_layers=layers), config)


def training_step(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> Any:
    """One optimiser step of a run on rows of `data.length` tokens, lowered without weights and data."""
    stepper = Stepper(config, model, placement_of(config, model, mesh))
    shapes = stepper.trainable.shapes()
    state = stepper.abstract_state({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
    whole = isinstance(stepper.trainable, WholeModel)
    frozen = {} if whole else abstract_params(model, config.compute.dtype, param_shardings(model, mesh))
    optimizer, length = config.optimizer, config.data.length
    rows = (optimizer.accumulate, optimizer.batch // optimizer.accumulate)
    like: Any = lambda shape, dtype: jax.ShapeDtypeStruct((*rows, *shape), dtype, sharding=stepper.placement.batch)
    step = like((length,), jnp.int32) if stepper.objective.trajectories else None
    batch = Batch(like((length,), jnp.int32), like((length,), jnp.bool_), like((), jnp.int32), step)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return stepper.jit_step(state).lower(state, frozen, batch, key)


def label(own: Sequence[hlo.Instruction], at: hlo.Instruction | None) -> str:
    """What a loop does: a step of the generation, a forward, a pass over the vocabulary, or what the compiler made one
    of, a scatter or a gather."""
    if at is None:
        return "program"
    path = at.scope.split("/")
    if path[-1] != "while":
        return path[-1]
    if any("vocabulary" in part for part in path):  # "transpose(jvp(vocabulary))" of a gradient
        return "vocabulary"
    layers = {
        name for each in own if "_run_layer" in each.scope for name in FORWARDS if f"{name}_forward" in each.scope
    }
    return "step" if path == ["jit(sample)", "while"] else min(layers, default="loop")


def parse(program: Any) -> tuple[hlo.Program, hlo.Loop]:
    """A compiled program, and the tree of its loops."""
    found = hlo.read(program.as_text())
    return found, hlo.loops(found, label)


def describe(
    program: Any, setting: Setting, launched: str = "", parsed: tuple[hlo.Program, hlo.Loop] | None = None
) -> dict[str, Any]:
    """The figures of a compiled program; sizes in bytes, of one device.

    Args:
        launched: what a GPU's host launches, from `compile_launches`.
        parsed: from `parse`, where that has been done.
    """
    memory = program.memory_analysis()
    found, root = parsed or parse(program)
    kv, weights, kernels = setting.kv_shape(), setting.weight_shapes(), setting.kernel_shapes()
    is_weight = lambda shape: any(holds(shape, weight) for weight in weights)
    is_kernel = lambda shape: any(hlo.is_like(shape, kernel) for kernel in kernels)
    rows = []
    on_gpu = setting.mesh.devices.flat[0].platform == "gpu"
    buffers, inside = buffered(root, launched)
    for depth, loop in root.walk():
        kv_copies = hlo.moved(found, loop, lambda shape: len(shape[1]) > 2 and hlo.is_like(shape, kv))
        weight_copies, work = hlo.moved(found, loop, is_weight), hlo.work(found, loop)
        rows.append(
            {
                "loop": loop.name,
                "depth": depth,
                "trips": loop.trips,
                "kernels": loop.kernels,
                "inner_loops": len(loop.inner),
                "host_reads": host_reads(loop, inside) if on_gpu and depth == 1 and not loop.trips else None,
                "serial_writes": sum(inner.name == "scatter" for inner in loop.inner),
                "cycles": loop.cycles,
                "bytes": sum(moved for moved, _ in work),
                "flops": sum(flops for _, flops in work),
                "kv_copies": kv_copies[0],
                "kv_copy_bytes": kv_copies[1],
                "weight_copies": weight_copies[0],
                "weight_copy_bytes": weight_copies[1],
                "dequantized": hlo.made(loop, is_kernel),
                "largest_sent_bytes": max((hlo.size(shape) for each in loop.sent for shape in each.shapes), default=0),
                "collectives": {kind: list(numbers) for kind, numbers in loop.collectives.items()},
            }
        )
    peak = getattr(memory, "peak_memory_in_bytes", 0) or (
        memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    )
    return {
        "head_bytes": max(map(hlo.size, weights)),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak,
        "implementation": setting.implementation,
        "command_buffers": buffers,
        "calls": {
            name: sum(f'custom_call_target="{target}' in each.text for each in found.by_name.values())
            for name, target in CALLS.items()
        },
        "loops": rows,
    }


def buffered(root: hlo.Loop, launched: str) -> tuple[int | None, set[int]]:
    """How many command buffers a GPU's host launches, and the `id` of each loop that is in one; None without a text.

    Raises:
        DllmError: where the text has other loops than the program.
    """
    if not launched:
        return None, set()
    count, inside = hlo.command_buffers(launched)
    found = [loop for depth, loop in root.walk() if depth]
    if len(found) != len(inside):
        raise DllmError(f"XLA launches {len(inside)} loops of {len(found)}; this version of it prints them otherwise")
    return count, {id(loop) for loop, within in zip(found, inside, strict=True) if within}


def host_reads(loop: hlo.Loop, inside: Container[int] = ()) -> list[int]:
    """Predicates that a GPU's host reads in a turn of a loop, least and most: its own, and of each loop within whose
    turns are not known one, or two where that has a turn. It reads none of loops in command buffers (`buffered`); a
    TPU's host reads none at all."""
    asked = sum(inner.trips is None and id(inner) not in inside for inner in loop.inner)
    own = id(loop) not in inside
    return [own + asked, own + 2 * asked]


def holds(shape: hlo.Shape, weight: hlo.Shape) -> bool:
    """Whether an array can be a matrix, in some order of its axes, or several side by side; or all experts' matrices,
    whose number alone identifies them."""
    if len(weight[1]) > 2:
        return shape[0] == weight[0] and hlo.elements(shape) == hlo.elements(weight)
    if shape[0] != weight[0] or len(shape[1]) != 2:
        return False
    sides = [shape[1], shape[1][::-1]]
    return any(a == c and b >= d for a, b in sides for c, d in [weight[1], weight[1][::-1]])


COLUMNS = ("loop", "trips", "kernels", "Mcycles", "host reads", "kv copies", "weight copies", "dequantized", "sent")


def table(result: dict[str, Any]) -> str:
    """A line for the memory, and one for every loop."""
    verdict = "fits" if result["fits"] else "does not fit"
    sizes = [f"{name} {result[f'{name}_bytes'] / GIB:.2f} GiB" for name in ("argument", "temporary", "peak")]
    memory = f"{verdict} {result['memory_bytes'] / GIB:.2f} GiB a device"
    if result["command_buffers"] is not None:
        memory += f", {result['command_buffers']} command buffers"
    lines = [f"{result['title']}: {', '.join(sizes)}: {memory}"]
    cells = [COLUMNS] + [_cells(row, result["loops"]) for row in result["loops"]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return "\n".join(
        [*lines, *("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells)]
    )


def _cells(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    copies = [f"{row[f'{kind}_copies']} ({row[f'{kind}_copy_bytes'] / 2**20:.0f} MiB)" for kind in ("kv", "weight")]
    sent = ", ".join(f"{count} {kind} ({total / 2**20:.1f} MiB)" for kind, (count, total) in row["collectives"].items())
    cycles = f"{row['cycles'] / 1e6:.2f}" if any(each["cycles"] for each in rows) else "-"
    reads = "-" if row["host_reads"] is None else "{} to {}".format(*row["host_reads"])
    name = "  " * row["depth"] + row["loop"]
    return (
        name,
        str(row["trips"] or "-"),
        str(row["kernels"]),
        cycles,
        reads,
        *copies,
        str(row["dequantized"]),
        sent or "-",
    )


def faults(result: dict[str, Any]) -> list[str]:
    """The faults of a program, a sentence for each."""
    found, wanted = [], result["implementation"]
    for name, count in result["calls"].items():
        if wanted == name and not count:
            found.append(f"no kernel of {name} is in the program, though --implementation asks for it")
        if wanted in ("auto", "xla") and count and name != "tpu":
            found.append(f"the program has {count} kernels of {name}, and --implementation {wanted} has none")
    for row in result["loops"]:
        for kind, what in (("kv", "key/value buffers"), ("weight", "weights")):
            if row["depth"] and row[f"{kind}_copies"]:
                found.append(f"the body of loop {row['loop']!r} copies {row[f'{kind}_copies']} {what}")
        if row["loop"] == "vocabulary" and row["largest_sent_bytes"] >= result["head_bytes"]:
            found.append("the body of loop 'vocabulary' sends an array as large as a device's part of the head")
        if row["dequantized"]:
            found.append(f"the body of loop {row['loop']!r} writes {row['dequantized']} quantized matrices out in full")
        if row["serial_writes"]:
            found.append(f"the body of loop {row['loop']!r} writes in {row['serial_writes']} loops, row by row")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--target", required=True, metavar="NAME", help="v5e:2x2, v6e:2x2, v5p:2x2x4, ..., h100, h100:8 or t4")
    add("--mesh", metavar="AXIS=N,...", help="devices of the target that are used (default: one, or the run's)")
    add("--model", default="llada-8b-instruct", choices=sorted(PUBLISHED), metavar="NAME")
    add("--layers", type=int, default=4, help="of the model (default: 4, which show what all do; 0: all)")
    add("--what", default="sample", choices=WHAT, help="a whole generation (default), a forward, or a step of training")
    add("--config", metavar="FILE", help="of --what train: settings in TOML, such as train/configs/8b/llada-d2f.toml")
    add("settings", nargs="*", metavar="key=value", help="of --what train: changes, such as optimizer.batch=8")
    add("--quantize", choices=["int8", "int4"], help="quantize weights to this many bits")
    add("--sampler", default="threshold:cache=dual", metavar="SPEC")
    add_implementation(made)
    add("--command-buffers", action="store_true", help="on a GPU, the loops too in command buffers (CUDA graphs)")
    add("--batch", type=int, default=1)
    add("--prompt-length", type=int, default=256)
    add("--gen-length", type=int, default=256)
    add("--block-length", type=int, default=32)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--check", action="store_true", help="end with 1 where a loop copies buffers or weights, or writes row by row")
    add("--hlo", type=Path, metavar="FILE", help="write the compiled program's text")
    add("--json", type=Path, metavar="FILE", help="add the result to this file's list")
    return made


def add_implementation(made: argparse.ArgumentParser) -> None:
    """Adds `--implementation`."""
    made.add_argument(
        "--implementation",
        default="auto",
        choices=["auto", "xla", "tokamax", "tpu"],
        help="of attention and experts: auto is xla for an absent device, and cuDNN does not compile without the GPU",
    )


def mesh_of(devices: Sequence[Any], axes: str) -> Mesh:
    """The mesh of "tensor=4,data=2" on the first of these devices.

    Raises:
        DllmError: for something else, and for more devices than there are.
    """
    try:
        sizes = {name: int(count) for name, _, count in (part.partition("=") for part in axes.split(","))}
    except ValueError:
        raise DllmError(f"--mesh {axes} is no mesh; write axes such as tensor=4,data=2") from None
    count = math.prod(sizes.values())
    if not 1 <= count <= len(devices):
        raise DllmError(f"--mesh {axes} needs {count} devices and the target has {len(devices)}; name a larger one")
    shape = np.array(devices[:count]).reshape(*sizes.values())
    return Mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def report(
    options: argparse.Namespace, more: Callable[[Setting, hlo.Program, hlo.Loop], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Compiles, and describes the result.

    Args:
        more: further figures of a setting, its program and its loops.

    Raises:
        DllmError: for impossible settings, and a program that the compiler refuses.
    """
    for name in ("batch", "prompt_length", "gen_length", "block_length"):
        if (number := getattr(options, name)) < 1:
            raise DllmError(f"--{name.replace('_', '-')} is {number}; it must be at least 1")
    if options.implementation == "tokamax" and (why := tokamax.missing()):
        raise DllmError(f"--implementation tokamax would compile XLA's operations: {why}")
    setting, about = _training(options) if options.what == "train" else _generation(options)
    if options.command_buffers and setting.mesh.devices.flat[0].platform != "gpu":
        raise DllmError(f"--command-buffers is for GPUs, and {options.target} is none; leave it out")
    start = time.perf_counter()
    program, launched = compile_launches(options.what, setting, COMMAND_BUFFERS if options.command_buffers else None)
    seconds = time.perf_counter() - start
    if options.hlo:
        options.hlo.write_text(program.as_text())
    parsed = parse(program)
    found = describe(program, setting, launched, parsed) | (more(setting, *parsed) if more else {})
    memory = int(MEMORY[options.target.partition(":")[0]] * GIB)
    return {
        **about,
        "what": options.what,
        "target": options.target,
        "layers": setting.config.num_layers,
        "jax": jax.__version__,
        "compile_seconds": round(seconds, 1),
        "memory_bytes": memory,
        "fits": found["peak_bytes"] <= memory,
        **found,
    }


def _generation(options: argparse.Namespace) -> tuple[Setting, dict[str, Any]]:
    """The setting of `--what`, and its description for the report: a title and the options."""
    if options.config or options.settings:
        raise DllmError(f"--what {options.what} has no settings; --config and key=value are for --what train")
    options.mesh = options.mesh or "tensor=1"
    mesh = mesh_of(devices_of(options.target), options.mesh)
    config = published_config(options.model)
    layers = options.layers or config.num_layers
    config = config.replace(num_layers=layers, quantize=options.quantize, dtype=options.dtype)
    shapes = ("batch", "prompt_length", "gen_length", "block_length")
    B, P, G, W = (getattr(options, name) for name in shapes)
    setting = Setting(config, mesh, B, P, G, W, options.dtype, options.sampler, implementation=options.implementation)
    what = f"{options.sampler} " if options.what == "sample" else ""
    what += f"{options.quantize} " if options.quantize else ""
    title = f"{options.target} {options.mesh} {options.model} {config.num_layers} layers {what}{options.what}"
    names = ("mesh", "model", "sampler", *shapes, "dtype", "quantize")
    about = {name: getattr(options, name) for name in names}
    return setting, {"title": f"{title} batch {options.batch}", **about}


def _training(options: argparse.Namespace) -> tuple[Setting, dict[str, Any]]:
    """The program of a run's settings, and its title."""
    if not options.config:
        raise DllmError("--what train needs the settings of a run; give --config train/configs/8b/NAME.toml")
    run = read_config(options.config, options.settings)
    axes = options.mesh or ",".join(f"{axis}={size}" for axis, size in run.compute.mesh.items()) or "tensor=1"
    setting = Setting.of(run, mesh_of(devices_of(options.target), axes), options.layers, options.implementation)
    name = Path(options.config).stem
    title = " ".join([options.target, axes, name, f"{setting.config.num_layers} layers train", *options.settings])
    about = {"config": name, "settings": options.settings, "mesh": axes, "model": Path(run.model.init).name}
    rows = {"batch": run.optimizer.batch, "accumulate": run.optimizer.accumulate, "length": run.data.length}
    return setting, {"title": title, **about, **rows, "dtype": run.compute.dtype}


def compile_here() -> None:
    """Settings of JAX for a process that compiles for absent devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; 0 when it worked, 1 for faults that `--check` found, 2 after a mistake, which is
    printed as one sentence."""
    options = parser().parse_args(arguments)
    compile_here()
    try:
        result = report(options)
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(result))
    for fault in (found := faults(result) if options.check else []):
        print(f"fault: {fault}", file=sys.stderr)
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*before, result], indent=1) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
