"""Checks of the fused decode ops: the convolution, its state, and the norm of the output. Nothing here reads values."""

from __future__ import annotations

from typing import Any

from kdacore.arrays import Adapter
from kdacore.contract.checks import FLOATS, INDICES, MAX_VERIFY_TOKENS, MISSING, Arguments
from kdacore.contract.tokens import build_with_tokens, check_gates
from kdacore.types import Request

TAPS = (2, 3, 4)
"""Widths of the convolution."""
_OF_CONV = ("conv_bias", "conv_state", "conv_indices", "conv_windows")


def build_decode(call: Arguments) -> tuple[Request, Adapter]:
    """Check a call of a fused decode op.

    Raises:
        ContractError: naming the argument.
    """
    adapter, device = call.read_arrays(call.opdef.required)
    sizes = _check_x(call)
    check_gates(call, sizes["B"], sizes["T"], sizes["HV"], sizes["K"])
    norm = _check_norm(call, sizes)
    request, adapter = build_with_tokens(call, adapter, device, sizes, "x", **norm)
    if not request.packed and request.T > MAX_VERIFY_TOKENS:
        raise call.fail("x", f"T={request.T}", f"1 to {MAX_VERIFY_TOKENS} tokens for each sequence")
    _check_conv(call, request)
    return request, adapter


def _check_x(call: Arguments) -> dict[str, int]:
    """``x`` and the sizes of the states, which say how its channels are divided."""
    B, T, D = call.rank("x", "B, T, D")
    call.dtype("x", FLOATS)
    v_first = call.flag("state_v_first")
    _, HV, *tail = call.rank("initial_state", "P, HV, V, K" if v_first else "P, HV, K, V")
    K, V = reversed(tail) if v_first else tail
    H, rest = divmod(D - HV * V, 2 * K)
    if rest or H < 1 or HV % H:
        want = f"D = 2*H*K + HV*V channels with HV={HV}, K={K}, V={V} as in initial_state, for an H that divides HV"
        raise call.fail("x", f"D={D}", want)
    return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}


def _floats(call: Arguments) -> tuple[str, ...]:
    return FLOATS if call.specs["x"].dtype == "float64" else FLOATS[:3]


def _check_norm(call: Arguments, sizes: dict[str, int]) -> dict[str, Any]:
    """``norm_weight``, ``z`` and their options. Returns their fields of the request."""
    defaults = call.opdef.defaults
    eps, activation = call.real("norm_eps"), call.options["norm_activation"]
    if eps is None or eps <= 0:
        raise call.fail("norm_eps", eps, "a positive number")
    HV, V = sizes["HV"], sizes["V"]
    if "norm_weight" in call.arrays:
        call.dtype("norm_weight", _floats(call))
        got = call.specs["norm_weight"].shape
        if got not in ((V,), (HV, V)):
            want = f"shape [V] or [HV, V] = {[V]} or {[HV, V]}"
            raise call.fail("norm_weight", f"shape {list(got)}", want)
    elif eps != defaults["norm_eps"]:
        raise call.fail("norm_eps", eps, "the default, or norm_weight with it")
    if "z" not in call.arrays:
        if activation != defaults["norm_activation"]:
            raise call.fail("norm_activation", repr(activation), "the default, or z with it")
        return {"norm_eps": eps if "norm_weight" in call.arrays else 0.0}
    if "norm_weight" not in call.arrays:
        raise call.fail("z", "an array", "None, or norm_weight with it")
    call.dtype("z", _floats(call))
    call.shape("z", (sizes["B"], sizes["T"], HV, V), "B, T, HV, V")
    return {"norm_eps": eps, "norm_activation": activation}


def _check_conv(call: Arguments, request: Request) -> None:
    """The convolution: its weights, its state and the windows of candidates."""
    if "conv_weight" not in call.arrays:
        for name in _OF_CONV:
            if name in call.arrays:
                raise call.fail(name, "an array", "None, or conv_weight with it")
        return
    D, taps = call.specs["x"].shape[2], call.rank("conv_weight", "D, w")[1]
    call.shape("conv_weight", (D, taps), "D, w")
    if taps not in TAPS:
        raise call.fail("conv_weight", f"w={taps}", f"w of {TAPS[0]} to {TAPS[-1]}")
    call.dtype("conv_weight", _floats(call))
    if "conv_bias" in call.arrays:
        call.dtype("conv_bias", _floats(call))
        call.shape("conv_bias", (D,), "D")
    if "conv_state" not in call.arrays:
        raise call.fail("conv_state", MISSING, "an array [P, D, L], with conv_weight")
    call.dtype("conv_state", (request.dtype,), ", as x has")
    rows, _, columns = call.rank("conv_state", "P, D, L")
    call.shape("conv_state", (rows, D, columns), "P, D, L")
    if "conv_indices" in call.arrays:
        call.dtype("conv_indices", INDICES)
        call.shape("conv_indices", (request.N,), "N")
    elif not request.state_indices_ndim and rows != request.N:
        raise call.fail(
            "conv_state", f"shape {[rows, D, columns]}", f"N={request.N} rows, or conv_indices with it"
        )
    if "conv_windows" in call.arrays:
        _check_windows(call, request, D, taps)
    least = taps - 1
    if _keeps_windows(call, request) and not request.has("conv_windows"):
        least = max(least, taps + (1 if request.packed else request.T) - 2)
    if columns < least:
        raise call.fail("conv_state", f"L={columns}", f"L >= {least}: w={taps}, T={request.T}")


def _keeps_windows(call: Arguments, request: Request) -> bool:
    """Does the call leave the windows of its candidates: does it write a state after each, or records?"""
    per_token = (request.write_indices_ndim or request.state_indices_ndim) == 2
    return call.flag("inplace_state") and (per_token or request.has("record_update"))


def _check_windows(call: Arguments, request: Request, D: int, taps: int) -> None:
    if not _keeps_windows(call, request):
        want = "None, or inplace_state=True with records or with a row for the state after each token"
        raise call.fail("conv_windows", "an array", want)
    call.dtype("conv_windows", (request.dtype,), ", as x has")
    rows, tokens = call.rank("conv_windows", "R, T, w-1, D")[:2]
    call.shape("conv_windows", (rows, tokens, taps - 1, D), "R, T, w-1, D")
    if not request.packed and tokens < request.T:
        raise call.fail(
            "conv_windows", f"windows of {tokens} tokens", f"one for each of T={request.T} tokens"
        )
    if not request.has("record_indices") and rows < request.N:
        raise call.fail(
            "conv_windows", f"R={rows} rows", f"at least N={request.N}, or record_indices with it"
        )
