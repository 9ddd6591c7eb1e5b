"""The registry of objectives: what one more takes, and that nothing else knows which there are."""

import ast
import dataclasses
import itertools
import json
import tomllib
import types
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from train_toys import LLADA, run_config, settings, write_toml

import train
from dllm_jax import DllmError
from train.__main__ import main
from train.config import LoraPart, TrainConfig
from train.logs import step_flops
from train.losses import Noised
from train.objectives import OBJECTIVES
from train.objectives.base import CrossEntropy, Passes
from train.settings import setting, to_json

ROOM = Path(train.__path__[0])


@dataclasses.dataclass(frozen=True)
class AllMaskedPart:
    weight: float = setting(1.0, at_least=0.5, at_most=2)

    kind: ClassVar[str] = "sft"
    chunk: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True)
class AllMaskedConfig(TrainConfig):
    objective: AllMaskedPart = dataclasses.field(default_factory=AllMaskedPart)
    command: Literal["all-masked"] = "all-masked"


@dataclasses.dataclass(frozen=True)
class AllMasked(CrossEntropy):
    """One that masks every target, with a forward more than others."""

    about = "learn from nothing but masks"
    config = AllMaskedConfig

    def fit_model(self, model, config):
        if config.data.length % 2:
            raise DllmError(f"data.length {config.data.length} is odd")
        return super().fit_model(model, config)

    def passes(self, trained):
        return Passes(*(times + 1 for times in super().passes(trained)))

    def corrupt(self, key, batch, denoiser):
        inputs = denoiser.mask_id * batch.targets + batch.tokens * ~batch.targets
        return Noised(inputs, batch.tokens, self.settings.weight * batch.targets, batch.lengths)


def test_a_new_objective_is_a_file_and_a_name(tmp_path, monkeypatch, capsys):
    more = types.MappingProxyType({**OBJECTIVES, "all-masked": AllMasked})
    monkeypatch.setattr("train.objectives.OBJECTIVES", more)
    monkeypatch.setattr("train.__main__.OBJECTIVES", more)
    values = settings(tmp_path / "run", objective__weight=2.0)
    path = str(write_toml(tmp_path / "run.toml", values))
    assert main(["all-masked", "--config", path, "--no-progress"]) == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["loss"] == pytest.approx(2.0 * 7 * line["cross_entropy"], rel=1e-5)  # of the 7 positions behind prompts
    assert main(["write-model", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 0
    config = train.read_config(path, command="all-masked")
    assert step_flops(config, LLADA, 8) == pytest.approx(4 / 3 * step_flops(run_config("x"), LLADA, 8))
    for change, sentence in (
        ("objective.weight=3.0", "objective.weight is 3.0; it must be between 0.5 and 2"),
        ("objective.weigth=1.0", "did you mean 'objective.weight'"),
        ("data.length=13", "data.length 13 is odd"),
    ):
        assert main(["all-masked", "--config", path, change]) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["all-masked", "--settings"])
    assert "between 0.5 and 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["all-masked", "--help"])
    assert "learn from nothing but masks" in capsys.readouterr().out


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_settings_are_listed_with_what_they_are(name, capsys):
    """As a config file at its defaults, a comment above every line."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--settings"])
    text = capsys.readouterr().out
    needed = {"lora": LoraPart(rank=1)} if name == "d2f" else {}
    values = json.loads(to_json(OBJECTIVES[name].config(out="", steps=1000, **needed)))
    values["lora"]["rank"] = 0
    unset = [key for key, value in values["objective"].items() if value is None]
    values["objective"] = {key: value for key, value in values["objective"].items() if key not in unset}
    wanted = {key: value for key, value in values.items() if key not in ("out", "steps", "command")}
    assert ended.value.code == 0 and tomllib.loads(text) == wanted
    lines = text.splitlines()
    assert {f"# {key} = ..." for key in ("out", "steps", *unset)} <= {*lines}
    for above, line in itertools.pairwise(lines):
        assert line.startswith("#") or " = " not in line or above.startswith("# "), line


def test_nobody_else_knows_which_there_are():
    """Outside of its folder no module of training names an objective or its settings."""
    classes = lambda path: [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    own = {name for path in (ROOM / "objectives").glob("*.py") for name in classes(path)} - {"Objective"}
    assert {"D2F", "D2FPart", "D2FConfig", "FinalTokens"} < own
    for path in set(ROOM.rglob("*.py")) - set((ROOM / "objectives").glob("*.py")):
        found = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not found & own, path
    for name, objective in OBJECTIVES.items():
        assert objective.config.command == name
