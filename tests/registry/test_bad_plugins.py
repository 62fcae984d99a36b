"""One bad plugin: every call goes on, forced and automatic, and what is wrong with the plugin is said."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import kdacore
import kdacore.errors
from kdacore import machine, plugin_faults, registry
from kdacore.cli import doctor
from kdacore.hookspecs import hookimpl
from kdacore.machine import Machine, Row
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Outputs, Request, Requirement

ENDINGS = [KeyError("oops"), SystemExit("oops")]


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference alone on a machine with NumPy alone, so that the doctor is quick."""
    monkeypatch.setattr(registry, "BUILTIN_PLUGINS", ("kdacore_reference",))
    monkeypatch.setattr(machine, "probe", lambda: Machine((Row("system", "a test"),), (), ("numpy",)))
    REGISTRY.reset()
    yield
    monkeypatch.undo()
    REGISTRY.reset()


def forward(request: Request, inputs: Any) -> Outputs:
    return Outputs(o=np.full_like(inputs.v, 7.0))


def backend(name: str = "bad", op: dict[str, Any] | None = None, **fields: Any) -> Backend:
    impl = OpImpl(
        **{"forward": forward, "serves": FEATURES, "verified_archs": frozenset({"*"}), **(op or {})}
    )
    return Backend(
        **{"name": name, "version": "1", "kinds": ("numpy",), "ops": {"chunk_kda": impl}, **fields}
    )


def plugin(*backends: Any, **hooks: Callable[..., Any]) -> Any:
    """A plugin object of these backends, and of hooks without ``self``."""
    members: dict[str, Any] = {name: staticmethod(hookimpl(function)) for name, function in hooks.items()}
    if backends:
        members["kdacore_backends"] = staticmethod(hookimpl(lambda: list(backends)))
    return type("Plugin", (), members)()


def add(*backends: Any, name: str = "bad plugin", **hooks: Callable[..., Any]) -> None:
    REGISTRY.register(plugin(*backends, **hooks), name)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


def nothing() -> list[Any]:
    return []


def arguments(T: int = 5) -> dict[str, np.ndarray]:
    x = {n: np.ones((1, T, 2, 8), np.float32) for n in ("q", "k", "v")}
    return {**x, "g": -np.ones((1, T, 2, 8), np.float32), "beta": np.ones((1, T, 2), np.float32)}


def ran(T: int = 5, **options: Any) -> str:
    with kdacore.record_selections() as selections:
        kdacore.chunk_kda(**arguments(T), **options)
    return selections[-1].backend


def problems() -> list[str]:
    """What the doctor finds wrong."""
    return [f"{p['where']}: {p['what']}" for p in doctor.collect(selfchecks=False)["problems"]]


class _EntryPoint:
    """What importlib.metadata yields, as far as the registry looks."""

    def __init__(self, name: str, distribution: str, load: Callable[[], Any]) -> None:
        self.name, self.load = name, load
        self.dist: Any = type("Dist", (), {"name": distribution})()


def install(monkeypatch: pytest.MonkeyPatch, *entries: _EntryPoint) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(entries))
    REGISTRY.reset()


def rows(name: str) -> list[registry.PluginRecord]:
    return [p for p in REGISTRY.plugins() if p.name == name]


# --- code that raises on the way of a call ------------------------------------------------------------------------


