"""Calls as servers make them: padded packs, pools with slots, rows to write, checkpoints at chosen
tokens; and what they must give, from the oracle one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from pallas_cases import O_BOUND, STATE_BOUND, Case, build, error

import kdacore
from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, StateRows, state_rows
from kdacore.ops import OPS
from kdacore.types import Request
from kdacore_reference.oracle import oracle_forward

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
    accepted: Any = None
    has_initial_state: Any = None
    write_indices: Any = None
    write_pool: bool = False
    inplace: bool = False
    null_index: int | None = None
    offsets: Any = None
    checkpoint_indices: Any = None
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass
class Call:
    """The arguments of a call, NumPy, with NaN wherever nothing may be read."""

    op: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    request: Request
    rows: StateRows
    lengths: Any

    @property
    def ends(self) -> Any:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def out(self) -> Any:
        """An ``out`` argument full of sevens."""
        return np.full_like(self.arrays["v"], 7)

    def run(self, kind: str = "jax", backend: str = "xla", **more: Any) -> Any:
        """The public call with arrays of this kind."""
        return getattr(kdacore, self.op)(**self.of_kind(kind), **self.options, **more, backend=backend)

    def inputs(self) -> Any:
        """The arrays as a backend receives them, of JAX."""
        return OPS[self.op].inputs(**self.of_kind("jax"))

    def of_kind(self, kind: str) -> dict[str, Any]:
        convert = {"jax": jnp.asarray, "numpy": np.array, "torch": as_torch}[kind]
        return {n: convert(x) for n, x in self.arrays.items()}


def as_torch(x: Any) -> Any:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def make(server: ServerCase, poison: bool = True) -> Call:
    """The call of a case. ``poison``: NaN in tokens and rows that are not to be read."""
    request, inputs = build(server.case)
    rng = np.random.default_rng(server.case.seed + 100)
    N = request.N
    names = (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens")
    arrays = {n: getattr(inputs, n) for n in names if getattr(inputs, n) is not None}
    lengths = np.asarray(server.case.lengths if request.packed else [request.T] * N)
    if server.padding:
        for n in TOKENS:
            x = arrays[n]
            arrays[n] = np.concatenate([x, np.zeros((1, server.padding, *x.shape[2:]), x.dtype)], 1)
        request = replace(request, T=request.T + server.padding)
    shape = (ROWS, *request.state_shape[1:])

    def pool() -> Any:
        return (0.3 * rng.standard_normal(shape)).astype(jnp.dtype(request.state_dtype))

    given = {
        "state_indices": server.state_indices,
        "num_accepted_tokens": server.accepted,
        "write_indices": server.write_indices,
        "checkpoint_offsets": server.offsets,
        "checkpoint_indices": server.checkpoint_indices,
    }
    arrays |= {n: np.asarray(x, np.int32) for n, x in given.items() if x is not None}
    if server.has_initial_state is not None:
        arrays["has_initial_state"] = np.asarray(server.has_initial_state, bool)
    if server.state_indices is not None:
        arrays["initial_state"] = pool()
    if server.write_pool:
        arrays["write_pool"] = pool()
    options: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": server.case.l2norm,
        "use_gate_in_kernel": server.case.gate != "log",
        "use_beta_sigmoid_in_kernel": server.case.beta_sigmoid,
        "output_final_state": server.case.final,
        "state_v_first": server.case.v_first,
        "lower_bound": server.case.lower_bound,
        **server.extra,
    }
    if server.case.checkpoint_every:
        options["checkpoint_every"] = server.case.checkpoint_every
    if server.inplace:
        options["inplace_state"] = True
    if server.null_index is not None:
        options["null_index"] = server.null_index
    request = replace(
        request,
        inplace_state=server.inplace,
        null_index=-1 if server.null_index is None else server.null_index,
        state_indices_ndim=0 if server.state_indices is None else arrays["state_indices"].ndim,
        write_indices_ndim=0 if server.write_indices is None else arrays["write_indices"].ndim,
        pool_size=ROWS if server.state_indices is not None else 0,
        write_pool_size=ROWS if server.write_pool else 0,
        checkpoint_count=0 if server.offsets is None else len(server.offsets),
        tensors=tuple((n, None) for n in arrays),  # type: ignore[misc]
    )
    values = {n: arrays[n] for n in INDEX_VALUES if n in arrays}
    call = Call(request.op, arrays, options, request, state_rows(request, values, lengths), lengths)
    if poison:
        _poison(call)
    return call


def _poison(call: Call) -> None:
    """NaN in tokens of no sequence or of one without a slot, and in rows that no sequence reads."""
    for n in TOKENS:
        x = call.arrays[n] = np.array(call.arrays[n])
        if call.request.packed:
            x[:, call.ends[-1] :] = np.nan
            for s in np.flatnonzero(call.rows.padding):
                x[:, call.ends[s] : call.ends[s + 1]] = np.nan
        else:
            x[call.rows.padding] = np.nan
    if "initial_state" in call.arrays:
        pool = call.arrays["initial_state"] = np.array(call.arrays["initial_state"])
        unread = np.setdiff1d(np.arange(len(pool)), call.rows.read)
        pool[unread] = np.nan


@dataclass
class Expected:
    """What a call must give, float64."""

    o: Any
    """Zero where there is no sequence, and for sequences without a slot."""
    final: Any
    """``[N, ...]``."""
    written: dict[int, Any]
    """States by row of the written pool."""


def expected(call: Call) -> Expected:
    """From oracle calls of one sequence, without any of the arguments tested here."""
    o = np.zeros(call.arrays["v"].shape)
    finals = np.zeros(call.request.state_shape)
    written: dict[int, Any] = {}
    for n, length in enumerate(call.lengths):
        if call.rows.padding[n]:
            continue
        if length:
            at = (0, slice(call.ends[n], call.ends[n] + length)) if call.request.packed else (n,)
            o[at] = _alone(call, n, length).o[0]
        finals[n] = _state_after(call, n, length)
        if call.rows.per_token is not None:
            for t in range(length):
                _put(written, call.rows.per_token[n, t], _state_after(call, n, t + 1))
        elif call.request.inplace_state:
            _put(written, call.rows.final[n], finals[n])
    if call.rows.checkpoints is not None:
        for offset, row in zip(call.arrays["checkpoint_offsets"], call.rows.checkpoints, strict=True):
            ends = call.ends if call.request.packed else np.asarray([0, call.request.T])
            n = int(np.searchsorted(ends, offset, side="right")) - 1
            if row != ZEROS and not call.rows.padding[n]:
                _put(written, row, _state_after(call, n, int(offset - ends[n])))
    return Expected(o, finals, written)


def _put(written: dict[int, Any], row: Any, state: Any) -> None:
    if row != ZEROS:
        assert int(row) not in written
        written[int(row)] = state


def _start(call: Call, n: int) -> Any:
    if call.rows.read[n] == ZEROS:
        return np.zeros(call.request.state_shape[1:])
    return call.arrays["initial_state"][call.rows.read[n]].astype(np.float64)


def _state_after(call: Call, n: int, length: int) -> Any:
    return _alone(call, n, length).final_state[0] if length else _start(call, n)


def _alone(call: Call, n: int, length: int) -> Any:
    """The oracle on the first tokens of one sequence."""
    r = call.request
    one = Request(
        op=r.op, kind=r.kind, device=r.device, B=1, T=int(length), H=r.H, HV=r.HV, K=r.K, V=r.V, N=1,
        dtype=r.dtype, state_dtype=r.state_dtype, scalar_gate=r.scalar_gate, gate=r.gate,
        lower_bound=r.lower_bound, scale=r.scale, qk_l2norm=r.qk_l2norm, beta_sigmoid=r.beta_sigmoid,
        neg_eigval=r.neg_eigval, state_v_first=r.state_v_first, output_final_state=True,
    )  # fmt: skip
    tokens = {}
    for name in TOKENS:
        x = call.arrays[name]
        first = call.ends[n] if r.packed else 0
        tokens[name] = (x if r.packed else x[n : n + 1])[:, first : first + length]
    given = {name: call.arrays.get(name) for name in ("A_log", "dt_bias")}
    inputs = OPS[r.op].inputs(**tokens, **given, initial_state=_start(call, n)[None])
    return oracle_forward(one, inputs)


def as_numpy(x: Any) -> Any:
    """The values of any array, float64."""
    if isinstance(x, torch.Tensor):
        x = x.detach().float().numpy()
    return np.asarray(x).astype(np.float64)


def check(call: Call, result: Any, out: Any = None) -> None:
    """A call's results against :func:`expected`, with every row that is not written bit for bit."""
    want = expected(call)
    o, state = as_numpy(result[0]), result[1]
    bound = O_BOUND[call.request.dtype]
    padding = np.ones(call.arrays["v"].shape[:2], bool)
    if call.request.packed:
        padding[:, : call.ends[-1]] = False
        for n in np.flatnonzero(call.rows.padding):
            padding[:, call.ends[n] : call.ends[n + 1]] = True
        if out is not None:
            assert (o[:, call.ends[-1] :] == 7).all()
            o[:, call.ends[-1] :] = 0
    else:
        padding[~call.rows.padding] = False
    assert not o[padding].any()
    assert error(o, want.o) < bound
    if state is None:
        return
    bound = STATE_BOUND[call.request.dtype]
    if call.request.state_dtype == "bfloat16":
        bound = max(bound, 3.3e-3)
    if not call.request.inplace_state:
        assert not as_numpy(state)[call.rows.padding].any()
        assert error(as_numpy(state), want.final) < bound
        return
    before = call.arrays[call.request.written_pool]
    got = as_numpy(state)
    assert got.shape == before.shape
    for row in range(len(before)):
        if row in want.written:
            assert error(got[row], want.written[row]) < bound, row
        else:
            assert np.array_equal(got[row], before[row].astype(np.float64), equal_nan=True), row
