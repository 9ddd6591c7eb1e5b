"""One way to build a sampler: every field by its name, defaults in their order, specs that read as they are written."""

import ast
import dataclasses
import graphlib
import json
import os
from pathlib import Path

import jax
import pytest
from conftest import refuses
from test_renoise import CONFIG as CANVAS

import convert
import dllm_jax
from convert import embedded
from dllm_jax import spec
from dllm_jax.checkpoints import checkpoint
from dllm_jax.cli import command
from samplers import (
    APD,
    CACHES,
    EB,
    LOOPS,
    PRESETS,
    RULES,
    BlockSampler,
    DualCache,
    LeftRight,
    PipelineSampler,
    Sampling,
    Smoothing,
    Threshold,
    Verifier,
    VicinityCache,
    generate,
    make_sampler,
    parse_sampler,
    parse_samplers,
)
from samplers.cli import sample as cli
from samplers.config.registry import fields_of, title, type_of
from samplers.config.sampler_config import defaults_of
from samplers.loops.causal_context import CausalContext

ROOT = Path(__file__).parents[1]
ROOMS = ("dllm_jax", "convert", "samplers", "train", "evals", "benchmarks")
PROMPT = "Q: Tom has 12 books.\nA: "


@pytest.fixture(scope="module")
def verifier(llada_tiny):
    config = llada_tiny.config.replace(family="qwen2", attention="causal", shift=True, qkv_bias=True)
    return dataclasses.replace(dllm_jax.random_model(config), tokenizer=llada_tiny.tokenizer)


def with_generation(model, **options):
    return dataclasses.replace(model, generation=options)


def another(kind, default):
    """A value of a field that is not its default."""
    if words := spec.choices(kind):
        return next(word for word in words if word != default)
    members = spec.members(kind)
    if bool in members:
        return not default
    return 2 if int in members else 0.25


OF_PARTS = ("rule", "base", "cache", "smoothing", "stop", "verifier", "indicator")  # which have tests of their own
PLACES = [
    *(("rule", name, field.name) for name, kind in RULES.items() for field in fields_of(kind)),
    *(("cache", name, field.name) for name, kind in CACHES.items() for field in fields_of(kind)),
    *(("loop", name, field.name) for name, kind in LOOPS.items() for field in fields_of(kind)),
    *(("sampler", "eb", field.name) for field in fields_of(BlockSampler)),
]
PLACES = [place for place in PLACES if place[2] not in OF_PARTS]


@pytest.mark.parametrize("place, name, field", PLACES)
def test_every_field_is_reached_by_its_name(llada_tiny, nemotron_tiny, verifier, ni_indicator, place, name, field):
    kind = {**RULES, **CACHES, **LOOPS}[name] if place != "sampler" else BlockSampler
    options = {"gen_length": 16}
    options |= {"indicator": str(ni_indicator)} if name == "ni" else {"verifier": verifier} if name == "apd" else {}
    options |= {field.removeprefix("most_"): 1} if field.startswith("most_") else {}
    options |= {"end_think": 35} if field == "thinking_budget" else {}
    default = next(f.default for f in fields_of(kind) if f.name == field)
    chosen = {"gen_length": 8, "block_length": 4, "canvas_length": 512 - 64, "steps": 4}
    value = chosen.get(field) or another(type_of(kind, field), default)
    options |= {field: value}
    options |= {"cache": name} if place == "cache" else {}
    model = dllm_jax.random_model(CANVAS) if name == "renoise" else llada_tiny
    model = nemotron_tiny if issubclass(kind, CausalContext) else model
    value = model.draft_adapter if field == "adapter" else value
    sampler = make_sampler(model, "eb" if place == "cache" else name, **options)
    part = getattr(sampler, place) if place in ("rule", "cache") else sampler
    assert getattr(part, field) == value


def test_a_rule_inside_the_pipeline_keeps_its_own_threshold(llada_tiny):
    made = make_sampler(llada_tiny, "d2f", rule="threshold", rule_threshold=0.3, threshold=0.7, skip_masks=True)
    assert isinstance(made, PipelineSampler) and (made.threshold, made.rule) == (0.7, Threshold(0.3, skip_masks=True))
    assert list(made.end_ids) == list(llada_tiny.config.end_ids) and made.stop is None
    text = "d2f:in_flight=1,tau_add=0.9,tau_act=0.5,rule=eb,gamma=0.2,gen_length=96"
    serial = make_sampler(llada_tiny, text)
    assert (serial.most_in_flight, serial.tau_add, serial.tau_act, serial.rule) == (1, 0.9, 0.5, EB(0.2))
    ignoring = make_sampler(llada_tiny, "d2f", ignore_eos=True, stop=[65], gen_length=16)
    assert ignoring.end_ids.size == 0 and ignoring.stop is not None and ignoring.block_length == 16


