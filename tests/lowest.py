"""The least versions that pyproject.toml allows, as constraints of pip: `make lowest` installs them."""

import re
import sys
import tomllib
from pathlib import Path


def pins(text: str) -> list[str]:
    """`name==version` for every `name>=version` among the dependencies of a pyproject.toml.

    Raises:
        ValueError: for a dependency without a lower bound.
    """
    found = [re.fullmatch(r"([\w.-]+)>=([\w.]+)", wanted) for wanted in tomllib.loads(text)["project"]["dependencies"]]
    if not all(found):
        raise ValueError("every dependency in pyproject.toml needs one lower bound, name>=version, and no more")
    return [f"{match[1]}=={match[2]}" for match in found if match]


if __name__ == "__main__":
    sys.stdout.write("\n".join(pins((Path(__file__).parents[1] / "pyproject.toml").read_text())) + "\n")
