"""Checks of the arguments of `sample`, before anything is traced or compiled."""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import Model, spec
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike
from samplers.tokens.noise import check_key


def checked_call(
    sampler: Any, denoiser: Any, prompt: Any, prompt_lengths: Any, key: Any, options: dict[str, Any]
) -> Any:
    """Checks every argument, and returns the prompt as an array.

    Types and shapes are always checked; values only where they are concrete, that is outside your own `jit` or `vmap`.
    The check waits for a prompt that another program still computes.

    Raises:
        DllmError: for what is no sampler, denoiser, prompt or key; numbers of the sampler that are neither one nor one
            per row; impossible lengths, tokens outside the vocabulary, and rows longer than the model's context.
    """
    _check_sampler(sampler)
    _check_denoiser(denoiser)
    prompt = _as_array("prompt", prompt)
    if prompt.ndim != 2 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise DllmError(f"prompt is {prompt.dtype}{list(prompt.shape)}; it must be integer token ids [batch, length]")
    batch, width = prompt.shape
    check_key(key, batch)
    _check_numbers(sampler, batch)
    lengths = check_lengths("prompt", prompt_lengths, batch, denoiser.min_prompt_length, width)
    _check_tokens(prompt, lengths, denoiser.vocab_size)
    if (gen_length := getattr(sampler, "gen_length", None)) is not None:
        check_given(options.get("given"), (batch, gen_length), denoiser)
        most = check_lengths("gen", options.get("gen_lengths"), batch, 1, gen_length)
        prompts, generations = width if lengths is None else lengths, gen_length if most is None else most
        _check_context(denoiser, prompts, generations, getattr(sampler, "width", 1))
        if (constraint := getattr(sampler, "constraint", None)) is not None:
            if constraint.least.shape[0] not in (1, batch):
                raise DllmError(f"the constraint is of {constraint.least.shape[0]} rows; give one, or {batch}")
            given = given_tokens(options.get("given"), denoiser)
            known = {"given": given, "gen_lengths": most}  # on the host
            unknown = [name for name, value in known.items() if value is None and options.get(name) is not None]
            for row, length in enumerate([] if unknown else np.broadcast_to(generations, batch).tolist()):
                constraint.check(length, None if given is None else given[row], row)
    return prompt


def check_is_pytree(denoiser: Any) -> None:
    """Raises DllmError for a denoiser that no compiled function can take as an argument."""
    if jax.tree_util.all_leaves([denoiser]) and hasattr(denoiser, "forward"):
        name = type(denoiser).__name__
        raise DllmError(f"a {name} is no pytree; decorate its class with dllm_jax.pytree.pytree")


def check_lengths(what: str, lengths: Any, batch: int, low: int, high: int) -> np.ndarray | None:
    """The lengths [B] on the host, None where they are not known: no lengths, or traced ones.

    Raises:
        DllmError: for another shape or dtype, and lengths outside [low, high].
    """
    if lengths is None:
        return None
    lengths = _as_array(f"{what}_lengths", lengths)
    if lengths.shape != (batch,):
        raise DllmError(f"{what}_lengths has shape {list(lengths.shape)}; it must be [{batch}], one per row")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise DllmError(f"{what}_lengths is {lengths.dtype}; it must hold integers")
    found = _concrete(lengths)
    for row, length in enumerate([] if found is None else found.tolist()):
        if not low <= length <= high:
            bounds = f"between {low} and {high}"
            raise DllmError(f"{what} length {length} of row {row} is impossible; it must be {bounds}")
    return found


def _check_sampler(sampler: Any) -> None:
    if isinstance(sampler, type) or not all(hasattr(sampler, name) for name in ("init", "step", "is_done", "result")):
        raise DllmError(
            f"sampler is {sampler!r}; give one, such as BlockSampler(Threshold(0.9), gen_length=64) or what "
            "samplers.make_sampler(model, 'threshold') makes"
        )
    if all(isinstance(leaf, _NUMBERS) for leaf in jax.tree.leaves(sampler)):
        return
    paths = jax.tree_util.tree_flatten_with_path(sampler)[0]
    path, leaf = next((path, leaf) for path, leaf in paths if not isinstance(leaf, _NUMBERS))
    place = jax.tree_util.keystr(path).removeprefix(".")
    ways = "give a number, an array, or an object such as Threshold() or DualCache(); names are for make_sampler"
    raise DllmError(f"{place or 'the sampler'} is {leaf!r}; {ways}")


_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def _check_denoiser(denoiser: Any) -> None:
    if isinstance(denoiser, Model):
        raise DllmError("denoiser is a Model; pass model.denoiser")
    if isinstance(denoiser, type) or not hasattr(denoiser, "forward"):
        ways = "pass model.denoiser, or make one of your function by dllm_jax.FunctionDenoiser"
        raise DllmError(f"denoiser is of type {type(denoiser).__name__}; {ways}")


def _as_array(what: str, value: Any) -> Any:
    """An array as it is, lists as one."""
    if isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise DllmError(f"{what} is no array; pad rows to one length, and say prompt_lengths=[...]") from None


def _concrete(array: Any) -> np.ndarray | None:
    """The array on the host; None inside a program, and where other processes hold parts of it."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return None
    return np.asarray(array)


def _check_tokens(prompt: Any, lengths: np.ndarray | None, vocab_size: int) -> None:
    """Tokens after a row's length are ignored."""
    ids = _concrete(prompt)
    if ids is None:
        return
    counted = True if lengths is None else np.arange(ids.shape[1]) < lengths[:, None]
    _refuse_outside("prompt", ids, vocab_size, counted)


