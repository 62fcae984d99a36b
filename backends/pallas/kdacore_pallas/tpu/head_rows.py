"""Rows of many heads in VMEM, read and written one head at a time.

A block of an array ``[B, T, heads * D]`` has the D channels of a head side by side in the lanes. Where D fills whole
registers, a head's rows are a slice of the block's lanes, at a multiple of 128 that may depend on a loop's counter.
Other heads begin within a register: they are first copied to float32 scratch ``[heads, C, D]``, at fixed places.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdacore_pallas.tpu.own_rows import OwnRows
from kdacore_pallas.tpu.sizes import LANES

Array = Any
F32 = jnp.float32


def whole_registers(D: int) -> bool:
    """Whether a head's channels fill whole registers: then it needs no scratch."""
    return D % LANES == 0


def scratch(name: str, C: int, heads: int, D: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of the scratch for the block ``name``, where there is any."""
    return [] if whole_registers(D) else [(name + "s", (heads, C, D))]


def _lanes(h: Any, D: int) -> Any:
    return pl.ds(pl.multiple_of(h * D, LANES), D)


def fill(refs: dict[str, Any], name: str) -> None:
    """Copy the block ``name`` to its scratch, if it has any."""
    if name + "s" in refs:
        rows = refs[name + "s"]
        heads, _, D = rows.shape
        block = refs[name][0]
        for h in range(heads):
            rows[h] = block[:, h * D : (h + 1) * D].astype(F32)


def read(refs: dict[str, Any], name: str, h: Any, D: int) -> Array:
    """Head ``h`` of the block ``name``: float32 ``[C, D]``."""
    if name + "s" in refs:
        return refs[name + "s"][h]
    return refs[name][0, :, _lanes(h, D)].astype(F32)


def write(refs: dict[str, Any], name: str, h: Any, value: Array, own: OwnRows) -> None:
    """Head ``h`` of the block ``name`` becomes ``value`` ``[C, D]``, after :func:`flush`; of a shared block, its own
    rows."""
    if name + "s" in refs:
        refs[name + "s"][h] = value
        return
    if own.shared:
        value = own.merged(value, read(refs, name, h, value.shape[1]))
    refs[name][0, :, _lanes(h, value.shape[1])] = value.astype(refs[name].dtype)


def flush(refs: dict[str, Any], name: str, own: OwnRows) -> None:
    """Copy the scratch of the block ``name`` to it, if it has any; of a shared block, its own rows."""
    if name + "s" in refs:
        rows, dtype = refs[name + "s"], refs[name].dtype
        heads, _, D = rows.shape
        block = refs[name][0] if own.shared else None

        def value(h: int) -> Array:
            if block is None:
                return rows[h]
            return own.merged(rows[h], block[:, h * D : (h + 1) * D].astype(F32))

        refs[name][0] = jnp.concatenate([value(h).astype(dtype) for h in range(heads)], axis=1)
