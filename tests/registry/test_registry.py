"""Plugins: loaded once, guarded, conflicts named; a bad one never stops the others and is never hidden."""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config, lazy, registry
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Outputs, Reason, Request, Requirement


def _forward(request: Request, inputs: Any) -> Outputs:
    return Outputs(o=np.full_like(inputs.v, 7.0))


def make_plugin(name: str = "seven", **fields: Any) -> Any:
    """A plugin object with one backend that answers 7."""
    impl = OpImpl(
        forward=_forward,
        serves=fields.pop("serves", FEATURES),
        verifiers=fields.pop("verifiers", ()),
        verified_archs=frozenset({"*"}),
    )

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [
                Backend(
                    **{
                        "name": name,
                        "version": "1",
                        "kinds": ("numpy",),
                        "ops": {"chunk_kda": impl},
                        **fields,
                    }
                )
            ]

    return Plugin()


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    REGISTRY.reset()
    yield
    REGISTRY.reset()


def _call() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((1, 5, 2, 8), dtype=np.float32) for n in ("q", "k", "v")}
    return {
        **x,
        "g": -rng.random((1, 5, 2, 8), dtype=np.float32),
        "beta": rng.random((1, 5, 2), dtype=np.float32),
    }


class _EntryPoint:
    """What importlib.metadata yields, as far as the registry looks."""

    def __init__(self, name: str, distribution: str, load: Any) -> None:
        self.name = name
        self.dist = type("Dist", (), {"name": distribution})()
        self.load = load


def _install(monkeypatch: pytest.MonkeyPatch, *entries: _EntryPoint) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(entries))
    REGISTRY.reset()


def _record(name: str) -> registry.PluginRecord:
    return next(p for p in REGISTRY.plugins() if p.name == name)


def test_every_builtin_plugin_loads() -> None:
    names = {p.name: p.problem for p in REGISTRY.plugins() if p.distribution == "kdacore"}
    assert names == dict.fromkeys(registry.BUILTIN_PLUGINS, "")


def test_a_third_party_backend_is_found_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _EntryPoint("seven-plugin", "kdacore-seven", lambda: make_plugin(rank=5)))
    info = next(b for b in kdacore.backends() if b.name == "seven")
    assert info.distribution == "kdacore-seven"
    with kdacore.record_selections() as ran:
        o, _ = kdacore.chunk_kda(**_call())
    assert (o == 7).all()
    assert [s.backend for s in ran] == ["seven"]


def _raise(error: BaseException) -> Any:
    raise error


def test_records_of_blocks_inside_blocks() -> None:
    x = np.ones((1, 3, 1, 4), np.float32)
    call = (x, x, x, -x, x[..., 0])
    with kdacore.record_selections() as outer:
        kdacore.chunk_kda(*call)
        with kdacore.record_selections() as inner:
            for _ in range(5):  # also the short way of calls seen before
                kdacore.chunk_kda(*call)
        kdacore.chunk_kda(*call)
    assert (len(outer), len(inner)) == (7, 5)


def test_a_broken_plugin_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenHook:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            raise ZeroDivisionError("in the hook")

    _install(
        monkeypatch,
        _EntryPoint("a-broken", "dist-a", lambda: _raise(ImportError("no module named shiny"))),
        _EntryPoint("b-broken", "dist-b", BrokenHook),
        _EntryPoint("c-fine", "dist-c", make_plugin),
    )
    assert "seven" in REGISTRY.backends()
    assert "shiny" in _record("a-broken").problem
    assert "Traceback" in _record("a-broken").detail
    assert "in the hook" in _record("b-broken").problem
    assert _record("c-fine").problem == ""


def test_a_name_conflict_names_both_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(
        monkeypatch,
        _EntryPoint("one", "dist-one", make_plugin),
        _EntryPoint("two", "dist-two", make_plugin),
    )
    assert "dist-one" in _record("two").problem and "dist-two" in _record("two").problem
    assert REGISTRY.get("seven").distribution == "dist-one"


def test_a_plugin_cannot_take_a_builtin_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _EntryPoint("thief", "dist-thief", lambda: make_plugin("reference")))
    assert REGISTRY.get("reference").distribution == "kdacore"
    assert "name conflict" in _record("thief").problem


