"""Documents whose commands are run as they stand."""

import os
import re
import subprocess
import sys

from conftest import ROOT

_FILE = re.compile(r"`([\w.-]+)`[^`]*:\n\n```(?:toml|python)\n(.*?)```", re.DOTALL)
_COMMANDS = re.compile(r"(?<!-->\n)```sh\n(.*?)```", re.DOTALL)


def run_page(name, folder):
    """Writes the files that a page of docs/ names before their contents, runs its commands, and gives what they say.

    Commands below the comment `<!-- not run: WHY -->` are not run.
    """
    page = (ROOT / "docs" / name).read_text()
    for file, content in _FILE.findall(page):
        (folder / file).write_text(content)
    commands = "".join(_COMMANDS.findall(page)).replace("python ", f"{sys.executable} ")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DLLM_JAX_HOME": str(folder / "home")}
    done = subprocess.run(["bash", "-ec", commands], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
