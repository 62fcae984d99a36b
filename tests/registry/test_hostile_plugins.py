"""What hostile and careless plugins do to a call: they change nothing that others see, and end nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import PluginError, machine, plugin_faults, registry
from kdacore.cli import doctor
from kdacore.hookspecs import hookimpl
from kdacore.machine import Machine, Row
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, InputGrads, IntraOutputs, OpImpl, Outputs, Reason, Requirement

WIDE = {"serves": FEATURES, "verified_archs": frozenset({"*"})}


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference alone."""
    monkeypatch.setattr(registry, "BUILTIN_PLUGINS", ("kdacore_reference",))
    monkeypatch.setattr(registry, "third_parties", lambda: ([], []))
    monkeypatch.setattr(machine, "probe", lambda: Machine((Row("system", "a test"),), (), ("numpy",)))
    REGISTRY.reset()
    yield
    monkeypatch.undo()
    REGISTRY.reset()


def register(op: OpImpl | None = None, name: str = "bad", ops: Any = None, **fields: Any) -> None:
    """A backend of one implementation, for chunk_kda unless ``ops`` says otherwise, with hooks among ``fields``."""
    members = {h: staticmethod(hookimpl(fields.pop(h))) for h in list(fields) if h.startswith("kdacore_")}
    if op is not None or ops is not None:
        fields = {"kinds": ("numpy", "torch"), "auto_kinds": (), **fields}
        backend = Backend(name, "1", ops=ops or {"chunk_kda": op}, **fields)
        members["kdacore_backends"] = staticmethod(hookimpl(lambda: [backend]))
    REGISTRY.register(type("Plugin", (), members)(), name)


def zeros(request: Any, inputs: Any) -> Outputs:
    state = np.zeros(request.state_shape, np.float32) if request.output_final_state else None
    return Outputs(np.zeros_like(inputs.v), state)


