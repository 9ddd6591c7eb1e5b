"""Tasks: what the generators draw, that splits are disjoint, and that verifiers accept the truth and nothing else."""

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax import DllmError, ModelConfig
from dllm_jax.text.tokenizer import encode_text, load_tokenizer, token_bytes
from evals.tasks import SPLITS, TASKS, DrawnTask, make_task, split_of
from evals.tasks.base import Draws
from evals.tasks.maze import FIRST_CELL, _canonical
from evals.tasks.sudoku import rename_digits
from evals.tasks.word_problems import NAMES, TOKENIZER, canonical, final_answer, train_tokenizer, worked_steps

FREE = "word-problems:difficulty=long,steps=4-6,wording=free"
WORDS = ["word-problems:difficulty=easy", "word-problems", "word-problems:difficulty=hard", FREE]
GRIDS = ["sudoku:box_rows=2,box_columns=2", "sudoku:box_rows=2,pool=2", "sudoku", "sudoku:pool=1"]
CHAINS = ["chains:length=24,chain=1-8", "chains:length=16,chain=2-5,start=left,free=1"]
SMALL = [*WORDS, *GRIDS[:2], "maze:size=4", "maze", *CHAINS]

DRAWN = [name for name, task in TASKS.items() if issubclass(task, DrawnTask)]
PINNED = {
    "word-problems:difficulty=easy": "354d312300fefb07",
    "word-problems": "113787ad2a9a1691",
    "word-problems:difficulty=hard,seed=1": "3ce60884f15788dd",
    "sudoku:box_rows=2,box_columns=2": "5b0d4ba2adb64368",
    "sudoku": "efa339de964d50de",
    "sudoku:pool=2": "e23fe45de840b676",
    "maze": "68524987e7efa449",
    "maze:size=5": "b3a9ed2e58965393",
    "chains": "4398fb67aa085cbb",
    "chains:length=24,chain=2-9,start=left,free=0.5,seed=1": "82a0704f73a2d35f",
}


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


@pytest.mark.parametrize("name, digest", PINNED.items())
def test_examples_are_the_same_everywhere_and_stay_as_they_are(name, digest):
    """A model's accuracy can be compared with older ones only while this holds."""
    task, told = make_task(name), hashlib.blake2b(digest_size=8)
    for split in SPLITS:
        for index in range(3):
            example = task.example(split, index)
            for ids in (example.prompt_ids, example.answer_ids, example.targets):
                told.update(ids.astype("<i4").tobytes())
    assert told.hexdigest() == digest


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


@pytest.mark.parametrize("name", DRAWN)
def test_the_test_split_is_refused_for_training(name):
    task = make_task(name)
    assert same(task.source("train").example(3), task.example("train", 3))
    with pytest.raises(DllmError, match="test split"):
        task.source("test")


