"""Tasks as training data: the trainer finds them by name, and a model it wrote is evaluated as it is."""

import numpy as np
import pytest
from test_evals_tasks import config_for

import dllm_jax
import evals
from dllm_jax import DllmError
from evals.tasks import make_task
from train import read_config, train
from train.config import DataPart
from train.data import Rows, make_referenced, source_of_split

WORDS = {"task": "word-problems", "difficulty": "easy", "steps": [1, 2]}
SETTINGS = """
steps = 2
[model]
config = {embed_dim = 16, num_layers = 1, num_heads = 2, num_kv_heads = 2, head_dim = 8, mlp_dim = 16, max_length = 64}
[data]
source = "evals.tasks:make_task"
length = 56
answer_length = 24
[data.options]
task = "word-problems"
difficulty = "easy"
[optimizer]
batch = 2
warmup = 1
[log]
mfu = false
"""


def rows(options, **part):
    task = make_referenced("evals.tasks:make_task", options)
    return task, Rows(source_of_split(task, "evals.tasks:make_task"), DataPart(**part), "sft", config_for(task), seed=0)


def test_word_problems_fill_the_canvas_that_is_evaluated():
    task, row = rows(WORDS, length=56, answer_length=16)
    assert task == make_task("word-problems:difficulty=easy,steps=1-2") and task.answer_width == 16
    example, (tokens, targets, length, *_) = task.example("train", 5), row(5)
    prompt = len(example.prompt_ids)
    assert length == prompt + task.answer_width and targets.sum() == task.answer_width and targets[prompt]
    answer = tokens[prompt:length]
    assert np.array_equal(answer[: len(example.answer_ids)], example.answer_ids)
    assert set(answer[len(example.answer_ids) :]) <= {task.vocabulary.eos_id}


def test_puzzles_learn_their_blanks_and_paths_only():
    task, row = rows({"task": "sudoku", "box_rows": 2, "pool": 4}, length=41, pad=False)
    example, (tokens, targets, length, *_) = task.example("train", 7), row(7)
    assert length == 41 and np.array_equal(targets, example.targets) and np.array_equal(tokens, example.answer_ids)
    task, row = rows({"task": "maze", "size": 4}, length=54 + 17, pad=False)
    example, (tokens, targets, length, *_) = task.example("train", 7), row(7)
    assert targets.sum() == len(example.answer_ids) and length == len(example.prompt_ids) + len(example.answer_ids)


@pytest.mark.parametrize(
    "options", [{"task": "chess"}, {}, {"task": "maze", "size": 1}, {"task": "maze:size=4", "size": 5}]
)
def test_bad_options_are_one_sentence(options):
    with pytest.raises(DllmError) as caught:
        make_referenced("evals.tasks:make_task", options)
    assert "\n" not in str(caught.value)


def test_a_trained_model_is_evaluated_with_its_own_tokenizer(tmp_path):
    (tmp_path / "run.toml").write_text(f'out = "{tmp_path / "run"}"\n{SETTINGS}')
    model = dllm_jax.load(train(read_config(tmp_path / "run.toml")).folder)
    assert model.config.vocab_size == make_task("word-problems").vocabulary.size
    width = make_task("word-problems:difficulty=easy,steps=1-2").answer_width  # of what it was trained for
    assert model.generation == {"gen_length": width, "block_length": width, "cache": "none"}
    report = evals.run(model, "word-problems:difficulty=easy", "topk:k=24", n=2, batch_size=2, progress=False)
    assert report.n == 2 and report.nfe == 1
    bound = make_task("word-problems:difficulty=easy").bind(model)
    own, theirs = make_task("word-problems:difficulty=easy").example("test", 0), bound.example("test", 0)
    assert np.array_equal(own.prompt_ids, theirs.prompt_ids) and np.array_equal(own.answer_ids, theirs.answer_ids)