@pytest.fixture
def one_warning() -> Iterator[list[str]]:
    """The RuntimeWarnings of a test, every one of them."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert len(texts) == 1, texts
    assert "oops" in texts[0] and "Traceback" in texts[0]


@pytest.mark.parametrize("error", ENDINGS)
def test_a_cost_that_raises_is_unknown(error: BaseException, one_warning: list[str]) -> None:
    add(backend(op={"cost": raising(error)}, rank=9))
    assert ran() == "bad"  # judged by rank
    assert ran(backend="reference") == "reference"
    candidate = kdacore.explain("chunk_kda", **arguments(6)).candidate("bad")
    assert candidate.supported and candidate.cost is None
    (said,) = problems()
    assert said.startswith(f"backend bad: cost of chunk_kda raised {error!r}\nTraceback")


@pytest.mark.parametrize("answer", ["fast", float("nan")])
def test_a_cost_that_is_no_number(answer: Any) -> None:
    add(backend(op={"cost": lambda request: answer}))
    add(backend("other", op={"cost": lambda request: 1.0}), name="other plugin")
    with pytest.warns(RuntimeWarning, match="backend bad: cost of chunk_kda raised"):
        assert kdacore.explain("chunk_kda", **arguments()).candidate("bad").cost is None


@pytest.mark.parametrize("error", ENDINGS)
def test_a_probe_that_raises(error: BaseException) -> None:
    add(backend(rank=9, requirements=(Requirement("bus", raising(error), "plug it in"),)))
    assert ran() == ran(backend="reference") == "reference"
    (reason,) = kdacore.explain("chunk_kda", **arguments()).candidate("bad").reasons
    assert reason.code == "unavailable" and repr(error) in reason.message and "plug it in" in reason.message
    info = next(b for b in kdacore.backends() if b.name == "bad")
    assert not info.available and repr(error) in info.missing[0]
    (said,) = problems()
    assert said.startswith(f"backend bad: a probe raised {error!r}\nTraceback")


def test_a_probe_that_answers_nonsense() -> None:
    add(backend(rank=9, requirements=(Requirement("bus", lambda: True, "-"),)))
    assert ran() == "reference"
    assert "a probe answers None or a str, not True" in problems()[0]


@pytest.mark.parametrize("kind", ["numpy", "torch", "torch with gradients", "jax", "traced"])
@pytest.mark.parametrize(
    "answer", [lambda v: None, lambda v: (v, None), lambda v: v], ids=["None", "pair", "o"]
)
def test_a_forward_that_returns_no_outputs(answer: Callable[[Any], Any], kind: str) -> None:
    library = {"traced": "jax"}.get(kind, kind.partition(" ")[0])
    given: Any = arguments()
    if library != "numpy":
        pytest.importorskip(library)
        given = {n: _array_of(library, x) for n, x in given.items()}
    if kind == "torch with gradients":
        given["v"].requires_grad_()
    op = {"forward": lambda request, inputs: answer(inputs.v), "backward": raising(KeyError("unreached"))}
    add(backend(kinds=(library,), op=op, traceable=True))
    call = partial(kdacore.chunk_kda, backend="bad")
    if kind == "traced":
        import jax

        call = jax.jit(call)
    for _ in range(3):  # also where the call is known
        with pytest.raises(
            kdacore.errors.PluginError, match=r"'bad'.*chunk_kda returned \w+; wanted kdacore.types.Outp"
        ):
            call(**given)


def _array_of(library: str, x: Any) -> Any:
    return (
        importlib.import_module("torch").from_numpy(x)
        if library == "torch"
        else importlib.import_module("jax.numpy").asarray(x)
    )


@pytest.mark.parametrize("answer", [None, (1,)])
def test_a_gate_that_returns_no_array(answer: Any) -> None:
    add(backend(ops={"kda_gate": OpImpl(lambda request, inputs: answer, serves=FEATURES)}))
    said = f"'bad': forward of kda_gate returned {type(answer).__name__}; wanted an array"
    with pytest.raises(kdacore.errors.PluginError, match=said):
        kdacore.kda_gate(np.ones((1, 2, 2, 4), np.float32), lower_bound=-5.0, backend="bad")


@pytest.mark.parametrize("error", ENDINGS)
def test_telemetry_that_raises(error: BaseException, one_warning: list[str]) -> None:
    told: list[str] = []
    add(kdacore_selected=lambda request, selection: told.append(selection.backend), name="first")
    add(kdacore_selected=raising_hook(error, "request", "selection"))
    assert ran() == ran(T=6) == ran(backend="reference") == "reference"
    assert len(told) == 3, "the other plugin still hears of every selection"
    (said,) = problems()
    assert said.startswith(f"plugin bad plugin: kdacore_selected raised {error!r}\nTraceback")


def raising_hook(error: BaseException, *names: str) -> Callable[..., Any]:
    """pluggy looks at a hook's arguments, so they must be there."""
    scope: dict[str, Any] = {"error": raising(error)}
    exec(f"def hook({', '.join(names)}): error()", scope)
    function: Callable[..., Any] = scope["hook"]
    return function


