"""Compile kernels ahead of time, without the hardware, and report what the compiler produced.

A module of this package takes part by defining ``aot_cases(arch) -> list[AotCase]``; :func:`record` makes the cases
from a host function run on ``meta`` tensors, so what is compiled is what a call on that architecture would launch.

    python -m kdacore_triton.aot --arch sm_90            a table of registers, spills, shared memory, matrix units
    python -m kdacore_triton.aot --all --json            every shipped configuration, every architecture

Runs in a process without ``TRITON_INTERPRET``: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kdacore.errors import BackendBuildError
from kdacore_triton.hardware_limits import shared_memory
from kdacore_triton.launch import (
    FIXED_OPTIONS,
    RecordedLaunch,
    group_types,
    interpreting,
    recording,
    specialise,
)
from kdacore_triton.warp_sum_check import contracted_warp_sums

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
"""Architectures that every kernel must compile for. sm_86 has the least shared memory of NVIDIA's."""
MODEL_DIMS = ((96, 192), (256, 512))
"""K and V of models: OLMo-Hybrid, and the layers of flash-linear-attention as they are by default."""

TENSOR_COLUMNS = 512
"""Columns of tensor memory of an SM100 multiprocessor; a kernel that needs more is compiled to a trap."""
_MATRIX = {
    "sm_80": r"\bHMMA\b", "sm_86": r"\bHMMA\b", "sm_90": r"\bHGMMA\b", "sm_100": r"\bUTC[A-Z]*MMA\b",
    "gfx942": r"\bv_mfma",
}  # fmt: skip
"""The instruction of each architecture's matrix unit."""
_PRODUCT = r"\b(?:HMMA|HGMMA|UTC[A-Z]*MMA|v_mfma)"
"""Matrix instructions of any kind: small dots are a warp's work on every NVIDIA architecture."""

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class AotCase:
    """One launch to compile, and the requirements on the result."""

    name: str
    call: RecordedLaunch
    matrix_unit: bool = False
    """The kernel has dots: the architecture's matrix instruction must be there."""
    products: bool = False
    """The kernel has dots, perhaps too small for that: some matrix instruction must be there."""
    max_spills: int = 0
    """Local-memory loads and stores allowed in the machine code."""
    slow: bool = False
    """Left out of the representative subset."""


@dataclass(frozen=True)
class AotResult:
    """What the compiler produced for one case. ``spills`` counts local-memory loads and stores (LDL, STL)."""

    case: str
    arch: str
    registers: int
    spills: int
    shared: int
    """Bytes of shared memory (LDS) per program."""
    matrix: int
    """Matrix instructions in the machine code."""
    code_bytes: int
    problems: tuple[str, ...] = ()


def record(
    name: str, run: Callable[[], Any], *, matrix_unit: tuple[str, ...] = (), products: tuple[str, ...] = (),
    max_spills: int | Mapping[str, int] = 0, slow: bool = False,
) -> list[AotCase]:  # fmt: skip
    """The launches that ``run()`` makes, as cases.

    Args:
        name: what is run; the kernel's name is appended.
        run: a host function, usually on tensors of device ``meta``.
        matrix_unit: names of the kernels that must use the matrix unit.
        products: names of the kernels that must use it, or a warp's matrix instructions.
        max_spills: as in :class:`AotCase`, or by kernel: 0 for those not named.
        slow: as in :class:`AotCase`.
    """
    with recording() as calls:
        run()
    found = []
    for c in calls:
        kernel = _name(c.kernel)
        spills = max_spills if isinstance(max_spills, int) else max_spills.get(kernel, 0)
        found.append(AotCase(f"{name}:{kernel}", c, kernel in matrix_unit, kernel in products, spills, slow))
    return found


def all_cases(arch: str) -> list[AotCase]:
    """Every case of every module of this package, equal compilations once."""
    found: dict[Any, AotCase] = {}
    for module in _modules():
        for case in getattr(module, "aot_cases", lambda _: [])(arch):
            c = case.call
            key = (_name(c.kernel), str(specialise(c.args)[0]), str(c.constexprs), c.num_warps, c.num_stages)
            if key not in found or found[key].slow:
                found[key] = case
    return list(found.values())


