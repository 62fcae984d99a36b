"""What the front end asks of an array library."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from kdacore.types import ArrayKind, Device, TensorSpec

if TYPE_CHECKING:
    from kdacore.dispatch.call import Plan
    from kdacore.dispatch.fast_path import RecentCalls
    from kdacore.ops import OpDef


class Adapter(Protocol):
    """One array library, as the front end sees it."""

    kind: ArrayKind
    immutable: bool
    """True where arrays cannot be written in place."""
    knows_grad: bool
    """False where :meth:`needs_grad` can only say that a gradient may be asked for later."""

    through_operators: bool
    """True where calls must go through :meth:`call_compiled` even outside a trace (torch subclasses)."""

    recent: RecentCalls | None
    """Finds the plan of a call faster than its key would, where the library offers a way."""

    def call_compiled(self, opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object) -> Any:
        """Serve a call through operators the library can trace."""
        ...

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        """Raise :class:`UnsupportedError` where the call is inside something that would go wrong unnoticed."""
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

    def run(self, plan: Plan, inputs: Any) -> Any:
        """Run the selected implementation, joined to the library's differentiation."""
        ...
