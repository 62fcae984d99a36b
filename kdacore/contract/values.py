"""The checks of ``KDACORE_VALIDATE=values``: they read tensor contents, so they sync the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kdacore.arrays import Adapter, adapter_of
from kdacore.contract.aliasing import check_memory
from kdacore.contract.checks import CHECKPOINT_STEP, MAX_VERIFY_TOKENS
from kdacore.contract.likely_mistakes import warn_of_likely_mistakes
from kdacore.contract.state_rows import ZEROS, StateRows, slots, state_rows
from kdacore.errors import ContractError
from kdacore.ops import INDEX_ARGUMENTS, MASK_ARGUMENTS, OPS
from kdacore.ops.shapes import SHAPES
from kdacore.types import Request


def check_values(request: Request, inputs: Any, adapter: Adapter, *, warn: bool = True) -> None:
    """Check offsets, index ranges, finiteness, the ``safe_gate`` promise, and that written arrays overlap nothing.

    Warns (:class:`~kdacore.errors.InputWarning`) of arrays that keep the contract and look like a mistake, unless
    ``warn`` is False, as for the slice of one rank: where warnings are errors, the other ranks would wait for it.

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
    check_state_rows(request, values, lengths)
    _leave_out_unread(request, values, lengths)
    for name, x in values.items():
        if name == "initial_state" and ("state_indices" in values or "has_initial_state" in values):
            _finite_rows(request, x, state_rows(request, values, lengths).read)
        elif name not in INDEX_ARGUMENTS | MASK_ARGUMENTS | _NOT_READ_WHOLE:
            _finite(request, name, x)
    _gate(request, values)
    if warn:
        warn_of_likely_mistakes(request, values)


_NOT_READ_WHOLE = frozenset(
    {"write_pool", "record_update", "record_key", "record_decay", "conv_state", "conv_windows"}
)
"""Arrays of which a call reads chosen rows alone, or none."""


def _leave_out_unread(request: Request, values: dict[str, Any], lengths: Any) -> None:
    """Zeros in place of tokens that no sequence has, or one without a slot: they may hold anything."""
    read = np.ones(request.N, bool)
    if request.pool_size:
        read = ~state_rows(request, values, lengths).padding
    if not request.packed and read.all():
        return
    tokens: Any = np.zeros(request.B * request.T, bool)
    tokens[: int(lengths.sum())] = np.repeat(read, lengths)
    if tokens.all():
        return
    tokens = tokens.reshape(request.B, request.T)
    for name, axes in SHAPES.items():
        if name in values and axes[:2] == ("B", "T"):
            values[name] = np.array(values[name])
            values[name][~tokens] = 0


_MAY_BE_INFINITE = ("g", "A_log", "dt_bias")
"""A gate has a limit where they are: docs/guide/edges.md. Given log decays may be -inf, as any number below 0."""


def _finite(request: Request, name: str, x: Any) -> None:
    bad, wanted = ~np.isfinite(x), "finite values"
    if name in _MAY_BE_INFINITE:
        bad, wanted = np.isnan(x), "numbers"
        if request.gate == "log":
            bad, wanted = bad | (x == np.inf), "log decays, at most 0"
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ContractError(request.op, name, f"{x[where]} at {list(where)}", wanted)


def _finite_rows(request: Request, pool: Any, rows: Any) -> None:
    for row in rows[rows != ZEROS].tolist():
        if not np.isfinite(pool[row]).all():
            raise ContractError(
                request.op, "initial_state", f"row {row}, which is not finite", "finite states"
            )


def _lengths(request: Request, values: dict[str, Any]) -> Any:
    """Tokens of each sequence."""
    return np.diff(values["cu_seqlens"]) if "cu_seqlens" in values else np.full(request.N, request.T)


def check_offsets(request: Request, name: str, offsets: Any) -> None:
    """What a backend that reads the offsets on the host checks too: they rise from 0 to T at most.

    Args:
        request: of a packed call.
        name: the argument, ``cu_seqlens`` or ``cu_seqlens_cpu``.
        offsets: its values, NumPy.
    """
    if offsets[0] != 0:
        raise ContractError(request.op, name, f"first offset {offsets[0]}", "0")
    if offsets[-1] > request.T:
        raise ContractError(request.op, name, f"last offset {offsets[-1]}", f"at most T={request.T}")
    if (offsets[1:] < offsets[:-1]).any():  # compared: the difference of two int64 may wrap
        raise ContractError(request.op, name, f"{offsets.tolist()}", "offsets that never decrease")


def check_host_offsets(request: Request, inputs: Any, adapter: Adapter) -> None:
    """Check the offsets of a call whose arrays are in host memory, where they can be read at any time.

    Args:
        request: of a packed call on a CPU, not traced.
        inputs: its arrays.
        adapter: of its first array.

    Raises:
        ContractError: naming ``cu_seqlens`` or ``cu_seqlens_cpu``, before anything ran.
    """
    given = {name: getattr(inputs, name) for name in ("cu_seqlens", "cu_seqlens_cpu")}
    _offsets(
        request,
        {name: (adapter_of(x) or adapter).host_values(x) for name, x in given.items() if x is not None},
    )


