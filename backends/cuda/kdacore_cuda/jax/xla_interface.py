"""XLA's interface to handlers: the versions of it that ours are written for."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kdacore.types import Reason, Request
from kdacore.verifiers import reads_no_lengths

API_VERSIONS = ((0, 3), (0, 4))
"""Versions of XLA's interface to handlers (xla/ffi/api/c_api.h) that the handler was read against:
those of jaxlib 0.10 to 0.11."""
_VERSION = re.compile(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)")


@cache
def api_version() -> tuple[int, int] | None:
    """The version of XLA's interface that this jaxlib has, as its header says; None if it does not, or if JAX is
    not installed, as where the doctor asks about calls that could be made."""
    if find_spec("jax") is None:
        return None
    import jax.ffi

    try:
        header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    except OSError:
        return None
    found = {name: int(number) for name, number in _VERSION.findall(header)}
    return (found["MAJOR"], found["MINOR"]) if len(found) == 2 else None


@reads_no_lengths
def known_version(request: Request) -> Reason | None:
    """A verifier: calls from JAX go through this interface, whose versions are not interchangeable."""
    if request.kind != "jax" or (found := api_version()) in API_VERSIONS:
        return None
    got = f"XLA FFI {found[0]}.{found[1]}" if found else "no jaxlib with the header"
    want = "XLA FFI " + " or ".join(f"{major}.{minor}" for major, minor in API_VERSIONS)
    return Reason("unavailable", "does not know this version of XLA's interface to handlers", got, want)
