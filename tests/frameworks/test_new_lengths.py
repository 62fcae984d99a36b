"""Calls that differ from others in lengths alone get the plan, or the error, that they would get as a first call."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore import types, verifiers
from kdacore.acceleration import torch_arrays
from kdacore.acceleration.new_lengths import CallFamily
from kdacore.arrays.numpy import NUMPY
from kdacore.arrays.torch.eager import TORCH
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription
from kdacore.calls.pools import POOLS
from kdacore.dispatch import call as dispatch
from kdacore.dispatch import plan as plans
from kdacore.dispatch import results, selection
from kdacore.dispatch.candidates import Judge
from kdacore.errors import ContractError, UnsupportedError
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES, OPS
from kdacore.registry import REGISTRY, Registered
from kdacore.testing.random_cases import random_case
from kdacore.types import Backend, InputGrads, OpImpl, Outputs, Reason, Request

WHOLE = tuple(name for name, op in OPS.items() if op.family in ("chunk", "recurrent"))


def zeros(request: Request, inputs: Any) -> Outputs:
    """Results of the right shapes; what is written is the caller's."""
    found = {e.name: e for e in results.expected_results(request, inputs)}
    given: dict[str, Any] = {"o": inputs.out if request.has("out") else None}
    if request.inplace_state and request.output_final_state:
        given["final_state"] = getattr(inputs, request.written_pool)
    for name, e in found.items():
        if given.get(name) is None:
            if request.kind == "numpy":
                given[name] = np.zeros(
                    e.shape, getattr(inputs.q, "dtype", None) if name == "o" else e.dtypes[0]
                )
            else:
                given[name] = torch.zeros(e.shape, dtype=getattr(torch, e.dtypes[0]))
    return Outputs(given["o"], given.get("final_state"), given.get("checkpoints"))


def too_long(request: Request) -> Reason | None:
    if request.T > 20:
        return Reason("too_long", "serves short calls", f"T={request.T}", "T <= 20")
    return None


def many_rows(request: Request) -> Reason | None:
    if request.pool_size > 6 or request.N == 3:
        raise ValueError("a bug of the plugin's")
    return None


@verifiers.reads_no_lengths
def small_heads(request: Request) -> Reason | None:
    if request.K > 32:
        return Reason("heads", "serves small heads", f"K={request.K}", "K <= 32")
    return None


ENTERED: list[str] = []
"""The backends of :class:`Plugin` that ran, in order."""


class Plugin:
    """Four backends that do nothing, whose answers depend on lengths in different ways; and a policy."""

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        def backend(name: str, rank: int, *checks: Any, cost: Any = None) -> Backend:
            def forward(request: Request, inputs: Any) -> Outputs:
                ENTERED.append(name)
                return zeros(request, inputs)

            op = OpImpl(
                forward, serves=FEATURES, verifiers=checks, cost=cost, verified_archs=frozenset({"*"})
            )
            return Backend(
                name=name, version="1", kinds=("numpy", "torch"), ops=dict.fromkeys(WHOLE, op), rank=rank
            )

        return [
            backend("short", 30, small_heads, too_long, verifiers.lengths(25, 1)),
            backend("few", 20, many_rows, small_heads),
            backend("priced", 1, cost=lambda request: request.T * 1e-6 if request.T % 3 else None),
            backend("dear", 2, cost=lambda request: 1e-5),
        ]

    @hookimpl
    def kdacore_choose(self, request: Request, candidates: Any) -> str | None:
        return "reference" if request.T == 7 else None


@pytest.fixture
def plugin() -> Iterator[None]:
    REGISTRY.register(Plugin(), "lengths-test")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the verifier that raises
        warnings.simplefilter("ignore", kdacore.PerformanceWarning)  # of the backends without a cost
        yield
    REGISTRY.unregister("lengths-test")


def forget() -> None:
    """As in a process that has made no call."""
    plans.clear()
    selection.clear()
    for adapter in (NUMPY, TORCH):
        adapter.seen_calls = None
    dispatch._called.clear()


