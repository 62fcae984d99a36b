"""Compiled-only kernels: auto uses one only after it agreed with the oracle on this machine, once."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config, machine
from kdacore.calls.description import CallDescription
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape, normalise, offsets, tensors, to_kind
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.selfcheck import check as selfcheck
from kdacore.selfcheck import small_call
from kdacore.types import Backend, OpImpl, Request

OPS = ("chunk_kda", "fused_recurrent_kda", "kda_gate", "chunk_gated_delta_rule")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KDACORE_CACHE_DIR", str(tmp_path))
    config.refresh()
    yield tmp_path
    monkeypatch.undo()
    config.refresh()


def unverified(change: Any = None, calls: list[int] | None = None, whole: Any = None) -> None:
    """Register a backend that computes what the reference does, changed, and was verified nowhere.

    ``change`` gets ``o`` (the log decay of ``kda_gate``); ``whole`` all that was returned.
    """
    reference = REGISTRY.get("reference").backend.ops

    def make(op: str) -> OpImpl:
        def forward(request: Request, inputs: Any) -> Any:
            if calls is not None:
                calls.append(request.T)
            out = reference[op].forward(request, inputs)
            if whole is not None:
                return whole(out)
            if change is None:
                return out
            return change(out) if op == "kda_gate" else out._replace(o=change(out.o))

        return OpImpl(forward=forward, backward=reference[op].backward, serves=FEATURES)

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [
                Backend(
                    name="unverified",
                    version="1",
                    kinds=("numpy", "torch"),
                    ops={op: make(op) for op in OPS},
                    rank=50,
                )
            ]

    REGISTRY.register(Plugin(), "unverified-plugin")


def call(**changes: Any) -> dict[str, Any]:
    x = normalise(tensors(Shape(B=2, T=150, H=2, HV=4, K=16, V=8), 0))
    return {**{n: to_kind(a, "numpy", "float32") for n, a in x.items()}, **changes}


def chosen(function: Any = kdacore.chunk_kda, **arguments: Any) -> str:
    with kdacore.record_selections() as ran:
        function(**arguments)
    return ran[-1].backend


def test_a_right_kernel_is_checked_once_and_used(own_cache: Path) -> None:
    calls: list[int] = []
    unverified(calls=calls)
    assert chosen(**call()) == "unverified"
    assert calls == [selfcheck.TOKENS, 150]
    x = {n: a[:, :90] for n, a in call().items()}
    assert chosen(**x) == "unverified"
    assert calls == [selfcheck.TOKENS, 150, 90]
    assert len(list(own_cache.rglob("*.json"))) == 1


@pytest.mark.parametrize(
    "change", [lambda o: o * 1.1, lambda o: np.full_like(o, np.nan), lambda o: -o, lambda o: o[..., :-1]]
)
def test_a_wrong_kernel_is_refused_with_its_error(change: Any) -> None:
    unverified(change)
    assert chosen(**call()) == "reference"
    with kdacore.record_selections() as ran:
        kdacore.chunk_kda(**call())
    assert [r.code for r in ran[0].candidate("unverified").reasons] == ["selfcheck"]


def test_the_check_of_a_call_under_autocast_is_not() -> None:
    torch = pytest.importorskip("torch")
    unverified()
    x = {name: to_kind(a, "torch", "float32") for name, a in call().items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert chosen(**x) == "unverified"


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-4), ("bfloat16", 1.3e-2), ("float16", 1.3e-2)])
def test_a_kernel_outside_the_contract_is_refused(dtype: str, off: float) -> None:
    """Off by three to five times the bound of ``o``, which a check for gross errors alone would let through."""
    arguments = {n: to_kind(a, "numpy", dtype) for n, a in call().items()}
    unverified()
    assert chosen(**arguments) == "unverified"
    REGISTRY.unregister("unverified-plugin")
    for path in config.get().cache_dir.rglob("*.json"):
        path.unlink()
    unverified(lambda o: o * o.dtype.type(1 + off))
    assert chosen(**arguments) == "reference"


@pytest.mark.parametrize("name", ["o", "final_state", "gradient"])
def test_each_result_has_the_bound_of_its_row(name: str) -> None:
    """``measure`` names the bound of the result that is nearest its own: each is twice the contract's."""
    import torch

    reference = REGISTRY.get("reference")
    x = {n: torch.from_numpy(a).requires_grad_() for n, a in call().items()}
    request = kdacore.explain("chunk_kda", **x, output_final_state=True).request
    impl = reference.backend.ops["chunk_kda"]

    def forward(request: Request, inputs: Any) -> Any:
        out = impl.forward(request, inputs)
        return out._replace(**{name: 1.5 * getattr(out, name)}) if name in out._fields else out

    def backward(*arguments: Any) -> Any:
        assert impl.backward is not None
        found = impl.backward(*arguments)
        return found._replace(k=1.5 * found.k) if name == "gradient" else found

    wrong = dataclasses.replace(impl, forward=forward, backward=backward)
    backend = dataclasses.replace(reference.backend, ops={"chunk_kda": wrong})
    found = selfcheck.measure(dataclasses.replace(reference, backend=backend), request)
    assert found["error"] == pytest.approx(0.5, rel=1e-3)
    assert found["bound"] == pytest.approx(2 * (5e-5 if name == "gradient" else 2e-5))


