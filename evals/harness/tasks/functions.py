"""The functions that the YAML files next to this one name by `!function`: they prepare documents and score answers.

Programs run in the box of `evals.sandbox`, all of a task together. If the machine has no box, the task is refused
before anything is generated, unless the environment has DLLM_UNSAFE_PROGRAMS=1.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from dllm_jax.errors import DllmError
from evals.distributed import current_processes
from evals.extraction import (
    before_fence,
    begin_done,
    boxed,
    first_fence,
    last_bare_number,
    option_letter,
    python_fence,
    stated_letter,
)
from evals.sandbox import require_box, run_programs, sanitize

Doc = dict[str, Any]
Answers = Sequence[Sequence[str]]  # per document, one per repeat


def runnable(documents: Any) -> Any:
    """The documents as they are, once it is known that their programs can be run (`process_docs`).

    Raises:
        DllmError: where they cannot.
    """
    require_box(_unsafe())
    return documents


def _unsafe() -> bool:
    return os.environ.get("DLLM_UNSAFE_PROGRAMS") == "1"


def _run_answers(answers: Answers, documents: Sequence[Doc], program: Callable[[Doc, str], str]) -> list[list[Doc]]:
    """Filter: of each answer the program that was made of it, whether it passed, and why not. Processes that share an
    evaluation share the programs, so that each is run once."""
    programs = [program(doc, text) for texts, doc in zip(answers, documents, strict=True) for text in texts]
    found = iter(current_processes().each(programs, _run))
    return [[next(found) for _ in texts] for texts in answers]


def _run(programs: Sequence[str]) -> list[Doc]:
    outcomes = run_programs(programs, unsafe=_unsafe(), progress=None if current_processes().first else False)
    pairs = zip(programs, outcomes, strict=True)
    return [{"program": code, "passed": o.passed, "reason": o.reason} for code, o in pairs]


def pass_at_1(_: Doc, results: Sequence[Sequence[Doc]]) -> dict[str, float]:
    """The share of a document's programs that passed (`process_results`)."""
    passed = [row["passed"] for row in results[0]]
    return {"pass_at_1": sum(passed) / len(passed)}


