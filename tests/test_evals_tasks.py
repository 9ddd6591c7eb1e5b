"""Tasks: what the generators draw, that splits are disjoint, and that verifiers accept the truth and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax import DllmError, ModelConfig, Tokenizer
from evals.tasks import SPLITS, TASKS, make_task, split_of
from evals.tasks.base import Draws
from evals.tasks.word_problems import NAMES, canonical, final_answer, train_tokenizer, worked_steps

WORDS = ["word-problems:difficulty=easy", "word-problems", "word-problems:difficulty=hard"]
SMALL = [*WORDS]


def config_for(task, **changes):
    vocabulary = task.vocabulary
    values = {
        "family": "llada",
        "vocab_size": vocabulary.size,
        "embed_dim": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 16,
        "rope_theta": 1e4,
        "norm_eps": 1e-5,
        "max_length": 512,
        "eos_id": vocabulary.eos_id,
        "pad_id": vocabulary.pad_id,
        "mask_id": vocabulary.mask_id,
        "end_ids": vocabulary.end_ids,
        "bos_id": vocabulary.bos_id,
        "dtype": "float32",
    }
    return ModelConfig(**{**values, **changes})


def same(one, other):
    return one.problem == other.problem and all(
        np.array_equal(a, b)
        for a, b in zip(
            (one.prompt_ids, one.answer_ids, one.targets),
            (other.prompt_ids, other.answer_ids, other.targets),
            strict=True,
        )
    )


# Every task


def test_draws_are_those_of_philox_whatever_the_platform():
    draws = Draws(1, 2, 3)
    assert [draws.below(1000) for _ in range(5)] == [719, 12, 99, 887, 464]
    thirds = [draws.below(3) for _ in range(295)]
    assert min(thirds) == 0 and max(thirds) == 2 and all(thirds.count(i) > 70 for i in range(3))


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_a_pure_function_of_split_seed_and_index(name):
    task, again, other = make_task(name), make_task(name), make_task(name, seed=1)
    for split in SPLITS:
        examples = [task.example(split, index) for index in range(8)]
        assert all(same(example, again.example(split, i)) for i, example in enumerate(examples))
        assert not all(same(example, other.example(split, i)) for i, example in enumerate(examples))
        for example in examples:
            assert example.prompt_ids.dtype == example.answer_ids.dtype == np.int32
            assert len(example.prompt_ids) <= task.prompt_width and len(example.answer_ids) <= task.answer_width
            assert example.targets.any() and example.targets.shape == example.answer_ids.shape


@pytest.mark.parametrize("name", SMALL)
def test_the_truth_is_accepted_and_garbage_never_raises(name):
    task = make_task(name)
    example = task.example("validation", 0)
    truth = example.answer_ids[:-1] if task.stops else example.answer_ids
    verdict = task.verify(example, truth)
    assert verdict.correct and verdict.strict and verdict.exact
    for garbage in ([], [0], [10**6], [-5], list(range(200)), truth[:-1], [*truth, *truth]):
        assert not task.verify(example, garbage).exact


@given(data=st.data(), name=st.sampled_from(SMALL))
def test_random_tokens_are_wrong_and_never_raise(data, name):
    task = make_task(name)
    ids = data.draw(st.lists(st.integers(-3, task.vocabulary.size + 3), max_size=60))
    example = task.example("test", 0)
    truth = example.answer_ids[:-1] if task.stops else example.answer_ids
    assert task.verify(example, ids).exact == (ids == truth.tolist())


@pytest.mark.parametrize("name", TASKS)
def test_the_test_split_is_refused_for_training(name):
    task = make_task(name)
    assert same(task.source("train").example(3), task.example("train", 3))
    with pytest.raises(DllmError, match="the test split is what accuracy is measured on"):
        task.source("test")


@pytest.mark.parametrize("name", TASKS)
def test_the_tokenizer_loads_from_a_checkpoint_folder(name, tmp_path):
    task = make_task(name)
    task.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path, config_for(task))
    example = task.example("train", 0)
    for ids in (example.prompt_ids, example.answer_ids[:-1] if task.stops else example.answer_ids):
        assert tokenizer.encode(tokenizer.decode(ids)) == ids.tolist()
        assert tokenizer.decode(ids) == task.show(ids)
    assert len(tokenizer.token_bytes()) == task.vocabulary.size


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("chess", "no task is called 'chess'; choose one of"),
        ("", "task '' has no name"),
        ("word-problems:levels=3", "has no option 'levels'; it has difficulty, steps"),
        ("word-problems:steps", "'steps' is no option; write it as option=value"),
        ("word-problems:steps=x-3", "steps 'x-3' is no range"),
        ("word-problems:steps=0-2", "steps 0-2 is no range"),
        ("word-problems:seed=1,seed=2", "gives seed twice"),
        ("word-problems:max_total=2", "max_total is 2; it must be between"),
        ("word-problems:operations=%", "operations is '%'"),
        ("word-problems:operations=/", "run out of numbers"),
        ("word-problems:difficulty=odd", "difficulty 'odd' is unknown; choose one of easy, medium, hard"),
    ],
)
def test_bad_options_are_one_sentence(text, complaint):
    with pytest.raises(DllmError) as caught:
        make_task(text)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("split, index", [("dev", 0), ("train", -1), ("train", 1.5)])
def test_bad_examples_are_refused(split, index):
    with pytest.raises(DllmError):
        make_task("word-problems").example(split, index)


# Word problems


@pytest.mark.parametrize("name", WORDS)
def test_word_problems_are_right_and_within_their_limits(name):
    task = make_task(name)
    for index in range(200):
        prompt, answer = task.texts("train", index)
        problem = task.example("train", index).problem
        assert prompt.isascii() and prompt.startswith("Q: ") and prompt.endswith(".\nA: ")
        assert prompt.split()[1] in NAMES and f" has {problem.start} " in prompt
        low, high = task.limits.steps
        assert low <= len(problem.steps) <= high and prompt.count(".") == len(problem.steps) + 1
        steps, _, final = answer.partition("#### ")
        assert int(final) == problem.answer
        previous = problem.start
        for step in steps.split(". ")[:-1]:
            left, _, result = step.partition("=")
            assert left.startswith(str(previous)) and eval(left) == int(result)  # our own text, plain arithmetic
            assert 1 <= int(result) <= task.limits.max_total
            previous = int(result)
        assert previous == problem.answer


def test_word_problems_of_all_difficulties_and_seeds_share_one_split():
    seen = {split: set() for split in SPLITS}
    for name in WORDS:
        for seed in (0, 1):
            task = make_task(name, seed=seed)
            for split in SPLITS:
                problems = [canonical(task.example(split, index).problem) for index in range(300)]
                assert all(split_of("word-problems", problem) == split for problem in problems)
                seen[split] |= set(problems)
    assert not seen["train"] & seen["test"] and not seen["train"] & seen["validation"]
    assert not seen["test"] & seen["validation"] and len(seen["test"]) > 500


def test_options_that_leave_a_split_empty_are_refused(monkeypatch):
    monkeypatch.setattr("evals.tasks.base._MOST_TRIES", 50)
    task = make_task("word-problems:steps=1,max_total=8,operations=/")
    with pytest.raises(DllmError, match="no test problem of word-problems was found"):
        [task.example("test", index) for index in range(20)]


@pytest.mark.parametrize(
    "text, number",
    [
        ("12+23=35. #### 35", 35),
        ("#### 35", 35),
        ("####35 and so on 36", 35),
        ("#### 035", 35),
        ("#### 35.", 35),
        ("#### 35.5", None),
        ("#### 35,000", None),
        ("#### -35", None),
        ("### 35", None),
        ("#### " + "9" * 5000, None),
        ("", None),
        ("####", None),
        ("#### \u0663", None),
    ],
)
def test_the_final_answer_is_found(text, number):
    assert final_answer(text) == number


def test_the_strict_verifier_wants_every_step():
    assert worked_steps("12+23=35. 35-5=30. #### 30") == [(12, "+", 23, 35), (35, "-", 5, 30)]
    assert worked_steps("12 + 23 = 35\n#### 35") == [(12, "+", 23, 35)]
    assert worked_steps("12+23=35. I think #### 35") is None
    task = make_task("word-problems:steps=2")
    example = task.example("test", 0)
    (a, operation, b, c), _ = example.problem.equations()
    answer = example.problem.answer
    wrong_steps = task._coding[0].encode(f"{a}{operation}{b}={c + 1}. #### {answer}")
    verdict = task.verify(example, wrong_steps)
    assert verdict.correct and not verdict.strict and not verdict.exact


@given(st.data())
def test_a_changed_answer_is_not_exact(data):
    task = make_task("word-problems")
    example = task.example("test", data.draw(st.integers(0, 20)))
    ids = example.answer_ids[:-1].tolist()
    place = data.draw(st.integers(0, len(ids) - 1))
    ids[place] = data.draw(st.integers(0, task.vocabulary.size - 1).filter(lambda token: token != ids[place]))
    verdict = task.verify(example, ids)
    assert not verdict.exact
    digits = range(len(ids) - len(str(example.problem.answer)), len(ids))
    assert not (place in digits and verdict.correct)


def test_the_committed_tokenizer_is_what_its_command_writes(tmp_path):
    from evals.tasks.word_problems import TOKENIZER

    vocabulary = train_tokenizer(tmp_path)
    assert vocabulary == make_task("word-problems").vocabulary and 384 <= vocabulary.size <= 512
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TOKENIZER / name).read_bytes()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path):
    with pytest.raises(DllmError, match="bytes and special tokens alone need 262"):
        train_tokenizer(tmp_path / "small", vocab_size=100)
    assert not (tmp_path / "small").exists()


def test_digits_stay_single_and_examples_are_short():
    task = make_task("word-problems")
    lengths = [len(e.prompt_ids) + len(e.answer_ids) for e in (task.example("train", i) for i in range(300))]
    assert 40 <= np.mean(lengths) <= 60
    assert [task.show([i]) for i in task._coding[0].encode("A: 1234+5=1239. #### 1239")][1:6] == [": ", *"1234"]