def compile_case(case: AotCase, arch: str) -> AotResult:
    """Compile one case for one architecture and check its expectations.

    Raises:
        BackendBuildError: the compiler failed; the message carries what it said.
        TypeError: the kernel is an interpreted one (``TRITON_INTERPRET`` is set).
    """
    call = case.call
    if interpreting(call.kernel):
        raise TypeError("ahead-of-time compilation needs a process without TRITON_INTERPRET")
    source, options = _source(call)
    try:
        compiled = triton.compile(source, target=_target(arch), options=options)
    except (RuntimeError, triton.CompilationError, subprocess.CalledProcessError) as error:
        raise BackendBuildError(f"{case.name} for {arch}", str(error)) from error
    result = _read_amd(compiled) if arch.startswith("gfx") else _read_nvidia(compiled)
    code = result.pop("code")
    matrix = len(re.findall(_MATRIX[arch], code))
    problems = [
        f"lanes of a warp disagree on the sum at {where}"
        for where in dict.fromkeys(contracted_warp_sums(compiled.asm.get("ptx", "")))
    ]
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    if columns > TENSOR_COLUMNS:
        problems.append(f"{columns} columns of tensor memory, of which there are {TENSOR_COLUMNS}")
    if result["shared"] > shared_memory(arch):
        problems.append(
            f"{result['shared']} bytes of shared memory, of which there are {shared_memory(arch)}"
        )
    if result["spills"] > case.max_spills:
        problems.append(f"{result['spills']} spill instructions, at most {case.max_spills} allowed")
    if case.matrix_unit and not matrix:
        problems.append("no matrix instruction")
    if case.products and not re.search(_PRODUCT, code):
        problems.append("no matrix instruction of any kind")
    return AotResult(case.name, arch, matrix=matrix, problems=tuple(problems), **result)


def _modules() -> Iterator[Any]:
    package = importlib.import_module("kdacore_triton")
    for info in pkgutil.walk_packages(package.__path__, "kdacore_triton."):
        if info.name != __name__ and not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def _target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def _source(call: RecordedLaunch) -> tuple[ASTSource, dict[str, Any]]:
    """The call as Triton's compiler takes it, specialised as a launch would be."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    options = {**FIXED_OPTIONS, **call.constexprs, "num_warps": call.num_warps, "num_stages": call.num_stages}
    arguments, groups = iter(call.args), group_types(call.kernel)
    for i, p in enumerate(call.kernel.params):
        if p.is_constexpr:
            signature[p.name], constants[(i,)] = "constexpr", options.pop(p.name)
            continue
        group = next(groups)
        places = [(i,)] if group is None else [(i, j) for j in range(len(group._fields))]
        kinds = []
        for place in places:
            value = next(arguments)
            kind, divisible = _kind(value, p)
            kinds.append(kind)
            if kind == "constexpr":
                constants[place] = value
            elif divisible:
                attributes[place] = [["tt.divisibility", 16]]
        signature[p.name] = kinds[0] if group is None else group._make(kinds)
    return ASTSource(call.kernel, signature, constants, attributes), options


def _kind(value: Any, p: Any) -> tuple[str, bool]:
    """Triton's type of a run-time argument, and whether it is known to be divisible by 16."""
    free = p.do_not_specialize or p.do_not_specialize_on_alignment
    if value is None:
        return "constexpr", False
    if isinstance(value, bool):
        return "u1", False
    if isinstance(value, float):
        return "fp32", False
    if isinstance(value, int):
        if value == 1 and not p.do_not_specialize:
            return "constexpr", False
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0 and not free
    return "*" + _TYPES[value.dtype], value.data_ptr() % 16 == 0 and not free


def _read_nvidia(compiled: Any) -> dict[str, Any]:
    tool = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run(
            [tool, "-res-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"\bREG:(\d+)", usage)[1]),  # type: ignore[index]
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared": compiled.metadata.shared,
        "code": code,
        "code_bytes": len(compiled.asm["cubin"]),
    }


def _read_amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # type: ignore[index]

    return {
        "registers": field("vgpr_count"),
        "spills": field("vgpr_spill_count"),
        "shared": compiled.metadata.shared,
        "code": text,
        "code_bytes": len(compiled.asm["hsaco"]),
    }


def main(argv: list[str] | None = None) -> int:
    """Compile and report; exit code 1 when an expectation fails."""
    parser = argparse.ArgumentParser(prog="python -m kdacore_triton.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=ARCHS, help="default: all of them")
    parser.add_argument("--all", action="store_true", help="every shipped configuration, not a subset")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args(argv)
    failed = 0
    for arch in given.arch or ARCHS:
        for case in all_cases(arch):
            if (given.all or not case.slow) and given.match in case.name:
                result = compile_case(case, arch)
                failed += bool(result.problems)
                print(json.dumps(asdict(result)) if given.json else _line(result), flush=True)
    return 1 if failed else 0


def _line(r: AotResult) -> str:
    figures = f"{r.registers:4d} regs {r.spills:3d} spills {r.shared:7d} B shared {r.matrix:4d} mma"
    return f"{r.arch:7s} {figures}  {r.case}  {'; '.join(r.problems)}"


if __name__ == "__main__":
    sys.exit(main())