def check_known_offsets(request: Request, inputs: Any, adapter: Adapter) -> None:
    """Check the offsets of a traced call that are no tracers and in host memory: a constant of the program, or the host
    copy.

    Raises:
        ContractError: as :func:`check_host_offsets`.
    """
    known = {}
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        x = getattr(inputs, name)
        own = None if x is None else adapter_of(x) or adapter
        if own is None or own.is_traced(x) or own.device(x).type != "cpu":
            continue
        if getattr(x, "is_fully_addressable", True):  # else other processes hold parts of it
            known[name] = own.host_values(x)
    _offsets(request, known)


def _offsets(request: Request, values: dict[str, Any]) -> None:
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        if name in values:
            check_offsets(request, name, values[name])
    if (
        "cu_seqlens_cpu" in values
        and "cu_seqlens" in values
        and (values["cu_seqlens_cpu"] != values["cu_seqlens"]).any()
    ):
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
    decode = OPS[request.op].family == "decode"
    if (request.read_only_state or decode) and longest > MAX_VERIFY_TOKENS:
        why = "" if decode else " candidate"
        want = f"at most {MAX_VERIFY_TOKENS}{why} tokens for each sequence"
        got = f"a sequence of {longest} tokens"
        raise ContractError(request.op, "cu_seqlens", got, want if decode else f"{want} with read_only_state")


def check_state_rows(request: Request, values: Mapping[str, Any], lengths: Any) -> None:
    """What a backend that reads the indices on the host checks too: they name rows, columns and tokens that are there,
    and no row that one sequence writes is written or read by another.

    Args:
        request: of any op; those without pools pass.
        values: NumPy arrays by argument, those of :data:`kdacore.contract.state_rows.INDEX_VALUES` that were given,
            and ``cu_seqlens``.
        lengths: tokens of each sequence, NumPy.

    Raises:
        ContractError: naming the argument.
    """
    if OPS[request.op].family not in ("chunk", "recurrent", "decode", "commit"):
        return
    written_rows = request.write_pool_size or request.pool_size
    sizes = {
        "state_indices": request.pool_size,
        "write_indices": written_rows,
        "checkpoint_indices": written_rows,
    }
    for name, size in sizes.items():
        if name in values and (values[name] >= size).any():
            raise ContractError(request.op, name, f"index {values[name].max()}", f"indices below P={size}")
    if "num_accepted_tokens" in values:
        _accepted(request, values["num_accepted_tokens"], values["state_indices"].shape[1])
    if request.inplace_state:
        _columns(request, values, int(lengths.max(initial=0)))
        rows = state_rows(request, values, lengths)
        _written_once(request, rows)
        if not request.write_pool_size:
            _not_read_by_others(request, rows)
    if request.checkpoint_count:
        _checkpoint_offsets(request, values)
    if "record_indices" in values and request.has("record_update"):
        _records(request, values, lengths)
    if request.has("conv_state"):
        _conv(request, values, lengths)


def _records(request: Request, values: Mapping[str, Any], lengths: Any) -> None:
    """Rows of records are there and named once, counts are of records in them, and tokens have one each."""
    size, most = request.spec("record_update").shape[:2]
    rows = state_rows(request, values, lengths)
    used = rows.records != ZEROS
    named = rows.records[used]
    if (named >= size).any():
        raise ContractError(request.op, "record_indices", f"index {named.max()}", f"indices below R={size}")
    if len(np.unique(named)) != named.size:
        raise ContractError(request.op, "record_indices", "a row named twice", "each row at most once")
    if ((rows.replayed < 0) | (rows.replayed > most)).any():
        raise ContractError(
            request.op, "num_replayed", f"{rows.replayed.tolist()}", f"0 to {most} for each sequence"
        )
    longest = min(most, MAX_VERIFY_TOKENS)
    if request.packed and (lengths[used] > longest).any():
        got = f"a sequence of {int(lengths[used].max())} tokens"
        want = f"at most {longest} tokens for each sequence with a row of records"
        raise ContractError(request.op, "cu_seqlens", got, want)


