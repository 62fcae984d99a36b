"""The benchmark cases as data: sizes, options, and what each has to reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdacore.bench import choice_shapes as shapes
from kdacore.types import ArrayKind, Gate

PACK = (1300, 547, 2048, 963, 271, 3063)
GATE_SETS = ("random", "init")
"""``random``: raw gate N(0,1), A_log = log U(1,16), dt_bias 0.5 N(0,1), forgets fast; ``init``: raw gate 0.5 N(0,1),
dt_bias the inverse softplus of a log-uniform step in [0.001, 0.1], as models are initialised, forgets slowly."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What one backend has to reach in one case on the hardware the preset is for: seconds of one call."""

    must: float
    aim: float | None = None
    of: str = ""
    """A case of the same preset: both are then multiples of this backend's time there, in the same run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time.

    ``phase``: ``forward``, ``training`` (forward and backward), ``decode`` (a recurrent op, state pool in place),
    ``graph`` (the same as launches of a CUDA graph), ``host`` (the time a call keeps the CPU busy), ``host-training``
    (the same of forward and backward) or ``first-call`` (in a fresh process).
    """

    name: str
    phase: str = "forward"
    op: str = "chunk_kda"
    B: int = 1
    T: int = 8192
    H: int = 64
    HV: int = 0
    """0 for as many as H."""
    K: int = 128
    V: int = 128
    lengths: tuple[int, ...] = ()
    """Makes it a pack of these sequences."""
    dtype: str = "bfloat16"
    gate_dtype: str = ""
    """of g; that of q, k and v where empty."""
    kind: ArrayKind = "torch"
    gate: Gate = "sigmoid"
    """``sigmoid``: the safe gate, bounded by -5; ``softplus``: unbounded."""
    gate_inside: bool = True
    """The call computes the decay and beta from raw inputs. False: the caller has done so, with an unbounded gate, and
    gives the log decay in float32."""
    gate_sets: tuple[str, ...] = GATE_SETS
    plain: bool = False
    """No options: every implementation of the op serves the call. With ``gate_inside=False`` and ``pool=False``."""
    disable_recompute: bool = False
    initial_state: bool = False
    """A state to start from, for each sequence."""
    pool: bool = True
    """Recurrent ops only: states lie in a pool and are written in place."""
    state_dtype: str = "float32"
    state_v_first: bool = False
    oracle_tokens: int = 8192
    """A longer sequence is checked on its first tokens (outputs only): what follows cannot change them."""
    longest: float | None = None
    """Seconds; a backend that is predicted to take longer is not timed."""
    goals: Mapping[str, Goal] = field(default_factory=dict)
    """What each backend has to reach, by its name."""
    memory: float | None = None
    """Bytes beyond the inputs that one call may take at most."""
    peer: float | None = None
    """What flash-linear-attention 0.6.0 measured there, seconds."""

    @property
    def value_heads(self) -> int:
        return self.HV or self.H

    @property
    def N(self) -> int:
        return len(self.lengths) or self.B

    @property
    def trains(self) -> bool:
        """Gradients are computed."""
        return self.phase in ("training", "host-training")


def _goals(unit: float, **figures: tuple[float, ...]) -> dict[str, Goal]:
    """Backend -> must, and aim if there is one, in ``unit`` seconds."""
    return {
        backend: Goal(given[0] * unit, given[1] * unit if len(given) > 1 else None)
        for backend, given in figures.items()
    }


def _forward(
    name: str,
    peer: float,
    *,
    triton: tuple[float, ...] = (),
    cuda: tuple[float, ...] = (),
    relative: Mapping[str, Goal] | None = None,
    **sizes: object,
) -> Case:
    """Milliseconds of the peer, and what ours must reach and aim at."""
    given = {name: figures for name, figures in (("triton", triton), ("cuda", cuda)) if figures}
    goals = {**_goals(1e-3, **given), **(relative or {})}
    return Case(name=name, peer=peer * 1e-3, goals=goals, **sizes)  # type: ignore[arg-type]


def _decode(B: int, peer_us: float, **figures: tuple[float, ...]) -> Case:
    return Case(
        name=f"decode B{B} H32",
        phase="decode",
        op="fused_recurrent_kda",
        B=B,
        T=1,
        H=32,
        goals=_goals(1e-6, **figures),
        peer=peer_us * 1e-6,
    )