@pytest.mark.parametrize("name", DRAWN)
def test_the_tokenizer_loads_from_a_checkpoint_folder(name, tmp_path):
    task = make_task(name)
    task.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, config_for(task))
    example = task.example("train", 0)
    for ids in (example.prompt_ids, example.answer_ids[:-1] if task.stops else example.answer_ids):
        assert encode_text(tokenizer, tokenizer.decode(ids)) == ids.tolist()
        assert tokenizer.decode(ids, skip_special_tokens=True) == task.show(ids)
    assert len(token_bytes(tokenizer, task.vocabulary.size)) == len(tokenizer)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("chess", "'chess'"),
        ("", "''"),
        ("word-problems:levels=3", "'levels'"),
        ("word-problems:steps", "'steps'"),
        ("word-problems:steps=x-3", "'x-3'"),
        ("word-problems:steps=0-2", "0-2"),
        ("word-problems:seed=1,seed=2", "seed"),
        ("word-problems:max_total=2", "max_total is 2"),
        ("word-problems:operations=%", "operations is '%'"),
        ("word-problems:operations=/", "operations /"),
        ("sudoku:box_rows=1", "1 x 3"),
        ("sudoku:blanks=50-40", "50-40"),
        ("sudoku:blanks=81", "81-81"),
        ("sudoku:pool=-1", "pool is -1"),
        ("maze:size=3", "size is 3"),
        ("maze:size=3.5", "'3.5'"),
        ("chains:chain=9-8", "9-8"),
        ("chains:chain=0-8", "0-8"),
        ("chains:length=4,chain=1-8", "length is 4"),
        ("chains:start=right", "'right'"),
        ("chains:free=1.5", "free is 1.5"),
        ("word-problems:difficulty=odd", "'odd'"),
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
            left, _, result = step.rpartition(" ")[2].partition("=")
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
    with pytest.raises(DllmError, match="no test problem of word-problems"):
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

    vocabulary = train_tokenizer(tmp_path)
    assert vocabulary == make_task("word-problems").vocabulary and 384 <= vocabulary.size <= 640
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TOKENIZER / name).read_bytes()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path):
    with pytest.raises(DllmError, match="262"):
        train_tokenizer(tmp_path / "small", vocab_size=100)
    assert not (tmp_path / "small").exists()


def test_numbers_are_pairs_of_digits_and_examples_are_short():
    task = make_task("word-problems")
    lengths = [len(e.prompt_ids) + len(e.answer_ids) for e in (task.example("train", i) for i in range(300))]
    assert 40 <= np.mean(lengths) <= 60
    pieces = [task.show([i]) for i in task._coding[0].encode("A: 1234+5=1239. #### 1239")]
    assert pieces[1:6] == [": ", "12", "34", "+", "5"]


# Sudoku