def humaneval_oc(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """The stub, and after it the first fenced block, which repeats the signature."""
    return _run_answers(answers, documents, lambda doc, text: _humaneval(doc, doc["prompt"] + first_fence(text)))


def humaneval_sanitize(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """The stub and the answer's Python block, or all of it, sanitized."""
    return _run_answers(answers, documents, lambda doc, text: _humaneval(doc, _sanitized(doc, python_fence(text))))


def humaneval_prefixed(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """The stub that the prompt ends with, what was written after it up to the closing fence, sanitized."""
    return _run_answers(answers, documents, lambda doc, text: _humaneval(doc, _sanitized(doc, before_fence(text))))


def _sanitized(doc: Doc, code: str) -> str:
    return sanitize(f"{doc['prompt']}\n{code}", doc["entry_point"])


def _humaneval(doc: Doc, code: str) -> str:
    return f"{code}\n\n{doc['test']}\ncheck({doc['entry_point']})\n"


def mbpp_oc(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """What stands between the marks."""
    return _run_answers(answers, documents, lambda doc, text: _mbpp(doc, begin_done(text)))


def mbpp_sanitize(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """The answer's Python block, or all of it before [DONE], sanitized; every definition stays."""
    return _run_answers(answers, documents, lambda doc, text: _mbpp(doc, sanitize(begin_done(python_fence(text)))))


def mbpp_prefixed(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """What was written after the opening fence of the prompt."""
    return _run_answers(answers, documents, lambda doc, text: _mbpp(doc, before_fence(text)))


def mbpp_llada_moe(answers: Answers, documents: Sequence[Doc]) -> list[list[Doc]]:
    """The first fenced block, and without one what stands between the marks."""
    return _run_answers(
        answers, documents, lambda doc, text: _mbpp(doc, first_fence(text) if "```" in text else begin_done(text))
    )


def _mbpp(doc: Doc, code: str) -> str:
    """Set-up follows the code, whose classes it uses."""
    return "\n".join([code, *doc.get("test_imports", ()), doc.get("test_setup_code", ""), *doc["test_list"], ""])


def mbpp_shots(documents: Any) -> Any:
    """The problems 2, 3 and 4, which the benchmark's authors set aside as examples."""
    return documents.filter(lambda doc: doc["task_id"] in (2, 3, 4))


def every_split(path: str, name: str | None = None, data_files: Any = None, **_: Any) -> dict[str, Any]:
    """All splits as one, `test`: the file of 427 sanitized problems that the hub has in four (`custom_dataset`)."""
    import datasets

    found = datasets.load_dataset(path, name, data_files=data_files)
    return {"test": datasets.concatenate_datasets([found[split] for split in sorted(found)])}


def number(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Whether the last number before a next question is the one after the reference's "####" (`process_results`)."""
    found, wanted = last_bare_number(results[0]), doc["answer"].rpartition("####")[2].replace(",", "")
    return {"exact_match": float(found is not None and abs(float(found) - float(wanted)) < 1e-6)}


def mathematics(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Whether the last box, or without one what follows the last "answer is", equals the answer (`process_results`)."""
    from lm_eval.tasks.hendrycks_math.utils import is_equiv

    found = boxed(results[0])
    if found is None:
        found = re.split(r"\.(?:\s|$)|\n", results[0].rpartition("answer is")[2], maxsplit=1)[0].strip(" :$")
    return {"exact_match": float(is_equiv(found, doc["answer"]))}


def letters(answers: Answers, documents: Sequence[Doc]) -> list[list[str]]:
    """Filter: the letter of the chosen option."""

    def options(doc: Doc) -> str:
        choices = doc["endings"] if "endings" in doc else doc["choices"]
        return "ABCDEFGHIJ"[: len(choices["text"] if isinstance(choices, dict) else choices)]

    pairs = zip(answers, documents, strict=True)
    return [[option_letter(text, options(doc)) or "" for text in texts] for texts, doc in pairs]


def letters_behind_answer(answers: Answers, _: Sequence[Doc]) -> list[list[str]]:
    """Filter: the letter after "ANSWER:", of up to ten options."""
    return [[stated_letter(text, "ANSWER:", "ABCDEFGHIJ") or "" for text in texts] for texts in answers]


def letters_behind_correct_answer(answers: Answers, _: Sequence[Doc]) -> list[list[str]]:
    """Filter: the letter after "The correct answer is", of four."""
    return [[stated_letter(text, "The correct answer is", "ABCD") or "" for text in texts] for texts in answers]


def gpqa_choices(documents: Any) -> Any:
    """GPQA's documents with `choice1` to `choice4`, the right one moving on by one place each, and `letter` (ours)."""

    def choices(doc: Doc, index: int) -> Doc:
        wrong = [doc[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3)]
        at = index % 4
        ordered = [*wrong[:at], doc["Correct Answer"].strip(), *wrong[at:]]
        return {f"choice{i + 1}": text for i, text in enumerate(ordered)} | {"letter": "ABCD"[at]}

    return documents.map(choices, with_indices=True)


def instructions(doc: Doc, results: Sequence[str]) -> dict[str, Any]:
    """IFEval's four metrics, by the harness's own checks (`process_results`).

    Raises:
        DllmError: without the packages of the checks.
    """
    return dict(_ifeval().process_results(doc, results))


def instructions_known(documents: Any) -> Any:
    """The documents as they are, once it is known that they can be checked (`process_docs`)."""
    _ifeval()
    return documents


def _ifeval() -> Any:
    try:
        from lm_eval.tasks.ifeval import utils
    except ImportError as error:
        raise DllmError(f"IFEval's checks need a package more ({error.name}); pip install 'lm-eval[ifeval]'") from None
    return utils


def mean_of_all(items: Sequence[Sequence[bool]]) -> float:
    """The share of all instructions of all prompts (`aggregation`)."""
    every = [followed for item in items for followed in item]
    return sum(every) / len(every)
