"""Every case of every golden file in `--goldens DIR`, through the public API, on checkpoints made by `convert`. Without
the option our own files, and of families that need many programs a part (`make goldens` runs all).

Ids read `<file stem>/<case name>`: `-k fast-dllm` selects one file. A family is a file stem in
`golden_families.FAMILIES`. Assets and checkpoints are looked up next to the JSON first, then in the project's own copy.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden_base
import jax
import numpy as np
import pytest
from golden_base import Assets
from golden_families import FAMILIES

from samplers import Engine, Request, Result
from samplers.tokens.noise import row_keys

SLOTS_EVERY = 5  # every fifth case also runs in slots with other requests; of all cases every fifteenth
OWN = Path(__file__).parent / "goldens"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not {"golden", "golden_in_slots"} & set(metafunc.fixturenames):
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
    if "golden" in metafunc.fixturenames:
        metafunc.parametrize("golden", params)
    else:
        generations = [p for p in params if FAMILIES[p.values[0][0]].sampled and "prompt" in p.values[0][2]]
        metafunc.parametrize("golden_in_slots", generations[:: 3 * SLOTS_EVERY if asked else SLOTS_EVERY])


@pytest.fixture(scope="session")
def run_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple], None]:
    """Runs a case; what is converted for one is there for all."""
    converted, out = dict[Path, Any](), tmp_path_factory.mktemp("converted")

    def run(golden: tuple) -> None:
        stem, path, case = golden
        FAMILIES[stem].run(case, Assets(path.parent, OWN, converted, out))

    return run


def test_golden(golden: tuple, run_case: Callable[[tuple], None]) -> None:
    run_case(golden)


def sample_in_slots(sampler: Any, denoiser: Any, prompt: Any, lengths: Any = None, **options: Any) -> Result:
    """As `sample_jit`, through slots that other requests come to and leave."""
    if options.pop("noise", None) is not None:
        pytest.skip("its random numbers were recorded, and are not of a key")
    batch, width = prompt.shape
    if getattr(sampler, "lockstep", False) and batch == 1:  # which ties a row to all others, of which it has none
        sampler = dataclasses.replace(sampler, lockstep=False)
    model: Any = SimpleNamespace(
        name="golden", denoiser=denoiser, config=denoiser.config, params=denoiser.params, tokenizer=None
    )
    engine = Engine(model, sampler, slots=2, prompt_length=width)
    rows = [np.asarray(row)[:length].tolist() for row, length in zip(prompt, lengths, strict=True)]
    gen_lengths = options.get("gen_lengths")
    wanted = [sampler.gen_length] * batch if gen_lengths is None else np.asarray(gen_lengths).tolist()
    keys = np.asarray(jax.random.key_data(row_keys(options.get("key", jax.random.key(0)), batch)))
    found = []
    for row, length, key in zip(rows, wanted, keys, strict=True):
        for prompt_ids, gen_length in ((row[::-1], max(length // 2, 1)), (row, length), (row[1:] + row[:1], length)):
            found.append(engine.submit(Request(prompt_ids, gen_length, key)))
            engine.step()
    list(engine.results())
    return jax.tree.map(lambda *x: np.concatenate(x), *(request.result for request in found[1::3]))


def test_golden_in_slots(
    golden_in_slots: tuple, run_case: Callable[[tuple], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_base, "sample_jit", sample_in_slots)
    run_case(golden_in_slots)


def test_no_golden_file_is_overlooked() -> None:
    """Every data file of our own copy is a known family or an asset of one."""
    assets = {"llada-gumbel-shared", "apd_noise", "ni-indicator-llada-tiny"}
    stems = {path.stem for path in [*OWN.glob("*.json"), *OWN.glob("*.npz")]}
    assert stems <= FAMILIES.keys() | assets
