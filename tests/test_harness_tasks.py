"""The `dllm_*` tasks, each run by lm-evaluation-harness on a few problems from a local file: prompts and scores."""

import importlib.metadata
import json
import sys
import types

import pytest

pytest.importorskip("lm_eval")

import yaml
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from test_programs import confined

from dllm_jax import DllmError
from evals import sandbox
from evals.harness.tasks import FOLDER

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


class Canned(LM):
    """Answers from a list, in order, and remembers what it was asked."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.prompts, self.untils = answers, [], []

    tokenizer_name = "canned"

    def generate_until(self, requests, disable_tqdm=False):
        self.prompts += [request.args[0] for request in requests]
        self.untils += [request.args[1]["until"] for request in requests]
        assert len(requests) == len(self.answers)
        return self.answers

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in chat_history)
        return turns + "<assistant>" * add_generation_prompt

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluated(tmp_path, name, answers, rows, *, more=None, **how):
    """Runs a task on rows of one's own: a file that includes ours and names another dataset."""
    data = {}
    for split, lines in (rows if isinstance(rows, dict) else {"test": rows}).items():
        data[split] = str(tmp_path / f"{split}.jsonl")
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    own = {"include": str(FOLDER / f"dllm_{name}.yaml"), "task": "own", "dataset_path": "json"}
    own |= {"dataset_kwargs": {"data_files": data}, "dataset_name": None} | (more or {})
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    manager = TaskManager(include_path=[str(tmp_path)], include_defaults=False)
    model = Canned(answers)
    how = {"apply_chat_template": True, "fewshot_as_multiturn": True} | how
    found = simple_evaluate(model, tasks=["own"], task_manager=manager, bootstrap_iters=0, **how)
    return model, found


def score(found, metric):
    """The one score of a metric, by its name with the filter's."""
    return found["results"]["own"][metric]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_every_task_is_known_and_says_where_its_words_are_from():
    manager = TaskManager(include_path=[str(FOLDER)], include_defaults=False)
    assert set(NAMES) <= set(manager.all_tasks)
    for name in NAMES:
        config = manager._factory._load_full_config(manager.task_index[name])  # with its functions
        assert (config.get("group") or config["task"]) == name
        assert config["metadata"]["version"] == 1.0 and "wording" in config["metadata"]
        assert "until" in config["generation_kwargs"] and not config.get("unsafe_code")


GSM8K = [
    {"question": "2+3?", "answer": "Add them.\n#### 5"},
    {"question": "Big?", "answer": "#### 1,200"},
    {"question": "Minus?", "answer": "#### -7"},
    {"question": "None?", "answer": "#### 0"},
]


def test_gsm8k_oc(tmp_path):
    answers = ["It is 5.0. Question: what is 9?", "1,200", "so -7 it is", "no number"]
    model, found = evaluated(tmp_path, "gsm8k_oc", answers, GSM8K)
    assert score(found, "exact_match,none") == 2 / 4
    shots = yaml.safe_load((FOLDER / "dllm_gsm8k_oc.yaml").read_text().replace("!function ", ""))["fewshot_config"]
    asked = "<user>Question: {}\nLet's think step by step\nAnswer:"
    turns = [asked.format(s["question"]) + f"<assistant>{s['target']}" for s in shots["samples"]]
    assert len(turns) == 4 and all(s["target"].splitlines()[-1].startswith("The answer is ") for s in shots["samples"])
    assert model.prompts[0] == "".join(turns) + asked.format("2+3?") + "<assistant>"
    assert model.untils[0] == []


def test_gsm8k_llada_moe(tmp_path):
    answers = ["The answer is 5", "The answer is $1,200.", "The answer is 7", "-"]
    model, found = evaluated(tmp_path, "gsm8k_llada_moe", answers, GSM8K, fewshot_as_multiturn=False)
    assert score(found, "exact_match,flexible-extract") == 2 / 4
    assert model.prompts[0].startswith("<user>Question: A bakery") and model.prompts[0].count("<user>") == 1
    asked = "The answer is 18\n\nQuestion: 2+3?\nPlease reason step by step.\nAnswer:<assistant>"
    assert model.prompts[0].endswith(asked)


