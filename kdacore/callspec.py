"""A call described by sizes and switches: what the command line, the doctor and the feature matrix ask about."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from kdacore import api, stages
from kdacore.arrays.specs import ShapeDtype
from kdacore.dispatch import validate
from kdacore.errors import ContractError
from kdacore.ops import OPS, OpDef
from kdacore.types import ArrayKind, Gate, Request, Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call without arrays. Sizes and options mean what they mean in :func:`kdacore.chunk_kda`."""

    op: str = "chunk_kda"
    B: int = 1
    T: int = 256
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    kind: ArrayKind = "numpy"
    arch: str = ""
    grad: bool = False
    traced: bool = False
    gate: Gate = "log"
    lower_bound: float | None = None
    safe_gate: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    initial_state: str = ""
    """dtype of the initial state; empty for none."""
    final_state: bool = False
    state_v_first: bool = False
    sequences: int = 0
    """Number of packed sequences; 0 for a batch."""
    checkpoint_every: int | None = None
    disable_recompute: bool = False
    pool: int = 0
    """Rows of the state pool; 0 for no ``state_indices``."""
    accepted: bool = False
    """Speculative decoding: 2-D ``state_indices`` and ``num_accepted_tokens``."""
    inplace_state: bool = False
    read_only_state: bool = False
    out: bool = False
    chunk_size: int = 64

    @property
    def N(self) -> int:
        return self.sequences or self.B


def arguments(call: CallSpec) -> dict[str, Any]:
    """The keyword arguments of the call, with :class:`~kdacore.ShapeDtype` in place of arrays.

    Raises:
        ContractError: the call asks for something that its op has no argument for.
    """
    opdef = OPS[call.op]
    _refuse_strays(call, opdef)
    arrays = {name: _array(call, name) for name in opdef.arrays if _optional(call).get(name, True)}
    options = {name: value for name, value in _options(call).items() if name in opdef.options}
    return {**arrays, **options}


def _refuse_strays(call: CallSpec, opdef: OpDef) -> None:
    """Nothing that was asked for may fall away: the answer would be of another call."""
    asked, usual = ({**_options(c), **_optional(c)} for c in (call, _PLAIN))
    taken = {*opdef.options, *opdef.arrays}
    if "A_log" in taken:  # its parameters alone may ask for a gate
        taken.add("use_gate_in_kernel")
    for name, value in asked.items():
        if name not in taken and value != usual[name]:
            raise ContractError(call.op, name, repr(value), "nothing: the op has no such argument")


def request(call: CallSpec) -> Request:
    """The validated request of the call. Raises :class:`kdacore.ContractError` when it breaks the contract."""
    opdef = OPS[call.op]
    given = arguments(call)
    parameters = inspect.signature(public(call.op)).parameters
    inputs = opdef.inputs(*(given.get(name) for name in opdef.arrays))
    options = tuple(given.get(name, parameters[name].default) for name in opdef.options)
    built, _ = validate.build_request(opdef, inputs, options, needs_grad=call.grad or call.traced)
    return built


def explain(call: CallSpec, backend: str | None = None) -> Selection:
    """What dispatch would do with the call."""
    return api.explain(call.op, **arguments(call), backend=backend)


def public(op: str) -> Any:
    """The public function of an op."""
    return getattr(api, op, None) or getattr(stages, op)


def _optional(call: CallSpec) -> dict[str, bool]:
    """Arrays that a call may do without, and whether this one does not; of no op in particular."""
    gated = call.gate != "log" or OPS[call.op].family == "gate"
    return {
        "A_log": gated,
        "dt_bias": gated,
        "initial_state": bool(call.initial_state or call.pool),
        "cu_seqlens": bool(call.sequences),
        "cu_seqlens_cpu": False,
        "state_indices": bool(call.pool),
        "num_accepted_tokens": call.accepted,
        "out": call.out,
        "q": call.op != "kda_recompute_w_u",
    }


def _array(call: CallSpec, name: str) -> ShapeDtype:
    B, T, H, HV, K, V, N, C = call.B, call.T, call.H, call.HV, call.K, call.V, call.N, call.chunk_size
    scalar = OPS[call.op].scalar_gate
    chunks = T // C + N if call.sequences else -(-T // C)
    channels = () if scalar else (K,)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "v": (B, T, HV, V),
        "g": (B, T, HV, *channels),
        "beta": (B, T, HV),
        "A_log": (HV,),
        "dt_bias": (HV, *channels),
        "initial_state": (call.pool or N, HV, *((V, K) if call.state_v_first else (K, V))),
        "cu_seqlens": (N + 1,),
        "state_indices": (N, max(T // N if call.sequences else T, 1)) if call.accepted else (N,),
        "num_accepted_tokens": (N,),
        "out": (B, T, HV, V),
        "gc": (B, T, HV, K),
        "Aqk": (B, T, HV, C),
        "Akk": (B, T, HV, C),
        "kg": (B, T, HV, K),
        "w": (B, T, HV, K),
        "u": (B, T, HV, V),
        "v_new": (B, T, HV, V),
        "h": (B, chunks, HV, K, V),
    }
    return ShapeDtype(shapes[name], _dtype(call, name), call.device, call.kind, call.arch, _grad(call, name))


def _dtype(call: CallSpec, name: str) -> str:
    if name in ("cu_seqlens", "state_indices", "num_accepted_tokens"):
        return "int32"
    if name in ("A_log", "dt_bias", "gc"):
        return "float32"
    if name == "initial_state":
        return call.initial_state or "float32"
    return call.dtype


def _grad(call: CallSpec, name: str) -> bool:
    return call.grad and name in ("q", "k", "v", "g", "beta")


def _options(call: CallSpec) -> dict[str, Any]:
    return {
        "output_final_state": call.final_state,
        "use_qk_l2norm_in_kernel": call.l2norm,
        "use_gate_in_kernel": call.gate != "log",
        "use_beta_sigmoid_in_kernel": call.beta_sigmoid,
        "allow_neg_eigval": call.neg_eigval,
        "safe_gate": call.safe_gate,
        "lower_bound": call.lower_bound,
        "state_v_first": call.state_v_first,
        "disable_recompute": call.disable_recompute,
        "checkpoint_every": call.checkpoint_every,
        "inplace_state": call.inplace_state,
        "read_only_state": call.read_only_state,
        "chunk_size": call.chunk_size,
    }


_PLAIN = CallSpec()
