"""What a plugin hands to ``kdacore build`` and ``kdacore tune configs``; :mod:`kdacore.hookspecs` has the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kdacore.types import Device, Request

Config = Mapping[str, Any]
"""A launch configuration: the value of each parameter."""


@dataclass(frozen=True, slots=True)
class KernelBuilder:
    """Compiles a backend's kernels ahead of time, for ``kdacore build``."""

    backend: str
    architectures: tuple[str, ...]
    """Architectures that are built by default."""
    folder: Path
    """Where compiled kernels go by default."""
    problem: Callable[[str], str | None]
    """Why kernels cannot be built for the architecture of this name; None when they can."""
    build: Callable[[tuple[str, ...], Path, Callable[[str], None]], Sequence[Path]]
    """``build(architectures, folder, report)`` compiles every kernel, calls ``report`` with a line about each, and
    returns the files. It raises :class:`~kdacore.errors.BackendBuildError` with the compiler's output, and OSError when
    the folder cannot be written."""


class TuningJob(Protocol):
    """A launch configuration to find, for calls of one kind."""

    @property
    def op(self) -> str:
        """Public name of the op."""

    @property
    def name(self) -> str:
        """The op and the kind of call in one line."""

    @property
    def when(self) -> Mapping[str, Any]:
        """The rule that calls of this kind match."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Sizes of the call that is timed."""

    @property
    def config(self) -> Config:
        """The shipped configuration, where the search starts."""

    @property
    def parameters(self) -> Iterable[str]:
        """Names of what may be varied, in the order to vary it."""

    def neighbours(self, config: Config, parameter: str) -> Iterable[Config]:
        """Legal configurations that differ from ``config`` in this parameter."""

    def call(self, device: Device) -> tuple[Request, Any]:
        """The call to time: its request, and its inputs on the device."""

    def small_call(self, device: Device) -> tuple[Request, Any]:
        """A call of the same kind, small enough for the oracle."""

    def run(self, config: Config, request: Request, inputs: Any) -> Any:
        """Run a call with a configuration, and return what ``OpImpl.forward`` does. RuntimeError when the
        configuration cannot be compiled or launched."""


@dataclass(frozen=True, slots=True)
class ConfigTuner:
    """A backend whose launch configurations ``kdacore tune configs`` can measure."""

    backend: str
    jobs: Callable[[str, tuple[str, ...]], Sequence[TuningJob]]
    """``jobs(arch, ops)``: a job for each rule that serves the architecture, for these ops; all ops when there are
    none."""
    write: Callable[[Path, str, Sequence[tuple[TuningJob, Config]]], None]
    """``write(path, arch, chosen)`` writes the backend's data file: the chosen configurations of the jobs that were
    tuned, and the shipped ones of all others. It raises ValueError when the file would not be legal."""
