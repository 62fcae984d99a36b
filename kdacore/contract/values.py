"""The checks of ``KDACORE_VALIDATE=values``: they read tensor contents, so they sync the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.arrays import Adapter, adapter_of
from kdacore.contract.aliasing import check_memory
from kdacore.contract.checks import MAX_VERIFY_TOKENS
from kdacore.errors import ContractError
from kdacore.ops import INDEX_ARGUMENTS, OPS
from kdacore.types import Request


def check_values(request: Request, inputs: Any, adapter: Adapter) -> None:
    """Check offsets, index ranges, finiteness, the ``safe_gate`` promise, and that written arrays overlap nothing.

    Raises:
        ContractError: naming the argument, before anything ran.
    """
    if request.traced or request.device.type == "meta":  # no values to read; the shapes have been checked
        return
    check_memory(request, inputs, adapter)
    values: dict[str, Any] = {}
    for name, x in zip(OPS[request.op].arrays, inputs, strict=True):
        if x is None or name == "out":
            continue
        own = adapter_of(x)
        values[name] = (own or adapter).host_values(x)
    _offsets(request, values)
    lengths = _lengths(request, values)
    check_candidates(request, lengths)
    if "state_indices" in values:
        check_indices(request, values["state_indices"], values.get("num_accepted_tokens"), lengths)
    for name, x in values.items():
        if name == "initial_state" and "state_indices" in values:
            _finite_rows(request, x, _started_from(values))
        elif name not in INDEX_ARGUMENTS:
            _finite(request, name, x)
    _gate(request, values)


def _finite(request: Request, name: str, x: Any) -> None:
    bad = ~np.isfinite(x)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ContractError(request.op, name, f"{x[where]} at {list(where)}", "finite values")


def _started_from(values: dict[str, Any]) -> Any:
    """The rows of a pool that are read. The others may hold anything."""
    indices, accepted = values["state_indices"], values.get("num_accepted_tokens")
    if accepted is not None:
        last = np.take_along_axis(indices, np.maximum(accepted - 1, 0)[:, None], 1)[:, 0]
        rows = np.where(accepted > 0, last, -1)
    else:
        rows = indices if indices.ndim == 1 else indices[:, 0]
    return rows[rows >= 0]


def _finite_rows(request: Request, pool: Any, rows: Any) -> None:
    for row in rows.tolist():
        if not np.isfinite(pool[row]).all():
            raise ContractError(
                request.op, "initial_state", f"row {row}, which is not finite", "finite states"
            )


def _lengths(request: Request, values: dict[str, Any]) -> Any:
    """Tokens of each sequence."""
    return np.diff(values["cu_seqlens"]) if "cu_seqlens" in values else np.full(request.N, request.T)


def check_offsets(request: Request, name: str, offsets: Any) -> None:
    """What a backend that reads the offsets on the host checks too: they part the tokens, all of them.

    Args:
        request: of a packed call.
        name: the argument, ``cu_seqlens`` or ``cu_seqlens_cpu``.
        offsets: its values, NumPy.
    """
    if offsets[0] != 0:
        raise ContractError(request.op, name, f"first offset {offsets[0]}", "0")
    if offsets[-1] != request.T:
        raise ContractError(request.op, name, f"last offset {offsets[-1]}", f"T={request.T}")
    if (np.diff(offsets) < 0).any():
        raise ContractError(request.op, name, f"{offsets.tolist()}", "offsets that never decrease")


def _offsets(request: Request, values: dict[str, Any]) -> None:
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        if name in values:
            check_offsets(request, name, values[name])
    if "cu_seqlens_cpu" in values and (values["cu_seqlens_cpu"] != values["cu_seqlens"]).any():
        raise ContractError(
            request.op, "cu_seqlens_cpu", f"{values['cu_seqlens_cpu'].tolist()}", "the values of cu_seqlens"
        )


def check_candidates(request: Request, lengths: Any) -> None:
    """What a backend that reads the offsets checks too: no sequence has more candidates than can be verified.

    Args:
        request: of a recurrent call, or of any other, which has none.
        lengths: tokens of each sequence, NumPy.
    """
    longest = int(lengths.max(initial=0))
    if request.read_only_state and longest > MAX_VERIFY_TOKENS:
        raise ContractError(
            request.op,
            "cu_seqlens",
            f"a sequence of {longest} tokens",
            f"at most {MAX_VERIFY_TOKENS} candidate tokens for each sequence with read_only_state",
        )


def check_indices(request: Request, indices: Any, accepted: Any, lengths: Any) -> None:
    """What a backend that reads the indices on the host checks too: no row and no column that is not there, and none
    that is written twice.

    Args:
        request: of a call with ``state_indices``.
        indices: ``state_indices``, NumPy.
        accepted: ``num_accepted_tokens``, NumPy, or None.
        lengths: tokens of each sequence, NumPy.
    """
    if (indices >= request.pool_size).any():
        raise ContractError(
            request.op, "state_indices", f"index {indices.max()}", f"indices below P={request.pool_size}"
        )
    if accepted is not None:
        _accepted(request, accepted, indices.shape[1], int(lengths.max(initial=0)))
    if request.inplace_state:
        _written_once(request, indices, lengths)


def _accepted(request: Request, accepted: Any, width: int, longest: int) -> None:
    if ((accepted < 0) | (accepted > width)).any():
        raise ContractError(
            request.op, "num_accepted_tokens", f"{accepted.tolist()}", f"0 to {width} for each sequence"
        )
    if request.inplace_state and longest > width:
        raise ContractError(
            request.op,
            "state_indices",
            f"{width} columns",
            f"a column for each of a sequence's {longest} tokens",
        )


def _written_once(request: Request, indices: Any, lengths: Any) -> None:
    if indices.ndim == 2:  # a column for each token: those past a sequence's end are not written
        indices = np.where(np.arange(indices.shape[1]) < lengths[:, None], indices, -1)
    named = indices[indices >= 0]
    if len(np.unique(named)) != named.size:
        raise ContractError(
            request.op, "state_indices", "a row named twice", "each row at most once with inplace_state"
        )


def _gate(request: Request, values: dict[str, Any]) -> None:
    if request.gate != "log" or "g" not in values or request.op.startswith("kda_"):
        return
    g = values["g"]
    if (g > 0).any():
        raise ContractError(request.op, "g", f"a log decay of {g.max():.6g}", "log decays <= 0")
    # The promise is about the model's gate; a bound rounded to g's own dtype still keeps it.
    slack = {"bfloat16": 2**-8, "float16": 2**-11}.get(request.spec("g").dtype, 2**-22)
    if (
        request.safe_gate
        and request.lower_bound is not None
        and (g < request.lower_bound * (1 + slack)).any()
    ):
        raise ContractError(
            request.op,
            "g",
            f"a log decay of {g.min():.6g}",
            f"log decays >= {request.lower_bound}, as safe_gate promises",
        )
