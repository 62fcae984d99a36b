"""Sizes that all kernels use. No framework is imported here, because the verifiers import this
module."""

from __future__ import annotations

from kdacore.types import Request

CHUNK = 128
"""Tokens of a grid step."""
SUBLANES = 8
LANES = 128
HEADS = 8
"""Heads of a block are a multiple of this, or all heads."""


def chunk_steps(request: Request) -> int:
    """Grid steps of the chunk kernels over a row. Each border between two sequences of a pack may lie within a block,
    which is then visited once more."""
    return -(-request.T // CHUNK) + (request.N - 1 if request.packed else 0)


def step_words(request: Request) -> int:
    """Numbers that the chunk kernels read from scalar memory for each step."""
    return 5 if request.packed else 3