@pytest.mark.parametrize("error", ENDINGS)
def test_a_policy_that_raises(error: BaseException, one_warning: list[str]) -> None:
    add(backend("good"), kdacore_choose=lambda request, candidates: "good", name="first")
    assert ran() == "good"
    REGISTRY.unregister("first")
    add(kdacore_choose=raising_hook(error, "request", "candidates"))
    assert ran() == ran(T=6) == kdacore.explain("chunk_kda", **arguments()).backend == "reference"
    assert problems()[0].startswith(f"plugin bad plugin: kdacore_choose raised {error!r}\nTraceback")


def test_a_policy_that_raises_hides_no_other_policy() -> None:
    add(backend("good"), kdacore_choose=lambda request, candidates: "good", name="first")
    add(kdacore_choose=raising_hook(KeyError("oops"), "request", "candidates"))  # the newest is asked first
    with pytest.warns(RuntimeWarning, match="kdacore_choose raised"):
        assert ran() == "good"


def test_the_doctor_finds_a_policy_that_raises_by_itself() -> None:
    add(kdacore_choose=raising_hook(KeyError("oops"), "request", "candidates"))
    assert problems()[0].startswith("plugin bad plugin: kdacore_choose raised KeyError('oops')")


def test_a_policy_that_answers_nonsense() -> None:
    add(kdacore_choose=lambda request, candidates: ["reference"])
    with pytest.warns(RuntimeWarning, match=r"plugin bad plugin: kdacore_choose named \['reference'\]"):
        assert ran() == "reference"


def test_the_doctor_finds_a_policy_that_answers_nonsense_by_itself() -> None:
    add(kdacore_choose=lambda request, candidates: "nosuch")
    assert problems() == ["plugin bad plugin: kdacore_choose named 'nosuch', which cannot serve the call"]


def test_wrappers_of_hooks_still_wrap() -> None:
    def fails(request: Any, candidates: Any) -> Any:
        yield
        raise KeyError("oops")

    def instead(request: Any, candidates: Any) -> Any:
        yield
        return "good"

    members = {"kdacore_choose": staticmethod(hookimpl(wrapper=True)(instead))}
    add(backend("good"), name="first")
    REGISTRY.register(type("Wraps", (), members)(), "wraps")
    assert ran() == "good"
    REGISTRY.register(
        type("Fails", (), {"kdacore_choose": staticmethod(hookimpl(wrapper=True)(fails))})(), "fails"
    )
    with pytest.warns(RuntimeWarning, match="oops"):
        assert ran() == "reference"


@pytest.mark.parametrize("error", ENDINGS)
def test_a_verifier_that_raises(error: BaseException, one_warning: list[str]) -> None:
    add(backend(op={"verifiers": (raising(error),)}, rank=9))
    assert ran() == ran(T=6) == ran(backend="reference") == "reference"
    assert repr(error) in kdacore.explain("chunk_kda", **arguments()).candidate("bad").reasons[0].message


@pytest.mark.parametrize("answer", [True, "too long", ()])
def test_a_verifier_that_answers_no_reason(answer: object) -> None:
    add(backend(op={"verifiers": (lambda request: answer,)}, rank=9))
    with pytest.warns(RuntimeWarning, match="neither None nor a Reason"):
        assert ran() == "reference"
    with pytest.raises(kdacore.UnsupportedError) as caught:
        ran(backend="bad")
    (reason,) = caught.value.reasons["bad"]
    assert reason.code == "verifier_error" and f"answered {answer!r}" in reason.message
    assert any(f"answered {answer!r}" in said for said in problems())


def test_a_verifier_that_answers_no_reason_fails_verification() -> None:
    from kdacore.testing.verify import verify

    add(backend(op={"verifiers": (lambda request: "too long",)}))
    with pytest.warns(RuntimeWarning, match="neither None nor a Reason"):
        report = verify("bad", progress=False)
    assert not report.ok


def test_an_interrupt_is_the_users() -> None:
    add(backend(op={"verifiers": (raising(KeyboardInterrupt()),)}))
    with pytest.raises(KeyboardInterrupt):
        ran()


def test_a_change_of_plugins_forgets_what_was_reported() -> None:
    add(backend(op={"cost": raising(KeyError("oops"))}))
    with pytest.warns(RuntimeWarning, match="oops"):
        ran()
    assert len(plugin_faults.faults()) == 1
    REGISTRY.unregister("bad plugin")
    assert plugin_faults.faults() == ()


