"""A kernel before it is compiled: source file, macros, headers, compiler options, and the key of
all of them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from kdacore import config
from kdacore_cuda.kernel_parameters import generated_headers

CSRC = Path(__file__).parent.parent / "csrc"
EVERY_LANE = "KDACORE_CUDA_EVERY_LANE"
"""Environment variable; 1: every lane arrives at barriers, which compute-sanitizer's racecheck
needs."""
FORM_MACROS = {
    **dict.fromkeys(("COMPOSES", "FOR_SEGMENTS", "HELPERS", "IN_SEGMENTS", "LEAVING_ONLY"), 0),
    **dict.fromkeys(("LAST_READER", "OF_SLICE", "SIDE_BY_SIDE"), 0),
    "CLUSTER": 1,
}
"""Macros that choose a form of a kernel, with their values where :attr:`KernelSource.defines` has no other."""
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_BASE_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")


@dataclass(frozen=True)
class KernelSource:
    """A source file to compile with these macros into one cubin.

    Args:
        path: the file, relative to ``csrc``.
        entry: the name of its only kernel.
        defines: macros and their values, besides those of :data:`FORM_MACROS`.
    """

    path: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def macros(self) -> dict[str, int]:
        """Every macro that the compiler gets, and its value."""
        return FORM_MACROS | dict(self.defines)

    @property
    def name(self) -> str:
        """A readable identity, for example ``sums-THREADS512``: the file's stem and every macro."""
        return "-".join([Path(self.path).stem, *(f"{key}{value}" for key, value in self.defines)])

    def read(self) -> str:
        """The text of the source file. OSError when it is missing."""
        return (CSRC / self.path).read_text()


def gather_headers(source: str) -> dict[str, str]:
    """Every header that the text ``source`` includes, directly or not: include name -> text.

    Names are relative to ``csrc``; headers named ``generated/...`` come from
    :func:`kdacore_cuda.kernel_parameters.generated_headers`. OSError when a header is missing.
    """
    generated = generated_headers()
    found: dict[str, str] = {}
    waiting = [*_includes(source)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = generated[name] if name in generated else (CSRC / name).read_text()
            waiting += _includes(found[name])
    return dict(sorted(found.items()))


@cache
def _includes(text: str) -> tuple[str, ...]:
    """What a source includes itself. Most headers are common to many kernels."""
    return tuple(_INCLUDE.findall(text))


def nvrtc_options(kernel: KernelSource, arch: str) -> tuple[str, ...]:
    """NVRTC's command line. ``arch`` is a real architecture (``sm_90a``); ValueError for a virtual one."""
    if not arch.startswith("sm_"):
        raise ValueError(f"arch must be sm_*, got {arch!r}")
    macros = kernel.macros | {"EVERY_LANE": int(config.get().cuda_every_lane)}
    return (f"-arch={arch}", *_BASE_OPTIONS, *(f"-D{key}={value}" for key, value in macros.items()))


def source_key(kernel: KernelSource, arch: str) -> str:
    """sha256 (hex) of everything that determines the cubin except the compiler's version: source,
    headers, macros, options, architecture. OSError when a source file is missing; ValueError for a
    virtual architecture."""
    source = kernel.read()
    headers = chain.from_iterable(gather_headers(source).items())
    parts = (kernel.path, source, *headers, *nvrtc_options(kernel, arch))
    return hashlib.sha256(b"".join(part.encode() + b"\0" for part in parts)).hexdigest()
