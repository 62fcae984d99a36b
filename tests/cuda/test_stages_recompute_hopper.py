"""``kda_recompute_w_u`` on Hopper, emulated on the CPU, against the kernel for every architecture."""

from __future__ import annotations

from typing import Any

import emulator
import pytest
import torch
from cuda_calls import O_BOUND, error
from stages_calls import Drawn, recompute, stage_request

from kdacore.oracle import stages as exact
from kdacore.types import RecomputeInputs, RecomputeOutputs
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.choice import has_hopper_recompute
from kdacore_cuda.forms.stages import kernels
from kdacore_cuda.forms.stages.kernels import (
    RecomputeGrid,
    hopper_recompute_kernel,
    recompute_grid,
)
from kdacore_cuda.kernel_parameters import RECOMPUTE
from kdacore_cuda.runtime import device_figures, torch_launch

MULTIPROCESSORS = 3
PACK = [0, 1, 17, 64, 15, 0, 70, 200]
SHAPES = [
    pytest.param({"T": 230, "HV": 4, "H": 2, "B": 2}, id="grouped"),
    pytest.param({"T": 20}, id="one chunk"),
    pytest.param({"T": 60, "B": 3, "H": 3, "HV": 3}, id="odd"),
    pytest.param({"lengths": PACK, "HV": 2, "H": 2}, id="packed"),
    pytest.param({"lengths": PACK, "dtype": torch.float16}, id="packed float16"),
    pytest.param({"lengths": [3, 0] * 70 + [130]}, id="many sequences"),
]
ways = pytest.mark.parametrize("whole_fraction", [1.0, 0.0, 0.5], ids=["whole", "halves", "mixed"])
"""Of the chunks and value heads how many a block takes whole."""
queries = pytest.mark.parametrize("with_q", [False, True], ids=["", "with q"])


@pytest.fixture(autouse=True)
def few_multiprocessors(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: MULTIPROCESSORS)
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")


def use(monkeypatch: pytest.MonkeyPatch, whole_fraction: float | None) -> None:
    def fixed(items: int, multiprocessors: int, empty: int, with_q: bool) -> RecomputeGrid:
        whole = int(items * (whole_fraction or 0.0)) // 2 * 2
        return RecomputeGrid(whole, 2 * items - whole, items // 2, items // 3)

    monkeypatch.setattr(choice, "has_hopper_recompute", lambda *call: whole_fraction is not None)
    monkeypatch.setattr(kernels, "recompute_grid", fixed)


def draw(**shape: Any) -> Drawn:
    return Drawn(K=128, V=128, **shape)


def same(a: RecomputeOutputs, b: RecomputeOutputs) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(
    monkeypatch: pytest.MonkeyPatch, inputs: RecomputeInputs, whole_fraction: float
) -> RecomputeOutputs:
    """The bits of common/recompute.cu."""
    use(monkeypatch, None)
    want = recompute(inputs)
    use(monkeypatch, whole_fraction)
    got = recompute(inputs)
    assert same(got, want)
    return got


def test_what_they_serve() -> None:
    assert has_hopper_recompute(128, 128, "sm_90a")
    for K, V, arch in ((64, 64, "sm_90a"), (128, 64, "sm_90a"), (128, 128, "sm_100f")):
        assert not has_hopper_recompute(K, V, arch)


@pytest.mark.parametrize("items", [1, 2, 5, 8 * 132, 8 * 132 + 1, 8 * 132 + 2, 100_000])
@pytest.mark.parametrize("multiprocessors", [132, 131])
@pytest.mark.parametrize("empty", [0, 7, 300, 1000])
def test_every_chunk_and_head_is_taken_once(items: int, multiprocessors: int, empty: int) -> None:
    """By blocks that come in pairs, no pair of a whole one and a half."""
    whole, grid, staggered, _ = recompute_grid(items, multiprocessors, empty, False)
    assert grid == whole + 2 * (items - whole) and grid % 2 == whole % 2 == 0
    long = items > 8 * multiprocessors
    last = multiprocessors + (empty if empty < 4 * multiprocessors else 0)
    assert items - whole == (last + (items - last) % 2 if long else items)
    assert staggered == multiprocessors * (3 if long else 4)
    assert staggered <= whole or not long, "blocks in turn are of one kind"


@pytest.mark.parametrize(("with_q", "last"), [(False, 1536), (True, 1152)])
def test_what_is_written_last_stays(with_q: bool, last: int) -> None:
    """72 MB of it: 48 KB a chunk and head, 64 with qg. In a pack the end is where it is guessed to be."""
    assert recompute_grid(8192, 132, 0, with_q).first_in_l2 == 8192 - last
    assert recompute_grid(8192, 132, 256, with_q).first_in_l2 == 8192 - 256 - last
    assert recompute_grid(1000, 132, 0, with_q).first_in_l2 == 0


@pytest.mark.first_cases(1)
@ways
@queries
def test_results_are_stored_to_stay_from_there_on(
    monkeypatch: pytest.MonkeyPatch, whole_fraction: float, with_q: bool
) -> None:
    """Of twelve chunks and heads, of 64, 6, 64 and 6 tokens with three heads each, all but the first four."""
    use(monkeypatch, whole_fraction)
    stored = emulator.build(hopper_recompute_kernel(False, with_q).source, RECOMPUTE).kept_bytes
    before = stored()
    recompute(draw(T=70, B=2, H=3, HV=3).recompute(with_q))
    rows = 2 * 6 + 3 * 64 + 3 * 6
    assert stored() - before == rows * 2 * 128 * (3 + with_q)


def test_the_length_of_a_call_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, seen = 8 * MULTIPROCESSORS, []

    def noted(items: int, multiprocessors: int, empty: int, with_q: bool) -> RecomputeGrid:
        seen.append(recompute_grid(items, multiprocessors, empty, with_q))
        return seen[-1]

    monkeypatch.setattr(kernels, "recompute_grid", noted)
    for T in (64 * chunks, 64 * chunks + 1):
        inputs = draw(T=T).recompute(False)
        got = recompute(inputs)
        want = exact.oracle_recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)
        assert all(error(x, y) < O_BOUND for x, y in zip(got[:3], want[:3], strict=True))
    assert [d.whole for d in seen] == [0, chunks - MULTIPROCESSORS + 1]


