"""The benchmark of other implementations: its protocol and its mistakes, with workers that pretend."""

import json
import sys

import pytest
from conftest import one_error, refuses

from benchmarks import peer_worker, peers
from dllm_jax.checkpoints import checkpoint

WORKER = peers.Worker
PRETEND = """
import json, sys
name, tokens, log = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
print(json.dumps({"versions": {"number": name}}), flush=True)
for number, line in enumerate(sys.stdin):
    open(log, "a").write(name + " " + json.loads(line)["cache"] + "\\n")
    scale = {"ours": 1.0, "other": 3.0}[name] * (50.0 if number in (0, 2) else 1.0)
    answer = {"tokens": tokens, "forwards": 7, "seconds": scale, "cpu_seconds": scale / 2}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def pretending(tmp_path):
    """Starts workers that pretend; they write what they are asked into a file."""
    script, log = tmp_path / "pretend.py", tmp_path / "log"
    script.write_text(PRETEND)
    made = []

    def start(name, tokens):
        made.append(WORKER(name, [sys.executable, str(script), name, json.dumps(tokens), str(log)]))
        return made[-1]

    yield start, log
    for worker in made:
        worker.close()


def test_processes_take_turns_and_rows_are_medians(pretending, capsys):
    start, log = pretending
    ours, other = start("ours", [1, 2, 3, 4]), start("other", [1, 2, 3, 5])
    assert ours.hello == {"versions": {"number": "ours"}}
    row = peers.in_turns(ours, other, "dual", repeats=3)
    assert log.read_text().split("\n")[:-1] == ["ours dual", "other dual"] * 4
    assert row["ours_first_seconds"] == 50.0 and row["ours_seconds_all"] == [1.0, 50.0, 1.0]
    assert (row["ours_seconds"], row["peer_seconds"], row["ratio"], row["cpu_ratio"]) == (1.0, 3.0, 3.0, 3.0)
    assert row["same_tokens"] == 0.75 and row["peer_forwards"] == 7
    about = {"size": "tiny", "prompt_length": 64, "gen_length": 128}
    peers.print_rows([about | row, about | row | {"same_tokens": 1.0}])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.endswith("same tokens") and first.split()[:4] == ["tiny", "64+128", "other", "dual"]
    assert first.endswith(" 3.00   3.00  75%") and second.endswith("  yes")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('print(\'{"error": "ModuleNotFoundError: No module named torch"}\')', "torch"),
        ("pass", "other"),
    ],
)
def test_errors_of_a_process_are_reported(code, name):
    with refuses(name):
        peers.Worker("other", [sys.executable, "-c", code])


def test_mistakes_are_sentences(tmp_path, capsys):
    checkout = tmp_path / "Fast-dLLM"
    (checkout / "llada").mkdir(parents=True)
    mistakes = {
        "--fast-dllm": [],
        str(checkout): ["--fast-dllm", str(checkout)],
        "nowhere": ["--bonsai", str(tmp_path / "nowhere")],
        "'8b'": ["--sizes", "8b"],
        "'dul'": ["--caches", "dul"],
        "--repeats": ["--repeats", "0"],
        "--lengths": ["--block-length", "48"],
        "4096": ["--core", "4096"],
    }
    for name, arguments in mistakes.items():
        assert peers.main(arguments) == 2
        assert name in one_error(capsys)


def test_a_peer_without_its_packages(tmp_path, capsys):
    """The process starts, and says what it misses."""
    (tmp_path / "llada").mkdir()
    (tmp_path / "llada" / "generate.py").write_text("import a_package_that_nobody_has")
    assert peers.main(["--fast-dllm", str(tmp_path), "--sizes", "tiny", "--caches", "dual"]) == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_this_library_as_a_worker(tmp_path):
    """Two tokens a step, from a checkpoint that was converted."""
    folder, hub = peers.checkpoints("tiny", tmp_path)
    config = checkpoint.load_config(folder)
    prompt = peers.make_prompt(config, 6)
    assert (hub / "config.json").is_file() and not set(prompt) & set(config.special_ids().values())
    job = {"folder": str(folder), "prompt": prompt, "steps": 4, "gen_length": 8, "block_length": 4}
    found = peer_worker.timed(peer_worker.ours(job), "none")
    assert found["forwards"] == 4 and len(found["tokens"]) == 8 and found["seconds"] > 0


def test_caches_that_a_peer_lacks_are_left_out(pretending, monkeypatch, tmp_path):
    """Every row says its size, and every process is ended."""
    start, log = pretending
    started = []

    def worker(name, command):
        started.append(start("ours" if name == "ours" else "other", [1]))
        return started[-1]

    monkeypatch.setattr(peers, "Worker", worker)
    options = peers.parser().parse_args(["--repeats", "1", "--caches", "none,dual"])
    assert options.lengths == [(64, 64), (128, 128), (256, 256)]
    rows, versions = peers.measure("tiny", (64, 32), {"bonsai": tmp_path}, options)
    assert [(row["size"], row["cache"], row["gen_length"]) for row in rows] == [("tiny", "none", 32)]
    assert set(versions) == {"ours", "bonsai"} and log.read_text().count("none") == 4
    assert all(each._process.poll() is not None for each in started)
