"""The contract's one implementation: a call either becomes a :class:`Request` or raises :class:`ContractError`.

Nothing here reads tensor values; see ``contract_values.py`` for the checks of ``KDACORE_VALIDATE=values``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Any

from kdacore.arrays import Adapter, adapter_of
from kdacore.errors import ContractError, shown
from kdacore.ops import FLAGS, HOST_ARGUMENTS, OpDef
from kdacore.types import Device, Gate, Request, TensorSpec

FLOATS = ("float32", "bfloat16", "float16", "float64")
INDICES = ("int32", "int64")
STATES = ("float32", "bfloat16", "float64")
MAX_VERIFY_TOKENS = 16
"""Candidate tokens a ``read_only_state`` call may carry (contract, section 2)."""

_MISSING = "None"
_SIZES = 1e-30, 1e30
"""Of numbers other than 0. Backends multiply by them in float32 and divide by them, which leaves this much room."""


class Call:
    """The arguments of one call while it is being checked."""

    def __init__(self, opdef: OpDef, inputs: Any, options: tuple[Any, ...]) -> None:
        self.op = opdef.name
        self.opdef = opdef
        self.arrays: dict[str, Any] = {
            name: x for name, x in zip(opdef.arrays, inputs, strict=True) if x is not None
        }
        self.options: dict[str, Any] = dict(zip(opdef.options, options, strict=True))
        self.specs: dict[str, TensorSpec] = {}

    def fail(self, argument: str, got: object, want: str) -> ContractError:
        return ContractError(self.op, argument, got, want)

    # --- arrays ---

    def read_arrays(self, required: Iterable[str]) -> tuple[Adapter, Device]:
        """Check that all arrays are of one kind, those that are anywhere on one device, and read their specs."""
        for name in required:
            if name not in self.arrays:
                raise self.fail(name, _MISSING, "an array")
        first = next(iter(self.arrays))
        adapter = self._adapter(first)
        at = next((n for n, x in self.arrays.items() if n not in HOST_ARGUMENTS and adapter.placed(x)), first)
        device = adapter.device(self.arrays[at])
        for name, x in self.arrays.items():
            own = self._adapter(name)
            if name in HOST_ARGUMENTS:
                self._check_host(name, own, adapter)
            else:
                if own.kind != adapter.kind:
                    raise self.fail(name, f"a {own.kind} array", f"a {adapter.kind} array, as {first} is")
                if own.placed(x) and (where := own.device(x)) != device:
                    raise self.fail(name, f"an array on {where}", f"an array on {device}, as {at} is")
                if (obstacle := own.obstacle(self.op, x)) is not None:
                    raise self.fail(name, *obstacle)
            self.specs[name] = own.spec(x)
        return adapter, device

    def _adapter(self, name: str) -> Adapter:
        adapter = adapter_of(self.arrays[name])
        if adapter is None:
            got = type(self.arrays[name])
            raise self.fail(
                name, f"{got.__module__}.{got.__qualname__}", "a NumPy array, torch.Tensor or jax.Array"
            )
        if getattr(self.arrays[name], "is_nested", False):  # torch's, which has no shape
            raise self.fail(name, "a nested tensor", "a tensor; sequences of a pack follow one another in it")
        return adapter

    def _check_host(self, name: str, own: Adapter, adapter: Adapter) -> None:
        if own.kind not in (adapter.kind, "numpy"):
            raise self.fail(name, f"a {own.kind} array", f"a NumPy or {adapter.kind} array on the host")
        if own.device(self.arrays[name]).type != "cpu":
            raise self.fail(name, f"an array on {own.device(self.arrays[name])}", "an array on the host")

    def dtype(self, name: str, allowed: tuple[str, ...], why: str = "") -> str:
        """The dtype of a given array, which must be one of ``allowed``."""
        spec = self.specs[name]
        if spec.dtype not in allowed:
            raise self.fail(name, f"dtype {spec.dtype}", f"dtype {' or '.join(allowed)}{why}")
        return spec.dtype

    def shape(self, name: str, want: tuple[int, ...], letters: str) -> None:
        """A given array must have exactly this shape; ``letters`` names its axes."""
        got = self.specs[name].shape
        if got != want:
            raise self.fail(name, f"shape {list(got)}", f"shape [{letters}] = {list(want)}")

    def rank(self, name: str, letters: str) -> tuple[int, ...]:
        """A given array must have one positive size for each axis in ``letters``."""
        got = self.specs[name].shape
        if len(got) != len(letters.split(", ")):
            raise self.fail(name, f"shape {list(got)}", f"{len(letters.split(', '))} dimensions [{letters}]")
        if any(size < 1 for size in got):
            raise self.fail(name, f"shape {list(got)}", f"positive sizes [{letters}]")
        return got

    def length(self, name: str, letters: str) -> int:
        """The length of a given vector."""
        return self.rank(name, letters)[0]

    # --- options ---

    def flag(self, name: str) -> bool:
        """A flag must be a bool, not merely truthy."""
        value = self.options.get(name, False)
        if value is not True and value is not False:
            raise self.fail(name, shown(value), "True or False")
        return value

    def real(self, name: str) -> float | None:
        """None or a finite real number: 0, or one of a size that can be computed with."""
        value = self.options.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise self.fail(name, f"{type(value).__name__} {shown(value)}", "a finite real number")
        try:
            number = float(value)
        except OverflowError:
            raise self.fail(name, "a number that no float holds", "a finite real number") from None
        if not math.isfinite(number):
            raise self.fail(name, shown(value), "a finite real number")
        if number and not _SIZES[0] <= abs(number) <= _SIZES[1]:
            raise self.fail(name, shown(value), "0, or a number of 1e-30 to 1e30 in size")
        return number

    def integer(self, name: str) -> int | None:
        """None or an int."""
        value = self.options.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise self.fail(name, f"{type(value).__name__} {shown(value)}", "an integer")
        return int(value)


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
    call = Call(opdef, inputs, options)
    for name in opdef.options:
        if name in FLAGS:
            call.flag(name)
    if opdef.family == "stage":
        from kdacore.dispatch.validate_stages import build_stage

        request, adapter = build_stage(call)
    elif opdef.family == "gate":
        request, adapter = _build_gate(call)
    else:
        request, adapter = _build_whole(call)
    grad = adapter.needs_grad(tuple(inputs)) if needs_grad is None else needs_grad
    if grad and (obstacle := _not_differentiable(call)) is not None:
        if adapter.knows_grad:
            raise obstacle
        grad = False
    return dataclasses.replace(request, needs_grad=grad), adapter


def common_fields(call: Call, adapter: Adapter, device: Device) -> dict[str, Any]:
    """The fields of a Request that every op fills the same way."""
    return {
        "op": call.op,
        "kind": adapter.kind,
        "device": device,
        "traced": any(adapter.is_traced(x) for n, x in call.arrays.items() if n not in HOST_ARGUMENTS),
        "tensors": tuple(call.specs.items()),
        "scalar_gate": call.opdef.scalar_gate,
    }


# --- chunk_kda, fused_recurrent_kda and their one-gate-per-head twins ---------------------------------------------


def _build_whole(call: Call) -> tuple[Request, Adapter]:
    adapter, device = call.read_arrays(("q", "k", "v", "g", "beta"))
    sizes = _check_qkv(call)
    dtype = call.dtype("q", FLOATS)
    check_gate_arrays(call, sizes["HV"], sizes["K"])
    sizes["N"] = check_packing(call, sizes["B"], adapter)
    gate, lower_bound = _check_gate_options(call)
    beta_sigmoid, neg_eigval = call.flag("use_beta_sigmoid_in_kernel"), call.flag("allow_neg_eigval")
    if neg_eigval and not beta_sigmoid:
        raise call.fail("allow_neg_eigval", "True", "use_beta_sigmoid_in_kernel=True with it")
    scale = call.real("scale")
    fields = common_fields(call, adapter, device)
    fields.update(
        **sizes,
        dtype=dtype,
        gate=gate,
        lower_bound=lower_bound,
        safe_gate=call.flag("safe_gate"),
        scale=sizes["K"] ** -0.5 if scale is None else scale,
        qk_l2norm=call.flag("use_qk_l2norm_in_kernel"),
        beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval,
        state_v_first=call.flag("state_v_first"),
        output_final_state=call.flag("output_final_state"),
        packed="cu_seqlens" in call.arrays,
    )
    if call.opdef.family == "chunk":
        _check_chunk_options(call, fields)
    else:
        _check_pool(call, fields, adapter)
    fields["state_dtype"] = _check_state(call, fields)
    return Request(**fields), adapter


def _check_qkv(call: Call) -> dict[str, int]:
    B, T, H, K = call.rank("q", "B, T, H, K")
    dtype = call.dtype("q", FLOATS)
    call.shape("k", (B, T, H, K), "B, T, H, K")
    got = call.rank("v", "B, T, HV, V")
    if got[:2] != (B, T):
        raise call.fail("v", f"shape {list(got)}", f"shape [B, T, HV, V] with B={B}, T={T} as in q")
    HV, V = got[2:]
    if HV % H:
        raise call.fail("v", f"HV={HV} value heads", f"a multiple of the H={H} heads of q and k")
    for name in ("k", "v"):
        if call.specs[name].dtype != dtype:
            raise call.fail(name, f"dtype {call.specs[name].dtype}", f"dtype {dtype}, as q has")
    if call.opdef.scalar_gate:
        call.shape("g", (B, T, HV), "B, T, HV")
    else:
        call.shape("g", (B, T, HV, K), "B, T, HV, K")
    call.shape("beta", (B, T, HV), "B, T, HV")
    allowed = FLOATS if dtype == "float64" else FLOATS[:3]
    for name in ("g", "beta"):
        call.dtype(name, allowed)
    return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}


def check_gate_arrays(call: Call, HV: int, K: int) -> None:
    """``A_log`` and ``dt_bias``, wherever an op takes them. ``K`` is 0 for one gate per head."""
    scalar = call.opdef.scalar_gate or K == 0
    if "A_log" in call.arrays:
        call.dtype("A_log", ("float32", "float64"))
        call.shape("A_log", (HV,), "HV")
    if "dt_bias" in call.arrays:
        call.dtype("dt_bias", FLOATS)
        got = call.specs["dt_bias"].shape
        wanted = [(HV,)] if scalar else [(HV, K), (HV * K,)]
        if got not in wanted:
            letters = "[HV]" if scalar else "[HV, K] or [HV*K]"
            raise call.fail(
                "dt_bias",
                f"shape {list(got)}",
                f"shape {letters} = {' or '.join(str(list(w)) for w in wanted)}",
            )


def _check_gate_options(call: Call) -> tuple[Gate, float | None]:
    in_kernel, safe = call.flag("use_gate_in_kernel"), call.flag("safe_gate")
    lower_bound = call.real("lower_bound")
    if not in_kernel:
        for name in ("A_log", "dt_bias"):
            if name in call.arrays:
                raise call.fail(name, "an array", "None, or use_gate_in_kernel=True so that it has an effect")
        if lower_bound is not None and not safe:
            raise call.fail(
                "lower_bound", lower_bound, "None, or safe_gate=True or use_gate_in_kernel=True with it"
            )
    if safe and lower_bound is None:
        raise call.fail("safe_gate", "True with lower_bound=None", "a lower_bound in [-5, 0) with it")
    check_lower_bound(call, lower_bound, safe)
    if not in_kernel:
        return "log", lower_bound
    if lower_bound is not None:
        return "sigmoid", lower_bound
    if "A_log" not in call.arrays:
        raise call.fail("A_log", _MISSING, "a float32 array [HV]: the unbounded gate needs it")
    return "softplus", None


def check_lower_bound(call: Call, lower_bound: float | None, safe: bool) -> None:
    """A lower bound is negative, and no less than -5 when ``safe_gate`` promises it."""
    if lower_bound is None:
        return
    if lower_bound >= 0:
        raise call.fail("lower_bound", lower_bound, "a negative number")
    if safe and lower_bound < -5:
        raise call.fail("lower_bound", lower_bound, "a number in [-5, 0) when safe_gate=True")


def check_packing(call: Call, B: int, adapter: Adapter) -> int:
    """``cu_seqlens`` and its host copy. Returns the number of sequences."""
    if "cu_seqlens" not in call.arrays:
        if "cu_seqlens_cpu" in call.arrays:
            raise call.fail("cu_seqlens_cpu", "an array", "None, or cu_seqlens with it")
        return B
    if B != 1:
        raise call.fail("cu_seqlens", f"an array with B={B}", "B == 1: a pack is one row of tokens")
    call.dtype("cu_seqlens", INDICES)
    n = call.length("cu_seqlens", "N+1")
    if n < 2:
        raise call.fail("cu_seqlens", f"shape [{n}]", "shape [N+1] with N >= 1")
    if "cu_seqlens_cpu" in call.arrays:
        call.dtype("cu_seqlens_cpu", INDICES)
        call.shape("cu_seqlens_cpu", (n,), "N+1")
    return n - 1


def _check_chunk_options(call: Call, fields: dict[str, Any]) -> None:
    if call.options["cp"] is not None:
        raise call.fail(
            "cp", type(call.options["cp"]).__name__, "None: context parallelism is not part of this version"
        )
    fields["disable_recompute"] = call.flag("disable_recompute")
    every = call.integer("checkpoint_every")
    if every is not None and (not 64 <= every < 2**31 or every % 64):
        raise call.fail("checkpoint_every", shown(every), "a positive multiple of 64 below 2**31")
    fields["checkpoint_every"] = every or 0


# --- states and state pools ---------------------------------------------------------------------------------------


def _check_state(call: Call, fields: dict[str, Any]) -> str:
    """``initial_state`` (a pool when indices are given). Returns the dtype of every state of the call."""
    default = "float64" if fields["dtype"] == "float64" else "float32"
    if "initial_state" not in call.arrays:
        return default
    dtype = call.dtype("initial_state", STATES if default == "float64" else STATES[:2])
    tail = (fields["V"], fields["K"]) if fields["state_v_first"] else (fields["K"], fields["V"])
    letters = "HV, V, K" if fields["state_v_first"] else "HV, K, V"
    rows = fields.get("pool_size") or fields["N"]
    call.shape(
        "initial_state", (rows, fields["HV"], *tail), f"{'P' if fields.get('pool_size') else 'N'}, {letters}"
    )
    return dtype


def _check_pool(call: Call, fields: dict[str, Any], adapter: Adapter) -> None:
    inplace, read_only = call.flag("inplace_state"), call.flag("read_only_state")
    for name, flag in (("inplace_state", inplace), ("read_only_state", read_only)):
        if flag and "initial_state" not in call.arrays:
            raise call.fail(name, "True", "an initial_state with it")
    if read_only:
        _check_read_only(call, fields, inplace)
    if "state_indices" in call.arrays:
        _check_indices(call, fields)
    elif "num_accepted_tokens" in call.arrays:
        raise call.fail("num_accepted_tokens", "an array", "None, or state_indices [N, T] with it")
    if "out" in call.arrays:
        if adapter.immutable:
            raise call.fail("out", f"a {adapter.kind} array", "None: these arrays cannot be written")
        call.shape("out", (fields["B"], fields["T"], fields["HV"], fields["V"]), "B, T, HV, V")
        call.dtype("out", (call.specs["v"].dtype,), ", as v has")
    if inplace and adapter.immutable and not fields["output_final_state"]:
        raise call.fail(
            "inplace_state",
            "True with output_final_state=False",
            f"output_final_state=True: {adapter.kind} arrays cannot be written, the new pool is returned",
        )
    fields["inplace_state"], fields["read_only_state"] = inplace, read_only


def _check_read_only(call: Call, fields: dict[str, Any], inplace: bool) -> None:
    if inplace:
        raise call.fail("read_only_state", "True with inplace_state=True", "one of the two")
    if fields["output_final_state"]:
        raise call.fail("read_only_state", "True with output_final_state=True", "output_final_state=False")
    sequences = fields["N"] if fields["packed"] else 1
    if fields["T"] > MAX_VERIFY_TOKENS * sequences:
        raise call.fail(
            "read_only_state",
            f"T={fields['T']}",
            f"1 to {MAX_VERIFY_TOKENS} candidate tokens for each sequence",
        )


def _check_indices(call: Call, fields: dict[str, Any]) -> None:
    call.dtype("state_indices", INDICES)
    if "initial_state" not in call.arrays:
        raise call.fail("state_indices", "an array", "None, or the state pool as initial_state with it")
    got, N = call.specs["state_indices"].shape, fields["N"]
    if len(got) not in (1, 2) or got[0] != N:
        raise call.fail("state_indices", f"shape {list(got)}", f"shape [N] or [N, T] with N={N}")
    if len(got) == 2:
        if "num_accepted_tokens" not in call.arrays:
            raise call.fail("num_accepted_tokens", _MISSING, "an array [N]: state_indices [N, T] needs it")
        if not fields["packed"] and got[1] < fields["T"]:
            raise call.fail(
                "state_indices", f"shape {list(got)}", f"a column for each of T={fields['T']} tokens"
            )
        if got[1] < 1:
            raise call.fail("state_indices", f"shape {list(got)}", "positive sizes [N, T]")
    if "num_accepted_tokens" in call.arrays:
        if len(got) != 2:
            raise call.fail("num_accepted_tokens", "an array", "None, or state_indices [N, T] with it")
        call.dtype("num_accepted_tokens", INDICES)
        call.shape("num_accepted_tokens", (N,), "N")
    pool = call.rank("initial_state", "P, HV, V, K" if fields["state_v_first"] else "P, HV, K, V")
    fields["pool_size"], fields["state_indices_ndim"] = pool[0], len(got)


def _not_differentiable(call: Call) -> ContractError | None:
    """Pools, in-place writes and the stages are for inference; say so instead of losing gradients."""
    if call.opdef.family == "stage":
        want = "no gradients: call stages under torch.no_grad()"
        return call.fail(call.opdef.arrays[0], "inputs that require grad", want)
    for name in ("state_indices", "out"):
        if name in call.arrays:
            want = "None, or torch.no_grad() around it"
            return call.fail(name, "an array, with inputs that require grad", want)
    for name in ("inplace_state", "read_only_state"):
        if call.options.get(name):
            want = "False, or torch.no_grad() around it"
            return call.fail(name, "True, with inputs that require grad", want)
    return None


# --- kda_gate -----------------------------------------------------------------------------------------------------


def _build_gate(call: Call) -> tuple[Request, Adapter]:
    adapter, device = call.read_arrays(("g",))
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
        raise call.fail("A_log", _MISSING, "a float32 array [HV], or lower_bound for the bounded gate")
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
