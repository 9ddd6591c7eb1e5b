"""`evals tune`: bounds by hand and by simulation, what halving drops, what is proven, and a run that was cut off."""

import csv
import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from test_evals_runner import SUDOKU, N, Oracle
from test_evals_tasks import config_for

import evals
from convert import embedded
from dllm_jax import DllmError, random_model
from dllm_jax.checkpoints import checkpoint
from evals import __main__ as cli
from evals import flags, paired_test, stderr, tune
from evals.models import Models
from evals.paired_test import Pairs
from evals.sampler import parse_sampler, read_grid
from evals.tasks import make_task
from evals.tune import scorer as scorer_module
from evals.tune import trials
from evals.tune.command import GRID
from evals.tune.scorer import TuneScorer

# Bounds


def test_pairs_are_counted():
    pairs = Pairs.of([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0])
    assert pairs == Pairs(both=2, lost=1, gained=2, neither=1) and pairs.n == 6
    assert (pairs.accuracy, pairs.reference_accuracy, pairs.kept) == (4 / 6, 3 / 6, 4 / 3)
    assert math.isnan(Pairs(0, 0, 3, 1).kept)


def test_wealth_is_the_product_over_problems_whatever_their_order():
    reference, candidate, share, bets = [1, 1, 0, 1, 0], [1, 0, 1, 1, 0], 0.9, (0.5, 0.25)
    wealths = [np.prod([1 + bet * (c - share * r) for r, c in zip(reference, candidate, strict=True)]) for bet in bets]
    found = paired_test.log_wealth(Pairs.of(reference, candidate), share, bets)
    assert found == pytest.approx(math.log(np.mean(wealths)))
    assert paired_test.needed(0.95) == pytest.approx(math.log(20))


def test_the_bet_lets_as_many_problems_be_lost_as_can_be():
    evidence = paired_test.needed(0.95)
    assert paired_test.best_bet(Pairs(500, 0, 0, 0), 0.99, 305, evidence) == 0.99
    may = lambda bet, lost: paired_test.log_wealth(Pairs(2000 - lost, lost, 0, 0), 0.99, [bet]) >= evidence
    best = paired_test.best_bet(Pairs(95, 5, 0, 0), 0.99, 2000, evidence)
    assert may(best, 10) and not any(may(percent / 100, 11) for percent in range(1, 100))


def test_bounds_without_a_loss_and_with_many():
    enough, too_few = (paired_test.at_least(Pairs(n, 0, 0, 0), 0.95, [0.99]) for n in (305, 304))
    assert enough >= 0.99 > too_few
    assert paired_test.at_most(Pairs(305, 0, 0, 0), 0.95) == 1.0
    lossy = Pairs(900, 60, 10, 30)
    assert paired_test.at_least(lossy, 0.95) < lossy.kept < paired_test.at_most(lossy, 0.95) < 0.99
    assert (
        paired_test.at_least(Pairs(0, 20, 0, 0), 0.95) == 0.0 and paired_test.at_most(Pairs(0, 200, 0, 0), 0.95) < 0.05
    )
    assert paired_test.at_least(Pairs(500, 0, 100, 0), 0.95) == 1.0
    narrower = [paired_test.at_least(Pairs(95 * n, 2 * n, n, 2 * n), 0.95) for n in (1, 10, 100)]
    assert narrower == sorted(narrower) and narrower[-1] < 96 / 97


@pytest.mark.parametrize("solves, gained, share", [(1.0, 0.0, 0.95), (0.9, 0.02, 0.98), (0.5, 0.15, 0.9)])
def test_bounds_hold_as_often_as_they_say_with_a_look_after_every_step(solves, gained, share):
    rng, looks, confidence, enough = np.random.default_rng(0), 4, 0.9, paired_test.needed(0.9)
    lost = (1 - share) * solves + gained  # so that exactly this share is kept
    chances = [solves - lost, lost, gained, 1 - solves - gained]
    above = below = proven = 0
    for _ in range(runs := 200):
        parts = rng.multinomial(100, chances, size=looks).cumsum(axis=0)
        seen = [Pairs(*map(int, part)) for part in parts]
        above += any(paired_test.log_wealth(pairs, share) >= enough for pairs in seen)
        below += any(paired_test.log_wealth(pairs, share, [-0.9, -0.1]) >= enough for pairs in seen)
        bet = paired_test.best_bet(Pairs(*map(int, 100 * np.asarray(chances))), share, 400, enough)
        proven += any(paired_test.log_wealth(pairs, share, [bet]) >= enough for pairs in seen)
    assert max(above, below, proven) <= runs * (1 - confidence)


