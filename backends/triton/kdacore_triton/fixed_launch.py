"""Launches whose grid, scalars and constexprs are fixed before any address is known, and a cache of plans of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from kdacore.types import Request
from kdacore_triton import configs
from kdacore_triton.launch import BoundKernel, Grid, Launcher, Prepared, current_device

_UNALIGNED = 15
_MAX_PLANS = 1024

P = TypeVar("P")


class FixedLaunch:
    """A kernel with its grid, scalars and constexprs; only the tensors change from call to call."""

    __slots__ = ("_constexprs", "_device", "_grid", "_launcher", "_options", "_prepared", "_scalars")

    def __init__(
        self,
        launcher: Launcher,
        device: int,
        grid: Grid,
        scalars: tuple[Any, ...],
        constexprs: dict[str, Any],
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        self._launcher, self._device, self._grid = launcher, device, grid
        self._scalars, self._constexprs = scalars, constexprs
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._prepared: Prepared | None = None

    def __call__(self, *tensors: torch.Tensor | None, numbers: tuple[torch.Tensor | None, ...] = ()) -> None:
        """Launch on the current stream. Each tensor keeps the dtype it had in the first call.

        ``numbers``: tensors after the others that the kernel reads by single numbers and is not compiled for the
        alignment of.
        """
        bits = 0
        pointers: list[int | None] = []
        for x in tensors:
            if x is None:
                pointers.append(None)
            else:
                address = x.data_ptr()
                bits |= address
                pointers.append(address)
        for x in numbers:
            pointers.append(None if x is None else x.data_ptr())
        aligned = not bits & _UNALIGNED
        if self._prepared is not None and aligned and self._device == current_device():
            self._prepared(self._grid, *pointers, *self._scalars)
            return
        prepared = self._bound().prepare(self._grid, *tensors, *numbers, *self._scalars)
        if aligned:
            self._prepared = prepared

    def build(self, *tensors: torch.Tensor | None, numbers: tuple[torch.Tensor | None, ...] = ()) -> None:
        """Compile and load the kernel as a launch on these tensors needs it, where that has not been done."""
        aligned = not any(x is not None and x.data_ptr() & _UNALIGNED for x in tensors)
        if self._prepared is not None and aligned and self._device == current_device():
            return
        prepared = self._bound().build(self._grid, *tensors, *numbers, *self._scalars)
        if aligned:
            self._prepared = prepared

    def _bound(self) -> BoundKernel:
        return self._launcher.bind(**self._options, **self._constexprs)


class PlanCache(Generic[P]):
    """PlanCache by request: by identity first, since callers reuse their requests, then by value."""

    def __init__(self, make: Callable[[Request], P]) -> None:
        self._make = make
        self._by_id: dict[int, tuple[Request, P]] = {}
        self._by_value: dict[Request, P] = {}
        configs.on_change(self._forget)

    def __call__(self, request: Request) -> P:
        found = self._by_id.get(id(request))
        if found is not None and found[0] is request:
            return found[1]
        if len(self._by_value) >= _MAX_PLANS or len(self._by_id) >= _MAX_PLANS:
            self._forget()
        plan = self._by_value.get(request)
        if plan is None:
            plan = self._by_value[request] = self._make(request)
        self._by_id[id(request)] = request, plan  # the request is kept alive, so its id stays its own
        return plan

    def _forget(self) -> None:
        self._by_id.clear()
        self._by_value.clear()
