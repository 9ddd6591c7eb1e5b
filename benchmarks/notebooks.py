"""How long the notebooks take, as they are, on the small models: `python -m benchmarks.notebooks --json FILE`.

Each runs from top to bottom in a kernel of its own, as a reader would run it; nothing is compiled or converted before.
The site's pages with outputs are of `python -m benchmarks.notebooks --keep docs/notebooks`.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def timed(path: Path, kept: Path | None) -> dict[str, Any]:
    """A notebook's row: wall time, the CPU time of its kernel, and how busy others kept the machine.

    Args:
        kept: folder to write the executed notebook to; None keeps none.
    """
    notebook, before, start = nbformat.read(path, as_version=4), _used(), time.perf_counter()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        env = {**os.environ, "DLLM_JAX_HOME": home, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(FOLDER.parent)}
        env["PYTHONWARNINGS"] = "ignore:IProgress not found"  # which names a place on this machine
        client = NotebookClient(
            notebook,
            timeout=None,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": work}},
        )
        client.execute(env=env)
    wall, cpu = time.perf_counter() - start, _used() - before
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        text = nbformat.writes(notebook)
        for place, name in ((home, "~/.cache/dllm_jax"), (work, "."), (str(FOLDER.parent), "dllm_jax")):
            text = text.replace(place, name)  # a reader has others
        (kept / path.name).write_text(text + "\n", encoding="utf-8")
    return {
        "notebook": path.stem,
        "seconds": round(wall),
        "cpu_seconds": round(cpu),
        "load": round(os.getloadavg()[0], 1),
    }


def _used() -> float:
    """CPU seconds of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, such as quickstart (default: all)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, beside those of others there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the notebooks with their outputs there")
    options = parser.parse_args(arguments)
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no notebook is called {unknown[0]}; choose from {', '.join(known)}")
    rows = []
    for name in options.names or known:
        rows.append(timed(known[name], options.keep))
        print(rows[-1], flush=True)
        if options.json:
            _write(options.json, rows)
    return 0


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    names = [row["notebook"] for row in rows]
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    about = {
        "command": "python -m benchmarks.notebooks --json FILE",
        "what": "each notebook with its small model, as it stands; CPU seconds are of all cores, load of all processes",
        "cpu_cores": os.cpu_count(),
        "versions": {"jax": version("jax")},
    }
    found = sorted([row for row in before if row["notebook"] not in names] + rows, key=lambda row: row["notebook"])
    file.write_text(json.dumps({**about, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
