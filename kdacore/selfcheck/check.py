"""The one-time check of a compiled-only kernel against the oracle, on the machine it is about to run on.

Auto uses a kernel whose architecture its tests never ran on only after this check passed here. How far the results
were from the oracle's is kept in the cache folder, keyed by everything that could change it. What a kernel raised
(memory that was short, say) may be gone in the next process, and is kept in this one only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore import config, device, plugin_faults
from kdacore.registry import REGISTRY, Registered
from kdacore.selfcheck import records
from kdacore.selfcheck.records import Record
from kdacore.types import ArrayKind, Device, Reason, Request
from kdacore.version import __version__

if TYPE_CHECKING:
    from kdacore.selfcheck.small_call import Pair

TOKENS = 80
"""More than one chunk, and a ragged end."""
MARGIN = 2.0
"""The contract's bounds are for long calls of random numbers, and twice as wide in its hard cases. The
small call is as hard: few tokens, empty and short sequences in a pack, any head dims."""
_LIBRARIES: dict[ArrayKind, tuple[str, ...]] = {
    "numpy": ("numpy", "ml-dtypes"),
    "torch": ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc"),
    "jax": ("jax", "jaxlib", "libtpu"),
}
"""Distributions that compute or compile a call of each kind."""
_measured: dict[Path, Record] = {}
"""What the checks of this process found, by where the record is, or would be."""
REGISTRY.on_change(_measured.clear)


def problem(registered: Registered, request: Request, *, run: bool = True) -> Reason | None:
    """Why the backend may not be used for this kind of call here; None when its check passed, or has yet to run.

    Args:
        registered: the backend.
        request: the call.
        run: run the check where nothing is known of it; else only say what is known.
    """
    if not config.get().selfcheck or request.op.startswith(("kda_chunk", "kda_recompute", "delta_rule")):
        return None
    if device.compiled_for_elsewhere(request):
        return _problem_elsewhere(registered, request, run)
    path = _record_path(registered, request)
    stored = records.read(path)
    known = stored or _measured.get(path)
    if known is None:
        if not run:
            return None
        if _capturing(request):  # the check would be captured too, and its failure kept
            return Reason(
                "selfcheck", "its self-check must run before a capture", "a capture", "one call before it"
            )
        known = (
            _measure_outside(registered, request) if request.kind == "jax" else measure(registered, request)
        )
        _measured[path] = known
        if not known["failure"]:
            records.write(path, known)
    error, bound = known["error"], known["bound"]
    if known["failure"]:
        return Reason("selfcheck", f"its self-check on {request.device} failed", known["failure"], "a result")
    if not error < bound:
        said = f"its self-check on {request.device} gave wrong results"
        if stored is not None:
            said += f", says {path}; without that file it runs again"
        if known["misfit"]:
            return Reason("selfcheck", said, known["misfit"], "what the call asks for")
        return Reason("selfcheck", said, f"{error:.2e}", f"< {bound:.2g}")
    return None


def _problem_elsewhere(registered: Registered, request: Request, run: bool) -> Reason | None:
    """The same where the call's device is of a kind that is not here. What is written for any device is taken as it is
    on the CPU; what is not cannot be checked."""
    if "*" in registered.backend.device_types:
        cpu = Device("cpu")
        tested = cpu.arch in registered.backend.ops[request.op].verified_archs
        return None if tested else problem(registered, replace(request, device=cpu), run=run)
    name = registered.backend.name
    return Reason(
        "selfcheck",
        f"has not been tested on {request.device.arch or request.device.type}, and there is none here to check it on",
        "a program compiled for another machine",
        f"backend={name!r}, which uses it unchecked",
    )


def _capturing(request: Request) -> bool:
    """Is the call being recorded into a CUDA graph?"""
    torch = sys.modules.get("torch")
    if (
        torch is None
        or request.kind != "torch"
        or request.device.type != "cuda"
        or not torch.cuda.is_available()
    ):
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def _measure_outside(registered: Registered, request: Request) -> Record:
    """Measure on a thread of its own: inside ``jax.jit`` this one is tracing, and concrete arrays would join the
    trace."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure, registered, request).result()


