"""Checks of the records of candidates and of ``commit_records``. Nothing here reads tensor values."""

from __future__ import annotations

from typing import Any

from kdacore.arrays import Adapter
from kdacore.contract.checks import (
    FLOATS,
    INDICES,
    MAX_VERIFY_TOKENS,
    MISSING,
    STATES,
    Arguments,
    common_fields,
)
from kdacore.contract.pools import check_null_index
from kdacore.types import Request

PARTS = ("record_update", "record_key", "record_decay")


def check_records(call: Arguments, fields: dict[str, Any]) -> None:
    """Check the records of a call with tokens.

    Raises:
        ContractError: naming the argument.
    """
    given = [name for name in PARTS if name in call.arrays]
    if not given:
        for name in ("record_indices", "num_replayed"):
            if name in call.arrays and not (name == "record_indices" and "conv_windows" in call.arrays):
                raise call.fail(name, "an array", "None, or records with it")
        _check_rows(call, fields["N"])
        return
    for name in (*PARTS, "record_indices"):
        if name not in call.arrays:
            raise call.fail(name, MISSING, f"an array, with {given[0]}")
    if not call.flag("inplace_state"):
        raise call.fail(
            "records", "arrays", "None, or inplace_state=True with them: replayed states are written"
        )
    if fields["state_indices_ndim"] != 1:
        got = "state_indices [N, T]" if fields["state_indices_ndim"] else "no state_indices"
        raise call.fail("records", f"arrays with {got}", "state_indices [N] with them: one slot a sequence")
    if fields.get("write_indices_ndim", 0) == 2:
        got = f"shape {list(call.specs['write_indices'].shape)} with records"
        raise call.fail("write_indices", got, "shape [N]: a state after each token is not written then")
    dtype = "float64" if fields["dtype"] == "float64" else "float32"
    records = _check_parts(call, fields["H"], fields["HV"], fields["K"], fields["V"], (dtype,))
    longest = min(records, MAX_VERIFY_TOKENS)
    if not fields["packed"] and fields["T"] > longest:
        first = next(name for name in ("q", "x") if name in call.arrays)
        raise call.fail(first, f"T={fields['T']}", f"at most {longest} tokens: {records} records a row")
    _check_rows(call, fields["N"])


def _check_parts(call: Arguments, H: int, HV: int, K: int, V: int, allowed: tuple[str, ...]) -> int:
    """Shapes and dtypes of the records. Returns how many there are in a row."""
    rows, records = call.rank("record_update", "R, n, HV, V")[:2]
    call.shape("record_update", (rows, records, HV, V), "R, n, HV, V")
    call.shape("record_key", (rows, records, H, K), "R, n, H, K")
    if (
        len(call.specs["record_decay"].shape) == 3 and call.opdef.family == "commit"
    ) or call.opdef.scalar_gate:
        call.shape("record_decay", (rows, records, HV), "R, n, HV")
    else:
        call.shape("record_decay", (rows, records, HV, K), "R, n, HV, K")
    for name in PARTS:
        allowed = (call.dtype(name, allowed),)
    return records


def _check_rows(call: Arguments, N: int) -> None:
    for name in ("record_indices", "num_replayed"):
        if name in call.arrays:
            call.dtype(name, INDICES)
            call.shape(name, (N,), "N")


def _check_commit_conv(call: Arguments, N: int) -> None:
    if "conv_state" not in call.arrays:
        for name in ("conv_indices", "conv_windows"):
            if name in call.arrays:
                raise call.fail(name, "an array", "None, or conv_state with it")
        return
    dtype = call.dtype("conv_state", FLOATS)
    D, columns = call.rank("conv_state", "P, D, L")[1:]
    if "conv_indices" in call.arrays:
        call.dtype("conv_indices", INDICES)
        call.shape("conv_indices", (N,), "N")
    if "conv_windows" in call.arrays:
        call.dtype("conv_windows", (dtype,), ", as conv_state has")
        rows, tokens, history = call.rank("conv_windows", "R, T, w-1, D")[:3]
        call.shape("conv_windows", (rows, tokens, history, D), "R, T, w-1, D")
        if history > columns:
            raise call.fail(
                "conv_windows", f"windows of {history} columns", f"at most the L={columns} of conv_state"
            )


def build_commit(call: Arguments) -> tuple[Request, Adapter]:
    """Check a call of ``commit_records``."""
    adapter, device = call.read_arrays(call.opdef.required)
    v_first = call.flag("state_v_first")
    pool, HV, *tail = call.rank("initial_state", "P, HV, V, K" if v_first else "P, HV, K, V")
    K, V = reversed(tail) if v_first else tail
    state_dtype = call.dtype("initial_state", STATES)
    H = call.rank("record_key", "R, n, H, K")[2]
    if HV % H:
        raise call.fail(
            "record_key", f"H={H} heads", f"a divisor of the HV={HV} value heads of initial_state"
        )
    _check_parts(call, H, HV, K, V, ("float32", "float64"))
    N = call.length("state_indices", "N")
    for name in ("state_indices", "write_indices"):
        if name in call.arrays:
            call.dtype(name, INDICES)
            call.shape(name, (N,), "N")
    _check_rows(call, N)
    _check_commit_conv(call, N)
    fields = common_fields(call, adapter, device)
    fields.update(B=N, T=1, H=H, HV=HV, K=K, V=V, N=N, dtype=call.specs["record_update"].dtype)
    fields.update(state_dtype=state_dtype, state_v_first=v_first, inplace_state=True)
    fields.update(
        pool_size=pool, state_indices_ndim=1, write_indices_ndim=int("write_indices" in call.arrays)
    )
    fields["scalar_gate"] = len(call.specs["record_decay"].shape) == 3
    check_null_index(call, fields)
    return Request(**fields), adapter