def test_a_record_of_another_format_is_checked_again(own_cache: Path) -> None:
    unverified(lambda o: o * 1.2)
    chosen(**call())
    (record,) = own_cache.rglob("*.json")
    record.write_text('{"error": 0.0, "failure": ""}')
    REGISTRY.unregister("unverified-plugin")
    unverified(lambda o: o * 1.2)
    assert chosen(**call()) == "reference"


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_crashing_kernel_is_refused(error: type[BaseException]) -> None:
    def crash(o: Any) -> Any:
        raise error("illegal memory access")

    unverified(crash)
    with kdacore.record_selections() as ran:
        kdacore.chunk_kda(**call())
    (reason,) = ran[0].candidate("unverified").reasons
    assert reason.code == "selfcheck" and "illegal memory access" in reason.got


def test_nothing_is_checked_while_a_graph_is_captured(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check waits for the device: inside a capture it would fail, and its failure would be kept."""
    calls: list[int] = []
    unverified(calls=calls)
    with monkeypatch.context() as now:
        now.setattr(selfcheck, "_capturing", lambda request: True)
        assert chosen(**call()) == "reference"
    assert not calls and not list(own_cache.rglob("*.json"))
    config.refresh()
    unverified(calls=calls)
    assert chosen(**call()) == "unverified"


def test_forcing_needs_no_check() -> None:
    unverified(lambda o: o * 1.1)
    assert chosen(**call(), backend="unverified") == "unverified"


def test_explain_runs_nothing_and_marks_compiled_only() -> None:
    calls: list[int] = []
    unverified(calls=calls)
    selection = kdacore.explain("chunk_kda", **call())
    assert calls == [] and not selection.candidate("unverified").verified
    assert "compiled only" in str(selection)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_SELFCHECK", "0")
    config.refresh()
    unverified(lambda o: o * 1.1)
    assert chosen(**call()) == "unverified"


def test_a_corrupt_record_is_checked_again(own_cache: Path) -> None:
    calls: list[int] = []
    unverified(calls=calls)
    chosen(**call())
    (record,) = own_cache.rglob("*.json")
    record.write_text('{"error": 0.0')
    REGISTRY.unregister("unverified-plugin")
    unverified(calls=calls)
    chosen(**call())
    assert calls.count(selfcheck.TOKENS) == 2


@pytest.mark.parametrize(
    "name", ["packed", "raw gate", "state", "torch gradients", "bfloat16", "decode", "gate", "gdn"]
)
def test_every_kind_of_call_has_a_small_call(name: str) -> None:
    """A right kernel passes and a wrong one fails, whatever the call looks like."""
    x = call()
    function, arguments = kdacore.chunk_kda, x
    if name == "packed":
        arguments = {**{n: a[:1] for n, a in x.items()}, "cu_seqlens": offsets((50, 0, 100))}
    elif name == "raw gate":
        raw = tensors(Shape(B=2, T=150, H=2, HV=4, K=16, V=8), 1, raw_gate=True, raw_beta=True)
        arguments = {n: to_kind(a, "numpy", "float32") for n, a in raw.items()}
        arguments.update(
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True
        )
    elif name == "state":
        state = np.ones((2, 4, 8, 16), np.float32)
        arguments = {**x, "initial_state": state, "state_v_first": True, "output_final_state": True}
    elif name == "torch gradients":
        import torch

        arguments = {n: torch.from_numpy(a).requires_grad_() for n, a in x.items()}
    elif name == "bfloat16":
        arguments = {n: to_kind(a, "numpy", "bfloat16") for n, a in x.items()}
    elif name == "decode":
        function = kdacore.fused_recurrent_kda
        arguments = {n: a[:, :1] for n, a in x.items()}
        pool = np.ones((5, 4, 16, 8), np.float32)
        arguments.update(initial_state=pool, state_indices=np.array([3, 1]), inplace_state=True)
    elif name == "gate":
        function, arguments = kdacore.kda_gate, {"g": x["g"], "lower_bound": -5.0}
    elif name == "gdn":
        function, arguments = kdacore.chunk_gated_delta_rule, {**x, "g": x["g"][..., 0]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unverified()
        assert chosen(function, **arguments) == "unverified"
        REGISTRY.unregister("unverified-plugin")
        for path in config.get().cache_dir.rglob("*.json"):
            path.unlink()
        unverified(lambda o: o * 1.2)
        assert chosen(function, **arguments) == "reference"


def test_a_call_under_jit_is_checked_outside_the_trace() -> None:
    """A check with traced values failed, and the failure was kept: nothing unverified could run under ``jit``."""
    jax = pytest.importorskip("jax")
    xla = REGISTRY.get("xla").backend

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            gate = dataclasses.replace(xla.ops["kda_gate"], verified_archs=frozenset())
            return [
                dataclasses.replace(xla, name="unverified", ops={"kda_gate": gate}, rank=99, auto_kinds=None)
            ]

    REGISTRY.register(Plugin(), "unverified-plugin")
    g = jax.numpy.ones((1, 3, 2, 4))
    with kdacore.record_selections() as ran:
        log = jax.jit(lambda g: kdacore.kda_gate(g, A_log=jax.numpy.zeros(2)))(g)
    assert [s.backend for s in ran] == ["unverified"]
    np.testing.assert_allclose(log, -np.log1p(np.exp(np.ones(g.shape))), rtol=1e-6)


def _wrong_state(out: Any) -> Any:
    return out if out.final_state is None else out._replace(final_state=1.5 * out.final_state)


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_record_stands_for_no_call_that_asks_for_more(asks_first: bool) -> None:
    """A kernel whose states are wrong serves the calls that ask for none, and no others, in either order."""
    unverified(whole=_wrong_state)
    for asked in (asks_first, not asks_first):
        assert chosen(**call(), output_final_state=asked) == ("reference" if asked else "unverified")


def _differing_calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Calls of which each differs from the first of its op in something that a kernel may get wrong."""
    import torch

    x = call()
    token = {n: a[:, :1] for n, a in x.items()}
    pool = {"initial_state": np.ones((5, 4, 16, 8), np.float32), "state_indices": np.array([3, 1])}
    decode, chunk = kdacore.fused_recurrent_kda, kdacore.chunk_kda
    return {
        "chunk": (chunk, x),
        "final state": (chunk, {**x, "output_final_state": True}),
        "initial state": (chunk, {**x, "initial_state": np.ones((2, 4, 16, 8), np.float32)}),
        "another dtype of g": (chunk, {**x, "g": x["g"].astype(np.float16)}),
        "another dtype of beta": (chunk, {**x, "beta": x["beta"].astype(np.float16)}),
        "another scale": (chunk, {**x, "scale": 0.5}),
        "torch": (chunk, {n: torch.from_numpy(a) for n, a in x.items()}),
        "decode": (decode, token),
        "decode from a pool": (decode, {**token, **pool}),
        "decode into a pool": (decode, {**token, **pool, "inplace_state": True}),
        "decode into out": (decode, {**token, "out": np.zeros((2, 1, 4, 8), np.float32)}),
        "decode of a few tokens": (decode, {n: a[:, :3] for n, a in x.items()}),
    }


def test_calls_whose_small_calls_differ_are_checked_each() -> None:
    calls: list[int] = []
    unverified(calls=calls)
    for name, (function, arguments) in _differing_calls().items():
        calls.clear()
        assert chosen(function, **arguments) == "unverified", name
        assert len(calls) == 2, f"{name}: one self-check, one call"


def test_the_small_shapes_follow_from_what_is_compared() -> None:
    """``identity`` leaves the shapes out: requests that are one to it have one small request."""
    asked = [kdacore.explain(f.__name__, **arguments).request for f, arguments in _differing_calls().values()]
    longer = [dataclasses.replace(r, T=r.T + 100, B=r.B + 3) for r in asked if r.op == "chunk_kda"]
    small: dict[str, set[Request]] = {}
    for request in asked + longer:
        name = small_call.identity(request, selfcheck.TOKENS)
        small.setdefault(name, set()).add(small_call.small_call(request, selfcheck.TOKENS)[0])
    assert len(small) == len(asked) and all(len(found) == 1 for found in small.values())


def again(**changes: Any) -> None:
    """As in a new process: the backend is loaded anew, and only the cache folder is as it was."""
    REGISTRY.unregister("unverified-plugin")
    unverified(**changes)


def _runs_out(o: Any) -> Any:
    raise MemoryError("there was none left")


def test_what_a_kernel_raised_is_not_kept_for_the_next_process(own_cache: Path) -> None:
    calls: list[int] = []
    unverified(_runs_out, calls=calls)
    assert chosen(**call()) == "reference"
    assert chosen(**{n: a[:, :90] for n, a in call().items()}) == "reference"
    assert calls == [selfcheck.TOKENS], "in this process once is enough"
    (reason,) = kdacore.explain("chunk_kda", **call()).candidate("unverified").reasons
    assert "there was none left" in reason.got and str(own_cache) not in str(reason)
    assert not list(own_cache.rglob("*.json"))
    again()
    assert chosen(**call()) == "unverified"


def test_explain_says_what_a_call_would_do(own_cache: Path) -> None:
    unverified(lambda o: o * 1.1)
    assert kdacore.explain("chunk_kda", **call()).backend == "unverified", "nothing is known yet"
    assert chosen(**call()) == kdacore.explain("chunk_kda", **call()).backend == "reference"
    calls: list[int] = []
    again(calls=calls)
    explained = kdacore.explain("chunk_kda", **call())
    with kdacore.record_selections() as ran:
        kdacore.chunk_kda(**call())
    assert explained.backend == ran[0].backend == "reference" and not calls
    (record,) = own_cache.rglob("*.json")
    for selection in (explained, ran[0]):
        (reason,) = selection.candidate("unverified").reasons
        assert reason.code == "selfcheck" and str(record) in reason.message and reason.got == "1.00e-01"
    record.unlink()
    again(calls=calls)
    assert chosen(**call()) == "unverified" and len(calls) == 2
    assert kdacore.explain("chunk_kda", **call()).backend == "unverified"


def test_kept_refusals_are_listed(own_cache: Path) -> None:
    unverified()
    chosen(**call())
    assert list(own_cache.rglob("*.json")) and not selfcheck.refusals()
    again(change=lambda o: o * 1.1)
    chosen(**call(), output_final_state=True)
    (refused,) = selfcheck.refusals()
    assert refused[:3] == ("unverified", "chunk_kda", "cpu") and refused.found.startswith("1.0e-01, bound ")
    Path(refused.file).unlink()
    assert not selfcheck.refusals()


def test_explain_knows_what_could_not_be_written(own_cache: Path) -> None:
    (own_cache / "selfcheck").write_text("a file where the folder would be")
    unverified(lambda o: o * 1.1)
    assert chosen(**call()) == kdacore.explain("chunk_kda", **call()).backend == "reference"


@pytest.mark.parametrize(
    ("changed", "checks"),
    [("numpy", 1), ("(registered by hand)", 1), ("the driver", 1), ("torch", 0), ("jaxlib", 0)],
)
def test_a_record_is_of_the_versions_it_was_measured_with(
    changed: str, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def versions(number: str) -> None:
        monkeypatch.setattr(machine, "version_of", lambda name: number if name == changed else "1")
        monkeypatch.setattr(machine, "driver_version", lambda _: number if changed == "the driver" else "1")

    calls: list[int] = []
    versions("1")
    unverified(calls=calls)
    chosen(**call())
    versions("2")
    again(calls=calls)
    chosen(**call())
    assert calls.count(selfcheck.TOKENS) == 1 + checks


def test_the_driver_is_asked_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("module 580.1\ncompiler 14\n")
    monkeypatch.setattr(
        machine, "_DRIVER_FILES", {"cuda": str(tmp_path / "version"), "rocm": str(tmp_path / "none")}
    )
    assert [machine.driver_version(t) for t in ("cuda", "rocm", "cpu")] == ["module 580.1", "", ""]


def _float64(out: Any) -> Any:
    return out._replace(o=out.o.astype(np.float64))


def _unasked(out: Any) -> Any:
    return out._replace(final_state=np.zeros((2, 4, 16, 8), np.float32))


@pytest.mark.parametrize(
    ("whole", "options", "said"),
    [
        (_float64, {}, "o in float64, not in float32"),
        (lambda out: out._replace(o=out.o.tolist()), {}, "o as builtins.list, not as a numpy array"),
        (_unasked, {}, "final_state, which was not asked for"),
        (lambda out: out._replace(checkpoints=out.o), {}, "checkpoints, which was not asked for"),
        (lambda out: out._replace(final_state=None), {"output_final_state": True}, "no final_state"),
        (
            lambda out: _float64(out)._replace(final_state=out.final_state.astype(np.float16)),
            {"output_final_state": True},
            "o in float64, not in float32, final_state in float16, not in float32",
        ),
    ],
)
def test_results_are_what_the_call_asks_for(whole: Any, options: dict[str, Any], said: str) -> None:
    """Right values in another dtype, or beside results nobody asked for, break the contract."""
    unverified(whole=whole)
    assert chosen(**call(), **options) == "reference"
    again(whole=whole)
    (reason,) = kdacore.explain("chunk_kda", **call(), **options).candidate("unverified").reasons
    assert (reason.got, reason.want) == (said, "what the call asks for"), "the record says so too"


def test_a_log_decay_is_float32() -> None:
    unverified(lambda log: log.astype(np.float64))
    assert chosen(kdacore.kda_gate, g=call()["g"], lower_bound=-5.0) == "reference"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda grads: grads._replace(k=grads.k.double()), "gradient of k in float64, not in float32"),
        (lambda grads: grads._replace(beta=None), "no gradient of beta"),
        (lambda grads: grads._replace(A_log=grads.k), "gradient of A_log, which was not asked for"),
    ],
)
def test_gradients_are_what_the_call_asks_for(change: Any, said: str) -> None:
    import torch

    reference = REGISTRY.get("reference")
    x = {n: torch.from_numpy(a).requires_grad_() for n, a in call().items()}
    impl = reference.backend.ops["chunk_kda"]
    assert impl.backward is not None
    backward = impl.backward
    wrong = dataclasses.replace(impl, backward=lambda *arguments: change(backward(*arguments)))
    backend = dataclasses.replace(reference.backend, ops={"chunk_kda": wrong})
    request = kdacore.explain("chunk_kda", **x).request
    found = selfcheck.measure(dataclasses.replace(reference, backend=backend), request)
    assert found["misfit"] == said and not found["error"] < found["bound"]


