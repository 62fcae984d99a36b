"""NumPy arrays (bfloat16 through ml_dtypes). No differentiation to join."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from kdacore.arrays.base import Memory
from kdacore.ops import OpDef
from kdacore.types import ArrayKind, Device, Request, TensorSpec

if TYPE_CHECKING:
    from kdacore.arrays.base import Extent, Plan, Run

_CPU = Device("cpu")


class _NumpyAdapter:
    kind: ArrayKind = "numpy"
    immutable = False
    knows_grad = True

    recognisable = True
    seen_calls: Any = None

    def runner(self, plan: Plan, inputs: Any) -> Run:
        return _run

    def unwrapped(self, arrays: Any) -> Any:
        return arrays

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        return

    def admit(
        self, opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[bool, tuple[Any, ...]]:
        for x in arrays:
            if x is not None and type(x) is not np.ndarray and isinstance(x, np.ndarray):
                return False, _without_subclasses(opdef, arrays, options)
        return False, arrays

    def unreadable(self, x: Any) -> tuple[str, str] | None:
        return None

    def unwritable(self, x: Any) -> tuple[str, str] | None:
        return None if x.flags.writeable else ("a read-only array", "an array that can be written")

    def check_saved(self, request: Request, inputs: Any) -> None:
        return

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        try:
            return tuple([None if x is None else (x.shape, x.dtype, type(x)) for x in inputs])
        except AttributeError:  # not an array: validation names it
            return None

    def spec(self, x: Any) -> TensorSpec:
        name = x.dtype.name if x.dtype.isnative else f"{x.dtype.name} (not native byte order)"
        if isinstance(x, np.ma.MaskedArray):
            name += " in a masked array"
        return TensorSpec(tuple(x.shape), name)

    def device(self, x: Any) -> Device:
        return _CPU

    def placed(self, x: Any) -> bool:
        return True

    def obstacle(self, op: str, x: Any) -> tuple[str, str] | None:
        return None

    def is_traced(self, x: Any) -> bool:
        return False

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        return False

    def host_values(self, x: Any) -> Any:
        return np.asarray(x, dtype=np.float64) if x.dtype.kind not in "iub" else np.asarray(x)

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        return (x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize) if x.size else None

    def extent(self, x: Any) -> Extent | None:
        if not x.size:
            return None
        if x.flags.c_contiguous:
            address = x.__array_interface__["data"][0]
            return address, address + x.nbytes, True
        return (*Memory(*self.memory(x)).bounds(), False)  # type: ignore[misc]

    def run(self, plan: Plan, inputs: Any) -> Any:
        return _run(plan, inputs)


def _without_subclasses(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays in place of subclasses, which may compute otherwise: ``np.matrix`` has no product of elements.

    What is written stays the caller's object; masked arrays stay too, and validation names them.
    """
    written = opdef.written(arrays, options)
    return tuple(
        [
            x
            if name in written or not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray)
            else np.asarray(x)
            for name, x in zip(opdef.arrays, arrays, strict=True)
        ]
    )


def _run(plan: Plan, inputs: Any) -> Any:
    return plan.forward(plan.request, inputs)


NUMPY = _NumpyAdapter()
