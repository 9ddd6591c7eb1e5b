"""Other implementations of LLaDA's sampling against this one, on one CPU core: `python -m benchmarks.peers --help`.

The same float32 weights, the same prompt and two tokens a step (LLaDA's fixed schedule, greedy) in

    fast-dllm    https://github.com/NVlabs/Fast-dLLM, in PyTorch: without a cache, prefix cache, dual cache
    bonsai       https://github.com/jax-ml/bonsai, in Flax, as it is and with its forward under nnx.jit; no cache

each from a checkout of yours. Every implementation has a process of its own that is pinned to the same core and stays
alive; they take turns, so that whatever else the machine does hits all alike. Seconds are medians, by wall time and
by the process's CPU time, which other work on the machine disturbs least; a first generation, which compiles, is apart.
Ratios are above 1 where this library is faster. Every row says whether the tokens are the same.

    PYTHONPATH=FOLDER_OF_TORCH python -m benchmarks.peers --fast-dllm DIR --bonsai DIR --json FILE
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import convert
from benchmarks import command
from benchmarks.sample import GOLDENS, describe_hardware
from dllm_jax import DllmError, ModelConfig, published_config, random_model
from dllm_jax.checkpoints import checkpoint

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
CACHES = ("none", "prefix", "dual")
PEERS = {  # what a checkout must have, and which caches it has
    "fast-dllm": ("https://github.com/NVlabs/Fast-dLLM", "llada/generate.py", CACHES),
    "bonsai": ("https://github.com/jax-ml/bonsai", "bonsai/models/llada/modeling.py", ("none",)),
    "bonsai-jit": ("https://github.com/jax-ml/bonsai", "bonsai/models/llada/modeling.py", ("none",)),
}


def _random(vocab_size: int, embed_dim: int, num_layers: int, mlp_dim: int) -> ModelConfig:
    """LLaDA in these sizes, with heads of 64."""
    heads = embed_dim // 64
    return published_config("llada-8b-instruct").replace(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        mlp_dim=mlp_dim,
        mask_id=vocab_size - 1,
        eos_id=2,
        pad_id=2,
        bos_id=1,
        end_ids=(2,),
        dtype="float32",
    )


RANDOM_SIZES = {"30m": _random(8192, 384, 13, 1024), "0.3b": _random(32000, 1024, 16, 2816)}
"""Random weights: 29 and 271 million parameters."""
SIZES = ("tiny", *RANDOM_SIZES)


@dataclasses.dataclass(frozen=True)
class Job:
    """What every process measures.

    Attributes:
        folder, hub: the checkpoint in this library's format and in the hub's.
        checkout: of the peer; empty for this library.
        prompt: token ids.
        steps: forwards of a generation.
        core: number of the CPU core to run on.
    """

    folder: str
    hub: str
    prompt: list[int]
    mask_id: int
    gen_length: int
    block_length: int
    steps: int
    core: int
    checkout: str = ""


class Worker:
    """A process that answers every line with a line, both JSON; see `benchmarks.peer_worker`.

    Attributes:
        name: its name in errors.
        hello: its first answer.
    """

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.hello = self._answer()

    def run(self, cache: str) -> Row:
        """One generation.

        Raises:
            DllmError: with what went wrong there.
        """
        assert self._process.stdin is not None
        print(json.dumps({"cache": cache}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process, if it still runs."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DllmError(f"the process of {self.name} ended without an answer")
        answer: Row = json.loads(line)
        if "error" in answer:
            self.close()
            raise DllmError(f"{self.name} does not run in its Python, see --python: {answer['error']}")
        return answer


def in_turns(ours: Worker, peer: Worker, cache: str, repeats: int) -> Row:
    """A row: a first generation of each, which compiles or warms up, then as many as asked for of each in turns."""
    first = {"ours": ours.run(cache), "peer": peer.run(cache)}
    found: dict[str, list[Row]] = {"ours": [], "peer": []}
    for _ in range(repeats):
        found["ours"].append(ours.run(cache))
        found["peer"].append(peer.run(cache))
    row: Row = {
        "peer": peer.name,
        "cache": cache,
        "same_tokens": _share(first["ours"]["tokens"], first["peer"]["tokens"]),
    }
    for name, answers in found.items():
        row[f"{name}_forwards"] = answers[0]["forwards"]
        row[f"{name}_first_seconds"] = first[name]["seconds"]
        for measure in ("seconds", "cpu_seconds"):
            row[f"{name}_{measure}"] = statistics.median(answer[measure] for answer in answers)
            row[f"{name}_{measure}_all"] = [answer[measure] for answer in answers]
    row["ratio"] = row["peer_seconds"] / row["ours_seconds"]
    row["cpu_ratio"] = row["peer_cpu_seconds"] / row["ours_cpu_seconds"]
    return row


def _share(ours: list[int], other: list[int]) -> float:
    """Share of positions with the same token."""
    return float(np.mean(np.equal(ours, other)))


def checkpoints(size: str, scratch: Path) -> tuple[Path, Path]:
    """The checkpoint of a size in this library's format and in the hub's, float32."""
    ours, hub = scratch / "ours", scratch / "hub"
    if size in RANDOM_SIZES:
        model = random_model(RANDOM_SIZES[size])
        checkpoint.save(ours, model.config, model.params.items())
        convert.export(ours, hub)
    else:
        hub = GOLDENS / "checkpoints" / "llada-tiny"
        convert.convert("llada", hub, ours, dtype="float32")
    return ours, hub


def make_prompt(config: ModelConfig, length: int) -> list[int]:
    """The same random ids in every run, none of them special."""
    special = set(config.special_ids().values())
    ordinary = [token for token in range(config.vocab_size) if token not in special]
    return np.random.default_rng(0).choice(ordinary, length).tolist()


def measure(
    size: str, lengths: tuple[int, int], checkouts: dict[str, Path], options: argparse.Namespace
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a size with a prompt and a generation of some lengths, and the versions that each process has."""
    prompt_length, gen_length = lengths
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, hub = checkpoints(size, Path(scratch))
        config = checkpoint.load_config(folder)
        job = Job(
            folder=str(folder),
            hub=str(hub),
            prompt=make_prompt(config, prompt_length),
            mask_id=config.mask_id or 0,
            gen_length=gen_length,
            block_length=options.block_length,
            steps=gen_length // 2,
            core=options.core,
        )
        try:
            for name in ("ours", *checkouts):
                given = dataclasses.replace(job, checkout=str(checkouts[name].resolve()) if name in checkouts else "")
                python = options.python if name in checkouts else sys.executable
                arguments = ["-m", "benchmarks.peer_worker", name, json.dumps(dataclasses.asdict(given))]
                workers[name] = Worker(name, [python, *arguments])
            pairs = [(name, cache) for name in checkouts for cache in PEERS[name][2] if cache in options.caches]
            rows = []
            for name, cache in pairs:
                about = {"size": size, "prompt_length": prompt_length, "gen_length": gen_length}
                about["load_average"] = os.getloadavg()[0]  # of the minute before, this benchmark's own share included
                row = about | in_turns(workers["ours"], workers[name], cache, options.repeats)
                print(f"{size}, {_plus(lengths)}, {name}, {cache}: {row['cpu_ratio']:.2f}", file=sys.stderr)
                rows.append(row)
        finally:
            for worker in workers.values():
                worker.close()
    return rows, {name: worker.hello["versions"] for name, worker in workers.items()}


