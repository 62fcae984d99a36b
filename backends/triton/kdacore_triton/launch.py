"""Launch Triton kernels without Triton's own Python dispatch.

``kernel[grid](...)`` binds, specialises and looks up every argument on each call: 20 to 60 us of host time. A
:class:`Launcher` does that once per *specialisation* (what Triton compiles differently for) and afterwards hands
the arguments straight to the compiled kernel's C launcher. Nothing is tuned at call time.

Two levels:

- ``launcher(grid, *args, num_warps=..., **constexprs)``: the specialisation is worked out from the arguments on
  every call. Always safe.
- ``launcher.prepare(grid, *args, ...)`` launches once and returns a :class:`Prepared`, which launches again with
  nothing checked. For callers that keep a plan per shape and know that nothing specialised on has changed.

Kernels list run-time parameters first and constexprs last. With ``TRITON_INTERPRET=1``, on AMD (whose
specialisation also looks at sizes), or with a profiler's launch hooks installed, launches take Triton's own path.
Both are safe inside CUDA-graph capture once the specialisation has been launched before the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

Grid = tuple[int, int, int]

FIXED_OPTIONS = {"enable_fp_fusion": True}
"""Compile options said aloud: what Triton assumes without them differs between versions."""

_INT32_MAX = 2**31 - 1
_IS_CUDA = torch.version.cuda is not None
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Index of the current CUDA device."""
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream
)


class Call(NamedTuple):
    """One launch that was recorded instead of run; see :func:`recording`."""

    kernel: Any
    grid: Grid
    args: tuple[Any, ...]
    """Run-time arguments, in the kernel's order."""
    constexprs: dict[str, Any]
    """Constexprs by name, and any compile option beyond the next two."""
    num_warps: int
    num_stages: int


_recorded: list[Call] | None = None


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collect launches instead of running them: no device is needed, and tensors may be on ``meta``.

    Yields the list they are appended to. For compiling ahead of time what a host function would launch.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def interpreting(kernel: Any) -> bool:
    """Is this kernel run by Triton's interpreter (``TRITON_INTERPRET=1`` when it was decorated)?"""
    return not isinstance(kernel, JITFunction)


class Prepared:
    """One compiled specialisation of a kernel, launched with nothing checked.

    The caller promises that every argument specialises as in the call that made it: same dtypes, the same pointers
    and integers divisible by 16, the same integers equal to 1, the same ``None``. Pointers may be given as tensors
    or, faster, as ``tensor.data_ptr()``. The current device must be the one it was prepared on.
    """

    __slots__ = ("_constexprs", "_device", "_function", "_packed", "_run", "compiled")

    def __init__(self, compiled: Any, constexprs: int, device: int) -> None:
        self.compiled = compiled
        self._run = compiled.run
        self._function = compiled.function
        self._packed = compiled.packed_metadata
        self._constexprs = (None,) * constexprs
        self._device = device

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch on the current stream. ``args``: the run-time arguments, in the kernel's order."""
        stream = _raw_stream(self._device)
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        metadata = None
        if enter.calls or leave.calls:
            metadata = self.compiled.launch_metadata(grid, stream, *args, *self._constexprs)
        else:
            enter = leave = None
        # The C launcher skips constexprs, whatever is passed for them.
        self._run(
            *grid, stream, self._function, self._packed, metadata, enter, leave, *args, *self._constexprs
        )


class Launcher:
    """Launches one ``@triton.jit`` kernel; keeps one :class:`Prepared` per specialisation and device."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.name: str = kernel.fn.__name__
        self.interpreting = interpreting(kernel)
        self._cache: dict[Any, Prepared] = {}
        if not self.interpreting:
            flags = [p.is_constexpr for p in kernel.params]
            self._num_constexprs = sum(flags)
            if any(flags[: len(flags) - self._num_constexprs]):
                raise TypeError(f"{self.name}: run-time parameters must come before every constexpr")

    def __call__(
        self, grid: Grid, *args: Any, num_warps: int, num_stages: int = 1, **constexprs: Any
    ) -> None:
        """Launch on the arguments' device and its current stream.

        ``args`` are the run-time arguments by position, ``constexprs`` by name. The grid has three entries, all
        positive.
        """
        self.prepare(grid, *args, num_warps=num_warps, num_stages=num_stages, **constexprs)

    def prepare(
        self, grid: Grid, *args: Any, num_warps: int, num_stages: int = 1, **constexprs: Any
    ) -> Prepared | None:
        """Launch as ``__call__`` does and return the specialisation used; None where only Triton can launch.

        ``args`` must be tensors here, not addresses.
        """
        if _recorded is not None:
            _recorded.append(Call(self.kernel, grid, args, constexprs, num_warps, num_stages))
            return None
        if self.interpreting or not _IS_CUDA:
            self.kernel[grid](*args, **constexprs, num_warps=num_warps, num_stages=num_stages)
            return None
        device = device_of(args)
        if device != current_device():
            with torch.cuda.device(device):
                return self._launch(device, grid, args, num_warps, num_stages, constexprs)
        return self._launch(device, grid, args, num_warps, num_stages, constexprs)

    def _launch(
        self,
        device: int,
        grid: Grid,
        args: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        constexprs: dict[str, Any],
    ) -> Prepared:
        special, pointers = specialise(args)
        key = (device, num_warps, num_stages, *special, *constexprs.items())
        prepared = self._cache.get(key)
        if prepared is not None:
            prepared(grid, *pointers)
            return prepared
        compiled = self.kernel[grid](
            *args, **{**FIXED_OPTIONS, **constexprs}, num_warps=num_warps, num_stages=num_stages
        )
        prepared = self._cache[key] = Prepared(compiled, self._num_constexprs, device)
        return prepared


def specialise(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What Triton specialises on, per argument, and the arguments with tensors replaced by addresses.

    Tensors: dtype and 16-byte alignment. Integers: width, divisibility by 16, equality to 1. Others: their type.
    """
    special: list[Any] = []
    values: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is int:
            if a == 1:
                special.append(1)
            else:
                wide = a > _INT32_MAX or a < -_INT32_MAX - 1
                special.append(("wide" if wide else "int", a & 15 == 0))
            values.append(a)
        elif a is None or kind is float or kind is bool:
            special.append(kind)
            values.append(a)
        else:
            address = a.data_ptr()
            special.append(a.dtype)
            special.append(address & 15 == 0)
            values.append(address)
    return special, values


def device_of(args: tuple[Any, ...]) -> int:
    """CUDA device index of the first tensor among the arguments."""
    for a in args:
        if isinstance(a, torch.Tensor):
            return a.get_device()
    raise TypeError("a launch needs at least one tensor argument")


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two not below ``n`` (``n`` >= 1)."""
    return 1 << (n - 1).bit_length()
