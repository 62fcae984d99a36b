"""Launches in threads that have used no CUDA before: autograd's begin like that, and servers' workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, Draw, request_of

import kdacore
from kdacore.types import ChunkInputs, OutputGrads
from kdacore_cuda.forms.backward import gradients as chunk_backward

pytestmark = pytest.mark.gpu


def in_new_thread(call: Callable[[], Any]) -> Any:
    """What the call returns there; raises what it raises."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  # handed to the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def inputs(T: int) -> ChunkInputs:
    d = Draw(T, device="cuda")
    tokens = {name: d.normal(1, T, 2, 128) for name in ("q", "k", "v")}
    gate = {name: x.cuda() for name, x in d.gate("init", 1, T, 2, 128).items()}
    return ChunkInputs(**tokens, beta=d.normal(1, T, 2), **gate)


def chunk_forward_call() -> Callable[[], torch.Tensor]:
    given = {k: x for k, x in inputs(100)._asdict().items() if x is not None}
    return lambda: kdacore.chunk_kda(**given, **BOUNDED_MODEL, backend="cuda")[0]


def recurrent_call() -> Callable[[], torch.Tensor]:
    given = {k: x for k, x in inputs(1)._asdict().items() if x is not None}
    return lambda: kdacore.fused_recurrent_kda(**given, **BOUNDED_MODEL, backend="cuda")[0]


def gradients() -> Callable[[], torch.Tensor]:
    given = inputs(100)
    request = request_of("chunk_kda", given, **BOUNDED_MODEL)
    grads = OutputGrads(torch.ones_like(given.v), None)
    return lambda: chunk_backward.backward(request, given, (), grads).q


@pytest.mark.parametrize("make", [chunk_forward_call, recurrent_call, gradients])
def test_launch_in_a_new_thread(make: Callable[[], Callable[[], torch.Tensor]]) -> None:
    """Memory comes from what torch has kept of a call before, so nothing but the launch touches the driver."""
    call = make()
    want = call().clone()
    call()
    torch.cuda.synchronize()
    assert torch.equal(in_new_thread(call), want)
