"""What a call writes may overlap neither itself nor what the call reads: such calls gave wrong numbers, silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore import config
from kdacore.arrays import extent_of, memory_of
from kdacore.arrays.base import Memory
from kdacore.calls.values import to_kind

B, T, H, K, V = 2, 3, 2, 16, 16
BACKENDS = [("reference", "numpy"), ("reference", "torch"), ("triton", "torch"), ("xla", "numpy")]


def _call(kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    call = {n: rng.standard_normal((B, T, H, K)) for n in ("q", "k", "v")}
    call["k"] /= np.linalg.norm(call["k"], axis=-1, keepdims=True)
    call["g"] = -rng.random((B, T, H, K))
    call["beta"] = rng.random((B, T, H))
    return {n: to_kind(x, kind, "float32") for n, x in call.items()}


def _zeros(kind: str, *shape: int) -> Any:
    return to_kind(np.zeros(shape), kind, "float32")


def _expanded(x: Any, *shape: int) -> Any:
    """Stride 0, writable."""
    if isinstance(x, torch.Tensor):
        return x.expand(*shape)
    return np.lib.stride_tricks.as_strided(x, shape, np.broadcast_to(x, shape).strides)


def _pool(kind: str, pool: Any, **more: Any) -> dict[str, Any]:
    return {"initial_state": pool, "state_indices": to_kind(np.array([2, 0]), kind, "int64"), **more}


def _inside(kind: str) -> tuple[dict[str, Any], str]:
    call = _call(kind)
    arena = _zeros(kind, B * T * H * V + 4)
    call["v"] = arena[4:].reshape(B, T, H, V)
    return {**call, "out": arena[:-4].reshape(B, T, H, V)}, "v"


WRONG: dict[str, Callable[[str], tuple[dict[str, Any], str, str]]] = {
    "out is q": lambda kind: ((c := _call(kind)) | {"out": c["q"]}, "out", "'q'"),
    "out is v": lambda kind: ((c := _call(kind)) | {"out": c["v"]}, "out", "'v'"),
    "out expanded": lambda kind: (
        _call(kind) | {"out": _expanded(_zeros(kind, 1, T, H, V), B, T, H, V)},
        "out",
        "itself",
    ),
    "out partly v": lambda kind: ((x := _inside(kind))[0], "out", f"'{x[1]}'"),
    "pool expanded": lambda kind: (
        _call(kind) | _pool(kind, _expanded(_zeros(kind, 1, H, K, V), 4, H, K, V), inplace_state=True),
        "initial_state",
        "itself",
    ),
    "out in the pool": lambda kind: (
        _call(kind)
        | _pool(kind, pool := _zeros(kind, 4, H, K, V), inplace_state=True)
        | {"out": pool.reshape(-1)[: B * T * H * V].reshape(B, T, H, V)},
        "out",
        "'initial_state'",
    ),
    "the pool to write is the pool": lambda kind: (
        _call(kind)
        | _pool(kind, pool := _zeros(kind, 4, H, K, V), inplace_state=True)
        | {"write_pool": pool},
        "write_pool",
        "'initial_state'",
    ),
    "pool to write expanded": lambda kind: (
        _call(kind)
        | _pool(kind, _zeros(kind, 4, H, K, V), inplace_state=True)
        | {"write_pool": _expanded(_zeros(kind, 1, H, K, V), 4, H, K, V)},
        "write_pool",
        "itself",
    ),
    "out in a pool that is read": lambda kind: (
        _call(kind)
        | _pool(kind, pool := _zeros(kind, 4, H, K, V))
        | {"out": pool.reshape(-1)[: B * T * H * V].reshape(B, T, H, V)},
        "out",
        "'initial_state'",
    ),
}


def _bits(call: dict[str, Any]) -> dict[str, bytes]:
    return {n: np.ascontiguousarray(x).tobytes() for n, x in call.items() if not isinstance(x, bool)}


@pytest.mark.parametrize(("backend", "kind"), BACKENDS)
@pytest.mark.parametrize("name", WRONG)
def test_overlap_is_refused(name: str, backend: str, kind: str) -> None:
    call, argument, shared = WRONG[name](kind)
    before = _bits(call)
    with pytest.raises(kdacore.ContractError, match=shared) as caught:
        kdacore.fused_recurrent_kda(**call, backend=backend)
    assert caught.value.argument == argument
    assert _bits(call) == before


@pytest.mark.parametrize(("backend", "kind"), BACKENDS)
@pytest.mark.parametrize("name", ["out expanded", "pool expanded", "pool to write expanded"])
def test_an_overlap_of_itself_is_refused_however_often_such_calls_were_made(
    name: str, backend: str, kind: str
) -> None:
    call, _, _ = WRONG[name](kind)
    sound = dict(call)
    written = next(n for n in ("out", "write_pool", "initial_state") if n in call)
    sound[written] = _zeros(kind, *call[written].shape)
    for _ in range(4):
        kdacore.fused_recurrent_kda(**sound, backend=backend)
    for _ in range(2):
        with pytest.raises(kdacore.ContractError, match="itself"):
            kdacore.fused_recurrent_kda(**call, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("argument", ["out", "initial_state"])
@pytest.mark.parametrize("seen", [False, True], ids=["", "seen before"])
def test_a_read_only_array_is_refused_before_anything_is_written(
    argument: str, backend: str, seen: bool
) -> None:
    call = _call("numpy") | _pool("numpy", _zeros("numpy", 4, H, K, V), out=_zeros("numpy", B, T, H, V))
    call["inplace_state"] = True
    for _ in range(4 * seen):
        kdacore.fused_recurrent_kda(**call, backend=backend)
    call |= {"initial_state": _zeros("numpy", 4, H, K, V), "out": _zeros("numpy", B, T, H, V)}
    call[argument].flags.writeable = False
    before = _bits(call)
    with pytest.raises(kdacore.ContractError, match="read-only") as caught:
        kdacore.fused_recurrent_kda(**call, backend=backend)
    assert caught.value.argument == argument
    assert _bits(call) == before


@pytest.fixture
def validate_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KDACORE_VALIDATE", "values")
    config.refresh()
    yield
    monkeypatch.undo()
    config.refresh()


@pytest.mark.usefixtures("validate_values")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_under_validation_every_call_is_looked_at(kind: str) -> None:
    for _ in range(4):
        kdacore.fused_recurrent_kda(**_call(kind), out=_zeros(kind, B, T, H, V))
    call = _call(kind)
    with pytest.raises(kdacore.ContractError, match="'q'"):
        kdacore.fused_recurrent_kda(**call, out=call["q"])


def test_a_compiled_call_is_looked_at() -> None:
    def step(out: Any, **x: Any) -> Any:
        return kdacore.fused_recurrent_kda(**x, out=out)[0]

    call = _call("torch")
    with pytest.raises(Exception, match="argument 'out'.*overlaps itself"):
        torch.compile(step, fullgraph=True, backend="eager")(
            torch.zeros(1, T, H, V).expand(B, T, H, V), **call
        )


@pytest.mark.parametrize(("backend", "kind"), BACKENDS)
def test_neighbours_in_one_buffer_are_fine(backend: str, kind: str) -> None:
    call = _call(kind)
    wanted, _ = kdacore.fused_recurrent_kda(**call, backend=backend)
    # q, v and out are interleaved, head by head; rows of the pool lie among another cache's.
    buffer = _zeros(kind, B, T, H, 3 * K)
    buffer[..., :K], buffer[..., K : 2 * K] = call["q"], call["v"]
    call |= {"q": buffer[..., :K], "v": buffer[..., K : 2 * K], "out": buffer[..., 2 * K :]}
    cache = _zeros(kind, 5, 3, H, K, V)
    o, _ = kdacore.fused_recurrent_kda(
        **call, **_pool(kind, cache[:, 1], inplace_state=True), backend=backend
    )
    assert o is call["out"]
    np.testing.assert_allclose(np.asarray(o), np.asarray(wanted), rtol=0, atol=1e-6)
    assert not np.asarray(cache[:, ::2]).any() and np.asarray(cache[2, 1]).any()


def test_the_geometry() -> None:
    def memory(x: Any) -> Memory:
        return Memory(x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize)

    rng = np.random.default_rng(5)
    for _ in range(300):
        base = np.zeros(400, np.float32)
        views = []
        for _ in range(2):
            shape = tuple(int(n) for n in rng.integers(1, 4, 3))
            strides = tuple(int(4 * s) for s in rng.integers(-12, 13, 3))
            start = base[200 + int(rng.integers(-40, 40)) :]
            views.append(np.lib.stride_tricks.as_strided(start, shape, strides))
        a, b = (np.unique(_addresses(memory(v))) for v in views)
        assert memory(views[0]).overlaps(memory(views[1])) == bool(np.intersect1d(a, b).size)
        if a.size < views[0].size:  # no overlap is missed; a few tangled layouts are refused without one
            assert memory(views[0]).overlaps_itself()
    for x in (base.reshape(4, 10, 10), base.reshape(4, 10, 10).transpose(2, 0, 1)[::-1, :, ::3], base[:1]):
        assert not memory(x).overlaps_itself()


def test_extents_are_the_bounds() -> None:
    import torch

    rng = np.random.default_rng(6)
    base = np.zeros(400, np.float32)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 4, 3))
        strides = tuple(int(s) for s in rng.integers(0, 13, 3))
        view = np.lib.stride_tricks.as_strided(base[7:], shape, tuple(4 * s for s in strides))
        for x in (view, torch.as_strided(torch.from_numpy(base)[7:], shape, strides)):
            extent, memory = extent_of(x), memory_of(x)
            assert extent is not None and memory is not None
            assert extent[:2] == memory.bounds()
            if extent[2]:
                assert not memory.overlaps_itself()
                assert extent[1] - extent[0] == x.nbytes
    assert extent_of(base.reshape(4, 100)) == (base.ctypes.data, base.ctypes.data + base.nbytes, True)
    assert (
        extent_of(base[:0]) is extent_of(torch.zeros(0)) is extent_of(torch.zeros(3, device="meta")) is None
    )


def _addresses(m: Memory) -> Any:
    grid = np.indices(m.shape).reshape(len(m.shape), -1)
    return m.address + np.asarray(m.strides) @ grid
