"""A decode step in one launch: the fused decode ops, and the recurrent ops with records of candidates.

Everything a call needs beyond addresses (grid, strides, the compiled kernel) depends only on the request and the
strides. It is computed once and kept; a later call costs the host one allocation and one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacore.arrays.torch.private import allocator
from kdacore.types import DecodeInputs, FastCall, Outputs, RecurrentInputs, Request
from kdacore_triton.decode_arguments import conv_strides, record_strides, strides_of, token_strides
from kdacore_triton.decode_tiles import decode_tile
from kdacore_triton.fixed_launch import PlanCache
from kdacore_triton.gate_families import GATES, beta_kind
from kdacore_triton.kernel_options import INTERPRETING
from kdacore_triton.kernels import decode as kernels
from kdacore_triton.kernels.groups import CellStrides
from kdacore_triton.launch import Grid, Launcher, current_device, next_power_of_2
from kdacore_triton.recurrent_modes import contiguous_strides, read_mode, state_strides, write_mode

launcher = Launcher(kernels.decode_kernel)

_MAX_LAUNCHES = 1024
_MAX_GRID_Y = 65535
_UNALIGNED = 15

_ROWS = ("q", "k", "v", "g", "z", "o", "dt_bias", "norm_weight", "initial_state", "target")
_CONV = ("conv_weight", "conv_bias", "conv_state", "conv_windows")
_RECORDS = ("record_update", "record_key", "record_decay")
_NUMBERS = (
    "beta", "A_log", "cu_seqlens", "state_indices", "num_accepted_tokens", "has_initial_state", "write_indices",
    "conv_indices", "record_indices", "num_replayed",
)  # fmt: skip
_TENSORS = (*_ROWS, *_CONV, *_RECORDS, *_NUMBERS)
"""The kernel's arrays in its order."""
_VECTORS = len(_TENSORS) - len(_NUMBERS)
"""The first of them, whose alignment it is compiled for; of the others it reads single numbers."""
_DENSE_LAST = ("x", "q", "k", "v", "z", "state_indices", "write_indices")
_DENSE = (
    "A_log", "dt_bias", "norm_weight", "conv_bias", "cu_seqlens", "num_accepted_tokens", "has_initial_state",
    "conv_indices", "record_indices", "num_replayed",
)  # fmt: skip
_ACTIVATIONS = {"": kernels.NO_GATE, "sigmoid": kernels.GATE_BY_SIGMOID, "silu": kernels.GATE_BY_SILU}

Inputs = DecodeInputs | RecurrentInputs


def forward(request: Request, inputs: Inputs) -> Outputs:
    """Compute the step; see ``DecodeInputs``, ``RecurrentInputs`` and ``Outputs`` for shapes and dtypes.

    Any strides are served: tokens and parameters are copied only when their last dimension is not contiguous, what is
    written never, but for ``out``. Nothing syncs with the device, so the call can be captured in a CUDA graph once it
    has run outside of one.
    """
    plan = _plan(request)
    launch = plan.launch_for(inputs)
    if launch.copied:
        inputs = inputs._replace(**{name: getattr(inputs, name).contiguous() for name in launch.copied})
    out, first = inputs.out, inputs[0]
    if not launch.fresh_o:
        o = out
    elif out is not None:
        o = out.contiguous()  # rows behind a pack keep what they hold
    else:
        o = torch.empty(plan.o_shape, dtype=first.dtype, device=first.device)
    target = None
    if plan.inplace:
        target = inputs.initial_state if inputs.write_pool is None else inputs.write_pool
    elif plan.returns_state:
        target = torch.empty(plan.state_shape, dtype=plan.state_dtype, device=first.device)
    launch.run(launch.tensors(inputs, o, target))
    if out is not None and launch.fresh_o:
        o = out.copy_(o)
    return Outputs(o, target if plan.returns_state else None)


