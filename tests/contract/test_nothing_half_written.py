"""A call that fails has changed no argument, wherever it fails: backends write last, values that are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdacore
from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.values import Shape

PACK = Shape(B=1, T=40, H=1, HV=2, K=8, V=8, lengths=(34, 0, 6))
ROWS = Shape(B=2, T=3, H=1, HV=2, K=8, V=8)
CALLS = (
    ("chunk_kda", PACK, "checkpoints_other_pool", {"checkpoint_every": 64}),
    ("chunk_gated_delta_rule", PACK, "moved", {"output_final_state": True}),
    ("fused_recurrent_kda", ROWS, "candidates_other_pool", {}),
    ("fused_recurrent_gated_delta_rule", ROWS, "accepted_last", {"output_final_state": True}),
)


WRITES = {"reference": ("kdacore_reference", "write_output"), "xla": ("kdacore_pallas", "write_back")}
"""Each backend's package, and its function that begins to write."""


class FaultError(Exception):
    """What the tests raise."""


def _run_with_a_fault(backend: str, call: Callable[[], Any], at: int) -> int:
    """Call it; raise :class:`FaultError` at the ``at``-th function of the backend that it calls, counted until the
    backend begins to write. Returns how many there were."""
    seen, writing, (package, writer) = 0, False, WRITES[backend]

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal seen, writing
        if event != "call" or writing or package not in frame.f_code.co_filename:
            return
        if (
            frame.f_code.co_name == "<genexpr>"
        ):  # whose end, where nothing can be raised, is such an event too
            return
        writing = frame.f_code.co_name == writer
        if writing:
            return
        if seen == at:
            sys.setprofile(None)
            raise FaultError
        seen += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert writing
    return seen


@pytest.mark.parametrize("backend", WRITES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("op, shape, pool, more", CALLS, ids=[call[0] for call in CALLS])
def test_faults_before_the_first_write(
    op: str, shape: Shape, pool: str, more: Any, kind: Any, backend: str
) -> None:
    if backend == "xla":
        pytest.importorskip("jax")
    described = CallDescription(
        op=op, kind=kind, shape=shape, pool=pool, out=True, options=options(**more, inplace_state=True)
    )
    arrays = make_arrays(described)

    def call() -> Any:
        return public_function(op)(**arrays, **dict(described.options), backend=backend)

    fresh = make_arrays(described)
    public_function(op)(**fresh, **dict(described.options), backend=backend)  # imports what it needs
    before = {n: np.asarray(x).tobytes() for n, x in arrays.items()}
    count = _run_with_a_fault(backend, lambda: public_function(op)(
        **make_arrays(described), **dict(described.options), backend=backend), -1)  # fmt: skip
    assert count > 5
    for at in range(0, count, max(1, count // 40)):
        with pytest.raises(FaultError):
            _run_with_a_fault(backend, call, at)
        assert before == {n: np.asarray(x).tobytes() for n, x in arrays.items()}, at
    call()
    written = {n for n, x in arrays.items() if np.asarray(x).tobytes() != before[n]}
    assert written == {"out", "write_pool" if "write_pool" in arrays else "initial_state"}
    for name in written:
        assert np.asarray(arrays[name]).tobytes() == np.asarray(fresh[name]).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reads", [True, False])
def test_checkpoints_beside_a_pool_that_is_written(dtype: str, reads: bool) -> None:
    """NumPy has no bfloat16 by name: the states' dtype is that of the arrays that hold them."""
    rng = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    x = {n: rng.standard_normal((1, 70, 1, 8), dtype=np.float32) for n in ("q", "k", "v")}
    x |= {"g": -rng.random((1, 70, 1, 8), dtype=np.float32), "beta": rng.random((1, 70, 1), dtype=np.float32)}
    given = {"initial_state": np.zeros((2, 1, 8, 8), kind), "state_indices": np.asarray([1])} if reads else {}
    pool = np.zeros((3, 1, 8, 8), kind)
    _, final, checkpoints = kdacore.chunk_kda(
        **x, **given, write_pool=pool, write_indices=np.asarray([2]), inplace_state=True,
        checkpoint_every=64, output_final_state=True,
    )  # fmt: skip
    assert final is pool and pool[2].any() and not pool[:2].any()
    assert checkpoints.dtype == kind and checkpoints.shape == (1, 2, 1, 8, 8) and checkpoints[0, 1].any()
    _, wanted, same = kdacore.chunk_kda(**x, checkpoint_every=64, output_final_state=True)
    assert (wanted.astype(kind) == pool[2]).all() and (same.astype(kind) == checkpoints).all()
