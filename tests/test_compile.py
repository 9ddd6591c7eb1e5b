"""Reading compiled programs: loops, copies and what is sent; and the command's sentences."""

import jax
import numpy as np
import pytest
from conftest import one_error, refuses
from jax.sharding import AxisType, Mesh
from train_toys import LLADA

from benchmarks import compile as bench
from benchmarks import hlo, recipes
from train import read_config

PROGRAM = """HloModule jit_f, entry_computation_layout={(bf16[8,16,4]{2,1,0})->bf16[8,16,4]{2,1,0}}

%moves (p.1: bf16[8,16,4]) -> bf16[8,16,4] {
  %p.1 = bf16[8,16,4]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %copy.1 = bf16[8,16,4]{1,2,0:T(8,128)(2,1)} copy(%p.1), metadata={op_name="jit(f)/while/body/copy"}
}

%adds (p.2: bf16[8,16,4]) -> bf16[8,16,4] {
  %p.2 = bf16[8,16,4]{2,1,0} parameter(0)
  %copy.2 = bf16[8,16,4]{1,2,0} copy(%p.2)
  %early.1 = f32[8,4]{1,0} all-gather(%p.2), channel_id=9, dimensions={1}
  ROOT %add.1 = bf16[8,16,4]{1,2,0} add(%copy.2, %copy.2)
}

%layer (p.3: bf16[8,16,4]) -> bf16[8,16,4] {
  %p.3 = bf16[8,16,4]{2,1,0} parameter(0)
  ROOT %reduced = bf16[8,16,4]{2,1,0} all-reduce(%p.3), channel_id=8, to_apply=%test
}

%inner (t: (s32[], bf16[8,16,4])) -> (s32[], bf16[8,16,4]) {
  %t = (s32[]{:T(128)}, bf16[8,16,4]{2,1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[8,16,4]{2,1,0} get-tuple-element(%t), index=1
  ROOT %out = (s32[], bf16[8,16,4]{2,1,0}) tuple(%i, %x)
}

%test (t.1: (s32[], bf16[8,16,4])) -> pred[] {
  %t.1 = (s32[], bf16[8,16,4]{2,1,0}) parameter(0)
  ROOT %go = pred[] constant(false)
}

%body (s: (s32[], bf16[8,16,4])) -> (s32[], bf16[8,16,4]) {
  %s = (s32[], bf16[8,16,4]{2,1,0}) parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %y = bf16[8,16,4]{2,1,0} get-tuple-element(%s), index=1
  %moved = bf16[8,16,4]{1,2,0} fusion(%y), kind=kLoop, calls=%moves, backend_config={"estimated_cycles":"70"}
  %added = bf16[8,16,4]{1,2,0} fusion(%moved), kind=kLoop, calls=%adds, backend_config={"estimated_cycles":"30"}
  %early = (bf16[8,16,4]{1,2,0:S(1)}, bf16[8,16,4]{1,2,0}, u32[]{:S(2)}) copy-start(%added)
  %late = bf16[8,16,4]{1,2,0:S(1)} copy-done(%early)
  %sides = bf16[4,32]{1,0} concatenate(%a, %b), dimensions={1}
  %sum = f32[8,4]{1,0} all-reduce(%c), channel_id=7, to_apply=%test
  %once = bf16[8,16,4]{1,2,0} call(%late), to_apply=%layer
  %twice = bf16[8,16,4]{1,2,0} call(%once), to_apply=%layer
  %pair = (s32[], bf16[8,16,4]{2,1,0}) tuple(%j, %late)
  ROOT %loop.2 = (s32[], bf16[8,16,4]{2,1,0}) while(%pair), condition=%test, body=%inner, \
metadata={op_name="jit(f)/while/body/vmap()/scatter"}, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (x.1: bf16[8,16,4]) -> bf16[8,16,4] {
  %x.1 = bf16[8,16,4]{2,1,0} parameter(0)
  %first = (s32[], bf16[8,16,4]{2,1,0}) tuple(%zero, %x.1)
  %loop.1 = (s32[], bf16[8,16,4]{2,1,0}) while(%first), condition=%test, body=%body, \
metadata={op_name="jit(sample)/while"}
  ROOT %result = bf16[8,16,4]{2,1,0} get-tuple-element(%loop.1), index=1
}
"""


