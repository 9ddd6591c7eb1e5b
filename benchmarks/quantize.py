"""Weights in 8 and 4 bits: what they cost in accuracy, and what they save in bytes.

    python -m benchmarks.quantize --json benchmarks/results/quantize.json

Three tables. `sizes`: bytes of published models, by shapes alone. `divergence`: of each embedded model, how far its
distribution at masked positions moves from that of float32 weights (KL divergence, and how often the best token is
another), with table of embeddings and vocabulary head treated in several ways, on examples with half of the answer
masked. `rows`: problems solved, in float32, int8 and int4 as the library makes them.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import evals
from benchmarks import command
from convert import embedded
from dllm_jax import Denoiser, DllmError, Model, published
from dllm_jax.config import Quantize
from dllm_jax.models.transformer import param_specs
from dllm_jax.params.quantized import num_bytes, quantized_on_host
from dllm_jax.params.specs import abstract_params, form_of
from evals.tasks import make_task
from samplers.engine.runner import Engines
from samplers.text.prompts import pad_prompts

Row = dict[str, Any]

TASKS = {
    "word-problems": "word-problems",
    "long-problems": "word-problems:difficulty=long",
    "sudoku": "sudoku:box_rows=2,box_columns=3",
    "maze": "maze:size=4",
}
SAMPLERS = ("threshold:threshold=0.9", "topk")
PUBLISHED = ("llada-8b-instruct", "dream-7b-instruct", "llada-moe-7b-a1b-instruct")
TABLE, HEAD = "embed.embedding", "lm_head.kernel"
VARIANTS: dict[str, tuple[Quantize, Quantize | None, Quantize | None]] = {
    "int8 layers": ("int8", None, None),
    "int8 layers, head": ("int8", None, "int8"),
    "int8 layers, table": ("int8", "int8", None),
    "int8": ("int8", "int8", "int8"),
    "int4 layers": ("int4", None, None),
    "int4": ("int4", "int8", "int8"),
    "int4 layers, head": ("int4", "int8", "int4"),
    "int4 layers, table": ("int4", "int4", "int8"),
}
"""Bits of the layers' kernels, the table and the head; "int8" and "int4" are the library's."""


def sizes(name: str) -> Row:
    """GiB of a published model in bfloat16 and quantized, and of what is in it."""
    config = published(name)
    row: Row = {"model": name}
    for bits in (None, "int8", "int4"):
        params = abstract_params(config.replace(quantize=bits), "bfloat16")
        row[bits or "bfloat16"] = round(num_bytes(params) / 2**30, 3)
    ends = num_bytes([abstract_params(config, "bfloat16")[part] for part in (TABLE, HEAD)])
    return row | {"table and head in bfloat16": round(ends / 2**30, 3)}


def variant(model: Model, layers: Quantize, table: Quantize | None, head: Quantize | None) -> Denoiser:
    """A plain model with its parts quantized."""
    params = dict(model.params)
    for name, spec in param_specs(model.config).items():
        bits = {TABLE: table, HEAD: head}.get(name, layers)
        if spec.shared is not None and bits is not None:
            kernel = quantized_on_host(np.asarray(params[name]), form_of(name, spec, bits))
            params[name] = jax.tree.map(jnp.asarray, kernel)
    return Denoiser(model.config, params)


def divergence(name: str, n: int) -> Iterator[Row]:
    """A row for each variant."""
    model = embedded.load(name)
    tokens, lengths, asked = masked_examples(model, TASKS[name], n)
    logits = jax.jit(lambda denoiser: jax.nn.log_softmax(denoiser(tokens, lengths)[asked]))
    exact = logits(model.denoiser)
    for label, parts in VARIANTS.items():
        found = logits(variant(model, *parts))
        apart = jnp.sum(jnp.exp(exact) * (exact - found), axis=-1)
        other = jnp.argmax(exact, axis=-1) != jnp.argmax(found, axis=-1)
        told = {"positions": len(apart), "nats": float(apart.mean()), "other_token": float(other.mean())}
        yield {"model": name, "weights": label, **told}


def masked_examples(model: Model, task_text: str, n: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Test examples with half of what is asked masked: tokens [n, S], lengths [n], and the masked positions [n, S]."""
    task, rng = make_task(task_text).bind(model), np.random.default_rng(0)
    examples = [task.example("test", i) for i in range(n)]
    hidden = [example.targets & (rng.random(len(example.answer_ids)) < 0.5) for example in examples]
    masked = [np.where(h, model.denoiser.mask_id, e.answer_ids) for h, e in zip(hidden, examples, strict=True)]
    rows = [[*e.prompt_ids.tolist(), *m.tolist()] for e, m in zip(examples, masked, strict=True)]
    asked = [[0] * len(e.prompt_ids) + h.astype(int).tolist() for e, h in zip(examples, hidden, strict=True)]
    tokens, lengths = pad_prompts(rows, max(map(len, rows)))
    return tokens, lengths, np.asarray(pad_prompts(asked, tokens.shape[1])[0]) == 1


