"""Sizes that all kernels use. No framework is imported here, because the verifiers import this
module."""

CHUNK = 128
"""Tokens of a grid step."""
SUBLANES = 8
LANES = 128
HEADS = 8
"""Heads of a block are a multiple of this, or all heads."""
