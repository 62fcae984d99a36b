"""The CUDA kernels for ``kdacore build``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kdacore.command_types import KernelBuilder
from kdacore_cuda import architectures
from kdacore_cuda.build import compiler, packaged_cubins, packaging


def builder() -> KernelBuilder:
    """Compiles every packaged kernel with NVRTC."""
    return KernelBuilder(
        backend="cuda",
        architectures=architectures.PACKAGED_ARCHS,
        folder=packaged_cubins.FOLDER,
        problem=compiler.arch_problem,
        build=_build,
    )


def _build(archs: tuple[str, ...], folder: Path, report: Callable[[str], None]) -> list[Path]:
    return packaging.build_all(archs, folder, report=report)
