"""The settings of every training run; each objective adds its own, see `train.objectives`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from dllm_jax.errors import DllmError
from train.settings import check_ranges, setting

Kind = Literal["sft", "pretrain", "prompts", "pairs"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "layers", "matmuls"]
Scan = Literal["auto", "on", "off"]
Weights = Literal["ema", "raw"]
OnBad = Literal["refuse", "drop"]
Optimizer = Literal["adamw", "muon"]
WriterName = Literal["tensorboard", "wandb"]
Schedule = Literal["cosine", "wsd", "linear", "constant"]


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """What is trained.

    Attributes:
        init: a converted or trained checkpoint to start from, by folder or name; empty starts from random weights.
        adapt: a published config whose kind the model of `init` becomes, with its own sizes: "dream-7b-base" makes a
            shifted diffusion model of a causal one, as Dream was made of Qwen2.5 (arXiv 2508.15487),
            "fast-dllm-v2-1.5b" a block diffusion model of it, "sdar-8b-chat" one of Qwen3 without the shift,
            "qwen2.5-0.5b" a causal one of any. Weights stay as they are; biases that the kind has and the checkpoint
            lacks start at 0. A model without a mask token takes the kind's, or `config.mask_id`.
        published: the published config that supplies the fields which `config` leaves out (not with `init`).
        config: fields of `ModelConfig`, such as {embed_dim = 128, num_layers = 4}. With `init` only `max_length` and
            `rope_theta`, for training on longer rows than before, and `mask_id` where the checkpoint has none. A task
            that is the data source fills in the vocabulary's size and special ids.
        tokenizer: folder whose tokenizer files text is encoded with and the trained model gets; by default those of
            `init` or of the task.
        freeze: shell patterns of parameters that stay as they are where others are trained, such as "*.moe.router*".
    """

    init: str = ""
    adapt: str = ""
    published: str = "llada-8b-base"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str = ""
    freeze: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class DataPart:
    """What it is trained on.

    Attributes:
        source: "text", "jsonl", "parquet", "arrayrecord", "datasets" or "trajectories" (see `train.data`), a "mixture"
            of such, or "module:name" of a callable that makes a source or a task, such as "evals.tasks:make_task".
        options: arguments of the source.
        length: positions per row, prompt and answer together. Without `bucket` every row has exactly this length.
        pack: put several whole examples into each row, as many as fit. None of them sees another, and each one's
            positions begin at 0. Documents of pre-training that are longer than a row are cut.
        bucket: put rows of similar length into a batch, whose length is the longest row's, rounded up to a multiple of
            this. One program is compiled for each length. 0 takes rows as they come.
        answer_length: positions of the canvas after each prompt; 0 extends it to the end of the row. For trajectories
            the longest canvas, outside of which an indicator computes nothing.
        pad: fill the canvas after the answer with end tokens that are masked and learned like the answer, as LLaDA's
            SFT does. False leaves them out: not attended to, no loss. The canvas of a trajectory is never filled.
        random_length: share of the rows that are cut to a random length (LLaDA's pre-training: 0.01).
        shuffle: go through a finite source in a new order each epoch.
        workers: processes that compute rows and tokenise text; 0 does so in this one, where a thread computes rows
            ahead. The batches are the same for every number. Of GRPO only text is tokenised so: rollouts are its
            batches. The source must be one that can be pickled.
        cache: folder for tokenised text, by default $DLLM_JAX_HOME/data (see `train.data.cache`).
        heldout: share of the examples of a finite source that are never trained on, for the loss that `watch` reports.
            A hash of an example's tokens decides, so no example changes sides when the data grow.
        on_bad: what happens if examples of a finite source make no row (too long, empty, no JSON ...). All are found
            before the first step. "refuse" ends the run, "drop" leaves them out and lists them in out/dropped.txt.
    """

    source: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    length: int = setting(128, at_least=2)
    answer_length: int = setting(0, at_least=0)
    pad: bool = True
    random_length: float = setting(0.0, at_least=0, at_most=1)
    shuffle: bool = True
    pack: bool = False
    bucket: int = setting(0, at_least=0)
    workers: int = setting(0, at_least=0, on_resume="free")
    cache: str = setting("", on_resume="free")
    heldout: float = setting(0.0, at_least=0, at_most=0.9)
    on_bad: OnBad = "refuse"


@dataclasses.dataclass(frozen=True)
class UnfilledDataPart(DataPart):
    """`DataPart`, whose rows end with their answers by default."""

    pad: bool = False


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """The optimiser, its learning rate and its averages.

    Attributes:
        name: "adamw", or "muon" for the matrices of the layers and AdamW for the rest.
        lr: highest learning rate, reached after `warmup` steps.
        warmup: steps in which the learning rate rises from 0.
        schedule: what comes after: "cosine" and "linear" fall all the way to the end; "wsd" (warm-up, stable, decay)
            stays and falls linearly in the last `decay` of the steps, as in LLaDA's SFT (arXiv 2502.09992, appendix B);
            "constant" stays.
        decay: share of all steps in which "wsd" falls.
        final_ratio: the learning rate at the end over the highest, of all schedules but "constant".
        b1, b2: decay of AdamW's means of the gradient and of its square; Muon's momentum is its own.
        eps: what AdamW adds to the square root that it divides by.
        weight_decay: of matrices only, never of norms and biases.
        clip: largest global norm of the gradient; 0 does not clip.
        skip: steps in a row that may be skipped because their loss or gradient is not finite; one more ends the run. A
            run of which most steps were skipped fails. A skipped step changes nothing and is counted in the metrics; no
            state is written meanwhile.
        ema: decay of the moving average of the weights, 0 keeps none. In the first steps it is
            (1 + step) / (10 + step) if that is less.
        moments: dtype of the moments between steps. "bfloat16" halves their memory and needs b1 and b2 of at most 0.98:
            a moment must change more in a step than rounding loses.
        batch: rows per step.
        accumulate: parts that a step's batch is computed in, one after another.
    """

    name: Optimizer = setting("adamw", on_resume="never")
    lr: float = setting(1e-3, at_least=0)
    warmup: int = setting(100, at_least=0)
    schedule: Schedule = "cosine"
    decay: float = setting(0.1, at_least=0, at_most=1)
    final_ratio: float = setting(0.1, at_least=0, at_most=1)
    b1: float = setting(0.9, at_least=0, at_most=0.9999999)
    b2: float = setting(0.95, at_least=0, at_most=0.9999999)
    eps: float = setting(1e-8, at_least=0)
    weight_decay: float = setting(0.1, at_least=0)
    clip: float = setting(1.0, at_least=0)
    skip: int = setting(10, at_least=0)
    ema: float = setting(0.0, at_least=0, at_most=0.9999999)
    moments: Dtype = setting("float32", on_resume="never")
    batch: int = setting(64, at_least=1)
    accumulate: int = setting(1, at_least=1)


@dataclasses.dataclass(frozen=True)
class ComputePart:
    """How it is computed; the master weights are always float32.

    Attributes:
        dtype: of the forward and backward pass.
        remat: "none" keeps all activations for the backward pass, "layers" only each layer's input, "matmuls" also the
            results of matrix products. All keep what this library's kernel of attention on TPUs computes.
        scan: "on" runs the layers as a loop, which is compiled once instead of once a layer, and for which the weights
            are copied in `dtype` (as they are anyway where all are trained); "auto" does so on TPUs, whose compiler
            takes minutes a layer, and of experts on several GPUs, whose compiler would gather the experts of many
            layers at once; "off" never.
        mesh: sizes of the mesh axes, such as {data = 2, fsdp = 2, tensor = 2}; empty is one device.
    """

    dtype: Dtype = "float32"
    remat: Remat = "none"
    scan: Scan = "auto"
    mesh: dict[str, int] = setting(default_factory=dict, on_resume="free")


@dataclasses.dataclass(frozen=True)
class LoraPart:
    """Low-rank adapters (arXiv 2106.09685) instead of all weights.

    Attributes:
        rank: 0 trains all weights.
        alpha: the adapters' product counts alpha / rank times.
        dropout: share of the adapters' inputs that are left out in training, in [0, 1).
        targets: "attention", "mlp", "all-linear" (both, not the vocabulary's head), or shell patterns of parameter
            names such as "layers.0.attn.q_proj.kernel"; a pattern after "!" excludes its names from those before.
        init: folder of adapters to start from, of the same model, rank, alpha and kernels; by default they begin at 0.
    """

    rank: int = setting(0, at_least=0, on_resume="never")
    alpha: float = 16.0
    dropout: float = setting(0.0, at_least=0, at_most=0.9999999)
    targets: tuple[str, ...] = setting(("*.attn.[qkvo]_proj.kernel",), on_resume="never")
    init: str = setting("", on_resume="never")

    @property
    def scale(self) -> float:
        """How often the product counts."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class RouterPart:
    """Losses of the routers of a mixture of experts, added to the objective's, over the positions that count and that
    the trained model reads; with either, `balance`, `router_z` and `largest_expert` (its share) are reported.

    For routers that choose by a softmax (LLaDA-MoE, SDAR). LLaDA2's balances its experts by the bias of a sigmoid,
    which no gradient changes.

    Attributes:
        balance: weight of the load-balancing loss (arXiv 2101.03961, equation 4), 1 where experts are used alike.
        z: weight of the mean square of logsumexp of the router's scores (arXiv 2202.08906, equation 5).
    """

    balance: float = setting(0.0, at_least=0)
    z: float = setting(0.0, at_least=0)


@dataclasses.dataclass(frozen=True)
class CheckpointPart:
    """What is kept.

    Attributes:
        every: steps between training states.
        keep: how many of the latest states stay on the disk.
        keep_every: states of steps that are multiples of this stay as well; 0 for none.
        best: how many of the best states by `metric` stay as well. One of `every` and `watch.every` is a multiple of
            the other; a state without an evaluation at its step is none of the best.
        metric: a number that evaluations report, such as "heldout_loss", or "heldout_ema_loss" where `weights` is
            "ema". On held-out rows lower is better, but of auc, precision and recall higher; of a task's numbers higher
            is better, but of nfe and of names that end in "loss" or "perplexity" lower.
        weights: what the trained model holds: "ema", the moving average, or "raw", the last weights.
    """

    every: int = setting(500, at_least=1)
    keep: int = setting(2, at_least=1)
    keep_every: int = setting(0, at_least=0)
    best: int = setting(0, at_least=0)
    metric: str = ""
    weights: Weights = "raw"

    @property
    def lower_is_better(self) -> bool:
        """Whether the best states are those where `metric` is low."""
        if self.metric.startswith("heldout_"):
            return not self.metric.endswith(("auc", "precision", "recall"))
        return self.metric.endswith(("nfe", "loss", "perplexity"))


@dataclasses.dataclass(frozen=True)
class LogPart:
    """What is logged.

    Attributes:
        every: steps between lines of metrics; the host waits for the device only then.
        mfu: report the share of the device's peak that training uses. The peak is the data sheet's, or if
            `train.device_peaks` has none, the rate of matrix products that is measured at the start.
        to: where metrics and generations are logged besides the run's files: "tensorboard", "wandb".
    """

    every: int = setting(10, at_least=1)
    mfu: bool = True
    to: tuple[WriterName, ...] = ()


@dataclasses.dataclass(frozen=True)
class WatchPart:
    """What is evaluated during a run; none of it changes the run.

    Rows that are never trained on give a held-out loss: those of `data.heldout`, of another source, or of the
    validation split if the data source is a task.

    Attributes:
        every: steps between evaluations, which also come before the first and after the last step; 0 switches them off.
        source, options: other data for the held-out loss, of a task its validation split. The other settings of `data`
            hold for it too.
        rows: most rows for the held-out loss.
        prompts: texts that are answered at every evaluation.
        file: more texts, one a line, as `python -m samplers --prompts` reads them.
        chat: whether texts are a user's messages in the model's chat format.
        task: a task of `evals`, such as "word-problems:difficulty=long", whose accuracy is reported.
        split, n: which of its examples, and how many.
        sampler: the sampler of answers, such as "threshold:threshold=0.9,cache=dual". By default the one in the trained
            model's generation.json answers prompts, and "threshold" without a cache problems; "leftright" answers for a
            causal model, and "ni" for an indicator in training.
        scorer: "module:name" of what makes the task's `train.evaluation.TaskScorer`.
    """

    every: int = setting(0, at_least=0)
    source: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = setting(256, at_least=1)
    prompts: tuple[str, ...] = ()
    file: str = ""
    chat: bool = False
    task: str = ""
    split: str = "validation"
    n: int = setting(128, at_least=1)
    sampler: str = ""
    scorer: str = "evals.watching:Accuracy"


class ObjectiveSettings(Protocol):
    """The table `objective`, of which each command has its own.

    Attributes:
        kind: "sft" never masks the prompt; "pretrain" treats it as the rest of the document; "prompts" uses only the
            given positions of answers; "pairs" are a better and a worse answer of a prompt.
    """

    @property
    def kind(self) -> Kind: ...


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A whole run. Each objective has a class of it with its own settings.

    Attributes:
        out: output folder; running the same config again continues there.
        steps: optimiser steps in all; a resumed run may have more, which stretches the learning rate's decay.
        seed: of initial weights, noise and order of the data.
        command: the command that the settings are of.
    """

    out: str = setting(on_resume="free")
    steps: int = setting(at_least=1, on_resume="grow")
    seed: int = setting(0, at_least=0, at_most=2**31 - 1)
    model: ModelPart = setting(default_factory=ModelPart, on_resume="never")
    data: DataPart = dataclasses.field(default_factory=DataPart)
    objective: ObjectiveSettings = dataclasses.field(kw_only=True)
    optimizer: OptimizerPart = dataclasses.field(default_factory=OptimizerPart)
    compute: ComputePart = dataclasses.field(default_factory=ComputePart)
    lora: LoraPart = dataclasses.field(default_factory=LoraPart)
    router: RouterPart = dataclasses.field(default_factory=RouterPart)
    checkpoint: CheckpointPart = setting(default_factory=CheckpointPart, on_resume="free")
    log: LogPart = setting(default_factory=LogPart, on_resume="free")
    watch: WatchPart = setting(default_factory=WatchPart, on_resume="free")
    command: str = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        _check_finite(dataclasses.asdict(self))
        check_ranges(self)
        if self.optimizer.batch % self.optimizer.accumulate:
            raise DllmError(
                f"optimizer.batch {self.optimizer.batch} does not split into optimizer.accumulate "
                f"{self.optimizer.accumulate} equal parts; choose a multiple"
            )
        _check_optimizer(self.optimizer, self.steps)
        if self.checkpoint.weights == "ema" and not self.optimizer.ema:
            raise DllmError('checkpoint.weights is "ema" but optimizer.ema is 0; set a decay such as 0.999')
        _check_kept(self.checkpoint, self.watch)
        if self.data.answer_length > self.data.length:
            raise DllmError(f"data.answer_length exceeds data.length {self.data.length}; lower it")
        if self.data.pack:
            _check_packing(self.data)
        if self.data.heldout and self.watch.source:
            raise DllmError("data.heldout and watch.source both give rows for the loss of watch; set one of them")


def _check_packing(part: DataPart) -> None:
    for name in ("bucket", "random_length"):
        if getattr(part, name):
            raise DllmError(f"data.pack fills rows with whole examples; set data.{name} to 0")
    check_canvas(part, "data.pack")


def check_canvas(part: DataPart, why: str) -> None:
    """Raises DllmError where rows of several documents would be filled up to their ends."""
    if part.pad and not part.answer_length:
        raise DllmError(
            f"data.pad fills the rest of a row, and with {why} the next answer begins there; set data.pad to false, or "
            "data.answer_length to the length of each canvas"
        )


def _check_kept(part: CheckpointPart, watch: WatchPart) -> None:
    """Raises DllmError for states that are to stay and that no run of these settings has."""
    if part.keep_every % part.every:
        raise DllmError(
            f"checkpoint.keep_every {part.keep_every} is no multiple of checkpoint.every {part.every}, the steps that "
            "have a state; choose a multiple"
        )
    if part.best and not part.metric:
        raise DllmError('checkpoint.best is set and no metric; set checkpoint.metric, such as "heldout_loss"')
    if part.metric and not part.best:
        raise DllmError("checkpoint.metric is set and checkpoint.best is 0; set how many of the best states stay")
    if part.best and not watch.every:
        raise DllmError("checkpoint.best needs evaluations, and watch.every is 0; set it to checkpoint.every")
    if part.best and part.every % watch.every and watch.every % part.every:
        raise DllmError(
            f"checkpoint.best compares states at evaluations, and few steps have both: set checkpoint.every "
            f"{part.every} to a multiple of watch.every {watch.every}, or the other way round"
        )


def _check_finite(settings: Mapping[str, Any], prefix: str = "") -> None:
    """Raises DllmError for a number that is infinite or NaN, also in float32, in which steps are computed."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _check_finite(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not abs(value) <= _LARGEST:
            raise DllmError(f"{prefix}{name} is {value}; it must be a finite number of float32, at most {_LARGEST:.4g}")


_LARGEST = float(np.finfo(np.float32).max)


def _check_optimizer(part: OptimizerPart, steps: int) -> None:
    if part.warmup > steps:
        raise DllmError(f"optimizer.warmup {part.warmup} is longer than the {steps} steps; lower it")
    if part.schedule != "wsd" and part.decay != OptimizerPart.decay:
        raise DllmError(f'optimizer.decay is for optimizer.schedule "wsd", and it is "{part.schedule}"; leave it out')
    if part.schedule == "wsd" and part.warmup + round(part.decay * steps) > steps:
        raise DllmError(
            f"optimizer.warmup {part.warmup} and optimizer.decay {part.decay:g} of {steps} steps are longer than the "
            "run; lower them"
        )
    for name, value in (("b1", part.b1), ("b2", part.b2)):
        if part.moments == "bfloat16" and value > _MOST_ROUNDED:
            raise DllmError(
                f"optimizer.{name} is {value:g}, and bfloat16 moments round away what changes so slowly; lower it to "
                f'{_MOST_ROUNDED:g}, or set optimizer.moments to "float32"'
            )


_MOST_ROUNDED = 0.98  # with 8 bits a moment stops where it is wrong by a tenth: half of 1/256 over 1 - 0.98
