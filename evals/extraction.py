"""The part of an answer that is scored: code, numbers, letters and boxed results.

`last_number` and `chosen_letter` are the library's own (`evals.tasks.text`). The others take what the papers'
evaluations take: `last_bare_number` reads 234 in 1,234 and stops at "Question:"; `option_letter` ignores the case of
"answer is" and passes over the words "A" and "I".
"""

import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from samplers.stopping import stop_at

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_BARE_NUMBER = re.compile(r"-?\d+\.\d+|-?\d+")
_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_LETTER = re.compile(r"(?<![A-Za-z0-9'])([A-J])(?![A-Za-z0-9'])")
_ANSWER_IS = re.compile(r"[Aa]nswer(?: is|:)[ :*]*\(?([A-J])(?![A-Za-z0-9'])")


def tokens_before_stop(pieces: Sequence[bytes], stop: Sequence[str]) -> int:
    """How many tokens of an answer begin before its first stop string; all where there is none.

    Args:
        pieces: the bytes that each token adds to the text (`dllm_jax.text.tokenizer.token_bytes`).
    """
    text = b"".join(pieces)
    end = stop_at(text, [item.encode() for item in stop])
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    return len(pieces) if end == len(text) else int((starts < end).sum())


def python_fence(text: str) -> str:
    """What follows the first line "```python", up to the next fence; the whole text where there is no such line."""
    _, mark, rest = text.partition("```python\n")
    return rest.partition("```")[0] if mark else text


def first_fence(text: str) -> str:
    """The first fenced block, else the whole text; without white space in front."""
    found = _FENCED.search(text)
    return (found[1] if found else text).lstrip()


def before_fence(text: str) -> str:
    """The text up to a closing fence, where the prompt opened one."""
    return text.partition("```")[0]


def begin_done(text: str) -> str:
    """What stands between the marks [BEGIN] and [DONE], with or without brackets, without quotes or a fence around.

    Either mark may be missing: a prompt may have set the first, and an answer be cut before the second.
    """
    begun = re.split(r"\[BEGIN\]|^\s*BEGIN\b", text, maxsplit=1, flags=re.MULTILINE)[-1]
    code = re.split(r"\[DONE\]|^\s*'?DONE\b", begun, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if "```" in code:
        code = first_fence(code).partition("```")[0].strip()
    if len(code) > 1 and code[0] == code[-1] and code[0] in "'\"" and not code.startswith(("'''", '"""')):
        code = code[1:-1].strip()
    return code


def last_number(text: str) -> Decimal | None:
    """The last number of a text, commas between thousands left out; None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def last_bare_number(text: str) -> str | None:
    """The last integer or decimal before the next "Question:"; a comma ends a number."""
    found = _BARE_NUMBER.findall(text.partition("Question:")[0])
    return found[-1] if found else None


def chosen_letter(text: str) -> str | None:
    """The letter from A to J that an answer chooses: after its last "answer is" or "answer:", else the first that
    stands alone; None where there is none."""
    found = _ANSWER_IS.findall(text) or _LETTER.findall(text)[:1]
    return found[-1] if found else None


def option_letter(text: str, options: str = "ABCD") -> str | None:
    """The letter of the chosen option: the last after "answer is" or "answer:", else the first that stands alone.

    An "A" or "I" before another word is taken for that word of English, unless nothing else is there.
    """
    letter = f"[{options}]"
    stated = re.findall(rf"answer(?:\s+is)?\s*:?\s*\**\(?({letter})\b", text, re.IGNORECASE)
    stated = [found for found in stated if found in options]
    if stated:
        return stated[-1]
    alone = re.search(rf"\b(?!(?:A|I) [a-z])({letter})\b", text) or re.search(rf"\b({letter})\b", text)
    return alone[1] if alone else None


def stated_letter(text: str, statement: str, options: str) -> str | None:
    """The letter after a statement ("The correct answer is", "ANSWER:"), in brackets or not; of several the last."""
    found = re.findall(rf"{re.escape(statement)}\s*\**\(?([{options}])\b", text, re.IGNORECASE)
    return str(found[-1]).upper() if found else None


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} or \\fbox{...}, braces inside and all; None where no such box is closed."""
    best, answer, opened = -1, None, list[int]()
    for found in re.finditer(r"\\(?:boxed|fbox)\s*\{|[{}]", text):
        if found[0] != "}":
            opened.append(found.end() if found[0] != "{" else -1)
        elif opened and (start := opened.pop()) > best:
            best, answer = start, text[start : found.start()]
    return answer