def _conv(request: Request, values: Mapping[str, Any], lengths: Any) -> None:
    """Rows of convolution states and of windows are there and named once, and have room for the tokens."""
    rows = state_rows(request, values, lengths)
    name = "conv_indices" if "conv_indices" in values else "state_indices"
    size, _, columns = request.spec("conv_state").shape
    named = _named(rows.conv)
    if (named >= size).any():
        raise ContractError(request.op, name, f"index {named.max()}", f"rows below P={size} of conv_state")
    if request.inplace_state and len(np.unique(named)) != named.size:
        raise ContractError(request.op, name, "a row of conv_state named twice", "each row at most once")
    if request.has("conv_windows"):
        shape = request.spec("conv_windows").shape
        windows = _named(rows.windows)
        if (windows >= shape[0]).any():
            want = f"rows below R={shape[0]} of conv_windows"
            raise ContractError(request.op, "record_indices", f"index {windows.max()}", want)
        if len(np.unique(windows)) != windows.size:
            raise ContractError(request.op, "record_indices", "a row named twice", "each row at most once")
        used = rows.windows != ZEROS
        if max(lengths[used].max(initial=0), rows.preceding[used].max(initial=0)) > shape[1]:
            want = "a window for each token"
            raise ContractError(request.op, "conv_windows", f"windows of {shape[1]} tokens", want)
    elif request.has("conv_weight"):
        taps = request.spec("conv_weight").shape[1]
        kept = np.full(request.N, rows.per_token is not None)
        kept = kept if rows.records is None else kept | (rows.records != ZEROS)
        longest = max(lengths[kept].max(initial=1), rows.preceding.max(initial=1))
        if columns < taps + longest - 2:
            want = f"L >= {taps + longest - 2}: w={taps}, {longest} tokens"
            raise ContractError(request.op, "conv_state", f"L={columns}", want)


def _accepted(request: Request, accepted: Any, width: int) -> None:
    if ((accepted < 0) | (accepted > width)).any():
        raise ContractError(
            request.op, "num_accepted_tokens", f"{accepted.tolist()}", f"0 to {width} for each sequence"
        )


def _columns(request: Request, values: Mapping[str, Any], longest: int) -> None:
    name = request.written_indices
    if name and values[name].ndim == 2 and longest > values[name].shape[1]:
        raise ContractError(
            request.op,
            name,
            f"{values[name].shape[1]} columns",
            f"a column for each of a sequence's {longest} tokens",
        )


def _written_once(request: Request, rows: StateRows) -> None:
    named = _named(rows.final if rows.per_token is None else rows.per_token)
    name = request.written_indices or "initial_state"
    if len(np.unique(named)) != named.size:
        raise ContractError(request.op, name, "a row named twice", "each row at most once with inplace_state")
    if rows.checkpoints is not None:
        kept = np.concatenate([named, _named(rows.checkpoints)])
        if len(np.unique(kept)) != kept.size:
            want = "rows that nothing else of the call writes"
            raise ContractError(request.op, "checkpoint_indices", "a row that is written twice", want)


def _not_read_by_others(request: Request, rows: StateRows) -> None:
    """In one pool, no sequence may write a row that another starts from, in whatever order they run."""
    written = rows.final[:, None] if rows.per_token is None else rows.per_token
    readers = {int(row): n for n, row in enumerate(rows.read) if row != ZEROS}
    for n, table in enumerate(written):
        for row in _named(table).tolist():
            if readers.get(row, n) != n:
                got = f"row {row} for sequence {n}, which sequence {readers[row]} starts from"
                want = "rows that no other sequence starts from"
                raise ContractError(request.op, request.written_indices, got, want)
    if rows.checkpoints is not None:
        for row in _named(rows.checkpoints).tolist():
            if row in readers:
                got = f"row {row}, which sequence {readers[row]} starts from"
                raise ContractError(
                    request.op, "checkpoint_indices", got, "rows that no sequence starts from"
                )


def _named(rows: Any) -> Any:
    return rows[rows != ZEROS]


def _checkpoint_offsets(request: Request, values: Mapping[str, Any]) -> None:
    """Those that are written lie on tokens, a multiple of 16 from their sequence's start."""
    ends = values["cu_seqlens"] if request.packed else np.asarray([0, request.T])
    offsets = values["checkpoint_offsets"][slots(request, values["checkpoint_indices"]) != ZEROS]
    if ((offsets < 0) | (offsets >= ends[-1])).any():
        raise ContractError(
            request.op, "checkpoint_offsets", f"{offsets.tolist()}", f"positions of tokens, below {ends[-1]}"
        )
    starts = ends[np.searchsorted(ends, offsets, side="right") - 1]
    if ((offsets - starts) % CHECKPOINT_STEP).any():
        want = f"multiples of {CHECKPOINT_STEP} from the start of their sequence"
        raise ContractError(request.op, "checkpoint_offsets", f"{offsets.tolist()}", want)


def _gate(request: Request, values: dict[str, Any]) -> None:
    if request.gate != "log" or "g" not in values or request.op.startswith("kda_"):
        return
    g = values["g"]
    if (g > 0).any():
        want = "log decays <= 0, or use_gate_in_kernel=True for the raw input of the gate"
        raise ContractError(request.op, "g", f"a log decay of {g.max():.6g}", want)
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
