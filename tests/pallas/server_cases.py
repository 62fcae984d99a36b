"""Calls as servers make them: padded packs, pools with slots, rows to write, checkpoints at chosen
tokens. NaN lies wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from pallas_cases import O_BOUND, STATE_BOUND, Case, build, error, output_grads, with_grad

import kdacore
from kdacore.calls.requests import request_with
from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, StateRows, state_rows
from kdacore.ops import OPS
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import OutputGrads, Request

TOKENS = ("q", "k", "v", "g", "beta")
ROWS = 9
"""Rows of every pool."""


@dataclass(frozen=True)
class ServerCase:
    """A call over pools of :data:`ROWS` rows; None for arguments that are not given."""

    case: Case
    padding: int = 0
    """Tokens of no sequence at the end of a pack."""
    state_indices: Any = None
    num_accepted_tokens: Any = None
    has_initial_state: Any = None
    write_indices: Any = None
    write_pool: bool = False
    checkpoint_offsets: Any = None
    checkpoint_indices: Any = None
    inplace_state: bool = False
    null_index: int | None = None


@dataclass
class Call:
    """The arguments of a call, NumPy."""

    op: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    lengths: Any
    """``[N]`` tokens of the sequences."""
    out: Any = field(init=False)

    def __post_init__(self) -> None:
        self.out = np.full_like(self.arrays["v"], 7)

    @cached_property
    def request(self) -> Request:
        return replace(request_with(self.op, {**self.arrays, **self.options}), kind="jax")

    @cached_property
    def rows(self) -> StateRows:
        values = {n: self.arrays[n] for n in INDEX_VALUES if n in self.arrays}
        return state_rows(self.request, values, self.lengths)

    @property
    def written(self) -> set[int]:
        """Rows of the written pool that the call writes."""
        tables = (self.rows.final, self.rows.per_token, self.rows.checkpoints)
        return {int(row) for x in tables if x is not None for row in x.flat} - {ZEROS}

    def tokens_read(self) -> Any:
        """``[B, T]`` bool: tokens of a sequence that has a slot."""
        shape = self.arrays["v"].shape[:2]
        if not self.request.packed:
            return np.broadcast_to(~self.rows.padding[:, None], shape)
        owners = np.repeat(np.arange(len(self.lengths)), self.lengths)
        read = np.zeros(shape, bool)
        read[0, : len(owners)] = ~self.rows.padding[owners]
        return read

    def run(self, kind: str = "jax") -> Any:
        """The public call with arrays of this kind."""
        return served(self)[0](self.of_kind(kind))

    def of_kind(self, kind: str) -> dict[str, Any]:
        convert = {"jax": jnp.asarray, "numpy": np.array, "torch": as_torch}[kind]
        return {n: convert(x) for n, x in self.arrays.items()}

    def inputs(self, kind: str = "jax") -> Any:
        """The arrays as a backend receives them."""
        return OPS[self.op].inputs(**self.of_kind(kind))


def served(call: Call) -> tuple[Any, dict[str, Any]]:
    """The public call as a function of its arrays, and those of JAX."""

    def run(arrays: dict[str, Any], **more: Any) -> Any:
        return getattr(kdacore, call.op)(**arrays, **call.options, **more, backend="xla")

    return run, call.of_kind("jax")


def as_torch(x: Any) -> Any:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def make(server: ServerCase, poison: bool = True) -> Call:
    """The call of a case. ``poison``: NaN in tokens and rows that are not read."""
    case = server.case
    request, inputs = build(case)
    names = (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens")
    arrays = {n: getattr(inputs, n) for n in names if getattr(inputs, n) is not None}
    lengths = np.asarray(case.lengths if request.packed else [request.T] * request.N)
    for n in TOKENS * bool(server.padding):
        arrays[n] = after(arrays[n], server.padding, 0.0)
    rng = np.random.default_rng(case.seed + 100)
    shape = (ROWS, *request.state_shape[1:])
    pools = ("initial_state",) * (server.state_indices is not None) + ("write_pool",) * server.write_pool
    for n in pools:
        arrays[n] = (0.3 * rng.standard_normal(shape)).astype(jnp.dtype(request.state_dtype))
    for n in INDEX_VALUES:
        if getattr(server, n, None) is not None:
            arrays[n] = np.asarray(getattr(server, n), bool if n == "has_initial_state" else np.int32)
    options = {
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": case.gate != "log",
        "use_beta_sigmoid_in_kernel": case.beta_sigmoid,
        "output_final_state": case.final,
        "state_v_first": case.v_first,
        "inplace_state": server.inplace_state,
        "null_index": server.null_index,
        **({"checkpoint_every": case.checkpoint_every} if case.checkpoint_every else {}),
    }
    call = Call(request.op, arrays, options, lengths)
    if poison:
        _poison(call)
    return call


def after(x: Any, count: int, value: float) -> Any:
    """``[1, T, ...]`` with ``count`` tokens of a value appended."""
    return np.concatenate([x, np.full((1, count, *x.shape[2:]), value, x.dtype)], 1)


def padded_training(case: Case, padding: int) -> tuple[Request, Any, OutputGrads]:
    """A pack and its output gradients with NaN after the last sequence."""
    request, inputs = build(case)
    grads = output_grads(request)
    rows = {n: after(getattr(inputs, n), padding, np.nan) for n in TOKENS}
    grads = OutputGrads(after(grads.o, padding, np.nan), grads.final_state)
    return replace(with_grad(request), T=request.T + padding), inputs._replace(**rows), grads


def _poison(call: Call) -> None:
    read = call.tokens_read()
    for n in TOKENS:
        x = call.arrays[n] = np.array(call.arrays[n])
        x[~read] = np.nan
    if "initial_state" in call.arrays:
        pool = call.arrays["initial_state"] = np.array(call.arrays["initial_state"])
        pool[np.setdiff1d(np.arange(len(pool)), call.rows.read)] = np.nan


def as_numpy(x: Any) -> Any:
    """The values of any array, float64."""
    if isinstance(x, torch.Tensor):
        x = x.detach().float().numpy()
    return np.asarray(x).astype(np.float64)


def check(call: Call, result: Any, out: bool = False) -> None:
    """A call's results against the oracle, and every row of a pool that is not written bit for bit.
    ``out``: ``o`` is :attr:`Call.out`, which keeps what it had after the last sequence."""
    request = call.request
    want = oracle_forward(request, call.inputs("numpy"))
    o, state = as_numpy(result[0]), result[1]
    if out and request.packed:
        end = call.arrays["cu_seqlens"][-1]
        assert (o[:, end:] == 7).all()
        o[:, end:] = 0
    assert not o[~call.tokens_read()].any()
    assert error(o, want.o) < O_BOUND[request.dtype]
    bound = max(STATE_BOUND[request.dtype], 3.3e-3 * (request.state_dtype == "bfloat16"))
    if want.checkpoints is not None:
        assert error(as_numpy(result[2]), want.checkpoints) < bound
    assert (state is None) == (want.final_state is None)
    if state is None:
        return
    got = as_numpy(state)
    if not request.inplace_state:
        assert not got[call.rows.padding].any()
        assert error(got, want.final_state) < bound
        return
    before = call.arrays[request.written_pool]
    assert got.shape == before.shape
    for row in range(len(before)):
        if row in call.written:
            assert error(got[row], want.final_state[row]) < bound, row
        else:
            assert np.array_equal(got[row], before[row].astype(np.float64), equal_nan=True), row
