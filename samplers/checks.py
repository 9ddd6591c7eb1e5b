"""Refusals that rules, cache policies and samplers share: one sentence for a value that makes no sense."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.spec import options_sentence
from dllm_jax.suggestions import did_you_mean

T = TypeVar("T")


def check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises DllmError unless the value is one of those allowed."""
    if value not in allowed:
        raise DllmError(f"{what} {value!r} is unknown; choose one of {', '.join(allowed)}")


def check_number(what: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Raises DllmError for a string, and for a concrete number outside [low, high] or NaN; arrays are let through."""
    if isinstance(value, str):
        raise DllmError(f"{what} is the string {value!r}; give a number")
    if isinstance(value, (int, float, np.number)) and not low <= value <= high:
        bound = f"between {low:.12g} and {high:.12g}" if high != float("inf") else f"at least {low:.12g}"
        raise DllmError(f"{what} is {value:.12g}; it must be {bound}")


def check_threshold(what: str, value: Any) -> None:
    """`check_number` for thresholds on probabilities. One that nothing reaches is inf or, as in published code, a
    little above 1; 2 and 90 are refused as mistakes."""
    check_number(what, value, 0.0)
    if isinstance(value, (int, float, np.number)) and 1.1 < value < float("inf"):
        raise DllmError(f"{what} is {value:.12g}; it is a probability, such as 0.9; write inf for one nothing reaches")


def check_whole(what: str, value: Any, low: float, high: float = float("inf")) -> None:
    """`check_number` for what only makes sense as a whole number."""
    check_number(what, value, low, high)
    if isinstance(value, (float, np.floating)):
        raise DllmError(f"{what} is {value}; it must be a whole number")


def check_token(what: str, token: Any, config: ModelConfig) -> None:
    """Raises DllmError for what is no token id of a model."""
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise DllmError(f"{what} token {token!r} is no token id; give whole numbers")
    if not 0 <= token < config.vocab_size:
        raise DllmError(f"{what} token {token} lies outside the vocabulary of {config.vocab_size} tokens")


def check_seed(seed: Any) -> None:
    """Raises DllmError unless a seed is a whole number of 32 bits: JAX drops the bits above, so two seeds would give
    equal numbers."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise DllmError(f"seed is {seed!r}; it must be a whole number")
    check_whole("seed", seed, 0, 2**32 - 1)


def check_length(what: str, value: Any, optional: bool = False) -> None:
    """Raises DllmError unless a length, which must be known when the program is built, is a whole number above 0."""
    if not isinstance(value, (int, float, str, np.number)) and not (optional and value is None):
        raise DllmError(f"{what} is {value!r}; it must be a whole number")
    check_whole(what, value, 1)


def check_steps(steps: Any, num_blocks: int | None) -> None:
    """Raises DllmError for a concrete number of steps that the blocks cannot share evenly."""
    check_whole("steps", steps, 1)
    if num_blocks is not None and isinstance(steps, (int, np.integer)) and steps % num_blocks:
        raise DllmError(f"steps {steps} is not a multiple of the {num_blocks} blocks; choose a multiple")


def refuse_unknown(
    what: str,
    options: Iterable[str],
    known: Iterable[str],
    owners: Callable[[str], Sequence[str]] = lambda option: (),
) -> None:
    """Raises DllmError for options that `what` does not have, and names the parts that have the first of them."""
    known = list(known)
    if unknown := sorted(set(options) - set(known)):
        name, others = unknown[0], ", ".join(owners(unknown[0]))
        others = others and f"; {name} is an option of {others}"
        raise DllmError(f"{what} has no option {name!r}; {did_you_mean(name, known, options_sentence(known))}{others}")


def assemble(what: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of these values of its fields.

    Args:
        what: named in the errors, such as "rule eb".

    Raises:
        DllmError: for a required value that is missing, or None where a value must be; and as the dataclass itself.
    """
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING
        if field.init and required and field.name not in values:
            flag = "--" + field.name.replace("_", "-")
            raise DllmError(f"{what} needs {field.name}; pass {field.name}=..., in a shell {flag}")
        if values.get(field.name, field) is None and field.default is not None and not _may_be_none(kind, field.name):
            raise DllmError(f"{field.name} of {what} is None; leave it out or give a value")
    return kind(**values)


def _may_be_none(kind: type, field: str) -> bool:
    """Whether None is a value of this field, by its type."""
    return types.NoneType in typing.get_args(typing.get_type_hints(kind)[field])
