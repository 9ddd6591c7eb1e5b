"""Runs the notebooks on their small models and keeps their outputs: the pages that the site shows.

    python -m docs.tools.notebooks docs/notebooks                # all, a quarter of an hour on two CPU cores
    python -m docs.tools.notebooks docs/notebooks quickstart     # that one alone

Each runs from top to bottom in a kernel of its own, as a reader would run it; nothing is compiled or converted before.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def run_notebook(path: Path) -> str:
    """The text of a notebook with its outputs; this machine's folders are written as a reader's."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        env = {**os.environ, "DLLM_JAX_HOME": home, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        env["PYTHONWARNINGS"] = "ignore:IProgress not found"  # the warning names a folder of this machine
        client = NotebookClient(
            notebook,
            timeout=None,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": work}},
        )
        client.execute(env=env)
        text = str(nbformat.writes(notebook))
        for folder, name in ((home, "~/.cache/dllm_jax"), (work, "."), (str(ROOT), "dllm_jax")):
            text = text.replace(folder, name)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.tools.notebooks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="DIR", help="folder for the notebooks with their outputs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, such as quickstart (default: all)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NOTEBOOKS]:
        parser.error(f"no notebook is called {unknown[0]!r}; choose from {', '.join(NOTEBOOKS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or NOTEBOOKS:
        (options.out / f"{name}.ipynb").write_text(run_notebook(NOTEBOOKS[name]) + "\n", encoding="utf-8")
        print(options.out / f"{name}.ipynb", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