def test_how_tokens_are_drawn(llada_tiny):
    assert make_sampler(llada_tiny, temperature=0, top_p=1.0).sampling == Sampling()
    drawn = make_sampler(llada_tiny, temperature=0.5, top_p=0.9, top_k=3, suppress=[7, 5], defer=[6]).sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.5, 0.9, 3)
    assert drawn.suppress.tolist() == [5, 7] and drawn.defer.tolist() == [6]
    named = make_sampler(llada_tiny, suppress=["b", 7, "<|eot_id|>"], defer=["a"]).sampling
    assert named.suppress.tolist() == [7, 98, 131] and named.defer.tolist() == [97]
    ends = make_sampler(llada_tiny, "llada:suppress=eos,defer=ends").sampling
    assert ends.suppress.tolist() == [128] and ends.defer.tolist() == [128, 131]
    assert str(parse_sampler("llada:suppress=eos,defer=none")) == "llada:suppress=eos,defer=none"
    with refuses("'eot'"):
        parse_sampler("llada:suppress=eot")


def test_smoothing_in_all_its_forms(llada_tiny):
    made = lambda **options: make_sampler(llada_tiny, **options).smoothing
    assert made() is None and made(smoothing=False) is None and made(smoothing=True) == Smoothing()
    assert made(smoothing="weight=0.2,growth=0.1") == Smoothing(weight=0.2, growth=0.1)
    assert made(smoothing_initial=0.3) == Smoothing(initial=0.3)
    assert made(smoothing=Smoothing(weight=0.1), smoothing_initial=0.3) == Smoothing(weight=0.1, initial=0.3)
    with refuses("'much'"):
        made(smoothing="much")


def test_blocks_guidance_and_steps(llada_tiny):
    made = lambda **options: make_sampler(llada_tiny, **options)
    assert [made(gen_length=16, block_length=b).width for b in (None, 0, 8, 64)] == [16, 16, 8, 16]
    assert made(guidance=0).guidance is None and made(guidance=1.5).guidance == 1.5
    assert made(rule="llada", gen_length=48).rule.steps == 48


@pytest.mark.parametrize(
    "text", ["dynamic:threshold=none", "hierarchical:low_threshold=none", "hierarchical:threshold=none"]
)
def test_none_is_a_value_where_the_type_has_it(llada_tiny, text):
    """Where the default is a number, too; elsewhere it is refused (tests/test_bad_inputs.py)."""
    name = text.partition(":")[2].partition("=")[0]
    assert getattr(make_sampler(llada_tiny, text).rule, name) is None


def test_parts_may_be_objects(llada_tiny, verifier):
    made = make_sampler(llada_tiny, EB(0.2), cache=VicinityCache(warmup=1))
    assert made.rule == EB(0.2) and made.cache == VicinityCache(warmup=1)
    for given in (verifier, Verifier(verifier.denoiser)):
        assert isinstance(make_sampler(llada_tiny, "apd", verifier=given), APD)
    with refuses("sampler is 3"):
        make_sampler(llada_tiny, 3)


def test_names_and_specs_mean_the_same(llada_tiny):
    one = make_sampler(llada_tiny, "eb:gamma=0.2,refresh_every=3", gen_length=16)
    other = make_sampler(llada_tiny, rule="eb", gamma=0.2, refresh_every=3, gen_length=16)
    assert title(one) == title(other) == "eb gamma=0.2 × dual refresh_every=3"
    text = generate(llada_tiny, PROMPT, sampler="eb:gamma=0.2,gen_length=16", block_length=8)
    assert text == generate(llada_tiny, PROMPT, rule="eb", gamma=0.2, gen_length=16, block_length=8)
    assert make_sampler(llada_tiny, one) is one
    config = parse_sampler("eb:gamma=0.2")
    assert generate(llada_tiny, PROMPT, sampler=config, gen_length=16, block_length=8) == text
    with refuses("gamma"):
        make_sampler(llada_tiny, config, gamma=0.1)
    with refuses("gamma"):
        make_sampler(llada_tiny, "eb:gamma=0.2", gamma=0.1)
    with refuses("gen_length"):
        make_sampler(llada_tiny, one, gen_length=8)
    with refuses("eb@other"):
        make_sampler(llada_tiny, "eb@other")


# Defaults


def test_who_says_what_in_which_order(llada_tiny):
    """The user, then a preset, then the checkpoint, then the library."""
    assert defaults_of(llada_tiny).options["gen_length"] == 256
    model = with_generation(llada_tiny, sampler="topk", k=3, gen_length=24, cache="vicinity", warmup=1, temperature=0.5)
    made = make_sampler(model)
    assert (made.rule.k, made.gen_length, made.block_length, made.cache) == (3, 24, 24, VicinityCache(warmup=1))
    made = make_sampler(model, "eb", gen_length=48)  # another rule: the checkpoint's k is not its
    assert (type(made.rule), made.gen_length, made.width, made.cache.warmup) == (EB, 48, 32, 1)
    assert make_sampler(model, cache="dual").cache == DualCache()
    made = make_sampler(model, "fast-dllm")
    assert (made.rule, made.cache, made.gen_length) == (Threshold(0.9), DualCache(), 256)
    assert made.sampling.temperature == 0.5 and make_sampler(model, "fast-dllm", gen_length=8).gen_length == 8
    made = make_sampler(model, "leftright")
    assert isinstance(made, LeftRight) and (made.gen_length, made.sampling.temperature) == (24, 0.5)
    pipeline = with_generation(llada_tiny, sampler="d2f", rule="eb", gamma=0.3, threshold=0.5, block_length=8)
    made = make_sampler(pipeline)
    assert (made.rule, made.threshold, made.block_length) == (EB(0.3), 0.5, 8)
    assert make_sampler(pipeline, "threshold").rule == Threshold(0.9)  # not the pipeline's threshold


