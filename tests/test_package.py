"""What the package says of itself is true: its dependencies, its files, its command."""

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from conftest import ROOT
from lowest import pins
from packaging.requirements import Requirement
from packaging.version import Version

import dllm_jax
from dllm_jax.cli import completion, dllm
from samplers.cli.sample import command_line

PACKAGES = ("convert", "dllm_jax", "evals", "samplers", "train")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Used without an import of ours: by transformers (chat templates), by jax.export, by the harness (answers in LaTeX),
# and by a module that is looked up by its name (`train.data.files`).
BY_OTHERS = {"jinja2", "flatbuffers", "antlr4-python3-runtime", "sympy", "math-verify", "pyarrow"}
NEVER_MISSED = {"IPython"}  # asked for only inside a notebook, which is it


def normal(name):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def declared(*extras):
    """Names of the distributions that the package, or extras of it, ask for."""
    return {normal(name) for extra in extras for name in PROJECT["optional-dependencies"][extra]}


def imported():
    """Top-level modules of others that our files import, with a file that does."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.split(".")[0]: path.relative_to(ROOT) for name in names if name}
    return {
        name: path for name, path in found.items() if name not in (*sys.stdlib_module_names, *PACKAGES, *NEVER_MISSED)
    }


def options_of(parser):
    """All option strings of a parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(options_of, action.choices.values()))
    return found


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_shells_complete_every_command_and_option(shell, capsys, tmp_path):
    pytest.importorskip("shtab")
    assert dllm.main(["completion", shell]) == 0
    made = capsys.readouterr().out
    options = options_of(completion.full_parser())
    assert {"--explain", "--gamma", "--sampler", "--slots", "--config", "--task"} <= options
    assert all(option in made or (shell == "fish" and option.lstrip("-") in made) for option in options)
    assert all(name in made for name in ("convert", "embedded", "sample", "serve", "masked-diffusion", "compare"))
    program = shutil.which(shell)
    if program is not None:  # bash is everywhere, the others may not be
        (tmp_path / "script").write_text(made)
        subprocess.run([program, "-n", tmp_path / "script"], check=True)


def test_completion_without_its_package_or_its_shell(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    for said, wanted in ((["bash"], "dllm_jax[completion]"), (["tcsh"], "bash, zsh, fish"), ([], "bash|zsh|fish")):
        assert dllm.main(["completion", *said]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and wanted in told and told.count("\n") == 1


def test_what_is_imported_is_declared():
    owners = packages_distributions()
    known = {normal(name) for name in PROJECT["dependencies"]} | declared(*PROJECT["optional-dependencies"])
    for module, path in imported().items():
        names = {normal(name) for name in owners.get(module, [module])}
        assert names & known, f"{path} imports {module}, of {names}, which pyproject.toml does not name"


def test_what_is_declared_is_imported():
    owners = packages_distributions()
    used = {normal(name) for module in imported() for name in owners.get(module, [module])}
    needed = {normal(name) for name in PROJECT["dependencies"]} | declared(
        "lm-eval", "data", "export", "serve", "evals", "view", "completion"
    )
    assert needed - used <= BY_OTHERS


def locked():
    """Name -> version in requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.!+]+", line) for line in lines)  # names and versions: no index, no path
    return {normal(line): Version(line.partition("==")[2]) for line in lines if not line.startswith("#")}


def test_the_lock_has_every_dependency_within_its_bounds():
    tested, extras = locked(), PROJECT["optional-dependencies"]
    for wanted in map(Requirement, [*PROJECT["dependencies"], *extras["test"], *extras["data"], *extras["lm-eval"]]):
        assert normal(wanted.name) in tested, f"requirements.lock lacks {wanted.name}; run make lock"
        assert tested[normal(wanted.name)] in wanted.specifier, f"requirements.lock is not within {wanted}"


def test_the_least_versions_are_those_of_the_project():
    found = pins((ROOT / "pyproject.toml").read_text())
    assert [one.replace("==", ">=") for one in found] == PROJECT["dependencies"]
    with pytest.raises(ValueError, match="one lower bound"):
        pins('[project]\ndependencies = ["jax"]')


def test_the_version_is_one(capsys):
    assert PROJECT["version"] == dllm_jax.__version__
    assert dllm.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dllm {dllm_jax.__version__}\n"


COMMANDS = "convert, sample, decide, serve, train, eval, doctor, completion"


@pytest.mark.parametrize("said", [[], ["--help"]])
def test_the_command_names_its_commands(said, capsys):
    assert dllm.main(said) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS.split(", "))


def test_usages_and_mistakes_have_the_name_that_was_typed(capsys):
    for said, name in ((["sample"], "dllm sample"), (["serve"], "dllm serve"), (["eval", "run"], "dllm eval run")):
        with pytest.raises(SystemExit):
            dllm.main([*said, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: {name} ")
        assert dllm.main([*said, "--no-such"]) == 2
        assert f"see {name} --help" in capsys.readouterr().err
    assert command_line().prog == "python -m samplers"
    assert dllm.main(["completion", "--help"]) == 0
    assert "bash|zsh|fish" in capsys.readouterr().out


def test_the_command_hands_over(capsys):
    assert dllm.main(["sample", "--list"]) == 0
    assert "threshold" in capsys.readouterr().out
    assert dllm.main(["sampel"]) == 2
    assert capsys.readouterr().err == f"error: no command is called 'sampel'; use {COMMANDS}\n"
    assert dllm.main(["train", "masked-diffusion"]) == 2
    assert "--config" in capsys.readouterr().err


DATA = {".json", ".jsonl", ".safetensors", ".html", ".yaml"}


def test_the_notice_names_all_that_is_embedded():
    """Every folder of the packages with files that are no code is in NOTICE."""
    notice = (ROOT / "NOTICE").read_text()
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in DATA]
    folders = {path.relative_to(ROOT) for path in files}
    folders = {path for path in folders if path.parts[:2] not in (("evals", "results"), ("convert", "__pycache__"))}
    assert len(folders) > 20
    for path in folders:
        named = [str(parent) for parent in (path, *path.parents) if len(parent.parts) > 1]
        assert any(name in notice for name in named) or path.parts[2] in notice, path


def test_folders_of_the_same_names_do_not_hide_the_packages(tmp_path):
    """As where a clone, or a project with data in `train/`, lies in the working directory."""
    for name in ("dllm_jax", "convert", "evals", "samplers", "train"):
        (tmp_path / name).mkdir()
    program = "import dllm_jax, convert, evals, samplers, train; dllm_jax.load, convert.convert, samplers.generate"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=300)