def test_a_good_candidate_is_proven():
    rng, proven = np.random.default_rng(0), 0
    for _ in range(runs := 200):
        bet = paired_test.best_bet(Pairs(985, 3, 2, 10), 0.99, 2000, paired_test.needed(0.95))
        pairs = Pairs(*map(int, rng.multinomial(2000, [0.985, 0.003, 0.002, 0.01])))
        proven += paired_test.log_wealth(pairs, 0.99, [bet]) >= paired_test.needed(0.95)
    assert proven > 0.9 * runs


# Halving and proving, on outcomes that are made up


class Fake:
    """Outcomes by chance: sampler -> how often it solves what the reference solves, forwards."""

    def __init__(self, chances, seed=0):
        self.chances, self.asked = chances, []
        self._rng = np.random.default_rng(seed)
        self._kept = {}

    def __call__(self, sampler, split, n):
        self.asked.append((str(sampler), split, n))
        keeps, nfe = self.chances[str(sampler)]
        key = (str(sampler), split)
        if key not in self._kept:
            self._kept[key] = self._rng.random(1000) < keeps
        return tune.Outcomes(self._kept[key][:n].tolist(), nfe, nfe / 100)


def run_fake(chances, seed=0, **goal):
    """The end of a tuning, and who was asked what; the reference is right always, in 50 forwards."""
    fake = Fake({"topk": (1.0, 50.0), **chances}, seed)
    goal = tune.Goal(**{"floor": 0.95, "n": 1000, "validation": 1000, **goal})
    *_, found = tune.search(fake, parse_sampler("topk"), [parse_sampler(name) for name in chances], goal)
    return found, fake


LADDER = {
    "topk:k=2": (1.0, 25.0),
    "topk:k=3": (0.995, 17.0),
    "eb:gamma=0.1": (0.99, 6.0),
    "topk:k=4": (0.98, 12.0),
    "eb:gamma=1": (0.97, 4.0),
    "factor": (0.9, 3.0),
    "topk:k=16": (0.3, 3.5),
}


def test_the_fastest_that_keeps_the_floor_is_found():
    found, fake = run_fake(LADDER)
    assert str(found.chosen.sampler) == "eb:gamma=1"
    fates = {(trial.stage, str(trial.sampler)): trial.fate for trial in found.trials}
    assert fates["round 1", "topk:k=16"] == trials.SURELY_BELOW and ("round 2", "topk:k=16") not in fates
    assert trials.SURELY_BELOW in (fates["round 1", "factor"], fates["round 2", "factor"])
    proven = [str(trial.sampler) for trial in found.trials if trial.fate == trials.PROVEN]
    assert proven[-1] == "eb:gamma=1" and "topk:k=4" not in proven, "faster ones are as safe"
    costs = [trial.nfe for trial in found.trials if trial.fate == trials.PROVEN]
    assert costs == sorted(costs, reverse=True)
    told = found.promise()
    assert "95 % confidence" in told and "4.0 forwards instead of 50.0" in told and "held-out problems" in told
    assert found.chosen.at_least == pytest.approx(0.95, abs=0.03) and "at least 95." in told
    rounds = {n for _, split, n in fake.asked if split == "validation"}
    assert rounds == {62, 250, 1000} and {n for _, split, n in fake.asked if split == "test"} <= {250, 500, 750, 1000}
    assert {name for name, split, _ in fake.asked if split == "test"} == {"topk", *proven}


def test_the_order_of_samplers_changes_nothing():
    one, other = run_fake(LADDER)[0], run_fake(dict(reversed(LADDER.items())))[0]
    assert one.chosen.sampler == other.chosen.sampler


def test_what_counts_may_be_seconds():
    class Slow(Fake):
        def __call__(self, sampler, split, n):
            outcomes = super().__call__(sampler, split, n)
            seconds = {"eb": 9.0, "factor": 1.0, "topk": 10.0}[sampler.name]
            return tune.Outcomes(outcomes.correct, outcomes.nfe, seconds)

    fake = Slow({"topk": (1, 50), "eb": (1, 5), "factor": (1, 6)})
    goal = tune.Goal(0.95, objective="seconds", n=400, validation=400)
    *_, found = tune.search(fake, parse_sampler("topk"), [parse_sampler("eb"), parse_sampler("factor")], goal)
    assert str(found.chosen.sampler) == "factor" and "1e+03 ms a problem instead of 1e+04" in found.promise()


