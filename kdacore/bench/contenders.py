"""Who is timed: every backend that serves the case here, and the peers that are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdacore import api
from kdacore.bench.arrays import Arrays, call_of, options
from kdacore.bench.cases import Case
from kdacore.bench.peers import PEERS, Peer
from kdacore.calls.description import CallDescription
from kdacore.dispatch.plan import record_selections
from kdacore.feature_matrix import arch_of, explain_call
from kdacore.machine import Accelerator, version_of
from kdacore.registry import REGISTRY

Result = tuple[Any, Any]
"""Output and final state."""


@dataclass(frozen=True)
class Contender:
    """One implementation of a case. ``refusal`` says why it is not timed; empty when it is."""

    name: str
    refusal: str = ""
    call: Callable[[Arrays], Result] | None = None
    ran: list[str] = field(default_factory=list)
    """What really ran, in order of first use."""
    forms: list[str] = field(default_factory=list)
    """In which forms."""
    auto: bool = False
    """Auto dispatch would choose it."""
    note: str = ""
    """What to know of its time."""
    bind: Callable[[Arrays], Callable[[], Any]] | None = None
    """The bare call with its arguments bound, for what is timed in microseconds; None where ``call`` has more to do."""


def kdacore_contenders(case: Case, device: str, only: tuple[str, ...]) -> list[Contender]:
    """One for each backend; the reference is timed on an accelerator only when it is named."""
    found = []
    selection = explain_call(described(case, device))
    for candidate in selection.candidates:
        name = candidate.backend
        if only and name not in only:
            continue
        refusal = "; ".join(f"[{r.code}] {r.message}" for r in candidate.reasons)
        if not refusal and candidate.lacking and device.startswith("cpu"):
            refusal = f"not here: {'; '.join(candidate.lacking)}"
        if not refusal and name == "reference" and not device.startswith("cpu") and not only:
            refusal = "not timed on an accelerator unless named"
        if not refusal and case.phase == "graph" and not REGISTRY.get(name).backend.capturable:
            refusal = "cannot be captured into a CUDA graph"
        if not refusal and case.longest is not None and (candidate.cost or 0.0) > case.longest:
            refusal = f"predicted to take longer than {case.longest * 1e3:g} ms"
        chosen = name == selection.backend
        ran: list[str] = []
        forms: list[str] = []
        call, bind = _through(case, name, ran, forms), _binder(case, name)
        found.append(Contender(f"kdacore {name}", refusal, call, ran, forms, chosen, bind=bind))
    return found


def _binder(case: Case, backend: str) -> Callable[[Arrays], Callable[[], Any]]:
    function, given = getattr(api, case.op), options(case)
    return lambda arrays: functools.partial(function, **arrays, **given, backend=backend)


def _through(case: Case, backend: str, ran: list[str], forms: list[str]) -> Callable[[Arrays], Result]:
    function, given = getattr(api, case.op), options(case)

    def call(arrays: Arrays) -> Result:
        if ran:
            return function(**arrays, **given, backend=backend)[:2]  # type: ignore[no-any-return]
        with record_selections() as selections:
            result = function(**arrays, **given, backend=backend)
        ran.extend(dict.fromkeys(s.backend for s in selections))
        forms.extend(dict.fromkeys(form for s in selections if (form := s.candidate(s.backend).form)))
        return result[:2]  # type: ignore[no-any-return]

    return call


def described(case: Case, device: str) -> CallDescription:
    """The case as dispatch sees it."""
    arch = arch_of(device.partition(":")[0], case.kind, present(case))
    return call_of(case, device, arch)


def present(case: Case) -> tuple[Accelerator, ...]:
    """The accelerators the case's array library sees, asked in this process: it is about to use them."""
    if case.kind == "torch":
        import torch

        from kdacore.device import torch_device

        if torch.cuda.is_available():
            d = torch_device("cuda", torch.cuda.current_device())
            return (Accelerator("torch", d.type, d.arch, torch.cuda.get_device_name()),)
    if case.kind == "jax":
        import jax

        from kdacore.device import jax_device

        d = jax_device(jax.devices()[0])
        return () if d.type == "cpu" else (Accelerator("jax", d.type, d.arch, str(jax.devices()[0])),)
    return ()


# --- the peers ----------------------------------------------------------------------------------------------------


def peer_contenders(case: Case, device: str, only: tuple[str, ...]) -> list[Contender]:
    """Other projects' kernels, each with the reason where it is not timed."""
    return [_peer(peer, case, device) for peer in PEERS if not only or peer.distribution in only]


def _peer(peer: Peer, case: Case, device: str) -> Contender:
    version = version_of(peer.distribution)
    name = f"{peer.distribution} {version}".strip()
    if not version:
        return Contender(name, "not installed")
    if refusal := _elsewhere(case, device) or peer.refusal(case):
        return Contender(name, refusal)
    return Contender(name, "", _built_when_called(peer, case), [name], note=peer.note(case))


def _built_when_called(peer: Peer, case: Case) -> Callable[[Arrays], Result]:
    """So that an installation that cannot be imported is a failed row, not the end of the bench."""
    build = functools.cache(lambda: peer.build(case))
    return lambda arrays: build()(arrays)


def _elsewhere(case: Case, device: str) -> str:
    return "" if case.kind == "torch" and device.startswith("cuda") else "needs torch tensors on a GPU"
