"""What a family is: how its `config.json` reads, and which of its tensors is which of ours."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from convert.hub_config import HubConfig
from convert.safetensors_reader import TensorEntry
from convert.tensors import FLOAT_DTYPES, same_bits
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.params import abstract_params

HEAD = "lm_head.kernel"
EMBEDDING = "embed.embedding"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a family's table, read in both directions; `{layer}` and the like stand for a number.

    Attributes:
        hub: the tensor's name in the hub's format.
        ours: its flat name here.
        transpose: True for matrices, which the hub stores [out, in] and we [in, out].
    """

    hub: str
    ours: str
    transpose: bool = False

    def to_ours(self, name: str) -> str | None:
        """Our name of the hub's `name`, or None when the rule is not about it."""
        return _rename(name, self.hub, self.ours)

    def to_hub(self, name: str) -> str | None:
        """The hub's name of our `name`, or None when the rule is not about it."""
        return _rename(name, self.ours, self.hub)


@dataclasses.dataclass(frozen=True)
class Family:
    """A checkpoint family: everything the converter knows about it.

    Attributes:
        name: `ModelConfig.family`.
        architectures: entries of `architectures` in config.json that are this family.
        model_types: `model_type` values that decide when config.json has no `architectures`.
        rules: every tensor of the hub's format hits exactly one.
        read_config: from the hub's config; raises DllmError for everything that the backbone does not implement.
        write_config: the hub's config.json for a checkpoint that never had one.
        ignored: regular expressions of tensors that hold no parameters.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    read_config: Callable[[HubConfig], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    ignored: tuple[str, ...] = ()

    def hub_name(self, ours: str) -> tuple[str, bool]:
        """(the hub's name, whether it is transposed) of one of our parameters.

        Raises:
            DllmError: when the family's format has no place for it.
        """
        for rule in self.rules:
            if name := rule.to_hub(ours):
                return name, rule.transpose
        raise DllmError(f"parameter {ours} has no place in a {self.name} checkpoint of the hub's format")


@dataclasses.dataclass(frozen=True)
class Move:
    """One tensor to be carried over: where it lies and what it is called here."""

    target: str
    entry: TensorEntry
    transpose: bool


def plan(family: Family, config: ModelConfig, entries: Mapping[str, TensorEntry], where: str) -> list[Move]:
    """Pairs every source tensor with its target, in the order of `entries`; reads no values but a tied head's.

    Raises:
        DllmError: naming the first missing, unexpected, misshapen, doubled or integer tensors together.
    """
    if config.num_layers > len(entries):
        raise DllmError(f"{where} has {len(entries)} tensors, too few for the {config.num_layers} layers of its config")
    shapes = {name: tuple(spec.shape) for name, spec in abstract_params(config).items()}
    moves: dict[str, Move] = {}
    faults: list[str] = []
    for name, entry in entries.items():
        if any(re.fullmatch(pattern, name) for pattern in family.ignored):
            continue
        hits = [(rule, target) for rule in family.rules if (target := rule.to_ours(name))]
        if len(hits) != 1:
            faults.append(f"unexpected {name}" if not hits else f"{name} fits {len(hits)} rules")
            continue
        ((rule, target),) = hits
        shape = entry.shape[::-1] if rule.transpose else entry.shape
        if target == HEAD and config.tied_embeddings:
            _check_tied_head(family, entry, entries, where)
        elif target not in shapes:
            faults.append(f"unexpected {name}")
        elif target in moves:
            faults.append(f"{name} and {moves[target].entry.name} are both {target}")
        elif shape != shapes[target]:
            wanted = shapes[target][::-1] if rule.transpose else shapes[target]
            faults.append(f"{name} has shape {list(entry.shape)}, not {list(wanted)}")
        elif entry.dtype.name not in FLOAT_DTYPES:
            faults.append(f"{name} is stored as {entry.dtype.name}, not as one of {', '.join(FLOAT_DTYPES)}")
        else:
            moves[target] = Move(target, entry, rule.transpose)
    hub_names = {family.hub_name(target)[0] for target in shapes}
    faults += [f"missing {name}" for name in sorted(hub_names - entries.keys())]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise DllmError(f"{where} does not hold the {family.name} tensors of its config: {'; '.join(faults[:3])}{more}")
    return list(moves.values())


def _check_tied_head(family: Family, head: TensorEntry, entries: Mapping[str, TensorEntry], where: str) -> None:
    """Some writers store a tied head as well: that is harmless exactly when it is the embedding."""
    embedding = entries.get(family.hub_name(EMBEDDING)[0])
    if embedding is not None and not same_bits(head, embedding):
        raise DllmError(
            f"{where}: {head.name} differs from {embedding.name} although the config ties them; "
            "correct tie_word_embeddings or weight_tying in config.json"
        )


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    placeholder = r"\\{(\w+)\\}"  # as re.escape leaves it
    return re.compile(re.sub(placeholder, r"(?P<\1>0|[1-9][0-9]*)", re.escape(template)))


def _rename(name: str, template: str, other: str) -> str | None:
    match = _pattern(template).fullmatch(name)
    return other.format(**match.groupdict()) if match else None