MATH = [
    {"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "type": "Algebra"},
    {"problem": "Three?", "solution": "\\boxed{3}", "type": "Algebra"},
    {"problem": "Four?", "solution": "\\boxed{4}", "type": "Algebra"},
]


def own_group(tasks):
    """What makes a file of one's own that of a group, of these tasks."""
    return {"group": "own", "task": [{"task": name} for name in tasks]}


def test_math_oc(tmp_path):
    answers = ["\\boxed{1} so \\boxed{\\dfrac12}", "the answer is $3$. Yes", "4 is what I say"]
    more = own_group(["algebra"])
    model, found = evaluated(tmp_path, "math_oc", answers, MATH, more=more)
    assert score(found, "exact_match,none") == pytest.approx(2 / 3)
    asked = "<user>Half?\nPlease reason step by step, and put your final answer within \\boxed{}.<assistant>"
    assert model.prompts[0] == asked


def test_math_apd_is_the_mean_of_subjects(tmp_path):
    """Of three and of one problem, unweighted."""
    (tmp_path / "one.jsonl").write_text(json.dumps(MATH[2]))
    alone = {"task": "b", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "one.jsonl")}}}
    answers = ["boxed{\\frac{1}{2}}", "boxed{2}\nthen boxed{3}", "4", "no"]
    more = own_group(["a"]) | {"task": [{"task": "a"}, alone]}
    model, found = evaluated(tmp_path, "math_apd", answers, MATH, more=more, system_instruction="Be good.")
    assert score(found, "exact_match,flexible-extract") == pytest.approx((2 / 3 + 0) / 2)
    assert model.prompts[0] == "<system>Be good.<user>Problem: Half?\nAnswer:<assistant>"
    assert model.untils[0] == ["Problem:"]


STUB = 'def double(x):\n    """Twice x."""\n'
HUMANEVAL = [
    {"task_id": f"T/{i}", "prompt": STUB, "entry_point": "double", "canonical_solution": "", "test": test}
    for i, test in enumerate(
        ["def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('a') == 'aa'"] * 4
    )
]


@confined
def test_humaneval_oc(tmp_path):
    answers = [
        "Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nand\n```python\nno\n```",
        "    return 2 * x",  # left-stripped, as published: no Python any more
        "def double(x):\n    return 2 * x",
        "```python\ndef double(x):\n    return x\n```",
    ]
    model, found = evaluated(tmp_path, "humaneval_oc", answers, HUMANEVAL)
    assert score(found, "pass_at_1,none") == 2 / 4
    assert model.prompts[0] == f"<user>Complete the following Python code:\n{STUB}<assistant>"
    rows = [sample["filtered_resps"][0][0] for sample in found["samples"]["own"]]
    assert [row["passed"] for row in rows] == [True, False, True, False]
    assert rows[3]["reason"].startswith("AssertionError") and "check(double)" in rows[3]["program"]


@confined
def test_humaneval_sanitize(tmp_path):
    answers = [
        "    return 2 * x\n\nWords, (unfinished",
        "```python\ndef double(x):\n\treturn 2 * x\n\nprint(double(open('x')))\n```",
        "```python\nimport os\nos._exit(0)\n```",
        "    return x",
    ]
    model, found = evaluated(tmp_path, "humaneval_sanitize", answers, HUMANEVAL, apply_chat_template=False)
    assert score(found, "pass_at_1,none") == 2 / 4
    assert model.prompts[0] == STUB and model.untils[0] == []


@confined
def test_humaneval_instruct_dream(tmp_path):
    answers = ["    return 2 * x\n```\ndef double(x): return 0", "    return x + x", "\n    return x\n```", "```"]
    model, found = evaluated(tmp_path, "humaneval_instruct_dream", answers, HUMANEVAL)
    assert score(found, "pass_at_1,none") == 2 / 4
    request = "<user>Complete the following Python function so that it does what is asked of it:\n```python\n"
    assert model.prompts[0] == f"{request}{STUB}<assistant>Here is the completed function:\n```python\n{STUB}"


