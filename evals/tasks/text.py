"""Your own questions: a file of JSON lines, each with a prompt and the answers that are right.

    python -m evals run --model DIR --task text:file=questions.jsonl,score=number --sampler threshold

    {"prompt": "Q: 2 + 3?\\nA: ", "target": "5"}
    {"messages": [{"role": "user", "content": "Name a prime below 4."}], "target": ["2", "3"], "id": 7}

Prompts become tokens by the model's own tokenizer and chat template. Answers end at the model's end tokens and at
`stop`, and are compared as text (docs/evaluate.md).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from dllm_jax import Model, spec
from dllm_jax.errors import DllmError
from dllm_jax.storage import write_file
from dllm_jax.text.tokenizer import check_messages, encode_text
from evals.extraction import chosen_letter, last_number
from evals.tasks.base import SPLITS, Example, Ids, Source, Task, Verdict, check_index, check_split
from samplers.checks import check_length
from samplers.text.decode import text_of
from samplers.text.prompt_files import PromptFile, prompt_of
from samplers.text.prompts import encode_prompt

Score = Callable[[str, tuple[str, ...]], bool]
"""Whether an answer's text is right, given the targets."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A line of a file.

    Attributes:
        where: the file and the line's number, for sentences.
        prompt: a text, token ids or messages.
        targets: the right answers; one is enough.
        split: of `SPLITS`.
    """

    where: str
    prompt: Any
    targets: tuple[str, ...]
    split: str


@dataclasses.dataclass(frozen=True)
class TextTask(Task):
    """Questions of a file, whose answers are compared as text.

    Attributes:
        file: JSON lines with "prompt" or "messages", and "target", a text or a list of them; "split" is one of train,
            validation and test, by default "test". Other keys are for the reader.
        chat: put a prompt that is a text into the model's chat template, as the user's message.
        system: a system message in front of the conversation.
        score: when an answer is right. "exact": it is a target, spaces around it apart. "contains": a target is part of
            it. "number": its last number is the last one of a target. "choice": the letter that it chooses, the one
            after "answer is" or else the first that stands alone, is a target. "regex:PATTERN": what the pattern's
            first group, or else the whole pattern, first finds is a target. "MODULE:FUNCTION": a function of the
            answer and a tuple of the targets says True or False.
        gen_length: positions to generate.
        stop: texts that end an answer, with | between them; \\n, \\t and \\\\ are a new line, a tab and a backslash.
        questions: the file's, which is read by default.
        model: in whose tokens the examples are, see `bind`; without one they have no token ids.
    """

    name: ClassVar[str] = "text"
    stops: ClassVar[bool] = True

    file: str = ""
    chat: bool = False
    system: str | None = None
    score: str = "exact"
    gen_length: int = 256
    stop: str | None = None
    questions: tuple[Question, ...] | None = dataclasses.field(default=None, repr=False, compare=False)
    model: Model | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.file:
            raise DllmError("task text has no file; write text:file=questions.jsonl")
        check_length("gen_length", self.gen_length)
        if "" in self.stop_strings:
            raise DllmError(f"stop {self.stop!r} has an empty text; write texts with | between them")
        if self.questions is None:
            object.__setattr__(self, "questions", read_questions(self.file))
        self._check()

    def example(self, split: str, index: int) -> Example:
        check_index("index", index)
        last = self.count(split) - 1
        if index > last:
            raise DllmError(f"index is {index}, but {self._describe_split(split)}; the last index is {last}")
        question = self._of(split)[index]
        ids = [] if self.model is None else self._encoded(question, self.model)
        return Example(np.array(ids, np.int32), np.zeros(0, np.int32), problem=question)

    def count(self, split: str) -> int:
        if not self._of(split):
            advice = f'give some lines "split": "{split}", or take a split that has some'
            raise DllmError(f"{self._describe_split(split)}; {advice}")
        return len(self._of(split))

    def verify(self, example: Example, ids: Ids) -> Verdict:
        """
        Raises:
            DllmError: when a function of the user's fails, or says neither True nor False.
        """
        question: Question = example.problem
        text = self.show(ids)
        correct = _verdict_of(self._score, self.score, text, question)
        return Verdict(correct=correct, strict=correct, exact=text.strip() in question.targets)

    def show(self, ids: Ids) -> str:
        """An answer's text, up to the first stop string."""
        if self.model is None:
            raise DllmError("task text has no tokens before it was bound to a model; use task.bind(model)")
        return text_of(self.model, [int(i) for i in ids if i >= 0], self.stop_strings)

    def question(self, example: Example) -> str:
        prompt = example.problem.prompt
        if isinstance(prompt, str):
            return prompt
        return "\n".join(f"{x['role']}: {x['content']}" if isinstance(x, Mapping) else str(x) for x in prompt)

    def reference(self, example: Example) -> str:
        return "\n".join(example.problem.targets)

    def with_reference(self, example: Example) -> Example:
        targets = example.problem.targets
        if self.model is None or len(targets) > 1:
            return example
        ids = encode_text(self.model.require_tokenizer(), targets[0])
        return dataclasses.replace(example, answer_ids=np.array(ids, np.int32))

    @property
    def prompt_width(self) -> int:
        return 0

    @property
    def answer_width(self) -> int:
        return self.gen_length

    @functools.cached_property
    def stop_strings(self) -> tuple[str, ...]:
        texts = [] if self.stop is None else self.stop.split("|")
        return tuple(re.sub(r"\\([nt\\])", _unescaped, text) for text in texts)

    def bind(self, model: Model) -> Self:
        model.require_tokenizer()
        return dataclasses.replace(self, model=model)

    def source(self, split: str = "train") -> Source:
        """The questions of a split, for learning from rewards; bound to a model.

        Raises:
            DllmError: for the test split, one without lines, and a task that is bound to no model: its answers are
                texts to compare with, not to learn.
        """
        if self.model is None:
            raise DllmError(
                f"task text has no tokens to learn; train on {self.file} by --data, or by python -m train grpo, which "
                "rewards right answers"
            )
        return Questions(self, split)

    @property
    def _all(self) -> tuple[Question, ...]:
        return self.questions or ()

    def _of(self, split: str) -> list[Question]:
        check_split(split)
        return [question for question in self._all if question.split == split]

    def _describe_split(self, split: str) -> str:
        counts = {name: len(self._of(name)) for name in SPLITS}
        every = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"{self.file} has {counts[split] or 'no'} {split} lines (of all: {every})"

    def _encoded(self, question: Question, model: Model) -> list[int]:
        try:
            return encode_prompt(model, question.prompt, chat=self.chat, system=self.system)
        except DllmError as error:
            raise DllmError(f"{question.where}: {error}") from None

    @functools.cached_property
    def _score(self) -> Score:
        return score_of(self.score)

    def _check(self) -> None:
        """Refuses targets that no answer could be right by, and functions that fail."""
        fits, complaint = _NEEDS.get(self.score, (lambda target: True, ""))
        for question in self._all:
            for target in question.targets:
                if not fits(target):
                    raise DllmError(f"{question.where}: target {target!r} {complaint}")
        _verdict_of(self._score, self.score, self._all[0].targets[0], self._all[0])


