"""The float64 oracle under its earlier name; it is :mod:`kdacore.oracle`."""

from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_backward, oracle_forward

__all__ = ["oracle_backward", "oracle_forward", "oracle_gate", "oracle_gate_backward", "to_float64"]
