"""What tokens, forwards and speed are counted as: by one definition, and as the papers' own scripts count.

The library counts one way. Tokens are those of the answer before its first end token or stop string, the prompt's
never; forwards (NFE) are all that a row had; tokens per forward (TPF) are all tokens over all forwards, tokens per
second (TPS) all tokens over the seconds of sampling, compilation apart. Published numbers mean other things, each
something else (`COUNTS`), so they are computed next to ours on request, and never replace them.

Only what was written can be counted: a sampler that ends a row at its first end token writes less after it than the
official loops, which fill the canvas. For counts of whole canvases run the sampler with `ignore_eos=true`.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.text.tokenizer import encode_text
from evals import stderr
from samplers import DraftResult, Result
from samplers.stopping import stop_at
from samplers.text.decode import text_of

Encode = Callable[[str], Sequence[int]]
"""From a text to its token ids, without tokens in front or after it."""

WARM_UP = 10
"""Samples that d3LLM leaves out."""


@dataclasses.dataclass(frozen=True)
class CountedAnswer:
    """One answer, with everything that some project counts.

    Attributes:
        prompt_ids: [P], of the prompt as the model was given it.
        canvas_ids: [G], all that was generated, with the end token where nothing was written.
        tokens: of the answer before its first end token or stop string.
        cut_text: of the whole canvas, with its special tokens, before the first stop string.
        plain_text: the same without special tokens.
        nfe: forwards of the denoiser.
        committed: tokens that the forwards wrote, wherever they stand.
        seconds: from its admission to its end; None where others ran at the same time, since their shares are unknown.
        complete_at: forwards after which the answer and what ends it were written, see `complete_at`; None where that
            is not known.
    """

    prompt_ids: Sequence[int]
    canvas_ids: Sequence[int]
    tokens: int
    cut_text: str
    plain_text: str
    nfe: int
    committed: int
    seconds: float | None
    complete_at: int | None = None


@dataclasses.dataclass(frozen=True)
class CountMethod:
    """How a project counts.

    Attributes:
        tokens: of one answer, given the end token's id and how text is encoded again.
        reports: what the project's script or paper reports besides tokens, as names of `PaperCount`.
        time: whether the speed of all is over the seconds of the whole loop or over the sum of the answers' own.
        skip: answers at the beginning that do not count.
        source: where this was read.
        distorts: what it does to the numbers, against the library's own.
    """

    tokens: Callable[[CountedAnswer, int, Encode], int]
    reports: tuple[str, ...]
    source: str
    distorts: str
    time: Literal["loop", "answers"] = "loop"
    skip: int = 0


@dataclasses.dataclass(frozen=True)
class PaperCount:
    """What came out; None for what the project does not report, and for speeds of single answers whose seconds are not
    known.

    Attributes:
        count: its name.
        n: answers that were counted.
        tokens: mean per answer.
        nfe: mean forwards per answer.
        nfe_until: the mean of those after which an answer and what ends it were written.
        total_nfe: of all answers.
        tokens_per_forward, tokens_per_second: ratios of totals.
        mean_tokens_per_forward, mean_tokens_per_second: means of the answers' own ratios, the latter with the standard
            error of the mean.
        distorts: how these differ from the library's own.
    """

    count: str
    n: int
    tokens: float
    nfe: float | None = None
    nfe_until: float | None = None
    total_nfe: int | None = None
    tokens_per_forward: float | None = None
    tokens_per_second: float | None = None
    mean_tokens_per_forward: float | None = None
    mean_tokens_per_second: float | None = None
    mean_tokens_per_second_stderr: float | None = None
    distorts: str = ""


def forwards_of(result: Result) -> dict[str, int]:
    """The forwards of a result of one row, and the tokens that they wrote, those after the end too."""
    return {
        "nfe": int(result.nfe[0]),
        "full_forwards": int(result.full_forwards[0]),
        "verifier_forwards": int(result.verifier_forwards[0]) if isinstance(result, DraftResult) else 0,
        "committed": int((result.decoded_at[0] >= 0).sum()),
    }


def complete_at(result: Result, tokens: int, model: Model, stop: Sequence[str]) -> int:
    """After how many forwards a row's answer, and the end token or stop string that ends it, were written: what a
    sampler that stops there takes. All forwards where nothing ends it.

    Args:
        result: of one row.
        tokens: of the answer before its end.
        stop: strings that end it, besides the model's end tokens.
    """

    def ends(ids: list[int]) -> bool:
        if not set(ids).isdisjoint(model.config.end_ids):
            return True
        text = str(model.require_tokenizer().decode(ids, skip_special_tokens=False)) if stop else ""
        return any(item in text for item in stop)

    ids = result.tokens[0].tolist()
    end = tokens if ends(ids) else len(ids)
    while end < len(ids) and not ends(ids[:end]):
        end += 1
    return int(result.decoded_at[0, :end].max(initial=-1)) + 1


def speed_of(answers: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """The library's own count: means per answer of `nfe` (with its standard error), `full_forwards`,
    `verifier_forwards` and `tokens`; all tokens per forward and per second.

    Args:
        answers: each with what `forwards_of` has, and with `tokens`, those before its end.
        seconds: of sampling all of them, without compilation.
    """
    mean = lambda name: float(np.mean([answer[name] for answer in answers]))
    nfe, tokens = [answer["nfe"] for answer in answers], sum(answer["tokens"] for answer in answers)
    return {
        "nfe": mean("nfe"),
        "nfe_stderr": stderr.of_mean(nfe),
        "full_forwards": mean("full_forwards"),
        "verifier_forwards": mean("verifier_forwards"),
        "tokens": mean("tokens"),
        "tokens_per_forward": tokens / max(sum(nfe), 1),
        "committed_per_forward": sum(answer["committed"] for answer in answers) / max(sum(nfe), 1),
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "seconds": seconds,
    }


def count_as(kinds: Sequence[str], model: Model, answers: Sequence[CountedAnswer], seconds: float) -> dict[str, Any]:
    """The counts of several projects: name -> fields of `PaperCount` that the project reports.

    Raises:
        DllmError: as `count`, and for a model without a tokenizer.
    """
    encode = lambda text: encode_text(model.require_tokenizer(), text)
    found = {kind: count(kind, answers, eos_id=model.config.eos_id, encode=encode, seconds=seconds) for kind in kinds}
    return {kind: {name: x for name, x in vars(one).items() if x is not None} for kind, one in found.items()}


def answer_of(
    model: Model, canvas_ids: Sequence[int], stop: Sequence[str], *, seconds: float | None, **numbers: Any
) -> CountedAnswer:
    """An answer with both of its texts.

    Args:
        stop: strings that cut it.
        seconds, numbers: see `CountedAnswer`.
    """
    whole = str(model.require_tokenizer().decode(list(canvas_ids), skip_special_tokens=False))
    return CountedAnswer(
        canvas_ids=canvas_ids,
        cut_text=whole[: stop_at(whole, stop)],
        plain_text=text_of(model, canvas_ids, stop),
        seconds=seconds,
        **numbers,
    )


def count(kind: str, answers: Sequence[CountedAnswer], *, eos_id: int, encode: Encode, seconds: float) -> PaperCount:
    """Counts answers as a project does.

    Args:
        kind: one of `COUNTS`.
        answers: in the order of their examples.
        eos_id: the end-of-sequence token; other tokens that end a turn are no such token for any of them.
        encode: how text becomes tokens again.
        seconds: of sampling all of them.

    Raises:
        DllmError: for an unknown kind, and for fewer answers than it leaves out.
    """
    method = method_of(kind, len(answers))
    answers = answers[method.skip :]
    tokens = np.asarray([method.tokens(answer, eos_id, encode) for answer in answers], float)
    nfe = np.asarray([max(answer.nfe, 1) for answer in answers], float)
    every: dict[str, Any] = {
        "nfe": float(nfe.mean()),
        "total_nfe": int(nfe.sum()),
        "tokens_per_forward": float(tokens.sum() / nfe.sum()),
        "tokens_per_second": float(tokens.sum() / max(seconds, 1e-9)) if method.time == "loop" else None,
        "mean_tokens_per_forward": float((tokens / nfe).mean()),
    }
    until = [answer.complete_at for answer in answers]
    if None not in until:
        every["nfe_until"] = float(np.mean(np.asarray(until, float)))
    own = [answer.seconds for answer in answers]
    if None not in own:
        every |= _own_speeds(tokens, np.asarray(own, float), method.time == "answers")
    reported = {name: every.get(name) for name in method.reports}
    return PaperCount(kind, len(answers), float(tokens.mean()), **reported, distorts=method.distorts)


def method_of(kind: str, n: int) -> CountMethod:
    """How a project counts so many answers.

    Raises:
        DllmError: as `count`.
    """
    if kind not in COUNTS:
        raise DllmError(f"no count is called {kind!r}; choose one of {', '.join(COUNTS)}")
    if n <= COUNTS[kind].skip:
        raise DllmError(f"count {kind} leaves the first {COUNTS[kind].skip} examples out; score more than {n}")
    return COUNTS[kind]


def as_line(counted: Mapping[str, Any]) -> str:
    """The numbers of a count's fields, and what it does to them, in one line."""
    numbers = [f"{key} {value:.6g}" for key, value in counted.items() if isinstance(value, int | float)]
    return f"{' | '.join(numbers)} ({counted['distorts']})"