MBPP_TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(2, 2) == 4"]
MBPP = [{"task_id": i, "text": "Add.", "code": "", "test_list": MBPP_TESTS, "test_setup_code": ""} for i in range(4)]
PAPER = "You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n"
SHOTS = [
    {"task_id": i, "text": f"Shot {i}.", "code": f"code{i}", "test_list": [f"test{i}"], "test_setup_code": ""}
    for i in range(1, 11)
]
RIGHT = "def add(a, b):\n    return a + b"


@confined
def test_mbpp_oc(tmp_path):
    answers = [
        f"{RIGHT}\n[DONE]\n more",
        f"'{RIGHT}'\n[DONE]",
        f"[BEGIN]\n```python\n{RIGHT}\n```",
        "def add(a, b): return 0",
    ]
    model, found = evaluated(tmp_path, "mbpp_oc", answers, {"test": MBPP, "prompt": SHOTS})
    assert score(found, "pass_at_1,none") == 3 / 4
    asked = f"<user>{PAPER}"
    shots = [asked.format(f"Shot {i}.") + f"test{i}\n<assistant>[BEGIN]\ncode{i}\n[DONE]" for i in (2, 3, 4)]
    last = asked.format("Add.") + "\n".join(MBPP_TESTS) + "\n<assistant>[BEGIN]\n"
    assert model.prompts[0] == "".join(shots) + last


@confined
def test_mbpp_sanitize(tmp_path):
    answers = [f"{RIGHT}\nprint(add", f"```python\n{RIGHT}\nexit()\n```", f"{RIGHT}\n[DONE]\nwords", "words"]
    how = {"apply_chat_template": True, "fewshot_as_multiturn": False}
    model, found = evaluated(tmp_path, "mbpp_sanitize", answers, {"test": MBPP, "prompt": SHOTS}, **how)
    assert score(found, "pass_at_1,none") == 3 / 4
    shots = [PAPER.format(f"Shot {i}.") + f"test{i}\n[BEGIN]\ncode{i}\n[DONE]\n\n" for i in (2, 3, 4)]
    last = PAPER.format("Add.") + "\n".join(MBPP_TESTS) + "\n[BEGIN]\n<assistant>"
    assert model.prompts[0] == "<user>" + "".join(shots) + last


@confined
def test_mbpp_instruct_dream(tmp_path):
    setup = [row | {"test_setup_code": "one = add(0, 1)", "test_list": ["assert one == 1"]} for row in MBPP[:1]]
    answers = [RIGHT, f"{RIGHT}\n```\nwords", "import socket\nsocket.create_connection(('127.0.0.1', 1))", RIGHT]
    model, found = evaluated(tmp_path, "mbpp_instruct_dream", answers, [*MBPP[:3], *setup])
    assert score(found, "pass_at_1,none") == 3 / 4 and model.untils[0] == ["```"]
    asked = "<user>Write Python code for this task:\nAdd.\nIt has to pass these tests:\n" + "\n".join(MBPP_TESTS)
    assert model.prompts[0] == f"{asked}<assistant>```python\n"


@confined
def test_mbpp_sanitized_llada_moe(tmp_path):
    """All splits together, in the order of their names."""
    rows = [
        {"task_id": i, "prompt": f"Add {i}.", "test_imports": ["import math"], "test_list": [*MBPP_TESTS, "math.pi"]}
        for i in range(3)
    ]
    answers = [f"```python\n{RIGHT}\n```", f"[BEGIN]\n{RIGHT}\n[DONE]", "```python\nno(\n```"]
    files = {"train": rows[2:], "test": rows[:1], "prompt": rows[1:2]}
    where = {name: str(tmp_path / f"{name}.jsonl") for name in files}
    more = {"dataset_kwargs": {"path": "json", "data_files": where}}
    model, found = evaluated(tmp_path, "mbpp_sanitized_llada_moe", answers, files, more=more)
    assert score(found, "pass_at_1,none") == pytest.approx(2 / 3)
    tests = "\n".join([*MBPP_TESTS, "math.pi"])
    fence = "Please write the code in a block that begins with ```python and ends with ```."
    asked = (
        "<user>Write Python code for this task:\nAdd {}.\nIt has to pass these tests:\n"
        + f"{tests}\n{fence}<assistant>"
    )
    assert model.prompts == [asked.format(i) for i in (1, 0, 2)]