def arguments(T: int = 5, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(T)
    x = {n: rng.standard_normal((1, T, 2, 4), np.float32) for n in ("q", "k", "v")}
    return {**x, "g": -np.ones((1, T, 2, 4), np.float32), "beta": np.ones((1, T, 2), np.float32), **more}


def tensors(*gradients: str, **more: Any) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    x = {n: torch.from_numpy(a) for n, a in arguments(**more).items()}
    for name in gradients:
        x[name].requires_grad_()
    return x


# --- nothing that is handed out can be changed --------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], None]] = {
    "a flag": lambda r: object.__setattr__(r, "scale", 100.0),
    "a size": lambda r: object.__setattr__(r, "T", 1),
    "a field deleted": lambda r: object.__delattr__(r, "scale"),
    "a new field": lambda r: object.__setattr__(r, "mine", 1),
    "the device": lambda r: object.__setattr__(r.device, "type", "tpu"),
    "a dtype": lambda r: object.__setattr__(r.spec("q"), "dtype", "float64"),
    "its dictionary": lambda r: r.__dict__.update(scale=100.0),
    "its class": lambda r: object.__setattr__(r, "__class__", type("Other", (), {})),
    "a shape": lambda r: object.__setattr__(r.tensors[0][1], "shape", (9,)),
    "its features": lambda r: object.__setattr__(r, "features", frozenset()),
    "its state": lambda r: r.__setstate__({"scale": 100.0}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_verifier_cannot_change_the_request(change: str) -> None:
    want = kdacore.chunk_kda(**arguments(), backend="reference")[0]
    register(OpImpl(zeros, verifiers=(lambda request: CHANGES[change](request),), **WIDE), auto_kinds=None)
    with pytest.warns(RuntimeWarning, match="backend bad: verifier .* raised"):
        o = kdacore.chunk_kda(**arguments())[0]
    assert np.array_equal(o, want)
    assert np.array_equal(kdacore.chunk_kda(**arguments(), backend="reference")[0], want)


@pytest.mark.parametrize("change", ["a flag", "the device", "a dtype"])
@pytest.mark.parametrize("hook", ["cost", "choose", "selected"])
def test_nor_can_another_hook(hook: str, change: str) -> None:
    want = kdacore.chunk_kda(**arguments(), backend="reference")[0]

    def hostile(request: Any) -> None:
        CHANGES[change](request)

    if hook == "choose":
        register(OpImpl(zeros, **WIDE), kdacore_choose=lambda request, candidates: hostile(request))
    elif hook == "selected":
        register(kdacore_selected=lambda request, selection: hostile(request))
    else:
        register(OpImpl(zeros, cost=hostile, **WIDE), auto_kinds=None, rank=-1)
    with pytest.warns(RuntimeWarning, match="raised"):
        o = kdacore.chunk_kda(**arguments())[0]
    assert np.array_equal(o, want)


def test_what_is_told_of_a_selection_changes_no_later_call() -> None:
    def selected(request: Any, selection: Any) -> None:
        object.__setattr__(selection, "backend", "nonsense")

    def choose(request: Any, candidates: Any) -> None:
        object.__setattr__(candidates[0], "rank", -9)

    register(kdacore_selected=selected, kdacore_choose=choose)
    with kdacore.record_selections() as ran, pytest.warns(RuntimeWarning, match="raised"):
        kdacore.chunk_kda(**arguments())
        kdacore.chunk_kda(**arguments())
    assert [s.backend for s in ran] == ["reference", "reference"]


def test_a_forward_cannot_change_what_its_next_call_sees() -> None:
    seen: list[float] = []

    def forward(request: Any, inputs: Any) -> Outputs:
        seen.append(request.scale)
        with pytest.raises(AttributeError):
            object.__setattr__(request, "scale", 7.0)
        return zeros(request, inputs)

    register(OpImpl(forward, **WIDE))
    for _ in range(4):
        kdacore.chunk_kda(**arguments(), backend="bad")
    assert set(seen) == {0.5}


def test_requests_stay_data_classes() -> None:
    request = kdacore.explain("chunk_kda", **arguments()).request
    other = dataclasses.replace(request, T=6)
    assert (other.T, request.T, other == request, dataclasses.replace(other, T=5) == request) == (
        6, 5, False, True,
    )  # fmt: skip
    assert {request: 1}[dataclasses.replace(request)] == 1 and request != tuple(request)  # type: ignore[arg-type]
    assert dataclasses.asdict(request.device) == {"type": "cpu", "index": 0, "arch": ""}


# --- results have memory of their own -----------------------------------------------------------------------------


def _state(inputs: Any, request: Any) -> Any:
    return inputs.initial_state


BORROWED: dict[str, tuple[Callable[..., Outputs], dict[str, Any], str]] = {
    "an input": (lambda r, x: Outputs(x.v), {}, "o: got memory of the argument 'v'"),
    "a view": (lambda r, x: Outputs(x.q[:, :, :, :]), {}, "o: got memory of the argument 'q'"),
    "reversed": (lambda r, x: Outputs(x.k[:, ::-1]), {}, "o: got memory of the argument 'k'"),
    "one element for all": (
        lambda r, x: Outputs(np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), x.v.shape, (0,) * 4)),
        {},
        "o: got memory that overlaps itself",
    ),
    "a state": (
        lambda r, x: Outputs(np.zeros_like(x.v), x.initial_state),
        {"initial_state": np.zeros((1, 2, 4, 4), np.float32), "output_final_state": True},
        "final_state: got memory of the argument 'initial_state'",
    ),
    "each other's": (
        lambda r, x: (lambda b: Outputs(b[:20].reshape(1, 5, 2, 2), b[16:].reshape(1, 2, 4, 2)))(
            np.zeros(32, np.float32)
        ),
        {"v": np.zeros((1, 5, 2, 2), np.float32), "output_final_state": True},
        "final_state: got memory of the o",
    ),
    "not out": (
        lambda r, x: Outputs(np.zeros_like(x.v)),
        {"out": np.zeros((1, 5, 2, 4), np.float32)},
        "o: got other memory than that of 'out', which the call writes; 'out' may have been written",
    ),
    "not the pool": (
        lambda r, x: Outputs(np.zeros_like(x.v), x.initial_state.copy()),
        {
            "initial_state": np.zeros((3, 2, 4, 4), np.float32),
            "state_indices": np.array([1]),
            "inplace_state": True,
            "output_final_state": True,
        },
        "final_state: got other memory than that of 'initial_state'",
    ),
}