def open_id(denoiser: DenoiserLike) -> int:
    """What stands in `given` for a token that is to be generated: the mask token, or -1 for a model without one."""
    config = getattr(denoiser, "config", None)
    return -1 if config is not None and config.mask_id is None else denoiser.mask_id


def start_from(tokens: Any) -> Any:
    """What stands in `given`, of a model without a mask token, for positions that start from these tokens in place of
    random ones and may change."""
    return -2 - tokens


def is_given(given: Any, denoiser: DenoiserLike) -> Any:
    """Which tokens of `given` stay as they are, a bool array of its shape."""
    return (given >= 0) & (given != open_id(denoiser))


def given_tokens(given: Any, denoiser: DenoiserLike) -> np.ndarray | None:
    """Tokens that canvases come with, on the host, -1 where one is to be generated; None where they are not known."""
    found = None if given is None else _concrete(_as_array("given", given))
    return None if found is None else np.where(is_given(found, denoiser), found, -1)


def check_given(given: Any, shape: tuple[int, ...], denoiser: DenoiserLike) -> None:
    """Checks the tokens that canvases come with; None is none.

    Raises:
        DllmError: for another shape than [B, G] (of one row [G]) or dtype, and, if they are known, for tokens outside
            the vocabulary.
    """
    if given is None:
        return
    found, missing = _as_array("given", given), open_id(denoiser)
    if found.shape != shape:
        raise DllmError(f"given has shape {list(found.shape)}; it must be {list(shape)}, the generation of every row")
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise DllmError(f"given is {found.dtype}; it must be integer token ids, {missing} where one is missing")
    if (ids := _concrete(found)) is not None:
        ids = np.atleast_2d(ids)
        starts = np.where((ids < -1) & (missing < 0), start_from(ids), ids)  # which is its own inverse
        _refuse_outside("given", starts, denoiser.vocab_size, ids != missing)


def _refuse_outside(what: str, ids: np.ndarray, vocab_size: int, counted: np.ndarray | bool = True) -> None:
    wrong = ((ids < 0) | (ids >= vocab_size)) & counted
    if wrong.any():
        row, place = (int(index) for index in np.unravel_index(np.argmax(wrong), wrong.shape))
        outside = f"lies outside the vocabulary of {vocab_size} tokens"
        raise DllmError(f"{what} token {ids[row, place]} of row {row}, position {place}, {outside}")


def _check_context(
    denoiser: DenoiserLike, prompt: int | np.ndarray, generation: int | np.ndarray, block_length: int
) -> None:
    limit = getattr(getattr(denoiser, "config", None), "max_length", None)
    prompts, totals = map(np.atleast_1d, np.broadcast_arrays(prompt, prompt + generation))
    if limit is not None and len(totals):
        longest = int(np.argmax(totals))
        check_context("the model", limit, int(prompts[longest]), int(totals[longest]), block_length)


def check_context(who: str, limit: int, prompt: int, total: int, block_length: int) -> None:
    """Raises DllmError if a prompt of `prompt` tokens and its canvas, up to position `total`, exceed the context that
    `who` was trained for."""
    if total > limit:
        parts = f"a prompt of {prompt} tokens and a canvas up to position {total}"
        left = limit - prompt
        left -= left % block_length if left > block_length else 0  # whole blocks
        fits = f"; a gen_length of {left} fits after such a prompt" if left > 0 else ""
        raise DllmError(f"{parts} exceed the {limit} tokens {who} was trained for; shorten one of them{fits}")


def _check_numbers(part: Any, batch: int, place: str = "") -> None:
    """Raises DllmError for a number, of a sampler or of its parts, that is neither a scalar nor [B], and for fractions
    where whole numbers must be."""
    for field in dataclasses.fields(part):
        value, dtype = getattr(part, field.name), number_dtypes(part.__class__).get(field.name)
        if dtype is not None and isinstance(value, list | tuple):
            raise DllmError(f"{place}{field.name} is {value!r}; give one number, or a jnp.array of one per row")
        if dtype is not None and np.shape(value) not in ((), (batch,)):
            shapes = f"one number, or [{batch}], one per row"
            raise DllmError(f"{place}{field.name} has shape {list(np.shape(value))}; it must be {shapes}")
        if dtype is not None and value is not None:
            check_kept(f"{place}{field.name}", value, dtype)
        if dataclasses.is_dataclass(value):
            _check_numbers(value, batch, f"{place}{field.name}.")


def check_kept(what: str, value: Any, dtype: np.dtype) -> None:
    """Raises DllmError for a number, or an array of them, that a field of this dtype cannot hold."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    own = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if whole and not jnp.issubdtype(own, jnp.integer):
        raise DllmError(f"{what} is {value}; it must be a whole number")
    found = np.asarray(value) if isinstance(value, int | np.integer) else np.zeros(0)
    if whole and found.size and not np.iinfo(dtype).min <= int(found) <= np.iinfo(dtype).max:
        raise DllmError(f"{what} is {value}; it must be at most {np.iinfo(dtype).max}")


@functools.cache
def number_dtypes(kind: type) -> dict[str, np.dtype]:
    """Names of a dataclass's fields that are numbers and may differ by row, and what each is an array of, whatever the
    type of the Python number: a threshold of 1 is a float."""
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # of a class of your own, whose annotations may not resolve here
        return {}
    types = {name: set(spec.members(hint)) for name, hint in hints.items()}
    numbers = {name: found for name, found in types.items() if jax.Array in found and found & {int, float}}
    return {name: jnp.result_type(float if float in found else int) for name, found in numbers.items()}
