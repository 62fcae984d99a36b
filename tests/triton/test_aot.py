"""Every kernel compiles for every architecture with no GPU, without spills, and on its matrix unit."""

import json
import os
from typing import Any

import pytest
from compiled_process import run_python

from kdacore_triton import aot


def compiled(*arguments: str, script: str | None = None) -> tuple[int, str, str]:
    """Run the command (or a script) in a process whose kernels are compiled, not interpreted."""
    done = run_python(*(["-c", script] if script else ["-m", "kdacore_triton.aot", *arguments]))
    return done.returncode, done.stdout, done.stderr


def results(*arguments: str) -> list[dict[str, Any]]:
    code, out, err = compiled("--json", *arguments)
    found = [json.loads(line) for line in out.splitlines()]
    assert [r for r in found if r["problems"]] == []
    assert code == 0, err
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx942", marks=pytest.mark.exhaustive)])
def test_representative_cases(arch: str) -> None:
    """One architecture of each vendor; the exhaustive run has them all."""
    found = results("--arch", arch)
    assert {"recurrent_kernel"} <= {r["case"].split(":")[-1] for r in found}
    assert all(r["arch"] == arch and r["registers"] > 0 and r["code_bytes"] > 0 for r in found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", aot.ARCHS)
def test_every_shipped_configuration(arch: str) -> None:
    found = {r["case"] for r in results("--arch", arch, "--all")}
    names = {"recompute", "state", "output"}
    assert {f"{name} K128 bfloat16:{name}_kernel" for name in names} <= found
    if arch == "sm_90":
        kinds = (
            "bounded K128 bfloat16",
            "unbounded K128 bfloat16",
            "bounded K64 bfloat16",
            "bounded K256 bfloat16",
        )
        for kind in (*kinds, "bounded K128 float32"):
            backward = {name for name in found if name.startswith(f"chunk backward {kind}:")}
            assert len(backward) == 3, kind


def test_cases_have_unique_names() -> None:
    for arch in aot.ARCHS:
        names = [case.name for case in aot.all_cases(arch)]
        assert len(names) == len(set(names))
        assert any(not case.slow for case in aot.all_cases(arch))


FAULTY = """
import sys, tempfile, torch
from kdacore.errors import BackendBuildError
from kdacore_triton import aot
from kdacore_triton.launch import Launcher

source = '''
import triton, triton.language as tl
@triton.jit
def greedy(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    b = tl.trans(a)
    for _ in range(4):
        a = a * tl.sum(b) + b
        b = b + tl.trans(a)
    tl.store(y + i[:, None] * N + i[None, :], a + b)
@triton.jit
def broken(x, y, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.arange(0, 2 * N))
@triton.jit
def product(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    p = i[:, None] * N + i[None, :]
    tl.store(y + p, tl.dot(tl.load(x + p), tl.load(x + p)))
@triton.jit
def sums(x, y, N: tl.constexpr):
    i = tl.arange(0, 2 * N)
    p = i[:, None] * 2 * N + i[None, :]
    a = tl.zeros([2 * N, 2 * N], tl.float32)
    b, c, d, e = a, a, a, a
    for n in range(8):
        v = tl.load(x + p + n)
        a, b, c = tl.dot(v, v, a), tl.dot(tl.trans(v), v, b), tl.dot(v, tl.trans(v), c)
        d, e = tl.dot(tl.trans(v), tl.trans(v), d), tl.dot(v, v + v, e)
    tl.store(y + p, a * b * c * d * e)
'''
path = tempfile.mkdtemp() + "/faulty.py"
open(path, "w").write(source)
sys.path.insert(0, path.rsplit("/", 1)[0])
import faulty

def case(kernel, dtype, warps, N=64, **expect):
    x, y = torch.empty(256, 256, dtype=dtype, device="meta"), torch.empty(256, 256, device="meta")
    launcher = Launcher(kernel)
    run = lambda: launcher((1, 1, 1), x, y, N=N, num_warps=warps)
    return aot.record("faulty", run, **expect)[0]

spilled = aot.compile_case(case(faulty.greedy, torch.float32, 1), "sm_90")
assert spilled.spills > 0 and "spill" in spilled.problems[0], spilled
dots = aot.compile_case(case(faulty.product, torch.bfloat16, 4, matrix_unit=("product",)), "sm_90")
assert dots.matrix > 0 and not dots.problems, dots
none = aot.compile_case(case(faulty.greedy, torch.float32, 8, matrix_unit=("greedy",), max_spills=9999), "sm_90")
assert none.problems == ("no matrix instruction",), none
five = aot.compile_case(case(faulty.sums, torch.bfloat16, 8, max_spills=9999), "sm_100")
assert [p for p in five.problems if "640 columns of tensor memory" in p], five
some = aot.compile_case(case(faulty.product, torch.bfloat16, 1, products=("product",)), "sm_90")
assert some.matrix == 0 and not some.problems, some
none = aot.compile_case(case(faulty.greedy, torch.float32, 8, products=("greedy",), max_spills=9999), "sm_90")
assert none.problems == ("no matrix instruction of any kind",), none
allowed = aot.compile_case(case(faulty.greedy, torch.float32, 1, max_spills={"greedy": 9999}), "sm_90")
assert allowed.spills > 0 and not allowed.problems, allowed
others = aot.compile_case(case(faulty.greedy, torch.float32, 1, max_spills={"another": 9999}), "sm_90")
assert "spill" in others.problems[0], others
wide = case(faulty.product, torch.float32, 4, N=128, max_spills=9999)
assert not aot.compile_case(wide, "sm_90").problems
large = aot.compile_case(wide, "sm_86")
assert large.shared > 99 * 1024 and "shared memory" in large.problems[0], large
try:
    aot.compile_case(case(faulty.broken, torch.float32, 4), "sm_90")
except BackendBuildError as error:
    assert "broken" in str(error) and "faulty" in error.what, error
else:
    raise SystemExit("a kernel that does not compile was accepted")
"""


@pytest.mark.exhaustive
def test_the_checks_can_fail() -> None:
    code, out, err = compiled(script=FAULTY)
    assert code == 0, out + err


def test_interpreted_kernels_are_refused() -> None:
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("kernels of this process are compiled")
    with pytest.raises(TypeError, match="TRITON_INTERPRET"):
        aot.compile_case(aot.all_cases("sm_90")[0], "sm_90")
