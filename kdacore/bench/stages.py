"""The ``h200-stages`` preset: the two stages inside a chunk, as training uses them, beside the peer's.

The peer has one function for both stages together and one for the second alone, so that is what is timed; the figure
for the first stage is the difference of the two. The second only moves memory, so a plain copy of as many bytes takes
its turn too: no kernel can be much faster than that.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kdacore import stages
from kdacore.bench.arrays import SEED
from kdacore.bench.cases import is_wanted
from kdacore.bench.clock import Budget, Step, Timing, clock_for, interleave
from kdacore.bench.peers import fla
from kdacore.bench.results import Figure, Results, Row
from kdacore.calls.description import CallDescription
from kdacore.calls.values import Shape, offsets, to_kind
from kdacore.feature_matrix import arch_of, explain_call
from kdacore.machine import version_of
from kdacore.selfcheck.check import relative_error

PRESET = "h200-stages"
PEER = fla.PEER.distribution
BOTH, SECOND, SECOND_Q = "intra and w/u", "w/u", "w/u with q"
WORK = (BOTH, SECOND, SECOND_Q)
COPY = "copy of as many bytes"
BOUND = 9e-3
"""Relative error allowed to each result: twice the contract's bfloat16 bound, as for any near-singular chunk."""
CHECKED = 512
"""Tokens held against the oracle: chunks do not depend on each other."""
Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StageCase:
    """Sizes of one row; K = V."""

    name: str
    B: int
    T: int
    H: int = 64
    HV: int = 64
    K: int = 128
    lengths: tuple[int, ...] = ()
    first: float = 1.3
    """How many times faster than the peer the first stage has to be."""
    second: float = 1.2


_SHARES = (0.05, 0.2, 0.1, 0.15, 0.08, 0.12, 0.06)


_LONG = 4096
"""Tokens from which the stages have to be faster than the peer's; below, no slower."""


def _dense(T: int, heads: str, HV: int) -> StageCase:
    first, second = (1.3, 1.2) if T >= _LONG else (1.0, 1.0)
    return StageCase(f"B2 T{T} {heads}", 2, T, HV=HV, first=first, second=second)


def _pack(tokens: int, heads: str, HV: int) -> StageCase:
    """Eight uneven sequences."""
    lengths = [int(share * tokens) for share in _SHARES]
    lengths.append(tokens - sum(lengths))
    return StageCase(f"pack of 8, {tokens} tokens{heads}", 1, tokens, HV=HV, lengths=tuple(lengths))


_TOKENS = tuple(512 << n for n in range(7))
_PACKED_TOKENS = tuple(8192 << n for n in range(4))
CASES = (
    *(_dense(T, "H64", 64) for T in _TOKENS),
    *(_pack(tokens, "", 64) for tokens in _PACKED_TOKENS),
    *(_dense(T, "HQK64 HV128", 128) for T in _TOKENS),
    *(_pack(tokens, " HQK64 HV128", 128) for tokens in _PACKED_TOKENS),
)
"""Training shapes: 512 to 32,768 tokens, packs of 8,192 to 65,536, each with as
many value heads as query heads, and with twice as many."""


