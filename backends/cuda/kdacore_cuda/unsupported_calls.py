"""The calls that the CUDA kernels cannot serve: a verifier for each reason, beside the options that
:func:`kdacore_cuda.make_backend` does not list. It returns the Reason, or None for a call without it.

Verifiers read shapes, dtypes and flags, never values.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kdacore import verifiers as common
from kdacore.lazy import install_line
from kdacore.ops import POOL_FEATURES
from kdacore.types import Reason, Request
from kdacore_cuda.architectures import BUILD_ARCHS, FIRST_ARCH, HEAD_DIMS
from kdacore_cuda.fitted_head_dims import SIZE, blocks_of, is_fitted
from kdacore_cuda.gated_delta_variant import PACKAGED, variant_of

FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")

architecture = common.compute_capability(FIRST_ARCH)
"""The kernels need bfloat16 products and asynchronous copies."""
head_dims = common.head_dims(HEAD_DIMS, equal=True)
"""Kernels are compiled for fixed head dims."""
chunk_forward_dtype = common.dtypes("bfloat16")
"""The chunk forward multiplies bfloat16."""
gated_delta_dtype = common.dtypes(*HALVES)
"""Operands of the gated delta rule have either type."""
float_dtypes = common.dtypes(*FLOATS, arrays=("g", "beta", "dt_bias"))
"""The kernels read any 16- or 32-bit float, of gates, betas and biases; the recurrent ones of q, k and v too."""
window_dtypes = common.dtypes(*FLOATS, arrays=("conv_state",))
"""Of ``commit_records``."""
state_dtype = common.state_dtypes("float32", "bfloat16")
recurrent_state_dtype = common.state_dtypes(*FLOATS)
"""The recurrent and fused decode kernels take states of any 16- or 32-bit float."""
sequence_length = common.lengths(2**30 - 1)
"""Lengths inside a sequence are 32-bit."""
intra_head_dim = common.key_dims(HEAD_DIMS)
recompute_head_dims = common.head_dims(HEAD_DIMS)
"""Of the stages; K and V may differ."""


def known_sizes(request: Request) -> Reason | None:
    """Grids are computed while a call is traced, from numbers, not from symbols of jax.export."""
    if isinstance(request.B * request.T * request.N, int):
        return None
    got = f"B={request.B}, T={request.T}, N={request.N}"
    return Reason("traced", "needs sizes that are known while tracing", got, "numbers")


@cache
def _has_compiler() -> bool:
    from kdacore.machine import version_of

    return bool(version_of("cuda-bindings"))


@cache
def _has_cubins() -> bool:
    """False of the wheel for every machine, which has no machine code."""
    return any((Path(__file__).parent / "cubins").glob("*.cubin"))


@common.reads_no_lengths
def compiler(request: Request) -> Reason | None:
    """Where no machine code is packaged, NVRTC compiles it on the first call."""
    arch = request.device.arch
    if _has_compiler() or (arch in BUILD_ARCHS and _has_cubins()):
        return None
    why = "has no packaged kernels for this architecture and no NVRTC to compile them"
    want = f"{install_line('cuda')}, or {' or '.join(BUILD_ARCHS)} and a wheel for Linux"
    return Reason("unavailable", why, arch, want)


@common.reads_no_lengths
def gated_delta_variant(request: Request) -> Reason | None:
    """Only the usual head dims and dtypes of the gated delta rule have packaged machine code."""
    made = dataclasses.replace(request, K=SIZE, V=SIZE) if is_fitted(request) else request
    if variant_of(made, cut=False) in PACKAGED:
        return None
    got = f"K={request.K}, V={request.V}, {request.dtype}"
    return _unpackaged(f"{got}, checkpoint_offsets" if "checkpoint_offsets" in request.features else got)


@common.reads_no_lengths
def recurrent_variant(request: Request) -> Reason | None:
    """Only the usual state dtypes of the recurrent ops have packaged machine code for every call."""
    return _unpackaged("float16 states") if request.state_dtype == "float16" else None


@common.reads_no_lengths
def decode_records(request: Request) -> Reason | None:
    """Of the fused decode step with records the usual head dim and state dtypes have packaged machine code."""
    if not request.has("record_indices") or (request.K == 128 and request.state_dtype != "float16"):
        return None
    return _unpackaged(f"records with K={request.K}, {request.state_dtype} states")


def _unpackaged(got: str) -> Reason | None:
    if _has_compiler():
        return None
    why = "has no packaged kernels for this call and no NVRTC to compile them"
    return Reason("unavailable", why, got, install_line("cuda"))


XLA_VERSIONS = ((0, 3), (0, 4))
"""Versions of XLA's interface to handlers (xla/ffi/api/c_api.h) that our handlers were read against: those of jaxlib
0.10 to 0.11."""


@cache
def _xla_version() -> tuple[int, int] | None:
    """The version that this jaxlib has, as its header says; None if it does not, or if JAX is not installed, as where
    the doctor asks about calls that could be made."""
    if find_spec("jax") is None:
        return None
    import jax.ffi

    try:
        header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


@common.reads_no_lengths
def xla_version(request: Request) -> Reason | None:
    """Calls from JAX go through XLA's interface to handlers, whose versions are not interchangeable."""
    if request.kind != "jax" or (found := _xla_version()) in XLA_VERSIONS:
        return None
    got = f"XLA FFI {found[0]}.{found[1]}" if found else "no jaxlib with the header"
    want = "XLA FFI " + " or ".join(f"{major}.{minor}" for major, minor in XLA_VERSIONS)
    return Reason("unavailable", "does not know this version of XLA's interface to handlers", got, want)