# --- what is declared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": "high"}, "has rank = 'high'; wanted an int"),
        ({"ops": {"chunk_kda": forward}}, "wanted an OpImpl"),
        ({"ops": ["chunk_kda"]}, "has ops = ['chunk_kda']; wanted a mapping"),
        ({"ops": {3: OpImpl(forward)}}, "declares unknown ops: 3"),
        ({"kinds": "numpy"}, "has kinds = 'numpy'; wanted a tuple of str"),
        ({"kinds": ("numpy", "pytorch")}, "declares unknown kinds: pytorch; there are numpy, torch, jax"),
        ({"name": 7}, "declares a backend whose name is 7; wanted at most 64 letters"),
        ({"version": 1}, "has version = 1; wanted a str"),
        ({"device_types": "cpu"}, "has device_types = 'cpu'; wanted a tuple of str"),
        ({"auto_kinds": "numpy"}, "has auto_kinds = 'numpy'; wanted a tuple of str, or None"),
        ({"auto_device_types": "cpu"}, "has auto_device_types = 'cpu'"),
        ({"summary": None}, "has summary = None"),
        ({"traceable": "yes"}, "has traceable = 'yes'; wanted a bool"),
        ({"capturable": 1}, "has capturable = 1"),
        ({"requirements": ("torch",)}, "has requirements[0] = 'torch'; wanted a Requirement"),
        ({"requirements": (Requirement("torch", "no", "-"),)}, "has requirements[0].probe = 'no'"),
        ({"requirements": (Requirement("torch", lambda: None, None),)}, "has requirements[0].remedy = None"),
        ({"op": {"forward": None}}, "has ops['chunk_kda'].forward = None; wanted a function"),
        ({"op": {"backward": 1}}, "has ops['chunk_kda'].backward = 1; wanted a function, or None"),
        ({"op": {"verifiers": forward}}, "].verifiers = "),
        ({"op": {"verifiers": ("T",)}}, "].verifiers = ('T',); wanted a tuple of functions"),
        ({"op": {"cost": 1e-3}}, "].cost = 0.001"),
        ({"op": {"verified_archs": "sm_90"}}, "].verified_archs = 'sm_90'; wanted a frozenset of str"),
        ({"op": {"batch_invariant": None}}, "].batch_invariant = None"),
        ({"op": {"compiles": None}}, "].compiles = None"),
        ({"op": {"fast_path": True}}, "].fast_path = True"),
    ],
)
def test_a_field_of_the_wrong_type(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(kdacore.PluginError) as caught:
        add(backend(**fields))
    assert said in str(caught.value)
    assert "bad" not in REGISTRY.backends() and ran() == "reference"
    assert said in rows("bad plugin")[0].problem


def test_lists_and_sets_do_where_tuples_do() -> None:
    add(backend(kinds=["numpy"], device_types={"cpu"}, rank=9, op={"verifiers": []}))
    assert ran() == "bad"


def test_two_backends_of_one_name_in_one_plugin() -> None:
    with pytest.raises(kdacore.PluginError, match="declares two backends named 'bad'; the first is used"):
        add(backend(version="first"), backend(version="second"))
    assert REGISTRY.get("bad").backend.version == "first"


def test_a_good_backend_beside_a_bad_one() -> None:
    with pytest.raises(kdacore.PluginError, match="rank = 'high'"):
        add(backend("good", rank=9), backend(rank="high"))
    assert ran() == "good"
    REGISTRY.unregister("bad plugin")
    assert ran() == "reference"


# --- plugins ------------------------------------------------------------------------------------------------------


def test_a_second_plugin_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    first = plugin(
        backend("one", rank=9), kdacore_selected=lambda request, selection: told.append(selection.backend)
    )
    install(
        monkeypatch,
        _EntryPoint("mine", "dist-one", lambda: first),
        _EntryPoint("mine", "dist-two", lambda: plugin(backend("two"))),
    )
    well, clash = rows("mine")
    assert (well.problem, clash.problem) == (
        "",
        "plugin name conflict: 'mine' comes from both dist-one and dist-two",
    )
    assert not clash.detail and "two" not in REGISTRY.backends()
    assert ran() == "one" and told == ["one"]


def test_a_name_registered_twice_by_hand() -> None:
    add(backend("one", rank=9), kdacore_choose=lambda request, candidates: "one")
    with pytest.raises(kdacore.PluginError, match="plugin name conflict: 'bad plugin'"):
        add(backend("two"))
    assert ran() == "one"
    assert kdacore.explain("chunk_kda", **arguments()).why == "chosen by the kdacore_choose hook"
    REGISTRY.unregister("bad plugin")
    assert not rows("bad plugin")


def test_one_object_under_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = plugin(backend("one"))
    install(monkeypatch, _EntryPoint("a", "dist", lambda: module), _EntryPoint("b", "dist", lambda: module))
    assert [p.problem for p in rows("a") + rows("b")] == ["", "is the same object as plugin 'a' of dist"]
    assert "one" in REGISTRY.backends()


def test_a_misspelt_hook() -> None:
    with pytest.raises(
        kdacore.PluginError, match="implements kdacore_backendz; kdacore's hooks are kdacore_backends,"
    ):
        add(kdacore_backendz=nothing)
    with pytest.raises(kdacore.PluginError) as caught:
        add(kdacore_chose=lambda: None, name="another")
    assert "backendz" not in str(caught.value), "a name of somebody's misspelling is no hook"


def test_a_misspelt_hook_costs_the_others_nothing() -> None:
    add(backend("good"), name="first")
    with pytest.raises(kdacore.PluginError, match="implements kdacore_backendz"):
        add(kdacore_backendz=nothing, kdacore_choose=lambda request, candidates: "good")
    assert ran() == "good"


def test_a_distribution_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = _EntryPoint("a", "", lambda: plugin(backend("good")))
    nameless.dist.name = None
    install(monkeypatch, nameless, _EntryPoint("b", "dist", lambda: plugin(backend("other"))))
    assert REGISTRY.get("good").distribution == "(unknown distribution)"
    assert "other" in REGISTRY.backends()


def test_plugins_that_do_nothing() -> None:
    with pytest.raises(kdacore.PluginError, match="implements no hook of kdacore"):
        add(name="a")
    with pytest.raises(kdacore.PluginError, match="brings no backend and no other hook"):
        add(kdacore_backends=nothing, name="b")
    add(kdacore_backends=nothing, kdacore_doctor_checks=nothing, name="c")


def test_a_rejected_plugin_is_not_asked_anything() -> None:
    def choose(request: Any, candidates: Any) -> str:
        raise AssertionError("asked")

    for fields in ({"api_version": 0}, {"rank": "high"}):
        with pytest.raises(kdacore.PluginError):
            add(backend(**fields), kdacore_choose=choose)
        assert ran() == "reference"
    assert len(rows("bad plugin")) == 2
    REGISTRY.unregister("bad plugin")
    assert not rows("bad plugin")
    add(backend(rank=9))
    assert ran() == "bad"


@pytest.mark.parametrize("error", ENDINGS)
def test_a_plugin_that_ends_the_process_at_import(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        monkeypatch,
        _EntryPoint("a", "dist-a", raising(error)),
        _EntryPoint("b", "dist-b", lambda: plugin(kdacore_backends=raising(error))),
        _EntryPoint("c", "dist-c", lambda: plugin(backend("good"))),
    )
    assert rows("a")[0].problem == f"failed to import: {error!r}" and "Traceback" in rows("a")[0].detail
    assert rows("b")[0].problem == f"failed to list its backends: {error!r}"
    assert "good" in REGISTRY.backends()


def test_an_interrupt_while_loading_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [KeyboardInterrupt()]

    def load() -> Any:
        if errors:
            raise errors.pop()
        return plugin(backend("good"))

    install(monkeypatch, _EntryPoint("late", "dist", load))
    with pytest.raises(KeyboardInterrupt):
        REGISTRY.backends()
    assert "good" in REGISTRY.backends()
    assert not [p.problem for p in REGISTRY.plugins() if p.problem]


def test_what_a_plugin_prints_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> list[Backend]:
        print("listing")
        return [backend("good")]

    def load() -> Any:
        print("hello")
        return plugin(kdacore_backends=listed)

    install(monkeypatch, _EntryPoint("chatty", "dist", load))
    before = sys.stdout
    assert "good" in REGISTRY.backends()
    assert capsys.readouterr() == ("", "hello\nlisting\n")
    assert sys.stdout is before