def test_loops_are_found_with_what_a_turn_costs() -> None:
    root = hlo.loops(hlo.read(PROGRAM), bench.label)
    assert [(depth, loop.name, loop.trips) for depth, loop in root.walk()] == [
        (0, "program", None),
        (1, "step", None),
        (2, "scatter", 3),
    ]
    (step,) = root.inner
    assert step.cycles == 100
    assert bench.host_reads(step) == [1, 1], "the turns of the loop within are known"
    full, window, tiles = (hlo.Loop("", (), (), trips=trips) for trips in (None, None, 3))
    assert bench.host_reads(hlo.Loop("step", (), (full, window, tiles))) == [3, 5]
    assert step.kernels == 7  # two fusions, the start of a transfer, a concatenation, three all-reduces
    assert step.collectives == {"all-reduce": (3, 8 * 4 * 4 + 2 * 8 * 16 * 4 * 2), "all-gather": (1, 8 * 4 * 4)}


LAUNCHED = """000: kCommandBuffer [source       | next=002 (1)]
    001: kCustomKernel [source       | sink        ] loop_fusion grid: [1, 1, 1]
002: kWhile         [prev=000 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] input_reduce_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=005 (1)]
        004: kWhile         [source       | sink        ]
condition:
            006: kCustomKernel [source | sink] test grid: [1, 1, 1]
    005: kCopy         [prev=004 (1) | sink        ] kCopy
"""


def test_loops_in_command_buffers_are_found() -> None:
    assert hlo.command_buffers(LAUNCHED) == (2, [False, True])
    root = hlo.loops(hlo.read(PROGRAM), bench.label)
    (step,) = root.inner
    inside = {id(loop) for loop in step.inner}
    assert bench.buffered(root, LAUNCHED) == (2, inside)
    assert bench.buffered(root, "") == (None, set())
    assert bench.host_reads(step, inside) == [1, 1] and bench.host_reads(step, {*inside, id(step)}) == [0, 0]
    asks = hlo.Loop("step", (), (hlo.Loop("full", (), ()), hlo.Loop("window", (), ())))
    assert bench.host_reads(asks, {id(asks.inner[0])}) == [2, 3]
    with refuses("launches 2 loops"):
        bench.buffered(step, LAUNCHED)


WORK = """HloModule jit_f

%hands_on (p.3: bf16[4,8]) -> bf16[8,4] {
  %p.3 = bf16[4,8]{1,0} parameter(0)
  ROOT %turned = bf16[8,4]{0,1} bitcast(%p.3)
}

%takes (p.1: bf16[64,16], p.2: bf16[8,4], p.4: bf16[4,8]) -> bf16[64,16] {
  %p.1 = bf16[64,16]{1,0} parameter(0)
  %p.2 = bf16[8,4]{1,0} parameter(1)
  %p.4 = bf16[4,8]{1,0} parameter(2)
  %same = bf16[64,16]{1,0} bitcast(%p.1)
  %inner = bf16[8,4]{0,1} fusion(%p.4), kind=kLoop, calls=%hands_on
  %part = bf16[8,16]{1,0} dynamic-slice(%same, %i, %i), dynamic_slice_sizes={8,16}
  %dot.1 = bf16[4,16]{1,0} dot(%p.2, %part), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %put = bf16[64,16]{1,0} dynamic-update-slice(%p.1, %dot.1, %i, %i)
}

ENTRY %main (x: bf16[64,16], y: bf16[8,4]) -> bf16[64,16] {
  %x = bf16[64,16]{1,0} parameter(0)
  %y = bf16[8,4]{1,0} parameter(1)
  %z = bf16[4,8]{1,0} constant(0)
  %near = bf16[8,4]{1,0:S(1)} copy(%y)
  %i = s32[] constant(0)
  %conv = f32[2,8,3]{2,1,0} convolution(%y.1, %w.1), window={size=2 stride=1 lhs_dilate=2}, dim_labels=0bf_0io->0bf
  %y.1 = f32[2,8,5]{2,1,0:S(1)} copy(%conv)
  %w.1 = f32[2,5,3]{2,1,0:S(1)} copy(%conv)
  ROOT %out = bf16[64,16]{1,0} fusion(%x, %near, %z), kind=kLoop, calls=%takes
}
"""