def scores(name: str, n: int, samplers: Sequence[str]) -> Iterator[Row]:
    """A row for each sampler and kind of weights, with what was solved by one kind alone."""
    task, engines = make_task(TASKS[name]), Engines()
    examples = [task.bind(embedded.load(name)).example("test", i) for i in range(n)]
    for sampler in samplers:
        exact: list[bool] = []
        for quantize in (None, "int8", "int4"):
            model = embedded.load(name, quantize=quantize)
            report = evals.run(model, task, sampler, n=n, batch_size=64, examples=examples, engines=engines)
            right = [row.correct for row in report.rows]
            exact = exact or right
            pairs = list(zip(exact, right, strict=True))
            row = {key: getattr(report, key) for key in ("task", "sampler", "n", "accuracy", "accuracy_stderr", "nfe")}
            lost = {"lost": sum(a and not b for a, b in pairs), "won": sum(b and not a for a, b in pairs)}
            found = {"model": name, "weights": quantize or "float32", **row, **lost}
            print_rows([found])
            yield found


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured, as it is written to the file."""
    names = [name for name in options.models.split(",") if name]
    for name in names:
        if name not in TASKS:
            raise DllmError(f"no embedded model is called {name!r}; choose from {', '.join(TASKS)}")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    samplers = options.samplers or SAMPLERS
    new = lambda row: row["model"] in names and row.get("sampler", samplers[0]) in samplers
    kept = lambda table: [row for row in before.get(table, ()) if not new(row)]
    return {
        "command": f"python -m benchmarks.quantize --n {options.n}{' --no-scores' * options.no_scores}",
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {"jax": version("jax")},
        "sizes": [sizes(name) for name in PUBLISHED],
        "divergence": kept("divergence") + [row for name in names for row in divergence(name, min(options.n, 256))],
        "rows": kept("rows")
        + [row for name in names for row in ([] if options.no_scores else scores(name, options.n, samplers))],
    }


def print_rows(rows: Sequence[Row]) -> None:
    """A line per score."""
    for row in rows:
        accuracy = f"{100 * row['accuracy']:.2f} +- {100 * row['accuracy_stderr']:.2f} %"
        changed = f"{row['lost']} lost, {row['won']} won"
        print(
            f"{row['model']:14} {row['sampler']:24} {row['weights']:8} {accuracy}, {changed}, {row['nfe']:.2f} forwards"
        )


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", default=",".join(TASKS), help="embedded models; the file keeps what it has of others")
    both = " and ".join(SAMPLERS)
    made.add_argument("--sampler", dest="samplers", action="append", metavar="SPEC", help=f"default: {both}")
    made.add_argument("--n", type=int, default=2000, help="problems of each (default 2000)")
    made.add_argument(
        "--no-scores", action="store_true", help="sizes and divergence alone; scores take hours on two cores"
    )
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    options = parser().parse_args(arguments)
    options.dtype = "float32"
    return command.run(options, report, lambda rows: None)


if __name__ == "__main__":
    raise SystemExit(main())