@pytest.mark.parametrize("name", BORROWED)
def test_results_in_the_memory_of_others(name: str) -> None:
    forward, more, said = BORROWED[name]
    register(OpImpl(forward, **WIDE))
    for _ in range(3):  # also where the call is known
        with pytest.raises(PluginError) as caught:
            kdacore.chunk_kda(**arguments(**more), backend="bad")
        assert str(caught.value).startswith(f"backend 'bad': forward of chunk_kda: {said}")


def test_results_of_other_ops_in_the_memory_of_inputs() -> None:
    x = arguments()
    ops = {
        "kda_gate": OpImpl(lambda r, i: i.g, **WIDE),
        "kda_chunk_intra": OpImpl(
            lambda r, i: IntraOutputs(b := np.zeros((1, 5, 2, 16), np.float32), b), **WIDE
        ),
        "fused_recurrent_kda": OpImpl(lambda r, i: Outputs(i.v), **WIDE),
    }
    register(ops=ops)
    with pytest.raises(PluginError, match="log decay: got memory of the argument 'g'"):
        kdacore.kda_gate(x["g"], lower_bound=-5.0, backend="bad")
    with pytest.raises(PluginError, match="Akk: got memory of the Aqk"):
        kdacore.stages.kda_chunk_intra(x["q"], x["k"], x["g"], x["beta"], chunk_size=16, backend="bad")
    with pytest.raises(PluginError, match="o: got memory of the argument 'v'"):
        kdacore.fused_recurrent_kda(**x, backend="bad")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        (lambda d, x: d._replace(v=x.v), "gradient of v: got memory of the argument 'v'"),
        (lambda d, x: d._replace(k=d.q), "gradient of k: got memory of the gradient of q"),
        (
            lambda d, x: d._replace(beta=d.beta[:, :1]),
            "gradient of beta: got shape [1, 1, 2]; wanted [1, 5, 2]",
        ),
    ],
    ids=["input", "both", "shape"],
)
def test_gradients(gradients: Callable[..., Any], said: str, compiled: bool) -> None:
    import torch

    def backward(request: Any, inputs: Any, saved: Any, grads: Any) -> InputGrads:
        return gradients(gradients_of(inputs), inputs)  # type: ignore[no-any-return]

    register(OpImpl(lambda r, x: Outputs(2 * x.v), backward, **WIDE))
    call = torch.compile(kdacore.chunk_kda, backend="eager") if compiled else kdacore.chunk_kda
    o = call(**tensors("v"), backend="bad")[0]
    with pytest.raises(PluginError) as caught:
        o.sum().backward()
    assert f"backend 'bad': backward of chunk_kda: {said}" in str(caught.value)


# --- fast paths ---------------------------------------------------------------------------------------------------


def called(times: int, op: OpImpl, **more: Any) -> Any:
    register(op)
    for _ in range(times):
        result = kdacore.chunk_kda(**arguments(), backend="bad", **more)
    return result


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: (x[2], None, None), "o: got memory of the argument 'v'"),
        (lambda x: "results", "returned str; wanted a tuple of 3 results or None"),
        (lambda x: [1 * x[2], None, None], "returned list; wanted a tuple of 3 results or None"),
        (lambda x: (1 * x[2],), "returned a tuple of 1; wanted a tuple of 3 results or None"),
        (lambda x: (None, None, None), "o: the call asks for it, and it is None"),
        (lambda x: (1.5, None, None), "o: got builtins.float; wanted a numpy array"),
        (lambda x: (x[2].astype(np.float64), None, None), "o: got dtype float64; wanted float32"),
        (lambda x: (1 * x[2], 1 * x[2], None), "final_state: returned, but the call did not ask for it"),
    ],
)
def test_a_fast_path_that_returns_junk(answer: Callable[..., Any], said: str) -> None:
    op = OpImpl(zeros, fast_path=lambda request, inputs: answer, **WIDE)
    with pytest.raises(PluginError) as caught:
        called(3, op)
    assert str(caught.value).startswith("backend 'bad': fast path of chunk_kda") and said in str(caught.value)
    with pytest.raises(PluginError):  # until it fits
        kdacore.chunk_kda(**arguments(), backend="bad")


