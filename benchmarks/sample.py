"""Speed of sampling, every number against its baselines: `python -m benchmarks.sample --help`.

One row per rule x cache x batch: forwards (NFE), tokens, tokens per second, memory, compile time apart. Measured in the
same run, in turns, and given as ratios:

    python-loop   the same rule without a cache (python-loop:dual: with one), one jitted call per step from Python
                  (`samplers.stream`); its tokens must be those of the compiled generation
    none          the compiled generation without a cache
    ar            one token per forward with a causal key/value cache and the same weights, compiled; a speed for scale,
                  its tokens mean nothing

    python -m benchmarks.sample --model tiny --rules threshold,eb,llada --caches none,prefix,dual
    python -m benchmarks.sample --model llada-8b-instruct --dtype bfloat16 --suite gpu --json gpu.json
"""

import argparse
import csv
import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import roofline
from benchmarks.command import status_of
from benchmarks.roofline import Row
from dllm_jax import PUBLISHED, Denoiser, DllmError, Model, load, published_config, random_model
from dllm_jax.config import Quantize
from dllm_jax.models.denoiser import Span
from dllm_jax.models.kv_cache import slice_rows, write_rows
from dllm_jax.storage import write_file
from samplers import CACHES, Result, make_sampler, parse_sampler, sample, stream
from samplers.cli.flags import command_buffers_of
from samplers.command_buffers import COMMAND_BUFFERS, asked_for_command_buffers
from samplers.config.factory import CanvasSampler
from samplers.config.registry import part_class
from samplers.text.prompts import check_lengths, encode_prompt, pad_prompts