def test_a_rung_that_breaks_ends_the_climb_and_what_was_proven_stays():
    class Turns(Fake):
        def __call__(self, sampler, split, n):
            outcomes = super().__call__(sampler, split, n)
            bad = split == "test" and sampler.name == "eb"
            return tune.Outcomes([False] * n, outcomes.nfe, 0.0) if bad else outcomes

    chances = {"topk": (1, 50), "topk:k=2": (1, 25), "eb": (0.995, 6), "factor": (0.99, 4)}
    fake = Turns(chances)
    samplers = [parse_sampler(name) for name in list(chances)[1:]]
    *_, found = tune.search(fake, parse_sampler("topk"), samplers, tune.Goal(0.95, n=1000, validation=1000))
    assert str(found.chosen.sampler) == "topk:k=2" and found.trials[-1].fate == trials.UNPROVEN
    assert "factor" not in {name for name, split, _ in fake.asked if split == "test"}
    assert found.trials[-1].pairs.n == 250, "no more problems than show that it is hopeless"


def test_where_nothing_passes_the_best_is_named():
    found, _ = run_fake({"topk:k=2": (0.9, 25.0), "topk:k=4": (0.7, 12.0)})
    assert found.chosen is None
    assert (
        "no sampler was proven to keep 95 %" in found.promise() and "the best, topk:k=2 keeps 89.7 %" in found.promise()
    )
    found, _ = run_fake({"topk:k=2": (1.0, 25.0)}, n=63, validation=20)
    assert found.chosen.pairs.n == 63
    with pytest.raises(DllmError, match="the reference topk solves none of 62 problems"):
        run_fake({"topk": (0.0, 50.0), "topk:k=2": (0.9, 25.0)})


def test_a_few_problems_that_the_reference_happens_to_miss_end_no_search():
    """Of 128 validation problems the first round has 8."""

    def score(sampler, split, n):
        return tune.Outcomes([i >= 10 for i in range(n)], 4.0 if sampler.options else 20.0, 0.0)

    reference, candidate, goal = parse_sampler("topk"), parse_sampler("topk:k=2"), tune.Goal(0.9, n=128, validation=128)
    *_, found = tune.search(score, reference, [candidate], goal)
    assert found.chosen.sampler is candidate
    assert [trial.stage for trial in found.trials[::2]] == ["round 2", "round 3", "held out"]


def test_promises_are_broken_as_seldom_as_they_say():
    """All candidates are just below the floor; whichever is lucky in the search must not be announced."""
    chances = {f"topk:k={k}": (0.899, 50.0 / k) for k in range(2, 6)}
    announced = [run_fake(chances, seed, floor=0.9, n=200, validation=50)[0].chosen is not None for seed in range(40)]
    assert sum(announced) <= 0.05 * len(announced)


@pytest.mark.parametrize(
    "name, value", [("floor", 1.0), ("confidence", 0.2), ("objective", "tokens"), ("n", 0), ("validation", -1)]
)
def test_a_goal_is_checked(name, value):
    with pytest.raises(DllmError, match=f"{name} is"):
        tune.Goal(**{"floor": 0.9, name: value})


def test_a_floor_takes_so_many_problems():
    tune.Goal(0.95, n=63).check_provable()
    with pytest.raises(DllmError, match=r"63 held-out .* 62; pass --floor 0.949 "):
        tune.Goal(0.95, n=62).check_provable()
    tune.Goal(0.949, n=62).check_provable()
    with pytest.raises(DllmError, match=r"there are 2; pass more problems"):
        tune.Goal(0.1, n=2).check_provable()


# The command


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Where held-out problems are remembered, for each test its own."""
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def command(capsys):
    """Runs the command line: (status, standard output, standard error)."""

    def call(*arguments):
        status = cli.main(list(map(str, arguments)))
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def random_sudoku(tmp_path_factory):
    """A random model of 4x4 Sudoku as a checkpoint's folder."""
    model = random_model(config_for(make_task(SUDOKU)), key=3)
    checkpoint.save(folder := tmp_path_factory.mktemp("models") / "random", model.config, model.params.items())
    return folder


