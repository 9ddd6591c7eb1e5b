"""`APD` and `LeftRight` for a loaded model, from plain values."""

from collections.abc import Sequence
from pathlib import Path

import dllm_jax
from dllm_jax import Model
from samplers.apd import APD, LeftRight
from samplers.apd_verifier import verifier_for
from samplers.generate import make_sampling, make_stop


def make_apd(
    model: Model,
    *,
    verifier: str | Path | Model,
    gen_length: int = 256,
    weight: float = 0.7,
    window: int | None = None,
    lookahead: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    stop: Sequence[str | int] = (),
    ignore_eos: bool = False,
    suppress: Sequence[int] = (),
    most_window: int | None = None,
    most_lookahead: int | None = None,
) -> APD:
    """Adaptive parallel decoding for a model.

    Args:
        verifier: a loaded causal model of the same tokenizer, or its folder or name.
        gen_length, weight, window, lookahead, most_window, most_lookahead: see `APD`. Published are 0.7, 16,
            100 and 0.6, 32, 200.
        temperature, top_p, top_k, stop, ignore_eos, suppress: as in `make_sampler`.

    Raises:
        DllmError: for a verifier that cannot be loaded, is not causal or of another tokenizer, and numbers out of
            range.
    """
    beside = verifier if isinstance(verifier, Model) else dllm_jax.load(verifier)
    return APD(
        verifier_for(model, beside),
        gen_length,
        weight=weight,
        window=window,
        lookahead=lookahead,
        sampling=make_sampling(model, temperature, top_p, top_k, suppress),
        stop=make_stop(model, stop, ignore_eos),
        most_window=most_window,
        most_lookahead=most_lookahead,
    )


def make_left_right(
    model: Model,
    *,
    gen_length: int = 256,
    tokens_per_step: int = 1,
    window: int | None = None,
    lookahead: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    stop: Sequence[str | int] = (),
    ignore_eos: bool = False,
    suppress: Sequence[int] = (),
    most_window: int | None = None,
    most_lookahead: int | None = None,
) -> LeftRight:
    """The left-to-right baseline for a model: `LeftRight`'s numbers, and the rest as in `make_apd`."""
    return LeftRight(
        gen_length,
        tokens_per_step=tokens_per_step,
        window=window,
        lookahead=lookahead,
        sampling=make_sampling(model, temperature, top_p, top_k, suppress),
        stop=make_stop(model, stop, ignore_eos),
        most_window=most_window,
        most_lookahead=most_lookahead,
    )
