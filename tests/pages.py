"""What documents hold: blocks of code that run or say why not, commands, settings, links.

A block of `python` or `sh` runs, in its page's order, in an empty folder; one below the comment `<!-- not run: WHY -->`
does not, but its flags, settings and names must exist all the same. A block after "`NAME.py`:" is
written to that file. Other blocks are data.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from unittest import mock

import jax
from conftest import ROOT

import dllm_jax
from convert import embedded
from convert.hub_folder import copied_files
from dllm_jax.checkpoints import checkpoint
from dllm_jax.cli.commands import COMMANDS
from dllm_jax.errors import DllmError
from dllm_jax.params.specs import init_params

PACKAGES = ("benchmarks", "docs", "convert", "dllm_jax", "evals", "samplers", "train")
DATA = {"json", "jinja", "nginx", "text", "toml", "yaml"}
RUN = {"python", "sh"}
_BLOCK = re.compile(
    r"(?:`(?P<file>[\w-]+\.\w+)`(?:[^`\n]|\n(?!\n))*:\n\n)?(?:^<!-- not run: (?P<reason>.*?) -->\n)?"
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>\w*)\n(?P<text>.*?)^ *(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
_END = {"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", ")", "(", "done", "do"}


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        where: page and line.
        language: after the fence, "" for none.
        file: the file that it is written to; None for no such.
        reason: why it is not run; None for what is run, or is data.
    """

    where: str
    language: str
    text: str
    file: str | None
    reason: str | None

    @property
    def runs(self):
        return self.language in RUN and self.reason is None and self.file is None


def documents():
    """All Markdown of the repository, as paths in it."""
    folders = [ROOT / name for name in (*PACKAGES, "tests", "notebooks")]
    found = [path for folder in folders for path in folder.rglob("*.md") if ".ipynb_checkpoints" not in path.parts]
    return sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *found])


@functools.cache
def blocks(page):
    """The blocks of a document, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            f"{page}:{text.count(chr(10), 0, match.start('fence')) + 1}",
            match["language"],
            re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
            match["file"],
            match["reason"],
        )
        for match in _BLOCK.finditer(text)
    ]


def write_files(page, folder):
    """The files that a page contains, and whether there are modules among them; those of other pages are forgotten."""
    files = {Path(block.file): block.text for block in blocks(page) if block.file}
    for path, text in files.items():
        Path(folder, path).write_text(text)
    modules = [path.stem for path in files if path.suffix == ".py"]
    for module in modules:
        sys.modules.pop(module, None)
    return bool(modules)


def run_page(page, folder):
    """Writes a page's files, runs its blocks one after another in a folder, and gives what they print.

    Names of published models are models of that format with random weights, one narrow layer and 2048 positions.
    """
    home = folder / "home"
    environment = {"PYTHONPATH": str(ROOT), "DLLM_JAX_HOME": str(home), "NO_COLOR": "1"}
    found = mock.patch.object(sys, "path", [str(folder), *sys.path])  # as where somebody types it
    with contextlib.chdir(folder), mock.patch.dict(os.environ, environment), found:
        write_files(page, folder)
        running = "\n".join(block.text for block in blocks(page) if block.runs)
        for name in dllm_jax.PUBLISHED:
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w.-])", running):
                _stand_in(name, home / name)
        names, printed = {"__name__": "page"}, []
        for block in blocks(page):
            if block.runs:
                printed.append(_run_sh(block) if block.language == "sh" else _run_python(block, names))
    return "".join(printed)


def _run_sh(block):
    text = re.sub(r"(?<![\w/.-])python (?=-|\w+\.py)", f"{sys.executable} ", block.text)
    text = re.sub(r"^dllm ", f"{sys.executable} -m dllm_jax.cli.dllm ", text, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-ec", text], capture_output=True, text=True)
    assert done.returncode == 0, f"{block.where}: {done.stderr[-2000:]}"
    return done.stdout


def _run_python(block, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.text, block.where, "exec"), names)
    return out.getvalue()


def _stand_in(name, folder):
    """A checkpoint of a published model's format, with the embedded models' words and a chat format."""
    config = dllm_jax.published_config(name)
    ids = {"vocab_size": 520, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
    sizes = {"num_layers": 1, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "mlp_dim": 64}
    config = config.replace(**sizes, **ids, max_length=2048, dtype="float32")
    files = copied_files(embedded.source("word-problems"))
    del files["generation.json"]
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    checkpoint.save(folder, config, init_params(config, jax.random.key(0)).items(), files=files)
    (folder / "chat_template.jinja").write_text(template)


# Commands -----------------------------------------------------------------------------------------------------------


def commands(text):
    """Programs of this library in a block of shell: (module, arguments) each, None where it is make: its targets."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = _words(line)
        for at, word in enumerate(words):
            following = list(_until_end(words[at + 1 :]))
            if word == "make" and at == 0:
                yield None, [target for target in following if "=" not in target]
            elif (
                re.fullmatch(r"(.*/)?python3?", word)
                and following[:1] == ["-m"]
                and following[1].split(".")[0] in PACKAGES
            ):
                yield following[1], following[2:]
            elif word == "dllm" and following and following[0] in COMMANDS:
                package, *first = COMMANDS[following[0]].run
                yield package, [*first, *following[1:]]


