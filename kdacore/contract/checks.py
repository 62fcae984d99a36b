"""Checks that several ops share, on the arguments of one call. Nothing here reads tensor values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from kdacore.arrays import Adapter, adapter_of
from kdacore.errors import ContractError, shown
from kdacore.ops import HOST_ARGUMENTS, OpDef
from kdacore.types import Device, TensorSpec

FLOATS = ("float32", "bfloat16", "float16", "float64")
INDICES = ("int32", "int64")
STATES = ("float32", "bfloat16", "float16", "float64")
MAX_VERIFY_TOKENS = 16
"""Candidate tokens a ``read_only_state`` call may carry (contract, section 2)."""

CHECKPOINT_STEP = 16
"""``checkpoint_offsets`` lie a multiple of this many tokens from the start of their sequence."""

MISSING = "None"
_SIZES = 1e-30, 1e30
"""Smallest and largest size of a number other than 0: backends multiply and divide by it in float32."""


class Arguments:
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
                raise self.fail(name, MISSING, "an array")
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
            kind = type(self.arrays[name])
            got = (
                f"a {kind.__name__}"
                if kind.__module__ == "builtins"
                else f"{kind.__module__}.{kind.__qualname__}"
            )
            wanted = "a NumPy array, torch.Tensor or jax.Array"
            if isinstance(self.arrays[name], list | tuple):
                wanted += ", such as torch.tensor(x) or np.array(x)"
            raise self.fail(name, got, wanted)
        if (problem := adapter.unreadable(self.arrays[name])) is not None:
            raise self.fail(name, *problem)
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
            raise self.fail_shape(name, f"shape [{letters}] = {list(want)}", want)

    def fail_shape(self, name: str, wanted: str, want: tuple[int, ...] = ()) -> ContractError:
        """The error of a given array's shape, with what would fit. ``want``: the one shape that would, if it is one."""
        from kdacore.contract import hints  # here: a call that is right does without

        shapes = {n: spec.shape for n, spec in self.specs.items()}
        return self.fail(name, f"shape {list(shapes[name])}", wanted + hints.of_shape(name, shapes, want))

    def rank(self, name: str, letters: str) -> tuple[int, ...]:
        """A given array must have one positive size for each axis in ``letters``."""
        got = self.specs[name].shape
        dimensions = len(letters.split(", "))
        if len(got) != dimensions:
            raise self.fail_shape(name, f"{dimensions} dimension{'s' * (dimensions > 1)} [{letters}]")
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
            raise self.fail(name, shown(value), "True or False" + self._as_python(name, bool))
        return value

    def _as_python(self, name: str, to: type) -> str:
        """How to pass an array where an option wants Python's own value."""
        from kdacore.contract import hints  # here: a call that is right does without

        return hints.of_option(name, self.options[name], to.__name__)

    def real(self, name: str) -> float | None:
        """None or a finite real number: 0, or one of a size that can be computed with."""
        value = self.options.get(name)
        if value is None:
            return None
        # The class is asked, not the object, which may say what it likes of itself.
        if isinstance(value, bool) or not issubclass(type(value), numbers.Real):
            want = "a finite real number" + self._as_python(name, float)
            raise self.fail(name, f"{type(value).__name__} {shown(value)}", want)
        try:
            number = float(value)
        except OverflowError:
            raise self.fail(name, "a number that no float holds", "a finite real number") from None
        except Exception as error:  # code of the caller's
            raise self.fail(name, _unconverted(value, "float", error), "a finite real number") from error
        if not math.isfinite(number):
            raise self.fail(name, shown(value), "a finite real number")
        if number and not _SIZES[0] <= abs(number) <= _SIZES[1]:
            raise self.fail(name, shown(value), "0, or a number of 1e-30 to 1e30 in size")
        return number

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of some names."""
        value = self.options.get(name)
        if type(value) is not str or value not in choices:  # a subclass may compare as it likes
            raise self.fail(name, shown(value), " or ".join([repr(c) for c in choices]))
        return value

    def integer(self, name: str) -> int | None:
        """None or an int."""
        value = self.options.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not issubclass(type(value), numbers.Integral):
            want = "an integer" + self._as_python(name, int)
            raise self.fail(name, f"{type(value).__name__} {shown(value)}", want)
        try:
            return int(value)
        except Exception as error:  # code of the caller's
            raise self.fail(name, _unconverted(value, "int", error), "an integer") from error


def _unconverted(value: object, to: str, error: Exception) -> str:
    return f"a {type(value).__name__} whose conversion to {to} raised {type(error).__name__}"


def common_fields(call: Arguments, adapter: Adapter, device: Device) -> dict[str, Any]:
    """The fields of a Request that every op fills the same way."""
    return {
        "op": call.op,
        "kind": adapter.kind,
        "device": device,
        "traced": any(adapter.is_traced(x) for n, x in call.arrays.items() if n not in HOST_ARGUMENTS),
        "tensors": tuple(call.specs.items()),
        "scalar_gate": call.opdef.scalar_gate,
    }


def check_gate_arrays(call: Arguments, HV: int, K: int) -> None:
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


def check_lower_bound(call: Arguments, lower_bound: float | None, safe: bool) -> None:
    """A lower bound is negative, and no less than -5 when ``safe_gate`` promises it."""
    if lower_bound is None:
        return
    if lower_bound >= 0:
        raise call.fail("lower_bound", lower_bound, "a negative number")
    if safe and lower_bound < -5:
        raise call.fail("lower_bound", lower_bound, "a number in [-5, 0) when safe_gate=True")


def check_packing(call: Arguments, B: int, adapter: Adapter) -> int:
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