def outcome(op: str, given: dict[str, Any]) -> Any:
    """What became of a call: its selection, or the error."""
    ENTERED.clear()
    with kdacore.record_selections() as ran, torch.no_grad():
        try:
            getattr(kdacore, op)(**OPS[op].keywords(given))
        except (ContractError, UnsupportedError) as error:
            return type(error), str(error)
    assert [s.backend for s in ran if s.backend != "reference"] == ENTERED
    return ran


def lengths_of(call: CallDescription, rng: Any) -> CallDescription:
    records = call.pool_use is not None and call.pool_use.records  # of which a row has as many in all calls
    if call.shape.lengths:
        lengths = tuple(int(n) for n in rng.integers(1, 8, rng.integers(1, 5)))
        lengths = (*lengths, 7) if records else lengths
        padding = int(rng.integers(0, 3))
        return call.changed(lengths=lengths, padding=padding, T=sum(lengths) + padding)
    most = 16 if call.option("read_only_state") or call.family == "decode" else 27
    rows = 1 if call.pool_use is not None and call.pool_use.checkpoints else 3
    T = min(call.shape.T, 16) if records else int(rng.integers(1, most + 1))
    return call.changed(B=int(rng.integers(1, rows + 1)), T=T)


def cut(given: dict[str, Any], rng: Any) -> dict[str, Any]:
    """The same arguments with one array shorter: most of them are wrong then."""
    names = [name for name, x in given.items() if hasattr(x, "shape") and x.ndim]
    name = str(rng.choice(names))
    return {**given, name: given[name][: max(0, given[name].shape[0] - 1)]}


def calls_like(seed: int) -> tuple[str, list[dict[str, Any]]]:
    """A random call with many lengths, wrong shapes among them."""
    rng = np.random.default_rng(seed)
    kind = ("numpy", "torch")[seed % 2]
    call: CallDescription = random_case("reference", seed, "cpu", only=(kind,))  # type: ignore[arg-type]
    while call.family in ("gate", "commit"):
        seed += 1000
        call = random_case("reference", seed, "cpu", only=(kind,))  # type: ignore[arg-type]
    call = call.changed(requires_grad=False, host_offsets=call.host_offsets and kind == "torch")
    if seed % 3:
        suited = [name for name, pool in POOLS.items() if pool.suits(call.family)]
        name = str(rng.choice(suited))
        asked = POOLS[name].options
        call = call.changed(pool=name, initial_state=False, output_final_state=False, **asked)
    found = []
    for _ in range(14):
        given = {**make_arrays(lengths_of(call, rng)), **dict(call.options)}
        found.append(cut(given, rng) if rng.random() < 0.25 else given)
    return call.op, found