GOLDENS = Path(__file__).parents[1] / "tests" / "goldens"
BASELINES = ("python-loop", "ar")
GPU_SECONDS = 390.0  # what is begun before this, one row at a time, ends within eight minutes
RANDOM_PROMPT_LENGTH = 128
QUESTIONS = (
    "Natalia sold clips to 48 of her friends in April and half as many in May. How many clips did she sell?",
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in two and a half hours. What is its average speed?",
    "Explain in three sentences how a vaccine works.",
    "Sort these numbers in ascending order: 17, 3, 42, 8, 23.",
    "Translate into French: The library opens at nine o'clock in the morning.",
    "A box holds 12 eggs. How many boxes are needed for 150 eggs?",
)
NOTES = {
    "speed": "seconds are the median of repeats that take turns over the rows of a group; compilation is apart",
    "patience": "timings during which other processes were busy were repeated, within the seconds of --patience",
    "others": "others_busy: cores that other processes kept busy during a row's timings, where the system reports it",
    "forwards": "a forward of a batch counts once for every row that it served",
    "to_eos": "tokens are counted to the first end-of-sequence token and without it, prompts never",
    "all": "no stop condition: every position of the canvas counts as a token, end-of-sequence tokens too",
    "random": "random weights: no confidence reaches a threshold, so threshold rules commit one token per forward; "
    "--tokens-per-step sets the parallelism of topk instead",
    "ar": "ar runs the same weights as a causal model: a speed for scale, its tokens mean nothing",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What all rows of a run share. `patience`: seconds to wait for a quiet machine before each timing."""

    model: Model
    gen_length: int
    block_length: int
    ignore_eos: bool = False
    patience: float = 0.0

    def sampler(self, rule: str, cache: str) -> CanvasSampler:
        """The sampler of a rule written ``name`` or ``name:option=value:...``."""
        name, options = parse_rule(rule)
        return make_sampler(
            self.model,
            rule=name,
            cache=cache,
            gen_length=self.gen_length,
            block_length=self.block_length,
            ignore_eos=self.ignore_eos,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are measured in turns: one rule and batch, several caches and baselines."""

    rule: str
    batch: int
    caches: Sequence[str]
    baselines: Sequence[str] = ()
    repeats: int = 5

    def entries(self) -> list[tuple[str, str]]:
        """(engine, cache) of every row."""
        pairs = [name.partition(":")[::2] for name in self.baselines]
        loops = [(name, "causal" if name == "ar" else cache or "none") for name, cache in pairs]
        return [("compiled", cache) for cache in self.caches] + loops


@dataclasses.dataclass(frozen=True)
class Forwards:
    """Forwards to be timed alone, at one batch; `split` also takes a step apart."""

    batch: int
    split: bool = True
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something that generates, compiled and ready; `run` returns while the device may still be running."""

    run: Callable[[], Result]
    compile_seconds: float
    program_bytes: int | None = None


# What is timed


class Programs:
    """Generations compiled ahead of time, so that compiling is timed apart; one program per combination of shapes."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, float]] = {}

    def contender(self, name: str, function: Callable[..., Result], *arguments: Any) -> Contender:
        """The function as one compiled program; `name` distinguishes functions of equal arguments."""
        leaves, structure = jax.tree.flatten(arguments)
        key = (name, structure, tuple(str(jax.typeof(leaf)) for leaf in leaves))
        if key not in self._made:
            start = time.perf_counter()
            # A function of its own: JAX's caches take dataclasses of different types for equal when their fields are.
            options = dict(COMMAND_BUFFERS) if asked_for_command_buffers() else None
            run = jax.jit(lambda *arguments: function(*arguments), compiler_options=options)
            program = run.lower(*arguments).compile()
            self._made[key] = (program, time.perf_counter() - start)
        program, seconds = self._made[key]
        return Contender(lambda: program(*arguments), seconds, _program_bytes(program))


def _program_bytes(program: Any) -> int | None:
    memory = program.memory_analysis()
    if memory is None:
        return None
    total = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return total - memory.alias_size_in_bytes


def python_loop(sampler: CanvasSampler, denoiser: Denoiser, prompt: jax.Array, lengths: jax.Array) -> Contender:
    """The same generation with a jitted call per step. Its compile time includes running the first step."""
    start = time.perf_counter()
    states = stream(sampler, denoiser, prompt, lengths)
    next(states)
    jax.block_until_ready(next(states))  # which takes the one before it
    seconds = time.perf_counter() - start

    def run() -> Result:
        *_, last = stream(sampler, denoiser, prompt, lengths)
        return sampler.result(denoiser, last)

    return Contender(run, seconds)


def autoregressive(gen_length: int, denoiser: Denoiser, prompt: jax.Array, prompt_lengths: jax.Array) -> Result:
    """Greedy left-to-right generation with a causal cache: one forward over the prompts, then one per token."""
    # Without the shift: a position is run once its token is known, and its raw logits give the next token.
    denoiser = dataclasses.replace(denoiser, config=denoiser.config.replace(attention="causal", shift=False))

    def best(hidden: jax.Array) -> jax.Array:
        return jnp.argmax(denoiser.logits(hidden), axis=-1).astype(jnp.int32)  # [B, 1]

    def step(index: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        (tokens, cache), at = carry, prompt_lengths + index
        hidden, cache = denoiser.forward(tokens, at + 1, at=Span(at, 1), kv=cache)
        return write_rows(tokens, best(hidden), at + 1), cache

    hidden, cache = denoiser.forward(prompt, prompt_lengths, outputs=Span(prompt_lengths - 1, 1))
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, gen_length), (0, 0), (0, 0))), cache)
    tokens = write_rows(jnp.pad(prompt, ((0, 0), (0, gen_length))), best(hidden), prompt_lengths)
    tokens, _ = lax.fori_loop(0, gen_length - 1, step, (tokens, cache))
    each = jnp.ones_like(prompt_lengths)
    decoded_at = jnp.arange(gen_length, dtype=jnp.int32) * each[:, None]
    generated = slice_rows(tokens, prompt_lengths, gen_length)
    unknown = jnp.full(generated.shape, jnp.nan)
    counts = (gen_length * each, each, 0 * each, 0 * each, 0 * each - 1)
    return Result(generated, gen_length * each, decoded_at, unknown, *counts)


