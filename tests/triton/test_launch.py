"""The launcher: what it specialises on, and that it launches what Triton itself would."""

import os
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from kdacore_triton.launch import Launcher, cdiv, next_power_of_2, specialise


@triton.jit
def axpy_kernel(x, y, n, a, BLOCK: tl.constexpr, HAS_Y: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = a * tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    if HAS_Y:
        r += tl.load(y + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(x + i, r, mask=i < n)


@triton.jit
def constexpr_first_kernel(BLOCK: tl.constexpr, x):
    tl.store(x + tl.arange(0, BLOCK), 0.0)


class Pair(NamedTuple):
    source: Any
    target: Any


@triton.jit
def grouped_kernel(n, arrays: Pair, scales: Pair, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    r = tl.load(arrays.source + i, mask=i < n, other=0.0) * scales.source
    if scales.target is not None:
        r *= scales.target
    tl.store(arrays.target + i, r, mask=i < n)


axpy = Launcher(axpy_kernel)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_axpy(n: int, a: float, with_y: bool, dtype: torch.dtype = torch.float32, offset: int = 0) -> None:
    x = torch.randn(n + offset, device=DEVICE).to(dtype)[offset:]
    y = torch.randn(n, device=DEVICE).to(dtype) if with_y else None
    want = a * x.float() + (y.float() if y is not None else 0)
    axpy((cdiv(n, 64), 1, 1), x, y, n, a, BLOCK=64, HAS_Y=with_y, num_warps=1)
    torch.testing.assert_close(x, want.to(dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("with_y", [True, False])
def test_launches(with_y: bool) -> None:
    for n in (1, 63, 64, 1000):
        run_axpy(n, 2.5, with_y)


def test_members_of_groups_follow_one_another() -> None:
    """A launch takes the members one after another, and the kernel gets them as its NamedTuples."""
    launcher = Launcher(grouped_kernel)
    x, y = torch.arange(16.0, device=DEVICE), torch.zeros(16, device=DEVICE)
    for second, factor in ((None, 3.0), (2.0, 6.0)):
        launcher((1, 1, 1), 16, x, y, 3.0, second, BLOCK=16, num_warps=1)
        torch.testing.assert_close(y, factor * x)
    assert launcher.grouped((16, x, y, 3.0, None)) == (16, Pair(x, y), Pair(3.0, None))
    with pytest.raises(TypeError, match="2 arguments too many"):
        launcher.grouped((16, x, y, 3.0, None, 1, 2))
    with pytest.raises(TypeError, match="Expected 2 arguments, got 1"):
        launcher.grouped((16, x, y, 3.0))


def test_specialises_on_what_triton_does() -> None:
    x = torch.zeros(64)

    def key(*args: object) -> list[object]:
        return specialise(args)[0]

    assert key(x) == key(torch.ones(3)) and key(x) == key(x[4:])
    assert key(x) != key(x[1:]), "alignment"
    assert key(x) != key(x.to(torch.bfloat16)) and key(x) != key(None)
    assert key(1) != key(2) and key(2) == key(3) and key(16) == key(32) and key(16) != key(17)
    assert key(48) != key(2**31) and key(2**31) == key(2**40) and key(-(2**31)) == key(16)
    assert key(1) != key(True) and key(1.0) == key(2.0) and key(1.0) != key(1)
    assert key(x, 1) != key(1, x)


def test_passes_addresses() -> None:
    x = torch.zeros(8)
    assert specialise((x, None, 3, 0.5))[1] == [x.data_ptr(), None, 3, 0.5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter takes parameters in any order")
def test_constexprs_come_last() -> None:
    with pytest.raises(TypeError, match="before every constexpr"):
        Launcher(constexpr_first_kernel)


def test_sizes() -> None:
    assert [cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 60, 64, 100)] == [1, 2, 4, 64, 64, 128]


@pytest.mark.gpu
def test_gpu_every_specialisation() -> None:
    for n in (1, 16, 17, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            for offset in (0, 1):
                run_axpy(n, 0.5, True, dtype, offset)
                run_axpy(n, 0.5, True, dtype, offset)  # through the cache this time


@pytest.mark.gpu
def test_gpu_prepared_on_a_side_stream_and_in_a_graph() -> None:
    x = torch.ones(1024, device="cuda")
    call = {"BLOCK": 64, "HAS_Y": False, "num_warps": 1}
    prepared = axpy.prepare((16, 1, 1), x, None, 1024, 2.0, **call)
    assert prepared is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prepared((16, 1, 1), x.data_ptr(), None, 1024, 2.0)
    stream.synchronize()
    assert bool((x == 4).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared((16, 1, 1), x, None, 1024, 2.0)
        axpy((16, 1, 1), x, None, 1024, 2.0, **call)
    assert bool((x == 4).all())
    graph.replay()
    torch.cuda.synchronize()
    assert bool((x == 16).all())


@pytest.mark.gpu
def test_gpu_profiler_hooks_still_fire() -> None:
    from triton import knobs

    names: list[str] = []

    def hook(metadata: object) -> None:
        names.append(metadata.get()["name"])  # type: ignore[attr-defined]

    run_axpy(256, 2.0, False)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run_axpy(256, 2.0, False)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["axpy_kernel"]
