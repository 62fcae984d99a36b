"""Host side of the backward of ``chunk_kda`` on Hopper: torch tensors in, a handful of launches, nothing read back.

Everything is recomputed from the inputs: prepare (operands of each chunk), scan (states forward and their gradients
in reverse, side by side in one grid), gradients (all of a chunk), and sums over chunks and over a group's value heads.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import runtime
from kdacore_cuda.arrays import (
    Plans,
    aligned,
    build_arch,
    chunk_flags,
    contiguous_strides,
    flat,
    pointer,
    rows,
    spec_type,
)
from kdacore_cuda.backward_kernels import (
    GROUPS_THREADS,
    SUMS_THREADS,
    BackwardKernel,
    grads_kernel,
    groups_kernel,
    prepare_kernel,
    scan_kernel,
    scan_warpgroups,
    sums_kernel,
)
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import CHUNK_BACKWARD, GATES, GROUPS, SUMS, TYPES
from kdacore_cuda.verifiers import is_safe

CHUNK, HALF, QUARTER = 64, 32, 16
LOG2E = 1.4426950408889634
UNBOUNDED_FLOOR = -13.75
"""Where the log2 decay of a step without a bound is cut off, for one anchor to serve a quarter of a chunk.

exp(g) then never falls below 7e-5. What a state keeps too much of is that part of it, far below what bfloat16 resolves;
steps that are cut off have gradient 0.
"""

WORKSPACE: dict[str, tuple[int, torch.dtype]] = {
    **dict.fromkeys(("kg", "kg_low", "qg", "w", "u", "dr"), (64 * 128, torch.bfloat16)),
    **dict.fromkeys(("aqk", "inv"), (64 * 64, torch.bfloat16)),
    **dict.fromkeys(("h", "dh"), (128 * 128, torch.bfloat16)),
    "last": (3 * 128, torch.float32),
    "rows": (3 * 64, torch.float32),
}
"""Elements of each array of the workspace for one chunk and value head, and their dtype; what they hold is said in
csrc/sm90/chunk_backward/workspace.cuh."""

_ROWS = ("q", "k", "v", "g", "beta")
_STRIDES = tuple(f"{name}_{axis}" for name in _ROWS for axis in ("sb", "st", "sh"))

Arrays = dict[str, torch.Tensor]
"""Tensors by the name of their field in the kernels' parameters."""


class Plan(NamedTuple):
    """What depends on the request alone."""

    slots: int
    arch: str
    float_gate: bool
    safe: bool
    """Gates are bounded: one anchor serves half a chunk, not a quarter."""
    grouped: bool
    strides: tuple[int, ...]
    sizes: dict[str, Any]
    """The parameters that are numbers."""

    def grid(self, kernel: BackwardKernel, device: int | None) -> int:
        """Blocks of a launch."""
        s = self.sizes
        return kernel.grid(s["units"], s["N"] * s["HV"], runtime.processors(device))


