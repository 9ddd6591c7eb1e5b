"""Which stored tensors make up which of our parameters: the tables of a family, held against the files' headers."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

from convert.safetensors_reader import TensorEntry
from convert.tensors import FLOAT_DTYPES, Piece, same_bits
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import Family, Slot
from dllm_jax.families.base import PART
from dllm_jax.params.specs import abstract_params

HEAD = "lm_head.kernel"
EMBEDDING = "embed.embedding"


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


def plan_moves(family: Family, config: ModelConfig, entries: Mapping[str, TensorEntry], where: str) -> list[Move]:
    """Finds the pieces of every parameter, in the order of `entries`; reads no values but a tied head's.

    Raises:
        DllmError: naming the first missing, unexpected, misshapen or integer tensors together, and for tensors of two
            layouts.
    """
    _check_counts(config, entries, where)
    with_parts = _tensors_with_parts(family, config)
    entries = {part.name: part for entry in entries.values() for part in _parts(entry, with_parts.get(entry.name))}
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
        return [entry]  # a wrong shape is reported later
    starts = itertools.accumulate((math.prod(slot.shape) for slot in found), initial=0)
    return [
        dataclasses.replace(entry, name=slot.hub, shape=slot.shape, offset=entry.offset + start * entry.dtype.itemsize)
        for slot, start in zip(found, starts, strict=False)
    ]


def _tensors_with_parts(family: Family, config: ModelConfig) -> dict[str, list[Slot]]:
    """The tensors that have parts, by name."""
    slots = (slot for layout in family.layouts_of(config) for slot in layout.slots(config) if PART in slot.hub)
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
    """The slots by the hub's names of the layout that the tensors are in, known by the names that no other one has."""
    tables = [{slot.hub: slot for slot in layout.slots(config)} for layout in family.layouts_of(config)]
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
    return next(slot.hub for slot in family.layout(None, config).slots(config) if slot.ours == ours)


def _check_tied_head(head: TensorEntry, embedding: TensorEntry | None, where: str) -> None:
    """Some writers store a tied head as well: that is harmless exactly when it is the embedding."""
    if embedding is not None and not same_bits(head, embedding):
        raise DllmError(
            f"{where}: {head.name} differs from {embedding.name} although the config ties them; "
            "correct tie_word_embeddings or weight_tying in config.json"
        )
