"""Generations on this machine's accelerator against the CPU's, token for token: `python -m benchmarks.same_tokens`.

The embedded model of word problems in float32, with products at the highest precision, answers the same problems on
both, in every sampler. A row's `same` is the share of answers with the same tokens, its forwards the device's and the
CPU's. Without an accelerator both are the CPU, which rehearses the command.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import command
from convert import embedded
from dllm_jax import DllmError, Model
from evals.tasks import make_task
from samplers import make_sampler, sample_jit
from samplers.text.prompts import pad_prompts

SAMPLERS = (
    "threshold:threshold=0.9,cache=none,gen_length=32",
    "threshold:threshold=0.9,cache=dual,block_length=16,gen_length=32",
    "eb:gamma=0.1,cache=none,gen_length=32",
    "credit:cache=prefix,block_length=16,gen_length=32",
)


def report(options: argparse.Namespace) -> dict[str, Any]:
    """The rows, and what they ran on."""
    if options.n < 1:
        raise DllmError(f"--n is {options.n}; compare at least one answer")
    task = make_task("word-problems")
    prompts = [task.example("test", number).prompt_ids.tolist() for number in range(options.n)]
    model, device = embedded.load("word-problems"), jax.local_devices()[0]
    rows = []
    with jax.default_matmul_precision("highest"):
        for name in SAMPLERS:
            ours, cpu = (
                _answer(model, name, prompts, where) for where in (device, jax.local_devices(backend="cpu")[0])
            )
            same = np.all(np.asarray(ours.tokens) == np.asarray(cpu.tokens), axis=1)
            forwards = {"forwards": float(ours.nfe.mean()), "cpu_forwards": float(cpu.nfe.mean())}
            rows.append({"sampler": name, "n": options.n, "same": float(same.mean()), **forwards})
    return {"device": device.device_kind, "jax": jax.__version__, "rows": rows}


def _answer(model: Model, sampler: str, prompts: list[list[int]], device: jax.Device) -> Any:
    """The generations of all prompts on one device."""
    put = lambda x: jax.device_put(x, device)
    denoiser = dataclasses.replace(model.denoiser, params=put(model.denoiser.params), device=device)
    prompt, lengths = pad_prompts(prompts)
    built = put(make_sampler(model, sampler=sampler))
    return jax.device_get(sample_jit(built, denoiser, put(prompt), put(lengths)))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each sampler."""
    for row in rows:
        forwards = f"{row['forwards']:.2f} forwards, CPU {row['cpu_forwards']:.2f}"
        print(f"{100 * row['same']:5.1f}% of {row['n']} answers the same, {forwards}  {row['sampler']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when it ran, 2 after a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=64, help="answers (default 64)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.set_defaults(dtype="float32")
    return command.run(parser.parse_args(arguments), report, show)


if __name__ == "__main__":
    raise SystemExit(main())
