"""The CUDA backend as data. Nothing heavy is imported until a call runs."""

from __future__ import annotations

import ctypes
from functools import cache, partial

from kdacore.hookspecs import hookimpl
from kdacore.lazy import lazy_function, package_probe
from kdacore.types import Backend, OpImpl, Requirement
from kdacore_cuda import __version__, costs, verifiers

VERIFIED = frozenset({"sm_90"})
"""Architectures the conformance suite has run on, all ops (benchmarks/results/h200/conformance-cuda.json);
others are checked once, on the machine, before auto uses them."""


DRIVER = 13000
"""The oldest CUDA version a driver may be of, as ``cuDriverGetVersion`` writes it: 13.0.

Packaged cubins are made by NVRTC 13, and so are those made here. A driver loads machine code from every minor version
of its own major one and from older majors, never from a newer major. So 13.0 serves what NVRTC 13.0 and later made (we
ship no PTX, for which that would not hold), and 12.x refuses all of it, while Triton, which brings its own assembler,
works there.
"""


@cache
def _driver_missing() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        status = driver.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return f"no CUDA driver: {error}"
    if status:
        return f"no CUDA driver: cuDriverGetVersion returned {status}"
    if number.value < DRIVER:
        return (
            f"the driver is for CUDA {_version(number.value)}; the kernels need {_version(DRIVER)} or later"
        )
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


_lazy = partial(lazy_function, "kdacore_cuda")

WHOLE = frozenset(
    {
        "beta_sigmoid",
        "final_state",
        "gate.bounded",
        "gate.unbounded",
        "grouped_value_heads",
        "initial_state",
        "neg_eigval",
        "packed",
        "qk_l2norm",
        "state_v_first",
    }
)
"""Features of the chunked and the recurrent ops that are served beyond the plain call."""
POOL = frozenset({"accepted_tokens", "inplace_state", "out", "read_only_state", "state_pool"})
"""Those of the recurrent ops alone."""


_COMMON = (
    verifiers.architecture,
    verifiers.compiler,
    verifiers.head_dims,
    verifiers.other_dtypes,
    verifiers.state_dtype,
    verifiers.long_enough_grid,
)

_STAGE = (
    verifiers.architecture,
    verifiers.compiler,
    verifiers.stage_head_dims,
    verifiers.stage_dtypes,
    verifiers.stage_chunk,
    verifiers.heads_per_group,
    verifiers.prefill_length,
    verifiers.stage_grid,
)


def _stage(function: str, *features: str) -> OpImpl:
    return OpImpl(
        forward=_lazy("stages", function),
        serves=frozenset({"grouped_value_heads", "packed", *features}),
        verifiers=_STAGE,
        verified_archs=VERIFIED,
        batch_invariant=True,
    )


def make_backend() -> Backend:
    """The backend named ``cuda``."""
    prefill = OpImpl(
        forward=_lazy("prefill", "forward"),
        backward=_lazy("backward", "backward"),
        serves=WHOLE | {"checkpoints"},
        verifiers=(*_COMMON, verifiers.prefill_dtype, verifiers.prefill_length, verifiers.gradients),
        fast_path=_lazy("prefill_repeat", "repeat"),
        verified_archs=VERIFIED,
    )
    recurrent = OpImpl(
        forward=_lazy("decode", "forward"),
        serves=WHOLE | POOL,
        verifiers=(*_COMMON, verifiers.recurrent_dtype),
        cost=costs.recurrent,
        fast_path=_lazy("decode", "repeat"),
        verified_archs=VERIFIED,
        batch_invariant=True,
    )
    return Backend(
        name="cuda",
        version=__version__,
        kinds=("torch",),
        ops={
            "chunk_kda": prefill,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
            "kda_chunk_intra": _stage("chunk_intra"),
            "kda_recompute_w_u": _stage("recompute_w_u", "q"),
        },
        summary="hand-written kernels: bfloat16 prefill, its backward on Hopper, recurrent decode, two training stages",
        requirements=(
            Requirement(
                "CUDA driver",
                _driver_missing,
                "install an NVIDIA driver for CUDA 13 (580 or later)",
                hardware=True,
            ),
            Requirement("torch", package_probe("torch"), "pip install 'kdacore[cuda]'"),
        ),
        rank=100,
        device_types=("cuda",),
        capturable=True,
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds this backend by."""
    return [make_backend()]
