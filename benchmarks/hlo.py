"""Reads a compiled program's text: its loops, what they copy, and what they send. Used by `benchmarks.compile`."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

Shape = tuple[str, tuple[int, ...]]
"""dtype and dimensions."""

BITS = {"pred": 8, "bf16": 16, **{f"{kind}{bits}": bits for kind in "sufc" for bits in (2, 4, 8, 16, 32, 64)}}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "after-all", "partition-id"}
MOVES = {"copy", "transpose", "reshape", "bitcast", "concatenate", "parameter", "convert", "constant", "tuple"}
CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+(?:e\w+)?)\[([\d,]*)\](\{[^}]*\})?")
SLICES = ("dynamic-slice", "slice", "gather")  # read what they return
PALLAS = {"tokamax": "mosaic_gpu", "tpu": "tpu_custom_call"}  # what a Pallas kernel is in a program
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; the number of the operand with what is new


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        opcode: as XLA calls it.
        shapes: of the results; several where it gives a tuple.
        called: names of the computations that it runs.
        scope: the names that JAX gives to where it comes from.
        cycles: the compiler's estimate, 0 where it gives none (the TPU's gives it).
        trips: how often a loop's body runs, where that is known.
        channel: number of a collective; its pieces, if there are several, share it.
        name: unique in the program.
        operands: names of what it reads.
        text: the whole line, after its name.
        near: of each result, whether it lies in a memory on the chip, such as a TPU's VMEM.
        is_root: whether it is what its computation returns.
    """

    opcode: str
    shapes: tuple[Shape, ...]
    called: tuple[str, ...]
    scope: str
    cycles: int
    trips: int | None
    channel: str
    name: str = ""
    operands: tuple[str, ...] = ()
    text: str = ""
    near: tuple[bool, ...] = ()
    is_root: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its computations by name, the entry's among them."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Every instruction."""
        return {each.name: each for own in self.computations.values() for each in own}


def read(text: str) -> Program:
    """The program of `Compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line == "}":
            current = None
        elif current is not None and " = " in line:
            name, _, text = line.partition(" = ")
            current.append(_instruction(name, text))
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    opcode = re.match(r" ?([\w\-]+)\(", text[end:])
    called = CALLED.findall(text) + [name.strip(" %") for names in BRANCHES.findall(text) for name in names.split(",")]
    scope, cycles = re.search(r'op_name="([^"]*)"', text), re.search(r'"estimated_cycles":"(\d+)"', text)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', text)
    channel = re.search(r"channel_id=(\d+)", text)
    arrays = ARRAY.findall(text[:end])
    arguments = text[end + text[end:].find("(") :]
    return Instruction(
        opcode[1] if opcode else "",
        tuple((kind, tuple(int(d) for d in dims.split(",") if d)) for kind, dims, _ in arrays),
        tuple(called),
        scope[1] if scope else "",
        int(cycles[1]) if cycles else 0,
        int(trips[1]) if trips else None,
        channel[1] if channel else "",
        name.split()[-1].lstrip("%"),
        tuple(re.findall(r"%([\w.\-]+)", arguments[: _closing(arguments)])),
        text,
        tuple("S(" in layout for _, _, layout in arrays),
        "ROOT " in name,
    )


def _closing(text: str) -> int:
    """The index after the parenthesis that closes the text's first one."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return place + 1
    return len(text)


def elements(shape: Shape) -> int:
    """Number of entries."""
    return math.prod(shape[1])


def size(shape: Shape) -> int:
    """Bytes."""
    return elements(shape) * BITS.get(shape[0], 8) // 8