@pytest.mark.first_cases(8)
@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_of_new_lengths(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op, calls = calls_like(seed)
    alone = []
    for given in calls:
        forget()
        alone.append(outcome(op, given))
    forget()
    served: list[bool] = []
    plan_of = CallFamily.plan_of

    def counted(self: CallFamily, shapes: Any) -> Any:
        plan = plan_of(self, shapes)
        served.append(plan is not None)
        return plan

    monkeypatch.setattr(CallFamily, "plan_of", counted)
    assert [outcome(op, given) for given in calls] == alone
    assert [outcome(op, given) for given in calls] == alone, "seen before"
    good = sum(isinstance(found, list) for found in alone)
    # The convolution's states of these draws grow with the lengths, so the calls are of different families.
    if good > 6 and torch_arrays.TensorGuards is not None and OPS[op].family != "decode":
        assert any(served)


@pytest.mark.usefixtures("plugin")
def test_random_calls_reach_every_outcome() -> None:
    """The draws above are worth their while: all backends are chosen, and calls of both errors are drawn."""
    chosen: set[str] = set()
    errors: set[Any] = set()
    for seed in range(12):
        op, calls = calls_like(seed)
        forget()
        for given in calls:
            found = outcome(op, given)
            if isinstance(found, list):
                chosen |= {f"{s.backend}: {s.why}" for s in found}
            else:
                errors.add(found[0])
    assert {text.split(":")[0] for text in chosen} >= {"priced", "dear", "reference"}
    assert "reference: chosen by the kdacore_choose hook" in chosen
    assert errors >= {ContractError}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_fused_decode_of_new_lengths(kind: str) -> None:
    """Calls on the same pools are recognised, and those of too many tokens, or sequences, are refused as before."""
    forget()
    made = CallDescription(op="fused_decode_kda", kind=kind, pool="inplace", conv_windows=True).changed(  # type: ignore[arg-type]
        B=5, T=4, inplace_state=True
    )
    candidates = CallDescription(op="fused_decode_kda", kind=kind, pool="candidates").changed(  # type: ignore[arg-type]
        B=5, T=4, inplace_state=True
    )
    for call, most in ((made, 16), (candidates, 5)):  # the row has room for one more than there are columns
        pools = {n: x for n, x in make_arrays(call).items() if n in ("initial_state", "conv_state")}
        for B, T in ((2, 1), (3, 2), (1, 3), (4, 4), (5, 1)):
            given = {**make_arrays(call.changed(B=B, T=T)), **pools, "inplace_state": True}
            kdacore.fused_decode_kda(**given)
        adapter = NUMPY if kind == "numpy" else TORCH
        assert adapter.seen_calls.families["fused_decode_kda"]
        longer = call.changed(B=1, T=most)
        given = {**make_arrays(longer), **pools, "inplace_state": True}
        given |= {
            n: x[:, [0] * (most + 1)] for n, x in given.items() if n in ("x", "g", "beta", "write_indices")
        }
        with pytest.raises(ContractError, match="'x'" if most == 16 else "'conv_state'"):
            kdacore.fused_decode_kda(**given)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_commits_of_new_numbers_of_states(kind: str) -> None:
    """Recognised, and wrong ones are refused as before."""
    forget()
    for N in (2, 3, 4, 5, 6):
        described = CallDescription(op="commit_records", kind=kind).changed(B=N, T=3, pool_rows=12)  # type: ignore[arg-type]
        given = OPS["commit_records"].keywords(make_arrays(described))
        given["records"] = tuple(x[:2] for x in given["records"])
        given["record_indices"][:] = -1
        kdacore.commit_records(**given)
    adapter = NUMPY if kind == "numpy" else TORCH
    assert adapter.seen_calls.families["commit_records"]
    with pytest.raises(ContractError, match="'num_replayed'"):
        kdacore.commit_records(**{**given, "num_replayed": given["num_replayed"][1:]})


def call(T: int, kind: str = "torch", **options: Any) -> dict[str, Any]:
    x = make_arrays(CallDescription(kind=kind).changed(T=T, H=2, HV=2))  # type: ignore[arg-type]
    return {**x, **options}


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_forced_backend_declines_some_lengths(kind: str) -> None:
    forget()
    for T in (4, 5, 6, 7, 8):
        kdacore.chunk_kda(**call(T, kind), backend="short")
    with pytest.raises(UnsupportedError, match="too_long"):
        kdacore.chunk_kda(**call(21, kind), backend="short")
    kdacore.chunk_kda(**call(9, kind), backend="short")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_is_asked_at_which_call(kind: str) -> None:
    asked: dict[str, list[int]] = {
        "marked": [],
        "plain": [],
        "cost": [],
        "chosen": [],
        "told": [],
        "probe": [],
    }

    @verifiers.reads_no_lengths
    def marked(request: Request) -> None:
        asked["marked"].append(request.T)

    def plain(request: Request) -> None:
        asked["plain"].append(request.T)

    def cost(request: Request) -> float:
        asked["cost"].append(request.T)
        return 1e-6

    class Counting:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            op = OpImpl(
                zeros,
                serves=FEATURES,
                verifiers=(marked, plain),
                cost=cost,
                verified_archs=frozenset({"*"}),
            )
            probe = kdacore.types.Requirement("nothing", lambda: asked["probe"].append(0), "nothing")
            return [
                Backend(
                    name="counting",
                    version="1",
                    kinds=("numpy", "torch"),
                    ops={"chunk_kda": op},
                    requirements=(probe,),
                )
            ]

        @hookimpl
        def kdacore_choose(self, request: Request, candidates: Any) -> None:
            asked["chosen"].append(request.T)

        @hookimpl
        def kdacore_selected(self, request: Request, selection: Any) -> None:
            asked["told"].append(request.T)

    REGISTRY.register(Counting(), "counting")
    forget()
    try:
        lengths = [4, 5, 6, 7, 8, 9]
        for T in (*lengths, *lengths):
            kdacore.chunk_kda(**call(T, kind))
    finally:
        REGISTRY.unregister("counting")
    assert asked == {
        "marked": [4],
        "plain": lengths,
        "cost": lengths,
        "chosen": lengths,
        "told": lengths,
        "probe": [0],
    }


@pytest.mark.skipif(torch_arrays.TensorGuards is None, reason="this torch has no such check")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_new_lengths_skip_the_ordinary_path(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary: list[int] = []
    cached_plan = dispatch.cached_plan
    monkeypatch.setattr(dispatch, "cached_plan", lambda *a: ordinary.append(1) or cached_plan(*a))  # type: ignore[func-returns-value]
    forget()
    for T in range(4, 14):
        kdacore.chunk_kda(**call(T, kind))
    assert 2 <= len(ordinary) <= 3
    before = len(ordinary)
    with pytest.raises(ContractError, match="'v'"):
        kdacore.chunk_kda(**{**call(4, kind), "v": call(5, kind)["v"]})
    assert len(ordinary) == before + 1
    kdacore.chunk_kda(**call(4, kind), output_final_state=True)
    assert len(ordinary) == before + 2, "another option is another family"


@pytest.mark.filterwarnings("ignore:.* is passed over:kdacore.PerformanceWarning")
def test_a_change_of_the_backends_is_seen() -> None:
    forget()
    for T in range(4, 10):
        kdacore.chunk_kda(**call(T))
    REGISTRY.register(Plugin(), "lengths-test")
    try:
        with kdacore.record_selections() as ran:
            kdacore.chunk_kda(**call(10))
        assert ran[0].backend == "priced"
    finally:
        REGISTRY.unregister("lengths-test")
    with kdacore.record_selections() as ran:
        kdacore.chunk_kda(**call(11))
    assert ran[0].backend == "reference"


def test_a_failed_probe_is_asked_again_at_every_length() -> None:
    answers: list[Exception] = [ValueError("not yet"), ValueError("not yet"), ValueError("not yet")]

    def probe() -> str | None:
        if answers:
            raise answers.pop()
        return None

    class Late:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            op = OpImpl(zeros, serves=FEATURES, cost=lambda request: 1e-9, verified_archs=frozenset({"*"}))
            requirement = kdacore.types.Requirement("late", probe, "wait")
            return [
                Backend(
                    name="late",
                    version="1",
                    kinds=("torch",),
                    ops={"chunk_kda": op},
                    requirements=(requirement,),
                )
            ]

    REGISTRY.register(Late(), "late")
    forget()
    try:
        with kdacore.record_selections() as ran:
            for T in range(4, 10):
                kdacore.chunk_kda(**call(T))
    finally:
        REGISTRY.unregister("late")
    assert [s.backend for s in ran] == ["reference"] * 3 + ["late"] * 3


def test_a_marked_verifier_that_raises_is_asked_again() -> None:
    faults: list[Exception] = [ValueError("not yet"), ValueError("not yet")]

    @verifiers.reads_no_lengths
    def verify(request: Request) -> None:
        if faults:
            raise faults.pop()

    op = OpImpl(zeros, serves=FEATURES, verifiers=(verify,))
    backend = Backend(name="late", version="1", kinds=("torch",), ops={"chunk_kda": op})
    judge = Judge(Registered(backend, "late", "late"), REQUEST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = [judge.candidate(dataclasses.replace(REQUEST, T=T)) for T in (4, 5, 6)]
    assert [[r.code for r in c.reasons] for c in found] == [["verifier_error"], ["verifier_error"], []]


REQUEST = Request(
    "chunk_kda", "torch", kdacore.types.Device("cpu"), 1, 4, 1, 1, 16, 16, 1, "float32", "float32"
)


def test_wrong_results_at_one_length_are_found() -> None:
    def sometimes(request: Request, inputs: Any) -> Outputs:
        return Outputs(inputs.v if request.T == 8 else torch.zeros_like(inputs.v))

    class Sharing:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            op = OpImpl(sometimes, serves=FEATURES, verified_archs=frozenset({"*"}))
            return [Backend(name="sharing", version="1", kinds=("torch",), ops={"chunk_kda": op})]

    REGISTRY.register(Sharing(), "sharing")
    forget()
    try:
        for T in (4, 5, 6, 7):
            kdacore.chunk_kda(**call(T), backend="sharing")
        with pytest.raises(kdacore.PluginError, match="memory of the argument 'v'"):
            kdacore.chunk_kda(**call(8), backend="sharing")
    finally:
        REGISTRY.unregister("sharing")


@pytest.mark.parametrize("what", ["negated", "freed", "subclass", "grad", "transform", "read only"])
def test_what_lengths_do_not_excuse(what: str) -> None:
    """Tensors that only the ordinary path can tell, of lengths that are new in a known family."""
    forget()
    for T in (4, 5, 6, 7):
        kdacore.chunk_kda(**call(T), out=torch.zeros(1, T, 2, 16))
    given = {**call(9), "out": torch.zeros(1, 9, 2, 16)}
    if what == "negated":
        given["v"] = torch.zeros(1, 9, 2, 16, dtype=torch.complex64).conj().imag
        assert given["v"].is_neg()
        kdacore.chunk_kda(**given)
        given["out"] = torch.zeros(1, 9, 2, 16, dtype=torch.complex64).conj().imag
        with pytest.raises(ContractError, match="lazily negated"):
            kdacore.chunk_kda(**given)
    elif what == "freed":
        given["k"].untyped_storage().resize_(0)
        with pytest.raises(ContractError, match="freed"):
            kdacore.chunk_kda(**given)
    elif what == "subclass":

        class Odd(torch.Tensor):
            pass

        given["v"] = given["v"].as_subclass(Odd)
        o, _ = kdacore.chunk_kda(**{k: v for k, v in given.items() if k != "out"})
        assert isinstance(o, Odd)
    elif what == "grad":
        given["q"].requires_grad_()
        with pytest.raises(ContractError, match="'out'"):
            kdacore.chunk_kda(**given)
        with torch.no_grad():
            kdacore.chunk_kda(**given)
    elif what == "transform":
        del given["out"]
        for T in (4, 5, 6, 7):
            kdacore.chunk_kda(**call(T))
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            torch.func.vmap(lambda q: kdacore.chunk_kda(**{**given, "q": q})[0])(given["q"][None])
    else:
        given["out"] = torch.zeros(1, 1, 2, 16).expand(1, 9, 2, 16)
        with pytest.raises(ContractError, match="overlaps itself"):
            kdacore.chunk_kda(**given)
        given["out"] = given["v"]
        with pytest.raises(ContractError, match="shared with 'v'"):
            kdacore.chunk_kda(**given)


def as_kind(x: Any, of: Any) -> Any:
    """NumPy values as an array of another's kind."""
    return torch.from_numpy(np.asarray(x)) if isinstance(of, torch.Tensor) else np.asarray(x)


def wrong_results(fault: str, inputs: Any, o: Any, state: Any) -> Outputs:
    """Results with something wrong, or odd, about them."""
    if fault == "shape":
        return Outputs(o[:, 1:], state)
    if fault == "dtype":
        return Outputs(o, as_kind(np.zeros(tuple(state.shape), np.float64), o))
    if fault == "an input":
        return Outputs(inputs.v, state)
    if fault == "part of an input":
        return Outputs(inputs.q.reshape(-1)[: math.prod(o.shape)].reshape(o.shape), state)
    if fault == "a missing result":
        return Outputs(o)
    if fault == "a result not asked for":
        return Outputs(o, state, as_kind(np.zeros(3, np.float32), o))
    if fault == "no output":
        return Outputs(None, state)
    if fault == "memory of another result":
        both = as_kind(np.zeros(max(math.prod(o.shape), math.prod(state.shape)), np.float32), o)
        return Outputs(*[both[: math.prod(x.shape)].reshape(x.shape) for x in (o, state)])
    if fault == "elements that share memory":
        return Outputs(
            as_kind(np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), o.shape, (0,) * 4), o), state
        )
    if fault == "another kind of array":
        return Outputs(o.numpy() if isinstance(o, torch.Tensor) else torch.from_numpy(o), state)
    gaps = as_kind(np.zeros((*o.shape, 2), np.float32), o)[..., 0]
    return Outputs(gaps, state)


FAULTS = (
    "shape", "dtype", "an input", "part of an input", "a missing result", "a result not asked for", "no output",
    "memory of another result", "elements that share memory", "another kind of array",
)  # fmt: skip


@contextlib.contextmanager
def registered(op: OpImpl) -> Iterator[None]:
    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [Backend(name="odd", version="1", kinds=("numpy", "torch"), ops={"chunk_kda": op})]

    REGISTRY.register(Plugin(), "odd")
    forget()
    try:
        yield
    finally:
        REGISTRY.unregister("odd")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("fault", [*FAULTS, "gaps"])
def test_every_wrong_result_at_one_length_is_found(fault: str, kind: str) -> None:
    def forward(request: Request, inputs: Any) -> Outputs:
        found = zeros(request, inputs)
        return found if request.T != 9 else wrong_results(fault, inputs, found.o, found.final_state)

    with registered(OpImpl(forward, serves=FEATURES, verified_archs=frozenset({"*"}))):
        for T in (4, 5, 6, 7, 8):
            kdacore.chunk_kda(**call(T, kind), backend="odd", output_final_state=True)
        for _ in range(2):
            given = {**call(9, kind), "backend": "odd", "output_final_state": True}
            with (
                contextlib.nullcontext()
                if fault == "gaps"
                else pytest.raises(kdacore.PluginError, match="odd")
            ):
                kdacore.chunk_kda(**given)
        kdacore.chunk_kda(**call(10, kind), backend="odd", output_final_state=True)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_another_array_than_the_one_to_write_is_found(kind: str) -> None:
    def forward(request: Request, inputs: Any) -> Outputs:
        return Outputs(inputs.out if request.T != 9 else 1 * inputs.out)

    with registered(OpImpl(forward, serves=FEATURES, verified_archs=frozenset({"*"}))):
        for T in (4, 5, 6, 7, 8):
            given = call(T, kind)
            assert kdacore.chunk_kda(**given, out=(out := 0 * given["v"]), backend="odd")[0] is out
        given = call(9, kind)
        with pytest.raises(kdacore.PluginError, match="other memory than that of 'out'"):
            kdacore.chunk_kda(**given, out=0 * given["v"], backend="odd")


def wrong_gradients(fault: str, inputs: Any, grads: InputGrads) -> Any:
    """Gradients with something wrong, or odd, about them."""
    if fault == "shape":
        return grads._replace(beta=grads.beta[:, 1:])
    if fault == "dtype":
        return grads._replace(k=grads.k.double())
    if fault == "an input":
        return grads._replace(v=inputs.v.detach())
    if fault == "memory of another gradient":
        return grads._replace(k=grads.q)
    if fault == "a missing gradient":
        return grads._replace(g=None)
    if fault == "a gradient of what was not given":
        return grads._replace(A_log=torch.zeros(2))
    if fault == "elements that share memory":
        return grads._replace(q=torch.zeros(1).expand(grads.q.shape))
    if fault == "a plain tuple":
        return tuple(grads)
    return grads._replace(q=torch.zeros(*grads.q.shape, 2)[..., 0])


@pytest.mark.parametrize(
    "fault",
    [
        "shape", "dtype", "an input", "memory of another gradient", "a missing gradient",
        "a gradient of what was not given", "elements that share memory", "a plain tuple", "gaps",
    ],
)  # fmt: skip
def test_every_wrong_gradient_at_one_length_is_found(fault: str) -> None:
    def backward(request: Request, inputs: Any, saved: Any, grads: Any) -> Any:
        found = InputGrads(*[torch.zeros_like(x) for x in inputs[:5]])
        return found if request.T != 9 else wrong_gradients(fault, inputs, found)

    def step(T: int) -> None:
        given = {n: x.requires_grad_() for n, x in call(T).items()}
        kdacore.chunk_kda(**given, backend="odd")[0].sum().backward()

    with registered(OpImpl(zeros, backward, serves=FEATURES, verified_archs=frozenset({"*"}))):
        for T in (4, 5, 6, 7, 8):
            step(T)
        with contextlib.nullcontext() if fault == "gaps" else pytest.raises(kdacore.PluginError, match="odd"):
            step(9)
        step(10)


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same values, lazily negated."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("what", ["negated", "subclass", "autocast"])
def test_saved_tensors_of_new_lengths_may_come_back_otherwise(what: str) -> None:
    class Odd(torch.Tensor):
        pass

    unpack = {"negated": negated, "subclass": lambda x: x.as_subclass(Odd)}.get(what, lambda x: x)

    def gradients(T: int, hooked: bool) -> list[torch.Tensor]:
        x = {n: y.requires_grad_() for n, y in call(T).items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack if hooked else lambda x: x):
            o, _ = kdacore.chunk_kda(**x, backend="reference")
        with torch.autocast("cpu", enabled=hooked and what == "autocast"):
            (o * o).sum().backward()
        return [y.grad for y in x.values() if y.grad is not None]

    forget()
    for T in (4, 5, 6, 7, 8, 9, 10):
        hooked = gradients(T, hooked=True)
        for ours, plain in zip(hooked, gradients(T, hooked=False), strict=True):
            assert torch.equal(ours, plain) and ours.dtype == torch.float32


def test_no_gradients_of_gradients_of_new_lengths() -> None:
    forget()
    for T in (4, 5, 6, 7, 8):
        x = {n: y.requires_grad_() for n, y in call(T).items()}
        o, _ = kdacore.chunk_kda(**x, backend="reference")
        (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
        with pytest.raises(UnsupportedError, match="double backward"):
            dq.sum().backward()


def test_columns_of_tables_are_lengths() -> None:
    """Calls that differ in the columns of ``state_indices`` alone have selections of their own."""

    def of(slots: int) -> Request:
        table = kdacore.types.TensorSpec((1, slots), "int32")
        return dataclasses.replace(
            REQUEST, op="fused_recurrent_kda", state_indices_ndim=2, tensors=(("state_indices", table),)
        )

    assert types.family_of(of(4)) == types.family_of(of(5))
    assert types.lengths_of(of(4)) != types.lengths_of(of(5))
    assert types.lengths_of(of(4)) == types.lengths_of(of(4))


def test_gradients_of_new_lengths() -> None:
    forget()
    for T in (4, 5, 6, 7, 8, 5):
        x = {n: y.requires_grad_() for n, y in call(T).items()}
        o, _ = kdacore.chunk_kda(**x)
        o.sum().backward()
        fresh = {n: y.detach().clone().requires_grad_() for n, y in x.items()}
        with kdacore.use_backend("reference"):
            kdacore.chunk_kda(**fresh)[0].sum().backward()
        assert all(torch.equal(x[n].grad, fresh[n].grad) for n in x)


def test_many_lengths_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdacore.acceleration import new_lengths

    monkeypatch.setattr(new_lengths, "_MAX_PLANS", 5)
    monkeypatch.setattr(selection, "_MAX_CACHED", 7)
    forget()
    for T in (*range(1, 30), *range(1, 30)):
        o, _ = kdacore.chunk_kda(**call(T, "numpy"))
        assert o.shape[1] == T
    (calls,) = NUMPY.seen_calls.families["chunk_kda"]
    assert len(calls._plans) <= 5 and selection._count <= 7


def test_refused_verifiers_keep_their_order() -> None:
    """Reasons come in the order of the verifiers, whichever of them are asked again."""

    def reason(name: str) -> Any:
        return lambda request: Reason(name, "declines everything")

    def marked(name: str) -> Any:
        @verifiers.reads_no_lengths
        def verify(request: Request) -> Reason:
            return Reason(name, "declines everything")

        return verify

    op = OpImpl(zeros, serves=FEATURES, verifiers=(marked("a"), reason("b"), marked("c"), reason("d")))
    backend = Backend(name="no", version="1", kinds=("torch",), ops={"chunk_kda": op})
    judge = Judge(Registered(backend, "no", "no"), REQUEST)
    for T in (4, 5, 6):
        found = judge.candidate(dataclasses.replace(REQUEST, T=T))
        assert [r.code for r in found.reasons] == ["a", "b", "c", "d"]
