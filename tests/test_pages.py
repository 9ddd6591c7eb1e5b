"""Documents are true: blocks run, flags, settings and names exist, links lead somewhere."""

import importlib
import json
import re
import tomllib

import nbformat
import pages
import pytest
from conftest import ROOT

from evals.sampler import parse_sampler, parse_samplers
from samplers import CACHES, LOOPS, PRESETS, RULES
from samplers.config.registry import is_outside
from train.objectives import OBJECTIVES, read_config
from train.run_dir import WATCH_SECONDS

DOCUMENTS = pages.documents()
EVERY = [pytest.param(block, id=block.where) for page in DOCUMENTS for block in pages.blocks(page)]
RUNNING = [page for page in DOCUMENTS if any(block.runs for block in pages.blocks(page))]
SETTINGS = [objective.config for objective in OBJECTIVES.values()]
OF_OTHERS = {"--signal", "--confirm_run_unsafe_code", "--include_path", "--log_samples"}  # SLURM's, the harness's


def of(*languages):
    return [param for param in EVERY if param.values[0].language in languages]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_a_block_is_data_or_runs_or_says_why_not(page):
    for block in pages.blocks(page):
        assert block.language in pages.DATA | pages.RUN, f"{block.where}: name the block's language; text for none"
        assert block.reason is None or (block.language in pages.RUN and len(block.reason) > 5), block.where
    assert len(pages.blocks(page)) * 2 == len(re.findall(r"^ *(?:```|~~~)", (ROOT / page).read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", RUNNING)
def test_a_page_runs(page, tmp_path):
    printed = pages.run_page(page, tmp_path)
    if page in CHECKS:
        CHECKS[page](printed, tmp_path)


def check_data(printed, folder):
    assert "runs/books: 60 steps" in printed
    assert (folder / "home" / "data").is_dir()
    example = json.loads((folder / "books.jsonl").read_text().splitlines()[-1])
    assert example == {"question": "Q: Tom has 60 books.\nA: ", "solution": "Tom has 60 books."}
    first, *_, last = logged(folder / "runs" / "books")
    assert last["cross_entropy"] < 2 < first["cross_entropy"]


def check_training_page(printed, folder):
    """The model that was fine-tuned, and the run that was watched."""
    before, after, faster = (float(share) for share in re.findall(r"accuracy +([0-9.]+)", printed)[:3])
    assert before < 5 and after > 40 and faster > 40
    first, *_, last = evaluations(folder / "runs" / "mine")
    assert last["heldout_loss"] < first["heldout_loss"] / 2
    assert "runs/tune: 12 steps" in printed
    first, middle, last = evaluations(folder / "runs" / "tune")
    assert (middle["step"], last["step"]) == (6, 12) and first["accuracy"] == 1.0  # the model knows them
    assert last["heldout_loss"] != first["heldout_loss"] < 0.5
    answers = [json.loads(line) for line in (folder / "runs" / "tune" / "generations.jsonl").open()]
    assert answers[0]["text"].endswith("#### 17") and len(answers) == 3 * (1 + 4)
    assert (folder / "curves.svg").is_file() and (folder / "step-12" / "adapter_config.json").is_file()
    assert "heldout_cross_entropy_t0-25" in (folder / "runs" / "tune" / "report.html").read_text()


def check_questions(printed, folder):
    """The example is of what its model knows."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").open()]
    assert [row["correct"] for row in rows] == [True, True] and "accuracy 100.0" in printed
    assert "A: \n\n7\n" in printed, "question and target stand apart"


def logged(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def evaluations(run):
    return [line for line in logged(run) if WATCH_SECONDS in line]


CHECKS = {
    "docs/data.md": check_data,
    "docs/evaluate.md": check_questions,
    "docs/training.md": check_training_page,
}


@pytest.mark.parametrize("block", of("sh"))
def test_commands_are_understood(block, tmp_path, monkeypatch):
    """By their own parsers, whether they are run or not; and specs, settings and targets are there."""
    if pages.write_files(block.where.partition(":")[0], tmp_path):  # whose classes commands name
        monkeypatch.syspath_prepend(tmp_path)
    for module, arguments in pages.commands(block.text):
        if module is None:
            targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert set(arguments) <= targets | {"embedded-word-problems"}, block.where
            continue
        parsed = pages.parse(module, arguments)
        check_specs(parsed, block)
        if module == "train" and "config" in parsed:
            check_training(parsed, block)


def check_specs(parsed, block):
    """Names of rules, caches, presets, and samplers as text."""
    for name, known in (("rule", RULES), ("cache", CACHES), ("preset", PRESETS)):
        value = parsed.get(name)
        if isinstance(value, str) and not (name == "preset" and "/" in value):
            assert value in known or is_outside(value), f"{block.where}: --{name} {value}"
    texts = parsed.get("sampler") or []
    read = parse_sampler if isinstance(texts, str) else parse_samplers
    for text in [texts] if isinstance(texts, str) else texts:
        if "..." not in text and (refused := pages.refused_spec(read, text)):
            raise AssertionError(f"{block.where}: --sampler {text}: {refused}")


def check_training(parsed, block):
    """The config is a file of the repository, or of the page; what is changed is a setting."""
    page = block.where.partition(":")[0]
    config, kind = parsed["config"], OBJECTIVES[parsed["command"]].config
    if (ROOT / config).is_file():
        read_config(ROOT / config, parsed["settings"], parsed["command"])
        return
    assert config == "run.toml" or config in {other.file for other in pages.blocks(page)}, f"{block.where}: {config}"
    for key in (setting.partition("=")[0] for setting in parsed["settings"]):
        *tables, name = key.split(".")
        table = {name: None}
        for outer in reversed(tables):
            table = {outer: table}
        assert not pages.unknown_settings([kind], table), f"{block.where}: {key}"


@pytest.mark.parametrize("block", of("python"))
def test_python_imports_what_is_there(block):
    assert not list(pages.missing_names(block.text))


@pytest.mark.parametrize("block", of("toml"))
def test_settings_are_there(block):
    assert not pages.unknown_settings(SETTINGS, tomllib.loads(block.text))


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block):
    for line in [block.text] if block.text.startswith(("{\n", "[\n")) else block.text.splitlines():
        json.loads(line)


@pytest.fixture(scope="module")
def flags():
    """All flags of our commands, and those that the code of this repository names."""
    code = [path for package in pages.PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = re.findall(
        r"(?<![\w-])--[a-z][\w-]*", "".join(path.read_text() for path in (*code, ROOT / "tests/conftest.py"))
    )
    sampling = importlib.import_module("samplers.cli.sample").command_line()._option_string_actions
    serving = importlib.import_module("samplers.serving.cli").command_line()._option_string_actions
    return {*named, *sampling, *serving, *OF_OTHERS}


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page != "CHANGELOG.md"])  # which names those that left
def test_flags_in_sentences_are_there(page, flags):
    code = " ".join(re.findall(r"`[^`\n]+`", pages.prose((ROOT / page).read_text())))
    unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code)) - flags
    assert not {flag for flag in unknown if not flag.startswith("--xla_")}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_samplers_in_sentences_are_there(page):
    """Code that begins with a sampler's name and a colon, where it is whole."""
    for code in re.findall(r"`'?([^`'\n]+)'?`", pages.prose((ROOT / page).read_text())):
        name, _, options = code.replace("\\|", "|").partition(":")
        if name in {**RULES, **LOOPS, **PRESETS} and "=" in options and "..." not in options:
            assert not pages.refused_spec(parse_samplers, f"{name}:{options}"), f"{page}: {code}"


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_lead_somewhere(page):
    assert not list(pages.broken_links(page, (ROOT / page).read_text()))


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_links_of_notebooks_lead_somewhere(path):
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert not list(pages.broken_links(path.relative_to(ROOT), "\n".join(texts)))


@pytest.mark.parametrize("package", ("convert", "dllm_jax", "evals", "samplers", "train"))
def test_the_reference_has_what_is_public(package):
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    names = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    assert set(importlib.import_module(package).__all__) - {"__version__"} <= {name.split(".")[-1] for name in names}
    assert len(names) == len(set(names))
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
        assert not (ROOT / f"{name.replace('.', '/')}.py").is_file(), f"{name} is a file as well; name what is in it"