def test_a_fast_path_is_checked_once() -> None:
    def answer(x: Any) -> Any:
        answers.append(0)
        return (1 * x[2], None, None)

    answers: list[int] = []
    called(6, OpImpl(zeros, fast_path=lambda request, inputs: answer, **WIDE))
    assert len(answers) == 4
    from kdacore.arrays.numpy import NUMPY

    assert NUMPY.seen_calls.calls["chunk_kda"][0].fast_call is answer


def test_a_fast_path_of_an_op_with_one_result() -> None:
    g = np.zeros((1, 2, 2, 4), np.float32)
    ops = {"kda_gate": OpImpl(lambda r, x: 2 * x.g, fast_path=lambda r, x: lambda a: (2 * a[0],), **WIDE)}
    register(ops=ops)
    for _ in range(4):
        assert kdacore.kda_gate(g, lower_bound=-5.0, backend="bad").shape == g.shape


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        (lambda request, inputs: 7, "is 7, no function or None"),
        (lambda request, inputs: 1 / 0, "ZeroDivisionError"),
        (lambda request, inputs: (_ for _ in ()).throw(SystemExit("enough")), "SystemExit: enough"),
    ],
)
def test_a_fast_path_that_cannot_be_made_is_passed_over(offer: Any, said: str) -> None:
    with pytest.warns(RuntimeWarning, match="backend bad: fast path of chunk_kda") as caught:
        called(4, OpImpl(zeros, fast_path=offer, **WIDE))
    assert said in str(caught[0].message) and len(caught) == 1
    assert len(plugin_faults.faults()) == 1


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        (lambda *a: 7, "returned int; wanted kdacore.types.FastGradients or None"),
        (lambda *a: (print, 7), "returned tuple; wanted kdacore.types.FastGradients or None"),
        (lambda *a: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_fast_gradients_that_cannot_be_made_are_passed_over(offer: Any, said: str) -> None:
    op = OpImpl(
        lambda r, x: Outputs(2 * x.v), lambda r, x, s, g: gradients_of(x), fast_gradients=offer, **WIDE
    )
    register(op)
    with pytest.warns(RuntimeWarning, match="backend bad: fast path of chunk_kda") as caught:
        for _ in range(4):
            kdacore.chunk_kda(**tensors("v"), backend="bad")[0].sum().backward()
    assert said in str(caught[0].message)


def gradients_of(inputs: Any) -> InputGrads:
    return InputGrads(*[1 * x for x in inputs[:5]])


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        (lambda x: (x[2], None, None), None, "fast path of chunk_kda: o: got memory of the argument 'v'"),
        (lambda x: (1 * x[2], None, None, "kept"), None, "returned str; wanted an array as saved[0]"),
        (lambda x: 1, None, "fast path of chunk_kda returned int; wanted a tuple of 3 results or None"),
        (None, lambda *a: (1,), "backward of chunk_kda returned tuple; wanted kdacore.types.InputGrads"),
        (None, lambda x, *a: (None, None, x[2], *[None] * 5), "gradient of v: got memory of the argument 'v'"),
    ],
)  # fmt: skip
def test_fast_gradients_that_return_junk(forward: Any, backward: Any, said: str) -> None:
    def offer(request: Any, inputs: Any, wanted: Any) -> Any:
        return forward or (lambda x: (1 * x[2], None, None)), backward or (lambda *a: None)

    op = OpImpl(
        lambda r, x: Outputs(2 * x.v), lambda r, x, s, g: gradients_of(x), fast_gradients=offer, **WIDE
    )
    register(op)
    with pytest.raises(PluginError) as caught:
        for _ in range(3):
            kdacore.chunk_kda(**tensors("v"), backend="bad")[0].sum().backward()
    assert f"backend 'bad': {said}" in str(caught.value) or said in str(caught.value)


# --- nothing ends the caller's process ----------------------------------------------------------------------------


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""

    def __repr__(self) -> str:
        raise Odd


DEADLY = [pytest.param(e, id=type(e).__name__) for e in (SystemExit(3), GeneratorExit(), Odd())]


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


OUT = {"out": np.zeros((1, 5, 2, 4), np.float32)}


