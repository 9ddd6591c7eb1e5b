"""Every case of every golden file in `--goldens DIR`, through the public API, on checkpoints made by `convert`. Without
the option our own files, and of families that need many programs a part (`make goldens` runs all).

Ids read `<file stem>/<case name>`: `-k fast-dllm` selects one file. A family is a file stem in
`golden_families.FAMILIES`. Assets and checkpoints are looked up beside the JSON first, then in the project's own copy.
"""

import json
from pathlib import Path

import pytest
from golden_base import Assets
from golden_families import FAMILIES

OWN = Path(__file__).parent / "goldens"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--goldens")
    folder = Path(asked or OWN)
    params = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.npz")]):
        stem = path.stem
        if stem in FAMILIES:
            content = json.loads(path.read_text()) if path.suffix == ".json" else {"cases": [{"name": "logits"}]}
            cases = FAMILIES[stem].cases(content) if asked else FAMILIES[stem].some(content)
            params += [pytest.param((stem, path, case), id=f"{stem}/{case['name']}") for case in cases]
    metafunc.parametrize("golden", params)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Models converted so far, by source folder; filled by `Assets`."""
    return {"folder": tmp_path_factory.mktemp("converted")}


def test_golden(golden: tuple, converted: dict) -> None:
    stem, path, case = golden
    FAMILIES[stem].run(case, Assets(path.parent, OWN, converted))


def test_no_golden_file_is_overlooked() -> None:
    """Every data file of our own copy is a known family or an asset of one."""
    assets = {"llada-gumbel-shared", "apd_noise", "ni-indicator-llada-tiny"}
    stems = {path.stem for path in [*OWN.glob("*.json"), *OWN.glob("*.npz")]}
    assert stems <= FAMILIES.keys() | assets
