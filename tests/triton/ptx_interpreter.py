"""Runs compiled Triton kernels on the CPU, from their PTX: what rounds, and in which order sums are added up, is there.

All threads of a program execute an instruction before the next one, so barriers do nothing, and branches must be the
same for all of them. The approximate instructions are exact here, which no comparison of two kernels depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Lanes = Any
"""A register: an array of unsigned integers or booleans, one for each thread."""

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INT = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_FLOAT = {4: np.float32, 8: np.float64}
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+")
_REGISTER = re.compile(r"%\w+")
_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)")


class Instruction(NamedTuple):
    """One line of PTX."""

    name: str
    operands: tuple[str, ...]
    predicate: str
    negated: bool


class Program(NamedTuple):
    """An entry of PTX: its parameters in their order, with the places of its labels."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[tuple[str, int], ...]
    threads: int


def parse(ptx: str) -> Program:
    """The only entry of a PTX module."""
    heading, _, rest = ptx.partition(".visible .entry")[2].partition("\n{")
    body = rest.partition("\n}")[0]
    kinds = re.findall(r"\.param \.([a-z])(\d+).* (\w+_param_\d+)", heading)
    threads = int(re.search(r"\.reqntid (\d+)", heading)[1])  # type: ignore[index]
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for text in body.splitlines():
        line = text.split("//")[0].strip().rstrip(";").strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(found)
        elif line and line[0] not in ".{}":
            match = _LINE.fullmatch(line)
            assert match, line
            found.append(
                Instruction(match[3], tuple(_OPERAND.findall(match[4])), match[2] or "", match[1] == "!")
            )
    return Program(tuple(found), labels, tuple((name, int(bits) // 8) for _, bits, name in kinds), threads)


def left_to_contract(program: Program) -> list[Instruction]:
    """Sums of products that ptxas may still make one rounding of: then machine code rounds in another way than PTX."""
    products = {x.operands[0] for x in program.instructions if x.name in ("mul.f32", "mul.f32x2")}
    before = 0
    while before != len(products):
        before = len(products)
        for x in program.instructions:
            if x.name[:4] == "mov." and products & set(_REGISTER.findall(x.operands[1])):
                products |= set(_REGISTER.findall(x.operands[0]))
    sums = ("add.f32", "sub.f32", "add.f32x2", "sub.f32x2")
    return [x for x in program.instructions if x.name in sums and products & set(x.operands[1:])]


class Memory:
    """Arrays at the addresses that they have; everything else may not be touched."""

    def __init__(self, regions: list[tuple[int, Any]]) -> None:
        """``regions``: address and bytes (a writable array of uint8)."""
        self.regions = sorted(regions, key=lambda region: region[0])
        self.starts = np.array([start for start, _ in self.regions], np.uint64)

    def places(self, addresses: Lanes, size: int) -> list[tuple[Any, Any, Any]]:
        """``(bytes, which threads, their places)`` for accesses of ``size`` bytes."""
        which = np.searchsorted(self.starts, addresses, side="right") - 1
        found = []
        for region in np.unique(which):
            start, held = self.regions[max(region, 0)]
            threads = np.flatnonzero(which == region)
            at = addresses[threads].astype(np.int64) - start
            assert region >= 0 and (at + size <= len(held)).all(), "access outside of all arrays"
            assert not (at % size).any(), "unaligned access"
            found.append((held, threads, at))
        return found


class Block:
    """One program of a grid."""

    def __init__(
        self,
        program: Program,
        values: list[int],
        memory: Memory,
        shared: int,
        place: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        n = self.n = program.threads
        self.program, self.memory = program, memory
        self.shared = np.full((shared + 31) // 16 * 16, 0xFF, np.uint8)
        self.parameters = dict(zip([name for name, _ in program.parameters], values, strict=True))
        self.registers: dict[str, Lanes] = {
            "%tid.x": np.arange(n, dtype=np.uint32),
            **{f"%ctaid.{axis}": np.full(n, i, np.uint32) for axis, i in zip("xyz", place, strict=True)},
            **{f"%nctaid.{axis}": np.full(n, i, np.uint32) for axis, i in zip("xyz", grid, strict=True)},
        }

    def run(self) -> None:
        at, instructions = 0, self.program.instructions
        while True:
            now = instructions[at]
            at += 1
            active = None
            if now.predicate:
                active = self.registers[now.predicate] != now.negated
                if now.name.startswith("bra"):
                    assert active.all() or not active.any(), "a branch that threads take differently"
                if not active.any():
                    continue
                if active.all():
                    active = None
            if now.name.startswith("bra"):
                at = self.program.labels[now.operands[0]]
            elif now.name == "ret":
                return
            elif not now.name.startswith("bar."):
                self.execute(now, active)

    def execute(self, now: Instruction, active: Lanes | None) -> None:
        name, operands = now.name, now.operands
        kinds = name.split(".")
        if kinds[0] in ("ld", "st"):
            self.access(kinds, operands, active)
        elif kinds[0] in ("ldmatrix", "stmatrix"):
            self.matrices(kinds, operands)
        elif kinds[0] == "shfl":
            self.exchange(kinds, operands)
        elif name == "mov.pred":
            value = operands[1]
            self.put(
                operands[0],
                self.registers[value] if value[0] == "%" else np.full(self.n, value != "0"),
                active,
            )
        elif kinds[0] == "mov" and "{" in name + operands[0] + operands[1]:
            self.move_parts(operands)
        else:
            self.put(operands[0], self.compute(kinds, operands), active)

    def put(self, register: str, value: Lanes, active: Lanes | None) -> None:
        if active is not None:
            value = np.where(active, value, self.registers.get(register, np.zeros_like(value)))
        self.registers[register] = value

    def get(self, operand: str, dtype: Any) -> Lanes:
        """An operand as numbers of ``dtype``, cut off or padded with zeros where its register has another width."""
        if operand[0] == "%":
            value = self.registers[operand]
            wide = np.dtype(dtype)
            if value.dtype == bool:
                return value
            if value.dtype.itemsize != wide.itemsize:
                value = value.astype(_UINT[wide.itemsize])
            return value.view(wide)
        if operand.startswith("global_smem"):
            return np.zeros(self.n, dtype)
        unsigned = _UINT[np.dtype(dtype).itemsize]
        if operand.startswith("0f"):
            return np.full(self.n, int(operand[2:], 16), np.uint32).view(dtype)
        return np.full(self.n, int(operand, 0) % 2 ** (8 * np.dtype(dtype).itemsize), unsigned).view(dtype)

    def address(self, operand: str) -> Lanes:
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return self.get(base, np.int64 if base.startswith("%rd") else np.int32).astype(np.int64) + int(
            offset or 0
        )

    # --- memory ----------------------------------------------------------------------------------------------------

    def access(self, kinds: list[str], operands: tuple[str, ...], active: Lanes | None) -> None:
        size = int(kinds[-1][1:]) // 8
        if kinds[1] == "param":
            register, value = operands[0], self.parameters[operands[1].strip("[]")]
            kind = (
                np.uint64
                if register.startswith("%rd")
                else np.uint16
                if register.startswith("%rs")
                else np.uint32
            )
            self.registers[register] = np.full(self.n, value % 2 ** (8 * kind().itemsize), kind)
            return
        load = kinds[0] == "ld"
        place, parts = (operands[1], operands[0]) if load else operands
        at, threads = self.address(place), np.arange(self.n)
        if active is not None:
            threads = np.flatnonzero(active)
        names = parts.strip("{}").replace(",", " ").split()
        for i, name in enumerate(names):
            addresses = at[threads] + i * size
            if kinds[1] == "shared":
                places = [(self.shared, np.arange(len(threads)), addresses)]
            else:
                places = self.memory.places(addresses.astype(np.uint64), size)
            kind = _UINT[size]
            for held, which, offsets in places:
                cells = held[: len(held) // size * size].view(kind)
                if load:
                    if name not in self.registers:
                        self.registers[name] = np.zeros(self.n, _register_kind(name))
                    value = self.registers[name].copy()
                    value[threads[which]] = cells[offsets // size]
                    self.registers[name] = value
                else:
                    cells[offsets // size] = self.get(name, kind)[threads[which]]

    def matrices(self, kinds: list[str], operands: tuple[str, ...]) -> None:
        """8 x 8 matrices of 16-bit numbers: eight lanes have addresses of its rows, each lane has two of its cells."""
        load = kinds[0] == "ldmatrix"
        place, parts = (operands[1], operands[0]) if load else operands
        names = parts.strip("{}").replace(",", " ").split()
        at, lane = self.address(place), np.arange(self.n)
        first = lane // 32 * 32
        cells = self.shared.view(np.uint16)
        pair = lane[:, None] % 4 * 2 + [0, 1]
        row, column = lane[:, None] % 32 // 4, pair
        if "trans" in kinds:
            row, column = pair, row
        for i, name in enumerate(names):
            place_of = at[first[:, None] + i * 8 + row] // 2 + column
            if load:
                self.registers[name] = np.ascontiguousarray(cells[place_of]).view(np.uint32)[:, 0]
            else:
                cells[place_of] = (
                    np.ascontiguousarray(self.get(name, np.uint32)).view(np.uint16).reshape(-1, 2)
                )

    def exchange(self, kinds: list[str], operands: tuple[str, ...]) -> None:
        result, given, lane_or_mask = operands[0], operands[1], operands[2]
        if given.startswith("%p"):
            given, lane_or_mask = operands[2], operands[3]
        lane = np.arange(self.n)
        number = self.get(lane_or_mask, np.int32)
        other = lane ^ number if kinds[2] == "bfly" else lane // 32 * 32 + (number & 31)
        assert kinds[2] in ("bfly", "idx")
        self.registers[result] = self.get(given, np.uint32)[other]

    def move_parts(self, operands: tuple[str, ...]) -> None:
        whole, parts = operands
        if "{" in whole:
            names = whole.strip("{}").replace(",", " ").split()
            value = self.registers[parts]
            size = value.dtype.itemsize // len(names)
            for i, name in enumerate(names):
                self.registers[name] = np.ascontiguousarray(value.view(_UINT[size])[i :: len(names)])
        else:
            names = parts.strip("{}").replace(",", " ").split()
            kind = _register_kind(whole)
            size = kind().itemsize // len(names)
            cells = np.stack([self.get(name, _UINT[size]) for name in names], -1)
            self.registers[whole] = np.ascontiguousarray(cells).view(kind)[:, 0]

    # --- arithmetic ------------------------------------------------------------------------------------------------

    def compute(self, kinds: list[str], operands: tuple[str, ...]) -> Lanes:
        op, last = kinds[0], kinds[-1]
        given = operands[1:]
        if op == "cvt":
            return self.convert(kinds, given)
        if op == "selp":
            a, b = (self.get(x, _UINT[int(last[1:]) // 8]) for x in given[:2])
            return np.where(self.registers[given[2]], a, b)
        if last == "pred":
            a, b = (
                self.registers[x] if x[0] == "%" else np.full(self.n, x != "0")
                for x in (*given, given[0])[:2]
            )
            return {"and": a & b, "or": a | b, "xor": a ^ b, "not": ~a}[op]
        if last in ("bf16", "f16"):
            return self.mixed(kinds, given)
        if last[0] == "f":
            return self.floats(kinds, given)
        kind = (_INT if last[0] == "s" else _UINT)[int(last[1:]) // 8]
        if kinds[1] == "wide":
            twice = (_INT if last[0] == "s" else _UINT)[int(last[1:]) // 4]
            a, b = (self.get(x, kind).astype(twice) for x in given[:2])
            result = a * b
            if op == "mad":
                result = result + self.get(given[2], twice)
            return result.view(_UINT[twice().itemsize])
        if kinds[1] == "hi":
            assert op == "mul" and kind().itemsize == 4
            twice = np.int64 if last[0] == "s" else np.uint64
            a, b = (self.get(x, kind).astype(twice) for x in given)
            return (a * b >> twice(32)).astype(kind).view(np.uint32)
        if op in ("shl", "shr"):
            a, by = self.get(given[0], kind), self.get(given[1], np.uint32)
            bits = 8 * kind().itemsize
            moved = np.minimum(by, bits - 1).astype(kind)
            result = a << moved if op == "shl" else a >> moved
            full = (by >= bits) & ((op == "shl") | (last[0] != "s"))
            return np.where(full, kind(0), result).view(_UINT[kind().itemsize])
        if op == "bfe":
            a, at, length = self.get(given[0], kind), int(given[1], 0), int(given[2], 0)
            above = kind(8 * kind().itemsize - at - length)
            return ((a << above) >> kind(above + at)).view(_UINT[kind().itemsize])
        numbers = [self.get(x, kind) for x in given]
        if op == "setp":
            return _COMPARISONS[kinds[1]](*numbers)
        return _INTEGERS[op](*numbers).astype(kind).view(_UINT[kind().itemsize])

    def floats(self, kinds: list[str], given: tuple[str, ...]) -> Lanes:
        if kinds[-1] == "f32x2":
            return self.pairs(kinds, given)
        op, flush = kinds[0], "ftz" in kinds
        numbers = [self.get(x, _FLOAT[int(kinds[-1][1:]) // 8]) for x in given]
        assert kinds[-1] == "f32"
        if flush:
            numbers = [_flushed(x) for x in numbers]
        if op == "setp":
            assert kinds[1] in _COMPARISONS
            return _COMPARISONS[kinds[1]](*numbers)
        if op in ("min", "max"):
            result = _extreme(op, numbers, kinds)
        else:
            with np.errstate(all="ignore"):
                result = _FLOATS[op](*numbers)
        assert result.dtype == np.float32
        return (_flushed(result) if flush else result).view(np.uint32)

    def mixed(self, kinds: list[str], given: tuple[str, ...]) -> Lanes:
        """Arithmetic in float32 on operands of 16 bits, but for the last, which is of 32."""
        assert kinds[-2] == "f32" and kinds[0] in ("fma", "add", "sub")
        narrow = [self.convert(["cvt", "f32", kinds[-1]], (x,)).view(np.float32) for x in given[:-1]]
        with np.errstate(all="ignore"):
            return _FLOATS[kinds[0]](*narrow, self.get(given[-1], np.float32)).view(np.uint32)

    def pairs(self, kinds: list[str], given: tuple[str, ...]) -> Lanes:
        """Arithmetic of two float32 in a register of 64 bits."""
        numbers = [np.ascontiguousarray(self.get(x, np.uint64)).view(np.float32) for x in given]
        assert "ftz" not in kinds
        with np.errstate(all="ignore"):
            return _FLOATS[kinds[0]](*numbers).view(np.uint64)

    def convert(self, kinds: list[str], given: tuple[str, ...]) -> Lanes:
        to, source = kinds[-2], kinds[-1]
        if to == "f16x2":
            with np.errstate(all="ignore"):
                halves = [self.get(x, np.float32).astype(np.float16).view(np.uint16) for x in given]
            high, low = (half.astype(np.uint32) for half in halves)
            return high << np.uint32(16) | low
        if to == "bf16x2":
            high, low = (_to_bf16(self.get(x, np.float32)).astype(np.uint32) for x in given)
            return high << np.uint32(16) | low
        if to == "bf16":
            return _to_bf16(self.get(given[0], np.float32))
        if source == "bf16":
            return self.get(given[0], np.uint16).astype(np.uint32) << np.uint32(16)
        numbers = {"u": _UINT, "s": _INT, "b": _UINT, "f": {2: np.float16, **_FLOAT}}
        x = self.get(given[0], numbers[source[0]][int(source[1:]) // 8])
        with np.errstate(all="ignore"):
            result = x.astype(numbers[to[0]][int(to[1:]) // 8])
        return result.view(_UINT[result.dtype.itemsize])


def _register_kind(name: str) -> Any:
    return np.uint64 if name.startswith("%rd") else np.uint16 if name.startswith("%rs") else np.uint32


def _flushed(x: Lanes) -> Lanes:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """``a * b + c`` of float32, rounded once: a sum in float64, rounded to odd, rounds to float32 as the exact one."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    there = total - product
    lost = (product - (total - there)) + (c - there)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + towards, bits).view(np.float64).astype(np.float32)


def _extreme(op: str, numbers: list[Lanes], kinds: list[str]) -> Lanes:
    a, b = numbers
    if "abs" in kinds:
        size = _extreme(op, [np.abs(a), np.abs(b)], [k for k in kinds if k not in ("abs", "xorsign")])
        return np.where(np.signbit(a) != np.signbit(b), -size, size)
    propagating, other = (np.minimum, np.fmin) if op == "min" else (np.maximum, np.fmax)
    return propagating(a, b) if "NaN" in kinds else other(a, b)


def _to_bf16(x: Lanes) -> Lanes:
    bits = x.view(np.uint32)
    near = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), near).astype(np.uint16)


def _single(exact: Callable[[Lanes], Lanes]) -> Callable[[Lanes], Lanes]:
    return lambda x: exact(x.astype(np.float64)).astype(np.float32)


_FLOATS: dict[str, Callable[..., Lanes]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": fused,
    "div": lambda a, b: a / b, "neg": lambda a: -a, "abs": np.abs, "ex2": _single(np.exp2), "lg2": _single(np.log2),
    "rsqrt": _single(lambda x: 1.0 / np.sqrt(x)), "rcp": _single(lambda x: 1.0 / x), "sqrt": _single(np.sqrt),
}  # fmt: skip
_INTEGERS: dict[str, Callable[..., Lanes]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "mad": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a,
    "min": np.minimum, "max": np.maximum, "mov": lambda a: a, "neg": lambda a: -a, "rem": np.fmod,
    "div": lambda a, b: np.trunc(a / b),
}  # fmt: skip
_COMPARISONS: dict[str, Callable[..., Lanes]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "neu": lambda a, b: ~(a == b) , "leu": lambda a, b: ~(a > b), "ltu": lambda a, b: ~(a >= b),
    "geu": lambda a, b: ~(a < b), "gtu": lambda a, b: ~(a <= b), "equ": lambda a, b: ~((a < b) | (a > b)),
}  # fmt: skip