# Rows


def measure_group(
    job: Job, group: Group, prompt: jax.Array, lengths: jax.Array, programs: Programs
) -> Iterator[list[Row]]:
    """The group's rows so far: after each new one, which has its first timing, and after each round of repeats.

    Raises:
        DllmError: when the Python loop's tokens are not those of the compiled generation, where that can be asked.
    """
    rows: list[Row] = []
    contenders: list[Contender] = []
    canvases: list[np.ndarray] = []
    for engine, cache in group.entries():
        contender = _contender(job, engine, group.rule, cache, prompt, lengths, programs)
        result = jax.device_get(contender.run())  # warm-up
        row = _row(job, group, engine, cache, contender, result)
        _add_timing(job, row, contender)
        rows.append(row)
        contenders.append(contender)
        canvases.append(result.tokens)
        if engine == "python-loop":
            row["same_tokens"] = _same_tokens(group, cache, canvases)
        yield [_with_speeds(each) for each in rows]
        _check_same_tokens(job, row)
    for _ in range(1, group.repeats):
        for row, contender in zip(rows, contenders, strict=True):
            _add_timing(job, row, contender)
        yield [_with_speeds(each) for each in rows]


def _add_timing(job: Job, row: Row, contender: Contender) -> None:
    seconds, others = roofline.timed(contender.run, job.patience)
    row.setdefault("seconds_all", []).append(seconds)
    row.setdefault("others_busy_all", []).append(others)


def _contender(
    job: Job, engine: str, rule: str, cache: str, prompt: jax.Array, lengths: jax.Array, programs: Programs
) -> Contender:
    denoiser = job.model.denoiser
    if engine == "ar":
        generate = lambda *arguments: autoregressive(job.gen_length, *arguments)
        return programs.contender("ar", generate, denoiser, prompt, lengths)
    sampler = job.sampler(rule, cache)
    if engine == "python-loop":
        return python_loop(sampler, denoiser, prompt, lengths)
    return programs.contender("sample", sample, sampler, denoiser, prompt, lengths)