@pytest.mark.first_cases(2)
@ways
@queries
@pytest.mark.parametrize("shape", SHAPES)
def test_it_gives_the_bits_of_the_other_kernel(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    whole_fraction: float,
    with_q: bool,
) -> None:
    inputs = draw(**shape).recompute(with_q)
    got = check(monkeypatch, inputs, whole_fraction)
    assert [name.partition("-")[0] for name in emulated] == ["recompute", "recompute_hopper"]
    want = exact.oracle_recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)
    for mine, right in zip(got[: 3 + with_q], want[: 3 + with_q], strict=True):
        assert error(mine, right) < O_BOUND


@ways
def test_near_collinear_keys(monkeypatch: pytest.MonkeyPatch, whole_fraction: float) -> None:
    check(monkeypatch, draw(T=70, gate="slow", collinear=True).recompute(False), whole_fraction)


@pytest.mark.every_other
@ways
@queries
def test_same_bits_in_any_order(monkeypatch: pytest.MonkeyPatch, whole_fraction: float, with_q: bool) -> None:
    """Of threads and copies; nothing is read before it is there, or overwritten before it has been read."""
    inputs, plain, found = draw(T=200, HV=2, H=2).recompute(with_q), emulator.run, []
    use(monkeypatch, whole_fraction)
    for seed in range(4):
        monkeypatch.setattr(emulator, "run", lambda *a, seed=seed, **k: plain(*a, **{**k, "seed": seed}))
        found.append(recompute(inputs))
    assert all(same(x, found[0]) for x in found)


@ways
def test_views_amid_poison(monkeypatch: pytest.MonkeyPatch, whole_fraction: float) -> None:
    """Read where they lie; nothing outside them is, and no row past the end."""
    x = draw(T=100, B=2, HV=2).recompute()

    def amid(a: torch.Tensor) -> torch.Tensor:
        B, T, heads, width = a.shape
        wide = torch.full((B, T + 2, heads + 1, 2 * width), float("nan"), dtype=a.dtype)
        wide[:, 1:-1, 1:, :width] = a
        return wide[:, 1:-1, 1:, :width]

    views = x._replace(**{n: amid(getattr(x, n)) for n in ("k", "v", "gc", "Akk", "q")})
    want = check(monkeypatch, x, whole_fraction)
    assert same(recompute(views), want)


@ways
def test_a_sequence_does_not_see_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, whole_fraction: float
) -> None:
    """Not even where they are no numbers."""
    x = draw(lengths=[50, 200, 40]).recompute()
    rows = slice(50, 250)
    use(monkeypatch, whole_fraction)
    alone = recompute(RecomputeInputs(*(a[:, rows] for a in x[:6]), None))
    for a in x[:6]:
        a[:, :50] = a[:, 250:] = float("nan")
    for mine, right in zip(recompute(x), alone, strict=True):
        assert torch.equal(mine[:, rows], right)


@ways
def test_earlier_rows_do_not_see_later_ones(monkeypatch: pytest.MonkeyPatch, whole_fraction: float) -> None:
    x, t = draw(T=130).recompute(), 101
    use(monkeypatch, whole_fraction)
    short, whole = recompute(RecomputeInputs(*(a[:, :t] for a in x[:6]), None)), recompute(x)
    for name in ("w", "u", "qg"):
        assert torch.equal(getattr(short, name), getattr(whole, name)[:, :t])


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_betas(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, whole_fraction: float) -> None:
    x = draw(T=70, HV=2).recompute(False)
    check(monkeypatch, x._replace(beta=x.beta.to(dtype)), whole_fraction)


@pytest.mark.first_cases(1)
@queries
@pytest.mark.parametrize("float16", [False, True])
def test_it_compiles_without_spills(float16: bool, with_q: bool) -> None:
    whole, half = (hopper_recompute_kernel(float16, with_q, each) for each in (True, False))
    usage = compile_kernel(whole.source, "sm_90a").usage()
    assert usage.spills == 0
    # What blocks of a multiprocessor have together, each with 1 KB of its own; four have registers.
    for kernel, blocks in ((whole, 3), (half, 4)):
        threads, shared = kernel.block("sm_90a")
        assert blocks * (shared + 1024) <= 228 * 1024
        assert blocks * threads * usage.registers <= 65536
