"""Which memory is read and written, and how much is allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdacore.oracle.host_values import to_numpy
from kdacore.types import Backend

Make = Callable[..., Any]
POISON = np.float32(1e30)


def poisoned(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same values as a strided view into a larger buffer full of poison, and that buffer."""
    buffer = np.full([2 * n + 3 for n in array.shape], POISON, dtype=array.dtype)
    view = buffer[tuple(slice(1, 2 * n + 1, 2) for n in array.shape)]
    view[...] = array
    return view, buffer


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {"HV": 4, "gate": "softplus", "qk_l2norm": True, "beta_sigmoid": True},
        {"lengths": [70, 0, 1, 64], "checkpoint_every": 64},
        {"op": "chunk_gated_delta_rule", "HV": 2},
        {"op": "fused_recurrent_kda", "T": 5},
    ],
    ids=str,
)
def test_strided_views_in_poison(
    options: dict[str, Any], kind: str, make_call: Make, backend: Backend, to_kind: Callable[..., Any]
) -> None:
    """The same bits as from dense arrays; neither the inputs nor anything around them is written."""
    call = make_call(**{"B": 2, "T": 70, "H": 2, "K": 12, "V": 10, **options})
    op = backend.ops[call.request.op]
    grads = call.grads()

    def everything(inputs: Any) -> list[Any]:
        r = call.of_kind(kind).request
        out = op.forward(r, inputs)
        given = type(grads)(*(None if g is None else to_kind(g, kind) for g in grads))
        return [*out[:3], *op.backward(r, inputs, out.saved, given)]

    dense = everything(call.of_kind(kind).inputs)
    views, memory = {}, {}
    for name, array in call.inputs._asdict().items():
        if array is None:
            continue
        if array.dtype.kind != "f":
            views[name] = to_kind(array, kind)
            continue
        view, buffer = poisoned(array)
        if kind == "torch":
            import torch

            shared = torch.from_numpy(buffer)
            view = shared[tuple(slice(1, 2 * n + 1, 2) for n in array.shape)]
        views[name], memory[name] = view, (buffer, buffer.copy())
    strided = everything(call.inputs._replace(**views))
    for a, b in zip(dense, strided, strict=True):
        if a is not None:
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
    for name, (buffer, before) in memory.items():
        np.testing.assert_array_equal(buffer, before, err_msg=name)


def test_results_share_no_memory_with_inputs(make_call: Make, backend: Backend) -> None:
    """Not even where a result equals an input: an empty sequence's final state, a gate given as log
    decay."""
    call = make_call(lengths=[0, 3])
    out = backend.ops["chunk_kda"].forward(call.request, call.inputs)
    assert not np.shares_memory(out.final_state, call.inputs.initial_state)
    decode = make_call(op="fused_recurrent_kda", lengths=[0, 0])
    out = backend.ops["fused_recurrent_kda"].forward(decode.request, decode.inputs)
    assert not np.shares_memory(out.final_state, decode.inputs.initial_state)
    from kdacore.types import GateInputs

    log_decay = backend.ops["kda_gate"].forward(call.request, GateInputs(call.inputs.g))
    assert not np.shares_memory(log_decay, call.inputs.g)


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that NumPy held at once while ``work`` ran, on top of what was there before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_linearly_and_little(packed: bool, make_call: Make, backend: Backend) -> None:
    """Beyond inputs and results only slabs, whose size does not depend on T."""
    op = backend.ops["chunk_kda"]
    peaks, sizes = [], []
    for T in (2048, 8192):
        lengths = [T // 64] * 64 if packed else None
        call = make_call(T=T, lengths=lengths, H=2, K=32, V=32, output_final_state=False, initial=False)
        sizes.append(sum(a.nbytes for a in call.inputs if a is not None))
        peaks.append(peak_bytes(lambda c=call: op.forward(c.request, c.inputs)))
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    assert slope < 0.6, (peaks, sizes)


def test_peak_memory_of_training_is_a_small_multiple_of_the_inputs(make_call: Make, backend: Backend) -> None:
    op = backend.ops["chunk_kda"]
    call = make_call(T=8192, H=2, K=64, V=64, needs_grad=True)
    grads = call.grads()
    size = sum(a.nbytes for a in call.inputs if a is not None)

    def train() -> None:
        out = op.forward(call.request, call.inputs)
        op.backward(call.request, call.inputs, out.saved, grads)

    assert peak_bytes(train) < 4 * size