class Questions(Source):
    """The questions of a split as a trainer takes them; of which there are `len`."""

    def __len__(self) -> int:
        count = self.task.count(self.split)
        assert count is not None
        return count

    def name(self, index: int) -> str:
        """The file and the line's number."""
        return str(self.example(index).problem.where)


def read_questions(file: str) -> tuple[Question, ...]:
    """The lines of a file.

    Raises:
        DllmError: naming the first line that is no question, or when the file cannot be read or has no lines.
    """
    lines = PromptFile(file)
    found = []
    for line in lines.lines():
        try:
            found.append(_question(lines.entry(line), lines.place(line)))
        except DllmError as error:
            raise DllmError(f"{lines.place(line)}: {error}") from None
    if not found:
        raise DllmError(f"{lines.title} has no questions; write one per line")
    return tuple(found)


def _question(entry: Mapping[str, Any], where: str) -> Question:
    prompt, targets, split = prompt_of(entry), entry.get("target"), entry.get("split", "test")
    if not prompt:
        raise DllmError("the prompt is empty; write a question")
    if "messages" in entry:
        check_messages(prompt)
    targets = targets if isinstance(targets, list) else [targets]
    if not targets or not all(isinstance(target, str) for target in targets):
        raise DllmError('it needs "target", the right answer as a text, or a list of them')
    if split not in SPLITS:
        raise DllmError(f'"split" is {split!r}; write one of {", ".join(SPLITS)}')
    return Question(where, prompt, tuple(target.strip() for target in targets), split)