def test_work_is_what_a_kernel_moves_and_multiplies() -> None:
    """Slices read what they take, updates in place write what is new, and a memory on the chip is free."""
    program = hlo.read(WORK)
    copy, product, *_, out = hlo.work(program, hlo.loops(program, bench.label))
    assert copy == (8 * 4 * 2, 0)  # read, and written to the chip
    assert product == (2 * 8 * 3 * 4, 2 * (2 * 8 * 3) * 5)  # the dilated axis is one of the batch
    assert out == (8 * 16 * 2 + 4 * 8 * 2 + 4 * 16 * 2, 2 * (4 * 16) * 8)


PRODUCTS = """HloModule jit_f

ENTRY %main (x: f32[4,7,1], q: bf16[64,2,8]) -> f32[4,2,3] {
  %x = f32[4,7,1]{1,0,2} parameter(0)
  %w = f32[7,2,3]{2,1,0} copy(%x)
  %y = f32[4,2,7]{2,1,0} copy(%x)
  %v = f32[2,7,3]{2,1,0} copy(%x)
  %q = bf16[64,2,8]{2,1,0} parameter(1)
  %outer = f32[4,2,3]{2,1,0} convolution(%x, %w), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_i0o->b0f
  %both = f32[4,3,1]{2,1,0} convolution(%y, %v), window={size=2}, dim_labels=b0f_0io->bf0
  %attended = (bf16[64,2,8]{2,1,0}, f32[2,64]{1,0}) custom-call(%q, %q, %q), custom_call_target="mosaic_gpu_v2"
  %of_keys = (bf16[64,2,8]{2,1,0}, bf16[64,2,8]{2,1,0}) custom-call(%q, %q, %q, %q), custom_call_target="mosaic_gpu_v2"
  %sorted = (bf16[64,2,8]{2,1,0}) custom-call(%q, %q, %q), custom_call_target="Sort"
  ROOT %out = f32[4,2,3]{2,1,0} copy(%outer)
}
"""


def test_padding_of_a_product_in_turns_is_not_multiplied() -> None:
    program = hlo.read(PRODUCTS)
    flops = [flops for _, flops in hlo.work(program, hlo.loops(program, bench.label)) if flops]
    assert flops == [2 * (4 * 2 * 3) * 7, 2 * (4 * 3) * (2 * 7)]


TURNS = """
%two_at_once (p: (u32[], f32[8])) -> (u32[], f32[8]) {
  %p = (u32[], f32[8]{0}) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %chosen = f32[8]{0} conditional(%i, %x, %x), branch_computations={%skip, %work}
  ROOT %out = (u32[], f32[8]{0}) tuple(%next, %chosen)
}
%skip (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %zeros = f32[8]{0} copy(%a), backend_config={"estimated_cycles":"3"}
}
%work (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %long = f32[8]{0} copy(%b), backend_config={"estimated_cycles":"50"}
}
%below (q: (u32[], f32[8])) -> pred[] {
  %q = (u32[], f32[8]{0}) parameter(0)
  %j = u32[] get-tuple-element(%q), index=0
  %five = u32[] constant(5)
  ROOT %less = pred[] compare(%j, %five), direction=LT
}
ENTRY %main (s: (u32[], f32[8])) -> (u32[], f32[8]) {
  %s = (u32[], f32[8]{0}) parameter(0)
  ROOT %loop = (u32[], f32[8]{0}) while(%s), condition=%below, body=%two_at_once
}
"""


