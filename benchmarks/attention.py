"""Each implementation of attention against XLA's operations, on a GPU or TPU: `python -m benchmarks.attention --help`.

Every row is one implementation and shape, with a length per row or per query, forward alone or with the gradients of
queries, keys and values: seconds of both in turns (medians of repeats), their ratio, how far either is from the result
in float32 (largest difference over the largest entry), and the kernel's share of the measured rate of matrix products.

    python -m benchmarks.attention --json attention.json
    python -m benchmarks.attention --interpret --shapes 1x256x256x2x2x64    # the TPU's on any machine: errors, no speed
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from benchmarks.roofline import Row, measure_ceilings, timed
from benchmarks.sample import describe_hardware
from dllm_jax import DllmError
from dllm_jax.kernels.attention import ATTENTION
from dllm_jax.kernels.attention.xla import in_parts
from dllm_jax.kernels.dispatch import Kernel, device_for

SHAPES = "1x512x512x32x32x128,8x512x512x32x32x128,1x2048x2048x28x4x128,1x4096x4096x32x32x128"
"""B x T x S x N x K x H: LLaDA-8B's and Dream-7B's."""


def operands(shape: Sequence[int], dtype: str, per_query: bool) -> tuple[jax.Array, ...]:
    """Random queries, keys and values, and what is visible: all, or for each block of 32 queries a third and all to its
    end."""
    B, T, S, N, K, H = shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    arrays = [jax.random.normal(key, size).astype(dtype) for key, size in zip(keys, sizes, strict=True)]
    visible = jnp.minimum(S // 3 + (jnp.arange(T) // 32 + 1) * 32, S) if per_query else jnp.full(1, S)
    return *arrays, jnp.broadcast_to(visible, (B, visible.size)).astype(jnp.int32)


def with_gradient(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradients of something that depends on all of the result."""
    loss = lambda *args: jnp.sum(jnp.sin(attend(*args).astype(jnp.float32)))
    return jax.grad(loss, argnums=(0, 1, 2))


def error(found: Any, exact: Any) -> float:
    """Largest difference over the largest entry, of several arrays the worst."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    host = lambda x: np.asarray(x, np.float32)
    return max(float(np.abs(host(a) - host(b)).max() / np.abs(host(b)).max()) for a, b in pairs)


def flops(shape: Sequence[int], visible: jax.Array, gradient: bool) -> float:
    """Of products over what is seen: two forward, and seven more for gradients, where the scores come twice."""
    N, H = shape[3], shape[5]
    seen = float(jnp.sum(jnp.broadcast_to(visible, (shape[0], shape[1]))))
    return 2.0 * seen * N * H * (9 if gradient else 2)


def measure(
    shape: Sequence[int], kernel: Kernel, per_query: bool, options: argparse.Namespace, rate: float
) -> Iterator[Row]:
    """The forward row and the gradients' row of a kernel at a shape, none where it does not take it."""
    args, device = operands(shape, options.dtype, per_query), device_for(kernel.platform)
    if kernel.refusal(device, *args) is not None:
        return
    exact = tuple(x.astype(jnp.float32) for x in args[:3])
    for gradient in (False, True):
        wrap = with_gradient if gradient else lambda attend: attend
        programs = {"kernel": jax.jit(wrap(functools.partial(kernel.run, device))), "xla": jax.jit(wrap(in_parts))}
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(wrap(in_parts))(*exact, args[3])
        errors = {f"{name}_error": error(program(*args), wanted) for name, program in programs.items()}
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(options.repeats):
            for name, program in programs.items():
                times[name].append(timed(functools.partial(_several, program, args, options.calls))[0] / options.calls)
        seconds = {f"{name}_seconds": statistics.median(values) for name, values in times.items()}
        share = flops(shape, args[3], gradient) / seconds["kernel_seconds"] / rate
        yield {
            "implementation": kernel.name,
            "visible": "per query" if per_query else "per row",
            "shape": "x".join(map(str, shape)),
            "gradient": gradient,
            **seconds,
            "speedup": seconds["xla_seconds"] / seconds["kernel_seconds"],
            "share_of_matmul_rate": share,
            **errors,
        }


def _several(program: Callable[..., Any], args: Sequence[jax.Array], calls: int) -> Any:
    """Queued, so that their launches overlap."""
    for _ in range(calls):
        found = program(*args)
    return found


def kernels_of(options: argparse.Namespace) -> list[Kernel]:
    """The kernels that run here.

    Raises:
        DllmError: where none do.
    """
    if options.interpret:
        (kernel,) = [each for each in ATTENTION.kernels if each.name == "tpu"]
        return [dataclasses.replace(kernel, run=functools.partial(kernel.run, interpret=True))]
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    kernels = [each for each in ATTENTION.kernels if each.platform == here]
    if not kernels:
        raise DllmError(f"no kernels run on {here}; use a GPU or TPU, or --interpret to check the TPU's results")
    return kernels


def report(options: argparse.Namespace) -> Row:
    """Everything that is measured, and on what.

    Raises:
        DllmError: as `kernels_of`, and for bad shapes.
    """
    try:
        shapes = [tuple(int(size) for size in text.split("x")) for text in options.shapes.split(",")]
    except ValueError:
        shapes = []
    if not shapes or any(len(shape) != 6 or min(shape) < 1 or shape[3] % shape[4] for shape in shapes):
        raise DllmError(
            f"--shapes {options.shapes} is no list of BxTxSxNxKxH with K dividing N; write 1x512x512x32x8x128"
        )
    kernels = kernels_of(options)
    rate = measure_ceilings(options.dtype, quick=options.interpret).matmul
    return {
        "command": f"python -m benchmarks.attention --dtype {options.dtype} --shapes {options.shapes}",
        "hardware": describe_hardware(),
        "versions": {"jax": version("jax"), "jaxlib": version("jaxlib")},
        "matmul_flops": rate,
        "rows": [
            row
            for shape, kernel, per_query in itertools.product(shapes, kernels, (False, True))
            for row in measure(shape, kernel, per_query, options, rate)
        ],
    }


def print_rows(rows: Sequence[Row]) -> None:
    """A line per row."""
    head = f"{'kernel':9}{'visible':10}{'shape':28}{'gradient':9}"
    print(f"{head}{'kernel ms':>10}{'xla ms':>9}{'speedup':>8}{'of rate':>8}  errors: kernel, xla")
    for row in rows:
        head = f"{row['implementation']:9}{row['visible']:10}{row['shape']:28}{'yes' if row['gradient'] else 'no':9}"
        times = f"{1e3 * row['kernel_seconds']:10.3f}{1e3 * row['xla_seconds']:9.3f}{row['speedup']:8.2f}"
        print(f"{head}{times}{row['share_of_matmul_rate']:8.1%}  {row['kernel_error']:.1e}, {row['xla_error']:.1e}")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default=SHAPES, metavar="BxTxSxNxKxH,...")
    made.add_argument("--dtype", choices=["bfloat16", "float32"])
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--calls", type=int, default=10, help="calls that are timed together (default 10)")
    made.add_argument("--interpret", action="store_true", help="run the TPU's kernels operation by operation")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    return command.run(parser().parse_args(arguments), report, print_rows)


if __name__ == "__main__":
    sys.exit(main())
