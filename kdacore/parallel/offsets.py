"""The offsets of a row that ranks share, where they are in host memory: checked before anything is exchanged.

Every rank has the offsets of the whole row, so what is wrong with them is found by all. A rank's own part of them is
always valid, whatever the caller gave, so no backend would find it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.errors import ContractError


def check_offsets(op: str, name: str, values: Any, tokens: int) -> None:
    """Hold offsets to a row of ``tokens``. Neighbours are compared: their difference may not fit their dtype.

    Args:
        op: the op called.
        name: the argument, ``cu_seqlens`` or ``cu_seqlens_cpu``.
        values: NumPy integers ``[N+1]``.
        tokens: of the whole row, ``R*T``.

    Raises:
        ContractError: they do not rise from 0 to ``tokens`` at most.
    """
    if values[0] != 0:
        raise ContractError(op, name, f"first offset {values[0]}", "0")
    falls = np.flatnonzero(values[1:] < values[:-1])
    if falls.size:
        n = int(falls[0])
        got = f"offset {values[n + 1]} behind {values[n]}"
        raise ContractError(op, name, got, "offsets that never decrease")
    if values[-1] > tokens:
        want = f"at most R*T={tokens}, the tokens of all ranks"
        raise ContractError(op, name, f"last offset {values[-1]}", want)


def check_copies(op: str, offsets: Any, copy: Any) -> None:
    """Hold ``cu_seqlens_cpu`` to ``cu_seqlens``, both as NumPy integers.

    Raises:
        ContractError: they differ.
    """
    if not np.array_equal(offsets, copy):
        raise ContractError(
            op, "cu_seqlens_cpu", f"{copy.tolist()}", f"the values of cu_seqlens, {offsets.tolist()}"
        )