def grid_size(request: Request) -> Reason | None:
    """A one-dimensional grid has at most 2**31 - 1 blocks."""
    if not isinstance(request.N, int) or (items := request.N * request.HV) * 16 < 2**31:
        return None
    return Reason("too_large", "has too many sequences and heads for one launch", f"N*HV={items}", "< 2**27")


@common.reads_no_lengths
def gradients(request: Request) -> Reason | None:
    """The backward exists for Hopper."""
    arch = request.device.arch
    if not request.needs_grad or arch == "sm_90":
        return None
    return Reason("gradients", "has a backward for Hopper only", arch, "sm_90, or no gradients")


@common.reads_no_lengths
def float16_gradients(request: Request) -> Reason | None:
    """Factors of l2norm reach 1000 where a row is tiny: what gradients are made of then leaves the range of float16."""
    if request.dtype != "float16" or not (request.needs_grad and request.qk_l2norm):
        return None
    got, want = "float16 with l2norm in the kernel", "bfloat16, or q and k that are normalised before"
    return Reason("gradients", "would lose gradients of tiny rows", got, want)


@common.reads_no_lengths
def hopper(request: Request) -> Reason | None:
    """The gated delta rule's kernels use warpgroup products."""
    arch = request.device.arch
    return None if arch == "sm_90" else Reason("device", "has this op for Hopper only", arch, "sm_90")


_IN_PLACE = POOL_FEATURES | {"checkpoint_offsets"}


@common.reads_no_lengths
def chunk_head_dims(request: Request) -> Reason | None:
    """Head dims from 64 that no kernel has are filled up to 128 and wider values are split, which pools of states and
    checkpoints at offsets, as they lie in memory, cannot be. Of smaller ones too much would be zeros."""
    if not is_fitted(request):
        return None
    got = f"K={request.K}, V={request.V}"
    if not (64 <= request.K <= 128 and request.V >= 64):
        return Reason("head_dim", "has kernels for other head dims", got, _WANTED[request.scalar_gate])
    padded = 128 * 128 * blocks_of(request)
    if request.op == "chunk_gated_delta_rule" and padded > 2 * request.K * request.V:
        # benchmarks/results/h200/h200-head-dims.json
        return Reason("head_dim", "would compute with more zeros than numbers", got, _OWN_DIMS)
    if request.features & _IN_PLACE:
        own = f"{_OWN_DIMS if request.scalar_gate else 'K = V = 128'}, or no pool"
        return Reason("head_dim", "has kernels for pools of other states", got, own)
    return None


_OWN_DIMS = "multiples of 16 up to 128, K from 32"
_WANTED = {False: "K 64 to 128, V 64 or more", True: f"{_OWN_DIMS}; or K 64 to 128, V 64 or more"}
"""By whether there is one decay a head."""


@common.reads_no_lengths
def stage_dtypes(request: Request) -> Reason | None:
    """q, k, v and Akk have one 16-bit dtype.

    An inverse in another dtype would have to be rounded, and w of nearly collinear keys would be
    inaccurate.
    """
    if request.dtype not in HALVES:
        return Reason("dtype", "takes 16-bit q, k, v in its stages", request.dtype, " or ".join(HALVES))
    for name in ("q", "k", "v", "Akk"):
        if request.has(name) and (got := request.spec(name).dtype) != request.dtype:
            return Reason("dtype", "takes other dtypes in its stages", f"{name}: {got}", request.dtype)
    return None


@common.reads_no_lengths
def stage_chunk(request: Request) -> Reason | None:
    """Stages work in chunks of 64 tokens."""
    if request.chunk_size == 64:
        return None
    return Reason("options", "has stages for one chunk size", f"chunk_size={request.chunk_size}", "64")


def stage_grid_size(request: Request) -> Reason | None:
    """One block per chunk and value head, counted in 31 bits."""
    blocks = (1 if request.packed else request.B) * request.num_chunks * request.HV
    if blocks >= 2**31:
        return Reason("too_large", "has too many chunks and heads for one launch", str(blocks), "< 2**31")
    return None
