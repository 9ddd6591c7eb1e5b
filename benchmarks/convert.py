"""Converts a checkpoint in a published model's shapes; memory, time and speed: `python -m benchmarks.convert --help`.

Six bfloat16 shards of random finite values are written to a scratch folder, converted by `python -m convert` in a
process of its own, copied plainly for comparison, and deleted. Both times start with the files out of the page cache
and end when everything is on the disk.
"""

import argparse
import json
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dllm_jax.config import ModelConfig
from dllm_jax.families import find_family, published_config

ROOT = Path(__file__).parents[1]
NUM_SHARDS = 6


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the hub's checkpoint."""
    named: dict[str, tuple[int, ...]] = {}
    for slot in find_family(config.family).layout(None, config).slots(config):
        rows = named.get(slot.tensor, (0,))[0] + slot.shape[0]  # the parts of one lie above each other
        named[slot.tensor] = (rows, *slot.shape[1:])
    return named


def split(named: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in order, in six files of about the same size."""
    limit = sum(map(math.prod, named.values())) / NUM_SHARDS
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(NUM_SHARDS)]
    done = 0
    for name, shape in named.items():
        shards[min(int(done / limit), NUM_SHARDS - 1)][name] = shape
        done += math.prod(shape)
    return [shard for shard in shards if shard]


def write_checkpoint(folder: Path, config: ModelConfig) -> int:
    """Writes config, index and shards; returns the bytes of all tensors."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    total = 0
    shards = split(shapes(config))
    for index, shard in enumerate(shards, 1):
        name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        total += write_shard(folder / name, shard, rng)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    family = find_family(config.family)
    named = {"architectures": [family.layout(None, config).architecture]}
    (folder / "config.json").write_text(json.dumps(named | family.write_config(config)))
    return total


def write_shard(path: Path, shard: dict[str, tuple[int, ...]], rng: np.random.Generator) -> int:
    """One safetensors file; returns the bytes of its tensors."""
    header, end = {}, 0
    for name, shape in shard.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(0, end, 2**24):
            file.write(random_values(rng, min(2**24, end - (file.tell() - 8 - len(text)))))
    return end


def random_values(rng: np.random.Generator, num_bytes: int) -> bytes:
    """bfloat16 values of random sign and mantissa between 2^-15 and 2^-7, about what weights are."""
    bits = np.frombuffer(rng.bytes(num_bytes), np.uint16)
    return ((bits & 0x83FF) | 0x3800).tobytes()


def on_disk_and_forgotten(folder: Path) -> None:
    """Flushes a folder's files and drops them from the page cache, so that the next reader reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_conversion(family: str, source: Path, out: Path, quantize: str | None) -> tuple[float, float]:
    """(seconds, peak resident GiB) of the converting process."""
    command = [sys.executable, "-m", "convert", family, "--source", str(source), "--out", str(out), "--no-progress"]
    command += ["--quantize", quantize] if quantize else []
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"the conversion failed with status {os.waitstatus_to_exitcode(status)}")
    return seconds, usage.ru_maxrss / 2**20


def timed_copy(source: Path, out: Path) -> float:
    """Seconds to copy the same files."""
    start = time.perf_counter()
    shutil.copytree(source, out)
    os.sync()
    return time.perf_counter() - start


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def layers_that_fit(scratch: Path, config: ModelConfig, wanted: int) -> int:
    """`wanted`, or as many layers as leave room for the source and one copy of it."""
    free = shutil.disk_usage(scratch).free - 2 * 10**9
    two, three = (2 * sum(map(math.prod, shapes(config.replace(num_layers=n)).values())) for n in (2, 3))
    sizes = [two + (three - two) * (layers - 2) for layers in range(wanted + 1)]
    fitting = [layers for layers, size in enumerate(sizes) if 2.1 * size < free]
    if not fitting or not max(fitting):
        raise SystemExit(
            f"{scratch} has {free / 1e9:.0f} GB to spare, too few for even one layer; choose another --scratch"
        )
    return max(fitting)


def measure(scratch: Path, config: ModelConfig, quantize: str | None) -> dict[str, object]:
    """Writes, converts, copies and deletes; returns the figures."""
    folder = scratch / "convert-benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        size = write_checkpoint(folder / "source", config)
        on_disk_and_forgotten(folder)
        seconds, peak = timed_conversion(config.family, folder / "source", folder / "out", quantize)
        written = folder_bytes(folder / "out")
        shutil.rmtree(folder / "out")
        on_disk_and_forgotten(folder)
        copy_seconds = timed_copy(folder / "source", folder / "copy")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "source_gb": round(size / 1e9, 3),
        "written_gb": round(written / 1e9, 3),
        "peak_rss_gib": round(peak, 2),
        "seconds": round(seconds, 1),
        "gb_per_second": round(size / seconds / 1e9, 3),
        "copy_seconds": round(copy_seconds, 1),
        "copy_gb_per_second": round(size / copy_seconds / 1e9, 3),
        "fraction_of_copy_rate": round(copy_seconds / seconds, 3),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="folder on a disk with about 35 GB free")
    parser.add_argument("--model", default="llada-8b-instruct", help="published size (default: llada-8b-instruct)")
    parser.add_argument("--layers", type=int, help="fewer for a quick run (default: all)")
    parser.add_argument("--quantize", choices=("int8", "int4"), help="quantize kernels to this many bits")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    config = published_config(options.model)
    wanted = options.layers or config.num_layers
    num_layers = layers_that_fit(options.scratch, config, wanted)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    result = {
        "what": f"python -m convert {config.family}, random bfloat16 weights in {options.model}'s shapes, six shards",
        "quantize": options.quantize,
        "layers": num_layers,
        "layers_wanted": wanted,
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 1),  # of other work: more than zero means slower than alone
        "versions": {name: version(name) for name in ("jax", "numpy", "orbax-checkpoint", "tensorstore")}
        | {"python": platform.python_version()},
    } | measure(options.scratch, config.replace(num_layers=num_layers), options.quantize)
    for name, value in result.items():
        print(f"{name:24} {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
