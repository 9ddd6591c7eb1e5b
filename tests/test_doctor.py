"""`python -m dllm_jax.doctor`: complete, and 1 where an implementation is wrong."""

import dataclasses
import json

import jax
import pytest
from conftest import one_error

from dllm_jax import doctor, kernels
from dllm_jax.cli import dllm
from dllm_jax.doctor.__main__ import main


@pytest.fixture
def experts_alone(monkeypatch):
    """Without attention, which takes longer and is checked alike."""
    monkeypatch.setattr(doctor, "OPERATIONS", (kernels.EXPERTS,))


def test_all_is_right_here(capsys, tmp_path):
    assert dllm.main(["doctor", "--out", str(tmp_path / "doctor.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ok: ") and any("device: " in line for line in lines)
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found.keys() == {"versions", "environment", "devices", "choices", "checks", "ok", "verdict"} and found["ok"]
    assert found["versions"]["jax"] == jax.__version__ and len(found["devices"]) == jax.local_device_count()
    names = {operation.name for operation in kernels.OPERATIONS}
    assert {row["operation"] for row in found["choices"]} == {row["operation"] for row in found["checks"]} == names
    assert {(row["implementation"], row["dtype"]) for row in found["checks"]} == {
        ("xla", "float32"),
        ("xla", "bfloat16"),
    }
    for row in found["choices"]:
        assert row["implementation"] == "xla" and all("is for" in reason for reason in row["others"].values())
    for row in found["checks"]:
        assert row["ok"] and "forward" in " ".join(row["errors"]) and "gradient" in " ".join(row["errors"])


@pytest.mark.parametrize("fault", ["raises", "wrong", "not finite"])
def test_a_broken_implementation_is_found(monkeypatch, capsys, tmp_path, fault):
    def run(device, x, *others):
        if fault == "raises":
            raise RuntimeError("no kernel image")
        return x * {"wrong": 2, "not finite": float("nan")}[fault]

    broken = dataclasses.replace(kernels.EXPERTS.kernels[0], platform="cpu", refusal=lambda *_: None, run=run)
    operation = dataclasses.replace(kernels.EXPERTS, kernels=(broken,))
    monkeypatch.setattr(doctor, "OPERATIONS", (operation,))
    assert main(["--out", str(tmp_path / "doctor.json")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("wrong: experts by tokamax in float32: ")
    assert {"raises": "no kernel image", "wrong": "off by", "not finite": "off by nan"}[fault] in last
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert not found["ok"] and {row["implementation"] for row in found["checks"] if not row["ok"]} == {"tokamax"}
    assert {row["implementation"] for row in found["choices"]} == {"xla"}


def test_a_missing_part_is_no_fault(monkeypatch, experts_alone):
    """Neither of the packages nor of what a device tells of itself."""
    monkeypatch.setattr(doctor, "PACKAGES", ("jax", "no-such-package"))
    found = doctor.examine()
    assert found["ok"] and found["versions"]["no-such-package"] is None


def test_a_gpu_that_is_not_used_is_wrong(monkeypatch, experts_alone):
    monkeypatch.setattr(doctor.Path, "exists", lambda path: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = doctor.examine()
    assert not found["ok"] and "dllm_jax[cuda]" in found["verdict"]


def test_mistakes_get_a_sentence(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "none" / "doctor.json")]) == 2
    assert "none" in one_error(capsys)
    assert main(["--no-such"]) == 2 and "--no-such" in one_error(capsys)
