"""A checkpoint in four bits, rounded by GPTQ for what its model sees: `python -m evals quantize`.

Rows are problems of a task's training split or examples of a file, whose answers are masked as LLaDA masks them in
training (arXiv 2502.09992, section 2.3): each with a probability of its own. Kernels are rounded one layer after the
other, and the inputs of a layer are those that the layers before it give as they are rounded (arXiv 2210.17323).
How far the predictions are from the plain model's is measured on other rows: of the task's validation split, or those
of the file that are left.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

import dllm_jax
from convert.hub_folder import copied_files
from dllm_jax import Denoiser, Model, storage
from dllm_jax.checkpoints import checkpoint
from dllm_jax.checkpoints.loading import outline
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.params.gptq import ObservedKernel, quantize_for_inputs
from dllm_jax.params.specs import forms
from evals.flags import add_task, command
from evals.tasks import make_task
from samplers.checks import check_length
from train.batches import batch_of
from train.config import DataPart
from train.data import Setup, Source, count_examples
from train.data.files import jsonl
from train.data.rows import Rows
from train.data.source import lengths_of
from train.losses import Noised
from train.objectives.masked_diffusion import corrupt

_ROUND_KEY, _CHECK_KEY = 0, 1  # purposes of random masks


class Divergence(NamedTuple):
    """KL divergence of predictions from the plain model's, nats per masked token, and its standard error over rows."""

    mean: float
    stderr: float


@dataclasses.dataclass(frozen=True)
class MaskedRows:
    """Masked rows in batches of one shape, the same in every pass.

    Attributes:
        first, count: numbers of the rows.
        key: of the masks.
    """

    rows: Rows
    first: int
    count: int
    batch_size: int
    key: jax.Array

    def __call__(self, denoiser: Denoiser) -> Iterator[Noised]:
        where = SingleDeviceSharding(jax.local_devices()[0])
        for first in range(self.first, self.first + self.count, self.batch_size):
            batch = batch_of(self.rows, first, (1, self.batch_size), where, self.first + self.count)
            batch = jax.tree.map(lambda x: x[0], batch)
            yield corrupt(jax.random.fold_in(self.key, first), batch, denoiser, stratified=True)


def quantize_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    task: str | None = None,
    data: str | Path | None = None,
    n: int = 512,
    batch_size: int = 64,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Divergence]:
    """Writes a plain checkpoint in int4, and compares it with what loading with `quantize=` would give.

    Args:
        model: folder or name of a masked diffusion model without experts.
        out: the new checkpoint's folder.
        task: whose training split the rows come from, as on the command line.
        data: in its place, JSON lines as for training: prompt and answer, messages, or text.
        n: rows to calibrate with, and at most as many to compare with.
        batch_size: rows of a forward.
        seed: another one takes other rows and masks.
        overwrite: replace `out` if it is a checkpoint.
        progress: show a bar on stderr.

    Returns:
        "int8" and "int4", rounded to nearest, and "gptq", what was written; {} for a file without rows left to compare
        with.

    Raises:
        DllmError: for other models, neither or both of task and data, bad numbers, data without examples, and weights
            or inputs that are no numbers; all but the last before anything is computed.
    """
    if (task is None) == (data is None):
        raise DllmError("rows to calibrate with come from --task or from --data; pass one of them")
    check_length("n", n)
    check_length("batch_size", batch_size)
    storage.check_out(out, overwrite=overwrite)
    plain = outline(model)
    assert plain.folder is not None
    config = _check_model(plain)
    used, compared = _batches(plain, task, data, n, batch_size, seed)
    found = dllm_jax.load(plain.folder)
    notes = {"task": task, "data": None if data is None else str(data), "rows": used.count, "seed": seed}
    source = {**checkpoint.load_source(plain.folder), "calibrated": notes}
    tensors = _quantized(found, config, used, progress)
    checkpoint.save(out, config, tensors, files=copied_files(plain.folder), source=source, overwrite=overwrite)
    if compared is None:
        return {}
    load = {
        "int8": lambda: dllm_jax.load(plain.folder, quantize="int8"),
        "int4": lambda: dllm_jax.load(plain.folder, quantize="int4"),
        "gptq": lambda: dllm_jax.load(out),
    }
    return {name: divergence(found.denoiser, make().denoiser, compared) for name, make in load.items()}