class DecodePlan:
    """What a request determines, with one :class:`DecodeLaunch` per set of strides seen."""

    __slots__ = (
        "device",
        "inplace",
        "launches",
        "o_shape",
        "request",
        "returns_state",
        "state_dtype",
        "state_shape",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.device = request.device.index
        self.o_shape = (request.B, request.T, request.HV, request.V)
        self.state_shape = request.state_shape
        self.state_dtype = getattr(torch, request.state_dtype)
        self.inplace = request.inplace_state
        self.returns_state = request.output_final_state
        self.launches: dict[Any, DecodeLaunch] = {}

    def launch_for(self, inputs: Inputs) -> DecodeLaunch:
        """The launch for the strides of these inputs."""
        key = tuple([None if x is None else x.stride() for x in inputs])
        launch = self.launches.get(key)
        if launch is None:
            if len(self.launches) >= _MAX_LAUNCHES:
                self.launches.clear()
            launch = self.launches[key] = DecodeLaunch(self, inputs)
        return launch


class DecodeLaunch:
    """One request with one set of strides: everything but the addresses."""

    __slots__ = (
        "constexprs", "copied", "device", "fresh_o", "grid", "num_warps", "options", "prepared", "request", "scalars"
    )  # fmt: skip

    def __init__(self, plan: DecodePlan, x: Inputs) -> None:
        r = self.request = plan.request
        self.device = plan.device
        self.copied = _to_copy(r, x)
        self.fresh_o = x.out is None or x.out.stride(-1) != 1
        self.prepared: Callable[[list[Any]], None] | None = None
        x = x._replace(**{name: getattr(x, name).contiguous() for name in self.copied})
        tile = decode_tile(r)
        tail = r.packed and x.out is None
        rows = r.N + tail
        flat = rows > _MAX_GRID_Y
        self.grid: Grid = (r.H * rows, 1, 1) if flat else (r.H, rows, 1)
        self.num_warps = tile.num_warps
        self.options = tile.options(r)
        o_strides = contiguous_strides(plan.o_shape)
        if x.out is not None and not self.fresh_o:
            o_strides = x.out.stride()
        source = state_strides(r, x.initial_state)
        target = state_strides(r, getattr(x, r.written_pool) if r.inplace_state else None)
        taps = r.spec("conv_weight").shape[1] if r.has("conv_weight") else 0
        self.scalars = (
            *(r.scale, r.lower_bound or 0.0, r.norm_eps, r.T, r.H),
            *token_strides(r, x),
            *strides_of(getattr(x, "z", None), 3),
            *o_strides[:3],
            *source[:2],
            *target[:2],
            *conv_strides(x),
            *record_strides(x),
            r.V if r.has("norm_weight") and len(r.spec("norm_weight").shape) == 2 else 0,
            0 if x.state_indices is None else x.state_indices.stride(0),
            None if x.write_indices is None else x.write_indices.stride(0),
            r.null_index if r.null_index >= 0 else None,
        )
        self.constexprs: dict[str, Any] = {
            "K": r.K, "V": r.V, "KP": next_power_of_2(r.K), "BV": tile.BV, "GROUP": r.HV // r.H,
            "POOL": CellStrides(*source[2:], *target[2:]), "GATE": GATES[r.gate], "SCALAR_GATE": r.scalar_gate,
            "L2NORM": r.qk_l2norm, "BETA": beta_kind(r), "READ": read_mode(r, x), "WRITE": write_mode(r),
            "INPLACE": r.inplace_state, "PACKED": r.packed, "ONE": r.T == 1 and not r.packed, "FLAT": flat,
            "TAIL": tail, "TAPS": taps, "ACTIVATION": int(_ACTIVATIONS[r.norm_activation].value),
            "OTHER_POOL": r.write_pool_size > 0, "ROWS_ONCE": not r.op.startswith("fused_recurrent"),
            "BY_HAND": INTERPRETING,
        }  # fmt: skip

    def tensors(self, x: Inputs, o: torch.Tensor, target: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The kernel's arrays in its order."""
        found = x._asdict() | {"o": o, "target": target}
        if "x" in found:
            keys = self.request.H * self.request.K
            channels = found["x"]
            found["q"], found["k"] = channels[..., :keys], channels[..., keys : 2 * keys]
            found["v"] = channels[..., 2 * keys :]
        return [found.get(name) for name in _TENSORS]

    def run(self, tensors: list[torch.Tensor | None]) -> None:
        """Launch on the current stream. ``tensors`` as the kernel takes them; it is compiled for aligned ones."""
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        unaligned = any(address & _UNALIGNED for address in addresses[:_VECTORS])
        if self.prepared is not None and not unaligned and self.device == current_device():
            # Absent tensors are constants of the compiled kernel, so any number will do.
            self.prepared(addresses)
            return
        prepared = launcher.prepare(
            self.grid, *tensors, *self.scalars, num_warps=self.num_warps, **self.options, **self.constexprs
        )
        if prepared is not None and not unaligned:
            self.prepared = prepared.fix(self.grid, *self.scalars)


def fast_path(request: Request, inputs: Inputs) -> FastCall | None:
    """:func:`forward` for later calls with the shapes, dtypes and strides of this one, with as little work as possible.

    None unless the state is written in place, nothing has to be copied and the kernel has been launched for these
    strides. The function returned gives None for arrays that are not aligned, or not on the current device: then
    :func:`forward` must be called.
    """
    plan = _plan(request)
    launch = plan.launch_for(inputs)
    run, device, returns_state = launch.prepared, plan.device, plan.returns_state
    if run is None or launch.copied or not plan.inplace or (inputs.out is not None and launch.fresh_o):
        return None
    names = list(inputs._fields)
    out_at, state_at, pool_at = (names.index(name) for name in ("out", "initial_state", "write_pool"))
    target_at = state_at if inputs.write_pool is None else pool_at
    places, shifts = _places(request, inputs, names, out_at, target_at)
    o_shape, dtype = plan.o_shape, inputs[0].dtype
    o_strides, empty = contiguous_strides(o_shape), allocator(inputs[0].device.type)

    def step(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if device != current_device():
            return None
        o = arrays[out_at]
        if o is None:
            o = empty(o_shape, o_strides, dtype)
        found = [0 if x is None else x.data_ptr() for x in (*arrays, o)]
        addresses = [found[i] + shift for i, shift in zip(places, shifts, strict=True)]
        bits = 0
        for address in addresses[:_VECTORS]:
            bits |= address
        if bits & _UNALIGNED:
            return None
        run(addresses)
        return o, arrays[target_at] if returns_state else None, None

    return step


def _places(
    r: Request, x: Inputs, names: list[str], out_at: int, target_at: int
) -> tuple[list[int], list[int]]:
    """Of each array of the kernel: its place in the inputs with ``o`` behind them, and the bytes to add to its address.

    An absent array has the place of one that is absent.
    """
    absent = next((i for i, a in enumerate(x) if a is None and i != out_at), len(names))
    places = {name: names.index(name) if name in names else absent for name in _TENSORS}
    places |= {"o": len(names), "target": target_at}
    shifts = dict.fromkeys(_TENSORS, 0)
    if "x" in names:
        keys = r.H * r.K * x[0].element_size()
        places |= dict.fromkeys(("q", "k", "v"), names.index("x"))
        shifts |= {"k": keys, "v": 2 * keys}
    return list(places.values()), list(shifts.values())


_plan = PlanCache(DecodePlan)


def _to_copy(r: Request, x: Inputs) -> tuple[str, ...]:
    """The inputs that the kernel cannot read where they lie."""
    last = _DENSE_LAST if r.scalar_gate else (*_DENSE_LAST, "g")
    bad = [name for name in last if (a := getattr(x, name, None)) is not None and a.stride(-1) != 1]
    bad += [name for name in _DENSE if (a := getattr(x, name, None)) is not None and not a.is_contiguous()]
    return tuple(bad)