@pytest.mark.parametrize("error", DEADLY)
def test_a_forward_that_would_end_the_process(error: BaseException) -> None:
    register(OpImpl(raising(error), **WIDE))
    for _ in range(3):
        with pytest.raises(PluginError) as caught:
            kdacore.chunk_kda(**arguments(**OUT), backend="bad")
        text = str(caught.value)
        assert "backend 'bad': forward of chunk_kda raised" in text and type(error).__name__ in text
        assert text.endswith("; 'out' may have been written") and caught.value.__cause__ is error


@pytest.mark.parametrize("error", DEADLY)
def test_a_fast_path_that_would_end_the_process(error: BaseException) -> None:
    with pytest.raises(PluginError, match="backend 'bad': fast path of chunk_kda raised"):
        called(3, OpImpl(zeros, fast_path=lambda r, x: raising(error), **WIDE))


@pytest.mark.parametrize("error", DEADLY)
@pytest.mark.parametrize("fast", [False, True])
def test_a_backward_that_would_end_the_process(error: BaseException, fast: bool) -> None:
    def offer(*given: Any) -> Any:
        return (lambda x: (2 * x[2], None, None)), raising(error)

    op = OpImpl(lambda r, x: Outputs(2 * x.v), raising(error), fast_gradients=offer if fast else None, **WIDE)
    register(op)
    results = [kdacore.chunk_kda(**tensors("v"), backend="bad")[0] for _ in range(3)]
    said = "fast backward" if fast else "backward"
    with pytest.raises(PluginError, match=f"backend 'bad': {said} of chunk_kda raised"):
        results[-1].sum().backward()


@pytest.mark.parametrize("error", DEADLY)
def test_hooks_that_would_end_the_process(error: BaseException) -> None:
    register(
        OpImpl(zeros, verifiers=(raising(error),), **WIDE),
        auto_kinds=None,
        requirements=(Requirement("bus", raising(error), "-"),),
        kdacore_selected=lambda request, selection: raising(error)(),
        kdacore_choose=lambda request, candidates: raising(error)(),
    )
    register(OpImpl(zeros, cost=raising(error), **WIDE), "second", auto_kinds=None, rank=-1)
    with pytest.warns(RuntimeWarning, match="raised"):
        assert kdacore.explain("chunk_kda", **arguments()).backend == "reference"
        kdacore.chunk_kda(**arguments())


@pytest.mark.parametrize("error", DEADLY)
def test_doctor_checks_that_would_end_the_process(error: BaseException) -> None:
    def checks() -> Any:
        yield ("first", True, "")
        raise error

    register(kdacore_doctor_checks=checks)
    register(kdacore_doctor_checks=lambda: iter(lambda: ("endless", True, ""), None), name="endless")
    found = doctor.collect(selfchecks=False)["problems"]
    assert any(type(error).__name__ in p["what"] for p in found if p["where"] == "plugin bad")
    assert any("gives more than 1000 checks" in p["what"] for p in found if p["where"] == "plugin endless")


@pytest.mark.parametrize("error", DEADLY)
def test_a_self_check_and_a_verification_that_would_end_the_process(error: BaseException) -> None:
    from kdacore.selfcheck import check
    from kdacore.testing.matrix import plan
    from kdacore.testing.suite import run_case

    register(OpImpl(raising(error), serves=FEATURES), auto_kinds=None)
    request = kdacore.explain("chunk_kda", **arguments()).request
    assert type(error).__name__ in check.measure(REGISTRY.get("bad"), request)["failure"]
    result = run_case(plan("bad").cases[0])
    assert result.status == "failed" and type(error).__name__ in result.message


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "forward": lambda f: {"op": OpImpl(f, **WIDE)},
    "verifier": lambda f: {"op": OpImpl(zeros, verifiers=(f,), **WIDE)},
    "cost": lambda f: {"op": OpImpl(zeros, cost=f, **WIDE), "auto_kinds": None},
    "fast path": lambda f: {"op": OpImpl(zeros, fast_path=lambda r, x: f, **WIDE)},
    "offer": lambda f: {"op": OpImpl(zeros, fast_path=f, **WIDE)},
    "choose": lambda f: {"kdacore_choose": lambda request, candidates: f()},
    "selected": lambda f: {"kdacore_selected": lambda request, selection: f()},
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_passes(place: str) -> None:
    register(**PLACES[place](raising(KeyboardInterrupt())))
    backend = None if place in ("cost", "choose", "selected") else "bad"
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            kdacore.chunk_kda(**arguments(), backend=backend)


