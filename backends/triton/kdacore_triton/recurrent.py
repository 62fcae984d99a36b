"""The recurrent op: ``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` in one launch, planned once.

Everything a call needs beyond addresses (grid, strides, the compiled kernel) depends only on the request and the
strides. It is computed once and kept; a later call costs the host one allocation and one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kdacore.arrays.torch.private import allocator
from kdacore.types import FastCall, Outputs, RecurrentInputs, Request
from kdacore_triton import configs, decode
from kdacore_triton.decode_tiles import recurrent_config
from kdacore_triton.gate_families import GATES, beta_kind
from kdacore_triton.kernel_options import INTERPRETING
from kdacore_triton.kernels import recurrent as kernels
from kdacore_triton.kernels.groups import CellStrides
from kdacore_triton.launch import Grid, Launcher, cdiv, current_device, next_power_of_2
from kdacore_triton.recurrent_modes import contiguous_strides, read_mode, state_strides, write_mode
from kdacore_triton.stand_ins import staged, written_back

launcher = Launcher(kernels.recurrent_kernel)

_MAX_PLANS = 1024
_MAX_GRID_Y = 65535
_INT32_MAX = 2**31 - 1
_UNALIGNED = 15
_VECTORS = 8
"""The kernel's first tensors, whose alignment it is compiled for; of the others it reads single numbers."""


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """Run the recurrence; see ``RecurrentInputs`` and ``Outputs`` for shapes and dtypes.

    Any strides are served: q, k, v and g are copied only when their last dimension is not contiguous, states never.
    Nothing syncs with the device, so the call can be captured in a CUDA graph once it has run outside of one.
    """
    plan = _plan(request)
    if plan.with_records:
        return decode.forward(request, inputs)
    if plan.rounds_after:
        return _rounded(request, inputs)
    launch = plan.launch_for(inputs)
    if launch.copied:
        inputs = inputs._replace(**{name: getattr(inputs, name).contiguous() for name in launch.copied})
    (
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        state,
        cu_seqlens,
        _,
        indices,
        accepted,
        out,
        filled,
        goals,
        pool,
        *_records,
    ) = inputs
    if not launch.fresh_o:
        o = out
    elif out is not None:
        o = out.contiguous()  # rows behind a pack keep what they hold
    elif launch.v_is_dense:
        o = torch.empty_like(v)  # cheaper on the host than spelling the same thing out
    else:
        o = torch.empty(plan.o_shape, dtype=v.dtype, device=v.device)
    target = None
    if plan.inplace:
        target = state if pool is None else pool
    elif plan.returns_state:
        target = torch.empty(plan.state_shape, dtype=plan.state_dtype, device=v.device)
    launch.run(
        q, k, v, g, o, dt_bias, state, target, beta, A_log, cu_seqlens, indices, accepted, filled, goals
    )
    if out is not None and launch.fresh_o:
        o = out.copy_(o)
    return Outputs(o, target if plan.returns_state else None)


def _rounded(request: Request, inputs: RecurrentInputs) -> Outputs:
    """:func:`forward` with bfloat16 states in the interpreter, which would not round them to nearest."""
    name = request.written_pool
    wide = inputs
    if request.inplace_state:
        wide = inputs._replace(**{name: staged(getattr(inputs, name), torch.float32)})
    o, final, *_ = forward(replace(request, state_dtype="float32"), wide)
    if request.inplace_state:
        final = written_back(getattr(inputs, name), getattr(wide, name))
    elif final is not None:
        final = final.to(torch.bfloat16)
    return Outputs(o, final if request.output_final_state else None)


