"""The op x feature matrix: what each backend serves, asked of its own verifiers on representative calls."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kdacore import api, config
from kdacore.calls import description, requests
from kdacore.calls.description import CallDescription
from kdacore.calls.pools import Pool
from kdacore.calls.values import Shape
from kdacore.dispatch import selection
from kdacore.errors import ContractError
from kdacore.machine import Accelerator, Machine
from kdacore.ops import OPS
from kdacore.registry import Registered
from kdacore.types import ArrayKind, Backend, Request, Selection


def explain_call(call: CallDescription, backend: str | None = None, ranks: int = 1) -> Selection:
    """What dispatch would do with a described call, or on one of several ranks that each make it.

    Raises:
        ContractError: the call asks for something that its op has no argument for.
    """
    arguments = description.arguments(call)
    if ranks > 1:
        if "cp" not in OPS[call.op].options:
            raise ContractError(call.op, "cp", ranks, "nothing: the op has no such argument")
        arguments["cp"] = ranks
    return api.explain(call.op, **OPS[call.op].keywords(arguments), backend=backend)


USUAL_ARCH = {"cuda": "sm_90", "rocm": "gfx942", "tpu": "v5e"}
"""Asked about when this machine has no such device and ``KDACORE_ARCH`` names none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call could run: an array library and a device."""

    kind: ArrayKind
    device: str = "cpu"
    arch: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.device, self.arch)))


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a call may ask for, as a change to a plain call (:meth:`CallDescription.changed`)."""

    name: str
    change: dict[str, Any] = field(hash=False)
    families: tuple[str, ...] = ("chunk", "recurrent", "decode")
    kinds: tuple[ArrayKind, ...] = ("numpy", "torch", "jax")
    ops: tuple[str, ...] = ()
    """Only these ops, when given."""

    def applies(self, op: str) -> bool:
        return OPS[op].family in self.families and (not self.ops or op in self.ops)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one backend said about one feature of one op."""

    op: str
    feature: str
    backend: str
    on: tuple[str, ...]
    """The places it serves."""
    codes: tuple[str, ...]
    """Reason codes where it does not."""
    text: str
    """``yes``, ``no: codes``, the places it serves, or ``-`` where the question does not arise."""


_ALL = ("chunk", "recurrent", "decode", "gate", "stage")
_HEADED = ("kda_chunk_intra", "kda_recompute_w_u", "delta_rule_chunk_state", "kda_chunk_output")
_UNBOUNDED = {"use_gate_in_kernel": True, "lower_bound": None, "safe_gate": None}
_SAFE = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}

_USUAL_SIZES = Shape(B=1, T=256, H=2, HV=2, K=128, V=128)
_PARAMETERS = {"A_log": True, "dt_bias": "matrix"}
"""What asks the stage of the gate to compute it."""
_POOL = {"pool": "indexed", "pool_rows": 8}
_INPLACE = {"inplace_state": True, "output_final_state": True}
_DECODING = ("recurrent", "decode")
_CANDIDATES = {"pool": "accepted_inplace", **_INPLACE}


def _all_in(dtype: str) -> dict[str, Any]:
    """q, k, v, g and beta of one dtype."""
    return {"dtype": dtype, "gate_dtype": dtype, "beta_dtype": dtype}


FEATURES: tuple[Feature, ...] = (
    Feature("bfloat16", _all_in("bfloat16"), _ALL),
    Feature("float16", _all_in("float16"), _ALL),
    Feature("float32", _all_in("float32"), _ALL),
    Feature("float64", _all_in("float64"), _ALL),
    Feature("safe gate", _SAFE),
    Feature("unbounded gate", _UNBOUNDED),
    Feature("bounded gate below -5", {**_SAFE, "lower_bound": -20.0, "safe_gate": None}),
    Feature("log decay given", {"use_gate_in_kernel": None, "lower_bound": None, "safe_gate": None}),
    Feature("bounded gate", {"lower_bound": -5.0}, ("gate",)),
    Feature("unbounded gate", {"lower_bound": None}, ("gate",)),
    Feature("bounded gate", {**_PARAMETERS, "lower_bound": -5.0}, ("stage",), ops=("kda_chunk_gate",)),
    Feature("unbounded gate", _PARAMETERS, ("stage",), ops=("kda_chunk_gate",)),
    Feature("q and k normalised", {"use_qk_l2norm_in_kernel": True}),
    Feature("beta logits", {"use_beta_sigmoid_in_kernel": True}),
    Feature("negative eigenvalues", {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}),
    Feature("grouped heads (GVA)", {"HV": 4}),
    Feature("grouped heads (GVA)", {"HV": 4}, ("stage",), ops=_HEADED[:2] + _HEADED[3:]),
    Feature("packed sequences", {"B": 1, "lengths": (100, 0, 156)}, ("chunk", "stage")),
    Feature("packed sequences", {"B": 1, "T": 3, "lengths": (1, 0, 2)}, ("recurrent", "decode")),
    Feature("gradients", {"requires_grad": True}, ("chunk", "recurrent", "gate"), ("torch",)),
    Feature(
        "jit, vmap and grad",
        {"traced": True, "requires_grad": True},
        ("chunk", "recurrent", "gate"),
        ("jax",),
    ),
    Feature("initial state", {"initial_state": True}),
    Feature("bfloat16 state", {"initial_state": True, "state_dtype": "bfloat16"}),
    Feature("state_v_first", {"state_v_first": True, "initial_state": True}),
    Feature("state_v_first", {"state_v_first": True}, ("commit",)),
    Feature("bfloat16 state", {"state_dtype": "bfloat16"}, ("commit",)),
    Feature("one decay a head", {"one_decay": True}, ("commit",)),
    Feature("grouped heads (GVA)", {"HV": 4}, ("commit",)),
    Feature("rows to write", {"pool": Pool(inplace=True, writes=1, records=True)}, ("commit",)),
    Feature("null slots", {"null_index": 0}, ("commit",)),
    Feature("initial state", {"initial_state": True}, ("stage",), ops=("delta_rule_chunk_state",)),
    Feature(
        "state_v_first",
        {"state_v_first": True, "initial_state": True},
        ("stage",),
        ops=("delta_rule_chunk_state",),
    ),
    Feature("checkpoints", {"checkpoint_every": 64}, ("chunk",)),
    Feature("disable_recompute", {"disable_recompute": True, "requires_grad": True}, ("chunk",), ("torch",)),
    Feature("16 tokens a sequence", {"T": 16}, ("recurrent", "decode")),
    Feature("long sequences", {"T": 1024}, ("recurrent",)),
    Feature("state pool", _POOL),
    Feature("in-place pool", {**_POOL, **_INPLACE}),
    Feature("null slots", {**_POOL, "null_index": 0}),
    Feature("states from zeros (has_initial_state)", {"pool": "fresh_whole"}),
    Feature("rows to write", {**_POOL, **_INPLACE, "pool": Pool(writes=1)}),
    Feature("rows to write, one a token", {"T": 4, **_POOL, **_INPLACE, "pool": Pool(writes=2)}, _DECODING),
    Feature(
        "pool to write", {**_INPLACE, "pool": "written_only", "write_pool_rows": 8}, ("chunk", "recurrent")
    ),
    Feature(
        "pool to write", {**_INPLACE, "pool": "other_pool_same_rows", "write_pool_rows": 16}, ("decode",)
    ),
    Feature(
        "checkpoints at chosen tokens",
        {**_POOL, **_INPLACE, "pool": "checkpoints", "pool_rows": 16},
        ("chunk",),
    ),
    Feature(
        "records of candidates",
        {"T": 4, **_POOL, **_INPLACE, "pool": Pool(inplace=True, records=True)},
        _DECODING,
    ),
    Feature("accepted tokens", {"T": 4, "pool": "accepted", "inplace_state": True}, ("recurrent",)),
    Feature("accepted tokens", {"T": 4, **_CANDIDATES}, ("decode",)),
    Feature("windows of candidates", {"T": 4, **_CANDIDATES, "conv_windows": True}, ("decode",)),
    Feature("x convolved already", {"conv_width": 0}, ("decode",)),
    Feature("bias of the convolution", {"conv_bias": True}, ("decode",)),
    Feature("rows of the convolution", {"conv_indices": True}, ("decode",)),
    Feature("norm of the output", {"norm": "vector"}, ("decode",)),
    Feature("gated norm, sigmoid", {"norm": "vector", "z": True, "norm_activation": "sigmoid"}, ("decode",)),
    Feature(
        "gated norm, SiLU",
        {"norm": "heads", "z": True, "norm_activation": "silu", "norm_eps": 1e-6},
        ("decode",),
    ),
    Feature("convolution states", {"conv_state_given": True, "conv_indices": True}, ("commit",)),
    Feature("windows of candidates", {"conv_state_given": True, "conv_windows": True}, ("commit",)),
    Feature(
        "read-only pool",
        {"T": 4, **_POOL, "read_only_state": True, "output_final_state": None},
        _DECODING,
    ),
    Feature("out given", {"out": True}, kinds=("numpy", "torch")),
    *(Feature(f"K = V = {n}", {"K": n, "V": n}) for n in (16, 64, 128, 256)),
    *(Feature(f"K = {K}, V = {V}", {"K": K, "V": V}) for K, V in ((60, 100), (96, 192), (256, 512))),
    *(Feature(f"chunks of {n}", {"chunk_size": n}, ("stage",)) for n in (16, 32, 64)),
)
_NAMED = {name for feature in FEATURES for name in feature.change}
_FLAGS = dict.fromkeys(o.name for op in OPS.values() for o in op.option_arguments if o.kind == "flag")
# Flags that are not above: one that is added to an op's definition has a row at once.
FEATURES += tuple(
    Feature(name, {name: True}, _ALL, ops=tuple(op for op in OPS if name in OPS[op].options))
    for name in _FLAGS
    if name not in _NAMED
)

_MODEL = {
    **_SAFE,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}
_PLAIN: dict[str, tuple[dict[str, Any], ...]] = {
    # A backend may be narrow: a feature counts as served when any of these plain calls with it is.
    "chunk": (
        {**_MODEL, **_all_in("bfloat16")},
        _MODEL,
        _all_in("bfloat16"),
        {},
    ),
    "gate": (
        {"lower_bound": -5.0},
        {"lower_bound": -5.0, "dtype": "bfloat16"},
    ),
    "commit": ({},),
    "stage": (_all_in("bfloat16"), {}),
}


@cache
def plain_calls(op: str) -> tuple[CallDescription, ...]:
    """Calls of an op that ask for nothing special."""
    family = OPS[op].family
    first = CallDescription(op=op, shape=_USUAL_SIZES, index_dtype="int32")
    if family == "stage":  # the gate stage sums decays that are given
        first = first.changed(A_log=False, dt_bias="")
    if family in _DECODING:
        first = first.changed(B=4, T=1, output_final_state=True)
    if family == "commit":
        first = first.changed(B=4, T=1, pool=Pool(inplace=True, records=True))
    return tuple(first.changed(**c) for c in _PLAIN["chunk" if family in _DECODING else family])


def places_of(backend: Backend, machine: Machine) -> tuple[Place, ...]:
    """Where a backend claims to run: this machine's devices, and the usual ones of the types it declares."""
    found: list[Place] = []
    for kind in backend.kinds:
        types = {"cpu"} | {a.type for a in machine.accelerators if a.kind == kind}
        if "*" not in backend.device_types:
            types = set(backend.device_types) if kind != "numpy" else types & set(backend.device_types)
        found += [Place(kind, t, arch_of(t, kind, machine.accelerators)) for t in sorted(types)]
    return tuple(p for p in found if p.kind != "jax" or p.device != "rocm")


