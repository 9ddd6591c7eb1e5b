"""Output folders, and tables and reports as text."""

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.errors import DllmError


def make_folder(path: str | Path) -> Path:
    """The folder, made where it does not exist.

    Raises:
        DllmError: when it cannot be made or written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DllmError(f"the folder {folder} could not be made ({error}); name another by --out") from None
    if not os.access(folder, os.W_OK):
        raise DllmError(f"the folder {folder} cannot be written to; name another by --out")
    return folder


def as_json(value: Any) -> str:
    """Indented JSON; numbers that are not finite as text, since JSON has none."""
    return json.dumps(finite(value), indent=1) + "\n"


def as_json_lines(rows: Sequence[Any]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(finite(row)) + "\n" for row in rows)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with all columns that occur."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def finite(value: Any) -> Any:
    """The value with infinities and NaN as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
