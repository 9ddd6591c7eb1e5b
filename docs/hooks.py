"""What `make docs` adds to the pages of this folder; run by MkDocs (mkdocs.yml).

* The README is the first page, and CHANGELOG.md and CONTRIBUTING.md are pages, as they stand in the repository.
* The notebooks are pages with the outputs of their last run here (docs/notebooks, by `python -m docs.tools.notebooks`).
* A file or folder of the repository that a page links to is a page below source/, so that no link leads nowhere, and
  none leads to a host.
* The page of commands gets their options, read off their parsers.
* What a page would fetch from elsewhere is a warning, which ends the build.
"""

import argparse
import functools
import importlib
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

from dllm_jax.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
NAMED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
COMMAND_PAGE = "reference/commands.md"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")  # the path in [text](path#anchor)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
FETCHED = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=\"((?:https?:)?//[^\"]+)\"")
LOG = logging.getLogger("mkdocs.plugins.dllm_jax")  # whose warnings MkDocs counts
MOST_SHOWN = 200_000  # characters of a linked file
_origins: dict[str, str] = {}  # page of the site -> its path in the repository


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made of files outside this folder."""
    _origins.clear()
    _origins.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    waiting = [*NAMED, *_origins.values()]
    while waiting:
        origin = waiting.pop()
        uri = page_of(origin)
        if uri not in _origins:
            _origins[uri] = origin
            files.append(File.generated(config, uri, content=shown(origin)))
            for name, picture in executed(origin)[1].items() if is_notebook(origin) else ():
                files.append(File.generated(config, f"notebooks/{name}", content=picture))
        waiting += [path for path in linked(origin) if path not in _origins.values() and not is_picture(path)]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages, and adds the commands to theirs."""
    if page.file.src_uri == COMMAND_PAGE:
        markdown = "\n".join([markdown, *commands()])
    if is_notebook(_origins[page.file.src_uri]):
        return markdown  # has programs and their texts in it
    return outside_fences(markdown, lambda text: relinked(text, _origins[page.file.src_uri], page))


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Warns of what a page would fetch from other hosts while it is read."""
    for found in FETCHED.findall(output):
        LOG.warning("%s: would fetch %s", page.file.src_uri, found)


def relinked(text: str, origin: str, page: Any) -> str:
    """A text whose links are those of the site, with plain bars in code: other readers want them masked in tables."""
    here = posixpath.dirname(page.file.src_uri)
    text = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), text)
    return LINK.sub(lambda match: posixpath.relpath(page_of(resolved(match[1], origin)), here or "."), text)


def outside_fences(markdown: str, change: Any) -> str:
    """Applies `change` to what is not a block of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def linked(origin: str) -> Iterator[str]:
    """Paths in the repository that a document links to."""
    if origin.endswith(".md") and (ROOT / origin).is_file():
        for match in LINK.finditer(FENCE.sub("", (ROOT / origin).read_text())):
            path = resolved(match[1], origin)
            if (ROOT / path).exists():  # MkDocs tells of the others
                yield path


def resolved(link: str, origin: str) -> str:
    """The path in the repository of a link in the document `origin`; of a folder with a README, that."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def is_notebook(path: str) -> bool:
    """Whether a path of the repository is a notebook's."""
    return path.startswith("notebooks/") and path.endswith(".ipynb")


def is_picture(path: str) -> bool:
    """Whether a link is to a picture of this folder, which MkDocs copies."""
    return path.startswith("docs/") and not path.endswith((".md", ".py"))


def page_of(path: str) -> str:
    """Where on the site a path of the repository is."""
    if path in NAMED:
        return NAMED[path]
    if path.startswith("docs/") and (path.endswith(".md") or is_picture(path)):
        return path.removeprefix("docs/")
    if is_notebook(path):
        return path.removesuffix(".ipynb") + ".md"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def shown(origin: str) -> str:
    """The page of a file or folder of the repository; Markdown as it stands."""
    path = ROOT / origin
    if path.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir() if entry.name[0] not in "._")
        return "\n".join([f"# {origin}/", "", *(f"* `{name}`" for name in names)])
    if is_notebook(origin):
        return executed(origin)[0]
    text = path.read_text()
    if origin.endswith(".md"):
        return text
    language = {"py": "python"}.get(path.suffix[1:], path.suffix[1:] or "text")
    cut = f"\n\nThe first {MOST_SHOWN:,} characters of it." if len(text) > MOST_SHOWN else ""
    return f"# {origin}\n\n~~~~~~{language}\n{text[:MOST_SHOWN]}\n~~~~~~{cut}"


@functools.cache
def executed(origin: str) -> tuple[str, dict[str, bytes]]:
    """A notebook with its outputs as Markdown, and the pictures in it by their names."""
    path = ROOT / "docs" / origin
    notebook = nbformat.read(path, as_version=4)
    markdown, kept = MarkdownExporter().from_notebook_node(notebook, {"unique_key": path.stem})
    note = f"*With its outputs on a CPU, as a file: [{path.name}]({path.name}).*"
    title, rest = markdown.lstrip().split("\n", 1)
    return f"{title}\n\n{note}\n{rest}", kept["outputs"]


def commands() -> Iterator[str]:
    """All commands and their options, read off their parsers."""
    for command in COMMANDS.values():
        parser = importlib.import_module(command.parser).command_line()
        subcommands = list(subparsers(parser))
        yield f"## {parser.prog}\n"
        if not subcommands:
            yield from options(parser)
        for name, subparser in subcommands:
            yield f"### {parser.prog.split()[-1]} {name}\n"
            yield from options(subparser)


def subparsers(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands of a parser with their names, those of commands among them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                deeper = list(subparsers(subparser, f"{before}{name} "))
                yield from deeper or [(f"{before}{name}", subparser)]


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table of a parser's options."""
    yield from ("| option | |", "|---|---|")
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            about = " ".join(((action.help or "") % {**vars(action), "prog": parser.prog}).split())
            needed = " Required." if action.required and action.option_strings else ""
            yield f"| `{' '.join(said(action))}` | {cell(about)}{needed} |"
    yield ""


def said(action: argparse.Action) -> Iterator[str]:
    """How an option is written: its flags, and what stands behind them."""
    if action.option_strings:
        yield ", ".join(action.option_strings)
    if action.nargs != 0:
        yield str(action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper()))


def cell(text: str) -> str:
    """A text as a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