def arch_of(device: str, kind: str, accelerators: Iterable[Accelerator]) -> str:
    """The architecture to ask about: the one present, else ``KDACORE_ARCH``, else the usual one."""
    if device == "cpu":
        return ""
    here = [a.arch for a in accelerators if a.type == device and a.kind == kind]
    return (here or [config.get().arch or USUAL_ARCH.get(device, "")])[0]


def at(call: CallDescription, place: Place) -> CallDescription:
    """The call, at a place."""
    return dataclasses.replace(call, kind=place.kind, device=place.device, arch=place.arch)


def request_of(call: CallDescription) -> Request:
    """The call's request; a traced call is one that JAX may go on to differentiate."""
    return requests.request_of(call)


def capable(registered: Registered) -> Registered:
    """The backend as if all it requires were installed: the matrix shows what it could do."""
    return dataclasses.replace(registered, backend=dataclasses.replace(registered.backend, requirements=()))


@cache
def _calls(op: str, feature: Feature) -> tuple[CallDescription, ...]:
    """The plain calls of an op, each asking for the feature."""
    return tuple(call.changed(**feature.change) for call in plain_calls(op))


def matrix(backends: Iterable[Registered], machine: Machine) -> tuple[list[Answer], list[str]]:
    """Every answer, and the verifiers that raised instead of answering."""
    answers: list[Answer] = []
    raised: list[str] = []
    built = cache(request_of)  # once for all backends
    for registered in backends:
        able, places = capable(registered), places_of(registered.backend, machine)
        for op in OPS:
            if op in registered.backend.ops:
                answers += [_ask(able, op, f, places, built, raised) for f in FEATURES if f.applies(op)]
    return answers, list(dict.fromkeys(raised))