def test_another_api_version(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _EntryPoint("old", "dist-old", lambda: make_plugin(api_version=0)))
    assert "plugin API 0" in _record("old").problem
    assert "seven" not in REGISTRY.backends()


def test_a_slow_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_PLUGIN_IMPORT_LIMIT", "0.05")
    config.refresh()

    def load() -> Any:
        time.sleep(0.1)
        return make_plugin()

    _install(monkeypatch, _EntryPoint("slow", "dist-slow", load))
    assert "slow import" in _record("slow").problem
    assert "seven" in REGISTRY.backends()
    monkeypatch.undo()
    config.refresh()


def test_unknown_ops_and_foreign_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        @hookimpl
        def kdacore_backends(self) -> list[Any]:
            return ["not a backend"]

    _install(
        monkeypatch,
        _EntryPoint("a", "dist-a", lambda: make_plugin(ops={"flash_attention": OpImpl(forward=_forward)})),
        _EntryPoint("b", "dist-b", Foreign),
    )
    assert "flash_attention" in _record("a").problem
    assert "declares a str" in _record("b").problem


@pytest.mark.parametrize(("value", "gone"), [("seven-plugin", True), ("all", True), ("other", False)])
def test_deny_list(monkeypatch: pytest.MonkeyPatch, value: str, gone: bool) -> None:
    monkeypatch.setenv("KDACORE_DISABLE_PLUGINS", value)
    config.refresh()
    _install(monkeypatch, _EntryPoint("seven-plugin", "dist", make_plugin))
    assert ("seven" not in REGISTRY.backends()) is gone
    assert _record("seven-plugin").disabled is gone
    monkeypatch.undo()
    config.refresh()


def test_register_and_unregister_by_hand() -> None:
    REGISTRY.register(make_plugin(rank=9), "by-hand")
    assert (kdacore.chunk_kda(**_call())[0] == 7).all()
    REGISTRY.unregister("by-hand")
    assert not (kdacore.chunk_kda(**_call())[0] == 7).all()
    with pytest.raises(kdacore.PluginError, match="name conflict"):
        REGISTRY.register(make_plugin("reference"), "thief")
    with pytest.raises(kdacore.PluginError, match="no plugin"):
        REGISTRY.unregister("by-hand")


def test_a_missing_requirement_says_how_to_get_it() -> None:
    needs = Requirement("moonlib", lambda: "moonlib is not installed", "pip install moonlib")
    REGISTRY.register(make_plugin(requirements=(needs,)), "moon")
    info = next(b for b in kdacore.backends() if b.name == "seven")
    assert not info.available
    assert "pip install moonlib" in info.missing[0]
    with pytest.raises(kdacore.UnsupportedError, match="pip install moonlib"):
        kdacore.chunk_kda(**_call(), backend="seven")


def test_loading_is_thread_safe() -> None:
    seen: list[tuple[str, ...]] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        seen.append(tuple(REGISTRY.backends()))
        kdacore.chunk_kda(**_call())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(seen)) == 1
    assert len([p for p in REGISTRY.plugins() if p.distribution == "kdacore"]) == len(
        registry.BUILTIN_PLUGINS
    )


def test_all_reasons_are_collected() -> None:
    def never(request: Request) -> Reason:
        return Reason("never", "serves nothing", f"T={request.T}", "another T")

    def nor_this(request: Request) -> Reason:
        return Reason("nor_this", "neither")

    REGISTRY.register(make_plugin(verifiers=(never, nor_this), serves=frozenset()), "picky")
    wanted = ["option", "never", "nor_this"]
    answer = kdacore.explain("chunk_kda", **_call(), output_final_state=True).candidate("seven")
    assert [r.code for r in answer.reasons] == wanted
    with pytest.raises(kdacore.UnsupportedError) as caught:
        kdacore.chunk_kda(**_call(), output_final_state=True, backend="seven")
    assert [r.code for r in caught.value.reasons["seven"]] == wanted


def test_verifiers_are_not_asked_about_devices_of_others() -> None:
    asked: list[Request] = []
    verifiers = (lambda request: asked.append(request),)
    REGISTRY.register(make_plugin(verifiers=verifiers, device_types=("tpu",)), "tpus only")
    answer = kdacore.explain("chunk_kda", **_call()).candidate("seven")
    assert [r.code for r in answer.reasons] == ["device"] and not asked


