"""Presets: their files, what changes and what does not, the command, and our scores beside the published ones."""

import dataclasses
import json
import re

import pytest

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.families import PUBLISHED
from evals import __main__ as cli
from evals import stderr
from evals.presets import check, comparison, describe_preset, find, modify, presets
from evals.presets.checks import TASKS_FOLDER, known_tasks
from evals.presets.preset import Preset, PublishedScore
from evals.presets.reading import FOLDER, read
from samplers.config.sampler_config import parse_sampler

PLAIN = ("x/y", "GSAI-ML/LLaDA-8B-Base", "gsm8k", 5, "raw")
OURS = Preset(*PLAIN, sampler="llada:gen_length=64", metrics=("acc,none",), status="A", source="a table")

# One of each file, written from the papers a second time: name -> (task, shots, form, bos, spec, published).
SPOTS = {
    "llada-base/gsm8k": ("gsm8k", 5, "raw", 0, "llada:gen_length=1024", 70.3),
    "llada-base/truthfulqa/cfg": ("truthfulqa_mc2", 0, "raw", 0, "", 46.4),
    "llada-instruct/gsm8k/block": (
        "dllm_gsm8k_oc",
        4,
        "chatN",
        0,
        "llada:gen_length=256,defer=none,block_length=8",
        78.6,
    ),
    "llada-1.5/math": ("dllm_math_oc", 0, "chat0", 0, "llada:defer=ends,gen_length=1024,block_length=128", 42.6),
    "dream-base/mbpp": ("mbpp", 3, "raw", 1, "dream:gen_length=512,temperature=0.2,top_p=0.95", 56.2),
    "dream-instruct/mmlu-pro": ("mmlu_pro", 4, "chat1", 0, "dream:temperature=0.1,top_p=0.9,gen_length=128", 43.3),
    "fast-dllm/llada-instruct/gsm8k/both": (
        "gsm8k",
        5,
        "chat1",
        0,
        "threshold:gen_length=256,block_length=32,threshold=0.9,cache=prefix",
        78.5,
    ),
    "d2f/dream-base/mbpp": (
        "mbpp",
        3,
        "raw",
        1,
        "d2f:tau_add=0.1,tau_act=0.95,threshold=0.9,block_length=48,gen_length=240",
        56.4,
    ),
    "ni/llada-instruct/mbpp/ni": (
        "mbpp",
        3,
        "raw",
        0,
        "ni:gen_length=512,block_length=32,ignore_eos=true,threshold=0.95,indicator_threshold=0.89",
        38.0,
    ),
    "eb/llada-base/gsm8k/g0.01/semi": (
        "gsm8k_cot",
        8,
        "raw",
        0,
        "eb:proxy=confidence,canvas_length=4096,gen_length=256,block_length=64,gamma=0.01",
        72.33,
    ),
    "apd/dream-instruct/gsm8k/r0.6": (
        "gsm8k",
        0,
        "chat0",
        0,
        "apd:temperature=0.04,top_p=0.95,gen_length=256,weight=0.6,window=32,lookahead=200",
        77,
    ),
    "dinfer/llada-moe/mbpp/cache": ("dllm_mbpp_sanitized_llada_moe", 0, "chat0", 0, "llada-moe-cache", 67.45),
    "aup/llada-instruct/math/d2f": (
        "minerva_math",
        4,
        "chatN",
        0,
        "d2f:gen_length=512,tau_add=0.1,tau_act=0.95,threshold=0.9,block_length=32",
        28.94,
    ),
}


@pytest.mark.parametrize("name", SPOTS)
def test_a_preset_says_what_its_paper_says(name):
    preset = find(name)
    task, shots, form, bos, sampler, value = SPOTS[name]
    assert (preset.task, preset.shots, preset.form, preset.bos) == (task, shots, form, bos)
    assert preset.published[0].value == value
    if not sampler:
        assert preset.kind == "likelihood" and preset.sampler == ""
        return
    wanted = parse_sampler(sampler)
    assert (preset.spec.name, dict(preset.spec.options)) == (wanted.name, dict(wanted.options))


def all_tasks():
    found = dict[str, frozenset[str]]()
    for preset in presets().values():
        found[preset.task] = found.get(preset.task, frozenset()) | frozenset(preset.metrics)
    return found


def test_nothing_is_wrong_with_any():
    tasks = all_tasks()
    assert [fault for preset in presets().values() for fault in check(preset, tasks)] == []
    assert all(name == preset.name and preset.status in "ABC" for name, preset in presets().items())
    assert not any(isinstance(preset.published, list) for preset in presets().values())
    assert all(len(describe_preset(preset).splitlines()) > 15 for preset in presets().values())


