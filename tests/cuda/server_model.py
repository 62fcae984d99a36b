"""What calls with state pools have to return, from the oracle of one plain sequence at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from cuda_calls import request_of

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, state_rows
from kdacore.types import Request
from kdacore_reference.oracle import oracle_forward, to_float64

_TOKENS = ("q", "k", "v", "g", "beta")
_PLAIN = ("scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
_OPTIONS = (*_PLAIN, "allow_neg_eigval", "safe_gate", "lower_bound", "state_v_first")


class Expected(NamedTuple):
    """float64 arrays."""

    o: Any
    """``[B, T, HV, V]``, zero where no sequence writes."""
    final: Any
    """``[N, HV, K, V]``; zero for padding."""
    pool: Any
    """The pool that was written, None without ``inplace_state``."""
    written: Any
    """``[P]`` bool: rows of the pool that the call writes."""


def expected(request: Request, inputs: Any, options: dict[str, Any]) -> Expected:
    """Every sequence by itself. ``inputs`` as they were before the call."""
    values = {
        name: getattr(inputs, name).numpy()
        for name in INDEX_VALUES
        if getattr(inputs, name, None) is not None
    }
    r = request
    cu = inputs.cu_seqlens.numpy() if r.packed else np.arange(r.N + 1) * r.T
    rows = state_rows(r, values, np.diff(cu))
    plain = {name: options[name] for name in _OPTIONS if name in options}
    o = np.zeros((r.B * r.T, r.HV, r.V))
    final = np.zeros(r.state_shape)
    pool = written = None
    if r.inplace_state:
        pool = to_float64(getattr(inputs, r.written_pool)).copy()
        written = np.zeros(pool.shape[0], bool)

    def write(row: int, state: Any) -> None:
        if row != ZEROS:
            pool[row], written[row] = state, True

    for n in range(r.N):
        if rows.padding[n]:
            continue
        start = None
        if rows.read[n] != ZEROS:
            start = inputs.initial_state[int(rows.read[n])][None]
        zero_state = np.zeros(r.state_shape[1:]) if start is None else to_float64(start)[0]

        def state_after(count: int, n: int = n, start: Any = start, zero_state: Any = zero_state) -> Any:
            if count == 0:
                return None, zero_state
            return _run(r, inputs, int(cu[n]), count, start, plain)

        length = int(cu[n + 1] - cu[n])
        out, final[n] = state_after(length)
        if length:
            o[cu[n] : cu[n + 1]] = out
        if pool is None:
            continue
        if rows.per_token is None:
            write(int(rows.final[n]), final[n])
        else:
            for t in range(length):
                if rows.per_token[n, t] != ZEROS:
                    write(int(rows.per_token[n, t]), state_after(t + 1)[1])
        if rows.checkpoints is not None:
            for offset, row in zip(values["checkpoint_offsets"], rows.checkpoints, strict=True):
                if row != ZEROS and cu[n] <= offset < cu[n + 1]:
                    write(int(row), state_after(int(offset - cu[n]))[1])
    return Expected(o.reshape(r.B, r.T, r.HV, r.V), final, pool, written)


def _run(r: Request, inputs: Any, first: int, count: int, start: Any, plain: dict[str, Any]) -> Any:
    """Output ``[count, HV, V]`` and final state of ``count`` tokens from row ``first`` of all tokens on."""
    flat = {name: getattr(inputs, name).flatten(0, 1)[None, first : first + count] for name in _TOKENS}
    one = type(inputs)(**flat, A_log=inputs.A_log, dt_bias=inputs.dt_bias, initial_state=start)
    got = oracle_forward(request_of(r.op, one, output_final_state=True, **plain), one)
    return got.o[0], got.final_state[0]


def poison_unused(request: Request, inputs: Any) -> Any:
    """The same call with NaN in tokens that are not read: those beyond the last offset and of padding."""
    r = request
    values = {
        name: getattr(inputs, name).numpy()
        for name in INDEX_VALUES
        if getattr(inputs, name, None) is not None
    }
    cu = inputs.cu_seqlens.numpy() if r.packed else np.arange(r.N + 1) * r.T
    rows = state_rows(r, values, np.diff(cu))
    unread = np.ones(r.B * r.T, bool)
    for n in range(r.N):
        if not rows.padding[n]:
            unread[cu[n] : cu[n + 1]] = False
    mask = torch.from_numpy(unread).view(r.B, r.T)
    changed = {}
    for name in _TOKENS:
        x = getattr(inputs, name).clone()
        x[mask] = float("nan")
        changed[name] = x
    return inputs._replace(**changed)