GPQA = [
    {"Question": f"Q{i}?", "Correct Answer": " right", **{f"Incorrect Answer {j}": f"wrong{j}" for j in (1, 2, 3)}}
    for i in range(5)
]


def test_gpqa_diamond_oc(tmp_path):
    answers = ["The correct answer is (A)", "(B)", "... The correct answer is C.", "The correct answer is (A)", "A"]
    model, found = evaluated(tmp_path, "gpqa_diamond_oc", answers, {"train": GPQA}, fewshot_as_multiturn=False)
    assert score(found, "exact_match,none") == 2 / 5
    start = (
        "<system>Here are some example questions. Answer the last question in the same form.\n\n<user>Question: A ball"
    )
    assert model.prompts[0].startswith(start) and model.prompts[0].count("The correct answer is (") == 5
    last = "Question: Q1?\nChoices:\n(A) wrong1\n(B) right\n(C) wrong2\n(D) wrong3\nAnswer:<assistant>"
    assert model.prompts[1].endswith(last)


def test_gpqa_apd(tmp_path):
    answers = ["(B) or (A)", "boxed{(B)}", "C", "the letter (D)", "(A)"]
    model, found = evaluated(tmp_path, "gpqa_apd", answers, {"train": GPQA})
    assert score(found, "exact_match,flexible-extract") == 4 / 5
    asked = "<user>Question: Q0?\nChoices:\n(A) right\n(B) wrong1\n(C) wrong2\n(D) wrong3\nAnswer:<assistant>"
    assert model.prompts[0] == asked and model.untils[0] == ["</s>", "Question:", "<|im_end|>"]


def test_mmlu_oc(tmp_path):
    row = {"question": " Which? ", "choices": ["w", "x", "y", "z"], "answer": 1, "subject": "s"}
    dev = [row | {"question": f"D{i}", "answer": i % 4} for i in range(6)]
    answers = ["B", "B. x, not A", "(A)", "A", "b", "E"]
    more = own_group(["first", "second"])
    model, found = evaluated(tmp_path, "mmlu_oc", answers, {"test": [row] * 3, "dev": dev}, more=more)
    assert score(found, "exact_match,none") == pytest.approx((2 / 3 + 0) / 2)
    asked = "<user>Answer this multiple choice question with the letter of the right option.\nQuestion: {}\n"
    asked += "A. w\nB. x\nC. y\nD. z\nAnswer:<assistant>"
    shots = "".join(asked.format(f"D{i}") + "ABCD"[i % 4] for i in range(5))
    assert model.prompts[0] == shots + asked.format("Which?")


def test_mmlu_pro_oc(tmp_path):
    rows = [{"question": "Which?", "options": list("stuvwxyz"), "answer": "H"}] * 3
    model, found = evaluated(tmp_path, "mmlu_pro_oc", ["Well.\nANSWER: H", "H", "ANSWER: (H)"], rows)
    assert score(found, "exact_match,none") == pytest.approx(2 / 3)
    assert model.prompts[0].startswith("<user>Answer the following multiple choice question. Think step by step, and")
    assert model.prompts[0].endswith(
        "letter of the right option.\n\nWhich?\n\nA) s\nB) t\nC) u\nD) v\nE) w\nF) x\nG) y\nH) z\n<assistant>"
    )