_USUAL = "B1 T8192 H64"
_H200_FORWARD = (
    _forward("B1 T8192 H96", 2.619, cuda=(0.80, 0.40), H=96),
    _forward(_USUAL, 1.773, triton=(1.10, 0.90), cuda=(0.60, 0.28)),
    _forward(
        "B1 T8192 H64 unbounded",
        1.956,
        triton=(1.30, 1.00),
        relative={"cuda": Goal(1.25, 1.15, _USUAL)},
        gate="softplus",
    ),
    _forward("B1 T8192 H32", 0.979, H=32),
    _forward("B1 T8192 H16", 0.783, triton=(0.35, 0.25), cuda=(0.35, 0.10), H=16),
    _forward("B1 T8192 H8", 0.601, cuda=(0.35, 0.08), H=8),
    _forward("B1 T65536 H8", 2.971, T=65536, H=8),
    _forward("B2 T8192 H64", 3.470, cuda=(1.00, 0.50), B=2),
    _forward("B16 T512 H32", 0.987, triton=(0.55, 0.35), cuda=(0.28, 0.15), B=16, T=512, H=32),
    _forward("B1 T512 H64", 0.642, cuda=(0.07, 0.035), T=512),
    _forward("B32 T2048 H16", 3.620, B=32, T=2048, H=16),
    _forward("packed 6 uneven H64", 1.809, cuda=(0.55, 0.28), T=sum(PACK), lengths=PACK),
    _forward("packed 8 x 1024 H64", 1.755, cuda=(0.50, 0.26), lengths=(1024,) * 8),
    _forward("packed 8129 + 63 x 1 H64", 2.193, lengths=(8129, *(1,) * 63)),
    _forward("GVA B1 T8192 H16 HV32", 0.930, H=16, HV=32),
    _forward("GVA B1 T8192 H32 HV64", 1.666, relative={"cuda": Goal(1.0, None, _USUAL)}, H=32, HV=64),
)
_TRAINING = {"triton": (5.0, 3.0), "cuda": (5.0, 3.0)}
_TRAINING_UNBOUNDED = {"triton": (6.5, 3.5), "cuda": (6.5, 3.5)}
_H200_TRAINING = (
    Case(name=_USUAL, phase="training", goals=_goals(1e-3, **_TRAINING), memory=3.77 * 2**30, peer=8.13e-3),
    Case(name="B1 T8192 H64 kept", phase="training", disable_recompute=True, peer=7.43e-3),
    Case(
        name="B1 T8192 H64 unbounded",
        phase="training",
        gate="softplus",
        goals=_goals(1e-3, **_TRAINING_UNBOUNDED),
        peer=10.57e-3,
    ),
    Case(name="B1 T8192 H96", phase="training", H=96),
    Case(name="B1 T8192 H32", phase="training", H=32),
    Case(name="B1 T8192 H16", phase="training", H=16),
    Case(name="B1 T8192 H8", phase="training", H=8),
    Case(name="B16 T512 H32", phase="training", B=16, T=512, H=32),
    Case(name="B1 T512 H64", phase="training", T=512),
    Case(name="packed 6 uneven H64", phase="training", T=sum(PACK), lengths=PACK),
    Case(name="GVA B1 T8192 H32 HV64", phase="training", H=32, HV=64),
)
_H200_DECODE = (
    _decode(1, 19.1, cuda=(7, 4.5)),
    _decode(8, 23.0, cuda=(12, 10)),
    _decode(32, 51.6, triton=(38, 34), cuda=(36, 34)),
    _decode(128, 175.8, cuda=(140, 134)),
    _decode(256, 388, triton=(280, 266), cuda=(275, 266)),
)
_H200_DECODE_GRAPH = tuple(dataclasses.replace(case, phase="graph", peer=None) for case in _H200_DECODE)
_H200_HOST = (
    Case(
        name="chunk_kda B1 T512 H8",
        phase="host",
        T=512,
        H=8,
        goals=_goals(1e-6, triton=(90, 50), cuda=(25,)),
        peer=692e-6,
    ),
    Case(
        name="fused_recurrent_kda B8 H32",
        phase="host",
        op="fused_recurrent_kda",
        B=8,
        T=1,
        H=32,
        goals=_goals(1e-6, triton=(20, 12), cuda=(12,)),
        peer=66e-6,
    ),
)
_H200_FIRST_CALL = (
    Case(
        name="first call, cold cache",
        phase="first-call",
        T=2048,
        H=16,
        goals=_goals(1.0, triton=(8.0, 4.0), cuda=(0.3,)),
        peer=70.0,
    ),
    Case(
        name="first call, warm cache",
        phase="first-call",
        T=2048,
        H=16,
        goals=_goals(1.0, triton=(1.0, 0.5), cuda=(0.3,)),
    ),
)
_QUICK = (
    Case(name="forward B1 T1024 H4", T=1024, H=4, K=64, V=64, dtype="float32", gate_sets=("init",)),
    Case(
        name="decode B4 H4",
        phase="decode",
        op="fused_recurrent_kda",
        B=4,
        T=1,
        H=4,
        K=64,
        V=64,
        dtype="float32",
        gate_sets=("init",),
    ),
)