def received(each: Instruction) -> int:
    """Bytes of what a collective gives to a device; one that only starts a permutation has semaphores after it."""
    return max(map(size, each.shapes)) if each.opcode.startswith("collective-permute") else size(each.shapes[-1])


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop's body, or the program outside of all loops.

    Attributes:
        name: what it does, from the scopes within: see `label`.
        own: the instructions that one turn runs, those of inner loops and of fusions aside; of a conditional those of
            every branch.
        spared: names of those in branches that take less than another.
        inner: the loops within.
        sent: its collectives, those within fusions among them.
        trips: turns, where the compiler says them.
        counted: turns, where the condition compares a number with a constant.
    """

    name: str
    own: Sequence[Instruction]
    inner: Sequence["Loop"]
    sent: Sequence[Instruction] = ()
    trips: int | None = None
    counted: int | None = None
    spared: frozenset[str] = frozenset()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Loop"]]:
        """This and all loops within, each with how deep it lies."""
        yield depth, self
        for loop in self.inner:
            yield from loop.walk(depth + 1)

    @property
    def run(self) -> list[Instruction]:
        """The instructions that one turn runs if it takes the longest branches."""
        return [each for each in self.own if each.name not in self.spared]

    @property
    def cycles(self) -> int:
        """Of one turn, inner loops aside."""
        return sum(each.cycles for each in self.run)

    @property
    def kernels(self) -> int:
        """Instructions of one turn that a device runs, inner loops aside."""
        return sum(map(is_kernel, self.run))

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Kind -> how many a turn sends, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.sent:
            kind = each.opcode.removesuffix("-start")
            count, total = found.get(kind, (0, 0))
            found[kind] = (count + 1, total + received(each))
        return found


def loops(program: Program, label: Callable[[Sequence[Instruction], Instruction | None], str]) -> Loop:
    """The program as a tree of loops.

    Args:
        label: a body's own instructions, and the loop's (None for the program) -> its name.
    """

    def body(name: str) -> Iterator[Instruction]:
        for each in program.computations[name]:
            yield each
            if each.opcode in ("call", "conditional", "async-start"):
                for called in each.called:
                    yield from body(called)

    def spared(own: Sequence[Instruction]) -> Iterator[str]:
        for each in own:
            if each.opcode == "conditional":
                branches = [list(body(name)) for name in each.called]
                cost = lambda branch: (sum(one.cycles for one in branch), sum(map(sum, _work(program, branch))))
                longest = max(branches, key=cost)
                yield from (one.name for branch in branches if branch is not longest for one in branch)

    def within(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        for each in instructions:
            if each.opcode == "fusion":
                for called in each.called:
                    yield from program.computations[called]
                    yield from within(program.computations[called])

    def sent(own: Sequence[Instruction]) -> list[Instruction]:
        # Layers that are one computation share their channels; within fusions, several work on one transfer.
        sends = lambda each: each.opcode.removesuffix("-start") in COLLECTIVES
        return [*filter(sends, own), *{each.channel: each for each in filter(sends, within(own))}.values()]

    def loop(name: str, at: Instruction | None) -> Loop:
        own = list(body(name))
        inner = [loop(each.called[0], each) for each in own if each.opcode == "while"]
        trips = at.trips if at else None
        counted = trips or (_counted(program, at) if at else None)
        return Loop(label(own, at), own, inner, sent(own), trips, counted, frozenset(spared(own)))

    return loop(program.entry, None)


def _counted(program: Program, loop: Instruction) -> int | None:
    condition = program.computations[re.findall(r"condition=%?([\w.\-]+)", loop.text)[0]]
    if not any(each.is_root and "direction=LT" in each.text for each in condition):
        return None
    found = [limit for limit in map(_constant, condition) if limit is not None]
    places = [int(place) for each in condition for place in re.findall(r" index=(\d+)", each.text)]
    if len(found) != 1:
        return None
    return -(-found[0] // (_step(program, loop, places[0]) if len(places) == 1 else 1))


def _constant(each: Instruction | None) -> int | None:
    """The whole number that an instruction is."""
    value = each and re.search(r"[su]32\[\].* constant\((\d+)\)", each.text)
    return int(value[1]) if value else None


def _step(program: Program, loop: Instruction, place: int) -> int:
    """What a loop's turn adds to its counter, the state's entry at `place`: 2 where the compiler made two turns one."""
    (root,) = (each for each in program.computations[loop.called[0]] if each.is_root)
    new = program.by_name.get(root.operands[place]) if root.opcode == "tuple" else None
    added = [_constant(program.by_name.get(name)) for name in new.operands] if new and new.opcode == "add" else []
    return next((step for step in added if step), 1)


def moved(program: Program, loop: Loop, counts: Callable[[Shape], bool]) -> tuple[int, int]:
    """How many arrays that count a turn writes only to have them elsewhere or in another layout, and their bytes.

    A copy is an instruction, or a fusion of nothing else; transfers to a faster memory that overlap with the rest
    (`copy-start`) are none.
    """

    @functools.cache
    def only_moves(name: str) -> bool:
        opcodes = {each.opcode for each in program.computations[name]}
        return opcodes <= MOVES and not opcodes <= {"parameter", "bitcast", "tuple", "constant"}

    found = []
    for each in loop.own:
        moves = each.opcode in ("copy", "transpose", "concatenate")
        moves |= each.opcode == "fusion" and all(map(only_moves, each.called))
        found += [size(shape) for shape in each.shapes if moves and counts(shape)]
    return len(found), sum(found)


def made(loop: Loop, counts: Callable[[Shape], bool]) -> int:
    """How many arrays that count a turn writes to memory, by whatever kernel of the compiler's."""
    by_kernel = lambda each: each.scope.endswith("pallas_call")  # rows, whose number may be that of a matrix
    writes = [each for each in loop.own if each.opcode not in FREE and not by_kernel(each)]
    return sum(counts(shape) for each in writes for shape in each.shapes)