def _make_plan(r: Request) -> Plan:
    NT = -(-r.T // CHUNK)
    slots = r.T // CHUNK + r.N if r.packed else r.B * NT
    safe = is_safe(r)
    # A hair below the bound: a step at the bound must not count as cut off after rounding.
    floor = (r.lower_bound or 0.0) * LOG2E * 1.0001 if safe else UNBOUNDED_FLOOR
    return Plan(
        slots=slots,
        arch=build_arch(r.device.arch),
        float_gate=spec_type(r, "g") != TYPES["bfloat16"],
        safe=safe,
        grouped=r.HV != r.H,
        strides=contiguous_strides(r),
        sizes={
            "T": r.T,
            "units": slots * r.HV,
            "N": r.N,
            "H": r.H,
            "HV": r.HV,
            "NT": NT,
            "gate": GATES[r.gate],
            "flags": chunk_flags(r),
            "beta_type": spec_type(r, "beta"),
            "bias_type": spec_type(r, "dt_bias"),
            "scale": r.scale,
            "lower_bound": r.lower_bound or 0.0,
            "floor": floor,
            "centre": float(round(-floor * (HALF if safe else QUARTER) / 2)),
        },
    )


plan_of = Plans(_make_plan)


@cache
def launcher(kernel: BackwardKernel) -> Launcher:
    """The launcher of one kernel; all of them take the same parameters."""
    return Launcher(kernel.source, CHUNK_BACKWARD, kernel.threads, kernel.shared)


def workspace(plan: Plan, like: torch.Tensor, *names: str) -> Arrays:
    """Fresh arrays of the workspace, not initialised."""
    places = plan.slots, plan.sizes["HV"]
    return {name: like.new_empty((*places, WORKSPACE[name][0]), dtype=WORKSPACE[name][1]) for name in names}


def present(**arrays: torch.Tensor | None) -> Arrays:
    """Those that are given."""
    return {name: x for name, x in arrays.items() if x is not None}


def run(kernel: BackwardKernel, plan: Plan, inputs: ChunkInputs, arrays: Arrays) -> None:
    """One launch: ``arrays`` are the workspace, the outputs and the gradients that the kernel takes; others are 0."""
    pointers, strides, kept = rows(inputs, False, plan.strides)
    parameters = present(
        A_log=flat(inputs.A_log),
        dt_bias=flat(inputs.dt_bias),
        cu_seqlens=flat(inputs.cu_seqlens),
        h0=flat(inputs.initial_state),
    )
    named = dict(zip(_ROWS, pointers, strict=True)) | dict(zip(_STRIDES, strides, strict=True))
    named |= {name: x.data_ptr() for name, x in (parameters | arrays).items()} | plan.sizes
    values = tuple(named.get(name, 0) for name, _ in CHUNK_BACKWARD.fields)
    like = inputs.q
    runtime.launch(launcher(kernel), plan.grid(kernel, like.device.index), plan.arch, like, values)
    del kept, parameters  # copies live until the launch is queued


def scan_of(request: Request, index: int) -> BackwardKernel:
    """The scan that this call takes on device ``index``."""
    return scan_kernel(scan_warpgroups(request.N * request.HV, runtime.processors(index)))


def backward(request: Request, inputs: ChunkInputs, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of ``o`` and ``final_state`` of ``chunk_kda`` with respect to every differentiable input.

    Args:
        request: the call the forward served; bfloat16 q, k, v, K = V = 128.
        inputs: its arrays.
        saved: not needed; everything is recomputed.
        grads: ``o`` ``[B, T, HV, V]`` and ``final_state`` (the call's state shape), either may be None.

    Returns:
        Gradients shaped and typed like their inputs, None where the input is None.

    Raises BackendBuildError or DriverError.
    """
    r, plan = request, plan_of(request)
    x = inputs._replace(g=inputs.g.float()) if inputs.g.dtype == torch.float16 else inputs
    d_o = x.v.new_zeros(x.v.shape) if grads.o is None else aligned(grads.o.contiguous())
    d_ht = None if grads.final_state is None else grads.final_state.contiguous()
    d_h0 = None if x.initial_state is None else x.initial_state.new_empty(x.initial_state.shape)

    work = workspace(plan, x.q, *WORKSPACE)
    run(prepare_kernel(plan.float_gate, plan.safe), plan, x, work)
    run(scan_of(request, x.q.device.index), plan, x, work | present(d_o=d_o, d_ht=d_ht, d_h0=d_h0))
    for name in ("kg", "kg_low", "qg", "w", "aqk", "inv"):
        del work[name]

    parts_type = torch.float32 if plan.grouped else x.q.dtype
    dq, dk = (x.q.new_empty((r.B, r.T, r.HV, r.K), dtype=parts_type) for _ in range(2))
    dv, dg, dbeta = (like.new_empty(like.shape) for like in (x.v, x.g, x.beta))
    parts = _partial_sums(request, plan, x)
    out = present(d_o=d_o, dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta)
    run(grads_kernel(plan.float_gate, plan.grouped, plan.safe), plan, x, work | out | parts)
    if plan.grouped:
        dq, dk = _sum_group(plan, x.q, dq), _sum_group(plan, x.k, dk)
    d_A, d_bias = _sum_chunks(plan, x, parts)
    return InputGrads(dq, dk, dv, dg.to(inputs.g.dtype), dbeta, d_A, d_bias, d_h0)


def _partial_sums(request: Request, plan: Plan, x: ChunkInputs) -> Arrays:
    """One float32 sum a chunk and head for each parameter there is. Unused slots of a pack are never written: zero."""
    make = x.q.new_zeros if request.packed else x.q.new_empty
    places = (plan.slots, request.HV)
    A = None if x.A_log is None else make(places, dtype=torch.float32)
    bias = None if x.dt_bias is None else make((*places, request.K), dtype=torch.float32)
    return present(dA_part=A, dbias_part=bias)


def _sum_chunks(
    plan: Plan, inputs: ChunkInputs, parts: Arrays
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of A_log and dt_bias, shaped and typed like them."""
    A, bias = (None if x is None else x.new_empty(x.shape) for x in (inputs.A_log, inputs.dt_bias))
    if A is None and bias is None:
        return None, None
    types = (0 if x is None else TYPES[str(x.dtype).removeprefix("torch.")] for x in (A, bias))
    pointers = (pointer(parts.get("dA_part")), pointer(parts.get("dbias_part")), pointer(A), pointer(bias))
    HV = plan.sizes["HV"]
    runtime.launch(_sums(), HV, plan.arch, inputs.q, (*pointers, plan.slots, HV, *types))
    return A, bias


def _sum_group(plan: Plan, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The gradient of q or k from those of its value heads, float32 and before the norm."""
    x = aligned(x)
    out = x.new_empty(x.shape)
    count = x.numel() // x.shape[-1]
    sizes = (plan.sizes[name] for name in ("H", "HV", "flags"))
    pointers = (x.data_ptr(), part.data_ptr(), out.data_ptr())
    values = (*pointers, *x.stride()[:3], plan.sizes["T"], count, *sizes)
    runtime.launch(_groups(), -(-count // (GROUPS_THREADS // 32)), plan.arch, x, values)
    return out


@cache
def _sums() -> Launcher:
    return Launcher(sums_kernel(), SUMS, SUMS_THREADS, 4 * SUMS_THREADS)


@cache
def _groups() -> Launcher:
    return Launcher(groups_kernel(), GROUPS, GROUPS_THREADS, 0)
