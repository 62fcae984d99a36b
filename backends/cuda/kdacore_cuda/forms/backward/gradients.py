"""Host side of the backward of ``chunk_kda`` on Hopper.

Everything is recomputed from the inputs (where the forward has kept nothing,
:mod:`kdacore_cuda.forms.kept.sizes` and :mod:`kdacore_cuda.forms.segments.saved`), in these launches:
prepare (operands of each chunk), scan (states forward and their gradients in reverse, side by side in
one grid; with few heads in segments, :mod:`kdacore_cuda.forms.backward.segments`), grads (every input
gradient of each chunk), and sums (over the value heads of a group, and over chunks). Nothing is read
back from the device.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ArrayKind, ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.backward.kernels import (
    GROUPS_THREADS,
    SUMS_THREADS,
    ChunkBackwardKernel,
    grads_kernel,
    groups_kernel,
    one_way_warpgroups,
    prepare_kernel,
    scan_kernel,
    scan_warpgroups,
    sums_kernel,
)
from kdacore_cuda.forms.backward.segments import ChunkBackwardSegmentsPlan, ScanLaunch
from kdacore_cuda.forms.backward.sizes import READ_BY_SCAN_ONLY
from kdacore_cuda.forms.backward.sizes import WORKSPACE as WORKSPACE
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.kept.sizes import kept_arrays
from kdacore_cuda.forms.segments import saved as chunk_kept_segments
from kdacore_cuda.kernel_parameters import GATES, GROUPS, SUMS, TYPES
from kdacore_cuda.request_encoding import (
    chunk_flags,
    contiguous_token_strides,
    division,
    has_bounded_gate,
    items_for_choice,
    type_code,
)
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import address, aligned, contiguous, token_arguments

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")

CHUNK, HALF, QUARTER = 64, 32, 16
LOG2E = 1.4426950408889634
LARGEST_FLOAT16 = 65504.0
UNBOUNDED_FLOOR = -13.75
"""The lowest log2 decay of one token with an unbounded gate, so that one exponent anchor serves a
quarter of a chunk.

exp(g) is then at least 7e-5. A state that should have decayed further keeps that part of itself,
far below what bfloat16 resolves. Tokens whose decay was raised to the floor have gradient 0.
"""

_TOKENS = ("q", "k", "v", "g", "beta")
_STRIDES = tuple(f"{name}_{axis}" for name in _TOKENS for axis in ("sb", "st", "sh"))

Arrays = dict[str, "torch.Tensor"]
"""Tensors by the name of their field in the kernels' parameters."""


class ChunkBackwardPlan(NamedTuple):
    """What the request alone determines."""

    slots: int
    """Chunks, unused slots of a pack included."""
    arch: str
    float_gate: bool
    """g is passed to the kernels as float32, not bfloat16."""
    bounded: bool
    """Gates are bounded: one exponent anchor serves half a chunk, not a quarter."""
    grouped: bool
    """HV > H."""
    strides: tuple[int, ...]
    """Of contiguous q, k, v, g and beta."""
    sizes: dict[str, Any]
    """The parameters that are numbers."""
    kind: ArrayKind = "torch"
    """Of the call's arrays."""

    def grid(self, kernel: ChunkBackwardKernel, device: int) -> int:
        """Blocks of a launch."""
        s = self.sizes
        return kernel.grid(s["units"], s["N"] * s["HV"], multiprocessors(self.kind, device))