def tiny(case: StageCase) -> StageCase:
    """The same case on any machine: does it run at all?"""
    lengths = tuple(max(n // 512, 2) for n in case.lengths)
    return replace(
        case,
        name=f"{case.name}, shrunk",
        T=sum(lengths) or 70,
        H=1,
        HV=case.HV // case.H,
        K=16,
        lengths=lengths,
        first=0.0,
        second=0.0,
    )


def pieces(
    device: str, only: tuple[str, ...], names: Sequence[str], budget: Budget, small: bool
) -> Iterator[tuple[str, Callable[[], Results]]]:
    """One piece of work for each case whose name contains one of ``names``; for all where there is none."""
    for case in CASES:
        if is_wanted(case.name, names):
            fitted = tiny(case) if small else case
            yield case.name, functools.partial(run_case, fitted, device, only, budget)


def run_case(case: StageCase, device: str, only: tuple[str, ...], budget: Budget) -> Results:
    """Check, then time, every backend and the peer on the three kinds of work."""
    arrays = make(case, device)
    want = expected(case, arrays)
    results = Results()
    times: dict[tuple[str, str], Timing] = {}
    for work in WORK:
        steps: dict[str, Step] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name, refusal, step in _contenders(case, work, arrays, device, only):
            row = rows[name] = _about(case, work, name, device)
            if refusal:
                row.update(status="skipped", note=refusal)
                continue
            try:
                found = step()
            except Exception as error:  # noqa: BLE001  a contender may fail in any way; its row says how
                row.update(status="FAILED", note=repr(error)[:300])
                continue
            what, error_ = _worst(case, work, found, want)
            ok = error_ <= BOUND
            row.update(
                status="ok" if ok else "wrong", error=error_, bound=BOUND, note="" if ok else f"{what} is off"
            )
            if ok:
                steps[name] = step
        if steps and work != BOTH:
            steps[COPY] = _copy(work, arrays)
            rows[COPY] = {
                **_about(case, work, COPY, device),
                "backend": "",
                "status": "ok",
                "note": "torch.Tensor.copy_",
            }
        for name, t in interleave(steps, clock_for("torch", device), budget).items() if steps else ():
            rows[name].update(seconds=t.median, low=t.low, high=t.high, samples=t.samples)
            times[work, name] = t
        results.rows += [Row(**row) for row in rows.values()]
    results.figures += _figures(case, times)
    return results


# --- inputs, and what is right ---------------------------------------------------------------------------------------


def make(case: StageCase, device: str) -> Arrays:
    """Inputs as the first stages leave them: q and k normalised, beta applied, decays summed by chunk."""
    import torch

    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    B, T, H, HV, K = case.B, case.T, case.H, case.HV, case.K
    unit = torch.nn.functional.normalize
    x = {
        "q": unit(normal(B, T, H, K), dim=-1).bfloat16(),
        "k": unit(normal(B, T, H, K), dim=-1).bfloat16(),
        "v": normal(B, T, HV, K).bfloat16(),
        "beta": normal(B, T, HV).sigmoid().bfloat16(),
    }
    packed = {}
    if case.lengths:
        packed["cu_seqlens"] = x["cu_seqlens"] = to_kind(offsets(case.lengths), "torch", "int64", device)
    A_log = torch.zeros(HV, device=device)
    x["gc"] = stages.kda_chunk_gate(normal(B, T, HV, K).bfloat16(), A_log=A_log, lower_bound=-5.0, **packed)
    x["Akk"] = stages.kda_chunk_intra(x["q"], x["k"], x["gc"], x["beta"], **packed)[1]
    return x


def expected(case: StageCase, arrays: Arrays) -> dict[str, Any]:
    """The oracle's results for the part that is compared, each in float64."""
    x = {name: _part(case, a) for name, a in arrays.items() if name != "cu_seqlens"}
    group = case.HV // case.H
    for name in ("q", "k"):
        x[name] = x[name][:, :, (case.HV - 1) // group : (case.HV - 1) // group + 1]
    for name in ("v", "beta", "gc", "Akk"):
        x[name] = x[name][:, :, -1:]
    Aqk, Akk = stages.kda_chunk_intra(x["q"], x["k"], x["gc"], x["beta"], backend="reference")
    result = stages.kda_recompute_w_u(x["k"], x["v"], x["beta"], x["gc"], Akk, q=x["q"], backend="reference")
    return {"Aqk": Aqk, "Akk": Akk, **result._asdict()}


def _part(case: StageCase, x: Any) -> Any:
    """The first tokens of the longest sequence, or of the last batch row, as float64 NumPy."""
    start, length = 0, case.T
    if case.lengths:
        n = int(np.argmax(case.lengths))
        start, length = sum(case.lengths[:n]), case.lengths[n]
    return x[-1:, start : start + min(length, CHECKED)].detach().double().cpu().numpy()


def _worst(case: StageCase, work: str, found: Any, want: dict[str, Any]) -> tuple[str, float]:
    """The result with the largest relative error. ``found``: by name.

    Of Aqk and Akk what no stage after them reads is not asked about: the peer leaves it as it found it.
    """
    errors = {}
    for name, x in found.items():
        if x is None:
            continue
        part = _part(case, x)[:, :, -1:]
        if name in ("Aqk", "Akk"):
            tokens, chunk = part.shape[1], part.shape[-1]
            reads = np.arange(chunk) <= np.arange(tokens)[:, None] % chunk
            part = np.where(reads[:, None], part, 0.0)
        errors[name] = relative_error(part, want[name])
    what = max(errors, key=lambda name: errors[name])
    return what, errors[what]


# --- who is timed ----------------------------------------------------------------------------------------------------


def _contenders(
    case: StageCase, work: str, x: Arrays, device: str, only: tuple[str, ...]
) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Name, why it is not timed (or nothing), and one call."""
    ops = ("kda_chunk_intra", "kda_recompute_w_u") if work == BOTH else ("kda_recompute_w_u",)
    answers = [explain_call(_spec(case, op, device)) for op in ops]
    for candidate in answers[0].candidates:
        name = candidate.backend
        if only and name not in only:
            continue
        reasons = [r for answer in answers for r in answer.candidate(name).reasons]
        refusal = "; ".join(dict.fromkeys(f"[{r.code}] {r.message}" for r in reasons))
        if not refusal and name == "reference" and not device.startswith("cpu") and not only:
            refusal = "not timed on an accelerator unless named"
        yield f"kdacore {name}", refusal, functools.partial(_ours, work, x, name)
    version = version_of(PEER)
    why = "" if version else "not installed"
    if version and not device.startswith("cuda"):
        why = "needs torch tensors on a GPU"
    yield f"{PEER} {version}".strip(), why, functools.partial(_peer, work, x)


def _ours(work: str, x: Arrays, backend: str) -> dict[str, Any]:
    given: dict[str, Any] = {"backend": backend}
    if "cu_seqlens" in x:
        given["cu_seqlens"] = x["cu_seqlens"]
    Akk, found = x["Akk"], {}
    if work == BOTH:
        Aqk, Akk = stages.kda_chunk_intra(x["q"], x["k"], x["gc"], x["beta"], **given)
        found = {"Aqk": Aqk, "Akk": Akk}
    if work == SECOND_Q:
        given["q"] = x["q"]
    result = stages.kda_recompute_w_u(x["k"], x["v"], x["beta"], x["gc"], Akk, **given)
    return {**found, **result._asdict()}


def _peer(work: str, x: Arrays) -> dict[str, Any]:
    packed = {"cu_seqlens": x["cu_seqlens"]} if "cu_seqlens" in x else {}
    if work == BOTH:
        function = importlib.import_module("fla.ops.kda.chunk_intra").chunk_kda_fwd_intra
        scale = x["q"].shape[-1] ** -0.5
        w, u, _, kg, Aqk, Akk = function(
            q=x["q"], k=x["k"], v=x["v"], gk=x["gc"], beta=x["beta"], scale=scale, safe_gate=True, **packed
        )
        return {"Aqk": Aqk, "Akk": Akk, "w": w, "u": u, "kg": kg}
    function = importlib.import_module("fla.ops.kda.wy_fast").recompute_w_u_fwd
    q = x["q"] if work == SECOND_Q else None
    w, u, qg, kg = function(k=x["k"], v=x["v"], beta=x["beta"], A=x["Akk"], gk=x["gc"], q=q, **packed)
    return {"w": w, "u": u, "qg": qg, "kg": kg}


def _copy(work: str, x: Arrays) -> Callable[[], Any]:
    """Reads and writes, together, what the second stage has to."""
    import torch

    inputs = ("k", "v", "gc", "beta") + ("q",) * (work == SECOND_Q)
    results = ("k", "v", "k") + ("k",) * (work == SECOND_Q)
    values = x["v"].shape[2] // x["k"].shape[2]
    size = sum(x[name].nbytes for name in inputs)
    size += sum(x[name].nbytes * (values if name == "k" else 1) for name in results)
    size += x["Akk"].nbytes * 5 // 8  # by blocks of 16 x 16, those on and below the diagonal
    source = torch.zeros(size // 2, dtype=torch.uint8, device=x["v"].device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _spec(case: StageCase, op: str, device: str) -> CallDescription:
    from kdacore.bench.cases import Case
    from kdacore.bench.contenders import present

    kind = device.partition(":")[0]
    return CallDescription(
        op=op, shape=Shape(case.B, case.T, case.H, case.HV, case.K, case.K, case.lengths), dtype="bfloat16",
        beta_dtype="bfloat16", kind="torch", device=device, arch=arch_of(kind, "torch", present(Case(name=""))),
    )  # fmt: skip


# --- rows and figures ------------------------------------------------------------------------------------------------


def _about(case: StageCase, work: str, name: str, device: str) -> dict[str, Any]:
    shape = f"B{case.B} T{case.T} H{case.H} HV{case.HV} K{case.K} V{case.K}"
    return {
        "preset": PRESET,
        "case": f"{case.name}, {work}",
        "phase": "stage",
        "contender": name,
        "backend": name.removeprefix("kdacore "),
        "gates": "random",
        "shape": f"{shape} N{len(case.lengths)}" if case.lengths else shape,
        "dtype": "bfloat16",
        "device": f"torch {device}",
    }


def _figures(case: StageCase, times: dict[tuple[str, str], Timing]) -> list[Figure]:
    """Our best against the peer: the second stage with and without q, and the first as a difference."""
    peer = next((name for _, name in times if name.startswith(PEER)), None)
    if peer is None:
        return []

    def best(work: str) -> tuple[str, float] | None:
        ours = {n: t.median for (w, n), t in times.items() if w == work and n not in (peer, COPY)}
        return min(ours.items(), key=lambda item: item[1]) if ours and (work, peer) in times else None

    found = []
    for work in (SECOND, SECOND_Q):
        if (fastest := best(work)) is not None:
            found.append((work, times[work, peer].median / fastest[1], case.second, fastest[0]))
            if (work, COPY) in times:
                ceiling = times[work, peer].median / times[work, COPY].median
                found.append((f"{work}, a plain copy", ceiling, 0.0, COPY))
    if (fastest := best(BOTH)) is not None and (SECOND, fastest[0]) in times and (SECOND, peer) in times:
        ours = fastest[1] - times[SECOND, fastest[0]].median
        theirs = times[BOTH, peer].median - times[SECOND, peer].median
        found.insert(0, ("intra", theirs / ours, case.first, fastest[0]))
    return [
        Figure(
            preset=PRESET, name=f"{case.name}, {what}: times faster than {peer}", value=ratio, unit="x",
            want=f">= {least:g} x" if least else "", met=ratio >= least if least else None, note=who,
        )
        for what, ratio, least, who in found
    ]  # fmt: skip