def _own_speeds(tokens: np.ndarray, seconds: np.ndarray, of_all: bool) -> dict[str, float]:
    """Speeds over the answers' own seconds."""
    speeds = tokens / np.maximum(seconds, 1e-9)
    total = {"tokens_per_second": float(tokens.sum() / max(seconds.sum(), 1e-9))} if of_all else {}
    return total | {
        "mean_tokens_per_second": float(speeds.mean()),
        "mean_tokens_per_second_stderr": float(speeds.std() / math.sqrt(len(speeds))),
    }


def _other_than(ids: Sequence[int], eos_id: int) -> int:
    return sum(int(token) != eos_id for token in ids)


def _encoded_again(answer: CountedAnswer, eos_id: int, encode: Encode) -> int:
    return _other_than(encode(answer.cut_text), eos_id)


def _plain_encoded_again(answer: CountedAnswer, eos_id: int, encode: Encode) -> int:
    return _other_than(encode(answer.plain_text), eos_id)


def _canvas(answer: CountedAnswer, eos_id: int, encode: Encode) -> int:
    return _other_than(answer.canvas_ids, eos_id)


def _with_prompt(answer: CountedAnswer, eos_id: int, encode: Encode) -> int:
    return _other_than([*answer.prompt_ids, *answer.canvas_ids], eos_id)


