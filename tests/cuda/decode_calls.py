"""Calls of the fused decode ops: random inputs, and comparisons with the oracle, with NaN in what is not read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from emulated_backend import HOPPER
from pool_checks import pool_of, same_bits
from record_calls import PARTS, check_records, poison_records, records_of

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, state_rows
from kdacore.ops import OPS
from kdacore.oracle.decode import oracle_decode
from kdacore.types import DecodeInputs, Request
from kdacore_cuda.forms.decode import forward as decode

KDA, GDN = "fused_decode_kda", "fused_decode_gated_delta_rule"
NAN = float("nan")
WINDOWS = ("conv_state", "conv_windows")
WRITTEN = ("initial_state", "write_pool", *WINDOWS, *PARTS, "out")
TOKENS = ("x", "g", "beta", "z")


def decode_request(op: str, inputs: DecodeInputs, **options: Any) -> Request:
    """The validated Request of a call, with the usual options of models, on an H100."""
    defaults = {name: OPS[op].defaults[name] for name in ("norm_eps", "norm_activation")}
    model = BOUNDED_MODEL if op == KDA else MODEL
    request = request_of(op, inputs, **({**defaults, **model} | options))
    return dataclasses.replace(request, device=HOPPER)


def decode_inputs(
    op: str = KDA,
    B: int = 3,
    T: int = 1,
    H: int = 2,
    HV: int = 2,
    K: int = 128,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    taps: int = 4,
    columns: int | None = None,
    slots: int = 7,
    lengths: tuple[int, ...] | None = None,
    records: int = 0,
    seed: int = 0,
    **more: Any,
) -> Any:
    """A :class:`DecodeInputs` of random arrays: a pool of states and convolution states, of which every sequence has a
    slot. ``lengths``: a pack, with two rows that belong to no sequence. ``records``: records in each of as many rows
    as the pool has. ``more``: arrays, or None for one that is not to be given."""
    d, D = Draw(seed, dtype), 2 * H * K + HV * K
    size = (B, T) if lengths is None else (1, sum(lengths) + 2)
    N = B if lengths is None else len(lengths)
    gate = (HV,) if op == GDN else (HV, K)
    given: dict[str, Any] = {
        "x": d.normal(*size, D),
        "g": d.normal(*size, *gate),
        "beta": d.normal(*size, HV),
        "z": d.normal(*size, HV, K),
        "A_log": torch.log(1 + 3 * d.uniform(HV)),
        "dt_bias": 0.5 * d.normal(*gate, dtype=torch.float32),
        "conv_weight": 0.5 * d.normal(D, taps, dtype=weights),
        "norm_weight": 1 + 0.3 * d.normal(K, dtype=weights),
        "initial_state": pool_of(slots, K, state_dtype, HV=HV),
        "conv_state": d.normal(slots, D, taps - 1 if columns is None else columns),
        "state_indices": torch.randperm(slots, generator=d.rng)[:N],
    }
    if lengths is not None:
        given["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths)])
    if records:
        given |= records_of(op, d, slots, records, H, HV, K)
    return DecodeInputs(**(given | more))


def rows_of(request: Request, inputs: Any) -> Any:
    """The rows of pools, by value, and the lengths of sequences."""
    values = {name: x.numpy() for name in INDEX_VALUES if (x := getattr(inputs, name, None)) is not None}
    lengths = np.diff(inputs.cu_seqlens.numpy()) if request.packed else np.full(request.N, request.T)
    return state_rows(request, values, lengths), lengths


def read_tokens(request: Request, rows: Any, lengths: Any) -> torch.Tensor:
    """``[B, T]`` bool: tokens of sequences that have a slot."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    read = torch.zeros(request.B * request.T, dtype=torch.bool)
    for n in range(request.N):
        if not rows.padding[n]:
            read[starts[n] : starts[n + 1]] = True
    return read.view(request.B, request.T)