def _words(line):
    lexer = shlex.shlex(re.sub(r"\$(?=')", "", line), posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:  # a quotation that goes on in the next line: of another program
        return []


def _until_end(words):
    for word in words:
        if word in _END:
            return
        yield word


class _Parsed(BaseException):
    """Carries what a parser made of a command out of the command."""


def parse(module, arguments):
    """What a command's own parser makes of its arguments.

    Raises:
        AssertionError: with the parser's sentence, when it refuses them.
    """

    def capturing(parse):
        def parse_and_leave(self, *args, **kwargs):
            raise _Parsed(parse(self, *args, **kwargs))

        return parse_and_leave

    printed = io.StringIO()
    imported = importlib.import_module(module)
    if hasattr(imported, "__path__"):  # a package
        imported = importlib.import_module(f"{module}.__main__")
    platforms = jax.config.jax_platforms
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(sys, "argv", [module, *arguments]))
        for kind in parsers(argparse.ArgumentParser):
            own = [name for name in ("parse_args", "parse_intermixed_args") if name in vars(kind)]
            patches = {name: capturing(getattr(kind, name)) for name in own}
            patched.enter_context(mock.patch.multiple(kind, **patches) if own else contextlib.nullcontext())
        try:
            with contextlib.redirect_stderr(printed):
                imported.main()
        except _Parsed as found:
            return vars(found.args[0])
        except SystemExit as left:
            assert left.code == 0, printed.getvalue()
            return {}
        finally:
            jax.config.update("jax_platforms", platforms)
    raise AssertionError(printed.getvalue() or f"python -m {module} reads no arguments")


def parsers(kind):
    """A class and all that are made of it."""
    return [kind, *(more for other in kind.__subclasses__() for more in parsers(other))]


# Settings and names -------------------------------------------------------------------------------------------------


def unknown_settings(kinds, table, before=""):
    """Dotted keys of a table that none of some dataclasses of settings has."""
    fields = {}
    for kind in kinds:
        for name, hint in typing.get_type_hints(kind).items():
            fields.setdefault(name, []).extend(_dataclasses_in(hint))
    found = []
    for name, value in table.items():
        if name not in fields:
            found.append(before + name)
        elif isinstance(value, dict) and fields[name]:
            found += unknown_settings(fields[name], value, f"{before}{name}.")
    return found


def _dataclasses_in(hint):
    hints = typing.get_args(hint) or (hint,)
    return [hint for hint in hints if dataclasses.is_dataclass(hint)]


def missing_names(source):
    """Modules of ours, and names in them, that Python code imports and that there are not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            asked = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            asked = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in asked:
            if module.split(".")[0] in PACKAGES and not _is_there(module, name):
                yield f"{module}.{name}" if name else module


def _is_there(module, name):
    try:
        imported = importlib.import_module(module)
        return name is None or hasattr(imported, name) or importlib.import_module(f"{module}.{name}") is not None
    except ImportError:
        return False


# Links --------------------------------------------------------------------------------------------------------------


LINK = re.compile(r"!?\[(?:[^\]\[`]|`[^`]*`|\[[^\]]*\])*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def prose(markdown):
    """Markdown without its blocks of code and its comments."""
    return re.sub(r"<!--.*?-->", "", _BLOCK.sub("", markdown), flags=re.DOTALL)


def anchors(markdown):
    """Anchors of a document's headings, as hosts and MkDocs make them."""
    made = set()
    for heading in re.findall(r"^#+ +(.*?)(?: *\{.*\})?$", prose(markdown), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        made.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return made | set(re.findall(r"(?:id|name)=\"([^\"]+)\"", markdown))


def broken_links(path, markdown):
    """Links of a document, at its path in the repository, that lead to nothing; of other hosts, what is no URL."""
    for link in LINK.findall(prose(markdown)):
        file, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            if not re.fullmatch(r"https?://[\w-]+(\.[\w-]+)+(/[^\s<>\"]*)?|mailto:\S+@\S+", link):
                yield link
            continue
        target = (ROOT / path).parent / file if file else ROOT / path
        if not target.exists() or file.startswith("/"):
            yield link
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text() if file else markdown):
            yield link


def refused_spec(read, text):
    """The sentence with which a reader of specs refuses one; None where it does not."""
    try:
        read(text)
    except DllmError as error:
        return str(error)
    return None
