"""`benchmarks.memory`, and that docs/memory.md and docs/choose.md say what the files of results say."""

import json
import re

import pytest
from conftest import ROOT, one_error

from benchmarks import memory
from samplers.cli import sample as cli

RESULTS = ROOT / "benchmarks" / "results"
TOLD = json.loads((RESULTS / "memory.json").read_text())["rows"]
MEMORY = (ROOT / "docs" / "memory.md").read_text()
CHOOSE = (ROOT / "docs" / "choose.md").read_text()


@pytest.mark.parametrize(
    "row", [row for row in TOLD if row["batch"] == 1], ids=lambda row: f"{row['model']}-{row['quantize']}"
)
def test_the_page_has_the_table(row):
    many = next(r for r in TOLD if r["batch"] == 16 and (r["model"], r["quantize"]) == (row["model"], row["quantize"]))
    both = lambda r: rf"{r['total'] / memory.GIB:.1f} \({r['total_float16'] / memory.GIB:.1f}\)"
    sizes = rf"{row['weights'] / memory.GIB:.2f} \| {row['buffers'] / memory.GIB:.2f} \| {both(row)}"
    assert re.search(rf"{row['quantize'] or 'bfloat16'} \| {sizes} \| [\w ]+ \| {both(many)} \|", MEMORY)


def test_a_row_made_anew_is_that_of_the_file():
    wanted = next(
        row for row in TOLD if (row["model"], row["quantize"], row["batch"]) == ("fast-dllm-v2-1.5b", "int8", 1)
    )
    assert json.loads(json.dumps(memory.row_of("fast-dllm-v2-1.5b", "int8", 1, 768, 256))) == wanted


def test_arithmetic_is_near_what_was_compiled():
    off = [row["off"] for row in json.loads((RESULTS / "memory-check.json").read_text())["rows"]]
    assert all(-0.03 < one < 0.08 for one in off)
    assert all(f"{one:+.1%}" in MEMORY for one in off)


def test_the_comparison_reads_what_compile_wrote(tmp_path, capsys):
    entry = {"what": "sample", "mesh": "tensor=1", "model": "fast-dllm-v2-1.5b", "layers": 1, "dtype": "bfloat16"}
    entry |= {"title": "one", "gen_length": 64, "block_length": 32, "sampler": "threshold", "batch": 1}
    entry |= {"target": "h100", "prompt_length": 64, "peak_bytes": memory.GIB}
    (tmp_path / "c.json").write_text(json.dumps([entry, {"what": "window"}]))
    assert memory.main(["--check", str(tmp_path / "c.json"), "--json", str(tmp_path / "out.json")]) == 0
    assert "| one | 0." in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 1


@pytest.mark.parametrize("line", [["nowhere"], ["--batch", "0"], ["--length", "256"]])
def test_mistakes_are_a_sentence(line, capsys):
    assert memory.main(line) == 2
    assert one_error(capsys)


# docs/choose.md


def test_what_it_advises_can_be_said():
    """Flags of the tables are flags of the command."""
    parser = cli.command_line()
    said = [text.split() for text in re.findall(r"`(--[a-z][^`]*)`", CHOOSE) if len(text.split()) > 1]
    assert len(said) >= 6
    for words in said:
        parser.parse_args(words)
