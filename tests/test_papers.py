"""The pages of docs/papers: options, defaults, presets and counts are those of the code and the files."""

import dataclasses
import json
import re
import tomllib

import numpy as np
import official
import pytest
from conftest import GOLDENS, ROOT, one_error

from dllm_jax import spec
from docs.tools import pictures
from evals import presets
from evals.sampler import parse_sampler
from samplers import CACHES, PRESETS, RULES
from samplers.config.registry import LOOPS
from samplers.config.sampler_config import GENERATION_DEFAULTS, SamplerConfig
from samplers.tokens.smoothing import Smoothing
from train.objectives import OBJECTIVES

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "papers").glob("*.md"))}
PARTS = ["Formula", "Options", "Run it", "Published numbers", "Ours", "What differs", "Checked against", "Cite"]
PAPERS = [name for name in PAGES if name != "index"]


def part(page, heading):
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)[1]


def rows(page, heading, first):
    """Rows of the tables of a part whose first column is called so, as dicts by column; code marks stay."""
    for table in re.findall(r"(?:^\|.*\|\n)+", part(page, heading), re.MULTILINE):
        head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        if head[0] == first:
            yield from (dict(zip(head, row, strict=True)) for row in body)


def written(value):
    return "required" if value is dataclasses.MISSING else "none" if value is None else spec.format_value(value)


def default_of(code):
    """The default of `SAMPLER:OPTION` or of `train OBJECTIVE: TABLE.KEY`, as documents write it."""
    if trained := re.fullmatch(r"train ([\w-]+): ([\w.]+)", code):
        kind, names = OBJECTIVES[trained[1]].config, trained[2].split(".")
        for name in names[:-1]:
            kind = kind.__dataclass_fields__[name].default_factory
        return written(kind.__dataclass_fields__[names[-1]].default)
    name, _, option = code.partition(":")
    if name == "smoothing":
        return written(Smoothing.__dataclass_fields__[option].default)
    if name in CACHES:
        settings = GENERATION_DEFAULTS.with_options(cache=name)
    else:
        under = {
            "gen_length": GENERATION_DEFAULTS.options["gen_length"]
        }  # all that a model with a canvas does not bring
        settings = SamplerConfig(name, {}).over(
            SamplerConfig(name, under) if name == "renoise" else GENERATION_DEFAULTS
        )
    owner = settings.owners[option]
    fields = (owner.kind or settings.kind).__dataclass_fields__
    usual = False if option == "ignore_eos" else fields[owner.field].default
    if usual is dataclasses.MISSING and option == "steps":
        return "one per token"
    return written(settings.options.get(option, usual))


@pytest.mark.parametrize("page", PAPERS)
def test_a_page_has_its_parts(page):
    assert re.findall(r"^## (.*)$", PAGES[page], re.MULTILINE) == PARTS
    assert re.match(r"# .+\n\n(?!#)", PAGES[page])


@pytest.mark.parametrize("page", PAPERS)
def test_options_and_defaults_are_those_of_the_code(page):
    """Of every row of the table: what is said here exists, and has this default."""
    found = [*rows(page, "Options", "paper"), *rows(page, "Options", "transformers")]
    assert len(found) >= 5
    for row in found:
        code = row["here"].strip("`")
        if code.startswith("python -m train"):
            assert code.split()[-1] in OBJECTIVES
            continue
        if "=" in code:  # a whole spec
            assert parse_sampler(code)
            code = code.partition("=")[0]
        assert row["default"] == default_of(code), f"{page}: {code} is {default_of(code)}"


@pytest.mark.parametrize("page", PAPERS)
def test_whatever_looks_like_a_sampler_is_one(page):
    """Code marks of prose and tables that begin with a sampler's name and a colon, and `rule=...` and the like."""
    names = [*RULES, *LOOPS, *PRESETS]
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)):
        name, _, rest = code.partition(":")
        if name in names and rest:
            assert "=" not in rest or parse_sampler(code), code
        elif found := re.fullmatch(r"((?:\w+=[\w.-]+)(?:,\w+=[\w.-]+)*)", code):
            known = set().union(*(SamplerConfig(name, {}).over(GENERATION_DEFAULTS).types for name in (*RULES, *LOOPS)))
            assert {pair.partition("=")[0] for pair in found[1].split(",")} <= known | {"top_k"}, code


@pytest.mark.parametrize("page", PAPERS)
def test_what_is_named_is_there(page):
    """Originals of official code, files and settings of training."""
    for name in re.findall(r"`tests/official\.py:(\w+)`", PAGES[page]):
        assert hasattr(official, name), name
    for path in re.findall(r"`((?:train/configs|tests|benchmarks|evals|samplers)/[\w./-]+\.\w+)`", PAGES[page]):
        assert (ROOT / path).is_file(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page]):
        assert (ROOT / "docs" / "papers" / link).exists(), link
    for text in re.findall(r"```toml\n(.*?)```", PAGES[page], re.DOTALL):
        assert tomllib.loads(text)["steps"]


@pytest.mark.parametrize("page", PAPERS)
def test_published_numbers_are_those_of_the_presets(page):
    for row in rows(page, "Published numbers", "preset"):
        first = presets.find(row["preset"].strip("`")).published[0]
        for column in {"value", "nfe", "tps", "tpf"} & row.keys():
            assert (float(row[column]) if row[column] else None) == getattr(first, column), row


@pytest.mark.parametrize("page", PAPERS)
def test_recorded_cases_are_counted(page):
    said = re.findall(r"^(\d+) recorded cases", part(page, "Checked against"), re.MULTILINE)
    files = re.findall(r"`tests/goldens/([\w-]+\.json)`", part(page, "Checked against"))
    counted = [len(json.loads((GOLDENS / file).read_text())["cases"]) for file in files]
    assert said == [str(count) for count in counted or [0]]


def test_pictures_show_what_forwards_ran(llada_tiny):
    """Without a cache everything; with the dual cache a block, but for the forwards that refresh."""
    prompt, options = "Q: Tom has 12 books.\nA: ", {"gen_length": 16, "block_length": 8, "ignore_eos": True}
    whole = pictures.steps_of(llada_tiny, prompt, "topk:k=2,cache=none", **options)
    dual = pictures.steps_of(llada_tiny, prompt, "topk:k=2,cache=dual", **options)
    start = len(prompt)
    assert whole.ran.shape == (8, start + 16) and whole.ran.all()
    assert (whole.prompt, whole.borders) == (start, [start + 8])
    assert np.bincount(whole.written[start:]).tolist() == [2] * 8
    assert dual.ran.sum(axis=1).tolist() == [start + 16, 8, 8, 8] * 2
    assert dual.ran[1].nonzero()[0].tolist() == list(range(start, start + 8))
    assert all(dual.ran[dual.written[at], at] for at in range(start, start + 16))
    assert pictures.draw([("dual", dual)]).startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--out", "nowhere"], ["--out", ".", "portrait"]])
def test_pictures_that_cannot_be_made(arguments, capsys):
    assert pictures.main(arguments) == 2
    assert one_error(capsys)


def test_pictures_are_small_and_told_in_words():
    for name in pictures.PICTURES:
        assert (ROOT / "docs" / "images" / f"concept-{name}.png").stat().st_size < 120_000
    pages = [*PAGES.values(), (ROOT / "docs" / "concepts.md").read_text()]
    told = [found for page in pages for found in re.findall(r"!\[(.*?)\]\([./]*images/concept-([\w]+)\.png\)", page)]
    assert {name for _, name in told} == set(pictures.PICTURES) and all(len(text) > 20 for text, _ in told)
