"""The settings of a training run: frozen dataclasses, read from a TOML file and `key=value` overrides.

Nothing is guessed: an unknown key is refused with the nearest known one, a value of another type with the type wanted.
"""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from dllm_jax.errors import DllmError

T = TypeVar("T")

Range = tuple[str, float, float]
Kind = Literal["sft", "pretrain"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "layers", "matmuls"]
Scan = Literal["auto", "on", "off"]
Weights = Literal["ema", "raw"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["monotone", "random"]
Target = Literal["teacher", "data"]


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """What is trained.

    Attributes:
        init: a converted or trained checkpoint to start from, by folder or name; empty starts from random weights.
        adapt: a published config whose kind the model of `init` becomes, with its own sizes: "dream-7b-base" makes a
            shifted diffusion model of a causal one, as Dream was made of Qwen2.5 (arXiv 2508.15487), "qwen2.5-0.5b" a
            causal one of any. Biases that the kind has and the checkpoint lacks start at 0.
        published: the published config whose fields hold where `config` is silent (not with `init`).
        config: fields of `ModelConfig`, such as {embed_dim = 128, num_layers = 4} (not with `init`). A task that is
            the data source fills in the vocabulary's size and special ids.
        tokenizer: folder whose tokenizer files text is encoded with and the trained model gets; by default those of
            `init` or of the task.
    """

    init: str = ""
    adapt: str = ""
    published: str = "llada-8b-base"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str = ""


@dataclasses.dataclass(frozen=True)
class DataPart:
    """What it is trained on.

    Attributes:
        source: "text", "jsonl", "datasets" or "trajectories" (see `train.data`), or "module:name" of a callable that
            makes a source or a task, such as "evals.tasks:make_task".
        options: arguments of the source.
        length: positions per row, prompt and answer together; every row has exactly so many.
        answer_length: positions of the canvas behind each prompt; 0 makes it reach to the end of the row. Of
            trajectories the longest canvas, by which an indicator computes nothing beside it.
        pad: fill the canvas behind the answer with end tokens that are masked and learned like the answer, as LLaDA's
            SFT does. False leaves them out: not attended to, no loss. The canvas of a trajectory is never filled up.
        random_length: share of the rows that are cut to a random length (LLaDA's pre-training: 0.01).
        shuffle: go through a finite source in a new order each epoch.
    """

    source: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    length: int = 128
    answer_length: int = 0
    pad: bool = True
    random_length: float = 0.0
    shuffle: bool = True


@dataclasses.dataclass(frozen=True)
class ObjectivePart:
    """The loss, see `train.objective`.

    Attributes:
        kind: "sft" never masks the prompt; "pretrain" treats it as the rest of the document.
        eps: least mask probability; t ~ U(eps, 1) per row.
        stratified: spread the t of a batch evenly over (eps, 1) instead of drawing them independently; each is still
            uniform, the loss is as true and varies less.
        chunk: positions whose logits exist at a time, for large vocabularies; 0 computes the logits of all positions.
    """

    kind: Kind = "sft"
    eps: float = 1e-3
    stratified: bool = False
    chunk: int = 0

    ranges: ClassVar[tuple[Range, ...]] = (("eps", 1e-6, 1.0), ("chunk", 0, math.inf))


@dataclasses.dataclass(frozen=True)
class D2FPart:
    """The loss of `python -m train d2f`, see `train.d2f`.

    Attributes:
        kind: as in `ObjectivePart`; with "pretrain" there is no prompt, and all positions are blocks.
        block_length: k, positions per block behind the prompt.
        schedule: "monotone" masks later blocks more than earlier ones, "random" draws each block's share anew.
        low, high: bounds of the shares of masked positions.
        target: "teacher" learns the base model's distribution under full attention, "data" the data's tokens.
        end_padding: mask and learn end tokens behind the answer like text, which teaches the student to end early;
            False lays blocks only up to the last token that is none.
        chunk: masked positions whose logits exist at a time.
    """

    kind: Kind = "sft"
    block_length: int = 16
    schedule: Schedule = "monotone"
    low: float = 0.2
    high: float = 0.7
    target: Target = "teacher"
    end_padding: bool = True
    chunk: int = 256

    ranges: ClassVar[tuple[Range, ...]] = (
        ("block_length", 1, math.inf),
        ("low", 1e-6, 1.0),
        ("high", 1e-6, 1.0),
        ("chunk", 1, math.inf),
    )

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise DllmError(f"objective.low {self.low:g} is above objective.high {self.high:g}; lower it")


@dataclasses.dataclass(frozen=True)
class AutoregressivePart:
    """The loss of `python -m train autoregressive`, see `train.autoregressive`.

    Attributes:
        kind, chunk: as in `ObjectivePart`.
    """

    kind: Kind = "sft"
    chunk: int = 0

    ranges: ClassVar[tuple[Range, ...]] = (("chunk", 0, math.inf),)


@dataclasses.dataclass(frozen=True)
class IndicatorPart:
    """The loss of `python -m train indicator`, see `train.indicator`.

    Attributes:
        positive_weight: of positions that may be committed; the others have 1.
        dropout: share of activations that are dropped in training.
        chunk: positions whose logits exist at a time, of all rows together; 0 computes the logits of all.
    """

    positive_weight: float = 1.0
    dropout: float = 0.2
    chunk: int = 0

    kind: ClassVar[Kind] = "sft"
    ranges: ClassVar[tuple[Range, ...]] = (
        ("positive_weight", 1e-6, math.inf),
        ("dropout", 0.0, 0.999),
        ("chunk", 0, math.inf),
    )


@dataclasses.dataclass(frozen=True)
class IndicatorTable:
    """The shape of the indicator, see `samplers.indicator.IndicatorConfig`; the model's sizes are the model's."""

    depth: int = 5
    width: int = 768
    num_values: int = 100
    num_tokens: int = 4
    probabilities: bool = True
    mix: bool = False


@dataclasses.dataclass(frozen=True)
class CompressionPart:
    """The loss of `python -m train compression`, see `train.compression`.

    Attributes:
        chunk: as in `ObjectivePart`.
    """

    chunk: int = 0

    kind: ClassVar[Kind] = "sft"
    ranges: ClassVar[tuple[Range, ...]] = (("chunk", 0, math.inf),)


ObjectiveSettings = ObjectivePart | D2FPart | AutoregressivePart | IndicatorPart | CompressionPart


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """The optimiser, with warm-up and cosine decay.

    Attributes:
        name: "adamw", or "muon" for the matrices of the layers and AdamW for the rest.
        lr: highest learning rate, reached after `warmup` steps.
        final_ratio: the learning rate at the end over the highest; 1 keeps it constant.
        weight_decay: of matrices only, never of norms and biases.
        clip: largest global norm of the gradient; 0 does not clip.
        ema: decay of the moving average of the weights, 0 keeps none. In the first steps it is
            (1 + step) / (10 + step) if that is less.
        batch: rows per step; accumulate: parts that a step's batch is computed in, one after another.
    """

    name: Optimizer = "adamw"
    lr: float = 1e-3
    warmup: int = 100
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    ema: float = 0.0
    batch: int = 64
    accumulate: int = 1


@dataclasses.dataclass(frozen=True)
class ComputePart:
    """How it is computed; the masters of the weights are float32 whatever stands here.

    Attributes:
        dtype: of the forward and backward pass.
        remat: "none" keeps all activations for the backward pass, "layers" only each layer's input, "matmuls" also the
            results of matrix products.
        scan: "on" runs the layers as a loop, which is compiled once instead of once a layer, and for which the weights
            are copied in `dtype` (as they are anyway where all are trained); "auto" does so on TPUs, whose compiler
            takes minutes a layer; "off" never.
        mesh: sizes of the mesh axes, such as {data = 2, fsdp = 2, tensor = 2}; empty is one device.
    """

    dtype: Dtype = "float32"
    remat: Remat = "none"
    scan: Scan = "auto"
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LoraPart:
    """Low-rank adapters (arXiv 2106.09685) instead of all weights.

    Attributes:
        rank: 0 trains all weights.
        alpha: the adapters' product counts alpha / rank times.
        dropout: share of the adapters' inputs that are left out in training, in [0, 1).
        targets: patterns of parameter names as shells write them, matched against "layers.0.attn.q_proj.kernel".
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("*.attn.[qkvo]_proj.kernel",)

    @property
    def scale(self) -> float:
        """How often the product counts."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class CheckpointPart:
    """What is kept.

    Attributes:
        every: steps between training states; keep: how many of the latest states stay.
        weights: what the trained model holds: the moving average or the last weights.
    """

    every: int = 500
    keep: int = 2
    weights: Weights = "raw"


@dataclasses.dataclass(frozen=True)
class LogPart:
    """Attributes:
    every: steps between lines of metrics; the host waits for the device only then.
    mfu: measure the device's rate of matrix products at the start, and report how much of it training uses.
    """

    every: int = 10
    mfu: bool = True


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A whole run.

    Attributes:
        out: output folder; running the same config again continues there.
        steps: optimiser steps in all.
        seed: of initial weights, noise and order of the data.
    """

    out: str
    steps: int
    seed: int = 0
    model: ModelPart = dataclasses.field(default_factory=ModelPart)
    data: DataPart = dataclasses.field(default_factory=DataPart)
    # This command's: the first.
    objective: ObjectiveSettings = dataclasses.field(default_factory=ObjectivePart)
    optimizer: OptimizerPart = dataclasses.field(default_factory=OptimizerPart)
    compute: ComputePart = dataclasses.field(default_factory=ComputePart)
    lora: LoraPart = dataclasses.field(default_factory=LoraPart)
    checkpoint: CheckpointPart = dataclasses.field(default_factory=CheckpointPart)
    log: LogPart = dataclasses.field(default_factory=LogPart)

    def __post_init__(self) -> None:
        own = tuple((f"objective.{name}", low, high) for name, low, high in self.objective.ranges)
        for name, low, high in (*_RANGES, *own):
            value: Any = self
            for part in name.split("."):
                value = getattr(value, part)
            if not low <= value <= high:
                above = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                raise DllmError(f"{name} is {value}; it must be {above}")
        if self.optimizer.batch % self.optimizer.accumulate:
            raise DllmError(
                f"optimizer.batch {self.optimizer.batch} does not split into optimizer.accumulate "
                f"{self.optimizer.accumulate} equal parts; choose a multiple"
            )
        if self.optimizer.warmup > self.steps:
            raise DllmError(f"optimizer.warmup {self.optimizer.warmup} is longer than the {self.steps} steps; lower it")
        if self.checkpoint.weights == "ema" and not self.optimizer.ema:
            raise DllmError('checkpoint.weights is "ema" but optimizer.ema is 0; set a decay such as 0.999')
        if self.data.answer_length > self.data.length:
            raise DllmError(f"data.answer_length exceeds data.length {self.data.length}; lower it")


_RANGES: tuple[Range, ...] = (
    ("steps", 1, math.inf),
    ("seed", 0, 2**31 - 1),
    ("data.length", 2, math.inf),
    ("data.answer_length", 0, math.inf),
    ("data.random_length", 0.0, 1.0),
    ("optimizer.lr", 0.0, math.inf),
    ("optimizer.warmup", 0, math.inf),
    ("optimizer.final_ratio", 0.0, 1.0),
    ("optimizer.b1", 0.0, 0.9999999),
    ("optimizer.b2", 0.0, 0.9999999),
    ("optimizer.eps", 0.0, math.inf),
    ("optimizer.weight_decay", 0.0, math.inf),
    ("optimizer.clip", 0.0, math.inf),
    ("optimizer.ema", 0.0, 0.9999999),
    ("optimizer.batch", 1, math.inf),
    ("optimizer.accumulate", 1, math.inf),
    ("lora.rank", 0, math.inf),
    ("lora.dropout", 0.0, 0.9999999),
    ("checkpoint.every", 1, math.inf),
    ("checkpoint.keep", 1, math.inf),
    ("log.every", 1, math.inf),
)


@dataclasses.dataclass(frozen=True)
class D2FConfig(TrainConfig):
    """A run of `python -m train d2f`.

    Attributes:
        command: always "d2f"; by it the settings that a run wrote are told from those of other commands.
    """

    objective: D2FPart = dataclasses.field(default_factory=D2FPart)
    command: Literal["d2f"] = "d2f"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.target == "teacher" and not self.lora.rank:
            raise DllmError(
                "the teacher is the base model without adapters, and lora.rank is 0; set it to 32, or objective.target "
                'to "data"'
            )


@dataclasses.dataclass(frozen=True)
class AutoregressiveConfig(TrainConfig):
    """A run of `python -m train autoregressive`.

    Attributes:
        command: always "autoregressive", see `D2FConfig`.
    """

    objective: AutoregressivePart = dataclasses.field(default_factory=AutoregressivePart)
    command: Literal["autoregressive"] = "autoregressive"


@dataclasses.dataclass(frozen=True)
class IndicatorRun(TrainConfig):
    """A run of `python -m train indicator`.

    Attributes:
        indicator: its shape.
        command: always "indicator", see `D2FConfig`.
    """

    objective: IndicatorPart = dataclasses.field(default_factory=IndicatorPart)
    indicator: IndicatorTable = dataclasses.field(default_factory=IndicatorTable)
    command: Literal["indicator"] = "indicator"

    def __post_init__(self) -> None:
        super().__post_init__()
        others = {
            "lora.rank": bool(self.lora.rank),
            "optimizer.name": self.optimizer.name != "adamw",
            "compute.remat": self.compute.remat != "none",
        }
        for name, changed in others.items():
            if changed:
                raise DllmError(f"{name} is for training a model; beside an indicator it stays as it is: leave it out")


@dataclasses.dataclass(frozen=True)
class CompressionConfig(TrainConfig):
    """A run of `python -m train compression`.

    Attributes:
        command: always "compression", see `D2FConfig`.
    """

    objective: CompressionPart = dataclasses.field(default_factory=CompressionPart)
    command: Literal["compression"] = "compression"


COMMANDS: Mapping[str, type[TrainConfig]] = types.MappingProxyType(
    {
        "masked-diffusion": TrainConfig,
        "d2f": D2FConfig,
        "autoregressive": AutoregressiveConfig,
        "indicator": IndicatorRun,
        "compression": CompressionConfig,
    }
)
"""The settings of each command that trains."""


def read_config(path: str | Path, overrides: Iterable[str] = (), command: str = "masked-diffusion") -> TrainConfig:
    """The settings in a TOML file, changed by overrides such as ``optimizer.lr=3e-4``, for one of `COMMANDS`.

    An override's value is written as in TOML; words need no quotation marks.

    Raises:
        DllmError: for a file that cannot be read, unknown keys, values of another type or out of range.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"the config {path} could not be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise DllmError(f"the config {path} is not valid TOML ({error})") from None
    for override in overrides:
        _override(values, override)
    return build(COMMANDS[command], values)


def to_json(config: TrainConfig) -> str:
    """All settings, defaults included."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) of what differs between two nested tables."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        was, now = old.get(name), new.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found |= differences(was, now, f"{prefix}{name}.")
        elif was != now:
            found[prefix + name] = (was, now)
    return found


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, written = text.partition("=")
    *tables, name = key.strip().split(".")
    if not equals or not name:
        raise DllmError(f"{text!r} is no setting; write it like optimizer.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written.strip()  # a word without quotation marks
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise DllmError(f"{key.strip()}: {table} is a value, not a table; name a key that exists")
    values[name] = value


def build(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """A settings dataclass from a table.

    Raises:
        DllmError: for unknown or missing keys and values of another type.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise DllmError(unknown_key(prefix + name, [prefix + known for known in fields]))
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in values and not optional:
            raise DllmError(f"{prefix}{name} is not set; write it into the config, or {prefix}{name}=VALUE behind it")
    return kind(**{name: converted(value, hints[name], prefix + name) for name, value in values.items()})


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The sentence for an unknown name, with the nearest known one."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"there is no setting {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def converted(value: Any, kind: Any, name: str) -> Any:
    """A TOML value as the type of a field.

    Raises:
        DllmError: when it is of another type; the sentence starts with `name`.
    """
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # X | None: TOML has no None
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, f"{name}.")
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        raise DllmError(f"{name} is {value!r}; choose one of {', '.join(typing.get_args(kind))}")
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return {key: part if item is Any else converted(part, item, f"{name}.{key}") for key, part in value.items()}
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(converted(part, typing.get_args(kind)[0], name) for part in value)
    raise DllmError(f"{name} is {value!r}; it must be {_WANTED.get(typing.get_origin(kind) or kind, 'a table')}")


_WANTED: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        tuple: "a list",
        dict: "a table",
    }
)
