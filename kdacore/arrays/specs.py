"""Shapes in place of arrays, for :func:`kdacore.explain`."""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kdacore import config
from kdacore.device import problem_of
from kdacore.errors import ContractError, shown
from kdacore.ops import OpDef
from kdacore.types import ArrayKind, Device, Request, TensorSpec

DEVICE = re.compile(r"[a-z]+(:\d+)?")
"""A device in words: its type, and perhaps its index after a colon."""


@dataclass(frozen=True)
class ShapeDtype:
    """An array without its values, for ``explain``.

    Args:
        shape: the sizes.
        dtype: canonical name, for example ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"tpu"``, ..., or a ``torch.device``.
        kind: ``"numpy"``, ``"torch"`` or ``"jax"``: the library the real call would use.
        arch: architecture of that device, for example ``"sm_90"``, or ``"sm_90a"`` for the same; ``KDACORE_ARCH``
            when empty.
        requires_grad: whether the real array would need a gradient.

    Raises:
        ContractError: naming the argument that is no such thing.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    kind: ArrayKind = "numpy"
    arch: str = ""
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Sequence) or not all(_is_size(n) for n in self.shape):
            raise _error("shape", self.shape, "whole numbers below 2**63, like (1, 64, 2, 128)")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            raise _error("device", self.device, "a device like 'cpu', 'cuda' or 'cuda:1'")
        if self.kind not in tuple(SPEC_ADAPTERS):  # which compares, and hashes nothing
            raise _error("kind", self.kind, f"one of {', '.join(SPEC_ADAPTERS)}")
        for name in ("dtype", "arch"):
            if not isinstance(value := getattr(self, name), str):
                raise _error(name, value, "its name, like 'bfloat16'" if name == "dtype" else "like 'sm_90'")
        if not isinstance(self.requires_grad, bool):
            raise _error("requires_grad", self.requires_grad, "True or False")


def _is_size(n: object) -> bool:
    return isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) < 2**63


def _error(argument: str, got: object, want: str) -> ContractError:
    return ContractError("ShapeDtype", argument, f"{type(got).__name__} {shown(got)}", want)


class _SpecAdapter:
    """Reads :class:`ShapeDtype`; can explain, cannot run."""

    recognisable = False
    seen_calls: Any = None
    knows_grad = True

    def __init__(self, kind: ArrayKind) -> None:
        self.kind: ArrayKind = kind
        self.immutable = kind == "jax"

    def runner(self, plan: Any, inputs: Any) -> Any:
        return self.run

    def unwrapped(self, arrays: Any) -> Any:
        return arrays

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        return

    def admit(
        self, opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[bool, tuple[Any, ...]]:
        return False, arrays

    def unreadable(self, x: Any) -> tuple[str, str] | None:
        return None

    def unwritable(self, x: Any) -> tuple[str, str] | None:
        return None

    def check_saved(self, request: Request, inputs: Any) -> None:
        return

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        return None

    def spec(self, x: ShapeDtype) -> TensorSpec:
        return TensorSpec(tuple(x.shape), x.dtype)

    def device(self, x: ShapeDtype) -> Device:
        kind, _, index = x.device.partition(":")
        arch = "" if kind == "cpu" else config.device_arch(x.arch) or config.get().arch
        return Device(kind, int(index or 0), arch)

    def placed(self, x: ShapeDtype) -> bool:
        return True

    def obstacle(self, op: str, x: ShapeDtype) -> tuple[str, str] | None:
        wanted = problem_of(self.kind, x.device.partition(":")[0])
        return (f"an array of kind {self.kind} on {x.device}", wanted) if wanted else None

    def is_traced(self, x: ShapeDtype) -> bool:
        return False

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        return any(getattr(x, "requires_grad", False) for x in inputs)

    def host_values(self, x: Any) -> Any:
        raise ContractError("explain", "arrays", "a ShapeDtype", "arrays when values are to be checked")

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        return None

    def extent(self, x: Any) -> None:
        return None

    def run(self, plan: Any, inputs: Any) -> Any:
        raise ContractError(plan.request.op, "q", "a ShapeDtype", "an array (specs are for explain only)")


SPEC_ADAPTERS: dict[str, _SpecAdapter] = {
    "numpy": _SpecAdapter("numpy"),
    "torch": _SpecAdapter("torch"),
    "jax": _SpecAdapter("jax"),
}