_H200_HEADS = (
    *(Case(name=f"B1 T8192 H{H}", H=H) for H in (3, 4, 6, 12, 24, 48)),
    *(
        Case(name=f"B1 T{T} H{H} from a state", T=T, H=H, initial_state=True)
        for T in (2048, 4096)
        for H in (8, 32)
    ),
    Case(name="packed 2 x 4096 H12", H=12, lengths=(4096,) * 2),
    Case(name="packed 4 uneven H12", H=12, lengths=(1300, 547, 2048, 4297)),
    Case(name="packed 8 uneven H12", H=12, lengths=(1300, 547, 2048, 963, 271, 1015, 2000, 48)),
    Case(name="B64 T128 H32", B=64, T=128, H=32),
    Case(name="B256 T16 H32", B=256, T=16, H=32),
    *(Case(name=f"B1 T131072 H{H}", T=131072, H=H) for H in (4, 32)),
    *(Case(name=f"B1 T8192 H{H}", phase="training", H=H) for H in (4, 24)),
    *(Case(name=f"B1 T65536 H{H}", phase="training", T=65536, H=H) for H in (4, 8, 16, 24)),
    Case(name="training step B1 T512 H8", phase="host-training", T=512, H=8),
)
"""Few heads, long and short sequences: what :data:`_H200_FORWARD` and :data:`_H200_TRAINING` leave out."""


def _gated_delta(name: str, H: int, HV: int, *cuda: float, **sizes: Any) -> Case:
    """Milliseconds that cuda must reach, and aims at."""
    goals = _goals(1e-3, cuda=cuda) if cuda else {}
    op = "chunk_gated_delta_rule"
    return Case(name=name, op=op, gate="softplus", H=H, HV=HV, goals=goals, **sizes)


def _decay_given(name: str, H: int, HV: int, **sizes: Any) -> Case:
    """A call as flash-linear-attention hands them to FlashQLA, which computes neither the decay nor beta."""
    return _gated_delta(f"{name}, decay given", H, HV, gate_inside=False, **sizes)


_H200_GATED_DELTA = (
    _gated_delta("B1 T8192 H16 HV32", 16, 32, 0.20, 0.14),
    _gated_delta("B1 T8192 H2 HV8", 2, 8, 0.088, 0.068),
    _gated_delta("B1 T8192 H4 HV8", 4, 8, 0.088, 0.068),
    _gated_delta("B4 T2048 H16 HV32", 16, 32, 0.105, 0.09, B=4, T=2048),
    _gated_delta("B8 T2048 H16 HV32", 16, 32, 0.21, 0.165, B=8, T=2048),
    _gated_delta("B1 T8192 H16 HV64", 16, 64, 0.33, 0.25),
    _gated_delta("packed 6 uneven H16 HV32", 16, 32, 0.21, 0.15, T=sum(PACK), lengths=PACK),
    _gated_delta("B1 T32768 H2 HV8", 2, 8, 0.25, 0.20, T=32768),
    _gated_delta("B1 T2048 H4 HV8 from a state", 4, 8, 0.05, 0.04, T=2048, initial_state=True),
    _decay_given("B1 T8192 H16 HV32", 16, 32),
    _decay_given("B1 T8192 H2 HV8", 2, 8),
    _decay_given("B8 T2048 H16 HV32", 16, 32, B=8, T=2048),
    _decay_given("B1 T8192 H16 HV64", 16, 64),
    _decay_given("B1 T32768 H2 HV8", 2, 8, T=32768),
)
"""The forward of the gated delta rule, one decay a token, with the value heads of models that use it."""

_H200_GATED_DELTA_TRAINING = (
    _gated_delta("B1 T8192 H16 HV32", 16, 32, 0.85, 0.70, phase="training"),
    _gated_delta("B1 T8192 H2 HV8", 2, 8, 0.32, 0.24, phase="training"),
    _gated_delta("B8 T2048 H16 HV32", 16, 32, 1.6, 1.3, phase="training", B=8, T=2048),
    _gated_delta("B1 T8192 H16 HV64", 16, 64, 1.7, 1.35, phase="training"),
    _decay_given("B1 T8192 H16 HV32", 16, 32, phase="training"),
    _decay_given("B1 T8192 H2 HV8", 2, 8, phase="training"),
    _decay_given("B8 T2048 H16 HV32", 16, 32, phase="training", B=8, T=2048),
    _decay_given("B1 T8192 H16 HV64", 16, 64, phase="training"),
)