def checkouts_of(options: argparse.Namespace) -> dict[str, Path]:
    """The peers that are asked for and where they lie.

    Raises:
        DllmError: for none, and for folders that are no checkouts of them.
    """
    given = {name: getattr(options, name.removesuffix("-jit").replace("-", "_")) for name in PEERS}
    found = {name: folder for name, folder in given.items() if folder is not None}
    if not found:
        raise DllmError("there is no peer to compare with; give --fast-dllm DIR, --bonsai DIR or both")
    for name, folder in found.items():
        url, file, _ = PEERS[name]
        if not (folder / file).is_file():
            raise DllmError(f"{folder} is no checkout of {url}: it has no {file}")
    return found


def check_options(options: argparse.Namespace) -> None:
    """Refuses, before anything is loaded, what cannot be measured.

    Raises:
        DllmError: in one sentence.
    """
    for what, given, known in (("size", options.sizes, SIZES), ("cache", options.caches, CACHES)):
        if unknown := [name for name in given if name not in known]:
            raise DllmError(f"no {what} is called {unknown[0]!r}; choose from {', '.join(known)}")
    if options.repeats < 1:
        raise DllmError(f"--repeats is {options.repeats}; measure at least once")
    if any(gen % options.block_length for _, gen in options.lengths) or options.block_length % 2:
        raise DllmError("two tokens a step need a --block-length that is even and divides each generation of --lengths")
    if not hasattr(os, "sched_setaffinity"):
        raise DllmError("processes can be kept on one core on Linux only")
    if options.core not in os.sched_getaffinity(0):
        raise DllmError(f"there is no core {options.core} for this process; choose another --core")