def knows_all(task, wrong=()):
    """A model that knows the first N examples of the test and the validation split, but for those of these rows."""
    config = config_for(task)
    examples = [task.example(split, row) for split in ("test", "validation") for row in range(N)]
    known = np.stack([np.concatenate([e.answer_ids, [config.eos_id] * len(e.answer_ids)]) for e in examples])
    ids = (config.vocab_size, config.mask_id, config.eos_id)
    denoiser = Oracle(jnp.asarray(known, jnp.int32), jnp.isin(jnp.arange(2 * N), jnp.asarray(wrong, int)), *ids)
    return SimpleNamespace(config=config, denoiser=denoiser, params={"known": denoiser.known}, name="oracle")


@pytest.fixture
def by_heart(monkeypatch):
    monkeypatch.setattr(flags, "models_of", lambda options: Models(knows_all(make_task(SUDOKU))))


TASK = ("--task", SUDOKU, "--n", N, "--batch-size", 1)
ARGUMENTS = ("tune", *TASK, "--sampler", "topk:k=2|4|8", "--floor", 0.6, "--out")


def results(folder):
    found = json.loads((folder / "tuning.json").read_text())
    return found, [{name: x for name, x in trial.items() if name != "seconds"} for trial in found["trials"]]


def test_from_the_shell_to_the_table(by_heart, command, tmp_path):
    status, out, error = command(*ARGUMENTS, tmp_path)
    assert status == 0, error
    assert "--sampler 'topk:k=8'" in out and "forwards instead of" in out
    found, trials = results(tmp_path)
    assert found["chosen"] == "topk:k=8" and found["told"] in out and found["floor"] == 0.6
    rows = list(csv.DictReader((tmp_path / "tuning.csv").open()))
    assert [row["sampler"] for row in rows] == [trial["sampler"] for trial in trials]
    assert {row["fate"] for row in rows} == {"reference", "goes on", "others were better", "proven"}
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    assert rows[-1]["stage"] == "held out" and rows[-1]["split"] == "test"


def test_the_picture_has_errors_and_what_is_promised(monkeypatch):
    """Accuracy with its error; the floor and the chosen sampler's bound are shares of what the reference solves."""
    found, _ = run_fake(LADDER)
    drawn = {}
    monkeypatch.setattr("evals.plots.draw", lambda panels, title: drawn.update(panel=panels[0]) or b"")
    tune.plot(found)
    best, curves = found.chosen, {curve.label: curve for curve in drawn["panel"].curves}
    chosen, bound = curves[f"chosen: {best.sampler}"], curves["its lower bound, 95 % confidence"]
    assert chosen.y == [100 * best.pairs.accuracy]
    assert chosen.y_error == [100 * stderr.of_share(best.pairs.accuracy, best.pairs.n)]
    assert list(bound.y) == [100 * best.at_least] and drawn["panel"].level == (95.0, "floor")
    assert all(min(curve.y_error) > 0 for name, curve in curves.items() if curve is not bound)
    hopeless, _ = run_fake({"topk:k=2": (0.9, 25.0)})
    tune.plot(hopeless)
    assert hopeless.chosen is None and not any("bound" in curve.label for curve in drawn["panel"].curves)


def test_from_python_it_is_the_same(by_heart, command, tmp_path):
    assert command(*ARGUMENTS, tmp_path)[0] == 0
    model, options = knows_all(make_task(SUDOKU)), {"floor": 0.6, "n": N, "batch_size": 1, "progress": False}
    found = tune.fastest(Models(model), SUDOKU, ["topk:k=2|4", parse_sampler("topk:k=8")], **options)
    untimed = lambda trial: {name: x for name, x in trial.row().items() if name != "seconds"}
    assert list(map(untimed, found.trials)) == results(tmp_path)[1]
    assert str(found.chosen.sampler) == "topk:k=8" and tune.plot(found).startswith(b"\x89PNG")


