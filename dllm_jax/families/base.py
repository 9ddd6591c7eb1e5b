"""What a family is: its published models, how its `config.json` reads, and which of its tensors is which of ours."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm_jax.config import Attention, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families.hub_config import HubConfig
from dllm_jax.params.specs import abstract_params

PART = "/"  # between a tensor's name and that of its part
Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One tensor of the hub's format, or some rows of one, and its place in one of ours.

    Attributes:
        hub: its name there; of rows `TENSOR/PART`.
        shape: its shape there.
        ours: the flat name of the parameter it belongs to.
        pieces: the parts of our array it holds, in its own order; equal slices of it, each a matrix where the tensor
            has three axes.
        transpose: each piece is stored transposed.
    """

    hub: str
    shape: tuple[int, ...]
    ours: str
    pieces: tuple[Index, ...]
    transpose: bool

    @property
    def tensor(self) -> str:
        """The name of the whole tensor in the hub's format."""
        return self.hub.partition(PART)[0]


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One line of a family's table, read in both directions.

    Attributes:
        hub: the tensor's name in the hub's format; `{layer}` stands for the number in our name, and a name in `place`
            for the position along that axis. Rules for `TENSOR/PART` share a tensor: its rows are those of the parts,
            in the order of the rules.
        ours: its flat name here.
        transpose: True for matrices, which the hub stores [out, in] and we [in, out].
        place: where the tensor lies in our array, for one that is put together from several or holds several: an entry
            per leading axis. None: the tensor has this axis itself; a number: it lies there; a name: one tensor for
            each position, with its number in the hub's name; "*": all positions one after the other in one tensor.
    """

    hub: str
    ours: str
    transpose: bool = False
    place: tuple[int | str | None, ...] = ()

    def slots(self, ours: str, shape: tuple[int, ...]) -> Iterator[Slot]:
        """The hub's tensors that this rule makes of our parameter `ours` of that shape; none if it is not about it."""
        layer = _number(ours, self.ours)
        if layer is None:
            return
        named = {axis: name for axis, name in enumerate(self.place) if isinstance(name, str) and name != "*"}
        for numbers in itertools.product(*(range(shape[axis]) for axis in named)):
            hub = self.hub.format(layer=layer, **dict(zip(named.values(), numbers, strict=True)))
            pieces = self._pieces(shape, dict(zip(named, numbers, strict=True)))
            yield Slot(hub, self._hub_shape(shape), ours, pieces, self.transpose)

    def _hub_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        entries = self.place + (None,) * (len(shape) - len(self.place))
        kept = tuple(size for size, entry in zip(shape, entries, strict=True) if entry is None)
        kept = kept[::-1] if self.transpose else kept
        stacked = [size for size, entry in zip(shape, entries, strict=True) if entry == "*"]
        if not stacked:
            return kept
        return (stacked[0], math.prod(stacked[1:]) * kept[0], *kept[1:])  # one axis for the first, rows for the others

    def _pieces(self, shape: tuple[int, ...], fixed: Mapping[int, int]) -> tuple[Index, ...]:
        def positions(axis: int, entry: int | str | None) -> list[int | slice]:
            if entry is None:
                return [slice(None)]
            if entry == "*":
                return list(range(shape[axis]))
            return [entry if isinstance(entry, int) else fixed[axis]]

        return tuple(itertools.product(*(positions(axis, entry) for axis, entry in enumerate(self.place))))


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """One way to name and stack a family's tensors.

    Attributes:
        name: what `--layout` calls it.
        architecture: the entry of `architectures` in config.json.
        rules: one or more for every parameter of ours, none of them for the same part of it.
    """

    name: str
    architecture: str
    rules: tuple[TensorRule, ...]

    def holds(self, config: ModelConfig) -> bool:
        """Whether it has a place for every parameter of ours."""
        return all(any(_number(name, rule.ours) is not None for rule in self.rules) for name in abstract_params(config))

    def slots(self, config: ModelConfig) -> Iterator[Slot]:
        """Every tensor of a checkpoint of this layout, in the backbone's order; the parts of one after each other.

        Raises:
            DllmError: when the format has no place for one of our parameters.
        """
        order, tensors = dict[str, int](), dict[str, list[Slot]]()
        for name, array in abstract_params(config).items():
            slots = [(place, slot) for place, rule in enumerate(self.rules) for slot in rule.slots(name, array.shape)]
            if not slots:
                raise DllmError(f"parameter {name} has no place in a {config.family} checkpoint of the hub's format")
            order |= {slot.hub: place for place, slot in slots}
            for _, slot in slots:
                tensors.setdefault(slot.tensor, []).append(slot)
        for parts in tensors.values():
            yield from sorted(parts, key=lambda slot: order[slot.hub])


