"""Launch Triton kernels without Triton's own Python dispatch.

``kernel[grid](...)`` binds, specialises and looks up every argument on each call: 20 to 60 us of host time. A
:class:`Launcher` does that once per *specialisation* (what Triton compiles differently for) and afterwards hands
the arguments straight to the compiled kernel's C launcher. Nothing is tuned at call time.

Two ways in:

- ``launcher(grid, *args, num_warps=..., **constexprs)``: the specialisation is worked out from the arguments on
  every call. Always safe.
- ``launcher.prepare(grid, *args, ...)`` launches once and returns a :class:`Prepared`, which launches again with
  nothing checked. For callers that keep a plan per shape and know that nothing specialised on has changed.

Between the two, ``launcher.bind(num_warps=..., **constexprs)`` fixes everything but the arguments.

Kernels list run-time parameters first and constexprs last. A parameter annotated with a NamedTuple is a group of
arguments (see :mod:`kdacore_triton.kernels`): Triton gets the tuple when it compiles, while every launch takes the
members one after another, as the compiled kernel does. So a group costs a launch nothing.

With ``TRITON_INTERPRET=1``, on AMD (whose specialisation also looks at sizes), or with a profiler's launch hooks
installed, launches take Triton's own path. Both are safe inside CUDA-graph capture once the specialisation has been
launched before the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
import triton
from triton import knobs
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from kdacore.machine import release_of

from .l1_cache import prefer_l1

Grid = tuple[int, int, int]

FIXED_OPTIONS = {"enable_fp_fusion": True}
"""Compile options given explicitly: their defaults differ between Triton versions."""

TRITON = release_of(triton.__version__)[:2]
_INT32_MAX = 2**31 - 1
_IS_CUDA = torch.version.cuda is not None
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Index of the current CUDA device."""
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream
)


class RecordedLaunch(NamedTuple):
    """One launch that was recorded instead of run; see :func:`recording`."""

    kernel: Any
    grid: Grid
    args: tuple[Any, ...]
    """Run-time arguments, in the kernel's order; groups as their members."""
    constexprs: dict[str, Any]
    """Constexprs by name, and any compile option beyond the next two."""
    num_warps: int
    num_stages: int


_recorded: list[RecordedLaunch] | None = None


@contextmanager
def recording() -> Iterator[list[RecordedLaunch]]:
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


def group_types(kernel: Any) -> Iterator[type[Any] | None]:
    """For each run-time parameter of a kernel the NamedTuple that it is annotated with, None for a single argument."""
    hints = get_type_hints(kernel.fn)
    for name in kernel.arg_names:
        hint = hints.get(name)
        if hint is not constexpr:
            yield hint if isinstance(hint, type) and issubclass(hint, tuple) else None


class Prepared:
    """One compiled specialisation of a kernel, launched with nothing checked.

    The caller promises that every argument specialises as in the call that made it: same dtypes, the same pointers
    and integers divisible by 16, the same integers equal to 1, the same ``None``. Pointers may be given as tensors
    or, faster, as ``tensor.data_ptr()``. The current device must be the one it was prepared on.
    """

    __slots__ = ("_constexprs", "_device", "_fixed", "_function", "_launch", "_nested", "_run", "compiled")

    def __init__(self, compiled: Any, constexprs: int, device: int) -> None:
        self.compiled = compiled
        self._run = _flat_launcher(compiled)
        self._launch, self._fixed, self._nested = _c_launcher(compiled, self._run)
        self._function = compiled.function
        # The C launcher skips constexprs, whatever is passed for them.
        self._constexprs = (None,) * constexprs
        self._device = device

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch on the current stream. ``args``: the run-time arguments, in the kernel's order."""
        stream = _raw_stream(self._device)
        runtime = knobs.runtime
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            self._launch_with_hooks(grid, stream, (*args, *self._constexprs))
        elif self._nested:
            self._launch(*grid, stream, self._function, *self._fixed, (*args, *self._constexprs))
        else:
            self._launch(*grid, stream, self._function, *self._fixed, *args, *self._constexprs)

    def fix(self, grid: Grid, *tail: Any) -> Callable[[list[Any]], None]:
        """A launch with the grid and the last arguments fixed too; it takes the list of the first arguments."""
        launch, nested, device = self._launch, self._nested, self._device
        fixed = (self._function, *self._fixed)
        rest = (*tail, *self._constexprs)
        x, y, z = grid
        runtime, stream_of = knobs.runtime, _raw_stream

        def run(first: list[Any]) -> None:
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                self._launch_with_hooks(grid, stream_of(device), (*first, *rest))
            elif nested:
                launch(x, y, z, stream_of(device), *fixed, (*first, *rest))
            else:
                launch(x, y, z, stream_of(device), *fixed, *first, *rest)

        return run

    def _launch_with_hooks(self, grid: Grid, stream: int, args: tuple[Any, ...]) -> None:
        compiled, runtime = self.compiled, knobs.runtime
        metadata = compiled.launch_metadata(grid, stream, *args)
        hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
        self._run(*grid, stream, self._function, compiled.packed_metadata, metadata, *hooks, *args)


