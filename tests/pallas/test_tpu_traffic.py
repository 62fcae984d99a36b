"""Bytes between HBM and VMEM, counted from the block specs: every input is read once, every output
written once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdacore_pallas.tpu import report_calls, traffic
from kdacore_pallas.tpu.report_calls import Size


def spec(dtype: str, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    "size",
    [
        Size(T=2048, H=16, HV=16),
        Size(T=2048, H=16, HV=16, dtype="float32"),
        Size(B=2, T=1024, H=8, HV=32),
        Size(T=1024, H=8, HV=8, K=256, V=256),
    ],
    ids=["bf16", "float32", "GVA", "wide heads"],
)
def test_forward_moves_little_more_than_it_must(size: Size) -> None:
    found = traffic.forward_traffic(
        report_calls.chunk_request(size, "v5e"), report_calls.chunk_inputs(size, spec)
    )
    assert found.least <= found.moved <= 1.3 * found.least


def test_backward_moves_its_states_too() -> None:
    size = Size(T=2048, H=16, HV=16)
    found = traffic.backward_traffic(
        report_calls.chunk_request(size, "v5e"), report_calls.chunk_inputs(size, spec)
    )
    assert found.moved <= 2 * found.least


def test_kept_start_states_are_written_once_and_read_once() -> None:
    size = Size(T=2048, H=16, HV=16)
    request, inputs = report_calls.chunk_request(size, "v5e"), report_calls.chunk_inputs(size, spec)
    starts = report_calls.kept_starts(size, spec)
    states = starts.size * starts.dtype.itemsize
    plain = traffic.forward_traffic(request, inputs), traffic.backward_traffic(request, inputs)
    kept = traffic.forward_traffic(request, inputs, True), traffic.backward_traffic(request, inputs, True)
    assert kept[0].moved == plain[0].moved + states
    assert kept[1].moved < plain[1].moved - states
    assert kept[1].least == plain[1].least + states <= kept[1].moved <= 1.3 * kept[1].least


def test_traffic_is_linear_in_the_tokens() -> None:
    """Nothing is read again for a longer sequence."""
    size = replace(Size(), T=512, H=16, HV=16)
    request, inputs = report_calls.chunk_request(size, "v5e"), report_calls.chunk_inputs(size, spec)
    once = traffic.forward_traffic(request, inputs)
    longer = replace(size, T=1024)
    twice = traffic.forward_traffic(
        report_calls.chunk_request(longer, "v5e"), report_calls.chunk_inputs(longer, spec)
    )
    assert 1.9 * once.moved < twice.moved < 2.1 * once.moved


def test_packs_move_what_dense_calls_move() -> None:
    """Blocks that sequences share are copied once; beyond that each sequence has states."""
    size = Size(T=2048, H=16, HV=16)
    lengths = (5, 0, 700, 128, 27, 900, 63, 65, 100)  # and padding
    cu = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    request, inputs = report_calls.chunk_request(size, "v5e"), report_calls.chunk_inputs(size, spec)
    packed, given = replace(request, packed=True, N=len(lengths)), inputs._replace(cu_seqlens=cu)
    state = 4 * size.HV * size.K * size.V
    dense, pack = (traffic.forward_traffic(*call) for call in ((request, inputs), (packed, given)))
    assert pack.moved == dense.moved + (len(lengths) - 1) * state
    dense, pack = (traffic.backward_traffic(*call) for call in ((request, inputs), (packed, given)))
    assert pack.moved == dense.moved