def _ask(
    able: Registered,
    op: str,
    feature: Feature,
    places: tuple[Place, ...],
    built: Callable[[CallDescription], Request],
    raised: list[str],
) -> Answer:
    name = able.backend.name
    asked = [p for p in places if p.kind in feature.kinds]
    on: list[str] = []
    codes: list[str] = []
    for place in asked:
        refusals = [_refusal(able, at(c, place), built, raised) for c in _calls(op, feature)]
        if any(not refusal for refusal in refusals):
            on.append(str(place))
        else:
            codes += sorted(refusals, key=len)[0]
    codes = list(dict.fromkeys(codes))
    text = (
        "-" if not asked else "yes" if len(on) == len(asked) else ", ".join(on) or f"no: {', '.join(codes)}"
    )
    return Answer(op, feature.name, name, tuple(on), tuple(codes), text)


def _refusal(
    able: Registered,
    call: CallDescription,
    built: Callable[[CallDescription], Request],
    raised: list[str],
) -> list[str]:
    """Reason codes, none when the backend serves the call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a raising verifier is reported by its reason below
        candidate = selection.judge(able, built(call))
    raised += [
        f"backend {able.backend.name}: {r.message}" for r in candidate.reasons if r.code == "verifier_error"
    ]
    return [reason.code for reason in candidate.reasons]