def test_turns_that_are_two_and_the_longest_branch() -> None:
    """A counter that goes up by two ends after half of the turns, and of a conditional one branch runs."""
    (loop,) = hlo.loops(hlo.read(TURNS), bench.label).inner
    assert loop.counted == 3
    assert loop.cycles == 50 and {"zeros", "long"} <= {each.name for each in loop.own}


def test_flops_of_attention_kernels() -> None:
    """Two products forward, four for keys and values, each of 64 queries, 64 keys and 2 heads of 8."""
    program = hlo.read(PRODUCTS)
    found = {name: hlo.attention_flops(program, each) for name, each in program.by_name.items()}
    product = 2 * 64 * 64 * 2 * 8
    assert {name: flops for name, flops in found.items() if flops} == {"attended": 2 * product, "of_keys": 4 * product}
    step = hlo.Loop("step", tuple(program.by_name.values()), (), counted=3)
    of_turn = lambda loop: sum(hlo.attention_flops(program, each) for each in loop.run)
    assert recipes.over_turns(hlo.Loop("program", (), (step,)), of_turn) == 3 * 6 * product


def test_copies_are_told_from_work_and_from_transfers() -> None:
    program = hlo.read(PROGRAM)
    (step,) = hlo.loops(program, bench.label).inner
    kv, weight = ("bf16", (16, 8, 4)), ("bf16", (16, 4))
    assert hlo.moved(program, step, lambda shape: hlo.is_like(shape, kv)) == (1, 8 * 16 * 4 * 2)
    assert hlo.moved(program, step, lambda shape: hlo.is_like(shape, ("f32", kv[1]))) == (0, 0)
    assert hlo.moved(program, step, lambda shape: bench.holds(shape, weight)) == (1, 4 * 32 * 2)


@pytest.fixture(autouse=True)
def names_count():
    """A kept program has the names of the code that made it, and is found again by what it computes alone."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture(scope="module")
def setting():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    config = LLADA.replace(num_heads=4, num_kv_heads=2)
    return bench.Setting(config, mesh, 2, 8, 16, 8, "float32", "threshold:cache=dual")


def test_a_generation_is_one_loop_of_full_and_window_forwards(setting) -> None:
    found = bench.describe(bench.compiled("sample", setting), setting)
    names = [(row["depth"], row["loop"]) for row in found["loops"]]
    assert names[:2] == [(0, "program"), (1, "step")]
    assert {(2, "full"), (2, "window")} <= set(names)
    forwards = [row for row in found["loops"] if row["loop"] in bench.FORWARDS]
    # one for the embedding, two for each layer
    assert [row["collectives"]["all-reduce"][0] for row in forwards] == [2 * setting.config.num_layers + 1] * 2
    assert found["argument_bytes"] > 0 and found["peak_bytes"] >= found["argument_bytes"]


@pytest.mark.parametrize("what", bench.FORWARDS)
def test_a_forward_alone_is_compiled(setting, what: str) -> None:
    (program, *_) = bench.describe(bench.compiled(what, setting), setting)["loops"]
    assert program["loop"] == "program" and program["collectives"]["all-reduce"][0] > setting.config.num_layers


@pytest.mark.parametrize("name", ["llada-sft-lora", "llada-ni"])
def test_training_is_compiled(name: str) -> None:
    """With adapters and indicators too; no loop sends the vocabulary head."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    config = LLADA.replace(num_heads=4, num_kv_heads=2, num_layers=1, vocab_size=3000)
    changes = {"data.length": 24, "data.bucket": 0, "objective.chunk": 16, "compute.dtype": "float32"}
    changes |= {"data.answer_length": 0, "optimizer.batch": 4, "optimizer.accumulate": 1}
    run = read_config(f"train/configs/8b/{name}.toml", [f"{key}={value}" for key, value in changes.items()])
    setting = bench.Setting(config, mesh, 4, 0, 24, 8, "float32", "", run)
    found = bench.describe(bench.compiled("train", setting), setting)
    assert found["head_bytes"] == config.embed_dim * 3000 * 4 // 4
    assert "vocabulary" in [row["loop"] for row in found["loops"]]
    assert not [fault for fault in bench.faults(found) if "sends" in fault]