def _check_model(model: Model) -> ModelConfig:
    """The config of the model in int4."""
    config = model.config
    checkpoint.require_plain(config, model.folder or model.name, "quantized again")
    if config.experts is not None or config.is_causal or config.has_blocks or config.has_canvas:
        what = "experts" if config.experts is not None else f"{config.attention} attention"
        advice = "round to nearest instead: --quantize int4"
        raise DllmError(f"{model.name} has {what}, and only masked diffusion models without are calibrated; {advice}")
    quantized = config.replace(quantize="int4")
    forms(quantized)
    return quantized


def _batches(
    model: Model, task: str | None, data: str | Path | None, n: int, batch_size: int, seed: int
) -> tuple[MaskedRows, MaskedRows | None]:
    """The rows to calibrate with, and those to compare with."""
    keys = jax.random.split(jax.random.key(seed))
    if task is not None:
        bound = make_task(task).bind(model)
        canvas = bound.answer_width
        part = DataPart(length=bound.prompt_width + canvas, answer_length=canvas if bound.stops else 0, pad=bound.stops)
        sources: list[Source] = [bound.source("train"), bound.source("validation")]
        made = [Rows(source, part, "sft", model.config, seed) for source in sources]
        return (
            MaskedRows(made[0], seed * n, n, batch_size, keys[_ROUND_KEY]),
            MaskedRows(made[1], seed * n, n, batch_size, keys[_CHECK_KEY]),
        )
    source = jsonl(Setup(model.config, model.tokenizer, model.config.max_length), path=str(data))
    count, lengths = count_examples(source), lengths_of(source)
    assert count is not None and lengths is not None
    rows = Rows(source, DataPart(length=max(2, int(lengths.max())), pad=False), "sft", model.config, seed)
    used = MaskedRows(rows, 0, min(n, count), batch_size, keys[_ROUND_KEY])
    left = min(n, count - used.count)
    return used, MaskedRows(rows, used.count, left, batch_size, keys[_CHECK_KEY]) if left else None


def _quantized(model: Model, config: ModelConfig, batches: MaskedRows, progress: bool) -> Iterator[tuple[str, Any]]:
    """The parameters of the model in int4: first what is rounded to nearest, then the kernels of layer after layer."""
    made = forms(config)
    layers: dict[str, list[str]] = {}
    for name, param in model.params.items():
        if name in made and made[name].bits == "int4":
            layers.setdefault(name.split(".")[1], []).append(name)
        else:
            yield from checkpoint.quantize_params([(name, np.asarray(param))], config, model.name)
    params, moments = dict(model.params), _Moments([name for names in layers.values() for name in names])
    for names in tqdm(layers.values(), unit="layer", disable=None if progress else True):
        for name, found in moments.of(dataclasses.replace(model.denoiser, params=dict(params)), names, batches).items():
            if not (np.isfinite(found).all() and bool(jnp.isfinite(params[name]).all())):
                raise DllmError(f"{model.name}: {name} or its inputs contain NaN or infinity; convert it again")
            kernel = quantize_for_inputs(np.asarray(params[name]), found, made[name])
            params[name] = jax.tree.map(jnp.asarray, kernel).dequantize(params[name].dtype)
            yield name, kernel