def poison(inputs: DecodeInputs, read: torch.Tensor, rows: Any) -> DecodeInputs:
    """The same call, with NaN in tokens and rows of pools that are not read."""
    changed: dict[str, Any] = {}
    for name in TOKENS:
        if (x := getattr(inputs, name)) is not None:
            x[~read] = NAN
    unread = np.setdiff1d(np.arange(len(inputs.initial_state)), rows.read)
    inputs.initial_state[unread] = NAN
    if inputs.conv_state is not None:
        inputs.conv_state[np.setdiff1d(np.arange(len(inputs.conv_state)), rows.conv)] = NAN
    if inputs.record_update is not None:
        poison_records(rows, inputs)
    return inputs._replace(**changed)


def copied(inputs: DecodeInputs) -> dict[str, torch.Tensor]:
    """Copies of what a call may write."""
    return {name: x.clone() for name in WRITTEN if (x := getattr(inputs, name)) is not None}


def check(inputs: DecodeInputs, op: str = KDA, *, fast: bool = True, **options: Any) -> Request:
    """A call against the oracle, with NaN in what is not read, and bit for bit by the fast path.

    Args:
        inputs: of the call; what it writes is written.
        op: its public name.
        fast: nothing has to be copied, so there is a fast path.
        options: that differ from the usual ones.
    """
    request = decode_request(op, inputs, **options)
    rows, lengths = rows_of(request, inputs)
    read = read_tokens(request, rows, lengths)
    inputs = poison(inputs, read, rows)
    want, before = oracle_decode(request, inputs), copied(inputs)
    got = decode.forward(request, inputs)
    compare(request, inputs, before, want, got.o, got.final_state, read)
    first, after = got.o.clone(), copied(inputs)
    for name, x in before.items():
        getattr(inputs, name).copy_(x)
    step = decode.make_fast_call(request, inputs)
    assert (step is not None) == fast
    if step is not None:
        again = step(tuple(inputs))
        if again is not None:
            assert same_bits(again[0], first)
            assert all(same_bits(getattr(inputs, name), x) for name, x in after.items())
    return request


def compare(
    request: Request,
    inputs: DecodeInputs,
    before: dict[str, Any],
    want: Any,
    o: Any,
    final: Any,
    read: torch.Tensor,
) -> None:
    """What a call returned and wrote, with the oracle's ``want`` and with what was there ``before``."""
    rows, lengths = rows_of(request, inputs)
    loose = 2.0  # short sequences are one of the contract's hard cases
    used = torch.arange(request.B * request.T).view(request.B, request.T) < int(lengths.sum())
    assert error(o[used], want.o[used.numpy()]) < loose * O_BOUND
    assert not o[used & ~read].any()
    if inputs.out is None:
        assert not o[~used].any()
    else:
        assert o is inputs.out
        assert same_bits(o[~used], before["out"][~used])
    if request.inplace_state:
        pool = getattr(inputs, request.written_pool)
        assert final is (pool if request.output_final_state else None)
        table = rows.final if rows.per_token is None else rows.per_token
        written = np.unique(table[table != ZEROS])
        others = np.setdiff1d(np.arange(len(pool)), written)
        assert same_bits(pool[others], before[request.written_pool][others])
        if len(written):
            assert error(pool[written], want.final_state[written]) < loose * STATE_BOUND
        stored = list(want.written)
        for name in WINDOWS:
            if (x := getattr(inputs, name)) is not None:
                exact = torch.from_numpy(stored.pop(0)).to(x.dtype)
                assert same_bits(x.nan_to_num(7.0), exact.nan_to_num(7.0))
        if stored:
            check_records(rows, lengths, before, inputs._asdict(), stored)
    else:
        assert all(same_bits(getattr(inputs, name), x) for name, x in before.items() if name != "out")
        assert (final is not None) == request.output_final_state
        if final is not None:
            assert error(final, want.final_state) < loose * STATE_BOUND