def test_faults_are_named() -> None:
    row = {"loop": "window", "depth": 2, "kv_copies": 2, "weight_copies": 0, "dequantized": 0, "serial_writes": 4}
    head = {**row, "loop": "vocabulary", "kv_copies": 0, "serial_writes": 0}
    row["largest_sent_bytes"] = head["largest_sent_bytes"] = 2**20
    unpacked = {**head, "loop": "full", "dequantized": 3}
    rows = [row, {**row, "depth": 0, "serial_writes": 0}, head, unpacked]
    result = {"implementation": "auto", "calls": {"cudnn": 0, "tokamax": 0, "tpu": 0}, "head_bytes": 2**20}
    assert bench.faults({**result, "head_bytes": 2**20 + 1, "loops": [head]}) == []
    found = bench.faults({**result, "loops": rows})
    assert found[2:] == [
        "the body of loop 'vocabulary' sends an array as large as a device's part of the head",
        "the body of loop 'full' writes 3 quantized matrices out in full",
    ]
    assert found[:2] == [
        "the body of loop 'window' copies 2 key/value buffers",
        "the body of loop 'window' writes in 4 loops, row by row",
    ]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--target", "v9"], "'v9'"),
        (["--target", "v5e:2x2", "--mesh", "tensor"], "--mesh tensor"),
        (["--target", "v5e:2x2", "--mesh", "tensor=9"], "--mesh tensor=9"),
        (["--target", "v5e:2x2", "--batch", "0"], "--batch"),
        (["--target", "v5e:2x2", "--command-buffers"], "--command-buffers"),
        (["--target", "v5e:2x2", "--what", "train"], "--config"),
        (["--target", "v5e:2x2", "data.length=8"], "--what sample"),
        (["--target", "v5e:2x2", "--what", "train", "--config", "train/configs/maze.toml"], "model.init"),
    ],
)
def test_mistakes_get_a_sentence(arguments, name: str, capsys, monkeypatch) -> None:
    known = bench.devices_of
    monkeypatch.setattr(bench, "devices_of", lambda name: known(name) if name == "v9" else jax.devices())
    assert bench.main(arguments) == 2
    assert name in one_error(capsys)


def test_a_kernel_that_is_meant_is_in_the_program(setting) -> None:
    """And none that is not; in programs for CPU there is none."""
    found = bench.describe(bench.compiled("window", setting), setting)
    assert found["implementation"] == "auto" and found["calls"] == {"cudnn": 0, "tokamax": 0, "tpu": 0}
    about = lambda implementation, **calls: {**found, "implementation": implementation, "calls": found["calls"] | calls}
    kernels = lambda result: [fault for fault in bench.faults(result) if "kernel" in fault]
    assert len(kernels(about("tokamax"))) == 1 and not kernels(about("tokamax", tokamax=2))
    assert len(kernels(about("xla", tokamax=2))) == 1 and not kernels(about("xla", tpu=2))


def test_what_kernels_write_is_no_matrix() -> None:
    """Though rows may be as many as a matrix has."""
    write = lambda scope: hlo.Instruction("custom-call", (("bf16", (8, 8)),), (), scope, 0, None, "")
    loop = hlo.Loop("step", [write("jit(f)/experts/pallas_call"), write("jit(f)/dot_general")], [])
    assert hlo.made(loop, lambda shape: shape[1] == (8, 8)) == 1