def test_presets_change_with_their_rule(llada_tiny):
    made = make_sampler(llada_tiny, "llada-moe-cache", rule="eb", gen_length=64)
    assert (made.rule, made.cache, made.align_blocks) == (EB(), VicinityCache(), True)
    for name in PRESETS:
        assert make_sampler(llada_tiny, name, gen_length=64).smoothing == PRESETS[name].get("smoothing")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("'speed'", {"speed": 3}),
        ("'best'", {"sampler": "best"}),
        ("['eb']", {"sampler": ["eb"]}),
        ("'long'", {"gen_length": "long"}),
        ("[8]", {"gen_length": [8]}),
        ("gen_length is 0", {"gen_length": 0}),
        ("threshold is -1", {"threshold": -1.0}),
    ],
)
def test_bad_defaults_of_a_checkpoint_are_one_sentence(llada_tiny, name, options):
    with refuses("generation.json of llada-tiny: ", name):
        make_sampler(with_generation(llada_tiny, **options))


def test_a_user_may_repair_a_checkpoint(llada_tiny):
    assert make_sampler(with_generation(llada_tiny, gen_length=0), gen_length=8).gen_length == 8


@pytest.mark.parametrize("content", ["{", "[1]", "\udc80"])
def test_a_damaged_file_is_one_sentence(llada_tiny, tmp_path, content):
    (tmp_path / checkpoint.GENERATION_FILE).write_text(content, errors="surrogateescape")
    with refuses("generation.json"):
        checkpoint.load_generation(tmp_path)


def test_defaults_travel_with_a_checkpoint(llada_tiny, tmp_path):
    assert llada_tiny.generation == {"gen_length": 256, "block_length": 32}
    convert.export(embedded.install("maze", tmp_path / "maze"), tmp_path / "hub")
    assert json.loads((tmp_path / "hub" / "generation.json").read_text())["gen_length"] == 17
    convert.convert("llada", tmp_path / "hub", tmp_path / "again")
    assert dllm_jax.load(tmp_path / "again").generation["gen_length"] == 17
    assert convert.verify(tmp_path / "hub", tmp_path / "again") > 0


def test_an_embedded_model_answers_without_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    embedded.install("word-problems")
    assert cli.main(["Q: Eve has 12 pears. Eve finds 9. Eve loses 11.\nA: ", "--model", "word-problems"]) == 0
    assert capsys.readouterr().out == "12+9=21. 21-11=10. #### 10\n"


# Specs


@pytest.mark.parametrize(
    "text",
    [
        "topk",
        "eb:gamma=0.1,proxy=margin,cache=vicinity,warmup=2,block_length=8",
        "eb:gamma=inf,block_length=none,smoothing=true",
        "threshold:skip_masks=true,smoothing_weight=0.2,temperature=0.5@there",
        "d2f:rule=threshold,rule_threshold=0.3,threshold=0.7,ignore_eos=true",
        "apd:verifier=a/b,weight=0.3,window=2@runs/x",
        "llada-moe-td:gen_length=16",
        "ni:indicator=folder,scope=rest",
    ],
)
def test_a_spec_is_read_as_it_is_written(text):
    assert str(parse_sampler(text)) == text and parse_sampler(str(parse_sampler(text))) == parse_sampler(text)


def test_numbers_make_curves_and_the_rest_makes_series():
    numbers = lambda text: parse_sampler(text).numbers
    assert numbers("eb:gamma=0.1,proxy=margin,cache=dual,refresh_every=3,temperature=0.5") == {"gamma": 0.1}
    assert numbers("d2f:block_length=8,tau_add=0.1,rule=threshold,rule_threshold=0.2,in_flight=2") == {
        "tau_add": 0.1,
        "rule_threshold": 0.2,
    }
    assert numbers("leftright:tokens_per_step=2,window=3") == {"tokens_per_step": 2}
    assert numbers("leftright:tokens_per_step=2,window=3,most_window=4") == {"tokens_per_step": 2, "window": 3}
    assert len({found.series for found in parse_samplers("eb:gamma=0.1|1,proxy=entropy|margin")}) == 2


# The house


def test_no_import_goes_in_a_circle():
    modules = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            modules[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    graph = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):  # those within functions, too
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                found |= whole or {node.module}
        graph[name] = found & modules.keys() - {name}
    graphlib.TopologicalSorter(graph).prepare()


# Compiled programs


@pytest.fixture
def unset(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_commands_keep_compiled_programs(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    command.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
    jax.config.update("jax_compilation_cache_dir", "chosen")
    command.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "chosen"


def test_commands_run_where_nothing_can_be_written(unset, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "file"))
    command.keep_programs()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "locked"))
    command.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