def test_every_task_exists_and_reports_the_metrics():
    reported, known = all_tasks(), known_tasks()
    missing = [task for task in reported if task not in known]
    assert all(task.startswith("dllm_") for task in missing)
    assert not missing or not TASKS_FOLDER.is_dir()
    assert [metric for task in reported.keys() & known.keys() for metric in reported[task] - known[task]] == []


# Files

TASKS = '[gsm8k]\nmetrics = ["exact_match,strict-match"]\n'
WHOLE = """
[defaults]
model = "GSAI-ML/LLaDA-8B-Base"
task = "gsm8k"
form = "raw"
bos = 0
shots = 5
status = "A"
source = "a table"
sampler = { name = "llada", gen_length = 64 }
published = { source = "a paper" }
[group.b]
sampler = { block_length = 32 }
warnings = ["first"]
[group."b|c/d"]
sampler = { gen_length = 128 }
warnings = ["second"]
[preset]
"a".published = [{ value = 1.0 }]
"b" = {}
"b/d" = { shots = 3 }
"""


@pytest.fixture
def written(tmp_path):
    def write(text, tasks=TASKS):
        (tmp_path / "family.toml").write_text(text)
        (tmp_path / "tasks.toml").write_text(tasks)
        return read(tmp_path)

    return write


def test_what_is_inherited(written):
    found, faults = written(WHOLE)
    assert faults == [] and list(found) == ["family/a", "family/b", "family/b/d"]
    assert [preset.sampler for preset in found.values()] == [
        "llada:gen_length=64",
        "llada:gen_length=64,block_length=32",
        "llada:gen_length=128,block_length=32",
    ]
    assert found["family/a"].published == (PublishedScore(value=1.0, source="a paper"),)
    assert found["family/b"].published == () and found["family/b"].metrics == ("exact_match,strict-match",)
    assert (found["family/b/d"].warnings, found["family/b/d"].shots) == (("first", "second"), 3)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[defaults]", "[defaults", "family.toml"),
        ("[group.b]", "[groups]\n[group.b]", "'groups'"),
        ("[group.b]", "[group.e]\nshots = 1\n[group.b]", "group 'e'"),
        ("bos = 0\n", "", "family/a: bos"),
        ('form = "raw"\n', "", "family/a: form"),
        ('form = "raw"', 'form = "chat9"', "chat9"),
        ("shots = 3", 'shots = "3"', "family/b/d: shots is '3'"),
        ("shots = 3", "shots = -1", "family/b/d: shots is -1"),
        ("shots = 3", "shot = 3", "family/b/d: shots"),
        ("shots = 3", 'form = "chat0", shots = 3', "chat0"),
        ("shots = 3", 'system = "Be brief."', "family/b/d: "),
        ("shots = 3", 'kind = "likelihood"', "family/b/d: a likelihood"),
        ("value = 1.0", "tps = 1.0", "published.value"),
        ('name = "llada", ', "", "family/a: the sampler has no name"),
        ('"llada"', '"lada"', "'lada'"),
        ("block_length = 32", "blok = 32", "'blok'"),
        ("block_length = 32", 'block_length = "x"', "block_length 'x'"),
        ('"b" = {}', '"b" = 3', "'b'"),
        ('"b" = {}', '"b" = { sampler = "llada" }', "family/b: sampler"),
        ('"b" = {}', '"b" = { warnings = "slow" }', "family/b: warnings"),
        ('"b" = {}', '"b" = { published = [3] }', "family/b: published"),
        ('"b" = {}', '"b" = {}\n"b" = {}', "family.toml"),
        ('{ name = "llada", gen_length = 64 }', '"llada"', "family/a: sampler"),
        ('task = "gsm8k"', 'task = "other"', "family/a: metrics"),
    ],
)
def test_a_fault_in_a_file_is_one_sentence(written, old, new, sentence):
    assert old in WHOLE
    _, faults = written(WHOLE.replace(old, new))
    assert any(sentence in fault for fault in faults), faults


