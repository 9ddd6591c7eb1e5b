"""What a family is: how its `config.json` reads, and which of its tensors is which of ours."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from convert.hub_config import HubConfig
from convert.safetensors_reader import TensorEntry
from convert.tensors import FLOAT_DTYPES, Index, Piece, same_bits
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.params.specs import abstract_params

PART = "/"  # between a tensor's name and that of its part
HEAD = "lm_head.kernel"
EMBEDDING = "embed.embedding"


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
class Rule:
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
class Layout:
    """One way to name and stack a family's tensors.

    Attributes:
        name: what `--layout` calls it.
        architecture: the entry of `architectures` in config.json.
        rules: one or more for every parameter of ours, none of them for the same part of it.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]

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
class Family:
    """A checkpoint family: everything the converter knows about it.

    Attributes:
        name: `ModelConfig.family`.
        layouts: how its tensors may be named and stacked; the first is the usual one.
        model_types: `model_type` values that decide when config.json has no `architectures`.
        read_config: from the hub's config; raises DllmError for everything that the backbone does not implement.
        write_config: the hub's config.json for a checkpoint that never had one.
        ignored: regular expressions of tensors that hold no parameters.
        marker: a field of config.json that only this family has among those of its model_types; None if it needs none.
        generation: options of samplers that its models are usually sampled with, for `generation.json`.
        note: what people are told about a conversion; None for nothing.
        read_generation: those that the hub's generation_config.json gives, over these; None reads none.
        asks_block_length: whether published files may leave open how long blocks are, so that the user may have to say.
    """

    name: str
    layouts: tuple[Layout, ...]
    model_types: tuple[str, ...]
    read_config: Callable[[HubConfig], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    ignored: tuple[str, ...] = ()
    marker: str | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str | None = None
    read_generation: Callable[[HubConfig], Mapping[str, Any]] | None = None
    asks_block_length: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Entries of `architectures` in config.json that are this family."""
        return tuple(layout.architecture for layout in self.layouts)

    def usual(self, hub: HubConfig) -> dict[str, Any]:
        """What a checkpoint's `generation.json` says where the source has none."""
        return {**self.generation, **(self.read_generation(hub) if self.read_generation else {})}

    def layout(self, name: str | None, config: ModelConfig) -> Layout:
        """The layout of that name, or without one the first that holds the model's parameters.

        Raises:
            DllmError: when the family has none of that name; the sentence lists those it has.
        """
        if name is None:  # where none holds them, the first tells which it has no place for
            return next((layout for layout in self.layouts if layout.holds(config)), self.layouts[0])
        if len(self.layouts) == 1:
            raise DllmError(f"there is only one layout of {self.name} checkpoints; leave --layout out")
        for layout in self.layouts:
            if layout.name == name:
                return layout
        names = " or ".join(layout.name for layout in self.layouts)
        raise DllmError(f"no layout of {self.name} checkpoints is called {name!r}; choose {names}")


@dataclasses.dataclass(frozen=True)
class Move:
    """One parameter to be carried over: what it is called here, its shape, and the stored pieces that make it up."""

    target: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored pieces."""
        return sum(piece.entry.nbytes for piece in self.pieces)


def plan(family: Family, config: ModelConfig, entries: Mapping[str, TensorEntry], where: str) -> list[Move]:
    """Finds the pieces of every parameter, in the order of `entries`; reads no values but a tied head's.

    Raises:
        DllmError: naming the first missing, unexpected, misshapen or integer tensors together, and for tensors of two
            layouts.
    """
    _check_counts(config, entries, where)
    joined = _joined(family, config)
    entries = {part.name: part for entry in entries.values() for part in _parts(entry, joined.get(entry.name))}
    stored = {name: entry for name, entry in entries.items() if not _is_ignored(family, name)}
    slots = _stored_layout(family, config, stored, where)
    tied = _hub_name(family, config.replace(tied_embeddings=False), HEAD) if config.tied_embeddings else None
    faults: list[str] = []
    for name, entry in stored.items():
        if name == tied:
            _check_tied_head(entry, entries.get(_hub_name(family, config, EMBEDDING)), where)
        elif name not in slots:
            faults.append(f"unexpected {name}")
        elif entry.shape != slots[name].shape:
            faults.append(f"{name} has shape {list(entry.shape)}, not {list(slots[name].shape)}")
        elif entry.dtype.name not in FLOAT_DTYPES:
            faults.append(f"{name} is stored as {entry.dtype.name}, not as one of {', '.join(FLOAT_DTYPES)}")
    faults += [f"missing {name}" for name in sorted(slots.keys() - stored.keys())]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise DllmError(f"{where} does not hold the {family.name} tensors of its config: {'; '.join(faults[:3])}{more}")
    pieces: dict[str, list[Piece]] = {}
    for name, slot in slots.items():
        pieces.setdefault(slot.ours, []).extend(_pieces(slot, entries[name]))
    shapes, place = abstract_params(config), {name: number for number, name in enumerate(entries)}
    moves = [Move(target, tuple(shapes[target].shape), tuple(parts)) for target, parts in pieces.items()]
    return sorted(moves, key=lambda move: place[move.pieces[0].entry.name])  # files are read from front to back


def _parts(entry: TensorEntry, found: list[Slot] | None) -> list[TensorEntry]:
    """The parts of a tensor that several of our parameters share, as tensors of their own; another one as it is."""
    if found is None or entry.shape != (sum(slot.shape[0] for slot in found), *found[0].shape[1:]):
        return [entry]  # a wrong shape is told later
    starts = itertools.accumulate((math.prod(slot.shape) for slot in found), initial=0)
    return [
        dataclasses.replace(entry, name=slot.hub, shape=slot.shape, offset=entry.offset + start * entry.dtype.itemsize)
        for slot, start in zip(found, starts, strict=False)
    ]


def _joined(family: Family, config: ModelConfig) -> dict[str, list[Slot]]:
    """The tensors that have parts, by name."""
    slots = (slot for layout in family.layouts for slot in layout.slots(config) if PART in slot.hub)
    grouped = itertools.groupby(slots, key=lambda slot: slot.tensor)
    return {name: list(parts) for name, parts in grouped}


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)


def _check_counts(config: ModelConfig, entries: Mapping[str, TensorEntry], where: str) -> None:
    """Before tables are made: numbers that a checkpoint of this size cannot have."""
    if config.num_layers > len(entries):
        raise DllmError(f"{where} has {len(entries)} tensors, too few for the {config.num_layers} layers of its config")
    most = max([len(entries), *(entry.shape[0] for entry in entries.values() if len(entry.shape) == 3)])
    if config.experts and config.experts.num_experts > most:
        raise DllmError(f"{where} has too few tensors for the {config.experts.num_experts} experts of its config")


def _stored_layout(
    family: Family, config: ModelConfig, stored: Mapping[str, TensorEntry], where: str
) -> dict[str, Slot]:
    """The slots by the hub's names of the layout that the tensors are in, told by the names that no other one has."""
    tables = [{slot.hub: slot for slot in layout.slots(config)} for layout in family.layouts]
    common = set(tables[0]).intersection(*tables)
    found = {index: name for index, table in enumerate(tables) for name in stored if name in table.keys() - common}
    if len(found) > 1:
        raise DllmError(f"{where} mixes two layouts ({' and '.join(found.values())}); download the checkpoint again")
    return tables[next(iter(found), 0)]


def _pieces(slot: Slot, entry: TensorEntry) -> Iterator[Piece]:
    """A tensor that holds several pieces lies one after the other in the file."""
    if len(entry.shape) < 3:
        yield Piece(entry, slot.pieces[0], slot.transpose)
        return
    count = len(slot.pieces)
    shape = (entry.shape[0] * entry.shape[1] // count, entry.shape[2])
    for number, index in enumerate(slot.pieces):
        part = dataclasses.replace(entry, shape=shape, offset=entry.offset + number * (entry.nbytes // count))
        yield Piece(part, index, slot.transpose)


def _hub_name(family: Family, config: ModelConfig, ours: str) -> str:
    return next(slot.hub for slot in family.layouts[0].slots(config) if slot.ours == ours)


def _check_tied_head(head: TensorEntry, embedding: TensorEntry | None, where: str) -> None:
    """Some writers store a tied head as well: that is harmless exactly when it is the embedding."""
    if embedding is not None and not same_bits(head, embedding):
        raise DllmError(
            f"{where}: {head.name} differs from {embedding.name} although the config ties them; "
            "correct tie_word_embeddings or weight_tying in config.json"
        )


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{layer\}", r"(\d+)"))


def _number(name: str, template: str) -> str | None:
    """The layer's number in a name of that template, "" for a template without one; None for another name."""
    match = _pattern(template).fullmatch(name)
    return match and (match.groups() or ("",))[0]
