"""The contract's error bounds (section 4): ``norm(x - ref) / norm(ref)`` against a float64 recurrence."""

from __future__ import annotations

from typing import Literal

from kdacore.types import Device

Quantity = Literal["o", "state", "gradient"]

_BOUNDS: dict[Quantity, dict[str, float]] = {
    "o": {"float32": 2e-5, "bfloat16": 4.5e-3, "float16": 4.5e-3, "float64": 1e-9},
    "state": {"float32": 2e-5, "bfloat16": 3.3e-3, "float16": 3.3e-3, "float64": 1e-9},
    "gradient": {"float32": 5e-5, "bfloat16": 8e-3, "float16": 8e-3, "float64": 1e-8},
}
_TF32: dict[Quantity, float] = {"o": 5e-4, "state": 5e-4, "gradient": 2e-3}
"""float32 bounds where tensor cores round to tf32."""
_FIRST_TF32 = 80


def bound(quantity: Quantity, device: Device, *dtypes: str) -> float:
    """The bound of one result.

    Args:
        quantity: which row of the contract's table.
        device: where the call runs; tf32 is allowed only where there are tensor cores that have it.
        dtypes: of the inputs and of the result itself; the coarsest decides.
    """
    table = _BOUNDS[quantity]
    widest = max(table[d] for d in dtypes)
    if widest == table["float32"] and rounds_to_tf32(device):
        return _TF32[quantity]
    return widest


def rounds_to_tf32(device: Device) -> bool:
    """Has this device tensor cores that take float32 as tf32?"""
    number = device.arch.removeprefix("sm_").rstrip("af")
    return device.type == "cuda" and number.isdigit() and int(number) >= _FIRST_TF32
