"""``kda_recompute_w_u`` on Hopper, emulated on the CPU, against the kernel for every architecture."""

from __future__ import annotations

from typing import Any

import emulator
import pytest
import torch
from cuda_calls import O_BOUND, error
from stage_calls import Drawn, recompute, stage_request

from kdacore.types import RecomputeInputs, RecomputeOutputs
from kdacore_cuda import build, runtime, stages
from kdacore_cuda.arrays import Plans
from kdacore_cuda.recompute_kernels import HALVES, WHOLE, RecomputeTile, hopper_kernel, recompute_tile, serves
from kdacore_reference import oracle_stages as exact

PROCESSORS = 3
PACK = [0, 1, 17, 64, 15, 0, 70, 200]
SHAPES = [
    pytest.param({"T": 230, "HV": 4, "H": 2, "B": 2}, id="grouped"),
    pytest.param({"T": 20}, id="one chunk"),
    pytest.param({"T": 60, "B": 3, "H": 3, "HV": 3}, id="odd"),
    pytest.param({"lengths": PACK, "HV": 2, "H": 2}, id="packed"),
    pytest.param({"lengths": PACK, "dtype": torch.float16}, id="packed float16"),
    pytest.param({"lengths": [3, 0] * 40 + [130]}, id="many sequences"),
]
both = pytest.mark.parametrize("tile", [WHOLE, HALVES], ids=["whole", "halves"])
queries = pytest.mark.parametrize("with_q", [False, True], ids=["", "with q"])


@pytest.fixture(autouse=True)
def few_processors(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "processors", lambda index: PROCESSORS)
    monkeypatch.setattr(stages, "build_arch", lambda arch: "sm_90a")


def use(monkeypatch: pytest.MonkeyPatch, tile: RecomputeTile | None) -> None:
    monkeypatch.setattr(stages, "serves", lambda *call: tile is not None)
    monkeypatch.setattr(stages, "recompute_tile", lambda *call: tile)
    monkeypatch.setattr(stages, "_plan_of", Plans(stages._make_plan))


def draw(**shape: Any) -> Drawn:
    return Drawn(K=128, V=128, **shape)


def same(a: RecomputeOutputs, b: RecomputeOutputs) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(monkeypatch: pytest.MonkeyPatch, inputs: RecomputeInputs, tile: RecomputeTile) -> RecomputeOutputs:
    """The bits of common/recompute.cu."""
    use(monkeypatch, None)
    want = recompute(inputs)
    use(monkeypatch, tile)
    got = recompute(inputs)
    assert same(got, want)
    return got


def test_what_they_serve() -> None:
    assert serves(128, 128, "sm_90a")
    for K, V, arch in ((64, 64, "sm_90a"), (128, 64, "sm_90a"), (128, 128, "sm_100f")):
        assert not serves(K, V, arch)
    assert [HALVES.grid(n) for n in (1, 2)] == [2, 4] and [WHOLE.grid(n) for n in (1, 2, 3)] == [2, 2, 4]
    assert recompute_tile(32 * 132, 132) is HALVES
    assert recompute_tile(32 * 132 + 1, 132) is WHOLE


def test_the_length_of_a_call_chooses(emulated: list[str]) -> None:
    chunks = 32 * PROCESSORS
    for T in (64 * chunks, 64 * chunks + 1):
        recompute(draw(T=T).recompute(False))
    assert ["PARTS2" in emulated[0], "PARTS1" in emulated[1]] == [True] * 2


@both
@queries
@pytest.mark.parametrize("shape", SHAPES)
def test_it_gives_the_bits_of_the_other_kernel(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    tile: RecomputeTile,
    with_q: bool,
) -> None:
    inputs = draw(**shape).recompute(with_q)
    got = check(monkeypatch, inputs, tile)
    assert [name.partition("-")[0] for name in emulated] == ["recompute", "recompute_hopper"]
    want = exact.oracle_recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)
    for mine, right in zip(got[: 3 + with_q], want[: 3 + with_q], strict=True):
        assert error(mine, right) < O_BOUND