class RecurrentPlan:
    """What a request determines, with one :class:`RecurrentLaunch` per set of strides seen."""

    __slots__ = (
        "device", "inplace", "launches", "o_shape", "request", "returns_state", "rounds_after", "state_dtype",
        "state_shape", "with_records",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.device = request.device.index
        self.o_shape = (request.B, request.T, request.HV, request.V)
        self.state_shape = request.state_shape
        self.state_dtype = getattr(torch, request.state_dtype)
        self.rounds_after = INTERPRETING and request.state_dtype == "bfloat16"
        self.inplace = request.inplace_state
        self.returns_state = request.output_final_state
        self.with_records = request.has("record_update")
        self.launches: dict[Any, RecurrentLaunch] = {}

    def launch_for(self, inputs: RecurrentInputs) -> RecurrentLaunch:
        """The launch for the strides of these inputs."""
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            state,
            cu_seqlens,
            _,
            indices,
            accepted,
            out,
            filled,
            goals,
            pool,
            *_records,
        ) = inputs
        key = (
            q.stride(),
            k.stride(),
            v.stride(),
            g.stride(),
            beta.stride(),
            state is None or state.stride(),
            indices is None or indices.stride(),
            out is None or out.stride(),
            dt_bias is None or dt_bias.is_contiguous(),
            A_log is None or A_log.is_contiguous(),
            cu_seqlens is None or cu_seqlens.is_contiguous(),
            accepted is None or accepted.is_contiguous(),
            filled is None or filled.is_contiguous(),
            goals is None or goals.stride(),
            pool is None or pool.stride(),
        )
        launch = self.launches.get(key)
        if launch is None:
            if len(self.launches) >= _MAX_PLANS:
                self.launches.clear()
            launch = self.launches[key] = RecurrentLaunch(self, inputs)
        return launch


