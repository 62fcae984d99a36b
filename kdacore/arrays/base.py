"""What the front end asks of an array library, and what an array library is told of a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from kdacore.ops import OpDef
from kdacore.types import ArrayKind, Backend, Device, OpImpl, Request, TensorSpec


class Differentiated(Protocol):
    """A call once it is known that it is differentiated. Hashable."""

    def plan(self) -> Plan:
        """Its plan. UnsupportedError where no backend serves it."""
        ...


class Plan(Protocol):
    """A validated call and the implementation selected for it, as an adapter sees it."""

    request: Request
    inputs: type
    """The named tuple of the op's arrays."""
    backend: Backend
    impl: OpImpl
    forward: Callable[[Request, Any], Any]
    joined: Any
    """What the adapter built to join this plan to its library's differentiation."""

    @property
    def differentiated(self) -> Differentiated | None:
        """Where the call may be differentiated and ``backend`` has no backward for it: what serves it then."""
        ...

    def backward(self, inputs: Any, *rest: Any) -> Any:
        """The gradients: ``backward(inputs, saved, grads)``, or ``backward(inputs, dlog)`` of ``kda_gate``."""
        ...

    def check_gradients(self, inputs: Any, grads: Any, wanted: tuple[bool, ...]) -> None:
        """Raise PluginError where gradients that a backend returned, None where not wanted, do not fit the request."""
        ...

    def failed(self, function: str, error: BaseException) -> None:
        """Say of an error that a function of the backend raised whose it is; to be followed by ``raise``."""
        ...


Run = Callable[[Any, Any], Any]
"""``run(plan, inputs)``: runs a plan's forward, joined to the array library's differentiation."""


class Adapter(Protocol):
    """One array library, as the front end sees it."""

    kind: ArrayKind
    immutable: bool
    """True where arrays cannot be written in place."""
    knows_grad: bool
    """False where :meth:`needs_grad` can only say that a gradient may be asked for later."""

    recognisable: bool
    """Whether calls with these arrays may be recognised as like earlier ones."""
    seen_calls: Any
    """What :mod:`kdacore.acceleration` remembers of calls with these arrays. None until it is needed."""

    def runner(self, plan: Any, inputs: Any) -> Run:
        """The function that runs this call and those recognised as the same."""
        ...

    def unwrapped(self, arrays: Any) -> Any:
        """An op's inputs with arrays in place of objects that stand for one. Asked where ``immutable``."""
        ...

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        """Raise :class:`UnsupportedError` where the call is inside something that would go wrong unnoticed."""
        ...

    def admit(
        self, opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[bool, tuple[Any, ...]]:
        """Look at the arrays of a call that is not recognised, as :meth:`refuse` does.

        Returns:
            Whether the call must go through the ``torch.library`` operators, and the arrays as backends may read them:
            ``arrays`` itself where there was nothing to do.

        Raises:
            ContractError: an array that cannot be read, or a lazy view that would be written.
            UnsupportedError: as :meth:`refuse`.
        """
        ...

    def unreadable(self, x: Any) -> tuple[str, str] | None:
        """Why neither shape nor values of the array can be asked for: what it is, and what was wanted."""
        ...

    def unwritable(self, x: Any) -> tuple[str, str] | None:
        """Why a call cannot write the array: what it is, and what was wanted."""
        ...

    def check_saved(self, request: Request, inputs: Any) -> None:
        """Raise ContractError where an array of a call that needs gradients cannot be saved for the backward."""
        ...

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        """Everything validation and selection read from the arrays; None when the call must not be cached."""
        ...

    def spec(self, x: Any) -> TensorSpec:
        """Shape and canonical dtype name."""
        ...

    def device(self, x: Any) -> Device:
        """Where the array lives, or will be expected to while that is not known."""
        ...

    def placed(self, x: Any) -> bool:
        """Whether it is known where the array lives."""
        ...

    def obstacle(self, op: str, x: Any) -> tuple[str, str] | None:
        """Why no backend can take the array: what it is, and what was wanted."""
        ...

    def is_traced(self, x: Any) -> bool:
        """True when the array has no values yet."""
        ...

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        """True when a backward pass through this call must be possible."""
        ...

    def host_values(self, x: Any) -> Any:
        """The values as a NumPy array (float64 for floats). Syncs; only for ``KDACORE_VALIDATE=values``."""
        ...

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        """Address, shape, strides and item size in bytes; None where there is none to speak of. No sync."""
        ...

    def extent(self, x: Any) -> Extent | None:
        """The outline of :meth:`memory`, in less time."""
        ...

    def run(self, plan: Any, inputs: Any) -> Any:
        """Run the selected implementation, joined to the library's differentiation."""
        ...


Extent = tuple[int, int, bool]
"""Where an array's bytes lie: the first, the one after the last, and whether they are known to be in the order of the
elements, without gaps; otherwise they may have gaps, or overlap."""

Outline = tuple[str, Any, Extent]
"""An argument's name, its array, and where that lies."""

_MOST_WORK: Any = 10_000
"""Steps the exact test may take; two layouts so entangled are taken for apart."""


class Memory(NamedTuple):
    """The bytes an array occupies."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def bounds(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        first = self.address + sum(r for r in reach if r < 0)
        return first, self.address + sum(r for r in reach if r > 0) + self.itemsize

    def overlaps_itself(self) -> bool:
        """May two elements share memory? Each axis must step over all that the finer ones reach."""
        reach = self.itemsize
        steps = [(abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1]
        for stride, size in sorted(steps):
            if stride < reach:
                return True
            reach += stride * (size - 1)
        return False

    def overlaps(self, other: Memory) -> bool:
        """Do the two share a byte?"""
        (a, b), (c, d) = self.bounds(), other.bounds()
        if b <= c or d <= a:
            return False
        import numpy as np  # here: few arrays come this close

        try:
            return bool(np.shares_memory(_array(self), _array(other), max_work=_MOST_WORK))
        except np.exceptions.TooHardError:
            return False


class _Array:
    """A memory as NumPy's test of overlap takes it, which reads no element."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, True),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": f"|V{memory.itemsize}",
        }


def _array(memory: Memory) -> Any:
    import numpy as np

    return np.asarray(_Array(memory))


ADAPTERS: dict[type, Adapter] = {}
"""The adapter of each type of array met so far."""
