"""Questions of a file: what a line may be, how answers are judged, and that a run's score is that of a hand count."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dllm_jax
import evals
from convert import embedded
from dllm_jax import DllmError
from evals import __main__ as cli
from evals.extraction import chosen_letter, last_number
from evals.paper_figures import FIGURES
from evals.runner import prepare_batches
from evals.tasks import Example, TextTask, WordProblems, make_task
from evals.tasks.text import Question, write_questions
from samplers import generate
from samplers.text.prompts import add_start_token, encode_prompt

EXAMPLES = Path(evals.__file__).parent / "examples" / "questions.jsonl"
SUM = {"prompt": "2 + 3?", "target": "5"}


def write(path, *lines):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@pytest.fixture
def file(tmp_path):
    return lambda *lines: write(tmp_path / "q.jsonl", *lines)


class Talking:
    """A model whose tokens are characters."""

    @property
    def tokenizer(self):
        return self

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def judged(score, text, *targets):
    task = TextTask(file="x", score=score, questions=(Question("x line 1", "?", targets, "test"),), model=Talking())
    return task.verify(Example([], [], problem=task.questions[0]), [ord(letter) for letter in text])


# Lines


def test_lines_become_questions_of_a_split(file):
    path = file(
        SUM,
        {"messages": [{"role": "user", "content": "Hi"}], "target": ["Ho", " Hey "], "id": 7},
        "",
        {"prompt": "3?", "target": "3", "split": "validation", "tokens": 9, "text": "any key"},
    )
    task = make_task(f"text:file={path}")
    assert (task.count("test"), task.count("validation")) == (2, 1)
    assert [question.targets for question in task.questions] == [("5",), ("Ho", "Hey"), ("3",)]
    assert task.question(task.example("test", 1)) == "user: Hi" and task.reference(task.example("test", 1)) == "Ho\nHey"
    assert task.questions[2].where == f"{path} line 4"
    with pytest.raises(
        DllmError, match=r'has no train lines \(of all: 1 validation, 2 test\); give some lines "split": "train"'
    ):
        task.count("train")
    with pytest.raises(DllmError, match="index is 2, but .* has 2 test lines .*; the last index is 1"):
        task.example("test", 2)
    assert str(task) == f"text:file={path}" and make_task(str(task)) == task


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ({"target": "5"}, '"messages"'),
        ({"prompt": "", "target": "5"}, "prompt"),
        ({"messages": [{"role": "poet", "content": "a"}], "target": "5"}, "'poet'"),
        ({"prompt": "a"}, '"target"'),
        ({"prompt": "a", "target": 5}, '"target"'),
        ({"prompt": "a", "target": []}, '"target"'),
        ({"prompt": "a", "target": "b", "split": "dev"}, "'dev'"),
    ],
)
def test_bad_lines_are_named_by_their_number(file, line, complaint):
    with pytest.raises(DllmError) as caught:
        make_task(f"text:file={file(SUM, line)}")
    assert str(caught.value).startswith(f"{file(SUM, line)} line 2: ") and complaint in str(caught.value)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ("", "no file"),
        ("file=/none.jsonl", "/none.jsonl"),
        ("file={},gen_length=0", "gen_length is 0"),
        (
            "file={},score=best",
            "'best'",
        ),
        ("file={},score=regex:(", r"'regex:\('"),
        ("file={},score=nowhere:f", "'nowhere:f'"),
        ("file={},score=math:pi", "'math:pi'"),
        ("file={},score=choice", "line 1: target '5'"),
        ("file={},score=math:fsum", "line 1: score math:fsum"),
        ("file={},stop=a||b", r"'a\|\|b'"),
        ("file={},steps=3", "'steps'"),
    ],
)
def test_bad_options_are_one_sentence(file, options, complaint):
    with pytest.raises(DllmError, match=complaint) as caught:
        make_task(f"text:{options.format(file(SUM))}")
    assert "\n" not in str(caught.value)


# Scores


@pytest.mark.parametrize(
    "score, text, targets, right",
    [
        ("exact", " Paris\n", ("Paris",), True),
        ("exact", "Paris.", ("Paris",), False),
        ("exact", "b", ("a", "b"), True),
        ("contains", "It is Paris.", ("Rome", "Paris"), True),
        ("contains", "It is paris.", ("Paris",), False),
        ("number", "10-5 = 5.0, so 5", ("5",), True),
        ("number", "That makes $1,234.50.", ("1234.5",), True),
        ("number", "5 or 6", ("5",), False),
        ("number", "minus: -3", ("-3",), True),
        ("number", "none", ("0",), False),
        ("choice", "The answer is (B), not A.", ("B",), True),
        ("choice", "B) because A is wrong", ("B",), True),
        ("choice", "It's I've Banana", ("B",), False),
        ("regex:#### *([0-9]+)", "#### 12 #### 13", ("12",), True),
        ("regex:#### *([0-9]+)", "12", ("12",), False),
        ("regex:[0-9]+", "about 12 or 13", ("12",), True),
    ],
)
def test_scores(score, text, targets, right):
    verdict = judged(score, text, *targets)
    assert (verdict.correct, verdict.strict) == (right, right)


def test_numbers_and_letters():
    assert [last_number(text) for text in ("10-5", "1,2,3", "1,000,000.", "x")] == [5, 3, 1000000, None]
    assert chosen_letter("Answer: **C**") == "C" and chosen_letter("Cats and Dogs") is None


def test_a_function_of_one_s_own(monkeypatch, file):
    module = ModuleType("mine")
    module.longer = lambda text, targets: len(text) > len(targets[0])
    module.number = lambda text, targets: len(text)
    monkeypatch.setitem(sys.modules, "mine", module)
    assert judged("mine:longer", "abc", "ab").correct and not judged("mine:longer", "a", "ab").correct
    with pytest.raises(DllmError, match="line 1: score mine:number gave 1"):
        make_task(f"text:file={file(SUM)},score=mine:number")


# Prompts and answers


def test_prompts_are_the_model_s_own_tokens(llada_tiny, file):
    path = file(
        SUM, {"messages": [{"role": "user", "content": "Hi"}], "target": "5"}, {"prompt": [65, 66], "target": "C"}
    )
    plain = make_task(f"text:file={path}").bind(llada_tiny)
    assert bytes(plain.example("test", 0).prompt_ids.tolist()).decode() == SUM["prompt"]
    assert plain.example("test", 2).prompt_ids.tolist() == [65, 66]
    chat = make_task(f"text:file={path},chat=true,system=Be brief").bind(llada_tiny)
    for index, prompt in enumerate((SUM["prompt"], [{"role": "user", "content": "Hi"}])):
        ids = encode_prompt(llada_tiny, prompt, chat=True, system="Be brief")
        assert chat.example("test", index).prompt_ids.tolist() == ids
    with pytest.raises(DllmError, match="line 1: 'a€'"):
        make_task(f"text:file={file({'prompt': 'a€', 'target': 'b'})}").bind(llada_tiny).example("test", 0)


def test_start_tokens_are_the_model_s(dream_tiny):
    starting = dataclasses.replace(dream_tiny, config=dream_tiny.config.replace(bos_id=7))
    assert add_start_token(starting, []) == [7] and add_start_token(starting, [3, 4]) == [3, 4]
    without = dataclasses.replace(dream_tiny, config=dream_tiny.config.replace(bos_id=None))
    with pytest.raises(DllmError, match="a prompt is empty and .* has no start token"):
        add_start_token(without, [])


def test_an_answer_ends_before_a_stop_string(llada_tiny, file):
    path = file(SUM)
    (whole,) = evals.run(llada_tiny, f"text:file={path},gen_length=16", "topk:k=2", n=1, progress=False).rows
    stop = next(whole.text[i : i + 2] for i in range(3, 12) if not {*whole.text[i : i + 2]} & set(",|\\"))
    task = f"text:file={path},gen_length=16,stop=never|{stop}"
    (row,) = evals.run(llada_tiny, task, "topk:k=2", n=1, progress=False).rows
    assert row.text == whole.text[: whole.text.index(stop)] and row.tokens == len(row.ids) == len(row.text)
    assert make_task(rf"text:file={path},stop=\n\n|a\\b").stop_strings == ("\n\n", "a\\b")


# Runs


@pytest.fixture(scope="module")
def solver(tmp_path_factory):
    return dllm_jax.load(embedded.install("word-problems", tmp_path_factory.mktemp("home") / "word-problems"))


def test_the_example_file_holds_word_problems_as_text():
    task, lines = WordProblems(), [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    for index, line in enumerate(lines):
        example = task.example("test", index)
        assert line == {"id": index, "prompt": task.texts("test", index)[0], "target": str(example.problem.answer)}


def test_a_file_scores_what_its_problems_score_and_a_hand_count_agrees(solver):
    """A rule that is too keen, so that some answers are wrong."""
    length, sampler = WordProblems().bind(solver).answer_width, "topk:k=8"
    text = f"text:file={EXAMPLES},gen_length={length},score=regex:#### *([0-9]+)"
    lines = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    ours = evals.run(solver, text, sampler, progress=False)
    theirs = evals.run(solver, "word-problems", sampler, n=len(lines), batch_size=len(lines), progress=False)
    assert ours.n == len(lines) and 0 < ours.accuracy < 1 and ours.accuracy == theirs.accuracy
    assert [(r.correct, r.text, r.tokens, r.nfe) for r in ours.rows] == [
        (r.correct, r.text, r.tokens, r.nfe) for r in theirs.rows
    ]
    options = {"cache": "none", "block_length": None, "gen_length": length, "batch_size": len(lines)}
    answers = generate(solver, [line["prompt"] for line in lines], sampler=sampler, **options)
    found = [re.search("#### *([0-9]+)", answer.text) for answer in answers]
    right = sum(match is not None and match[1] == line["target"] for match, line in zip(found, lines, strict=True))
    assert ours.accuracy == right / len(lines)


def test_commands_take_a_file(solver, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    task, model = f"text:file={EXAMPLES},gen_length=32,score=number", str(solver.folder)

    def command(*arguments):
        assert cli.main(list(arguments)) == 0
        return capsys.readouterr().out

    shown = command("show", "--task", task, "--split", "test")
    assert shown.startswith("Q: Leo has 14 apples.") and shown.endswith("A: \n\n14\n")
    small = ("--task", task, "--model", model)
    out = command("compare", *small, "--sampler", "topk:k=8", "--index", "1")
    assert out.startswith("Q: Sam has 26 nuts.") and "topk:k=8" in out
    assert "times fewer forwards" in command("oracle", *small, "--sampler", "topk:k=8", "--n", "2")
    command("sweep", *small, "--sampler", "topk:k=8|16", "--n", "2", "--out", str(tmp_path), "--count", "ni")
    reports = json.loads((tmp_path / "results.json").read_text())["reports"]
    assert [report["compat_count"]["ni"]["tokens"] for report in reports] == [32, 32]
    assert cli.main(["tokenizer", "--task", task, "--out", str(tmp_path / "t")]) == 2
    assert "text is in the tokens of any model" in capsys.readouterr().err


def test_a_file_is_scored_whole_unless_a_number_is_said(llada_tiny, file):
    path = file(*[SUM] * 3)
    batches = [prepare_batches(llada_tiny, f"text:file={path}", "topk", n, 2, 0, "test")[1] for n in (None, 2, 9)]
    assert [len(found.examples) for found in batches] == [3, 2, 3]
    with pytest.raises(DllmError, match="--data"):
        make_task(f"text:file={path}").source("train")


def test_figures_of_answers_in_words_take_a_file(file):
    task = make_task(f"text:file={file(SUM)}")
    fits = {name for name, figure in FIGURES.items() if figure.fits(task)}
    assert fits == {"apd", "fast-dllm", "dinfer", "d2f", "ni", "nemotron", "compression"}
    assert not FIGURES["eb-maze"].fits(make_task("sudoku")) and FIGURES["apd"].fits(WordProblems())


def test_a_tasks_problems_become_questions_for_any_model(llada_tiny, tmp_path):
    problems = WordProblems()
    file = write_questions(problems, tmp_path / "x.jsonl", ask="Please:\n{}", test=2, validation=1)
    task = make_task(f"text:file={file},score=number").bind(llada_tiny)
    assert (task.count("test"), task.count("validation")) == (2, 1)
    for split, index in (("test", 0), ("test", 1), ("validation", 0)):
        known, found = problems.example(split, index), task.example(split, index)
        assert task.question(found) == f"Please:\n{problems.question(known)}"
        assert task.reference(found) == problems.reference(known).strip()
        right = llada_tiny.tokenizer.encode(f"I think {known.problem.answer}", add_special_tokens=False)
        assert task.verify(found, right).correct
    with pytest.raises(DllmError, match="{}"):
        write_questions(problems, tmp_path / "y.jsonl", ask="Please", test=1)
    with pytest.raises(DllmError, match="y.jsonl"):
        write_questions(problems, tmp_path / "no" / "y.jsonl", test=1)