def _flat_launcher(compiled: Any) -> Any:
    """Triton's launcher of a kernel, taking the members of groups one after another."""
    signature = compiled.src.signature
    if not any(isinstance(kind, tuple) for kind in signature.values()):
        return compiled.run
    members = [m for kind in signature.values() for m in (kind if isinstance(kind, tuple) else (kind,))]
    return type(compiled.run)(SimpleNamespace(signature=dict(enumerate(members))), compiled.metadata)


def _c_launcher(compiled: Any, run: Any) -> tuple[Callable[..., None], tuple[Any, ...], bool]:
    """How to launch: a callable, what it wants between the function and the arguments, and are those one tuple.

    Triton's launcher object first looks for scratch memory to allocate; where a kernel needs none, its C function is
    called instead. That function's parameters are known for Triton 3.6 to 3.9; other versions keep the object.
    """
    packed = compiled.packed_metadata
    needs_more = getattr(run, "gsan_enabled", False) or any(
        getattr(run, size, 1) for size in ("global_scratch_size", "profile_scratch_size")
    )
    if needs_more or not (3, 6) <= TRITON <= (3, 9):
        return run, (packed, None, None, None), False
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    if TRITON == (3, 6):
        return run.launch, (*flags, None, None, packed, None, None, None), False
    arguments = (run.arg_annotations, run.kernel_signature)
    return run.launch, (*flags, packed, None, None, None, None, None, *arguments), True