def _make_plan(r: Request) -> ChunkBackwardPlan:
    NT = -(-r.T // CHUNK)
    slots = r.T // CHUNK + r.N if r.packed else r.B * NT
    bounded = has_bounded_gate(r)
    # Slightly below the bound: after rounding, a decay at the bound must not count as below the
    # floor.
    floor = (r.lower_bound or 0.0) * LOG2E * 1.0001 if bounded else UNBOUNDED_FLOOR
    return ChunkBackwardPlan(
        slots=slots,
        arch=arch_of(r),
        float_gate=type_code(r, "g") != TYPES["bfloat16"],
        bounded=bounded,
        grouped=r.HV != r.H,
        strides=contiguous_token_strides(r),
        sizes={
            "T": r.T,
            "units": slots * r.HV,
            **_divisions(hv=r.HV, chunks=NT),
            "N": r.N,
            "H": r.H,
            "HV": r.HV,
            "NT": NT,
            "gate": GATES[r.gate],
            "flags": chunk_flags(r),
            "beta_type": type_code(r, "beta"),
            "bias_type": type_code(r, "dt_bias"),
            "scale": r.scale,
            "lower_bound": r.lower_bound or 0.0,
            "floor": floor,
            "centre": float(round(-floor * (HALF if bounded else QUARTER) / 2)),
        },
        kind=r.kind,
    )


def _divisions(**divisors: int) -> dict[str, int]:
    sizes = {}
    for name, divisor in divisors.items():
        sizes[f"{name}_factor"], sizes[f"{name}_shift"] = division(max(divisor, 1))
    return sizes


plan_of = PlanCache(_make_plan)


@cache
def launcher(kernel: ChunkBackwardKernel) -> Launcher:
    """The launcher of one kernel."""
    return Launcher(kernel.source, kernel.params, kernel.threads, kernel.shared)


def make_workspace(plan: ChunkBackwardPlan, like: torch.Tensor, *names: str) -> Arrays:
    """Uninitialised arrays of the workspace ``[slots, HV, elements]`` on ``like``'s device; see
    :data:`WORKSPACE`."""
    lead = plan.slots, plan.sizes["HV"]
    forms = {name: WORKSPACE[name] for name in names}
    return {
        name: like.new_empty((*lead, size), dtype=getattr(torch, dtype))
        for name, (size, dtype) in forms.items()
    }


def given_arrays(**arrays: torch.Tensor | None) -> Arrays:
    """Those arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


def launch(
    kernel: ChunkBackwardKernel,
    plan: ChunkBackwardPlan,
    inputs: ChunkInputs,
    arrays: Arrays,
    blocks: int | None = None,
) -> None:
    """Launch one kernel.

    Args:
        kernel: which one.
        plan: the call's.
        inputs: the call's arrays.
        arrays: the workspace, outputs and gradients that the kernel takes, by field name; other
            fields are 0.
        blocks: of the grid; None: as many as the kernel says.

    Raises BackendBuildError or DriverError.
    """
    addresses, strides, kept = token_arguments(inputs, False, plan.strides)
    small = given_arrays(
        A_log=contiguous(inputs.A_log),
        dt_bias=contiguous(inputs.dt_bias),
        cu_seqlens=contiguous(inputs.cu_seqlens),
        h0=contiguous(inputs.initial_state),
    )
    named = dict(zip(_TOKENS, addresses, strict=True)) | dict(zip(_STRIDES, strides, strict=True))
    named |= {name: x.data_ptr() for name, x in (small | arrays).items()} | plan.sizes
    values = tuple(named.get(name, 0) for name, _ in kernel.params.fields)
    like = inputs.q
    if blocks is None:
        blocks = plan.grid(kernel, like.device.index)
    torch_launch.launch(launcher(kernel), blocks, plan.arch, like, values)
    del kept, small  # copies live until the launch is queued


class Scan(NamedTuple):
    """The launches between prepare and gradients, to be made in order."""

    launches: tuple[ScanLaunch, ...]
    plan: ChunkBackwardPlan
    """The call's, with the parameters that say how sequences are cut."""
    workspace: Arrays
    """What they need beside :data:`WORKSPACE`."""


def scan_launches(
    request: Request, index: int, kept_segments: bool = False
) -> tuple[tuple[ScanLaunch, ...], ChunkBackwardSegmentsPlan | None]:
    """The launches of the scan that this call uses on device ``index``, and their plan if it is cut
    in segments. ``kept_segments``: maps and states of the forward's are there."""
    if kept_segments:
        segments = chunk_backward_segments.plan_of_kept(request)
        return segments.launches, segments
    if chosen(request).backward_in_segments:
        segments = chunk_backward_segments.plan_of(request)
        return segments.launches, segments
    heads, available = items_for_choice(request), multiprocessors(request.kind, index)
    kernel = scan_kernel(scan_warpgroups(heads, available))
    return (ScanLaunch("scan", kernel, plan_of(request).grid(kernel, index)),), None


def reverse_launch(request: Request, index: int) -> ScanLaunch:
    """The launch that takes the place of prepare and scan where the forward kept what they make:
    gradients of the states alone. Of the scan's blocks the reverse ones come first."""
    warpgroups = one_way_warpgroups(items_for_choice(request), multiprocessors(request.kind, index))
    return ScanLaunch("scan", scan_kernel(warpgroups), 2 // warpgroups * request.N * request.HV)


def scan_of(request: Request, like: torch.Tensor, kept: torch.Tensor | None = None) -> Scan:
    """The scan that this call uses on ``like``'s device. Allocates its workspace.

    Args:
        request: the call.
        like: one of its arrays.
        kept: the maps and states of segments that the forward kept.
    """
    plan = plan_of(request)
    launches, segments = scan_launches(request, like.device.index, kept is not None)
    if segments is None:
        return Scan(launches, plan, {})
    at_hand: Arrays = {}
    if kept is not None:
        at_hand = chunk_kept_segments.kept_arrays(kept, segments.stored_segments * request.HV)
    workspace = chunk_backward_segments.make_workspace(segments, request.HV, like, set(at_hand))
    return Scan(launches, plan._replace(sizes={**plan.sizes, **segments.sizes}), workspace | at_hand)


def backward(request: Request, inputs: ChunkInputs, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of ``chunk_kda`` with respect to every differentiable input.

    Args:
        request: the call that the forward served; bfloat16 q, k, v, K = V = 128.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.
        saved: what the forward kept, or nothing: then it is recomputed, to the same bits
            (:mod:`kdacore_cuda.forms.kept.sizes`), or in other segments
            (:mod:`kdacore_cuda.forms.segments.saved`).
        grads: those of ``o`` ``[B, T, HV, V]`` and of ``final_state`` (``request.state_shape``);
            either may be None.

    Returns:
        Gradients with the shape and dtype of their inputs, None where the input is None.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    plan = plan_of(request)
    x = inputs._replace(g=inputs.g.float()) if inputs.g.dtype == torch.float16 else inputs
    d_o = x.v.new_zeros(x.v.shape) if grads.o is None else aligned(grads.o.contiguous())
    d_ht = None if grads.final_state is None else grads.final_state.contiguous()
    d_h0 = None if x.initial_state is None else x.initial_state.new_empty(x.initial_state.shape)

    if saved and chosen(request).saves == "operands":
        work = kept_arrays(saved[0], plan.sizes["units"]) | make_workspace(plan, x.q, "dh", "dr")
        reverse = reverse_launch(request, x.q.device.index)
        launch(reverse.kernel, plan, x, work | given_arrays(d_o=d_o, d_ht=d_ht, d_h0=d_h0), reverse.blocks)
        found = finish(request, plan, x, work, d_o)
        return found._replace(g=narrowed(found.g, inputs.g.dtype), initial_state=d_h0)

    work = make_workspace(plan, x.q, *WORKSPACE)
    scan = scan_of(request, x.q, saved[0] if saved else None)
    plan = scan.plan
    # For all of them: prepare reads fewer.
    first = work | scan.workspace | given_arrays(d_o=d_o, d_ht=d_ht, d_h0=d_h0)
    launch(prepare_kernel(plan.float_gate, plan.bounded), plan, x, first)
    for _, kernel, blocks in scan.launches:
        launch(kernel, plan, x, first, blocks)
    del scan, first
    for name in READ_BY_SCAN_ONLY:
        del work[name]

    found = finish(request, plan, x, work, d_o)
    return found._replace(g=narrowed(found.g, inputs.g.dtype), initial_state=d_h0)


def narrowed(dg: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a gate in the dtype of the gate, which kernels do not write if it is float16. It saturates."""
    return dg if dg.dtype == dtype else dg.clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16).to(dtype)


def finish(
    request: Request, plan: ChunkBackwardPlan, x: ChunkInputs, work: Arrays, d_o: torch.Tensor
) -> InputGrads:
    """The launches behind the scan: gradients of every input but the initial state.

    Args:
        request: the call.
        plan: its plan.
        x: its arrays, g as the kernels take it.
        work: what the scan leaves, the names of :data:`WORKSPACE` that gradients are made of.
        d_o: the gradient of ``o``.

    Raises BackendBuildError or DriverError.
    """
    out = _make_gradients(request, plan, x)
    sums = make_partial_sums(request, plan, x)
    grads_arrays = work | out | sums | {"d_o": d_o}
    launch(grads_kernel(plan.float_gate, plan.grouped, plan.bounded), plan, x, grads_arrays)
    dq, dk = out["dq"], out["dk"]
    if plan.grouped:
        dq, dk = _sum_group(plan, x.q, dq), _sum_group(plan, x.k, dk)
    d_A, d_bias = _sum_chunks(plan, x, sums)
    return InputGrads(dq, dk, out["dv"], out["dg"], out["dbeta"], d_A, d_bias)


def _make_gradients(request: Request, plan: ChunkBackwardPlan, x: ChunkInputs) -> Arrays:
    """What grads writes: dq and dk ``[B, T, HV, K]``, of each value head (float32 if grouped); dv,
    dg and dbeta."""
    dtype = torch.float32 if plan.grouped else x.q.dtype
    per_value_head = (request.B, request.T, request.HV, request.K)
    return {
        **{name: x.q.new_empty(per_value_head, dtype=dtype) for name in ("dq", "dk")},
        **{f"d{name}": y.new_empty(y.shape) for name, y in (("v", x.v), ("g", x.g), ("beta", x.beta))},
    }


def make_partial_sums(request: Request, plan: ChunkBackwardPlan, x: ChunkInputs) -> Arrays:
    """Arrays for the gradients of A_log ``[slots, HV]`` and dt_bias ``[slots, HV, K]``, float32,
    one sum per chunk.

    Only of those that are given. Zero for a pack, whose unused slots no kernel writes; else
    uninitialised.
    """
    make = x.q.new_zeros if request.packed else x.q.new_empty
    lead = (plan.slots, request.HV)
    A = None if x.A_log is None else make(lead, dtype=torch.float32)
    bias = None if x.dt_bias is None else make((*lead, request.K), dtype=torch.float32)
    return given_arrays(dA_part=A, dbias_part=bias)


def _sum_chunks(
    plan: ChunkBackwardPlan, inputs: ChunkInputs, sums: Arrays
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of A_log and dt_bias, with their shapes and dtypes."""
    A, bias = (None if x is None else x.new_empty(x.shape) for x in (inputs.A_log, inputs.dt_bias))
    if A is None and bias is None:
        return None, None
    types = (0 if x is None else TYPES[str(x.dtype).removeprefix("torch.")] for x in (A, bias))
    addresses = (address(sums.get("dA_part")), address(sums.get("dbias_part")), address(A), address(bias))
    HV = plan.sizes["HV"]
    values = (*addresses, plan.slots, HV, *types)
    torch_launch.launch(_sums_launcher(), HV, plan.arch, inputs.q, values)
    return A, bias


def _sum_group(plan: ChunkBackwardPlan, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The gradient of ``x`` (q or k) from the float32 ones of its value heads, the norm's
    derivative applied."""
    x = aligned(x)
    out = x.new_empty(x.shape)
    rows = x.numel() // x.shape[-1]
    sizes = (plan.sizes[name] for name in ("H", "HV", "flags"))
    addresses = (x.data_ptr(), part.data_ptr(), out.data_ptr())
    values = (*addresses, *x.stride()[:3], plan.sizes["T"], rows, *sizes)
    torch_launch.launch(_groups_launcher(), -(-rows // (GROUPS_THREADS // 32)), plan.arch, x, values)
    return out


@cache
def _sums_launcher() -> Launcher:
    return Launcher(sums_kernel(), SUMS, SUMS_THREADS, 4 * SUMS_THREADS)


@cache
def _groups_launcher() -> Launcher:
    return Launcher(groups_kernel(), GROUPS, GROUPS_THREADS, 0)
