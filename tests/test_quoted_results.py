"""Numbers that pages quote are those of evals/results, with their errors, and conclusions are the same everywhere.

Every table with the columns `results` and `sampler` is checked; docs/papers/index.md says what its columns mean.
"""

import csv
import json
import re

import numpy as np
import pytest
from conftest import ROOT

from evals import stderr
from evals.sampler import parse_sampler

RESULTS = ROOT / "evals" / "results"
FILES = [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES += sorted((ROOT / "docs" / "papers").glob("*.md"))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
PAPERS = [page for page in PAGES if page.startswith("docs/papers/") and not page.endswith("index.md")]
OUTCOMES = {"reproduced", "not reproduced", "not testable here"}
MEASURED = ("accuracy", "nfe", "nfe_until", "tokens_per_forward", "n", "tokens_per_second")
PLAIN = {"tokens_per_second": ".0f", "tokens_per_forward": ".2f", "n": ".0f", "nfe_until": ".2f"}

QUOTED_PEERS = "Fast-dLLM, no cache", "prefix cache", "dual cache", "bonsai, no cache", "the same under nnx.jit"


def tables(text):
    """The tables of a page, each a list of rows: column -> cell without code marks; a bar in a cell is \\|."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        cells = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
        head, _, *body = ([cell.replace("`", "").replace("\\|", "|") for cell in row] for row in cells)
        yield [dict(zip(head, row, strict=True)) for row in body]


def quoting(page):
    return [rows for rows in tables(PAGES[page]) if {"results", "sampler"} <= rows[0].keys()]


QUOTING = [page for page in PAGES if quoting(page)]
QUOTED = [
    pytest.param(row, id=f"{page}:{row['sampler']}") for page in QUOTING for rows in quoting(page) for row in rows
]


def read(folder, split="test"):
    """Sampler -> its row of results.csv; of tuning.csv that with most problems of a split."""
    name = "results.csv" if (RESULTS / folder / "results.csv").is_file() else "tuning.csv"
    with (RESULTS / folder / name).open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["n"]))
    found = {row["sampler"]: row for row in rows if row.get("split", split) == split}
    told = (RESULTS / folder / name).with_suffix(".json")
    for report in json.loads(told.read_text()).get("reports", ()) if told.is_file() else ():
        if report["sampler"] in found and "eb" in report.get("compat_count", ()):
            found[report["sampler"]]["nfe_until"] = report["compat_count"]["eb"]["nfe_until"]
    return found


def measured(row):
    """The rows behind a quoted one: that of its sampler, or those with its options, which may differ in the indicator
    alone: then it is the mean over trained seeds."""
    found = read(row["results"])
    names = [row["sampler"]] if row["sampler"] in found else [name for name in found if is_a(name, row["sampler"])]
    different = {str(parse_sampler(name).without("indicator")) for name in names}
    assert len(different) == 1, f"{row['sampler']} is {len(different)} samplers of {row['results']}"
    return [found[name] for name in names]


def is_a(name, kind):
    """Whether a sampler has the name, model and options of another, such as ni:cache=prefix."""
    sampler, like = parse_sampler(name), parse_sampler(kind)
    options = {"cache": "none", **sampler.options}
    return (sampler.name, sampler.model) == (like.name, like.model) and like.options.items() <= options.items()


def number(column, rows):
    """A cell as pages write it."""
    values = [float(row[column]) for row in rows]
    if column in PLAIN:
        return format(np.mean(values), PLAIN[column])
    several = stderr.of_mean(values)
    if column == "accuracy":
        error = several if len(rows) > 1 else stderr.of_share(values[0], int(rows[0]["n"]))
        return stderr.as_percent(np.mean(values), error).replace("+-", "±")
    error = several if len(rows) > 1 else float(rows[0].get("nfe_stderr") or 0)
    return f"{np.mean(values):.2f}" + (f" ± {error:.2f}" if error else "")


def choice(folder, kind=None):
    """The fewest forwards within one standard error of the best accuracy, among samplers of a kind such as
    "threshold:cache=dual", or among all."""
    among = {name: row for name, row in read(folder, "validation").items() if not kind or is_a(name, kind)}
    best = max(among.values(), key=lambda row: float(row["accuracy"]))
    floor = float(best["accuracy"]) - stderr.of_share(float(best["accuracy"]), int(best["n"]))
    good = {name: float(row["nfe"]) for name, row in among.items() if float(row["accuracy"]) >= floor}
    return min(good, key=good.get)


def claims(page):
    return [row for table in tables(PAGES[page]) for row in table if "claim" in row and row["claim"]]


@pytest.mark.parametrize("row", QUOTED)
def test_numbers_are_those_of_the_results(row):
    rows = measured(row)
    assert row["accuracy"]
    for column in row.keys() & set(MEASURED):
        left_out = column == "tokens_per_second" and not row[column]  # a speed of another run
        assert left_out or row[column] == number(column, rows), column


@pytest.mark.parametrize("page", QUOTING)
def test_speeds_are_compared_within_one_run(page):
    for rows in quoting(page):
        assert len({row["results"] for row in rows if row.get("tokens_per_second")}) < 2


@pytest.mark.parametrize("row", QUOTED)
def test_what_is_called_the_best_was_chosen_on_other_problems(row):
    chosen = re.search(r"chosen on ([\w-]+)(?:: ([^ ,][^ ]*))?", row.get("role", ""))
    assert chosen or "best" not in " ".join(row.values())
    if chosen:
        folder, kind = chosen.groups()
        assert row["sampler"] == choice(folder, kind)
        ours, others = (json.loads((RESULTS / name / "results.json").read_text()) for name in (row["results"], folder))
        about = [{(report["task"], report["split"]) for report in found["reports"]} for found in (ours, others)]
        assert about == [{(task, "test")} for task, _ in about[1]] + [{(task, "validation") for task, _ in about[1]}]


def test_a_choice_is_the_fewest_forwards_within_one_standard_error(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "RESULTS", tmp_path)
    rows = [("topk", 0.95, 64), ("topk:k=2", 0.94, 32), ("topk:k=4", 0.9, 16), ("eb:cache=dual", 0.935, 4)]
    (tmp_path / "toy").mkdir()
    lines = ["sampler,accuracy,nfe,n", *(f"{name},{accuracy},{nfe},256" for name, accuracy, nfe in rows)]
    (tmp_path / "toy" / "results.csv").write_text("\n".join(lines) + "\n")
    assert [choice("toy"), choice("toy", "topk"), choice("toy", "topk:cache=none")] == ["topk:k=2"] * 3
    assert choice("toy", "eb:cache=dual") == "eb:cache=dual"


@pytest.mark.parametrize("page", PAPERS)
def test_every_paper_has_claims_with_an_outcome(page):
    (ours,) = re.findall(r"^## Ours\n\n(.*?)(?=^## )", PAGES[page], re.MULTILINE | re.DOTALL)
    assert ours.startswith("| claim | published | outcome |\n")
    assert claims(page) and {row["outcome"] for row in claims(page)} <= OUTCOMES


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_an_overview_says_what_the_papers_pages_say(page):
    """Claim and outcome, in the same words; a row that has a claim links its paper's page."""
    found = claims(page)
    assert len(found) >= 6
    for row in found:
        paper = re.search(r"papers/([\w-]+)\.md", row["paper"])[1]
        assert {"claim": row["claim"], "outcome": row["outcome"]}.items() <= next(
            (one for one in claims(f"docs/papers/{paper}.md") if one["claim"] == row["claim"]), {}
        ).items(), row["claim"]
    if page == "docs/results.md":
        linked = {re.search(r"papers/([\w-]+)\.md", row["paper"])[1] for row in found}
        assert linked == {page.removeprefix("docs/papers/").removesuffix(".md") for page in PAPERS}


def test_bits_per_byte_are_those_of_the_logs():
    """The mean over seeds of the averaged weights' loss at the last evaluation, and of several its standard error."""
    (rows,) = (rows for rows in tables(PAGES["docs/training.md"]) if "bits per byte" in rows[0])
    assert {row["logs"] for row in rows} == {path.name.rpartition("-")[0] for path in (RESULTS / "a2d").glob("*.jsonl")}
    for row in rows:
        logs = sorted((RESULTS / "a2d").glob(f"{row['logs']}-[0-9].jsonl"))
        lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
        last = [
            max((line for line in log if "heldout_ema_loss" in line), key=lambda line: line["step"]) for log in lines
        ]
        values = [line["heldout_ema_loss"] / np.log(2) for line in last]
        assert row["seeds"] == str(len(values)) and row["steps"].split(" + ")[-1] == str(last[0]["step"])
        error = f" ± {stderr.of_mean(values):.3f}" if len(values) > 1 else ""
        assert row["bits per byte"] == f"{np.mean(values):.3f}{error}"


def test_forwards_of_oracles_are_those_recorded():
    with (RESULTS / "oracle" / "results.csv").open(newline="") as file:
        told = {row["model"]: row for row in csv.DictReader(file)}
    columns = {"one token per forward": "nfe", "lossless order": "merged_steps", "without the order": "unordered_steps"}
    (rows,) = (rows for rows in tables(PAGES["docs/papers/ni-sampling.md"]) if "oracle" in rows[0])
    assert [row["oracle"] for row in rows] == list(told)
    for row in rows:
        for column, name in columns.items():
            value, error = (float(told[row["oracle"]][field]) for field in (name, f"{name}_stderr"))
            assert row[column] == f"{value:.2f}" + (f" ± {error:.2f}" if error else "")


def test_ratios_to_other_implementations_are_those_measured():
    told = json.loads((ROOT / "benchmarks" / "results" / "peers-cpu.json").read_text())["rows"]
    place = lambda row: (row["size"], row["gen_length"], row["peer"], row["cache"])
    ratios = {place(row): f"{row['cpu_ratio']:.2f}" for row in told}
    columns = dict(zip(QUOTED_PEERS, [("fast-dllm", c) for c in ("none", "prefix", "dual")], strict=False))
    columns |= dict(zip(QUOTED_PEERS[3:], [("bonsai", "none"), ("bonsai-jit", "none")], strict=True))
    (rows,) = (rows for rows in tables(PAGES["docs/results.md"]) if "model, lengths" in rows[0])
    for row in rows:
        model, length = re.fullmatch(r"(\w+(?: M)?), (\d+) \+ \2", row["model, lengths"]).groups()
        size = {"tiny": "tiny", "29 M": "30m", "271 M": "0.3b"}[model]
        assert {name: ratios.get((size, int(length), *key), "not run") for name, key in columns.items()} == {
            name: row[name] for name in columns
        }
    assert len([cell for row in rows for cell in row.values() if re.fullmatch(r"[\d.]+", cell)]) == len(ratios)


def test_estimates_of_log_probabilities_are_the_benchmarks():
    paths = sorted((ROOT / "benchmarks" / "results").glob("estimates-*.json"))
    wanted = [
        {
            "task": row["task"],
            "sampler": row["sampler"],
            "shrink": f"{row['shrink']}" + (f", mask_prompt {row['mask_prompt']}" if row["mask_prompt"] else ""),
            "states": f"{row['states']:.1f}",
            "log p": f"{row['logprob']:.4f}",
            "bias": "exact" if row["shrink"] == 1 else f"{row['bias']:+.4f} ± {row['bias_stderr']:.4f}",
            "rank correlation": f"{row['rank_correlation']:.2f}",
            "learned": f"{row['learned'] * row['completions']:.0f}",
            "cosine": "-" if row["cosine"] is None else f"{row['cosine']:.2f}",
        }
        for path in paths
        for row in json.loads(path.read_text())["rows"]
    ]
    assert wanted in list(tables(PAGES["docs/rewards.md"]))


def test_gains_by_rewards_are_those_measured():
    runs = {"seed 0": "grpo-0", "seed 1": "grpo-1", "seed 2": "grpo-2", "supervised": "sft-control"}
    (rows,) = (rows for rows in tables(PAGES["docs/rewards.md"]) if "seed 2" in rows[0])
    for answers, cells in zip(("greedy", "sampled"), rows, strict=True):
        with (RESULTS / "grpo-word-problems" / answers / "results.csv").open(newline="") as file:
            found = {(row["run"], int(row["step"])): row for row in csv.DictReader(file)}
        assert cells["before"] == f"{float(found['grpo-0', 0]['accuracy']):.2%}"
        for column, run in runs.items():
            row = found.get((run, 40))
            both = row and (100 * float(row[name]) for name in ("difference", "difference_stderr"))
            assert cells[column] == ("{:+.2f} ± {:.2f}".format(*both) if both else "not run")


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_recorded_accuracy_has_wilson_s_error(path):
    told = json.loads(path.read_text())
    rows = [row for name in ("reports", "trials", "rows") for row in told.get(name, ())]
    if path.with_suffix(".csv").is_file():
        with path.with_suffix(".csv").open(newline="") as file:
            rows += csv.DictReader(file)
    for row in (row for row in rows if "accuracy" in row):
        n = int(row.get("n") or told["about"]["n"])
        assert float(row["accuracy_stderr"]) == pytest.approx(stderr.of_share(float(row["accuracy"]), n)), row


def test_what_few_bits_cost_is_quoted_as_measured():
    measured = json.loads((RESULTS / "quantize" / "results.json").read_text())["rows"]
    columns = {"float32": "float32", "int8": "int8", "int4": "int4", "calibrated int4": "int4 gptq"}
    found = {(row["model"], row["weights"]): row for row in measured if not row.get("seed")}
    solved, apart = (rows for rows in tables(PAGES["docs/quantize.md"]) if "calibrated int4" in rows[0])
    for rows, name, factor, unit in ((solved, "accuracy", 100, "%"), (apart, "divergence", 1000, "")):
        assert len(rows) == 4
        for cells in rows:
            model = next(iter(cells.values()))
            for column in cells.keys() & columns.keys():
                row = found[model, columns[column]]
                wanted = f"{factor * row[name]:.2f} ± {factor * row[f'{name}_stderr']:.2f}{unit}"
                assert cells[column] == wanted, (model, column)
    text = re.sub(r"\s+", " ", PAGES["docs/quantize.md"])
    others = {(row["model"], row["seed"]): f"{100 * row['accuracy']:.2f}" for row in measured if row.get("seed")}
    for model in ("sudoku", "long-problems"):
        assert f"{others[model, 1]} and {others[model, 2]}% on `{model}`" in text
    counts = [found["long-problems", weights][name] for weights in ("int4 gptq", "int4") for name in ("lost", "won")]
    assert "it loses {} problems and gains {}; plain int4 loses {} and gains {}.".format(*counts) in text


def test_the_siege_is_quoted_as_it_was():
    told = json.loads((ROOT / "benchmarks" / "results" / "siege-cpu.json").read_text())
    found = {row["kind"]: row for row in told["rows"]}
    cell = lambda kind, outcome: f"{found[kind][outcome]:,}" if found.get(kind, {}).get(outcome) else ""
    both = lambda kind, outcome: sum(found.get(f"{kind}{how}", {}).get(outcome, 0) for how in ("", ", streamed"))
    wanted = [
        {
            "request": kind,
            "whole": cell(kind, "done"),
            "streamed": cell(f"{kind}, streamed", "done"),
            "429": f"{both(kind, 'full'):,}" if both(kind, "full") else "",
            "other error": cell(kind, "refused"),
            "client left": f"{both(kind, 'left'):,}" if both(kind, "left") else "",
        }
        for kind in dict.fromkeys(kind.removesuffix(", streamed") for kind in found)
    ]
    assert wanted in list(tables(PAGES["docs/serving.md"]))
    text = re.sub(r"\s+", " ", PAGES["docs/serving.md"])
    assert f"{told['answers']:,} answers in {told['seconds']:.0f} s" in text
    memory = [f"{own['resident']:.0f} MiB after {own['answers']:,}" for own in told["memory_mib"]]
    assert f"{memory[0]} answers, {', '.join(memory[1:])}" in text


def test_what_worker_processes_cost_is_quoted_as_measured():
    told = json.loads((ROOT / "benchmarks" / "results" / "data-cpu.json").read_text())
    found = {(row["what"], str(row["workers"])): row for row in told["rows"]}
    (rows,) = (rows for rows in tables(PAGES["docs/data.md"]) if "0 workers" in rows[0])
    kinds = {"text": "rows of text", "task": "rows of a task in Python", "conv": "conversations (MB)", "10^9": None}
    assert len(rows) == 7 and {row["n"] for row in told["rows"]} == {3}
    for cells in rows:
        name, *measured = cells.values()
        what = next(kinds[part] or "start, 10^9 examples" for part in kinds if part in name)
        key = "start" if "first batch" in name else "speed" if name.endswith("a second") else "own_cpu"
        shown = lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.2g}"
        for workers, cell in enumerate(measured):
            least, median, most = found[what, str(workers)][key]
            assert cell == f"{shown(median)} ({shown(least)} - {shown(most)})", (name, workers)
