"""All that can be measured on one GPU within ten minutes: `python -m benchmarks.on_gpu FOLDER`.

Runs these steps, what is worth most first, each within its time; after one that fails comes the next:

    doctor      every implementation against the reference (`dllm_jax.doctor`)
    tokens      a small model's answers on the GPU and on the CPU, token for token (`benchmarks.same_tokens`)
    bfloat16    LLaDA-8B with random weights at 1, 8 and 32 rows: the roofline of window and full forwards, generations
                against their baselines and the sum of their forwards (`benchmarks.sample --suite gpu`)
    buffers     the same generations, each as one command buffer (`--command-buffers`)
    attention   cuDNN and tokamax: errors, and speed against XLA's operations (`benchmarks.attention`)
    experts     tokamax's grouped products against rounds, in time and result (`benchmarks.moe`)
    int8        the roofline with weights in 8 bits, at 1, 8 and 32 rows

FOLDER gets `on_gpu.json` with everything, `on_gpu.md` to read, and a log of each step. The same command resumes: what
has run is not run again. `--rehearse` runs every step with small shapes on any machine, whose numbers mean nothing.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm_jax.storage import write_file

CHECK = "import jax, flax, optax, orbax.checkpoint, transformers; assert jax.default_backend() == 'gpu', jax.devices()"
MODEL = ("--model", "llada-8b-instruct", "--dtype", "bfloat16")
DUAL = ("--rules", "topk:k=4", "--caches", "dual", "--baselines", "", "--ignore-eos")
SHORT = ("--rules", "topk:k=4", "--caches", "dual", "--gen-length", "8", "--block-length", "8")
SMALL = ("--model", "tiny", "--dtype", "float32", "--repeats", "1")


@dataclasses.dataclass(frozen=True)
class Step:
    """A benchmark.

    Attributes:
        seconds: after which it is stopped.
        command: its module and options.
        rehearsal: the options in a rehearsal.
        output: its option for the file that it writes.
    """

    seconds: int
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    output: str = "--json"

    def words(self, rehearse: bool, file: Path) -> list[str]:
        """The command line that writes this file."""
        module, *options = self.command
        return [sys.executable, "-m", module, *(self.rehearsal if rehearse else options), self.output, str(file)]


STEPS: dict[str, Step] = {
    "doctor": Step(50, ("dllm_jax.doctor",), (), "--out"),
    "tokens": Step(50, ("benchmarks.same_tokens",), ("--n", "2")),
    "bfloat16": Step(
        200,
        ("benchmarks.sample", *MODEL, "--suite", "gpu", "--time-limit", "170"),
        (*SMALL, *SHORT, "--roofline"),
    ),
    "buffers": Step(
        60,
        ("benchmarks.sample", *MODEL, *DUAL, "--batch", "1,8", "--time-limit", "50", "--command-buffers"),
        (*SMALL, *SHORT),  # without, as a rehearsal has no such GPU
    ),
    "attention": Step(
        70,
        ("benchmarks.attention",),
        ("--interpret", "--shapes", "1x64x80x4x2x64", "--repeats", "1", "--calls", "1"),
    ),
    "experts": Step(
        70,
        ("benchmarks.moe", "--dtypes", "bfloat16", "--tokens", "32,256,4096", "--variants", "rounds,groups"),
        ("--size", "tiny", "--tokens", "8", "--dtypes", "float32", "--routings", "even", "--repeats", "1"),
    ),
    "int8": Step(
        100,
        ("benchmarks.sample", *MODEL, "--quantize", "int8", "--roofline", "--batch", "1,8,32", "--time-limit", "80"),
        (*SMALL, "--quantize", "int8", "--roofline", "--gen-length", "8", "--block-length", "8"),
    ),
}


def run(folder: Path, names: Sequence[str], rehearse: bool = False) -> list[str]:
    """Runs the steps that the folder does not have yet, and returns those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = _read(folder / "on_gpu.json")
    failed = []
    for name in names:
        step, log, file = STEPS[name], folder / f"{name}.log", folder / f"{name}.json"
        words = step.words(rehearse, file)
        if (before := done.get(name)) and before["status"] == 0 and before["command"] == words[1:]:
            print(f"{name}: there already")
            continue
        print(f"{name}: {' '.join(words[1:])}", flush=True)
        file.unlink(missing_ok=True)
        limit = step.seconds * (20 if rehearse else 1)  # a rehearsal may share a small machine
        began = time.perf_counter()
        with log.open("w") as out:
            status: int | str
            try:
                status = subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                status = f"not done after {limit} s"
        text = log.read_text()
        print(text[-3000:], flush=True)
        seconds = round(time.perf_counter() - began, 1)
        about = {"status": status, "seconds": seconds, "command": words[1:], "printed": text[-6000:]}
        done[name] = about | {"result": _read(file) or None}
        write_file(folder / "on_gpu.json", json.dumps(done, indent=1) + "\n")
        write_file(folder / "on_gpu.md", page(done, rehearse))
        failed += [f"{name} ({status})"] if status else []
    return failed


def _read(file: Path) -> dict[str, Any]:
    """A file of JSON; empty where there is none, or none that is whole."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def page(done: dict[str, Any], rehearse: bool) -> str:
    """What every step printed, after a table of which ran, in Markdown."""
    lines = ["# One GPU", "", *["A rehearsal: its numbers mean nothing.", ""] * rehearse]
    lines += ["| step | outcome | seconds |", "|---|---|---|"]
    outcome = lambda one: "ran" if one["status"] == 0 else f"failed: {one['status']}"
    lines += [f"| {name} | {outcome(one)} | {one['seconds']:.0f} |" for name, one in done.items()]
    for name, one in done.items():
        lines += [
            "",
            f"## {name}",
            "",
            "```text",
            f"python {' '.join(one['command'])}",
            "",
            one["printed"].strip(),
            "```",
        ]
    return "\n".join([*lines, ""])


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, metavar="FOLDER")
    made.add_argument("--steps", nargs="+", choices=sorted(STEPS), default=list(STEPS), help="default: all")
    made.add_argument("--rehearse", action="store_true", help="small shapes, on any machine")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when every step ran, 1 when one failed, 2 without a GPU or a package."""
    options = parser().parse_args(arguments)
    check = None if options.rehearse else subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    if check is not None and check.returncode:
        print(f"error: this Python cannot measure a GPU ({check.stderr.strip().splitlines()[-1]}); install jax[cuda12]")
        return 2
    failed = run(options.folder, options.steps, options.rehearse)
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {options.folder}, and run the same command again")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