SERVED: dict[str, dict[str, Any]] = {
    "records": {"op": "fused_recurrent_kda", "pool": "records", "T": 4},
    "records of a pack": {"op": "fused_recurrent_kda", "pool": "records", "B": 1, "T": 5, "lengths": (4, 1)},
    "fused decode": {"op": "fused_decode_kda", "norm": "vector", "z": True, "conv_bias": True, "B": 3, "T": 1},
    "fused decode in a pool": {
        "op": "fused_decode_gated_delta_rule", "pool": "inplace_null", "norm": "heads", "z": True, "B": 3, "T": 2
    },
    "candidates": {"op": "fused_decode_kda", "pool": "candidates_moved", "T": 3, "conv_indices": True},
    "windows": {"op": "fused_decode_kda", "pool": "records", "T": 3, "conv_windows": True},
    "commit": {"op": "commit_records", "T": 3},
    "commit of windows": {"op": "commit_records", "T": 3, "conv_state_given": True, "conv_windows": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", SERVED)
def test_calls_of_servers_are_checked(name: str, kind: Any) -> None:
    """A backend passes with the right results, and not where the state that it writes is another."""
    described = CallDescription(kind=kind).changed(**SERVED[name])
    use = described.pool_use
    asked = {} if use is None or described.family == "commit" else use.options
    request = request_of(described.having(**asked))
    registered = REGISTRY.get("reference")
    found = selfcheck.measure(registered, request)
    assert not found["failure"] and not found["misfit"] and found["error"] < found["bound"]

    def spoilt(request: Request, inputs: Any) -> Any:
        out = registered.backend.ops[request.op].forward(request, inputs)
        written = inputs.initial_state if request.inplace_state and not request.write_pool_size else out[0]
        written *= 1.01
        return out

    ops = {request.op: dataclasses.replace(registered.backend.ops[request.op], forward=spoilt)}
    broken = dataclasses.replace(registered, backend=dataclasses.replace(registered.backend, ops=ops))
    assert not selfcheck.measure(broken, request)["error"] < found["bound"]