def write_questions(task: Task, file: str | Path, *, ask: str = "{}", **counts: int) -> Path:
    """Writes a task's problems as questions for any model, with the reference as the target.

    Args:
        task: one whose problems are words, such as `WordProblems`; not bound to a model.
        file: JSON lines, for `TextTask`.
        ask: what a question is put into, at {}.
        counts: of each split: `test=64, validation=64`.

    Raises:
        DllmError: for an unknown split, a pattern without a place, and a file that cannot be written.
    """
    if "{}" not in ask:
        raise DllmError(f"ask is {ask!r}; say by {{}} where the question stands")
    lines = []
    for split, count in counts.items():
        for example in (task.example(split, index) for index in range(count)):
            prompt = ask.replace("{}", task.question(example))
            lines.append({"prompt": prompt, "target": task.reference(example).strip(), "split": split})
    write_file(file, "".join(json.dumps(line) + "\n" for line in lines))
    return Path(file)


# Scores


def score_of(score: str) -> Score:
    """The function behind the name of a score, see `TextTask`.

    Raises:
        DllmError: for an unknown name, a pattern that is none, and a function that cannot be imported.
    """
    kind, colon, rest = score.partition(":")
    if score in _SCORES:
        return _SCORES[score]
    if kind == "regex" and rest:
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise DllmError(f"score {score!r} is no regular expression ({error})") from None
        return lambda text, targets: _first(pattern, text) in targets
    if not kind or not rest:
        raise DllmError(
            f"no score is called {score!r}; choose one of {', '.join(_SCORES)}, regex:PATTERN, MODULE:FUNCTION"
        )
    function: Score = spec.import_object(score, "score")
    if not callable(function):
        kind = type(function).__name__
        raise DllmError(f"score {score!r} is of type {kind}; name a function of an answer and its targets")
    return function


def _verdict_of(function: Score, name: str, text: str, question: Question) -> bool:
    try:
        correct = function(text, question.targets)
    except Exception as error:  # a function of the user's can fail in any way
        raise DllmError(f"{question.where}: score {name} failed ({type(error).__name__}: {error})") from error
    if not isinstance(correct, bool | np.bool_):
        raise DllmError(f"{question.where}: score {name} gave {correct!r}; it must say True or False")
    return bool(correct)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    if match is None:
        return None
    found = match[1] if pattern.groups else match[0]
    return None if found is None else found.strip()


def _unescaped(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t"}.get(match[1], match[1])


_SCORES: Mapping[str, Score] = {
    "exact": lambda text, targets: text.strip() in targets,
    "contains": lambda text, targets: any(target in text for target in targets),
    "number": lambda text, targets: last_number(text) in map(last_number, targets),
    "choice": lambda text, targets: chosen_letter(text) in targets,
}
_NEEDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "contains": (bool, "is empty, and so part of every answer; write what must be there"),
    "number": (lambda target: last_number(target) is not None, "has no number, which score=number compares"),
    "choice": (re.compile("[A-J]").fullmatch, "is no letter from A to J, which score=choice compares"),
}
