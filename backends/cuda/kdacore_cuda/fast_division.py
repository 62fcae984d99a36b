"""Divisions by numbers that the host knows, as a kernel does them: a multiplication and a shift
(csrc/common/fast_division.cuh)."""

from __future__ import annotations


def division(divisor: int) -> tuple[int, int]:
    """``factor, shift`` with ``n // divisor == n * factor >> shift`` for ``0 <= n < 2**31``;
    ``factor < 2**32``, ``shift >= 31``."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