def test_a_run_that_was_cut_off_goes_on(by_heart, command, tmp_path, home, monkeypatch):
    run, calls = evals.run, []

    def counted(*arguments, **options):
        calls.append(arguments[2])
        if len(calls) == stop:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(scorer_module, "run", counted)
    stop = None
    assert command(*ARGUMENTS, tmp_path / "whole")[0] == 0
    total, stop = len(calls), 5
    calls.clear()
    assert command(*ARGUMENTS, tmp_path / "parts")[0] == 130
    with (tmp_path / "parts" / "outcomes.jsonl").open("a") as file:
        file.write('{"line": 5, "sampler": "to')  # what a kill may leave
    calls.clear()
    stop = None
    assert command(*ARGUMENTS, tmp_path / "parts")[0] == 0
    assert len(calls) == total - 4
    assert results(tmp_path / "parts")[1] == results(tmp_path / "whole")[1]
    calls.clear()
    assert command(*ARGUMENTS, tmp_path / "parts")[0] == 0 and not calls
    home.rename(tmp_path / "elsewhere")
    status, _, error = command(*ARGUMENTS, tmp_path / "parts", "--confidence", 0.9)
    assert status == 2 and "was made with confidence 0.95, not 0.9; choose another --out" in error
    assert command(*ARGUMENTS, tmp_path / "parts", "--sampler", "eb")[0] == 2 and not calls


def test_without_a_promise_the_status_says_so_and_the_table_is_there(command, tmp_path, monkeypatch):
    model = knows_all(make_task(SUDOKU), wrong=range(3))  # of the test split
    monkeypatch.setattr(flags, "models_of", lambda options: Models(model))
    status, _, error = command(*ARGUMENTS, tmp_path)
    assert status == 2 and "no sampler was proven to keep 60 %" in error
    found, trials = results(tmp_path)
    assert found["chosen"] is None and found["told"] in error and trials[-1]["fate"] == "not proven"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("--floor", "99"), "floor is 99"),
        (("--sampler", "topk"), "topk"),
        (("--sampler", "eb:gamma=-1"), "gamma is -1"),
        (("--reference", "topk:k=1|2"), "topk:k=1|2"),
        (("--mesh", "rows=2"), "rows"),
        (("--mesh", "data=3"), "--batch-size"),
    ],
)
def test_mistakes_are_one_sentence(random_sudoku, command, tmp_path, arguments, complaint):
    usual = ("tune", "--model", random_sudoku, "--task", SUDOKU, "--floor", 0.9, "--n", 40, "--out", tmp_path / "out")
    status, _, error = command(*usual, *arguments)
    assert status == 2 and complaint in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "outcomes.jsonl").exists()


# Questions of a file


@pytest.fixture(scope="module")
def word_problems():
    return embedded.load("word-problems")


@pytest.fixture
def problem_counts(monkeypatch):
    """Instead of sampling: all samplers are right, k times as fast; how many problems each run had."""
    counts = []

    def run(models, task, sampler, *, n, examples, **_):
        assert n == len(examples) > 0
        counts.append(n)
        row = SimpleNamespace(correct=True, nfe=32 // sampler.options.get("k", 1))
        return SimpleNamespace(rows=[row] * n, seconds=1.0)

    monkeypatch.setattr(scorer_module, "run", run)
    return counts


def questions(folder, validation=(), test=()):
    """A file with questions of these numbers, as a task."""
    file = folder / "questions.jsonl"
    lines = [("validation", i) for i in validation] + [("test", i) for i in test]
    about = ({"prompt": f"Q: Eve has {i} pears.\nA: ", "target": str(i), "split": split} for split, i in lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in about))
    return f"text:file={file},gen_length=32"


TRIED = {"samplers": "topk:k=2", "progress": False}


def test_of_a_short_file_all_lines_are_taken(word_problems, tmp_path, problem_counts):
    """Though 2000 of each are asked for."""
    task = questions(tmp_path, validation=range(20), test=range(20, 90))
    found = tune.fastest(word_problems, task, floor=0.95, **TRIED)
    assert (found.goal.validation, found.goal.n) == (20, 70)
    assert (
        str(found.chosen.sampler) == "topk:k=2" and found.chosen.pairs.n == 70 and sum(problem_counts) == 2 * (20 + 70)
    )


