"""Marks: numbers that stand for a call and travel with what the ranks exchange, so that each sees where the others are.

A mark is a whole number below 2**24, which float32 holds. It is made of the call's code (of its description and, where
they are in host memory, its offsets) and its number. The marks of two calls of the same kind differ unless 2**24 calls
lie between them.
"""

from __future__ import annotations

import zlib
from typing import Any

MARKS = 4
"""Times that the mark is written behind what is exchanged, to keep what follows aligned."""
_RANGE = 2**24
_STEP = 0x9E3779B1
"""Odd, so that every number has a mark of its own."""
_BACK = pow(_STEP, -1, _RANGE)


def code_of(x: Any) -> int:
    """32 bits that stand for bytes, or for the ``repr`` of something else."""
    return zlib.crc32(x if isinstance(x, bytes) else repr(x).encode())


def mark_of(code: int, number: int) -> float:
    """The mark of a call."""
    return float((code + number * _STEP) % _RANGE)


def number_of(code: int, mark: float) -> int:
    """The number of a call, modulo 2**24, from its code and its mark."""
    return (int(mark) - code) * _BACK % _RANGE
