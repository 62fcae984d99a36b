"""Checks of state pools and of what a call writes in place. Nothing here reads tensor values."""

from __future__ import annotations

from typing import Any

from kdacore.arrays import Adapter
from kdacore.contract.checks import INDICES, MAX_VERIFY_TOKENS, MISSING, Arguments
from kdacore.errors import shown


def check_pools(call: Arguments, fields: dict[str, Any], adapter: Adapter) -> None:
    """Check the pool arguments of a chunked or recurrent op and add their fields of the request.

    Raises:
        ContractError: naming the argument.
    """
    fields["pool_size"] = fields["write_pool_size"] = fields["state_indices_ndim"] = 0
    _check_flags(call, fields, adapter)
    _check_read_rows(call, fields)
    _check_written_rows(call, fields)
    _check_checkpoints(call, fields)
    check_null_index(call, fields)
    if "out" in call.arrays:
        if adapter.immutable:
            raise call.fail("out", f"a {adapter.kind} array", "None: these arrays cannot be written")
        call.shape("out", (fields["B"], fields["T"], fields["HV"], fields["V"]), "B, T, HV, V")
        first = "v" if "v" in call.specs else "x"
        call.dtype("out", (call.specs[first].dtype,), f", as {first} has")


def _check_flags(call: Arguments, fields: dict[str, Any], adapter: Adapter) -> None:
    inplace, read_only = call.flag("inplace_state"), call.flag("read_only_state")
    if inplace and "initial_state" not in call.arrays and "write_pool" not in call.arrays:
        raise call.fail("inplace_state", "True", "an initial_state or a write_pool with it")
    if read_only and "initial_state" not in call.arrays:
        raise call.fail("read_only_state", "True", "an initial_state with it")
    if read_only:
        _check_read_only(call, fields, inplace)
    if inplace and adapter.immutable and not fields["output_final_state"]:
        raise call.fail(
            "inplace_state",
            "True with output_final_state=False",
            f"output_final_state=True: {adapter.kind} arrays cannot be written, the new pool is returned",
        )


def _check_read_only(call: Arguments, fields: dict[str, Any], inplace: bool) -> None:
    if inplace:
        raise call.fail("read_only_state", "True with inplace_state=True", "one of the two")
    if fields["output_final_state"]:
        raise call.fail("read_only_state", "True with output_final_state=True", "output_final_state=False")
    sequences = fields["N"] if fields["packed"] else 1
    if fields["T"] > MAX_VERIFY_TOKENS * sequences:
        raise call.fail(
            "read_only_state",
            f"T={fields['T']}",
            f"1 to {MAX_VERIFY_TOKENS} candidate tokens for each sequence",
        )


def _check_read_rows(call: Arguments, fields: dict[str, Any]) -> None:
    """``state_indices``, ``num_accepted_tokens`` and ``has_initial_state``."""
    for name in ("state_indices", "has_initial_state"):
        if name in call.arrays and "initial_state" not in call.arrays:
            raise call.fail(name, "an array", "None, or an initial_state with it")
    if "has_initial_state" in call.arrays:
        call.dtype("has_initial_state", ("bool",))
        call.shape("has_initial_state", (fields["N"],), "N")
    accepted = "num_accepted_tokens" in call.arrays
    if "state_indices" not in call.arrays:
        if accepted:
            raise call.fail("num_accepted_tokens", "an array", "None, or state_indices [N, T] with it")
        return
    got = _check_rows(call, "state_indices", fields)
    if len(got) == 2 and not accepted:
        raise call.fail("num_accepted_tokens", MISSING, "an array [N]: state_indices [N, T] needs it")
    if accepted:
        if len(got) != 2:
            raise call.fail("num_accepted_tokens", "an array", "None, or state_indices [N, T] with it")
        call.dtype("num_accepted_tokens", INDICES)
        call.shape("num_accepted_tokens", (fields["N"],), "N")
    pool = call.rank("initial_state", "P, HV, V, K" if fields["state_v_first"] else "P, HV, K, V")
    fields["pool_size"], fields["state_indices_ndim"] = pool[0], len(got)


def _check_rows(call: Arguments, name: str, fields: dict[str, Any]) -> tuple[int, ...]:
    """Row numbers ``[N]``, or ``[N, T]`` where the op has candidate tokens. Returns their shape."""
    call.dtype(name, INDICES)
    got, N = call.specs[name].shape, fields["N"]
    candidates = call.opdef.family in ("recurrent", "decode")
    if len(got) not in ((1, 2) if candidates else (1,)) or got[0] != N:
        want = "[N] or [N, T]" if candidates else "[N]"
        raise call.fail(name, f"shape {list(got)}", f"shape {want} with N={N}")
    if len(got) == 2 and got[1] < (1 if fields["packed"] else fields["T"]):
        if fields["packed"]:
            raise call.fail(name, f"shape {list(got)}", "positive sizes [N, T]")
        raise call.fail(name, f"shape {list(got)}", f"a column for each of T={fields['T']} tokens")
    return got


def _check_written_rows(call: Arguments, fields: dict[str, Any]) -> None:
    """``write_indices`` and ``write_pool``."""
    for name in ("write_indices", "write_pool"):
        if name in call.arrays and not call.flag("inplace_state"):
            raise call.fail(name, "an array", "None, or inplace_state=True with it")
    if "write_indices" in call.arrays:
        if "write_pool" not in call.arrays and "state_indices" not in call.arrays:
            raise call.fail(
                "write_indices", "an array", "None, or a write_pool, or the state_indices of a pool, with it"
            )
        fields["write_indices_ndim"] = len(_check_rows(call, "write_indices", fields))
    if "write_pool" in call.arrays:
        if "write_indices" not in call.arrays and "state_indices" not in call.arrays:
            raise call.fail("write_indices", MISSING, "the rows of write_pool that are written")
        letters = "P, HV, V, K" if fields["state_v_first"] else "P, HV, K, V"
        fields["write_pool_size"] = call.rank("write_pool", letters)[0]


def _check_checkpoints(call: Arguments, fields: dict[str, Any]) -> None:
    """``checkpoint_offsets`` and ``checkpoint_indices``."""
    names = ("checkpoint_offsets", "checkpoint_indices")
    given = [name for name in names if name in call.arrays]
    if not given:
        return
    for name in names:
        if name not in given:
            raise call.fail(name, MISSING, f"an array [C], with {given[0]}")
        call.dtype(name, INDICES)
    if not call.flag("inplace_state"):
        raise call.fail("checkpoint_offsets", "an array", "None, or inplace_state=True with it")
    if "write_pool" not in call.arrays and "state_indices" not in call.arrays:
        want = "None, or a write_pool, or the state_indices of a pool, with it"
        raise call.fail("checkpoint_offsets", "an array", want)
    if fields["B"] != 1:
        raise call.fail("checkpoint_offsets", f"an array with B={fields['B']}", "B == 1: a pack")
    fields["checkpoint_count"] = call.length("checkpoint_offsets", "C")
    call.shape("checkpoint_indices", (fields["checkpoint_count"],), "C")


def check_null_index(call: Arguments, fields: dict[str, Any]) -> None:
    """``null_index``, where the call has rows."""
    null = call.integer("null_index")
    if null is None:
        return
    if not 0 <= null < 2**31:
        raise call.fail("null_index", shown(null), "None, or a row number from 0 to 2**31 - 1")
    if not any(name in call.arrays for name in ("state_indices", "write_indices", "conv_indices")):
        raise call.fail("null_index", null, "None, or state_indices or write_indices with it")
    fields["null_index"] = null
