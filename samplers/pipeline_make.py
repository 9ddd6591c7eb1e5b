"""`PipelineSampler` for a loaded model, from plain values."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from dllm_jax import DllmError, Model
from samplers.generate import make_named_rule, make_sampling, make_stop
from samplers.pipeline import PipelineSampler
from samplers.rules.base import Proxy


def make_pipeline(
    model: Model,
    *,
    gen_length: int = 256,
    block_length: int = 32,
    tau_add: float = 0.1,
    tau_act: float = 0.95,
    threshold: float = 0.9,
    rule: str | None = None,
    rule_threshold: float | None = None,
    forced: Proxy = "confidence",
    in_flight: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    stop: Sequence[str | int] = (),
    ignore_eos: bool = False,
    suppress: Sequence[int] = (),
    **rule_options: Any,
) -> PipelineSampler:
    """D2F's pipelined decoding for a model that was trained for it.

    Args:
        gen_length, block_length, tau_add, tau_act, threshold, forced, in_flight: see `PipelineSampler`.
        rule: name of the rule inside fully active blocks with its numbers in `rule_options`; None is D2F's own.
        rule_threshold: the rule's own `threshold`, as the pipeline has that name for itself; None is its default.
        temperature, top_p, top_k, stop, suppress: as in `make_sampler`.
        ignore_eos: append blocks also behind the model's end tokens.

    Raises:
        DllmError: for unknown names and options, and numbers out of range.
    """
    if rule_threshold is not None:
        rule_options["threshold"] = rule_threshold
    if rule is None and rule_options:
        raise DllmError(f"options {', '.join(sorted(rule_options))} belong to no rule; name one by rule=")
    return PipelineSampler(
        gen_length,
        min(block_length, gen_length),
        tau_add=tau_add,
        tau_act=tau_act,
        threshold=threshold,
        rule=None if rule is None else make_named_rule(rule, gen_length, rule_options),
        forced=forced,
        in_flight=in_flight,
        end_ids=jnp.asarray([] if ignore_eos else model.config.end_ids, jnp.int32),
        sampling=make_sampling(model, temperature, top_p, top_k, suppress),
        stop=make_stop(model, stop, ignore_eos=True) if stop else None,
    )
