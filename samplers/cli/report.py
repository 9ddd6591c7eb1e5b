"""What the command prints about answers: JSON, and one line of statistics."""

import argparse
import dataclasses
import math
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax

import dllm_jax
from dllm_jax import Model
from dllm_jax.params.quantized import dtype_label
from samplers.config.registry import settings_of, title
from samplers.generation import Generation
from samplers.infill import Infilling
from samplers.text.display import printable


@dataclasses.dataclass
class Totals:
    """Sums over answers.

    Attributes:
        verified: forwards of verifiers, None where no sampler writes from left to right.
    """

    answers: int = 0
    nfe: int = 0
    full_forwards: int = 0
    tokens: int = 0
    committed: int = 0
    verified: int | None = None

    def add(self, answer: Generation) -> None:
        self.answers += 1
        self.nfe += answer.nfe
        self.full_forwards += answer.full_forwards
        self.tokens += len(answer.tokens)
        if answer.verifier_forwards is not None:
            self.committed += answer.committed
            self.verified = (self.verified or 0) + answer.verifier_forwards


def print_statistics(totals: Totals, seconds: float, speed: str, model: Model, sampler: Any) -> None:
    """Prints one line; for several prompts their sums."""
    nfe, full, tokens = totals.nfe, totals.full_forwards, totals.tokens
    drafts = f"{totals.committed / max(nfe, 1):.2f} accepted per forward, {totals.verified} verifier forwards"
    parts = [
        *([f"{totals.answers} prompts"] if totals.answers > 1 else []),
        f"NFE {nfe} ({full} full + {nfe - full} window)",
        f"{tokens} tokens, {tokens / max(nfe, 1):.2f} per forward",
        *([] if totals.verified is None else [drafts]),
        f"{tokens / max(seconds, 1e-9):.1f} tokens/s ({speed})",
        title(sampler),
        f"{model.name}, {dtype_label(model.params)} on {device_of(model)}",
    ]
    print_after(" | ".join(parts))


def print_after(line: str) -> None:
    """Prints a line that is not an answer: below the text on a terminal, else on the standard error."""
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    ascii_only = not (stream.encoding or "").lower().startswith("utf")
    print(printable(line.replace("×", "x") if ascii_only else line, ascii_only), file=stream)


def print_text(text: str) -> None:
    """Prints an answer."""
    print(for_terminal(text) if sys.stdout.isatty() else text, flush=True)


def for_terminal(text: str) -> str:
    """An answer as it is, but for characters that would steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: printable(match[0]), text)


def device_of(model: Model) -> str:
    """The devices of a model, by their kind."""
    devices = sorted(jax.tree.leaves(model.params)[0].devices(), key=lambda device: device.id)
    return f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind


def settings_json(options: argparse.Namespace, written: Mapping[str, Any], name: str, sampler: Any) -> dict[str, Any]:
    """The settings of a run, for its JSON, that are known before the model of this name is loaded.

    Args:
        written: options of the sampler as they were written.
    """
    always = {name: getattr(options, name) for name in ("chat", "system", "seed", "batch_size", "preset", "sampler")}
    draws = getattr(sampler, "draws", ("temperature", "top_p", "top_k"))
    drawn = {name: getattr(sampler.sampling, name) for name in draws}
    found = {"stop": [], "ignore_eos": False, **drawn, **written, **settings_of(sampler), "block_length": sampler.width}
    none = {"temperature": 0.0, "guidance": 0.0}
    found |= {name: value for name, value in none.items() if found.get(name, 0) is None}
    return {"model": name, **_finite(found), **always}


def run_json(model: Model) -> dict[str, Any]:
    """The settings of a run that are known once the model is loaded."""
    versions = {"dllm_jax": dllm_jax.__version__, "jax": jax.__version__, "python": platform.python_version()}
    return {"device": device_of(model), "dtype": dtype_label(model.params), "versions": versions}


def _finite(value: Any) -> Any:
    """Infinities as text, since JSON has no number for them."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def answer_json(answer: Generation) -> dict[str, Any]:
    """One answer's part of a line of JSON, the same in every run."""
    return {
        "text": answer.text,
        **({"gaps": answer.gaps} if isinstance(answer, Infilling) else {}),
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "prompt_tokens": answer.prompt_tokens,
        "nfe": answer.nfe,
        "full_forwards": answer.full_forwards,
        "cache_updates": answer.cache_updates,
        "verifier_forwards": answer.verifier_forwards,
        "tokens_per_forward": answer.tokens_per_forward,
        "decoded_at": answer.decoded_at,
        "canvas": answer.canvas,
    }


def speed_json(answer: Generation, seconds: float, compile_seconds: float) -> dict[str, Any]:
    """The other part; `seconds` is the time from its admission to its end, with others in the batch."""
    speed = len(answer.tokens) / max(seconds, 1e-9)
    return {"seconds": seconds, "compile_seconds": compile_seconds, "tokens_per_second": speed}
