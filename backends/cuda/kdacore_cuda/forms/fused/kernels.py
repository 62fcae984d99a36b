"""The kernels of the fused form: how each is compiled."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.architectures import HOPPER, SHARED_LIMITS, has_hopper_kernel
from kdacore_cuda.choice import SCANNERS
from kdacore_cuda.kernel_parameters import CHECKPOINT_TAIL, CHUNK_FORWARD
from kdacore_cuda.runtime.kernel import Kernel, make_kernel


@cache
def chunk_forward_kernel(
    K: int,
    cluster: int,
    bounded: bool,
    float_gate: bool,
    arch: str = HOPPER,
    many_short: bool = False,
    helped: bool = False,
    narrow: bool = False,
) -> Kernel:
    """The chunk forward kernel. ``bounded``, ``float_gate`` and ``narrow`` are as of
    :mod:`kdacore_cuda.forms.backward.kernels`.

    Args:
        K: head dim, K = V.
        cluster: one of :func:`cluster_sizes`.
        arch: the real architecture to compile for.
        many_short: that of many short sequences (:func:`kdacore_cuda.choice.are_many_short`).
        helped: others prepare steps (:func:`kdacore_cuda.choice.preparing_clusters`).
    """
    common = {"K_DIM": K, "V_DIM": K, "CLUSTER": cluster, "BOUNDED": bounded, "G_FLOAT": float_gate}
    if has_hopper_kernel(K, arch):
        own = _hopper_flags(cluster, many_short, helped)
        return make_kernel(
            "sm90/chunk_forward/chunk_forward", CHUNK_FORWARD, **common, **own, NARROW=narrow or None
        )
    portable = _portable_flags(K, cluster, bounded, arch)
    return make_kernel("common/chunk_forward/chunk_forward", CHUNK_FORWARD, **common, **portable)


TAIL_BLOCKS = 4
"""Of :func:`checkpoint_tail_kernel`: blocks a checkpoint and value head."""


@cache
def checkpoint_tail_kernel() -> Kernel:
    """From the state at the start of a step to the one before a token in it, on Hopper, K = V = 128."""
    return make_kernel("sm90/chunk_forward/checkpoint_tail", CHECKPOINT_TAIL)


def _hopper_flags(cluster: int, many_short: bool, helped: bool) -> dict[str, int | None]:
    """A block has 4 scan warps (64 columns of V), 8 slice warps (32 channels of half a chunk each) and 2 solver warps.
    The solvers' warpgroup is filled up to 4 warps, as reallocating registers requires.

    The four warpgroups of a block have 512 registers a thread in all: one scan, two slice and one solve, or in clusters
    of four, three slice and one solve, or one scan and three of little use. These are counts with which nothing spills:
    reading a spilled word back waits for the loads queued before it.
    """
    scan, slices, solve = (184, 120, 88) if cluster == SCANNERS else (232, 136, 88)
    return {
        "SCANNERS": SCANNERS,
        "STAGES": 6,
        "GROUPS": 1,
        "SOLVER_SLOTS": 4,
        "SCAN_REGISTERS": scan,
        "SLICE_REGISTERS": slices,
        "SOLVE_REGISTERS": solve,
        "MANY_SHORT": many_short,
        "HELPERS": helped or None,
    }


def _portable_flags(K: int, cluster: int, bounded: bool, arch: str) -> dict[str, int]:
    """A scan warp carries 16 columns of V, or 32 where a block has all 128. A prepare warp works on chunks of 16
    tokens; there is at most one for each chunk in the ring buffer. That holds as many as fit, a multiple of 4 so that
    every cluster size divides it."""
    has_room = SHARED_LIMITS.get(arch, 99 * 1024) > 200 * 1024
    stages = (12 if K == 128 else 16) if has_room else 4
    return {
        "WARPGROUP": arch == HOPPER and K == 64,  # its products take 64 columns of V at a time
        "STAGES": stages,
        "PREPARE_WARPS": min(8 if cluster == 1 else 4, stages // cluster),
        "SLICE_UNROLL": 2 if bounded else 1,
    }
