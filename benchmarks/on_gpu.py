"""All that can be measured on one GPU within ten minutes: `python -m benchmarks.on_gpu FOLDER`.

Runs these steps one after the other, each within its time; after one that fails comes the next:

    doctor      every implementation against the reference (`dllm_jax.doctor`)
    attention   cuDNN and tokamax: errors, and speed against XLA's operations (`benchmarks.attention`)
    experts     tokamax's grouped products against rounds, in time and result (`benchmarks.moe`)
    bfloat16    LLaDA-8B with random weights: the roofline of window and full forwards, generations against their
                baselines and the sum of their forwards (`benchmarks.sample --suite gpu`)
    int8        the roofline with weights in 8 bits, at batch 1, 8 and 32

Results are JSON in FOLDER; a log of each step is next to them.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MODEL = ("--model", "llada-8b-instruct", "--dtype", "bfloat16")
CHECK = "import jax, flax, optax, orbax.checkpoint, transformers; assert jax.default_backend() == 'gpu', jax.devices()"
STEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "doctor": (60, ("dllm_jax.doctor",)),
    "attention": (90, ("benchmarks.attention",)),
    "experts": (
        70,
        ("benchmarks.moe", "--dtypes", "bfloat16", "--tokens", "32,256,4096", "--variants", "rounds,groups"),
    ),
    "bfloat16": (250, ("benchmarks.sample", *MODEL, "--suite", "gpu", "--time-limit", "200")),
    "int8": (
        140,
        ("benchmarks.sample", *MODEL, "--quantize", "int8", "--roofline", "--batch", "1,8,32", "--time-limit", "100"),
    ),
}
"""Seconds after which a step is stopped, and its module and options."""


def run(folder: Path, names: Sequence[str]) -> list[str]:
    """Runs steps and returns those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        seconds, (module, *options) = STEPS[name]
        words = [
            sys.executable,
            "-m",
            module,
            *options,
            "--out" if name == "doctor" else "--json",
            str(folder / f"{name}.json"),
        ]
        print(f"{name}: {' '.join(words[1:])}", flush=True)
        with (folder / f"{name}.log").open("w") as log:
            status: int | str
            try:
                status = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, timeout=seconds).returncode
            except subprocess.TimeoutExpired:
                status = f"not done after {seconds} s"
        print((folder / f"{name}.log").read_text()[-3000:], flush=True)
        failed += [f"{name} ({status})"] if status else []
    return failed


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, metavar="FOLDER")
    made.add_argument("--steps", nargs="+", choices=sorted(STEPS), default=list(STEPS), help="default: all")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when every step ran, 1 when one failed, 2 without a GPU or a package."""
    options = parser().parse_args(arguments)
    check = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    if check.returncode:
        print(f"error: this Python cannot measure a GPU ({check.stderr.strip().splitlines()[-1]}); install jax[cuda12]")
        return 2
    failed = run(options.folder, options.steps)
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {options.folder}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
