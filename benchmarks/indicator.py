"""What the neural indicator costs beside a forward, at LLaDA-8B's shapes: `python -m benchmarks.indicator`.

A forward of a window of positions is timed at two depths and continued to the model's by a straight line, layers being
alike; then the vocabulary head with the choice of tokens, and the indicator in its published shape (84 million
parameters, arXiv 2604.18471) with the features it reads. Weights and tokens are random. Seconds are the least of the
repeats, which other work on the machine disturbs least.

    python -m benchmarks.indicator --json benchmarks/results/indicator-cpu.json
    python -m benchmarks.indicator --windows 32,256,768 --json indicator.json      # one GPU, bfloat16
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command
from benchmarks.d2f import SIZES
from benchmarks.roofline import Row, measure_ceilings, timed
from dllm_jax import Denoiser, DllmError, ModelConfig
from dllm_jax.indicator import Indicator, IndicatorConfig, init_indicator
from dllm_jax.params.specs import init_params
from samplers.rules.ni import features_of
from samplers.tokens.predictions import Sampling, given, predict

INDICATORS = {"llada-8b": IndicatorConfig(), "tiny": IndicatorConfig(2, 8, 32, 32, 16)}
"""Those of `benchmarks.d2f.SIZES`."""


def best(call: Callable[[], Any], repeats: int) -> float:
    """Least seconds of a warm call."""
    jax.block_until_ready(call())
    return min(timed(call)[0] for _ in range(repeats))


def layers_seconds(config: ModelConfig, window: int, options: argparse.Namespace) -> float:
    """Seconds of the layers of one forward over `window` positions, continued from one and two layers to all."""
    one, two = (_depth_seconds(config.replace(num_layers=depth), window, options) for depth in (1, 2))
    return one + (config.num_layers - 1) * (two - one)


def _depth_seconds(model: ModelConfig, window: int, options: argparse.Namespace) -> float:
    denoiser = Denoiser(model, init_params(model, jax.random.key(0), dtype=options.dtype))
    tokens = jax.random.randint(jax.random.key(1), (1, window), 4, model.vocab_size - 16, jnp.int32)
    zero = jnp.zeros((1,), jnp.int32)
    run = jax.jit(lambda denoiser, tokens: denoiser.forward(tokens, zero + window)[0])
    return best(functools.partial(run, denoiser, tokens), options.repeats)


@jax.jit
def _head(denoiser: Denoiser, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = denoiser.logits(hidden)
    found = predict(given(logits), Sampling(), mask_id=denoiser.mask_id, score_from="raw", draw=None)
    return logits, found.token


@jax.jit
def _judge(
    indicator: Indicator, denoiser: Denoiser, hidden: jax.Array, logits: jax.Array, token: jax.Array
) -> jax.Array:
    return indicator.scores(*features_of(indicator.config, denoiser, hidden, logits, token))


def beside_seconds(config: ModelConfig, shape: IndicatorConfig, window: int, options: argparse.Namespace) -> Row:
    """Seconds of head and choice of tokens, and of the indicator with its features."""
    model = config.replace(num_layers=1)
    denoiser = Denoiser(model, init_params(model, jax.random.key(0), dtype=options.dtype))
    indicator = init_indicator(shape, jax.random.key(2))
    hidden = jax.random.normal(jax.random.key(3), (1, window, model.embed_dim), options.dtype)
    logits, token = _head(denoiser, hidden)
    judge = functools.partial(_judge, indicator, denoiser, hidden, logits, token)
    return {
        "head_seconds": best(functools.partial(_head, denoiser, hidden), options.repeats),
        "indicator_seconds": best(judge, options.repeats),
    }


def measure(options: argparse.Namespace, window: int) -> Row:
    """One window; the models are held one after another."""
    config, shape = SIZES[options.size], INDICATORS[options.size]
    row: Row = {"window": window, "layers_seconds": layers_seconds(config, window, options)}
    row |= beside_seconds(config, shape, window, options)
    return row | {"indicator_share": row["indicator_seconds"] / (row["layers_seconds"] + row["head_seconds"])}


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured, as it is written to the file."""
    config, shape = SIZES[options.size], INDICATORS[options.size]
    try:
        windows = [int(window) for window in options.windows.split(",")]
    except ValueError:
        windows = [0]
    if min(windows) < 1:
        raise DllmError(f"windows {options.windows} are no numbers of positions; write --windows 32,256")
    return {
        "what": f"the indicator beside one forward, batch 1, random weights; {config.num_layers} layers are "
        "extrapolated from 1 and 2; the indicator is float32, as published",
        "options": {name: getattr(options, name) for name in ("size", "windows", "dtype", "repeats")},
        "indicator": dataclasses.asdict(shape) | {"parameters": shape.num_params},
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {"jax": version("jax")},
        "matmul_gflops_per_second": round(measure_ceilings(options.dtype, quick=True, repeats=3).matmul / 1e9, 1),
        "rows": [measure(options, window) for window in windows],
    }


def print_rows(rows: Sequence[Row]) -> None:
    """A line per window."""
    for row in rows:
        times = ", ".join(f"{name} {1e3 * row[f'{name}_seconds']:.1f} ms" for name in ("layers", "head", "indicator"))
        print(f"{row['window']} positions: {times}; the indicator adds {100 * row['indicator_share']:.1f} %")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=INDICATORS, default="llada-8b")
    made.add_argument("--windows", default="32,64", help="numbers of positions, such as a block's")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], help="by default bfloat16 on accelerators alone")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    return command.run(parser().parse_args(arguments), report, print_rows)


if __name__ == "__main__":
    raise SystemExit(main())
