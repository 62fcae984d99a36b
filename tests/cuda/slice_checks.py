"""Checks of slices of a row that ranks share, of either chunk op: against the oracle on the whole row, through the
cuda backend's functions and through public calls with ``cp=``."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import O_BOUND, STATE_BOUND, Draw, error, request_of
from emulated_backend import NAME, Plugin
from slice_ranks import TOKENS, Row, op_of

import kdacore
from kdacore.parallel import local_group
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda.forms.slices import halves
from kdacore_cuda.runtime import executor, torch_launch
from kdacore_reference.oracle import oracle_backward, oracle_forward

GRADIENT_BOUND = 8e-3
"""Contract section 4, gradients of 16-bit inputs; twice each bound on calls as short as these."""
CROSSING = [0, 30, 0, 400, 17, 0, 193, 70, 0]
"""On 3 ranks of 256: an empty first sequence, one that skips no rank, one that ends inside the last; padding."""
SKIPPING = [3, 700, 65]
"""On 4 ranks of 192: one that has the second and third rank whole, and ends inside the last."""


def use_segments(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Of so many chunks."""
    monkeypatch.setattr(halves, "slice_segment_chunks", lambda *args: chunks)


def state(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=dtype)


def offsets(lengths: list[int], index: torch.dtype) -> torch.Tensor:
    """Of sequences of these lengths."""
    return torch.tensor(np.cumsum([0, *lengths]), dtype=index)


def pack(lengths: list[int], T: int, index: torch.dtype = torch.int32, **more: Any) -> ChunkInputs:
    """Sequences of these lengths and padding up to T."""
    cu = offsets(lengths, index)
    return draw(T, 1, 1, cu_seqlens=cu, initial_state=state(len(lengths), 1), **more)


def check_forward(inputs: ChunkInputs, ranks: int, **options: Any) -> None:
    want = oracle_forward(request_of(op_of(inputs), inputs, output_final_state=True, **options), inputs)
    o, final = Row(inputs, ranks, output_final_state=True, **options).outputs()
    assert error(o, want.o) < 2 * O_BOUND
    assert final is not None
    exact = np.asarray(want.final_state)
    exact = np.swapaxes(exact, -1, -2) if options.get("state_v_first") else exact
    assert error(final, exact) < 2 * STATE_BOUND


def check_gradients(
    inputs: ChunkInputs, ranks: int, *, final: bool = True, kept: bool = False, **options: Any
) -> InputGrads:
    request = request_of(op_of(inputs), inputs, output_final_state=final, **options)
    d = Draw(17, inputs.v.dtype)
    do = d.normal(*inputs.v.shape)
    if inputs.cu_seqlens is not None:
        do[:, int(inputs.cu_seqlens[-1]) :] = 0  # padding
    grads = OutputGrads(do, d.normal(*request.state_shape, dtype=torch.float32) if final else None)
    want = oracle_backward(request, inputs, grads)
    got = Row(inputs, ranks, kept, output_final_state=final, **options).gradients(grads)
    for name in InputGrads._fields:
        mine, exact = getattr(got, name), getattr(want, name)
        if exact is None:
            continue
        exact = np.asarray(exact)
        if name == "initial_state" and options.get("state_v_first"):
            exact = np.swapaxes(exact, -1, -2)
        assert error(mine, exact) < 2 * GRADIENT_BOUND, name
    return got


def check_that_later_tokens_change_no_bit(inputs: ChunkInputs, **options: Any) -> None:
    """On the same rank and on the rank before. ``inputs``: of 512 tokens, on 2 ranks."""
    before = Row(inputs, 2, **options).outputs()[0]
    changed = inputs._replace(**{n: getattr(inputs, n).clone() for n in TOKENS})
    for n in TOKENS:
        getattr(changed, n)[:, 300:] = getattr(changed, n)[:, 300:].flip(1)
    assert torch.equal(Row(changed, 2, **options).outputs()[0][:, :300], before[:, :300])


def check_that_blocks_share_states(
    monkeypatch: pytest.MonkeyPatch, inputs: ChunkInputs, kept: bool, **options: Any
) -> None:
    """The same bits, however many blocks share a state. ``inputs``: on 2 ranks."""
    HV, found = inputs.v.shape[2], []
    for multiprocessors in (1, 1000):
        monkeypatch.setattr(torch_launch, "multiprocessors", lambda index, n=multiprocessors: n)
        row = Row(inputs, 2, kept, output_final_state=True, **options)
        grads = row.gradients(OutputGrads(Draw(3).normal(*inputs.v.shape), state(1, HV)))
        found.append([*row.outputs(), *row.transitions, *(x for x in grads if x is not None)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def check_calls_with_cp(
    monkeypatch: pytest.MonkeyPatch, inputs: ChunkInputs, options: dict[str, Any]
) -> None:
    """Through the public function, ranks as threads: a pack with bfloat16 states, values first, and its gradients.

    Args:
        monkeypatch: undoes what this sets.
        inputs: of sequences as :data:`CROSSING`, on 3 ranks of 256, with initial states.
        options: of the call.
    """
    op = op_of(inputs)
    REGISTRY.register(Plugin(op), NAME)
    plain, one_at_a_time = executor.start_of, threading.Lock()

    def start_of(*program: Any) -> Any:
        start = plain(*program)

        def locked(*call: Any) -> None:
            with one_at_a_time:  # the emulator serves one
                start(*call)

        return locked

    monkeypatch.setattr(executor, "start_of", start_of)
    assert inputs.initial_state is not None
    inputs = inputs._replace(initial_state=inputs.initial_state.mT.bfloat16().contiguous())
    options = {**options, "state_v_first": True, "output_final_state": True}
    request = request_of(op, inputs, **options)
    d = Draw(3)
    do, d_final = d.normal(*inputs.v.shape), d.normal(*request.state_shape)
    do[:, sum(CROSSING) :] = 0
    group = local_group(3)

    def run(rank: int) -> list[torch.Tensor]:
        rows = slice(256 * rank, 256 * rank + 256)
        names = [n for n, x in inputs._asdict().items() if x is not None and x.is_floating_point()]
        leaves = {
            n: (getattr(inputs, n)[:, rows] if n in TOKENS else getattr(inputs, n)).clone().requires_grad_()
            for n in names
        }
        with kdacore.record_selections() as selections, torch.autograd.set_multithreading_enabled(False):
            o, final = getattr(kdacore, op)(
                **leaves, cu_seqlens=inputs.cu_seqlens, **options, cp=group[rank], backend=NAME
            )
            given = d_final if rank == 1 else torch.zeros_like(d_final)
            grads = torch.autograd.grad([o, final], list(leaves.values()), [do[:, rows], given])
        assert [s.backend for s in selections] == [NAME]
        return [o.detach(), final.detach(), *grads]

    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(run, range(3)))
    finally:
        REGISTRY.reset()
    want, exact = oracle_forward(request, inputs), oracle_backward(request, inputs, OutputGrads(do, d_final))
    assert error(torch.cat([x[0] for x in found], 1), want.o) < 2 * O_BOUND
    assert all(error(x[1], want.final_state) < 2 * STATE_BOUND for x in found)
    names = [n for n, x in inputs._asdict().items() if x is not None and x.is_floating_point()]
    for i, name in enumerate(names, 2):
        parts = [x[i].float() for x in found]
        whole = torch.cat(parts, 1) if name in TOKENS else torch.stack(parts).sum(0)
        assert error(whole, getattr(exact, name)) < 2 * GRADIENT_BOUND, name