def _less_prompt(answer: CountedAnswer, eos_id: int, encode: Encode) -> int:
    return _with_prompt(answer, eos_id, encode) - len(answer.prompt_ids)


def _before_eos(answer: CountedAnswer, eos_id: int, encode: Encode) -> int:
    ids = list(map(int, answer.canvas_ids))
    return ids.index(eos_id) if eos_id in ids else len(ids)


_TOTALS = ("tokens_per_forward", "tokens_per_second")
_SPEED = ("tokens_per_second",)
_FAST_DLLM = "Fast-dLLM's lm-eval class of LLaDA (arXiv 2505.22618, code 24cc59e)"
_MEANS = ("nfe", "mean_tokens_per_second", "mean_tokens_per_second_stderr")

COUNTS: Mapping[str, CountMethod] = types.MappingProxyType(
    {
        "eb": CountMethod(
            lambda answer, eos_id, encode: answer.tokens,
            ("nfe", "nfe_until"),
            "EB-Sampler's Tables 1 and 4 to 6 (arXiv 2505.24857): columns full and generate-until, of one run",
            "with ignore_eos=true the forwards are those of the whole canvas, nfe_until those up to the answer's end",
        ),
        "fast-dllm-llada": CountMethod(
            _encoded_again,
            ("total_nfe", *_SPEED),
            _FAST_DLLM,
            "the cut text is encoded again, which may give other tokens; text after an end token counts, up to a stop "
            "string",
        ),
        "fast-dllm-llada-humaneval": CountMethod(
            _with_prompt,
            ("total_nfe", *_SPEED),
            f"{_FAST_DLLM}, HumanEval with an Instruct model; issue #15",
            "the prompt counts, as does what follows the answer: speed grows with the prompt's length",
        ),
        "fast-dllm-dream": CountMethod(
            _canvas,
            _SPEED,
            "Fast-dLLM's lm-eval class of Dream (arXiv 2505.22618, code 24cc59e)",
            "the whole canvas counts before anything is cut, so text after the answer makes it faster; no forwards",
        ),
        "d2f-llada": CountMethod(
            _plain_encoded_again,
            _SPEED,
            "D2F's lm-eval class of LLaDA (arXiv 2508.09192, code 880dfd1)",
            "the cut text is encoded again; the forwards that the script prints are 1 an answer, so none are reported",
        ),
        "d2f-dream": CountMethod(
            _canvas,
            _SPEED,
            "D2F's lm-eval class of Dream (arXiv 2508.09192, code 880dfd1)",
            "the whole canvas counts; the forwards that the script prints are its diffusion_steps, so there are none",
        ),
        "ni": CountMethod(
            lambda answer, eos_id, encode: len(answer.canvas_ids),
            ("nfe", *_SPEED),
            "NI-Sampling, paper (arXiv 2604.18471): 14.4 tokens/s are 512 positions over the time of 512 steps",
            "every position of the canvas counts, whatever stands there: the speed of a short answer is that of a long "
            "one",
        ),
        "apd": CountMethod(
            lambda answer, eos_id, encode: answer.committed,
            _MEANS,
            "APD, its apd and leftright samplers (arXiv 2506.00413, code a555561)",
            "all accepted tokens count, those after an end token too; speed is the mean of the answers' own, in which "
            "short ones weigh as much as long ones",
        ),
        "apd-dllm": CountMethod(
            _before_eos,
            _MEANS,
            "APD, its other samplers of a dLLM (arXiv 2506.00413, code a555561)",
            "stop strings do not end an answer; speed is the mean of the answers' own",
        ),
        "dinfer": CountMethod(
            _less_prompt,
            ("nfe", *_TOTALS, "mean_tokens_per_forward", "mean_tokens_per_second"),
            "dInfer's benchmark (arXiv 2510.08666, code fce4e32)",
            "tokens after an end token count, and an end token in the prompt takes one away",
            time="answers",
        ),
        "dinfer-paper": CountMethod(
            _before_eos,
            ("nfe", "mean_tokens_per_forward", *_MEANS[1:]),
            "dInfer's paper (arXiv 2510.08666): tokens before the first end token, means over sequences",
            "stop strings do not end an answer; both ratios are means of the answers' own, in which short ones weigh "
            "as much as long ones",
        ),
        "d3llm": CountMethod(
            _encoded_again,
            ("total_nfe", *_TOTALS),
            "d3LLM's evaluation, from which AUP is computed (arXiv 2601.07568, code e5bfcac)",
            f"as fast-dllm-llada, never with the prompt; the first {WARM_UP} examples are left out",
            time="answers",
            skip=WARM_UP,
        ),
    }
)
"""Name -> how it counts."""