def test_settings_that_contradict_each_other():
    with pytest.raises(DllmError, match="mc_batch 3"):
        Preset(*PLAIN, kind="likelihood", mc_batch=3)
    with pytest.raises(DllmError, match="sampler is not set"):
        Preset(*PLAIN)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": "gsm9k"}, "gsm9k"),
        ({"task": "dllm_none"}, "dllm_none.yaml"),
        ({"model": "some/model"}, "some/model"),
        ({"metrics": ("acc",)}, "'acc'"),
        ({"metrics": ()}, "metric"),
        ({"sampler": "llada"}, "gen_length"),
        ({"sampler": "llada:gen_length=64,block_length=48"}, "block_length 48"),
        ({"sampler": "llada:gen_length=64,block_length=16,steps=6"}, "steps 6"),
        ({"sampler": "threshold:threshold=-1,gen_length=64"}, "threshold is -1"),
        ({"sampler": "llada:gen_length=64,defer=eot"}, "'eot'"),
        ({"max_prompt": 4090}, "4096 positions"),
        ({"published": (PublishedScore(value=101.0, source="x"),)}, "published 101"),
        ({"published": (PublishedScore(value=1.0),)}, "no source"),
        ({"published": (PublishedScore(value=1.0, source="x", metric="f1,none"),)}, "'f1,none'"),
        (
            {"published": (PublishedScore(value=1.0, what="reproduced by dllm", source="Dream, Table 1"),)},
            "name dllm's",
        ),
        ({"published": (PublishedScore(value=1.0, source="x", nfe=0.0),)}, "nfe 0"),
        ({"published": (PublishedScore(value=1.0, source="x", tps=2.0),)}, "hardware"),
    ],
)
def test_check_finds(changes, sentence):
    assert check(OURS, {"gsm8k": {"acc,none"}}) == []
    (fault,) = check(dataclasses.replace(OURS, **changes), {"gsm8k": {"acc,none"}})
    assert fault.startswith("x/y: ") and sentence in fault


def test_what_others_measured_is_not_printed_as_the_papers():
    """A number that `dllm` measured is said to be from there, and no other number is."""
    numbers = [number for preset in presets().values() for number in preset.published]
    theirs = [number for number in numbers if "dllm" in number.what.split()]
    assert theirs
    assert all(number in theirs for number in numbers if "ZHZisZZ/dllm, examples/" in str(number))
    assert all("ZHZisZZ/dllm, examples/" in str(number) for number in theirs)
    by_user = [number for number in numbers if number.what.startswith("reproduced by ") and number not in theirs]
    assert by_user and all("#" in number.source for number in by_user)  # issues, where they told it


# Hashes and changes


def test_the_hash_is_of_what_changes_an_answer():
    same = {"name": "z", "model": "m", "metrics": ("f1,none",), "status": "C", "source": "s", "warnings": ("w",)}
    same |= {"published": (PublishedScore(value=1.0),), "limit": 3, "samples": 64, "guidance": 1.0}
    for name, value in same.items():
        assert dataclasses.replace(OURS, **{name: value}).hash == OURS.hash, name
    other = {"task": "mbpp", "shots": 4, "form": "chat1", "bos": 1, "max_prompt": 9, "until": False}
    for name, value in {**other, "sampler": "llada:gen_length=64,temperature=0.1"}.items():
        assert dataclasses.replace(OURS, **{name: value}).hash != OURS.hash, name
    chat = dataclasses.replace(OURS, form="chat1")
    assert dataclasses.replace(chat, system="Be brief.").hash != chat.hash
    orders = ("llada:gen_length=64,block_length=32", "llada:block_length=32,gen_length=64,remasking=low_confidence")
    assert len({dataclasses.replace(OURS, sampler=sampler).hash for sampler in orders}) == 1
    scored = dataclasses.replace(OURS, kind="likelihood", sampler="")
    for name, value in {"samples": 64, "mc_batch": 2, "guidance": 1.0, "estimator": "dream"}.items():
        assert dataclasses.replace(scored, **{name: value}).hash != scored.hash, name


def test_changes_are_reported():
    preset = find("fast-dllm/llada-instruct/gsm8k/both")
    assert modify(preset) == (preset, [])
    assert modify(preset, gen_length=256, shots="5", threshold=0.9) == (preset, [])
    changed, told = modify(preset, gen_length="512", cache="dual", shots=8, until=False, limit=20)
    assert set(told) == {
        "gen_length: 256 -> 512",
        "cache: prefix -> dual",
        "shots: 5 -> 8",
        "until: true -> false",
        "limit: none -> 20",
    }
    assert changed.spec.options["gen_length"] == 512 and changed.hash != preset.hash and changed.limit == 20
    assert modify(preset, steps=16)[1] == ["steps: none -> 16"]
    assert modify(preset, sampler="eb:gen_length=256")[1] == [f"sampler: {preset.sampler} -> eb:gen_length=256"]
    scored = find("llada-base/piqa")
    assert modify(scored, guidance=0.5)[1] == ["guidance: 0 -> 0.5"]


