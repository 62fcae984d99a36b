"""The hooks a plugin may implement. Each example runs in the tests (tests/docs/test_examples.py).

A plugin is a module (or any object) named by an entry point of the group ``kdacore``. It decorates what it
implements with :data:`hookimpl`. Hooks are called while backends are listed and calls are selected, never on
the path of a call whose selection is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kdacore.command_types import ConfigTuner, KernelBuilder
    from kdacore.types import Backend, Candidate, Request, Selection

PROJECT = "kdacore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kdacore_backends() -> Iterable[Backend]:  # type: ignore[empty-body]
    """The backends this plugin brings. Import nothing heavy here.

    Examples:
        >>> from kdacore.hookspecs import hookimpl
        >>> from kdacore.types import Backend, OpImpl, Outputs, Reason
        >>> def only_small(request):
        ...     if request.T > 8:
        ...         return Reason("too_long", "serves short sequences only", f"T={request.T}", "T <= 8")
        >>> def copy_values(request, inputs):
        ...     return Outputs(o=inputs.v.copy())
        >>> class Plugin:
        ...     @hookimpl
        ...     def kdacore_backends(self):
        ...         op = OpImpl(forward=copy_values, verifiers=(only_small,))
        ...         return [Backend(name="copy", version="1.0", kinds=("numpy",), ops={"chunk_kda": op})]
        >>> [backend.name for backend in Plugin().kdacore_backends()]
        ['copy']
    """


@hookspec
def kdacore_doctor_checks() -> Iterable[tuple[str, bool, str]]:  # type: ignore[empty-body]
    """Rows this plugin adds to ``kdacore doctor``: name, passed, detail. A False makes the doctor exit 1.

    Examples:
        >>> from kdacore.hookspecs import hookimpl
        >>> class Plugin:
        ...     @hookimpl
        ...     def kdacore_doctor_checks(self):
        ...         return [("copy kernels", True, "2 kernels cached")]
        >>> Plugin().kdacore_doctor_checks()
        [('copy kernels', True, '2 kernels cached')]
    """


@hookspec
def kdacore_selected(request: Request, selection: Selection) -> None:
    """Telemetry: called once for each newly selected call shape, not once a call. An error here stops no call.

    Examples:
        >>> from kdacore.hookspecs import hookimpl
        >>> class Plugin:
        ...     seen = []
        ...     @hookimpl
        ...     def kdacore_selected(self, request, selection):
        ...         self.seen.append((request.op, selection.backend))
    """


@hookspec(firstresult=True)
def kdacore_choose(request: Request, candidates: tuple[Candidate, ...]) -> str | None:
    """A site's own policy: the name of one of the supported candidates, or None for no opinion.

    Asked only when nothing else was asked for (no ``backend=``, ``use_backend`` or ``KDACORE_BACKEND``). The plugin
    registered last is asked first; one that raises is passed over with a warning.

    Examples:
        >>> from kdacore.hookspecs import hookimpl
        >>> class Plugin:
        ...     @hookimpl
        ...     def kdacore_choose(self, request, candidates):
        ...         names = [c.backend for c in candidates if c.supported]
        ...         return "reference" if request.T < 16 and "reference" in names else None
    """


@hookspec
def kdacore_kernel_builders() -> Iterable[KernelBuilder]:  # type: ignore[empty-body]
    """What ``kdacore build`` compiles ahead of time. Called by that command alone, so it may import the compiler.

    Examples:
        >>> from pathlib import Path
        >>> from kdacore.command_types import KernelBuilder
        >>> from kdacore.hookspecs import hookimpl
        >>> def problem(arch):
        ...     return None if arch in ("sm_90", "sm_100") else "the kernels need sm_90 or sm_100"
        >>> def build(architectures, folder, report):
        ...     files = [folder / f"copy.{arch}" for arch in architectures]
        ...     for file in files:
        ...         _ = file.write_bytes(b"machine code")
        ...         report(f"{file.name}: {file.stat().st_size} bytes")
        ...     return files
        >>> class Plugin:
        ...     @hookimpl
        ...     def kdacore_kernel_builders(self):
        ...         return [KernelBuilder("copy", ("sm_90",), Path("copies"), problem, build)]
        >>> [builder.architectures for builder in Plugin().kdacore_kernel_builders()]
        [('sm_90',)]
    """


@hookspec
def kdacore_config_tuners() -> Iterable[ConfigTuner]:  # type: ignore[empty-body]
    """Launch configurations that ``kdacore tune configs`` measures. Called by that command alone; import the array
    framework in the functions, since ``--list`` needs none.

    Examples:
        >>> from kdacore.command_types import ConfigTuner
        >>> from kdacore.hookspecs import hookimpl
        >>> def jobs(arch, ops):
        ...     return []  # objects as kdacore.command_types.TuningJob describes them
        >>> def write(path, arch, chosen):
        ...     path.write_text("".join(f"{job.name}: {config}" for job, config in chosen))
        >>> class Plugin:
        ...     @hookimpl
        ...     def kdacore_config_tuners(self):
        ...         return [ConfigTuner("copy", jobs, write)]
        >>> [tuner.backend for tuner in Plugin().kdacore_config_tuners()]
        ['copy']
    """
