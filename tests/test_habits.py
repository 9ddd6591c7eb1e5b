"""What users expect everywhere: NO_COLOR and narrow windows (the viewer's: test_viewer.py), allowed file names,
attention by its properties."""

import re
import subprocess

import pytest
from conftest import ROOT, groups_in

from dllm_jax.cli.command import console
from evals import __main__ as evals
from evals.presets.reading import presets as all_presets

RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 60 columns that can show colours."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def coloured(text):
    """Whether a sequence that sets a colour is in it; bold and dim ones are none."""
    codes = re.findall(r"\x1b\[([\d;]*)m", text)
    return any(int(code or 0) >= 30 for group in codes for code in group.split(";"))


def shown_lines(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()


def test_tables_are_as_wide_as_the_terminal_and_have_no_colours_without_one(terminal, monkeypatch, capsys):
    assert console().width == 60
    monkeypatch.delenv("FORCE_COLOR")
    assert console().width == 60 and not console().is_terminal
    monkeypatch.delenv("COLUMNS")
    assert console().width == 160 and console(otherwise=200).width == 200 and not console().is_terminal


def test_lists_keep_to_no_color_and_to_the_width(terminal, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    assert evals.main(["presets", "apd/"]) == 0
    told = capsys.readouterr().out
    assert "apd/" in told and not coloured(told) and max(map(len, shown_lines(told))) <= 60


def test_no_file_has_a_name_that_some_system_refuses():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    names = listed.stdout.splitlines()
    for name in names:
        parts = name.split("/")
        assert not re.search(r'[<>:"\\|?*]', name) and not any(part.endswith((" ", ".")) for part in parts), name
        assert not any(RESERVED.fullmatch(part) for part in parts), name
    assert len({name.lower() for name in names}) == len(names)


def test_attention_is_compared_with_words_only_where_configs_are_defined():
    """`ModelConfig.is_causal`, `has_blocks` and `has_canvas` are for all others."""
    compared = re.compile(r"""\.attention\s*(==|!=|(not )?in\b)\s*["'(\[{]""")
    packages = ("dllm_jax", "convert", "samplers", "train", "evals", "benchmarks")
    files = {path.relative_to(ROOT).as_posix(): path for name in packages for path in (ROOT / name).rglob("*.py")}
    assert {name for name, path in files.items() if compared.search(path.read_text())} == {"dllm_jax/config.py"}


def test_folders_of_presets_have_such_names_too():
    """`python -m evals harness --out` makes one of each preset's name."""
    assert not [name for name in all_presets() if re.search(r'[<>:"\\|?*]', name.replace("/", "-"))]


def test_every_test_is_in_one_part():
    names = [f"tests/test_{file}.py::test_{number}" for file in "abc" for number in range(3)]
    names += [f"tests/test_goldens.py::test_golden[{stem}/{number}]" for stem in ("eb", "d2f") for number in range(4)]
    first, second = groups_in("1/2", names), groups_in("2/2", names)
    recordings = {f"tests/test_goldens.py:{stem}" for stem in ("eb", "d2f")}
    assert first | second == {*(f"tests/test_{file}.py" for file in "abc"), *recordings} and not first & second
    assert len(recordings & first) == 1 and groups_in("1/1", names) == first | second