def test_half_of_the_last_pair_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come in pairs: beyond an odd number of chunks and heads nothing is written."""
    new, behind = torch.Tensor.new_empty, []

    def twice(x: torch.Tensor, shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
        wide = new(x, (2, *shape), **kind).fill_(float("nan"))
        behind.append(wide[1])
        return wide[0]

    inputs = draw(T=60, B=3, H=3, HV=3).recompute(False)
    use(monkeypatch, WHOLE)
    monkeypatch.setattr(torch.Tensor, "new_empty", twice)
    recompute(inputs)
    assert len(behind) == 2 and all(x.isnan().all() for x in behind)


@both
def test_near_collinear_keys(monkeypatch: pytest.MonkeyPatch, tile: RecomputeTile) -> None:
    check(monkeypatch, draw(T=70, gate="slow", collinear=True).recompute(False), tile)


@both
@queries
def test_same_bits_in_any_order(monkeypatch: pytest.MonkeyPatch, tile: RecomputeTile, with_q: bool) -> None:
    """Of threads and copies; nothing is read before it is there, or overwritten before it has been read."""
    inputs, plain, found = draw(T=200, HV=2, H=2).recompute(with_q), emulator.run, []
    use(monkeypatch, tile)
    for seed in range(4):
        monkeypatch.setattr(emulator, "run", lambda *a, seed=seed, **k: plain(*a, **{**k, "seed": seed}))
        found.append(recompute(inputs))
    assert all(same(x, found[0]) for x in found)


@both
def test_views_amid_poison(monkeypatch: pytest.MonkeyPatch, tile: RecomputeTile) -> None:
    """Read where they lie; nothing outside them is, and no row past the end."""
    x = draw(T=100, B=2, HV=2).recompute()

    def amid(a: torch.Tensor) -> torch.Tensor:
        B, T, heads, width = a.shape
        wide = torch.full((B, T + 2, heads + 1, 2 * width), float("nan"), dtype=a.dtype)
        wide[:, 1:-1, 1:, :width] = a
        return wide[:, 1:-1, 1:, :width]

    views = x._replace(**{n: amid(getattr(x, n)) for n in ("k", "v", "gc", "Akk", "q")})
    want = check(monkeypatch, x, tile)
    assert same(recompute(views), want)


@both
def test_a_sequence_does_not_see_its_neighbours(monkeypatch: pytest.MonkeyPatch, tile: RecomputeTile) -> None:
    """Not even where they are no numbers."""
    x = draw(lengths=[50, 200, 40]).recompute()
    rows = slice(50, 250)
    use(monkeypatch, tile)
    alone = recompute(RecomputeInputs(*(a[:, rows] for a in x[:6]), None))
    for a in x[:6]:
        a[:, :50] = a[:, 250:] = float("nan")
    for mine, right in zip(recompute(x), alone, strict=True):
        assert torch.equal(mine[:, rows], right)


@both
def test_earlier_rows_do_not_see_later_ones(monkeypatch: pytest.MonkeyPatch, tile: RecomputeTile) -> None:
    x, t = draw(T=130).recompute(), 101
    use(monkeypatch, tile)
    short, whole = recompute(RecomputeInputs(*(a[:, :t] for a in x[:6]), None)), recompute(x)
    for name in ("w", "u", "qg"):
        assert torch.equal(getattr(short, name), getattr(whole, name)[:, :t])


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_betas(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tile: RecomputeTile) -> None:
    x = draw(T=70, HV=2).recompute(False)
    check(monkeypatch, x._replace(beta=x.beta.to(dtype)), tile)


@both
@queries
@pytest.mark.parametrize("float16", [False, True])
def test_it_compiles_without_spills(tile: RecomputeTile, float16: bool, with_q: bool) -> None:
    assert build.compile_kernel(hopper_kernel(float16, with_q, tile), "sm_90a").usage().spills == 0
    # What blocks of a multiprocessor have together, each with 1 KB of its own.
    assert tile.min_blocks * (tile.shared + 1024) <= 228 * 1024