def solutions(cells, box_rows, box_columns, most=2):
    """All solutions up to `most`, by plain backtracking: slow, and nothing like the generator."""
    size = box_rows * box_columns
    cells = list(cells)
    rows, columns, boxes = ([set() for _ in range(size)] for _ in range(3))

    def sets(cell):
        row, column = divmod(cell, size)
        return rows[row], columns[column], boxes[row // box_rows * box_rows + column // box_columns]

    for cell, digit in enumerate(cells):
        if digit:
            assert not any(digit in group for group in sets(cell))
            for group in sets(cell):
                group.add(digit)
    found = []

    def search():
        blanks = [cell for cell, digit in enumerate(cells) if not digit]
        if not blanks:
            found.append(tuple(cells))
            return
        free = {cell: set(range(1, size + 1)) - set.union(*sets(cell)) for cell in blanks}
        cell = min(blanks, key=lambda cell: len(free[cell]))
        for digit in free[cell]:
            cells[cell] = digit
            for group in sets(cell):
                group.add(digit)
            search()
            cells[cell] = 0
            for group in sets(cell):
                group.discard(digit)
            if len(found) >= most:
                return

    search()
    return found


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_sudokus_have_exactly_one_solution(name, split):
    task = make_task(name)
    for index in range(3):
        board = task.example(split, index).problem
        assert solutions(board.clues, task.box_rows, task.box_columns) == [board.solution]


def test_a_sudoku_is_89_tokens_with_line_ends_and_clues_given():
    task = make_task("sudoku")
    example = task.example("train", 1)
    ids, given = example.answer_ids, example.given
    assert len(ids) == task.answer_width == 89 and not len(example.prompt_ids) and task.prompt_width == 0
    assert np.flatnonzero(ids == 10).tolist() == list(range(9, 89, 10)) and given[9::10].all()
    cells = np.delete(ids, np.arange(9, 89, 10))
    assert tuple(cells) == example.problem.solution
    assert 30 <= example.targets.sum() <= 55 and example.targets.sum() == example.problem.clues.count(0)
    assert task.show(ids).count("\n") == 8 and len(task.show(ids)) == 89


def test_blanks_are_as_many_as_asked_for_where_clues_can_go():
    task = make_task("sudoku:box_rows=2,box_columns=2,blanks=6-8")
    assert {int(task.example("train", i).targets.sum()) for i in range(60)} == {6, 7, 8}


def test_a_pool_gives_ever_new_boards_in_the_split_of_their_solution():
    task = make_task("sudoku:box_rows=2,pool=3")
    for split in SPLITS:
        boards = [task.example(split, index).problem for index in range(60)]
        assert len(set(boards)) == 60 and len({board.clues.count(0) for board in boards}) <= 3
        assert all(split_of("sudoku", rename_digits(board.solution)) == split for board in boards)


def test_renaming_digits_makes_no_other_sudoku():
    assert rename_digits([3, 1, 0, 3, 2]) == rename_digits([7, 2, 0, 7, 4]) != rename_digits([3, 1, 0, 1, 2])


@pytest.mark.parametrize("name", GRIDS[:2])
def test_a_changed_board_is_wrong(name):
    task = make_task(name)
    example = task.example("test", 0)
    for place in range(len(example.answer_ids)):
        ids = example.answer_ids.copy()
        ids[place] = ids[place] % task.size + 1
        assert task.verify(example, ids) == task.verify(example, ids[:-1])
        assert not task.verify(example, ids).correct


# Mazes


def test_a_maze_is_a_shuffled_tree_with_one_path():
    task = make_task("maze")
    example = task.example("train", 0)
    ids = example.prompt_ids.tolist()
    names = {i: name for name, i in {";": 9, "A": 1, "a": 2, "O": 3, "o": 4, "T": 5, "t": 6, "P": 7, "p": 8}.items()}
    text = "".join(names.get(i, "c") for i in ids)
    assert len(ids) == 306 and text == "A" + "cc;" * 99 + "a" + "Oco" + "Tct" + "P"
    cells = [i - FIRST_CELL for i in ids if i >= FIRST_CELL]
    edges, (origin, target) = list(zip(cells[0:198:2], cells[1:198:2], strict=True)), cells[198:]
    assert {tuple(sorted(edge)) for edge in edges} == {tuple(sorted(edge)) for edge in example.problem.edges}
    assert edges != sorted(edges) and {one < other for one, other in edges} == {True, False}
    assert all(abs(one - other) in (1, 10) for one, other in edges)
    assert path_between(edges, origin, target) == [i - FIRST_CELL for i in example.answer_ids[:-1]]
    assert names[example.answer_ids[-1]] == "p" and len(set(edges)) == 99


def path_between(edges, origin, target):
    """The path in a tree, by walking every branch."""
    near = {}
    for one, other in edges:
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    paths, reached = [[origin]], {}
    while paths:
        path = paths.pop()
        assert path[-1] not in reached, "a loop"
        reached[path[-1]] = path
        paths += [[*path, other] for other in near[path[-1]] if other not in path[-2:-1]]
    assert len(reached) == len(edges) + 1, "not connected"
    return reached[target]


@pytest.mark.parametrize("name", ["maze:size=4", "maze"])
def test_paths_are_those_of_the_tree(name):
    task = make_task(name)
    for index in range(20):
        edges, path = task.example("test", index).problem
        assert path_between(edges, path[0], path[-1]) == list(path)


def test_only_the_whole_path_up_to_its_end_is_right():
    task = make_task("maze:size=4")
    example = next(e for e in (task.example("test", i) for i in range(50)) if len(e.answer_ids) > 4)
    ids = example.answer_ids.tolist()
    assert task.verify(example, [*ids, 12, 13]).correct and not task.verify(example, [*ids, 12]).exact
    for wrong in (ids[:-1], ids[:-2] + ids[-1:], ids[1:], [ids[0], *ids], ids[::-1]):
        assert not task.verify(example, wrong).correct


def test_mazes_of_one_tree_are_in_one_split():
    assert _canonical([0, 0, 1, 0]) == _canonical([1, 2, 2, 0])  # the same edges, another root
    task = make_task("maze:size=4")

    def tree(split, index):
        return tuple(sorted(tuple(sorted(edge)) for edge in task.example(split, index).problem.edges))

    trees = {split: {tree(split, index) for index in range(150)} for split in SPLITS}
    assert not trees["train"] & trees["test"] and not trees["train"] & trees["validation"]


# Chains


def keeps(symbols, digits):
    """Which symbols the digits keep, one after another."""
    kept = []
    for i, symbol in enumerate(symbols):
        beside = i - 1 if symbol.islower() else i + 1
        if symbol == "?" or symbol.isdigit():
            kept.append(symbol == "?" or digits[i] == int(symbol))
        else:
            there = 0 <= beside < len(digits) and digits[beside] >= 0
            kept.append(there and digits[i] == (digits[beside] + ord(symbol.lower()) - ord("a")) % 10)
    return kept


@pytest.mark.parametrize("name", ["chains", *CHAINS])
def test_a_chain_is_one_start_with_capitals_before_and_small_letters_behind(name):
    task = make_task(name)
    low, high = task.chain
    for index in range(10):
        example = task.example("validation", index)
        symbols, digits = task.show(example.answer_ids)[::2], task.show(example.answer_ids)[1::2]
        assert symbols == example.problem and len(symbols) == task.length
        assert example.given.tolist() == [True, False] * task.length and not len(example.prompt_ids)
        assert all(keeps(symbols, list(map(int, digits))))
        chains = re.findall("[A-J]*[0-9?][a-j]*", symbols)
        assert "".join(chains) == symbols and all(len(chain) <= high for chain in chains)
        assert all(len(chain) >= low for chain in chains[:-1])
        if task.start == "left":
            assert not re.search("[A-J]", symbols)
        if task.free == 1:
            assert not re.search("[0-9]", symbols)


def test_the_share_of_free_chains_is_the_options():
    symbols = "".join(make_task("chains:free=0.25").example("train", i).problem for i in range(60))
    starts = re.findall("[0-9?]", symbols)
    assert abs(starts.count("?") / len(starts) - 0.25) < 4 * (0.25 * 0.75 / len(starts)) ** 0.5


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 23), st.integers(0, 33)), max_size=6), st.integers(0, 48))
def test_a_chain_is_right_when_every_digit_keeps_its_symbol(index, changes, length):
    task = make_task(CHAINS[0])
    example = task.example("test", index)
    ids = example.answer_ids.copy()
    for place, new in changes:
        ids[2 * place + 1] = new
    ids = ids[:length]
    digits = [int(i) - 1 if 1 <= i <= 10 else -99 for i in ids[1::2]]
    kept = keeps(example.problem, digits + [-99] * (task.length - len(digits)))
    kept = [ok and place < len(digits) and digits[place] >= 0 for place, ok in enumerate(kept)]
    assert task.verify(example, ids).correct == all(kept)
    assert task.partial(example, ids) == pytest.approx(sum(kept) / task.length)


def test_another_solution_of_a_free_chain_is_right_and_not_exact():
    task = make_task("chains:length=8,chain=8-8,free=1")
    example = task.example("test", 0)
    ids = example.answer_ids.copy()
    ids[1::2] = (ids[1::2] - 1 + 1) % 10 + 1  # every digit one more
    verdict = task.verify(example, ids)
    assert verdict.correct and not verdict.exact and task.verify(example, example.answer_ids).exact
    ids[3] = ids[3] % 10 + 1
    assert not task.verify(example, ids).correct and 0 < task.partial(example, ids) < 1


def test_words_after_which_a_text_ends_are_special():
    for name in DRAWN:
        vocabulary = make_task(name).vocabulary
        assert len({vocabulary.mask_id, vocabulary.eos_id, vocabulary.bos_id}) == 3
        assert vocabulary.pad_id == vocabulary.eos_id
        assert set(vocabulary.end_ids) <= set(range(vocabulary.size))
