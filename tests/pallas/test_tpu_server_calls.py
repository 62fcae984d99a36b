"""Calls as servers make them, on the Pallas kernels in interpret mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, check_backward, to_jax
from server_cases import TOKENS, ServerCase, check, make, padded_training

from kdacore.types import OutputGrads
from kdacore_pallas.tpu import chunk_backward, chunk_forward, recurrent
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.xla import state_pool

INTERPRET = Launch(interpret=True)
small = Case(K=16, V=8, H=1, HV=2, gate="softplus")
pack = replace(small, lengths=(130, 0, 33, 16, 0))
dense = replace(small, B=3, T=70)
steps = replace(small, op="fused_recurrent_kda", B=4, T=1)

CHUNK = {
    "padded pack": ServerCase(pack, padding=21),
    "slots of a pack, in place": ServerCase(pack, 3, [3, 5, -1, 2, 0], inplace_state=True),
    "slots of dense inputs, written elsewhere": ServerCase(
        dense, 0, [3, 8, 2], write_indices=[0, 6, 3], write_pool=True, inplace_state=True, null_index=8
    ),
    "slots of dense inputs, some start from zeros": ServerCase(
        replace(dense, T=128), 0, [3, 8, 2], has_initial_state=[True, True, False], null_index=8
    ),
}
RECURRENT = {
    "padded pack": ServerCase(replace(steps, B=1, lengths=(3, 0, 1, 0)), padding=4),
    "a pack of padding": ServerCase(replace(steps, B=1, lengths=(0, 0)), 2, [3, 4], inplace_state=True),
    "slots": ServerCase(steps, 0, [3, -1, 8, 2], has_initial_state=[1, 1, 1, 0], inplace_state=True, null_index=8),
    "slots, fresh states": ServerCase(replace(steps, T=3), 0, [3, -1, 8, 2], null_index=8),
    "slots of a pack": ServerCase(replace(steps, B=1, lengths=(3, 2, 1, 0)), 3, [3, -1, 1, -2]),
    "a pool to write": ServerCase(
        replace(steps, v_first=True), 0, [3, 3, 1, -1], write_indices=[4, 5, 8, 6], write_pool=True,
        inplace_state=True, null_index=8,
    ),
    "a pool to write, zeros at first": ServerCase(
        replace(steps, initial=False), write_indices=[4, 5, -1, 6], write_pool=True, inplace_state=True
    ),
    "empty sequences of a pack, moved": ServerCase(
        replace(steps, B=1, lengths=(3, 0, 2, 0, 0)), 2, [3, 5, 1, 2, -1], write_indices=[4, 6, 1, 7, 0],
        inplace_state=True,
    ),
    "empty sequences of a pack, some from zeros": ServerCase(
        replace(steps, B=1, lengths=(0, 2, 0)), 0, [3, 1, 2], has_initial_state=[0, 1, 1], inplace_state=True
    ),
    "empty sequences of a pack, a pool to write": ServerCase(
        replace(steps, B=1, lengths=(0, 1, 0)), 0, [3, 3, 1], write_indices=[4, 5, 2], write_pool=True,
        inplace_state=True, null_index=8,
    ),
    "accepted": ServerCase(
        replace(steps, B=3, T=2), 0, [[0, 1, 2], [3, 8, -1], [5, 6, -1]], [2, 0, 3], inplace_state=True, null_index=8
    ),
    "accepted, a pack": ServerCase(
        replace(steps, B=1, lengths=(2, 1, 0)), 2, [[0, 1], [3, -1], [5, 6]], [1, 1, 2],
        write_indices=[[2, 4], [7, 8], [5, 6]], write_pool=True, inplace_state=True,
    ),
}  # fmt: skip


def run_chunk(request: Any, inputs: Any) -> Any:
    def kernel(request: Any, inputs: Any) -> Any:
        return chunk_forward.forward(request, inputs, request.H, INTERPRET)

    if state_pool.uses_pool(request, inputs):
        return state_pool.around(kernel, request, inputs)
    return kernel(request, inputs)


LONG = [pytest.param(n, marks=() if n.endswith("in place") else pytest.mark.exhaustive) for n in CHUNK]


@pytest.mark.parametrize("name", LONG)
def test_chunk(name: str) -> None:
    call = make(CHUNK[name])
    check(call, jax.jit(run_chunk, static_argnums=0)(call.request, call.inputs()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "op", ["chunk_gated_delta_rule", pytest.param("chunk_kda", marks=pytest.mark.exhaustive)]
)
def test_gradients_of_a_padded_pack(op: str) -> None:
    case = replace(small, op=op, lengths=(20, 0, 5), HV=1, K=8, beta_sigmoid=True)
    request, inputs, grads = padded_training(case, 9)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))

    def backward(inputs: Any, d: OutputGrads) -> Any:
        return chunk_backward.backward(request, inputs, (), d, request.H, INTERPRET)

    got = jax.jit(backward)(to_jax(inputs), d)
    for n in TOKENS:
        assert not np.asarray(getattr(got, n))[:, 25:].any(), n
    check_backward(got, request, inputs, grads)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    call = make(RECURRENT[name])
    request = call.request
    check(call, jax.jit(lambda x: recurrent.forward(request, x, INTERPRET))(call.inputs()))