def _row(job: Job, group: Group, engine: str, cache: str, contender: Contender, result: Result) -> Row:
    full, nfe = np.asarray(result.full_forwards), np.asarray(result.nfe)
    counted = engine == "ar" or job.ignore_eos
    return {
        "engine": engine,
        "rule": "greedy" if engine == "ar" else group.rule,
        "cache": cache,
        "batch": group.batch,
        "nfe": float(nfe.mean()),
        "full_forwards": float(full.mean()),
        "window_forwards": float((nfe - full).mean()),
        "tokens": float(job.gen_length if counted else np.mean(result.lengths)),
        "compile_seconds": contender.compile_seconds,
        "program_bytes": contender.program_bytes,
        "device_peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _same_tokens(group: Group, cache: str, canvases: Sequence[np.ndarray]) -> float | None:
    """Share of the last canvas (the Python loop's) that the compiled generation with the same cache wrote too."""
    if cache not in group.caches:
        return None
    return float(np.mean(canvases[list(group.caches).index(cache)] == canvases[-1]))


def _check_same_tokens(job: Job, row: Row) -> None:
    # In 16 bits, and where products are tuned program by program, two programs round differently and near-ties fall
    # differently: there the share is only reported.
    exact = jax.default_backend() == "cpu" and job.model.denoiser.dtype == jnp.float32
    if exact and row.get("same_tokens", 1.0) not in (None, 1.0):
        raise DllmError(f"the Python loop wrote other tokens than the compiled generation with rule {row['rule']}")


def _with_speeds(row: Row) -> Row:
    """The row with everything that follows from its timings so far."""
    seconds, rows = statistics.median(row["seconds_all"]), row["batch"]
    others = [share for share in row["others_busy_all"] if share is not None]
    return row | {
        "repeats": len(row["seconds_all"]),
        "seconds": seconds,
        "seconds_min": min(row["seconds_all"]),
        "tokens_per_second": rows * row["tokens"] / seconds,
        "forwards_per_second": rows * row["nfe"] / seconds,
        "tokens_per_forward": row["tokens"] / row["nfe"],
        "others_busy": statistics.median(others) if others else None,
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Every row with its tokens per second as a ratio to each baseline of the same batch, and rule where it has one."""
    baselines = {
        "vs_python_loop": ("python-loop", "none", True),
        "vs_none": ("compiled", "none", True),
        "vs_ar": ("ar", "causal", False),
    }
    return [row | {name: _ratio(row, rows, *baseline) for name, baseline in baselines.items()} for row in rows]


def _ratio(row: Row, rows: Sequence[Row], engine: str, cache: str, same_rule: bool) -> float | None:
    for other in rows:
        if (other["engine"], other["cache"], other["batch"]) != (engine, cache, row["batch"]):
            continue
        if not same_rule or other["rule"] == row["rule"]:
            return row["tokens_per_second"] / other["tokens_per_second"]
    return None


# What is asked for


def parse_rule(text: str) -> tuple[str, Mapping[str, Any]]:
    """``"eb:gamma=0.2"`` -> ``("eb", {"gamma": 0.2})``."""
    name, colon, rest = text.partition(":")
    part_class("rule", name)
    return name, parse_sampler(name + colon + rest.replace(":", ",")).options


def make_model(
    name: str, layers: int | None = None, dtype: str | None = None, quantize: Quantize | None = None
) -> Model:
    """The tiny golden checkpoint, a published size with random weights, or a converted folder.

    Raises:
        DllmError: for an unknown name, or a checkpoint that is to be cut.
    """
    if name in PUBLISHED:
        config = published_config(name)
        cut = config.replace(num_layers=layers or config.num_layers)
        label = name if cut == config else f"{name}, {layers} of {config.num_layers} layers"
        return dataclasses.replace(random_model(cut, dtype=dtype, quantize=quantize), name=label)
    if layers is not None:
        raise DllmError("--layers cuts published sizes with random weights; leave it out for a checkpoint")
    return _tiny(dtype, quantize) if name == "tiny" else load(name, dtype=dtype, quantize=quantize)


def _tiny(dtype: str | None, quantize: Quantize | None) -> Model:
    import convert  # here, because a benchmark of random weights needs none of it

    with tempfile.TemporaryDirectory() as folder:
        convert.convert("llada", GOLDENS / "checkpoints" / "llada-tiny", Path(folder) / "llada-tiny")
        return load(Path(folder) / "llada-tiny", dtype=dtype, quantize=quantize)


def make_prompts(model: Model, batch: int, length: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The same prompts in every run: the goldens' for the tiny model, questions where there is a tokenizer, else (and
    where a length is given) random ids."""
    if length is None and model.name == "llada-tiny":
        rows = _golden_prompts()
    elif length is None and model.tokenizer is not None:
        rows = [encode_prompt(model, question, chat=True) for question in QUESTIONS]
    else:
        special = set(model.config.special_ids().values())
        ordinary = [token for token in range(model.config.vocab_size) if token not in special]
        rows = np.random.default_rng(0).choice(ordinary, (batch, length or RANDOM_PROMPT_LENGTH)).tolist()
    return pad_prompts([rows[i % len(rows)] for i in range(batch)], width=length)


def _golden_prompts() -> list[list[int]]:
    cases = json.loads((GOLDENS / "llada-base.json").read_text())["cases"]
    prompts = [tuple(case["prompt"]) for case in cases if isinstance(case["prompt"][0], int)]
    return [list(prompt) for prompt in dict.fromkeys(prompts)]


def make_plan(options: argparse.Namespace) -> list[Group | Forwards]:
    """What to measure, in this order."""
    if options.suite == "gpu":
        return _gpu_plan(options.tokens_per_step or [4, 1, 2, 8])
    rules = [*options.rules, *(f"topk:k={k}" for k in options.tokens_per_step)]
    plan: list[Group | Forwards] = []
    for batch in options.batch:
        plan += [Forwards(batch, repeats=options.repeats)] if options.roofline else []
        for rule in rules:  # "ar" has no rule and is measured once
            baselines = [name for name in options.baselines if name != "ar" or rule == rules[0]]
            plan.append(Group(rule, batch, options.caches, baselines, options.repeats))
    return plan


def _gpu_plan(parallelism: Sequence[int]) -> list[Group | Forwards]:
    """The most informative first, since time may run out; programs of 32 layers take long to compile."""
    first, *others = [f"topk:k={k}" for k in parallelism]
    return [
        Forwards(1),
        Group(first, 1, ["dual", "none"], BASELINES, repeats=3),
        *(Group(rule, 1, ["dual", "none"], repeats=3) for rule in others),  # the same programs: only k differs
        Forwards(32),
        Group(first, 32, ["dual", "none"], repeats=2),
        Forwards(8, split=False),
        Group(first, 8, ["dual", "none"], ["python-loop"], repeats=2),
        Group(first, 1, ["prefix"], repeats=3),
    ]


# What is written


class Report:
    """Everything measured so far; on the disk after every row, so that a run that is cut short loses nothing."""

    def __init__(
        self,
        facts: Row,
        json_path: Path | None = None,
        csv_path: Path | None = None,
        time_limit: float = float("inf"),
    ):
        self.data: Row = {**facts, "ceilings": None, "rows": [], "forwards": [], "splits": [], "skipped": []}
        self._json, self._csv = json_path, csv_path
        self._start, self._limit = time.perf_counter(), time_limit

    def is_late(self) -> bool:
        """Whether the time limit is over."""
        return time.perf_counter() - self._start > self._limit

    def skip(self, what: str) -> None:
        """Notes that something was not measured for lack of time."""
        self.data["skipped"].append(what)
        self.save()

    def save(self) -> None:
        """Writes the files anew, each whole or not at all."""
        self.data["seconds_total"] = time.perf_counter() - self._start
        if self._json:
            write_file(self._json, json.dumps(self.data, indent=1) + "\n")
        if self._csv and self.data["rows"]:
            write_file(self._csv, _as_csv(self.data["rows"]))


def _as_csv(rows: Sequence[Row]) -> str:
    with tempfile.TemporaryFile("w+", newline="") as file:
        names = list(dict.fromkeys(name for row in rows for name in row if not name.endswith("_all")))
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        file.seek(0)
        return file.read()


def describe_run(job: Job, arguments: Sequence[str]) -> Row:
    """Model, settings, hardware, versions and how the numbers are to be read."""
    random = job.model.folder is None
    notes = [
        "speed",
        "others",
        "forwards",
        "all" if job.ignore_eos else "to_eos",
        "ar",
        *(["random"] if random else []),
    ]
    return {
        "command": " ".join(["python -m benchmarks.sample", *arguments]),
        "model": job.model.name,
        "weights": "random" if random else "checkpoint",
        "dtype": job.model.denoiser.dtype.name,
        "gen_length": job.gen_length,
        "block_length": job.block_length,
        "hardware": describe_hardware(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
        | {"python": platform.python_version()},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "notes": [NOTES[name] for name in notes],
    }


def describe_hardware() -> Row:
    """The device, and the machine around it."""
    device = jax.local_devices()[0]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices_used": 1,
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


COLUMNS = {
    "engine": "{:<11}",
    "rule": "{:<14}",
    "cache": "{:<6}",
    "batch": "{:>5}",
    "nfe": "{:>6.1f}",
    "full_forwards": "{:>5.1f}",
    "tokens": "{:>6.1f}",
    "tokens_per_forward": "{:>6.2f}",
    "seconds": "{:>8.4f}",
    "tokens_per_second": "{:>8.1f}",
    "forwards_per_second": "{:>8.1f}",
    "vs_python_loop": "{:>7.2f}",
    "vs_none": "{:>7.2f}",
    "vs_ar": "{:>7.2f}",
    "compile_seconds": "{:>7.1f}",
    "program_bytes": "{:>8.1f}",
    "others_busy": "{:>6.2f}",
}
HEADINGS = (
    "engine rule cache batch NFE full tokens TPF seconds tokens/s forw./s xloop xnone xar compile MiB others".split()
)


def format_rows(rows: Sequence[Row]) -> str:
    """The table as text."""
    widths = [len(form.format(0 if ">" in form else "")) for form in COLUMNS.values()]
    for i, name in enumerate(list(COLUMNS)[:3]):
        widths[i] = max([widths[i], *(len(row[name]) for row in rows)])
    lines = [" ".join(f"{text:{'<' if i < 3 else '>'}{widths[i]}}" for i, text in enumerate(HEADINGS))]
    for row in rows:
        cells = []
        for (name, form), width in zip(COLUMNS.items(), widths, strict=True):
            value = row[name] / 2**20 if name == "program_bytes" and row[name] else row[name]
            cells.append("-".rjust(width) if value is None else form.format(value).ljust(width))
        lines.append(" ".join(cells))
    return "\n".join(lines)


def format_forwards(rows: Sequence[Row], split: Row | None) -> str:
    """Forwards against the measured ceilings, and what an engine step is made of."""
    lines = [
        f"{row['forward']:<7} batch {row['batch']:>3}  {1e3 * row['seconds']:9.3f} ms  "
        f"{row['bytes_per_second'] / 1e9:8.1f} GB/s = {row['fraction_of_copy']:.0%} of copy  "
        f"{row['flops_per_second'] / 1e12:8.3f} TFLOP/s = {row['fraction_of_matmul']:.0%} of matmul  "
        f"{row['fraction_of_floor']:.0%} of the floor ({row['bound']})"
        for row in rows
    ]
    if split:
        parts = [f"{part} {1e3 * split[f'{part}_seconds']:.3f}" for part in roofline.PARTS]
        lines.append(f"step    batch {split['batch']:>3}  {1e3 * split['step_seconds']:9.3f} ms = {', '.join(parts)}")
    return "\n".join(lines)


# The run


def run(plan: Sequence[Group | Forwards], job: Job, report: Report, prompt_length: int | None) -> None:
    """Measures the plan; what would begin after the report's time limit is noted as skipped."""
    programs = Programs()
    for part in plan:
        if report.is_late():
            report.skip(str(part))
        elif isinstance(part, Forwards):
            run_forwards(part, job, report, prompt_length)
        else:
            run_group(part, job, report, prompt_length, programs)


def run_group(part: Group, job: Job, report: Report, prompt_length: int | None, programs: Programs) -> None:
    """Measures a group's rows and adds them to the report, and updates them after every repeat."""
    before = report.data["rows"]
    prompt, lengths = make_prompts(job.model, part.batch, prompt_length)
    check_lengths(job.model, job.sampler(part.rule, "none"), [[0] * prompt.shape[1]])
    for rows in measure_group(job, part, prompt, lengths, programs):
        rows = [row | {"prompt_tokens": float(np.mean(lengths))} for row in rows]
        report.data["rows"] = with_ratios([*before, *rows])
        report.save()
        if report.is_late() and len(rows) < len(part.entries()):
            report.skip(f"rest of {part}")
            break
        if report.is_late():
            break
    print(format_rows(report.data["rows"][len(before) :]), flush=True)


def run_forwards(part: Forwards, job: Job, report: Report, prompt_length: int | None) -> None:
    """Measures the ceilings, once, and the forwards at one batch."""
    denoiser = job.model.denoiser
    dtype = job.model.denoiser.dtype.name
    if report.data["ceilings"] is None:
        found = roofline.measure_ceilings(dtype, patience=job.patience)
        report.data["ceilings"] = dataclasses.asdict(found)
        report.save()
        print(f"copy {found.copy / 1e9:.1f} GB/s, matmul {found.matmul / 1e12:.3f} TFLOP/s", flush=True)
    ceilings = roofline.Ceilings(**report.data["ceilings"])
    width = int(make_prompts(job.model, part.batch, prompt_length)[0].shape[1])
    setting = roofline.Setting(denoiser, part.batch, width, job.gen_length, job.block_length)
    rows, split = roofline.measure_forwards(
        setting, ceilings, split=part.split, repeats=part.repeats, patience=job.patience
    )
    report.data["forwards"] += rows
    report.data["splits"] += [split] if split else []
    report.save()
    print(format_forwards(rows, split), flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    names = lambda text: [name for name in text.split(",") if name]
    numbers = lambda text: [int(number) for number in names(text)]
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="tiny", help="tiny, a published size (random weights), or a converted folder")
    made.add_argument("--layers", type=int, help="cut a published size to its first layers")
    made.add_argument("--dtype", help="bfloat16, float16 or float32; as stored by default")
    made.add_argument("--batch", type=numbers, default=[1], metavar="N,N", help="batch sizes (default 1)")
    made.add_argument("--prompt-length", type=int, help="random prompts of this many tokens")
    made.add_argument("--gen-length", type=int, default=256)
    made.add_argument("--block-length", type=int, default=32)
    made.add_argument("--rules", type=names, default=[], metavar="RULE,RULE", help="such as threshold,eb:gamma=0.2")
    made.add_argument("--tokens-per-step", type=numbers, default=[], metavar="K,K", help="add topk rules of these k")
    made.add_argument("--caches", type=names, default=list(CACHES), metavar="CACHE,CACHE")
    made.add_argument(
        "--baselines", type=names, default=list(BASELINES), metavar="NAME,NAME", help="python-loop[:cache], ar"
    )
    made.add_argument("--ignore-eos", action="store_true", help="no stop condition; always so with random weights")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--roofline", action="store_true", help="time forwards alone, against measured ceilings")
    made.add_argument("--quantize", choices=["int8", "int4"], help="quantize weights to this many bits")
    made.add_argument("--command-buffers", action="store_true", help="generations as one CUDA graph (NVIDIA GPU)")
    made.add_argument("--suite", choices=["gpu"], help="a fixed plan for one GPU, done in eight minutes")
    made.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing after this")
    made.add_argument(
        "--patience", type=float, default=0.0, metavar="SECONDS", help="wait for a quiet machine before each timing"
    )
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--csv", type=Path, metavar="FILE")
    return made


def check_options(options: argparse.Namespace) -> None:
    """Refuses unknown names before anything is loaded."""
    loops = [name.partition(":")[2] or "none" for name in options.baselines]
    baselines = [name.partition(":")[0] for name in options.baselines]
    for what, given, known in (("cache", [*options.caches, *loops], CACHES), ("baseline", baselines, BASELINES)):
        if unknown := [name for name in given if name not in known]:
            raise DllmError(f"no {what} is called {unknown[0]!r}; choose from {', '.join(known)}")
    for rule in options.rules:
        parse_rule(rule)
    if not (options.rules or options.tokens_per_step or options.roofline or options.suite):
        raise DllmError("nothing to measure; give --rules, --tokens-per-step, --roofline or --suite")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    jax.config.update("jax_enable_compilation_cache", False)  # or compile times would be those of reading a file

    def work() -> None:
        with command_buffers_of(options):
            _measure(options, arguments)

    return status_of(work)


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    check_options(options)
    model = make_model(options.model, options.layers, options.dtype, options.quantize)
    ignore_eos = options.ignore_eos or model.folder is None
    block_length = min(options.block_length, options.gen_length)
    job = Job(model, options.gen_length, block_length, ignore_eos, options.patience)
    limit = options.time_limit or (GPU_SECONDS if options.suite else float("inf"))
    report = Report(describe_run(job, arguments), options.json, options.csv, limit)
    run(make_plan(options), job, report, options.prompt_length)


if __name__ == "__main__":
    sys.exit(main())
