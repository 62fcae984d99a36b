"""A call either becomes a :class:`Request` or raises :class:`ContractError`: the only place where calls are validated.

Nothing here reads tensor values; see ``values.py`` for the checks of ``KDACORE_VALIDATE=values``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kdacore.arrays import Adapter
from kdacore.contract.checks import (
    FLOATS,
    MISSING,
    Arguments,
    check_gate_arrays,
    check_lower_bound,
    common_fields,
)
from kdacore.contract.tokens import build_with_tokens, check_gates
from kdacore.errors import ContractError
from kdacore.ops import OpDef, Option
from kdacore.types import Request


def build_request(
    opdef: OpDef, inputs: Any, options: tuple[Any, ...], *, needs_grad: bool | None = None
) -> tuple[Request, Adapter]:
    """Check one call and describe it without its values.

    Args:
        opdef: the op.
        inputs: its arrays, in an instance of ``opdef.inputs``.
        options: its options, in the order of ``opdef.options``.
        needs_grad: overrides what the arrays say (compiled graphs run below autograd).

    Raises:
        ContractError: naming the argument, what it got and what was wanted.
    """
    call = Arguments(opdef, inputs, options)
    flags, others = _check_options(call)
    if opdef.family == "stage":
        from kdacore.contract.stages import build_stage

        request, adapter = build_stage(call)
    elif opdef.family == "decode":
        from kdacore.contract.decode import build_decode

        request, adapter = build_decode(call)
    elif opdef.family == "commit":
        from kdacore.contract.records import build_commit

        request, adapter = build_commit(call)
    elif opdef.family == "gate":
        request, adapter = _build_gate(call)
    else:
        request, adapter = _build_whole(call)
    grad = adapter.needs_grad(tuple(inputs)) if needs_grad is None else needs_grad
    if grad and (obstacle := _not_differentiable(call)) is not None:
        if adapter.knows_grad:
            raise obstacle
        grad = False
    features = opdef.features_used(
        call.arrays, call.options, request.gate, grouped=bool(request.HV != request.H)
    )
    return (
        dataclasses.replace(request, **flags, needs_grad=grad, features=features, options=others),
        adapter,
    )


def _check_options(call: Arguments) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Check every option that needs nothing but its definition.

    In ``call.options`` each is then Python's own number or flag: a subclass of the caller's may compare as it likes.

    Returns:
        The flags by field of the request, and by name the options without a field that were changed.
    """
    flags: dict[str, Any] = {}
    others: list[tuple[str, Any]] = []
    for option in call.opdef.option_arguments:
        value = call.options[option.name] = _CHECKS[option.kind](call, option)
        if option.kind == "flag" and option.field not in ("", "gate"):
            flags[option.field] = value
        elif not option.field and value != option.default:
            others.append((option.name, value))
    return flags, tuple(others)


def _check_ranks(call: Arguments, option: Option) -> None:
    """Calls on several ranks are taken apart before they come here."""
    if call.options[option.name] is not None:
        got = type(call.options[option.name]).__name__
        raise call.fail(option.name, got, "None here: kdacore.parallel serves calls on several ranks")


_CHECKS: dict[str, Callable[[Arguments, Option], Any]] = {
    "flag": lambda call, option: call.flag(option.name),
    "number": lambda call, option: call.real(option.name),
    "count": lambda call, option: call.integer(option.name),
    "choice": lambda call, option: call.choice(option.name, option.choices),
    "ranks": _check_ranks,
}


# --- chunk_kda, fused_recurrent_kda and the ops with one gate per head ---------------------------------------------


def _build_whole(call: Arguments) -> tuple[Request, Adapter]:
    adapter, device = call.read_arrays(call.opdef.required)
    return build_with_tokens(call, adapter, device, _check_qkv(call), "q")


def _check_qkv(call: Arguments) -> dict[str, int]:
    B, T, H, K = call.rank("q", "B, T, H, K")
    dtype = call.dtype("q", FLOATS)
    call.shape("k", (B, T, H, K), "B, T, H, K")
    got = call.rank("v", "B, T, HV, V")
    if got[:2] != (B, T):
        raise call.fail_shape("v", f"shape [B, T, HV, V] with B={B}, T={T} as in q")
    HV, V = got[2:]
    if HV % H:
        raise call.fail_shape("v", f"a multiple of the H={H} heads of q and k for HV")
    for name in ("k", "v"):
        if call.specs[name].dtype != dtype:
            raise call.fail(name, f"dtype {call.specs[name].dtype}", f"dtype {dtype}, as q has")
    check_gates(call, B, T, HV, K)
    return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}


# --- gradients ---------------------------------------------------------------------------------------------------


_INFERENCE_FAMILIES = {"stage": "stages", "commit": "it", "decode": "it"}
_INFERENCE_ARRAYS = ("state_indices", "has_initial_state", "write_indices", "write_pool", "out")


def _not_differentiable(call: Arguments) -> ContractError | None:
    """Pools, in-place writes and the stages are for inference; say so instead of losing gradients."""
    if call.opdef.family in _INFERENCE_FAMILIES:
        want = f"no gradients: call {_INFERENCE_FAMILIES[call.opdef.family]} under torch.no_grad()"
        return call.fail(call.opdef.arrays[0], "inputs that require grad", want)
    for name in _INFERENCE_ARRAYS:
        if name in call.arrays:
            want = "None, or torch.no_grad() around it"
            return call.fail(name, "an array, with inputs that require grad", want)
    for name in ("inplace_state", "read_only_state"):
        if call.options.get(name):
            want = "False, or torch.no_grad() around it"
            return call.fail(name, "True, with inputs that require grad", want)
    return None


# --- kda_gate -----------------------------------------------------------------------------------------------------


def _build_gate(call: Arguments) -> tuple[Request, Adapter]:
    adapter, device = call.read_arrays(call.opdef.required)
    shape = call.specs["g"].shape
    if len(shape) == 3:
        (B, T, HV), K = call.rank("g", "B, T, HV"), 0
    else:
        B, T, HV, K = call.rank("g", "B, T, HV, K")
    dtype = call.dtype("g", FLOATS)
    check_gate_arrays(call, HV, K)
    lower_bound = call.real("lower_bound")
    check_lower_bound(call, lower_bound, safe=False)
    if lower_bound is None and "A_log" not in call.arrays:
        raise call.fail("A_log", MISSING, "a float32 array [HV], or lower_bound for the bounded gate")
    fields = common_fields(call, adapter, device)
    fields.update(
        B=B,
        T=T,
        H=HV,
        HV=HV,
        K=max(K, 1),
        V=1,
        N=B,
        dtype=dtype,
        state_dtype="float32",
        lower_bound=lower_bound,
    )
    fields.update(gate="softplus" if lower_bound is None else "sigmoid", scalar_gate=K == 0)
    return Request(**fields), adapter