def test_hellaswag_oc(tmp_path):
    rows = [{"ctx": "A man ", "endings": ["w", "x", "y", "z"], "label": "2"}] * 3
    model, found = evaluated(tmp_path, "hellaswag_oc", ["C", "The answer is D", "(C) y"], {"validation": rows})
    assert score(found, "exact_match,none") == pytest.approx(2 / 3)
    asked = "<user>A man\nQuestion: Which ending makes the most sense?\nA. w\nB. x\nC. y\nD. z\nAnswer:<assistant>"
    assert model.prompts[0] == asked


def test_arc_c_oc(tmp_path):
    rows = [
        {"question": "Which?", "choices": {"text": ["w", "x", "y"], "label": labels}, "answerKey": key}
        for labels, key in ((["A", "B", "C"], "B"), (["1", "2", "3"], "3"))
    ]
    model, found = evaluated(tmp_path, "arc_c_oc", ["B", "D or C"], rows)
    assert score(found, "exact_match,none") == 1
    assert model.prompts[0] == "<user>Question: Which?\nA. w\nB. x\nC. y\nAnswer:<assistant>"


IFEVAL = [
    {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "key": 2,
        "prompt": "No commas, and a quotation.",
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {}],
    },
]


def test_ifeval_oc(tmp_path, monkeypatch):
    """By the harness's own checks; what these two do not use of their packages may be missing."""
    for name in ("langdetect", "immutabledict", "nltk"):
        try:
            __import__(name)
        except ImportError:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["immutabledict"], "immutabledict", dict, raising=False)
    monkeypatch.setattr(sys.modules["nltk"], "data", types.SimpleNamespace(find=lambda _: None), raising=False)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "nltk" else version(name))
    model, found = evaluated(tmp_path, "ifeval_oc", ["fine", "not, fine"], {"train": IFEVAL})
    assert score(found, "prompt_level_strict_acc,none") == 1 / 2
    assert score(found, "inst_level_strict_acc,none") == pytest.approx(1 / 3)
    assert model.prompts == ["<user>No commas.<assistant>", "<user>No commas, and a quotation.<assistant>"]


def test_ifeval_without_its_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DllmError, match=r"langdetect.*lm-eval\[ifeval\]"):
        evaluated(tmp_path, "ifeval_oc", [], {"train": IFEVAL})


def test_where_programs_cannot_run_the_task_is_refused_at_once(tmp_path, monkeypatch):
    refused, passed = {"refused": "unshare: Operation not permitted"}, {"passed": True, "reason": "", "seconds": 0.1}
    monkeypatch.setattr(sandbox.running, "_run_box", lambda job: passed if job["unsafe"] else refused)
    sandbox.require_box.cache_clear()
    with pytest.raises(DllmError, match="cannot confine a program"):
        evaluated(tmp_path, "humaneval_sanitize", [], HUMANEVAL)
    monkeypatch.setenv("DLLM_UNSAFE_PROGRAMS", "1")
    assert score(evaluated(tmp_path, "humaneval_sanitize", [""] * 4, HUMANEVAL)[1], "pass_at_1,none") == 1
    sandbox.require_box.cache_clear()


@confined
def test_repeats_are_averaged(tmp_path):
    answers = ["    return 2 * x", "    return x"]
    _, found = evaluated(tmp_path, "humaneval_sanitize", answers, HUMANEVAL[:1], more={"repeats": 2})
    assert score(found, "pass_at_1,none") == 1 / 2


@confined
def test_the_file_that_the_documentation_shows(tmp_path):
    text = (FOLDER.parents[2] / "docs" / "code-tasks.md").read_text()
    block = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "my_mbpp.yaml").write_text(block.replace("/data", str(tmp_path)).replace("TASKS", str(FOLDER)))
    for name, rows in (("test", MBPP[:1]), ("prompt", SHOTS)):
        (tmp_path / f"mbpp-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manager = TaskManager(include_path=[str(tmp_path)], include_defaults=False)
    found = simple_evaluate(Canned([RIGHT]), tasks=["my_mbpp"], task_manager=manager, bootstrap_iters=0)
    assert found["results"]["my_mbpp"]["pass_at_1,none"] == 1