class RecurrentLaunch:
    """One request with one set of strides: everything but the addresses."""

    __slots__ = (
        "constexprs",
        "copied",
        "device",
        "fresh_o",
        "grid",
        "options",
        "prepared",
        "scalars",
        "v_is_dense",
    )

    def __init__(self, plan: RecurrentPlan, x: RecurrentInputs) -> None:
        r = plan.request
        self.device = plan.device
        self.copied = _to_copy(r, x)
        self.fresh_o = x.out is None or x.out.stride(-1) != 1
        self.v_is_dense = x.v.is_contiguous()
        self.prepared: Callable[[list[Any]], None] | None = None
        x = x._replace(**{name: getattr(x, name).contiguous() for name in self.copied})
        one = r.T == 1 and not r.packed
        config = recurrent_config(r)
        BV = min(config["BV"], next_power_of_2(r.V))
        programs = r.HV * cdiv(r.V, BV)
        tail = r.packed and x.out is None
        rows = r.N + tail
        flat = rows > _MAX_GRID_Y
        self.grid: Grid = (programs * rows, 1, 1) if flat else (programs, rows, 1)
        self.options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}
        o_strides = (
            x.out.stride() if x.out is not None and not self.fresh_o else contiguous_strides(plan.o_shape)
        )
        source = state_strides(r, x.initial_state)
        target = state_strides(r, getattr(x, r.written_pool) if r.inplace_state else None)
        self.scalars = (
            *(r.scale, r.lower_bound or 0.0, r.T, r.HV, r.HV // r.H),
            *(s for t in (x.q, x.k, x.v, x.g, x.beta) for s in t.stride()[:3]),
            *o_strides[:3],
            *source[:2],
            *target[:2],
            0 if x.state_indices is None else x.state_indices.stride(0),
            None if x.write_indices is None else x.write_indices.stride(0),
            r.null_index if r.null_index >= 0 else None,
        )
        inputs_reach = [_reach(t.shape, t.stride()) for t in (x.q, x.k, x.v, x.g, x.beta)]
        self.constexprs = {
            "K": r.K, "V": r.V, "KP": next_power_of_2(r.K), "BV": BV, "POOL": CellStrides(*source[2:], *target[2:]),
            "GATE": GATES[r.gate], "SCALAR_GATE": r.scalar_gate, "L2NORM": r.qk_l2norm, "BETA": beta_kind(r),
            "READ": read_mode(r, x), "WRITE": write_mode(r), "PACKED": r.packed, "ONE": one,
            "WIDE": max(_reach(plan.o_shape, o_strides), *inputs_reach) > _INT32_MAX, "FLAT": flat,
            "TAIL": tail,
        }  # fmt: skip

    def run(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream. ``tensors`` as the kernel takes them; it is compiled for aligned ones."""
        launch = self.prepared
        if launch is not None and self.device == current_device():
            # Absent tensors are constants of the compiled kernel, so any number will do.
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            a, b, c, d, e, f, g, h = addresses[:_VECTORS]
            if not (a | b | c | d | e | f | g | h) & _UNALIGNED:
                launch(addresses)
                return
        prepared = launcher.prepare(self.grid, *tensors, *self.scalars, **self.options, **self.constexprs)
        unaligned = any(x is not None and x.data_ptr() & _UNALIGNED for x in tensors[:_VECTORS])
        if prepared is not None and not unaligned:
            self.prepared = prepared.fix(self.grid, *self.scalars)


def fast_path(request: Request, inputs: RecurrentInputs) -> FastCall | None:
    """:func:`forward` for later calls with the shapes, dtypes and strides of this one, with as little work as possible.

    None unless the state is written in place, nothing has to be copied and the kernel has been launched for these
    strides. The function returned gives None for arrays that are not aligned, or not on the current device: then
    :func:`forward` must be called.
    """
    plan = _plan(request)
    if plan.with_records:
        return decode.fast_path(request, inputs)
    launch = plan.launch_for(inputs)
    run, device, returns_state = launch.prepared, plan.device, plan.returns_state
    if run is None or launch.copied or not plan.inplace or (inputs.out is not None and launch.fresh_o):
        return None
    o_shape, o_strides, dtype = plan.o_shape, contiguous_strides(plan.o_shape), inputs.v.dtype
    empty = allocator(inputs.v.device.type)

    def step(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        q, k, v, g, beta, rate, bias, state, offsets, _, indices, accepted, o, filled, goals, pool, *_ = (
            arrays
        )
        a, b, c, d = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        s = 0 if state is None else state.data_ptr()
        target, t = (state, s) if pool is None else (pool, pool.data_ptr())
        bias_at = 0 if bias is None else bias.data_ptr()
        if (a | b | c | d | s | t | bias_at) & _UNALIGNED or device != current_device():
            return None
        if o is None:
            o = empty(o_shape, o_strides, dtype)
        e = o.data_ptr()
        if e & _UNALIGNED:
            return None
        # Absent tensors are constants of the compiled kernel, so any number will do.
        run([
            a, b, c, d, e, bias_at, s, t, beta.data_ptr(),
            0 if rate is None else rate.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
            0 if indices is None else indices.data_ptr(), 0 if accepted is None else accepted.data_ptr(),
            0 if filled is None else filled.data_ptr(), 0 if goals is None else goals.data_ptr(),
        ])  # fmt: skip
        return o, target if returns_state else None, None

    return step


_known: dict[int, RecurrentPlan] = {}
_plans: dict[Request, RecurrentPlan] = {}


def _plan(request: Request) -> RecurrentPlan:
    """The plan of a request, by value; remembered by identity too, since callers reuse their requests."""
    known = _known.get(id(request))
    if known is not None and known.request is request:
        return known
    if len(_plans) >= _MAX_PLANS or len(_known) >= _MAX_PLANS:
        _forget()
    plan = _plans.get(request)
    if plan is None:
        plan = _plans[request] = RecurrentPlan(request)
    if plan.request is request:
        _known[id(request)] = plan
    return plan


def _forget() -> None:
    _known.clear()
    _plans.clear()


configs.on_change(_forget)


def _to_copy(r: Request, x: RecurrentInputs) -> tuple[str, ...]:
    """The inputs that the kernel cannot read where they lie."""
    rows = ["q", "k", "v"] if r.scalar_gate else ["q", "k", "v", "g"]
    bad = [name for name in rows if getattr(x, name).stride(-1) != 1]
    for name in ("A_log", "dt_bias", "cu_seqlens", "num_accepted_tokens", "has_initial_state"):
        if getattr(x, name) is not None and not getattr(x, name).is_contiguous():
            bad.append(name)
    for name in ("state_indices", "write_indices"):
        if getattr(x, name) is not None and getattr(x, name).stride(-1) != 1:
            bad.append(name)
    return tuple(bad)


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Offset of the last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