def test_a_verifier_that_raises_rejects_loudly() -> None:
    def broken(request: Request) -> Reason | None:
        raise KeyError("oops")

    REGISTRY.register(make_plugin(verifiers=(broken,), rank=9), "buggy")
    with pytest.warns(RuntimeWarning, match="oops"):
        selection = kdacore.explain("chunk_kda", **_call())
    assert [r.code for r in selection.candidate("seven").reasons] == ["verifier_error"]
    assert selection.backend == "reference"


# --- requirements ----------------------------------------------------------------------------------------------------


class Probe:
    """Counts how often it is asked; not hashable, as a plugin's may be."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, answer: str | None = None) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.answer


def _lengths(*lengths: int) -> list[str]:
    """The backends that calls of these lengths run on."""
    with kdacore.record_selections() as ran:
        for T in lengths:
            kdacore.chunk_kda(**{n: np.repeat(x[:, :1], T, 1) for n, x in _call().items()})
    return [selection.backend for selection in ran]


def test_a_probe_is_asked_once_until_the_backends_change() -> None:
    probe, more = Probe(), Probe()
    shared = Requirement("bus", probe, "plug it in")
    fields: dict[str, Any] = {"requirements": (shared, Requirement("driver", more, "-", hardware=True))}
    REGISTRY.register(make_plugin("seven", rank=9, **fields), "one")
    REGISTRY.register(make_plugin("eight", requirements=(shared,)), "two")
    for asked, change in enumerate(
        (
            lambda: None,
            lambda: REGISTRY.register(make_plugin("nine"), "three"),
            lambda: REGISTRY.unregister("three"),
            config.refresh,
        )
    ):
        change()
        if change is config.refresh:  # which forgets what was registered by hand
            REGISTRY.register(make_plugin("seven", rank=9, **fields), "one")
        assert _lengths(3, 4, 5, 3) == ["seven"] * 4
        assert kdacore.explain("chunk_kda", **_call()).backend == "seven"
        assert (probe.asked, more.asked) == (asked + 1, asked + 1)


def test_a_listing_asks_again_and_calls_see_what_it_finds() -> None:
    probe = Probe("no bus here")
    requirement = Requirement("bus", probe, "plug it in")
    REGISTRY.register(make_plugin("seven", rank=9, requirements=(requirement,)), "one")

    def available() -> bool:
        return next(info.available for info in kdacore.backends() if info.name == "seven")

    assert _lengths(3, 4) == ["reference"] * 2 and not available() and probe.asked == 2
    probe.answer = None
    assert _lengths(5) == ["reference"] and probe.asked == 2
    assert available() and _lengths(3, 4, 5) == ["seven"] * 3
    assert probe.asked == 4  # by the listing, and since what it found changed everything
    assert available() and _lengths(6) == ["seven"] and probe.asked == 5
    probe.answer = "unplugged"
    assert not available() and _lengths(3, 7) == ["reference"] * 2


def test_a_probe_that_raised_is_asked_again() -> None:
    probe = Probe()
    answers = iter([OSError("busy"), None])

    def first_busy() -> str | None:
        probe()
        answer = next(answers)
        if answer is not None:
            raise answer
        return answer

    REGISTRY.register(
        make_plugin("seven", rank=9, requirements=(Requirement("bus", first_busy, "-"),)), "one"
    )
    assert _lengths(3, 4, 5, 6) == ["reference", "seven", "seven", "seven"]
    assert probe.asked == 2


def test_calls_of_new_lengths_read_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in backends' probes look for installed packages, on disk."""
    seen: list[str] = []
    read, find = importlib.metadata.version, lazy.find_spec
    monkeypatch.setattr(importlib.metadata, "version", lambda name: seen.append(name) or read(name))
    monkeypatch.setattr(lazy, "find_spec", lambda name: seen.append(name) or find(name))
    _lengths(3)
    assert {"jax", "torch", "triton"} <= set(seen) and len(seen) < 10
    seen.clear()
    _lengths(*range(4, 9))
    assert not seen
