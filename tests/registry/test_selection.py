"""Order of authority, cost before rank, the choose hook, telemetry and explain."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config
from kdacore.dispatch import selection
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, Device, OpImpl, Outputs, Reason, Request, Selection


def _answer(value: float) -> Any:
    return lambda request, inputs: Outputs(o=np.full_like(inputs.v, value))


def plugin(name: str, value: float, hooks: dict[str, Any] | None = None, **fields: Any) -> Any:
    op = OpImpl(
        serves=FEATURES,
        forward=_answer(value),
        cost=fields.pop("cost", None),
        verifiers=fields.pop("verifiers", ()),
        verified_archs=frozenset({"*"}),
    )

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [
                Backend(
                    **{"name": name, "version": "1", "kinds": ("numpy",), "ops": {"chunk_kda": op}, **fields}
                )
            ]

    found = Plugin()
    for hook, function in (hooks or {}).items():
        setattr(Plugin, hook, hookimpl(function))
    return found


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    REGISTRY.reset()
    yield
    REGISTRY.reset()


def call(T: int = 5) -> dict[str, np.ndarray]:
    x = {n: np.ones((1, T, 2, 8), np.float32) for n in ("q", "k", "v")}
    return {**x, "g": -np.ones((1, T, 2, 8), np.float32), "beta": np.ones((1, T, 2), np.float32)}


def ran(**options: Any) -> str:
    with kdacore.record_selections() as selections:
        kdacore.chunk_kda(**call(), **options)
    return selections[-1].backend


def test_order_of_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(("a", "b", "c")):
        REGISTRY.register(plugin(name, i), name)
    assert ran() == "reference"  # first among equals of rank 0
    monkeypatch.setenv("KDACORE_BACKEND", "a")
    config.refresh()
    for i, name in enumerate(("a", "b", "c")):
        REGISTRY.register(plugin(name, i), name)
    assert ran() == "a"
    with kdacore.use_backend("b"):
        assert ran() == "b"
        assert ran(backend="c") == "c"
        with kdacore.use_backend("c", "a"):
            assert ran() == "c"
        assert ran() == "b"
    assert ran() == "a"
    monkeypatch.undo()
    config.refresh()
    assert ran() == "reference"


def test_preference_falls_through_in_order_and_says_so() -> None:
    def never(request: Request) -> Reason:
        return Reason("never", "no")

    REGISTRY.register(plugin("a", 1, verifiers=(never,)), "a")
    REGISTRY.register(plugin("b", 2), "b")
    with kdacore.use_backend("a", "b"):
        assert ran() == "b"
    with kdacore.use_backend("a"):
        assert ran() == "reference"
        assert "use_backend preferred a" in kdacore.explain("chunk_kda", **call()).why


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(kdacore.ContractError, match="'names'.*nosuch.*reference"),
        kdacore.use_backend("nosuch"),
    ):
        pass
    with pytest.raises(kdacore.ContractError, match="no name"), kdacore.use_backend():
        pass
    monkeypatch.setenv("KDACORE_BACKEND", "nosuch")
    config.refresh()
    with pytest.raises(kdacore.ConfigError, match=r"KDACORE_BACKEND='nosuch'; wanted one of reference"):
        kdacore.chunk_kda(**call())
    assert ran(backend="reference") == "reference"
    with kdacore.use_backend("reference"):
        assert ran() == "reference"
    monkeypatch.undo()
    config.refresh()


def test_measured_cost_decides_before_rank() -> None:
    REGISTRY.register(plugin("ranked", 1, rank=10, cost=lambda r: 2e-3), "ranked")
    REGISTRY.register(plugin("quick", 2, rank=5, cost=lambda r: 1e-3 if r.T < 8 else 9e-3), "quick")
    assert ran() == "quick"
    assert kdacore.explain("chunk_kda", **call(T=16)).backend == "ranked"
    assert kdacore.explain("chunk_kda", **call()).why == "lowest cost"


def test_known_costs_come_first_and_ranks_order_the_rest() -> None:
    REGISTRY.register(plugin("slow", 1, rank=1, cost=lambda r: 1e-2), "slow")
    REGISTRY.register(plugin("quick", 2, rank=-5, cost=lambda r: 1e-9), "quick")
    REGISTRY.register(plugin("low", 3, rank=5), "low")
    REGISTRY.register(plugin("high", 4, rank=10), "high")
    order = []
    for name in ("quick", "slow", "high", "low"):
        order.append((kdacore.explain("chunk_kda", **call()).backend, _ran_quietly()))
        REGISTRY.unregister(name)
    assert order == [(name, name) for name in ("quick", "slow", "high", "low")]
    assert ran() == "reference"


def _ran_quietly() -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "chunk_kda: backend .* is passed over", kdacore.PerformanceWarning)
        return ran()


def test_a_backend_passed_over_for_lack_of_a_cost_is_warned_of_once() -> None:
    REGISTRY.register(plugin("quick", 2, rank=-5, cost=lambda r: 1e-9), "quick")
    REGISTRY.register(plugin("high", 4, rank=10), "high")
    assert kdacore.explain("chunk_kda", **call()).backend == "quick"  # which says nothing, and warns later
    assert kdacore.selection_of("chunk_kda", **call()).backend == "quick"
    wanted = "backend 'high' \\(rank 10\\) is passed over for 'quick'.* `kdacore tune --device cpu` measures 'high'"
    with pytest.warns(kdacore.PerformanceWarning, match=wanted) as said:
        assert ran() == "quick"
        assert kdacore.chunk_kda(**call(T=9)) is not None
    assert len(said) == 1
    REGISTRY.unregister("high")
    REGISTRY.register(plugin("lower", 3, rank=-9), "lower")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ran() == "quick"  # rank alone would not have chosen it


@pytest.mark.parametrize("cost", [-1e-9, float("nan"), "1 ms"])
def test_a_cost_that_is_no_duration_is_the_plugins_fault(cost: Any) -> None:
    REGISTRY.register(plugin("odd", 1, rank=10, cost=lambda r: cost), "odd")
    with pytest.warns(RuntimeWarning, match="cost of chunk_kda raised"):
        assert kdacore.explain("chunk_kda", **call()).candidate("odd").cost is None


def test_what_is_neither_tested_here_nor_measured_goes_behind_what_is_tested() -> None:
    for name, rank, archs in (("tested", 5, frozenset({"sm_75"})), ("untested", 10, frozenset[str]())):
        op = OpImpl(_answer(1), serves=FEATURES, verified_archs=archs)
        REGISTRY.register(plugin(name, 1, rank=rank, ops={"chunk_kda": op}), name)

    def decide(arch: str) -> Selection:
        request = kdacore.explain("chunk_kda", **call()).request
        request = dataclasses.replace(request, device=Device("cpu", 0, arch))
        return selection.decide(request, selection.Policy(), run_selfchecks=False)

    found = decide("sm_75")
    assert (found.backend, found.why) == ("tested", "highest rank of those tested on sm_75")
    assert {c.backend: c.verified for c in found.candidates}["untested"] is False
    assert decide("q2").backend == "untested"  # neither has run there: rank, then the self-check


def test_kinds_served_only_when_asked_for() -> None:
    REGISTRY.register(plugin("guest", 1, rank=10, auto_kinds=()), "guest")
    assert ran() == "reference"
    assert ran(backend="guest") == "guest"
    with kdacore.use_backend("guest"):
        assert ran() == "guest"


def test_devices_served_only_when_asked_for() -> None:
    REGISTRY.register(plugin("interpreter", 1, rank=10, auto_device_types=("cuda",)), "interpreter")
    assert ran() == "reference"
    assert ran(backend="interpreter") == "interpreter"


def test_choose_hook() -> None:
    def choose(self: Any, request: Request, candidates: Any) -> str | None:
        return "b" if request.T == 5 else None

    REGISTRY.register(plugin("a", 1, rank=3), "a")
    REGISTRY.register(plugin("b", 2, hooks={"kdacore_choose": choose}), "b")
    assert ran() == "b"
    assert kdacore.explain("chunk_kda", **call(T=6)).backend == "a"
    assert ran(backend="a") == "a"


def test_choose_hook_naming_an_incapable_backend_is_ignored_loudly() -> None:
    REGISTRY.register(
        plugin("b", 2, hooks={"kdacore_choose": lambda self, request, candidates: "nosuch"}), "b"
    )
    with pytest.warns(RuntimeWarning, match="nosuch"):
        assert ran() == "reference"


def test_telemetry_is_told_once_for_each_new_shape() -> None:
    told: list[str] = []

    def selected(self: Any, request: Request, selection: Any) -> None:
        told.append(selection.backend)

    REGISTRY.register(plugin("a", 1, rank=3, hooks={"kdacore_selected": selected}), "a")
    for _ in range(3):
        kdacore.chunk_kda(**call())
    assert told == ["a"]
    kdacore.chunk_kda(**call(T=9))
    assert told == ["a", "a"]


def test_verifiers_are_not_asked_again_on_a_cache_hit() -> None:
    asked: list[int] = []

    def count(request: Request) -> None:
        asked.append(request.T)

    REGISTRY.register(plugin("a", 1, verifiers=(count,), rank=3), "a")
    for _ in range(5):
        kdacore.chunk_kda(**call())
    assert asked == [5]


def test_records_keep_the_order() -> None:
    with kdacore.record_selections() as selections:
        kdacore.chunk_kda(**call())
        kdacore.fused_recurrent_kda(**call())
    assert [s.op for s in selections] == ["chunk_kda", "fused_recurrent_kda"]


def test_explain_takes_specs_and_functions_and_prints_every_backend() -> None:
    x = kdacore.ShapeDtype((1, 128, 4, 128), "bfloat16", device="cuda", kind="torch", arch="sm_90")
    beta = kdacore.ShapeDtype((1, 128, 4), "bfloat16", device="cuda", kind="torch", arch="sm_90")
    selection = kdacore.explain(kdacore.chunk_kda, x, x, x, x, beta, output_final_state=True)
    text = str(selection)
    for info in kdacore.backends():
        assert info.name in text
    assert "sm_90" in text and selection.op == "chunk_kda"
    assert text.startswith(
        "chunk_kda on cuda:0 (sm_90), torch arrays, bfloat16, B=1 T=128 H=4 HV=4 K=128 V=128\n"
    )
    for candidate in selection.candidates:
        assert candidate.supported or all(r.code and r.message for r in candidate.reasons)
    assert max(map(len, text.splitlines())) <= 100
    assert text.replace("\n", " ").split() == selection.text.split()


def test_explain_reports_a_forced_backend_that_cannot() -> None:
    REGISTRY.register(plugin("tpu-only", 1, device_types=("tpu",)), "tpu-only")
    selection = kdacore.explain("chunk_kda", **call(), backend="tpu-only")
    assert selection.backend == ""
    assert [r.code for r in selection.candidate("tpu-only").reasons] == ["device"]


def test_explain_refuses_an_unknown_op_and_a_bad_call() -> None:
    with pytest.raises(kdacore.ContractError, match="'op'"):
        kdacore.explain("flash_attention", **call())
    with pytest.raises(kdacore.ContractError, match="'beta'"):
        kdacore.explain("chunk_kda", **{**call(), "beta": np.ones(3, np.float32)})
    with pytest.raises(TypeError):
        kdacore.explain("chunk_kda", **call(), nonsense=1)


def test_specs_do_not_run() -> None:
    x = kdacore.ShapeDtype((1, 8, 2, 8))
    with pytest.raises(kdacore.ContractError, match="ShapeDtype"):
        kdacore.chunk_kda(x, x, x, x, kdacore.ShapeDtype((1, 8, 2)))


BAD_SPECS: tuple[tuple[str, Any], ...] = (
    *(("device", x) for x in ("cuda:x", "cuda:-1", "", None, 0)),
    *(("kind", x) for x in ("tf", None, ["torch"])),
    *(("shape", x) for x in (5, (1, 8.0), (True,), None)),
    ("arch", 90),
    ("dtype", np.float32),
    ("requires_grad", 1),
)


@pytest.mark.parametrize(("name", "value"), BAD_SPECS)
def test_a_spec_of_nothing_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(kdacore.ContractError) as caught:
        kdacore.ShapeDtype(**{"shape": (1, 8), name: value})
    assert (caught.value.op, caught.value.argument) == ("ShapeDtype", name)


def test_a_spec_takes_what_torch_says_of_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3)
    spec = kdacore.ShapeDtype(x.shape, device=x.device, kind="torch")
    assert spec == kdacore.ShapeDtype((2, 3), device="cpu", kind="torch")
    assert kdacore.ShapeDtype([np.int64(2)], device=torch.device("cuda", 1)).device == "cuda:1"  # type: ignore[arg-type]


def test_no_warning_on_a_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ran() == "reference"
