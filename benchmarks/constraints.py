"""What a constraint costs: CPU seconds of a generation with and without one, on the same prompts and as many forwards,
and of compiling tables for a vocabulary of 126,000 tokens.

    python -m benchmarks.constraints --model word-problems --json benchmarks/results/constraints-cpu.json

Processor time of the process, not wall time, because other processes may share the machine. Both sides alternate; the
ratio is that of each pair.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import dllm_jax
from benchmarks import command
from evals import stderr
from samplers import BlockSampler, TopK, constraint_for, sample_jit
from samplers.constraints.automaton import bytes_of, constraint_of, schema_regex
from samplers.text.prompts import pad_prompts

QUESTION = "Q: Sam has 26 nuts. Sam buys 10. Sam keeps one of 3 equal parts.\nA: "
FORMS: dict[str, dict[str, Any]] = {
    "steps": {"regex": r"([0-9]{1,3}[-+*/][0-9]{1,3}=[0-9]{1,3}\. ){2}#### [0-9]{1,3}"},
    "any JSON object": {"json_schema": {"type": "object"}},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FIELDS = [f"field_{i}" for i in range(12)]
SCHEMAS: dict[str, dict[str, Any]] = {
    "name and age": PERSON,
    "any JSON object": {"type": "object"},
    "12 fields": {"type": "object", "properties": dict.fromkeys(FIELDS, {"type": "string"}), "required": FIELDS},
}


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    rows = [*_generations(options), *_tables()]
    shared = "CPU time; other processes ran on the machine"
    return {"rows": rows, "machine": platform.processor(), "jax": jax.__version__, "measured": shared}


def _generations(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = dllm_jax.load(options.model)
    prompt, lengths = pad_prompts([[*model.require_tokenizer()(QUESTION)["input_ids"]]] * options.batch, 96)

    def seconds(sampler: BlockSampler) -> tuple[float, int]:
        start = time.process_time()
        result = jax.block_until_ready(sample_jit(sampler, model.denoiser, prompt, lengths))
        return time.process_time() - start, int(result.nfe.sum())

    rows = []
    plain = BlockSampler(TopK(1), options.gen_length)
    for name, form in FORMS.items():
        made = constraint_for(
            model.require_tokenizer(),
            model.config.vocab_size,
            model.config.end_ids,
            **form,
        )
        bound = BlockSampler(TopK(1), options.gen_length, constraint=jax.tree.map(jnp.asarray, made))
        pairs = [(seconds(bound), seconds(plain)) for _ in range(options.repeats + 1)][1:]  # the first compiles
        assert all(one[1] == other[1] for one, other in pairs)
        ratios = [one[0] / other[0] for one, other in pairs]
        rows.append(
            {
                "what": f"generation, {name}",
                "states_classes": made.used,
                "forwards": pairs[0][0][1],
                "cpu_seconds": statistics.median(one[0] for one, _ in pairs),
                "ratio": statistics.mean(ratios),
                "ratio_stderr": stderr.of_mean(ratios),
                "n": len(ratios),
            }
        )
    return rows


def _tables() -> list[dict[str, Any]]:
    pieces, rows = _vocabulary(126_000), []
    for name, schema in SCHEMAS.items():
        machine, start = bytes_of(schema_regex(schema)), time.process_time()
        made = constraint_of(machine, pieces, [len(pieces) - 1])
        seconds = time.process_time() - start
        rows.append({"what": f"tables, {name}", "states_classes": made.used, "cpu_seconds": seconds})
    return rows


def _vocabulary(size: int) -> list[bytes]:
    """Single bytes, words with and without a space before them, numbers, punctuation and other alphabets; at the end a
    token without bytes."""
    draw, found = random.Random(0), dict.fromkeys(bytes([byte]) for byte in range(256))
    letters, marks = "etaoinshrdlucmfwypvbgkjqxz", '"{}[]:,.\\/ \n\t-_()<>='
    while len(found) < size - 1:
        kind, length = draw.random(), max(1, round(draw.gauss(6, 3)))
        text = "".join(draw.choices(letters, k=length))
        if kind < 0.1:
            text = "".join(draw.choices(marks, k=draw.randint(1, 6)))
        elif kind < 0.15:
            text = "".join(chr(draw.randint(0x400, 0x2FFF)) for _ in range(draw.randint(1, 4)))
        elif kind < 0.2:
            text = str(draw.randint(0, 999)) + text[:2]
        found[(" " * draw.randint(0, 1) + text).encode()] = None
    return [*found, b""]


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(json.dumps(row))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when it worked, 2 after a mistake, which is printed as one sentence."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constraints", description=__doc__)
    parser.add_argument("--model", default="word-problems", help="an embedded model, or a folder")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--gen-length", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return command.run(parser.parse_args(arguments), report, show)


if __name__ == "__main__":
    sys.exit(main())