class _Moments:
    """Second moments of the inputs of kernels, by one compiled program for all layers.

    Args:
        kernels: names of all kernels that it may be asked for.
    """

    def __init__(self, kernels: list[str]) -> None:
        self._kernels = kernels
        self._found: dict[int, np.ndarray] = {}

    def of(self, denoiser: Denoiser, names: list[str], batches: MaskedRows) -> dict[str, np.ndarray]:
        """The moments [in, in] float64 of some kernels, over all rows, by name."""
        self._found = {self._kernels.index(name): np.zeros((denoiser.params[name].shape[0],) * 2) for name in names}
        numbers = {name: np.int32(at if at in self._found else -1) for at, name in enumerate(self._kernels)}
        for batch in batches(denoiser):
            jax.block_until_ready(_observe(denoiser, numbers, batch.inputs, batch.lengths, self._report))
            jax.effects_barrier()
        return {self._kernels[at]: moments for at, moments in self._found.items()}

    def _report(self, number: Any, moments: Any) -> None:
        self._found[int(number)] += np.asarray(moments)


@functools.partial(jax.jit, static_argnames="report")
def _observe(
    denoiser: Denoiser,
    numbers: Mapping[str, Any],
    inputs: jax.Array,
    lengths: jax.Array,
    report: Callable[[Any, Any], None],
) -> jax.Array:
    """Hidden states of a forward whose kernels report the moments of their inputs, those with a number from 0 on."""
    counted = jnp.arange(inputs.shape[1]) < lengths[:, None]
    observed = {
        name: ObservedKernel(denoiser.params[name], number, counted, report) for name, number in numbers.items()
    }
    return dataclasses.replace(denoiser, params={**denoiser.params, **observed}).forward(inputs, lengths)[0]


def divergence(plain: Denoiser, quantized: Denoiser, batches: MaskedRows) -> Divergence:
    """How far a model's predictions of masked tokens are from the plain one's."""
    pairs = [np.stack(_divergences(plain, quantized, batch), -1) for batch in batches(plain)]
    sums, counts = np.concatenate(pairs).astype(np.float64)[: batches.count].T
    mean = sums.sum() / counts.sum()
    return Divergence(float(mean), float(np.sqrt(np.sum((sums - mean * counts) ** 2)) / counts.sum()))


@jax.jit
def _divergences(plain: Denoiser, quantized: Denoiser, batch: Noised) -> tuple[jax.Array, jax.Array]:
    """Of each row the sum of the divergences at masked positions, and how many there are, [B] float32 each."""
    wanted, found = (jax.nn.log_softmax(x(batch.inputs, batch.lengths)) for x in (plain, quantized))
    masked = batch.weights > 0
    each = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    return jnp.sum(jnp.where(masked, each, 0.0), axis=1), jnp.sum(masked, axis=1).astype(jnp.float32)


def add(commands: Any) -> None:
    """The command `python -m evals quantize`."""
    flag = command(commands, "quantize", _run, "write a checkpoint in int4, rounded for the inputs that its model sees")
    flag("--model", required=True, metavar="DIR_OR_NAME", help="converted checkpoint of a masked diffusion model")
    add_task(flag, required=False)
    flag("--data", metavar="FILE", help="instead of --task, JSON lines as for training: prompt and answer, or messages")
    flag("--out", required=True, metavar="DIR", help="folder of the new checkpoint")
    flag("--n", type=int, default=512, metavar="N", help="rows to calibrate with (default: 512)")
    flag("--batch-size", type=int, default=64, metavar="N", help="rows of a forward (default: 64)")
    flag("--seed", type=int, default=0, metavar="N", help="of the choice of rows and of their masks (default: 0)")
    flag("--overwrite", action="store_true", help="replace --out if it holds a checkpoint")
    flag("--json", action="store_true", help="print the divergences as JSON")
    flag("--no-progress", action="store_true", help="no progress bar")


def _run(options: argparse.Namespace) -> None:
    names = ("task", "data", "n", "batch_size", "seed", "overwrite")
    chosen = {name: getattr(options, name) for name in names}
    found = quantize_checkpoint(options.model, options.out, progress=not options.no_progress, **chosen)
    if options.json:
        print(json.dumps({name: one._asdict() for name, one in found.items()}))
        return
    for name, one in found.items():
        print(f"{name}: {one.mean:.5f} ± {one.stderr:.5f} nats per masked token from the plain model")
    print(f"{options.out}: written")
