"""NumPy arrays (bfloat16 through ml_dtypes). No differentiation to join."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from kdacore.types import ArrayKind, Device, TensorSpec

if TYPE_CHECKING:
    from kdacore.dispatch import Plan
    from kdacore.frameworks.torch_recent import RecentCalls
    from kdacore.ops import OpDef

_CPU = Device("cpu")


class _NumpyAdapter:
    kind: ArrayKind = "numpy"
    immutable = False
    knows_grad = True
    through_operators = False
    recent: RecentCalls | None = None

    def call_compiled(self, opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object) -> Any:
        raise RuntimeError("unreachable: these arrays are never compiled")

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        try:
            return tuple([None if x is None else (x.shape, x.dtype, type(x)) for x in inputs])
        except AttributeError:  # not an array: validation names it
            return None

    def spec(self, x: Any) -> TensorSpec:
        name = x.dtype.name if x.dtype.isnative else f"{x.dtype.name} (not native byte order)"
        return TensorSpec(tuple(x.shape), name)

    def device(self, x: Any) -> Device:
        return _CPU

    def is_traced(self, x: Any) -> bool:
        return False

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        return False

    def host_values(self, x: Any) -> Any:
        return np.asarray(x, dtype=np.float64) if x.dtype.kind not in "iub" else np.asarray(x)

    def run(self, plan: Plan, inputs: Any) -> Any:
        return plan.forward(plan.request, inputs)


NUMPY = _NumpyAdapter()
