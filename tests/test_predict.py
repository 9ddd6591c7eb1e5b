"""Predicted speeds: the arithmetic on programs written by hand, and the command's sentences."""

import json

import jax
import pytest
from conftest import ROOT, one_error

from benchmarks import compile as programs
from benchmarks import hlo, predict

CHIP = predict.Chip(flops=1000.0, memory=100.0, ring=10.0, clock=0.0, source="")
TPU = predict.Chip(flops=1000.0, memory=100.0, ring=10.0, clock=50.0, source="")

PROGRAM = """HloModule jit_sample

%inner (t: (s32[], f32[4,5])) -> (s32[], f32[4,5]) {
  %t = (s32[], f32[4,5]{1,0}) parameter(0)
  %x = f32[4,5]{1,0} get-tuple-element(%t), index=1
  %twice = f32[4,5]{1,0} copy(%x), backend_config={"estimated_cycles":"5"}
  ROOT %out = (s32[], f32[4,5]{1,0}) tuple(%i, %twice)
}

%limit (t.1: (s32[], f32[4,5])) -> pred[] {
  %t.1 = (s32[], f32[4,5]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

%body (s: (s32[], f32[4,5])) -> (s32[], f32[4,5]) {
  %s = (s32[], f32[4,5]{1,0}) parameter(0)
  %a = f32[4,5]{1,0} get-tuple-element(%s), index=1
  %w = f32[5,10]{1,0} constant(0)
  %dot = f32[4,10]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[4,10]{1,0} all-reduce(%dot), channel_id=1, to_apply=%limit, backend_config={"estimated_cycles":"600"}
  ROOT %loop = (s32[], f32[4,5]{1,0}) while(%s), condition=%limit, body=%inner, metadata={op_name="jit(f)/gather"}
}

ENTRY %main (p: (s32[], f32[4,5])) -> (s32[], f32[4,5]) {
  %p = (s32[], f32[4,5]{1,0}) parameter(0)
  ROOT %steps = (s32[], f32[4,5]{1,0}) while(%p), condition=%none, body=%body, metadata={op_name="jit(sample)/while"}
}

%none (t.2: (s32[], f32[4,5])) -> pred[] {
  %t.2 = (s32[], f32[4,5]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""


@pytest.fixture(scope="module")
def program():
    return hlo.read(PROGRAM)


def test_a_turn_of_a_gpu_s_loop(program) -> None:
    """The product moves 440 bytes in 4.4 s and multiplies for 0.4; three turns of the loop within move 160 each."""
    (step,) = hlo.loops(program, programs.label).inner
    assert [loop.counted for loop in step.inner] == [3] and step.counted is None
    found = predict.turn(program, step, CHIP, 1, reads=2.0)
    assert found["bytes"] == (80 + 200 + 160) + 2 * 160 + 3 * 160 and found["flops"] == 400
    assert found["busy"] == pytest.approx(4.4 + 3.2 + 3 * 1.6)
    assert found["gaps"] == pytest.approx(5 * predict.GAP) and found["reads"] == pytest.approx(2 * predict.READ)
    assert found["sent"] == pytest.approx(2 * predict.HOP / 2), "one device is its whole ring"


def test_a_turn_of_a_tpu_s_loop(program) -> None:
    """600 cycles are 12 s, longer than all its bytes; the loop within is bound by its bytes."""
    (step,) = hlo.loops(program, programs.label).inner
    found = predict.turn(program, step, TPU, 4)
    assert found["busy"] == pytest.approx(12 + 3 * 1.6) and found["gaps"] == 0
    assert found["sent"] == pytest.approx(2 * (2 * predict.HOP + 160 / 10 * 3 / 4))


def test_a_collective_goes_round_its_own_devices() -> None:
    """Of eight devices in groups, as XLA writes them; two have one link between them."""
    send = lambda kind, groups: hlo.Instruction(kind, (("bf16", (4, 10)),), (), "", 0, None, "", text=groups)
    seconds = lambda each: predict.send_seconds(each, TPU, hlo.group_size(each, 8))
    everyone = send("all-gather", "replica_groups={}, dimensions={0}")
    assert seconds(everyone) == pytest.approx(4 * predict.HOP + 80 / 10 * 7 / 8)
    for groups in (
        "mesh['a'=2,'b'=4] {'b'}",
        "[2,4]<=[8]",
        "{{0,1,2,3},{4,5,6,7}}",
        "mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
    ):
        each = send("all-reduce-start", f"replica_groups={groups}, to_apply=%add")
        assert seconds(each) == pytest.approx(2 * (2 * predict.HOP + 80 / 10 * 3 / 4)), groups
    pair = send("all-gather", "replica_groups=[4,2]<=[8]")
    assert seconds(pair) == pytest.approx(predict.HOP + 80 / 5 / 2)
    assert seconds(send("collective-permute", "source_target_pairs={{0,1},{1,0}}")) == pytest.approx(predict.HOP + 8)


def test_layers_lie_on_a_line() -> None:
    assert predict.extrapolate({"busy": 3.0}, {"busy": 5.0}, 32) == {"busy": 33.0}


def test_a_generation_is_the_sum_of_its_turns() -> None:
    one = lambda seconds: {"bytes": 0.0, "flops": 0.0, "busy": seconds, "sent": 0.0, "gaps": 0.0, "reads": 0.0}
    loops = {"step": one(1.0), "full": one(10.0), "window": one(2.0), "window of two blocks": one(3.0)}
    dual, exact = predict.MODELS["llada-8b-instruct"], predict.MODELS["llada2.0-mini"]
    turns = predict.count_turns(dual, 4, 2.0)
    assert turns == {"step": 128, "full": 32, "window": 120}
    assert predict.generation_seconds(turns, loops) == 128 + 320 + 240
    turns = predict.count_turns(exact, 4, 2.0)
    assert turns == {"step": 128, "full": 4, "window": 120, "window of two blocks": 7}
    assert predict.generation_seconds(turns, loops) == 128 + 40 + 240 + 21


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "--target None"),
        (["--target", "v9"], "--target v9"),
        (["--target", "h100", "--batch", "8,x"], "--batch 8,x"),
        (["--target", "h100", "--batch", "0"], "--batch 0"),
        (["--target", "h100", "--xla", "xla_gpu_enable_triton_gemm"], "--xla xla_gpu_enable_triton_gemm"),
        (["--target", "v5e:2x4", "--mesh", "tensor=16"], "--mesh tensor=16"),
    ],
)
def test_mistakes_get_a_sentence(arguments, name: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(programs, "devices_of", lambda name: jax.devices())
    assert predict.main(arguments) == 2
    assert name in one_error(capsys)


ROWS = json.loads((ROOT / "benchmarks" / "results" / "predicted.json").read_text())["rows"]


def test_the_committed_predictions_are_printed(capsys) -> None:
    assert predict.main(["--show", "benchmarks/results/predicted.json"]) == 0
    told = capsys.readouterr().out
    for name in predict.MODELS:  # and a line for each target in the first table
        others = len(predict.TARGETS) + sum(row["model"] == name and bool(predict.how(row)) for row in ROWS)
        assert told.count(f"\n| {name}") == others + sum(row["model"] == name for row in ROWS)
    assert "SGLang, LLaDA2.1-mini, H20 | 128 | 3,412" in told


def test_the_page_s_tables_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    for table in (predict.summary(ROWS), predict.variants(ROWS)):
        assert table in page


def test_a_table_says_what_is_missing_or_does_not_fit() -> None:
    (row,) = (
        row
        for row in ROWS
        if row["target"] == "h100"
        and row["model"] == "llada-8b-instruct"
        and row["batch"] == 1
        and not predict.how(row)
    )
    lines = predict.summary([row, {**row, "batch": 8, "fits": False}]).splitlines()
    assert lines[2].endswith(f"| {row['tokens_per_second']:,.0f} | does not fit | - | - |") and lines[3].endswith(
        "| - | - | - | - |"
    )
    other = {**row, "mesh": "data=2", "implementation": "tokamax", "xla": {"a": "1", "b": "2"}}
    assert predict.how(other) == "--mesh data=2 --implementation tokamax --xla a=1,b=2"
    assert predict.summary([row, other]) == predict.summary([row]), "its place is in the second table"
    assert len(predict.variants([row, other]).splitlines()) == 3 and len(predict.variants([other]).splitlines()) == 2