# --- what may have been written -----------------------------------------------------------------------------------

POOL = {"initial_state": np.zeros((3, 2, 4, 4), np.float32), "state_indices": np.array([1])}
WRITTEN: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    (OUT, "; 'out' may have been written"),
    ({**POOL, "inplace_state": True}, "; 'initial_state' may have been written"),
    (
        {**POOL, **OUT, "inplace_state": True, "write_pool": np.zeros((2, 2, 4, 4), np.float32),
         "write_indices": np.array([0])},
        "; 'out', 'write_pool' may have been written",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("more", "written"), WRITTEN)
def test_an_error_keeps_its_type_and_names_what_may_have_been_written(
    more: dict[str, Any], written: str
) -> None:
    register(OpImpl(raising(MemoryError("no room")), **WIDE))
    with pytest.raises(MemoryError) as caught:
        kdacore.chunk_kda(**arguments(**more), backend="bad")
    assert caught.value.__notes__ == [f"backend 'bad' raised this in forward of chunk_kda{written}"]


def test_what_is_wrong_with_results_names_it_too() -> None:
    register(OpImpl(lambda r, x: None, **WIDE))
    with pytest.raises(PluginError, match="returned NoneType; .*Outputs; 'out' may have been written"):
        kdacore.chunk_kda(**arguments(**OUT), backend="bad")


def test_errors_of_the_backends_here_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = REGISTRY.get("reference").backend.ops["chunk_kda"]
    monkeypatch.setitem(
        REGISTRY.get("reference").backend.ops,  # type: ignore[arg-type]
        "chunk_kda",
        dataclasses.replace(reference, forward=raising(MemoryError("no room"))),
    )
    with pytest.raises(MemoryError) as caught:
        kdacore.chunk_kda(**arguments(T=7, out=np.zeros((1, 7, 2, 4), np.float32)), backend="reference")
    assert not hasattr(caught.value, "__notes__")


# --- answers ------------------------------------------------------------------------------------------------------


