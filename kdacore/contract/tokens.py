"""What calls with tokens are checked for alike: gates, packs, states and their pools. Nothing here reads values."""

from __future__ import annotations

from typing import Any

from kdacore.arrays import Adapter
from kdacore.contract.checks import (
    FLOATS,
    MISSING,
    STATES,
    Arguments,
    check_gate_arrays,
    check_lower_bound,
    check_packing,
    common_fields,
)
from kdacore.errors import shown
from kdacore.types import Device, Gate, Request


def build_with_tokens(
    call: Arguments, adapter: Adapter, device: Device, sizes: dict[str, int], first: str, **more: Any
) -> tuple[Request, Adapter]:
    """Check what calls with tokens have in common.

    Args:
        call: its arguments, whose arrays have been read.
        adapter: of the arrays.
        device: that they are on.
        sizes: B, T, H, HV, K and V.
        first: the array whose dtype the call has.
        more: further fields of the request.
    """
    dtype = call.dtype(first, FLOATS)
    check_gate_arrays(call, sizes["HV"], sizes["K"])
    sizes["N"] = check_packing(call, sizes["B"], adapter)
    gate, lower_bound = _check_gate_options(call)
    if call.flag("allow_neg_eigval") and not call.flag("use_beta_sigmoid_in_kernel"):
        raise call.fail("allow_neg_eigval", "True", "use_beta_sigmoid_in_kernel=True with it")
    scale = call.real("scale")
    fields = common_fields(call, adapter, device)
    fields.update(
        **sizes,
        **more,
        dtype=dtype,
        gate=gate,
        lower_bound=lower_bound,
        scale=sizes["K"] ** -0.5 if scale is None else scale,
        state_v_first=call.flag("state_v_first"),
        output_final_state=call.flag("output_final_state"),
        packed="cu_seqlens" in call.arrays,
    )
    if call.opdef.family == "chunk":
        _check_chunk_options(call, fields)
    if _uses_pools(call):
        from kdacore.contract.pools import check_pools  # here: a call for training does without

        check_pools(call, fields, adapter)
        if not _RECORDS.isdisjoint(call.arrays):
            from kdacore.contract.records import check_records

            check_records(call, fields)
    fields["state_dtype"] = _check_state(call, fields)
    return Request(**fields), adapter


_RECORDS = frozenset({"record_update", "record_key", "record_decay", "record_indices", "num_replayed"})
_POOL_ARRAYS = frozenset(
    {
        "state_indices",
        "num_accepted_tokens",
        "has_initial_state",
        "write_indices",
        "write_pool",
        "checkpoint_offsets",
        "checkpoint_indices",
        "out",
        *_RECORDS,
    }
)


def _uses_pools(call: Arguments) -> bool:
    """Does the call give anything that :mod:`kdacore.contract.pools` checks?"""
    options = call.options
    asked = options.get("inplace_state") or options.get("read_only_state")
    return bool(asked) or options.get("null_index") is not None or not _POOL_ARRAYS.isdisjoint(call.arrays)


def check_gates(call: Arguments, B: int, T: int, HV: int, K: int) -> None:
    """``g`` and ``beta``."""
    if call.opdef.scalar_gate:
        call.shape("g", (B, T, HV), "B, T, HV")
    else:
        call.shape("g", (B, T, HV, K), "B, T, HV, K")
    call.shape("beta", (B, T, HV), "B, T, HV")
    first = call.specs[call.opdef.arrays[0]]
    for name in ("g", "beta"):
        call.dtype(name, FLOATS if first.dtype == "float64" else FLOATS[:3])


def _check_gate_options(call: Arguments) -> tuple[Gate, float | None]:
    in_kernel, safe = call.flag("use_gate_in_kernel"), call.flag("safe_gate")
    lower_bound = call.real("lower_bound")
    if not in_kernel:
        for name in ("A_log", "dt_bias"):
            if name in call.arrays:
                raise call.fail(name, "an array", "None, or use_gate_in_kernel=True so that it has an effect")
        if lower_bound is not None and not safe:
            raise call.fail(
                "lower_bound", lower_bound, "None, or safe_gate=True or use_gate_in_kernel=True with it"
            )
    if safe and lower_bound is None:
        raise call.fail("safe_gate", "True with lower_bound=None", "a lower_bound in [-5, 0) with it")
    check_lower_bound(call, lower_bound, safe)
    if not in_kernel:
        return "log", lower_bound
    if lower_bound is not None:
        return "sigmoid", lower_bound
    if "A_log" not in call.arrays:
        raise call.fail("A_log", MISSING, "a float32 array [HV]: the unbounded gate needs it")
    return "softplus", None


def _check_chunk_options(call: Arguments, fields: dict[str, Any]) -> None:
    every = call.integer("checkpoint_every")
    if every is not None and (not 64 <= every < 2**31 or every % 64):
        raise call.fail("checkpoint_every", shown(every), "a positive multiple of 64 below 2**31")
    fields["checkpoint_every"] = every or 0


# --- states -------------------------------------------------------------------------------------------------------


def _check_state(call: Arguments, fields: dict[str, Any]) -> str:
    """``initial_state`` and ``write_pool``. Returns the dtype of every state of the call."""
    default = "float64" if fields["dtype"] == "float64" else "float32"
    allowed = STATES if default == "float64" else STATES[:3]
    tail = (fields["V"], fields["K"]) if fields["state_v_first"] else (fields["K"], fields["V"])
    letters = "HV, V, K" if fields["state_v_first"] else "HV, K, V"
    found = default
    if "write_pool" in call.arrays:
        found = call.dtype("write_pool", allowed)
        rows = fields["write_pool_size"]
        call.shape("write_pool", (rows, fields["HV"], *tail), f"P, {letters}")
    if "initial_state" in call.arrays:
        if "write_pool" in call.arrays:
            call.dtype("initial_state", (found,), ", as write_pool has")
        found = call.dtype("initial_state", allowed)
        rows = fields.get("pool_size") or fields["N"]
        axis = "P" if fields.get("pool_size") else "N"
        call.shape("initial_state", (rows, fields["HV"], *tail), f"{axis}, {letters}")
    return found