def group_size(each: Instruction, devices: int) -> int:
    """Between how many of the program's devices a collective sends."""
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", each.text):
        sizes = dict(re.findall(r"('\w+')=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'\w+'", axes[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", each.text):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", each.text)
    return len(listed[1].split(",")) if listed else devices


def is_like(shape: Shape, other: Shape) -> bool:
    """Whether one array is the other with its axes in some order."""
    axes = lambda shape: sorted(size for size in shape[1] if size > 1)
    return shape[0] == other[0] and axes(shape) == axes(other)


def work(program: Program, loop: Loop) -> list[tuple[int, int]]:
    """What each kernel of one turn does: bytes that it moves to and from the device's large memory, and FLOPs of its
    products.

    A slice, also one within a fusion, reads what it returns; an update in place writes what is new and reads nothing of
    the rest.
    """
    return _work(program, loop.run)


def _work(program: Program, instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    return [(_bytes(program, each), _flops(program, each)) for each in instructions if is_kernel(each)]


def is_kernel(each: Instruction) -> bool:
    """Whether a device runs this by itself."""
    return each.opcode not in FREE and not each.opcode.endswith("-done")


def _bytes(program: Program, each: Instruction) -> int:
    return _written(program, each) + sum(
        _read(program, each, place)
        for place, name in enumerate(each.operands)
        if (source := program.by_name.get(name)) and source.near[:1] != (True,)
    )


def _read(program: Program, each: Instruction, place: int) -> int:
    """Bytes of an operand that an instruction reads."""
    source = program.by_name.get(each.operands[place])
    whole = size(source.shapes[0]) if source and source.shapes else 0
    if each.opcode in SLICES and place == 0:
        return min(whole, size(each.shapes[0]))
    if each.opcode == "slice-start":
        return size(each.shapes[1])
    if each.opcode in UPDATES and place == 0:
        return 0
    if each.opcode != "fusion":
        return whole
    inner = program.computations[each.called[0]]
    names = {one.name for one in inner if one.opcode == "parameter" and f"parameter({place})" in one.text}
    return min(whole, _uses(program, inner, names))


def _uses(program: Program, inner: Sequence[Instruction], names: set[str]) -> int:
    """Bytes that a computation reads of a value with these names."""
    total = 0
    for one in inner:
        for place, name in enumerate(one.operands):
            if name in names:
                if one.opcode != "bitcast":
                    total += _read(program, one, place)
                else:  # what a fusion in a fusion hands on is read there
                    total += size(one.shapes[0]) if one.is_root else _uses(program, inner, {one.name})
    return total


def _written(program: Program, each: Instruction) -> int:
    if each.opcode == "slice-start":
        return 0 if each.near[1] else size(each.shapes[1])
    results = each.shapes[:1] if each.opcode.endswith("-start") or "__cublas" in each.text else each.shapes
    sizes = [0 if near else size(shape) for shape, near in zip(results, each.near, strict=False)]
    if each.opcode == "fusion":
        (root,) = (one for one in program.computations[each.called[0]] if one.is_root)
        roots = [program.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
        sizes = [min(a, _updated(program, one)) for a, one in zip(sizes, roots, strict=False)]
    elif each.opcode in UPDATES:
        sizes = [min(sizes[0], _updated(program, each))]
    return sum(sizes)


def _updated(program: Program, each: Instruction) -> int:
    """Bytes of a result that are new."""
    if each.opcode == "bitcast" and each.operands[0] in program.by_name:
        return _updated(program, program.by_name[each.operands[0]])
    if each.opcode in UPDATES:
        return size(program.by_name[each.operands[UPDATES[each.opcode]]].shapes[0])
    return sum(map(size, each.shapes))


def _flops(program: Program, each: Instruction) -> int:
    if each.opcode == "fusion":
        return sum(_flops(program, one) for name in each.called for one in program.computations[name])
    if each.opcode not in ("dot", "convolution") or each.operands[0] not in program.by_name:
        return 0
    left, right = (program.by_name[name].shapes[0][1] for name in each.operands[:2])
    if each.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.text)
        summed = math.prod(left[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
        return 2 * elements(each.shapes[0]) * summed
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.text)
    assert labels is not None
    sizes = zip(labels.groups(), (left, right, each.shapes[0][1]), strict=True)
    of_left, of_right, of_result = (dict(zip(*pair, strict=True)) for pair in sizes)
    pairs = [_pairs(each, int(axis), of_left[axis], of_result[axis]) for axis in of_right if axis.isdigit()]
    return 2 * math.prod(n for axis, n in of_result.items() if not axis.isdigit()) * of_right["i"] * math.prod(pairs)


def attention_flops(program: Program, each: Instruction) -> int:
    """FLOPs of a Pallas kernel of attention, of all pairs of its queries and keys; 0 for all else.

    Forward there are queries, keys, values and one result, whose two products take all pairs; backward one gradient by
    three products, two by four, or all three by five. A row is longer than anything else of it.
    """
    if each.opcode != "custom-call" or not any(name in each.text for name in PALLAS.values()):
        return 0
    sources = [program.by_name[name].shapes[0] for name in each.operands if name in program.by_name]
    of_heads = lambda shape: len(shape[1]) >= 3 and shape[1][-1] == sources[0][1][-1]
    read, results = (list(filter(of_heads, shapes)) for shapes in (sources, each.shapes))
    return 2 * (len(read) + len(results) - 2) * elements(read[0]) * max(read[1][1]) if len(read) >= 3 else 0


def _pairs(each: Instruction, axis: int, length: int, results: int) -> int:
    """How often a spatial axis of a convolution, as which a TPU computes products, pairs a result with an entry: its
    padding and the gaps of a dilated axis cost no product."""
    window = re.search(r"window=\{([^}]*)\}", each.text)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    number = lambda name: int(fields[name].split("x")[axis]) if name in fields else 1
    before = int(fields["pad"].split("x")[axis].split("_")[0]) if "pad" in fields else 0
    places = (
        result * number("stride") + step * number("rhs_dilate") - before
        for result in range(results)
        for step in range(number("size"))
    )
    gap = number("lhs_dilate")
    return sum(place % gap == 0 and 0 <= place // gap < length for place in places)


def command_buffers(launched: str) -> tuple[int, list[bool]]:
    """How many command buffers a GPU's host launches, and of every loop, in the program's order, whether it is in one.

    Args:
        launched: XLA's text of thunks, each indented by its depth.
    """
    buffers = 0
    loops: list[bool] = []
    around: list[int] = []  # depths of the command buffers that a line is in
    for depth, kind in re.findall(r"^( *)\d+: k(\w+)", launched, re.MULTILINE):
        around = [one for one in around if one < len(depth)]
        if kind == "While":
            loops.append(bool(around))
        if kind == "CommandBuffer":
            buffers += not around
            around.append(len(depth))
    return buffers, loops