class Agrees:
    """Equal to everything, and to no one's name."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "cost",
    [True, False, float("inf"), -float("inf"), 10**400, 10**5000, -1, 1j, "1", np.float32(1), Agrees()],
    ids=lambda cost: type(cost).__name__,
)
def test_costs_that_are_none(cost: Any) -> None:
    register(OpImpl(zeros, cost=lambda request: cost, **WIDE), auto_kinds=None)
    with pytest.warns(RuntimeWarning, match="a cost is seconds, a finite number of 0 or more, or None; got"):
        found = kdacore.explain("chunk_kda", **arguments())
    assert found.candidate("bad").cost is None and "cost unknown" in str(found)


@pytest.mark.parametrize("cost", [0, 0.0, 3, 1e-300, np.float64(2)])
def test_costs(cost: Any) -> None:
    register(OpImpl(zeros, cost=lambda request: cost, **WIDE), auto_kinds=None)
    found = kdacore.explain("chunk_kda", **arguments()).candidate("bad").cost
    assert found == cost and type(found) is float


@pytest.mark.parametrize(
    "answer", [Agrees(), 10**5000, True, b"reference"], ids=lambda answer: type(answer).__name__
)
def test_choices_that_are_no_names(answer: Any) -> None:
    register(kdacore_choose=lambda request, candidates: answer)
    with pytest.warns(RuntimeWarning, match="which cannot serve the call"):
        assert kdacore.explain("chunk_kda", **arguments()).backend == "reference"


@pytest.mark.parametrize(
    "answer", [Reason("code", 5), Reason("code", "text", got=Agrees()), Reason(None, "x")]
)  # type: ignore[arg-type]
def test_reasons_that_are_no_texts(answer: Any) -> None:
    register(OpImpl(zeros, verifiers=(lambda request: answer,), **WIDE))
    with pytest.warns(RuntimeWarning, match="neither None nor a Reason of texts"):
        (reason,) = kdacore.explain("chunk_kda", **arguments()).candidate("bad").reasons
    assert reason.code == "verifier_error"


def test_a_reason_of_a_class_of_its_own_is_read_at_once() -> None:
    class Fickle(Reason):
        def __str__(self) -> str:
            raise SystemExit

    register(OpImpl(zeros, verifiers=(lambda request: Fickle("fickle", "says"),), **WIDE))
    assert "[fickle] says" in str(kdacore.explain("chunk_kda", **arguments()))


def test_a_reason_lists_what_was_not_served() -> None:
    register(OpImpl(zeros, serves=frozenset({"final_state", "initial_state"})))
    more = {
        "initial_state": np.zeros((1, 2, 4, 4), np.float32),
        "output_final_state": True,
        "checkpoint_every": 64,
    }
    (reason,) = kdacore.explain("chunk_kda", **arguments(), **more).candidate("bad").reasons
    assert (reason.message, reason.got) == ("does not serve checkpoints", "checkpoints")
    assert reason.want == "no features but final_state, initial_state"


# --- declarations -------------------------------------------------------------------------------------------------

UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"op": {"serves": frozenset({"paked"})}}, "features: paked", "'packed' for 'paked' (in ops['chunk_kda'].serves)"),
    ({"op": {"serves": frozenset({"gate.bound", "out"})}}, "features: gate.bound", "'gate.bounded'"),
    ({"op": {"serves": frozenset({"Checkpoints"})}}, "features: Checkpoints", "'checkpoints'"),
    ({"device_types": ("CPU",)}, "device types: CPU; there are *, cpu, cuda", "'cpu' for 'CPU' (in device_types)"),
    ({"device_types": ("cpu", "cuda:0")}, "device types: cuda:0", "'cuda'"),
    ({"auto_device_types": ("Cuda",)}, "device types: Cuda", "'cuda' for 'Cuda' (in auto_device_types)"),
    ({"kinds": ("numpy", "Torch")}, "kinds: Torch; there are numpy, torch, jax", "'torch' for 'Torch' (in kinds)"),
    ({"auto_kinds": ("jaxx",)}, "kinds: jaxx", "'jax' for 'jaxx' (in auto_kinds)"),
    ({"op": {"verified_archs": frozenset({"sm_90a"})}}, "architectures: sm_90a", "'sm_90' for 'sm_90a'"),
    ({"op": {"verified_archs": frozenset({"sm90", "*"})}}, "architectures: sm90", "'sm_90' for 'sm90'"),
    ({"op": {"verified_archs": frozenset({"GFX942"})}}, "architectures: GFX942", "'gfx942'"),
    ({"ops": {"chunk_kdaa": OpImpl(zeros)}}, "ops: chunk_kdaa", "'chunk_kda' for 'chunk_kdaa'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said", "nearest"), UNKNOWN)
def test_unknown_names_in_a_declaration(fields: dict[str, Any], said: str, nearest: str) -> None:
    op = OpImpl(zeros, **fields.get("op", {}))
    with pytest.raises(PluginError) as caught:
        register(op, **{n: x for n, x in fields.items() if n != "op"})
    text = str(caught.value)
    assert f"backend 'bad' declares unknown {said}" in text and f"the nearest known: {nearest}" in text
    assert "bad" not in REGISTRY.backends()


@pytest.mark.parametrize(
    "rank", [True, float("nan"), float("inf"), 10**400, 10**5000], ids=lambda rank: type(rank).__name__
)
def test_ranks_that_are_none(rank: Any) -> None:
    with pytest.raises(PluginError, match="has rank = .*; wanted an int"):
        register(OpImpl(zeros), rank=rank)


def test_known_names_in_a_declaration() -> None:
    archs = frozenset({"", "*", "sm_90", "sm_121", "gfx90a", "gfx1201", "v5e", "TPU v9"})
    register(
        OpImpl(zeros, serves=FEATURES, verified_archs=archs),
        device_types=("*", "cpu", "cuda", "rocm", "tpu", "npu"),
        rank=2.5,
    )


def test_a_repr_that_raises_in_a_declaration() -> None:
    with pytest.raises(PluginError, match="rank = an instance of Hidden, whose repr raises Odd"):
        register(OpImpl(zeros), rank=Hidden())


class Hidden:
    def __repr__(self) -> str:
        raise Odd