def test_what_a_preset_leaves_to_the_user_is_no_change():
    given, told = modify(find("apd/dream-instruct/gsm8k/r0.7"), verifier="runs/qwen")
    assert told == [] and given.spec.options["verifier"] == "runs/qwen"
    given, told = modify(find("ni/llada-instruct/mbpp/ni"), indicator="runs/ni", threshold=0.9)
    assert told == ["threshold: 0.95 -> 0.9"] and given.spec.options["indicator"] == "runs/ni"
    with pytest.raises(DllmError, match="verifier 'a.b'"):
        modify(find("apd/dream-instruct/gsm8k/r0.7"), verifier="a|b")


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("llada-base/gsm8k", {"gen_len": 3}, "'gen_len'"),
        ("llada-base/gsm8k", {"gen_length": "long"}, "gen_length 'long'"),
        ("llada-base/gsm8k", {"shots": "few"}, "shots 'few'"),
        ("llada-base/gsm8k", {"form": "chat"}, "form 'chat'"),
        ("llada-base/gsm8k", {"published": ()}, "'published'"),
        ("llada-base/piqa", {"gen_length": 3}, "'gen_length'"),
        ("llada-base/piqa", {"mc_batch": 7}, "mc_batch 7"),
    ],
)
def test_changes_that_make_no_sense(name, changes, sentence):
    with pytest.raises(DllmError) as error:
        modify(find(name), **changes)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_name_is_answered_by_the_nearest():
    with pytest.raises(DllmError, match="'llada-base/gms8k'.* llada-base/gsm8k"):
        find("llada-base/gms8k")
    with pytest.raises(DllmError, match="ni/llada-instruct/mbpp/full"):
        find("ni/llada-instruct/mbpp")


# Our scores beside the published ones


def results(preset, **numbers):
    return {"results": {preset.task: {"alias": preset.task, **numbers}}}


def scored(ours, error, value, changes=(), n=None, **more):
    preset = dataclasses.replace(OURS, published=(PublishedScore(value=value, source="x"),), **more)
    numbers = {"acc,none": ours, "acc_stderr,none": error}
    asked = {} if n is None else {"n-samples": {preset.task: {"original": n, "effective": n}}}
    (row,) = comparison(preset, results(preset, **numbers) | asked, changes).rows
    return row.told


def test_what_counts_as_the_same():
    # 2 x sqrt(2) x 1.1 + 1 = 4.11 points are allowed: the published score has the same error
    assert scored(0.7411, 0.011, 70.0) == "within"
    assert scored(0.7412, 0.011, 70.0) == "above by 4.1"
    assert scored(0.659, 0.011, 70.1) == "below by 4.2"
    assert scored(0.709, "N/A", 70.0) == "within" and scored(0.711, "N/A", 70.0) == "above by 1.1"
    assert scored(0.82, 0.038, 70.0, n=100) == "within"  # 3.8 and 4.6
    assert scored(0.96, 0.0, 100.0, n=164) == "within" and scored(1.0, 0.0, 97.0, n=164) == "within"
    assert scored(0.92, 0.0, 100.0, n=164) == "below by 8.0"
    assert scored(0.75, "N/A", 70.0, n=1319) == "above by 5.0" and scored(0.74, "N/A", 70.0, n=1319) == "within"
    assert scored(0.0, 0.01, 70.0, ["shots: 5 -> 3"]) == "modified"
    assert scored(0.7, 0.01, 70.0, ["limit: none -> 20"], limit=20) == "limited to 20"
    assert scored(0.7, 0.01, 70.0, ["limit: none -> 20", "shots: 5 -> 3"], limit=20) == "modified"
    assert scored(0.7, 0.01, 70.0, ["limit: 500 -> none"]) == "modified"


def test_a_group_has_the_problems_of_its_tasks():
    preset = dataclasses.replace(OURS, published=(PublishedScore(value=70.0, source="x"),))
    told = results(preset, **{"acc,none": 0.7, "acc_stderr,none": "N/A"})
    told |= {"group_subtasks": {preset.task: ["a", "b"], "b": ["c", "d"], "a": []}}
    told |= {"n-samples": {name: {"original": 9, "effective": 7} for name in "acd"}}
    (row,) = comparison(preset, told).rows
    assert row.stderr == pytest.approx(100 * stderr.of_share(0.7, 21))


