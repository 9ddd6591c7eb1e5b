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
ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+(?:e\w+)?)\[([\d,]*)\]")


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
    """

    opcode: str
    shapes: tuple[Shape, ...]
    called: tuple[str, ...]
    scope: str
    cycles: int
    trips: int | None
    channel: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its computations by name, the entry's among them."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str


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
            current.append(_instruction(line.partition(" = ")[2]))
    return Program(computations, entry)


def _instruction(text: str) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    opcode = re.match(r" ?([\w\-]+)\(", text[end:])
    called = CALLED.findall(text) + [name.strip(" %") for names in BRANCHES.findall(text) for name in names.split(",")]
    scope, cycles = re.search(r'op_name="([^"]*)"', text), re.search(r'"estimated_cycles":"(\d+)"', text)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', text)
    channel = re.search(r"channel_id=(\d+)", text)
    return Instruction(
        opcode[1] if opcode else "",
        tuple((kind, tuple(int(d) for d in dims.split(",") if d)) for kind, dims in ARRAY.findall(text[:end])),
        tuple(called),
        scope[1] if scope else "",
        int(cycles[1]) if cycles else 0,
        int(trips[1]) if trips else None,
        channel[1] if channel else "",
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


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop's body, or the program outside of all loops.

    Attributes:
        name: what it does, from the scopes within: see `label`.
        own: the instructions that one turn runs, those of inner loops and of fusions aside.
        inner: the loops within.
        sent: its collectives, those within fusions among them.
        trips: turns, where they are known.
    """

    name: str
    own: Sequence[Instruction]
    inner: Sequence["Loop"]
    sent: Sequence[Instruction] = ()
    trips: int | None = None

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Loop"]]:
        """This and all loops within, each with how deep it lies."""
        yield depth, self
        for loop in self.inner:
            yield from loop.walk(depth + 1)

    @property
    def cycles(self) -> int:
        """Of one turn, inner loops aside."""
        return sum(each.cycles for each in self.own)

    @property
    def kernels(self) -> int:
        """Instructions of one turn that a device runs, inner loops aside."""
        started = [each for each in self.own if each.opcode not in FREE and not each.opcode.endswith("-done")]
        return len(started)

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Kind -> how many a turn sends, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.sent:
            kind = each.opcode.removesuffix("-start")
            count, total = found.get(kind, (0, 0))
            found[kind] = (count + 1, total + size(each.shapes[-1]))
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
        return Loop(label(own, at), own, inner, sent(own), at.trips if at else None)

    return loop(program.entry, None)


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


def is_like(shape: Shape, other: Shape) -> bool:
    """Whether one array is the other with its axes in some order."""
    axes = lambda shape: sorted(size for size in shape[1] if size > 1)
    return shape[0] == other[0] and axes(shape) == axes(other)