def measure(registered: Registered, request: Request) -> Record:
    """Run a small call like this one on the backend and on the oracle.

    Returns:
        ``error`` and ``bound`` of the result nearest its bound (or farthest beyond); ``failure``: what was raised;
        ``misfit``: the results that are missing, unasked for, or of another dtype, which no error is small enough for.
    """
    from kdacore.selfcheck import small_call

    small, inputs = small_call.small_call(request, TOKENS)
    impl = registered.backend.ops[request.op]
    whole = registered.backend.traceable and request.kind == "jax"

    def compute() -> list[Pair]:
        with _as_given(request, inputs):
            forward = _compiled(impl.forward) if whole else impl.forward
            found = small_call.forward_pairs(small, inputs, forward(small, inputs))
            if impl.backward is not None and request.needs_grad:
                backward = _compiled(impl.backward) if whole else impl.backward
                found += small_call.backward_pairs(small, inputs, backward)
            return found

    pairs, error = plugin_faults.attempt(compute)
    if error is not None:  # the failure is the finding
        error.__traceback__ = None  # whose frames hold the arrays
        return _finding(failure=plugin_faults.shown(error)[:500])
    if misfits := [p.misfit for p in pairs if p.misfit]:
        return _finding(misfit=", ".join(misfits))
    measured = [(relative_error(p.got, p.want), _bound(request, p)) for p in pairs]
    worst, bound = max(measured, key=lambda m: m[0] / m[1])
    return _finding(worst, bound)


def _finding(error: float = float("inf"), bound: float = 0.0, failure: str = "", misfit: str = "") -> Record:
    return Record(error=error, bound=bound, failure=failure, misfit=misfit)


def _bound(request: Request, pair: Pair) -> float:
    """The contract's, for this result of the small call."""
    from kdacore.selfcheck import bounds

    if request.op == "kda_gate" and pair.quantity == "o":  # float32 whatever its input, and no product in it
        return MARGIN * bounds.bound("o", Device("cpu"), pair.dtype)
    return MARGIN * bounds.bound(pair.quantity, request.device, request.dtype, pair.dtype)


def _as_given(request: Request, inputs: Any) -> AbstractContextManager[Any]:
    """Backends run without ``torch.autocast``, which the call that asks for the check may be under."""
    if request.kind != "torch":
        return nullcontext()
    from kdacore.arrays.torch.modes import as_given

    return as_given(inputs[0])


def _compiled(function: Any) -> Any:
    """A traceable function as its callers run it: compiled whole, not primitive by primitive."""
    import jax

    return lambda request, *arrays: jax.jit(lambda *a: function(request, *a))(*arrays)


def relative_error(x: Any, ref: Any) -> float:
    """``norm(x - ref) / norm(ref)`` in float64; infinite when x is not finite, so NaN never passes."""
    import numpy as np  # not at import time: nothing that imports this needs it before it compares

    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    if x.shape != ref.shape or not np.isfinite(x).all():
        return float("inf")
    size = float(np.linalg.norm(ref))
    return float(np.linalg.norm(x - ref)) / size if size else float(np.linalg.norm(x))


def _record_path(registered: Registered, request: Request) -> Path:
    """One file for each small call that :func:`measure` can make, and for all it is made with."""
    from kdacore.selfcheck import small_call

    what = json.dumps([*_versions(registered, request), small_call.identity(request, TOKENS)])
    digest = hashlib.sha256(what.encode()).hexdigest()[:20]
    folder = config.get().cache_dir / "selfcheck" / (request.device.arch or request.device.type)
    return folder / f"{registered.backend.name}-{request.op}-{digest}.json"


def _versions(registered: Registered, request: Request) -> list[str]:
    """What a backend's results depend on besides the call. Read without importing what is asked about."""
    from kdacore import machine

    backend, settings = registered.backend, config.get()
    found = [__version__, backend.name, backend.version, machine.version_of(registered.distribution)]
    found += [machine.version_of(name) for name in _LIBRARIES[request.kind]]
    found.append(machine.driver_version(request.device.type))
    return [*found, f"{settings.cuda_every_lane}", f"{settings.pallas_interpret}"]  # other kernels


class Refusal(NamedTuple):
    """A kept record by which a backend's results are wrong here."""

    backend: str
    op: str
    arch: str
    found: str
    """An error and its bound, or what is missing from the results."""
    file: str


def refusals() -> list[Refusal]:
    """The kept records of checks that went wrong, made with any versions; which of them a call meets, explain says."""
    found = []
    try:
        paths = sorted((config.get().cache_dir / "selfcheck").glob("*/*-*-*.json"))
    except OSError:  # a cache folder that cannot be entered; the doctor's row of it says so
        return []
    for path in paths:
        record = records.read(path)
        if record is None or record["error"] < record["bound"]:
            continue
        backend, op, _ = path.stem.rsplit("-", 2)
        said = record["misfit"] or f"{record['error']:.1e}, bound {record['bound']:.1e}"
        found.append(Refusal(backend, op, path.parent.name, said, str(path)))
    return found