class Launcher:
    """Launches one ``@triton.jit`` kernel; keeps one :class:`Prepared` per specialisation and device.

    ``prefer_l1``: shared memory that its programs do not use becomes L1 cache; see :mod:`kdacore_triton.l1_cache`.
    """

    def __init__(self, kernel: Any, *, prefer_l1: bool = False) -> None:
        self.kernel = kernel
        self.prefer_l1 = prefer_l1
        self.name: str = kernel.fn.__name__
        self.interpreting = interpreting(kernel)
        self._bound: dict[Any, BoundKernel] = {}
        self._groups = tuple(group_types(kernel))
        self.num_constexprs = 0
        if not self.interpreting:
            flags = [p.is_constexpr for p in kernel.params]
            self.num_constexprs = sum(flags)
            if any(flags[: len(flags) - self.num_constexprs]):
                raise TypeError(f"{self.name}: run-time parameters must come before every constexpr")

    def __call__(
        self, grid: Grid, *args: Any, num_warps: int, num_stages: int = 1, **constexprs: Any
    ) -> None:
        """Launch on the arguments' device and its current stream.

        ``args`` are the run-time arguments by position, members of groups one after another; ``constexprs`` by name.
        The grid has three entries, all positive.
        """
        self.bind(num_warps=num_warps, num_stages=num_stages, **constexprs).prepare(grid, *args)

    def prepare(
        self, grid: Grid, *args: Any, num_warps: int, num_stages: int = 1, **constexprs: Any
    ) -> Prepared | None:
        """Launch as ``__call__`` does and return the specialisation used; None where only Triton can launch."""
        return self.bind(num_warps=num_warps, num_stages=num_stages, **constexprs).prepare(grid, *args)

    def grouped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run-time arguments as Triton takes them: with the members of each group in its NamedTuple."""
        values = iter(args)
        found = tuple(
            next(values) if group is None else group._make(islice(values, len(group._fields)))
            for group in self._groups
        )
        left = len(tuple(values))
        if left:
            raise TypeError(f"{self.name}: {left} arguments too many")
        return found

    def bind(self, *, num_warps: int, num_stages: int = 1, **constexprs: Any) -> BoundKernel:
        """This kernel with its constexprs and options fixed: for callers that keep it and launch it again."""
        key = (num_warps, num_stages, *constexprs.items())
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = BoundKernel(self, num_warps, num_stages, constexprs)
        return bound


class BoundKernel:
    """A kernel with its constexprs and options fixed; ``bound(grid, *args)`` launches it."""

    __slots__ = ("_cache", "_constexprs", "_launcher", "_num_stages", "_num_warps")

    def __init__(
        self, launcher: Launcher, num_warps: int, num_stages: int, constexprs: dict[str, Any]
    ) -> None:
        self._launcher = launcher
        self._constexprs = constexprs
        self._num_warps = num_warps
        self._num_stages = num_stages
        self._cache: dict[Any, Prepared] = {}

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch on the arguments' device and its current stream."""
        self.prepare(grid, *args)

    def prepare(self, grid: Grid, *args: Any) -> Prepared | None:
        """Launch and return the specialisation used; None where only Triton can launch.

        ``args`` must be tensors here, not addresses.
        """
        launcher = self._launcher
        if _recorded is not None:
            _recorded.append(
                RecordedLaunch(
                    launcher.kernel, grid, args, self._constexprs, self._num_warps, self._num_stages
                )
            )
            return None
        if launcher.interpreting or not _IS_CUDA:
            # The interpreter computes with NumPy, where the caller may have asked for errors.
            with np.errstate(all="ignore") if launcher.interpreting else nullcontext():
                launcher.kernel[grid](*launcher.grouped(args), **self._constexprs, **self._options)
            return None
        device = device_of(args)
        if device != current_device():
            with torch.cuda.device(device):
                return self._launch(device, grid, args)
        return self._launch(device, grid, args)

    def build(self, grid: Grid, *args: Any) -> Prepared | None:
        """Compile and load what :meth:`prepare` would launch, and launch nothing; the same result.

        For calls of several kernels of which an earlier one writes an argument: a later one that cannot be built has to
        be found out before.
        """
        launcher = self._launcher
        if _recorded is not None or launcher.interpreting:
            return None
        device = device_of(args)
        if not _IS_CUDA:
            _ = self._compiled(grid, args, self._constexprs).run  # loads it
            return None
        if device != current_device():
            with torch.cuda.device(device):
                return self._built(device, grid, args)
        return self._built(device, grid, args)

    def _built(self, device: int, grid: Grid, args: tuple[Any, ...]) -> Prepared:
        key = (device, *specialise(args)[0])
        prepared = self._cache.get(key)
        if prepared is None:
            compiled = self._compiled(grid, args, {**FIXED_OPTIONS, **self._constexprs})
            prepared = self._keep(key, compiled)
        return prepared

    def _compiled(self, grid: Grid, args: tuple[Any, ...], constexprs: dict[str, Any]) -> Any:
        args = self._launcher.grouped(args)
        return self._launcher.kernel.warmup(*args, grid=grid, **constexprs, **self._options)

    def _launch(self, device: int, grid: Grid, args: tuple[Any, ...]) -> Prepared:
        special, values = specialise(args)
        key = (device, *special)
        prepared = self._cache.get(key)
        if prepared is not None:
            prepared(grid, *values)
            return prepared
        constexprs = {**FIXED_OPTIONS, **self._constexprs}
        run = self._launcher.kernel[grid]
        return self._keep(key, run(*self._launcher.grouped(args), **constexprs, **self._options))

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> Prepared:
        launcher, device = self._launcher, key[0]
        prepared = Prepared(compiled, launcher.num_constexprs, device)
        if launcher.prefer_l1:
            prefer_l1(compiled, device)
        self._cache[key] = prepared
        return prepared

    @property
    def _options(self) -> dict[str, int]:
        return {"num_warps": self._num_warps, "num_stages": self._num_stages}


def specialise(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What Triton specialises on, one entry per argument, and the arguments with tensors replaced by addresses.

    Tensors: dtype and 16-byte alignment. Integers: width, divisibility by 16, equality to 1. Others: their type.
    """
    special: list[Any] = []
    values: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is int:
            if a == 1:
                special.append(1)
            elif a > _INT32_MAX or a < -_INT32_MAX - 1:
                special.append("wide, divisible" if a & 15 == 0 else "wide")
            else:
                special.append("divisible" if a & 15 == 0 else "")
            values.append(a)
        elif a is None or kind is float or kind is bool:
            special.append(kind)
            values.append(a)
        else:
            address = a.data_ptr()
            special.append(a.dtype if address & 15 == 0 else (a.dtype, "unaligned"))
            values.append(address)
    return special, values


def device_of(args: tuple[Any, ...]) -> int:
    """CUDA device index of the first tensor among the arguments."""
    for a in args:
        if isinstance(a, torch.Tensor):
            return int(a.get_device())
    raise TypeError("a launch needs at least one tensor argument")


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two not below ``n`` (``n`` >= 1)."""
    return 1 << (n - 1).bit_length()