def report(options: argparse.Namespace) -> Row:
    """Everything that is measured, and with what.

    Raises:
        DllmError: as `check_options`, `checkouts_of` and `Worker`.
    """
    check_options(options)
    checkouts = checkouts_of(options)
    about = {
        "command": _command(checkouts, options),
        "commits": {name: _commit(folder) for name, folder in checkouts.items()},
        "tokens_per_step": 2,
        "dtype": "float32",
        "hardware": describe_hardware() | {"cpu_cores_used": 1},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    rows: list[Row] = []
    for size, lengths in itertools.product(options.sizes, options.lengths):
        found, versions = measure(size, lengths, checkouts, options)
        rows, about["versions"] = rows + found, versions
    return {**about, "rows": rows}


def _command(checkouts: dict[str, Path], options: argparse.Namespace) -> str:
    """The command line, without where things lie on this machine."""
    lists = [f"--{name} {','.join(getattr(options, name))}" for name in ("sizes", "caches")]
    lists.append(f"--lengths {','.join(map(_plus, options.lengths))}")
    numbers = [f"--block-length {options.block_length}", f"--repeats {options.repeats}"]
    folders = [f"--{name} DIR" for name in checkouts if not name.endswith("-jit")]
    return " ".join(["python -m benchmarks.peers", *folders, *lists, *numbers])


def _plus(lengths: tuple[int, int]) -> str:
    return "+".join(map(str, lengths))


def _commit(folder: Path) -> str:
    """The commit of a checkout, as far as git knows."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return found.stdout.strip()


def print_rows(rows: list[Row]) -> None:
    """A table: seconds of CPU of a generation, and what the peer takes over what this library takes."""
    numbers = "".join(f"{name:>9}" for name in ("forwards", "ours s", "peer s"))
    print(f"{'size':6}{'lengths':9}{'peer':12}{'cache':8}{numbers}{'ratio':>7}{'wall':>7}  same tokens")
    for row in rows:
        seconds = f"{row['ours_cpu_seconds']:9.3f}{row['peer_cpu_seconds']:9.3f}"
        ratios = f"{row['cpu_ratio']:7.2f}{row['ratio']:7.2f}"
        same = "yes" if row["same_tokens"] == 1.0 else f"{row['same_tokens']:.0%}"
        lengths = _plus((row["prompt_length"], row["gen_length"]))
        what = f"{row['size']:6}{lengths:9}{row['peer']:12}{row['cache']:8}"
        print(f"{what}{row['ours_forwards']:9}{seconds}{ratios}  {same}")


def _lengths(text: str) -> list[tuple[int, int]]:
    """Pairs of lengths, written as 64+64,128+128."""
    pairs = [tuple(int(part) for part in pair.split("+")) for pair in text.split(",") if pair]
    if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return [(prompt, generation) for prompt, generation in pairs]


def _first_core() -> int:
    return min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    names = lambda text: [name for name in text.split(",") if name]
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--fast-dllm", type=Path, metavar="DIR", help="a checkout of NVlabs/Fast-dLLM")
    made.add_argument("--bonsai", type=Path, metavar="DIR", help="a checkout of jax-ml/bonsai")
    made.add_argument("--python", default=sys.executable, metavar="PATH", help="the peers' Python (default: this one)")
    made.add_argument("--sizes", type=names, default=list(SIZES), metavar="SIZE,SIZE", help="default tiny,30m,0.3b")
    made.add_argument("--caches", type=names, default=list(CACHES), metavar="CACHE,CACHE", help="default all")
    usual, about = "64+64,128+128,256+256", "tokens of prompt and generation"
    made.add_argument("--lengths", type=_lengths, default=usual, metavar="P+G,P+G", help=f"{about} (default {usual})")
    made.add_argument("--block-length", type=int, default=32)
    made.add_argument("--repeats", type=int, default=5, help="timed generations of each (default 5)")
    made.add_argument("--core", type=int, default=_first_core(), help="the CPU core that all run on")
    made.add_argument("--json", type=Path, metavar="FILE")
    made.set_defaults(dtype="float32")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    return command.run(parser().parse_args(arguments), report, print_rows)


if __name__ == "__main__":
    sys.exit(main())
