"""Shapes in place of arrays, for :func:`kdacore.explain`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdacore import config
from kdacore.errors import ContractError
from kdacore.types import ArrayKind, Device, TensorSpec

if TYPE_CHECKING:
    from kdacore.dispatch import Plan
    from kdacore.frameworks.recent import RecentCalls
    from kdacore.ops import OpDef


@dataclass(frozen=True)
class ShapeDtype:
    """An array without its values, for ``explain``.

    Args:
        shape: the sizes.
        dtype: canonical name, for example ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"tpu"``, ...
        kind: ``"numpy"``, ``"torch"`` or ``"jax"``: the library the real call would use.
        arch: architecture of that device, for example ``"sm_90"``; ``KDACORE_ARCH`` when empty.
        requires_grad: whether the real array would need a gradient.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    kind: ArrayKind = "numpy"
    arch: str = ""
    requires_grad: bool = False


class _SpecAdapter:
    """Reads :class:`ShapeDtype`; can explain, cannot run."""

    through_operators = False
    recent: RecentCalls | None = None
    knows_grad = True

    def __init__(self, kind: ArrayKind) -> None:
        self.kind: ArrayKind = kind
        self.immutable = kind == "jax"

    def call_compiled(self, opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object) -> Any:
        raise RuntimeError("unreachable: these arrays are never compiled")

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        return

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        return None

    def spec(self, x: ShapeDtype) -> TensorSpec:
        return TensorSpec(tuple(x.shape), x.dtype)

    def device(self, x: ShapeDtype) -> Device:
        kind, _, index = x.device.partition(":")
        arch = "" if kind == "cpu" else x.arch or config.get().arch
        return Device(kind, int(index or 0), arch)

    def placed(self, x: ShapeDtype) -> bool:
        return True

    def obstacle(self, op: str, x: ShapeDtype) -> tuple[str, str] | None:
        return None

    def is_traced(self, x: ShapeDtype) -> bool:
        return False

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        return any(getattr(x, "requires_grad", False) for x in inputs)

    def host_values(self, x: Any) -> Any:
        raise ContractError("explain", "arrays", "a ShapeDtype", "arrays when values are to be checked")

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        return None

    def run(self, plan: Plan, inputs: Any) -> Any:
        raise ContractError(plan.request.op, "q", "a ShapeDtype", "an array (specs are for explain only)")


SPEC_ADAPTERS: dict[str, _SpecAdapter] = {
    "numpy": _SpecAdapter("numpy"),
    "torch": _SpecAdapter("torch"),
    "jax": _SpecAdapter("jax"),
}