def test_rows_of_a_comparison():
    preset = find("llada-base/gsm8k")
    numbers = {"exact_match,flexible-extract": 0.7, "exact_match_stderr,flexible-extract": 0.0126}
    found = comparison(preset, results(preset, **numbers))
    assert [(row.metric.split(",")[1], row.published.value, row.told) for row in found.rows] == [
        ("flexible-extract", 70.3, "within"),
        ("flexible-extract", 70.7, "within"),
        ("strict-match", 70.3, "not measured"),
        ("strict-match", 70.7, "not measured"),
    ]
    told = found.as_json()
    assert told["status"] == "A" and told["rows"][0]["ours"] == 70.0 and told["warnings"] == list(preset.warnings)
    assert json.loads(json.dumps(told))["rows"][1]["published"]["what"] == "reproduced by dllm"
    math = find("llada-base/math")  # a number of one metric is not held against the other
    rows = comparison(math, results(math, **{"exact_match,none": 0.314, "math_verify,none": 0.4})).rows
    assert [(row.metric, row.told) for row in rows] == [("exact_match,none", "within")] * 2 + [("math_verify,none", "")]
    with pytest.raises(DllmError, match="minerva_math"):
        comparison(math, results(preset))


def test_a_comparison_is_shown(capsys):
    from rich.console import Console

    preset, changes = modify(find("llada-base/gsm8k"), gen_length=64)
    numbers = {"exact_match,flexible-extract": 0.1, "exact_match_stderr,flexible-extract": 0.01}
    Console(width=160).print(comparison(preset, results(preset, **numbers), changes).table())
    shown = capsys.readouterr().out
    assert "10.0 ± 1.0" in shown and "modified: gen_length: 1024 -> 64" in shown and "status A" in shown


def test_another_model_is_told(llada_tiny):
    warnings = lambda name, model: comparison(find(name), results(find(name)), (), model).warnings
    tiny = warnings("llada-base/gsm8k", llada_tiny)[0]
    assert "are of GSAI-ML/LLaDA-8B-Base (llada, 32 layers of 4096, 126464 tokens)" in tiny and "4 layers" in tiny
    made = lambda size, name: Model(PUBLISHED[size], {}, None, name)
    right = warnings("llada-base/gsm8k", made("llada-8b-base", "LLaDA-8B-Base"))
    assert right == find("llada-base/gsm8k").warnings
    assert warnings("llada-base/gsm8k", made("llada-8b-base", "my-folder")) == right
    assert "calls itself instruct" in warnings("llada-base/gsm8k", made("llada-8b-base", "LLaDA-8B-Instruct"))[0]
    assert "and x is dream" in warnings("d2f/llada-instruct/gsm8k", made("dream-7b-base", "x"))[0]


# The command


def test_the_command_lists_and_shows(capsys):
    assert cli.main(["presets", "llada-base/math*"]) == 0
    shown = capsys.readouterr().out
    assert "llada-base/math/512" in shown and "minerva_math@4 raw" in shown and "llada-base/gsm8k" not in shown
    assert cli.main(["presets", "dream-base/humaneval"]) == 0
    shown = capsys.readouterr().out
    assert re.search("temperature +0.2\n", shown) and "worth about 8 points" in shown and "57.9 (paper)" in shown
    assert cli.main(["presets", "d2f/dream", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [preset["name"] for preset in told][0] == "d2f/dream-base/gsm8k" and told[0]["options"]["tau_act"] == 0.95
    assert cli.main(["presets", "nothing-like-that"]) == 2
    assert "no preset is called 'nothing-like-that'" in capsys.readouterr().err


def test_the_command_checks(capsys, monkeypatch):
    tasks = all_tasks()
    monkeypatch.setattr("evals.presets.checks.known_tasks", lambda: tasks)
    assert cli.main(["presets", "--check", "d2f"]) == 0
    assert "no faults" in capsys.readouterr().out
    monkeypatch.setattr(
        "evals.presets.checks.known_tasks", lambda: {k: v for k, v in tasks.items() if k != "minerva_math"}
    )
    assert cli.main(["presets", "--check", "d2f"]) == 2
    told = capsys.readouterr()
    faults = [line for line in told.out.splitlines() if "there is no task 'minerva_math'" in line]
    assert len(faults) == len([name for name in presets() if "d2f" in name and "/math" in name])
    assert f"{len(faults)} faults" in told.err


def test_presets_travel_with_the_package():
    assert {path.stem for path in FOLDER.glob("*.toml")} == {name.split("/")[0] for name in presets()} | {"tasks"}
    assert dllm_jax.__name__ and not any("torch" in preset.source for preset in presets().values())
