"""The limits of the Triton kernels, one function per reason. Verifiers read shapes, dtypes and flags, never values."""

from __future__ import annotations

import importlib.metadata
import os
from functools import cache

from kdacore import verifiers as common
from kdacore.types import Reason, Request
from kdacore_triton import decode_tiles

FLOATS = ("float32", "bfloat16", "float16")
STATES = ("float32", "bfloat16", "float16")
MIN_DIM, MAX_KEYS, MAX_VALUES = 16, 256, 512
state = common.state_dtypes(*STATES)
key_dim = common.key_dims(range(MIN_DIM, MAX_KEYS + 1))
"""A row of k is one tile."""
head_dims = common.head_dims(range(MIN_DIM, MAX_KEYS + 1), range(MIN_DIM, MAX_VALUES + 1))
"""A row of v is taken in blocks."""
MAX_TOKENS = 2**30
TENSOR_MEMORY = range(100, 120)
"""Architectures, sm_100 to sm_119, whose matrix products accumulate in tensor memory."""
TENSOR_MEMORY_TRITON = (3, 9)
"""The first Triton whose compiler fits all kernels into tensor memory."""


def _sm(arch: str) -> int:
    """The number of an NVIDIA architecture, 90 of ``sm_90a``; 0 of anything else."""
    number = arch.removeprefix("sm_").rstrip("af")
    return int(number) if arch.startswith("sm_") and number.isdigit() else 0


def hardware(request: Request) -> Reason | None:
    """NVIDIA GPUs of compute capability 8.0 and up, AMD GPUs, or CPU tensors in Triton's interpreter."""
    device = request.device
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return Reason(
            "hardware",
            "runs CPU tensors only in Triton's interpreter",
            "cpu",
            "a GPU, or TRITON_INTERPRET=1 set before Triton is imported",
        )
    if device.type == "cuda":
        if _sm(device.arch) >= 80:
            return None
        return Reason(
            "hardware", "needs compute capability 8.0", device.arch or "an unknown GPU", "sm_80 or later"
        )
    if device.type == "rocm" and device.arch.startswith("gfx"):
        return None
    return Reason("hardware", "has no kernels for this device", str(device), "an NVIDIA or AMD GPU")


@cache
def triton_version() -> tuple[int, ...]:
    """Major and minor number of the installed Triton; empty when it is missing, which a requirement reports."""
    from kdacore.machine import release_of  # here: the plugin imports quickly

    try:
        return release_of(importlib.metadata.version("triton"))[:2]
    except importlib.metadata.PackageNotFoundError:
        return ()


@common.reads_no_lengths
def compiler(request: Request) -> Reason | None:
    """On architectures with tensor memory, training and chunk calls of float32 need a Triton that compiles them."""
    if _sm(request.device.arch) not in TENSOR_MEMORY:
        return None
    version = triton_version()
    if version >= TENSOR_MEMORY_TRITON or not version:
        return None
    if not request.needs_grad and not (request.dtype == "float32" and request.op.startswith("chunk_")):
        return None
    return Reason(
        "compiler",
        "older versions cannot compile the kernels for training, or for chunk calls of float32, for this GPU",
        f"Triton {'.'.join(map(str, version))} for {request.device.arch}",
        "Triton 3.9 or later",
    )


@common.reads_no_lengths
def norm_dims(request: Request) -> Reason | None:
    """The norm of the output is over all of v, so a program holds the whole state of a head."""
    size = decode_tiles.padded(request.K) * decode_tiles.padded(request.V)
    if not request.has("norm_weight") or size <= decode_tiles.MAX_TILE:
        return None
    return Reason(
        "head_dim",
        "holds the whole state of a head in registers where there is a norm_weight",
        f"K={request.K}, V={request.V}",
        f"K * V of at most {decode_tiles.MAX_TILE}, both counted as the next power of two",
    )


@common.reads_no_lengths
def dtypes(request: Request) -> Reason | None:
    """16- and 32-bit floats everywhere; float64 is left to the reference backend."""
    if request.dtype not in FLOATS:
        return Reason("dtype", "takes 16- and 32-bit floats", request.dtype, " or ".join(FLOATS))
    for name, spec in request.tensors:
        if spec.dtype == "float64":
            return Reason("dtype", f"takes no float64 {name}", spec.dtype, " or ".join(FLOATS))
    return None


def size(request: Request) -> Reason | None:
    """Tokens of a sequence and programs of a launch are counted in 32 bits."""
    if request.T >= MAX_TOKENS or request.B * request.T * request.HV >= MAX_TOKENS * 16:
        got = f"B={request.B}, T={request.T}, HV={request.HV}"
        return Reason("too_large", "counts chunks in 32 bits", got, "T < 2**30 and B*T*HV < 2**34")
    return None