_H200_HEAD_DIMS = (
    Case(
        name="KDA K128 V256 training",
        phase="training",
        H=16,
        V=256,
        gate="softplus",
        goals={"cuda": Goal(1.35e-3, 1.15e-3)},
    ),
    Case(
        name="KDA K64 V64 training",
        phase="training",
        H=32,
        K=64,
        V=64,
        gate="softplus",
        goals={"cuda": Goal(1.2e-3, 0.9e-3)},
    ),
    _gated_delta("GDN K64 V64 training", 32, 32, 0.9, 0.7, phase="training", K=64, V=64),
    Case(name="KDA K96 V192 training", phase="training", H=16, K=96, V=192, gate="softplus"),
    _gated_delta("GDN K64 V64", 32, 32, K=64, V=64),
    _gated_delta("GDN K128 V256", 16, 16, V=256),
    _gated_delta("GDN K128 V256 training", 16, 16, phase="training", V=256),
    _gated_delta("GDN K96 V192 training", 16, 16, phase="training", K=96, V=192),
)
"""Head dims other than K = V = 128, one sequence of 8,192 tokens."""


def _choice() -> Iterator[Case]:
    """The calls of :mod:`kdacore.bench.choice_shapes`."""

    def case(words: str, **fields: Any) -> Case:
        c = Case(name="", gate_sets=("init",), oracle_tokens=512, longest=0.05, **fields)
        grouped = f" HV{c.HV}" if c.HV else ""
        pack = f"pack of {c.N}, {c.T} tokens, H{c.H}"
        size = pack if c.lengths else f"B{c.B} T{c.T} H{c.H}{grouped}"
        return dataclasses.replace(c, name=" ".join(filter(None, (size, words))))

    def sizes(given: shapes.Sizes) -> dict[str, int]:
        return dict(zip(("B", "T", "H", "HV"), given, strict=False))

    for given in (*shapes.FORWARD, *shapes.GROUPED):
        yield case("", **sizes(given))
    for given in shapes.UNBOUNDED:
        yield case("unbounded", gate="softplus", **sizes(given))
    for given in shapes.FROM_STATE:
        yield case("from a state", initial_state=True, **sizes(given))
    for given in shapes.TRAINING:
        yield case("training", phase="training", **sizes(given))
    for given in shapes.TRAINING_UNBOUNDED:
        yield case("training unbounded", phase="training", gate="softplus", **sizes(given))
    for packs, phase, words in (
        (shapes.PACKS, "forward", ""),
        (shapes.TRAINING_PACKS, "training", "training"),
    ):
        for lengths, H in packs:
            yield case(words, phase=phase, T=sum(lengths), H=H, lengths=lengths)
    for B, T, H, dtype, v_first in shapes.RECURRENT:
        words = f"recurrent {dtype}{' V first' if v_first else ''}"
        options = {"op": "fused_recurrent_kda", "state_dtype": dtype, "state_v_first": v_first}
        yield case(words, phase="decode", B=B, T=T, H=H, **options)


PRESETS: dict[str, tuple[Case, ...]] = {
    "quick": _QUICK,
    "h200-forward": _H200_FORWARD,
    "h200-training": _H200_TRAINING,
    "h200-heads": _H200_HEADS,
    "h200-gdn": _H200_GATED_DELTA,
    "h200-gdn-training": _H200_GATED_DELTA_TRAINING,
    "h200-head-dims": _H200_HEAD_DIMS,
    "h200-decode": _H200_DECODE,
    "h200-decode-graph": _H200_DECODE_GRAPH,
    "h200-host": _H200_HOST,
    "h200-first-call": _H200_FIRST_CALL,
    "h200-choice": tuple(_choice()),
}
SPECIAL = ("cpu", "xla", "dispatch", "import", "h200-stages")
"""Presets that are programs of their own: kdacore.bench.cpu, .xla, .dispatch, .imports and .stages."""


def is_wanted(name: str, texts: Sequence[str]) -> bool:
    """Does a case's name contain one of ``texts``? Every name does where there is none."""
    return not texts or any(text in name for text in texts)


def tiny(case: Case) -> Case:
    """The same case a thousand times smaller, to try a preset where its hardware is not."""
    lengths = tuple(1 if n == 1 else max(n // 64, 2) for n in case.lengths[:8])
    heads = min(case.H, 2)
    group = case.value_heads // case.H
    return dataclasses.replace(
        case,
        name=f"{case.name}, shrunk",
        B=min(case.B, 2),
        T=sum(lengths) if lengths else max(case.T // 128, 1) if case.T > 1 else 1,
        H=heads,
        HV=heads * group,
        K=16,
        V=16,
        lengths=lengths,
        goals={},
        memory=None,
        peer=None,
    )