def test_repeated_and_leaked_questions_are_no_held_out_problems(word_problems, tmp_path, problem_counts):
    eight_times = [i for i in range(50) for _ in range(8)]
    task = questions(tmp_path, validation=eight_times, test=eight_times)
    with pytest.raises(DllmError, match="all 400 test problems"):
        tune.fastest(word_problems, task, floor=0.9, **TRIED)
    task = questions(tmp_path, validation=range(50), test=[*range(40, 80), *range(40, 80)])
    with (
        pytest.warns(RuntimeWarning, match="left out: 50 of test"),
        pytest.raises(DllmError, match="32 held-out .* 30;"),
    ):
        tune.fastest(word_problems, task, floor=0.9, **TRIED)
    assert not problem_counts
    task = questions(tmp_path, validation=[1, 1, 2], test=[*range(1, 40), *range(100, 140)])
    with pytest.warns(RuntimeWarning, match="left out: 1 of validation, 2 of test"):
        found = tune.fastest(word_problems, task, floor=0.9, n=60, **TRIED)
    assert found.chosen.pairs.n == 45 and found.goal.n == 60, "three quarters of the first 60 others"
    assert found.goal.validation == 2


def test_held_out_problems_serve_one_run(word_problems, tmp_path, problem_counts, home):
    task = questions(tmp_path, validation=range(40), test=range(40, 240))
    assert tune.fastest(word_problems, task, floor=0.95, **TRIED).chosen.pairs.n == 100
    (record,) = home.glob("held-out/*/*.json")
    assert len(json.loads(record.read_text())["problems"]) == 100, "which were used"
    before = len(problem_counts)
    with pytest.raises(DllmError, match=f"100 of the 200 held-out problems.*{record.name}"):
        tune.fastest(word_problems, task, floor=0.9, **TRIED)
    assert len(problem_counts) == before
    assert tune.fastest(word_problems, task, floor=0.95, **TRIED).chosen, "the same run again"
    others = questions(tmp_path, validation=range(140), test=range(140, 240))
    assert tune.fastest(word_problems, others, floor=0.9, **TRIED).chosen
    assert len(list(home.glob("held-out/*/*.json"))) == 2
    record.write_text("{")
    with pytest.raises(DllmError, match=record.name):
        tune.fastest(word_problems, task, floor=0.9, **TRIED)


def test_what_cannot_be_proven_is_said_before_the_search(word_problems, problem_counts):
    with pytest.raises(DllmError, match="305 held-out .* 100; pass --floor 0.969"):
        tune.fastest(word_problems, "word-problems", floor=0.99, n=100, **TRIED)
    assert not problem_counts


def test_the_usual_grid_fits_and_tries_nothing_twice():
    task = make_task(SUDOKU)
    grid, reference, goal = read_grid(GRID), parse_sampler("topk"), tune.Goal(0.9, n=32, validation=2)
    scorer = TuneScorer(Models(random_model(config_for(task))), task, reference, [reference, *grid, *grid], goal)
    plain = {s.options.get("block_length") for s in scorer.samplers if s.options.get("cache", "none") == "none"}
    assert plain == {None, 16}, "a board of 19 cells is a block of 32"
    assert len(scorer.samplers) < len(grid) and len(set(map(str, scorer.samplers))) == len(scorer.samplers)
    assert {sampler.name for sampler in scorer.samplers} == {
        "topk",
        "threshold",
        "factor",
        "eb",
        "credit",
        "hierarchical",
    }


# What it stands on


def test_examples_in_parts_are_as_in_one_run():
    task, drawn = make_task(SUDOKU), "topk:k=4,temperature=1.0"
    model, engines = random_model(config_for(task)), evals.Engines()
    how = {"batch_size": 2, "engines": engines, "progress": False}
    whole = evals.run(model, task, drawn, n=5, **how)
    parts = [evals.run(model, task, drawn, n=n, first=first, **how) for first, n in ((0, 2), (2, 3))]
    assert [row for part in parts for row in part.rows] == list(whole.rows)


def test_examples_on_a_mesh(random_sudoku, command, tmp_path):
    usual = ("run", "--model", random_sudoku, "--task", SUDOKU, "--sampler", "topk:k=4", "--n", 5, "--batch-size", 4)
    assert command(*usual, "--results", tmp_path / "one.jsonl")[0] == 0
    status, _, error = command(*usual, "--results", tmp_path / "mesh.jsonl", "--mesh", "data=4")
    assert status == 0, error
    assert (tmp_path / "mesh.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    assert command("compare", *usual[1:5], "--sampler", "topk:k=4", "--mesh", "data=2")[0] == 0