@dataclasses.dataclass(frozen=True)
class Published:
    """A published model: its config, and the hub's repository it is downloaded from."""

    config: ModelConfig
    repository: str


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: everything the library knows about it.

    Attributes:
        name: `ModelConfig.family`.
        layouts: how its tensors may be named and stacked; the first is the usual one.
        model_types: `model_type` values that decide when config.json has no `architectures`.
        read_config: from the hub's config; raises DllmError for everything that the backbone does not implement.
        write_config: the hub's config.json for a checkpoint that never had one.
        published: published models by the name that `dllm_jax.load` and the commands know them by.
        attention: the `ModelConfig.attention` that its config.json stands for.
        chat_template: Jinja template for tokenizers that bring none of their own; None for none.
        generation: options of samplers that its models are usually sampled with, for `generation.json`.
        read_generation: those that the hub's generation_config.json gives, over these; None reads none.
        ignored: regular expressions of tensors that hold no parameters.
        marker: a field of config.json that only this family has among those of its model_types; None if it needs none.
        note: what a conversion reports to the user; None for nothing.
        draft_adapter: folder of a published repository with the low-rank adapters that are on where the model drafts;
            None where there are none.
        asks_block_length: whether published files may leave open how long blocks are, so that the user may have to say.
    """

    name: str
    layouts: tuple[CheckpointLayout, ...]
    model_types: tuple[str, ...]
    read_config: Callable[[HubConfig], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    published: Mapping[str, Published] = dataclasses.field(default_factory=dict)
    attention: Attention = "bidirectional"
    chat_template: str | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read_generation: Callable[[HubConfig], Mapping[str, Any]] | None = None
    ignored: tuple[str, ...] = ()
    marker: str | None = None
    note: str | None = None
    draft_adapter: str | None = None
    asks_block_length: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Entries of `architectures` in config.json that are this family."""
        return tuple(layout.architecture for layout in self.layouts)

    def generation_options(self, hub: HubConfig) -> dict[str, Any]:
        """A checkpoint's `generation.json` where the source has none."""
        return {**self.generation, **(self.read_generation(hub) if self.read_generation else {})}

    def layouts_of(self, config: ModelConfig) -> tuple[CheckpointLayout, ...]:
        """Those that hold a model's parameters; where none does the first, whose `slots` name what has no place."""
        return tuple(layout for layout in self.layouts if layout.holds(config)) or self.layouts[:1]

    def layout(self, name: str | None, config: ModelConfig) -> CheckpointLayout:
        """The layout of that name, or without one the first that holds the model's parameters.

        Raises:
            DllmError: when the family has none of that name; the sentence lists those it has.
        """
        if name is None:
            return self.layouts_of(config)[0]
        if len(self.layouts) == 1:
            raise DllmError(f"there is only one layout of {self.name} checkpoints; leave --layout out")
        for layout in self.layouts:
            if layout.name == name:
                return layout
        names = " or ".join(layout.name for layout in self.layouts)
        raise DllmError(f"no layout of {self.name} checkpoints is called {name!r}; choose {names}")


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{layer\}", r"(\d+)"))


def _number(name: str, template: str) -> str | None:
    """The layer's number in a name of that template, "" for a template without one; None for another name."""
    match = _pattern(template).fullmatch(name)
    return match and (match.groups() or ("",))[0]
