"""Random calls reach the edges of the contract, and a fault that is planted at each of them fails some of those."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdacore import machine
from kdacore.calls.description import options, specs
from kdacore.calls.pools import Pool
from kdacore.calls.values import Shape, offsets
from kdacore.errors import ContractError
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.testing import fuzz, random_cases, random_edges
from kdacore.testing.cases import Case
from kdacore.testing.faults import OFFSETS, are_offsets, faults_of, written
from kdacore.testing.random_cases import random_case
from kdacore.testing.random_edges import traits
from kdacore.testing.random_limits import Limits
from kdacore.testing.random_pools import with_pool
from kdacore.testing.serving import judge
from kdacore.testing.suite import Result, run_case
from kdacore.types import ArrayKind, Backend, Outputs

# The package has the checks by these names.
accuracy, pool, refusal = (
    importlib.import_module(f"kdacore.testing.checks.{name}") for name in ("accuracy", "pool", "refusal")
)
NAME = "planted"
WHOLE = ("chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
SEEDS = range(300)
TRIED = 15
"""Calls in which a fault must show."""
REFUSED = "must be refused: "


@functools.cache
def drawn(backend: str = "reference", together: int = 1) -> tuple[Case, ...]:
    return tuple(random_case(backend, seed, "cpu", limits=Limits(together=together)) for seed in SEEDS)


def with_trait(trait: str, backend: str = "reference", kind: str = "torch") -> Iterator[Case]:
    """Drawn calls that have the trait, without those whose oracle takes long."""
    return (c for c in drawn(backend) if trait in traits(c) and c.kind == kind and c.shape.T < 70)


def test_every_edge_is_drawn() -> None:
    assert {trait for case in drawn() for trait in traits(case)} == {
        "gates at the ends of float32",
        "inference mode",
        "lazily negated views",
        "many items and null slots, dense",
        "many items and null slots, packed",
        "many items, dense",
        "many items, packed",
        "must be refused: inference",
        "must be refused: negated",
        "must be refused: offsets",
        "must be refused: saved",
        "null slots, dense",
        "null slots, null_index and negative ones",
        "null slots, packed",
        "rows that several sequences start from",
    }


def test_what_edges_change_of_a_call_is_served() -> None:
    assert not any(judge(case) for case in drawn() if list(traits(case)))


def test_many_items_on_a_gpu_lie_around_the_units_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_edges, "judge", lambda case: ())
    case = replace(drawn()[0], op="chunk_kda", check="accuracy", device="cuda")
    rng = np.random.default_rng(0)
    sizes = [random_edges.draw_sizes(case, case, rng, Limits()).shape for _ in range(400)]
    many = [s for s in sizes if s != case.shape]
    units = {unit * times for unit in (30, 33, 66, 132) for times in (1, 2, 3)}
    assert 60 < len(many) < 140
    assert all(min(abs(s.N * s.HV - unit) for unit in units) <= 2 for s in many)
    assert {s.N * s.HV % 66 for s in many} >= {64, 65, 0, 1, 2}
    assert {bool(s.lengths) for s in many} == {False, True}


def test_many_items_alone() -> None:
    cases = [random_case("reference", seed, "cpu", limits=Limits(many=True)) for seed in range(40)]
    assert all("many items and null slots, dense" in traits(case) for case in cases)
    assert {case.check for case in cases} == {"pool"} and len({case.op for case in cases}) == 4


# --- faults planted in a backend -------------------------------------------------------------------------------------


@pytest.fixture
def plant() -> Iterator[Callable[[Any], None]]:
    """Registers the reference with a fault in the forward of its whole ops."""

    def add(fault: Callable[..., Outputs]) -> None:
        ops = {}
        for op in WHOLE:
            original = REGISTRY.get("reference").backend.ops[op]
            ops[op] = dataclasses.replace(original, forward=functools.partial(fault, original.forward))
        backend = Backend(NAME, "0", ("numpy",), ops)

        class Plugin:
            @hookimpl
            def kdacore_backends(self) -> list[Backend]:
                return [backend]

        REGISTRY.register(Plugin(), NAME)

    yield add
    REGISTRY.unregister(NAME)


def has_null_slots(request: Any, x: Any) -> bool:
    table = x.state_indices
    return table is not None and bool(((table < 0) | (table == request.null_index)).any())


def writes_the_null_row(forward: Any, request: Any, x: Any) -> Outputs:
    out: Outputs = forward(request, x)
    if request.inplace_state and request.null_index is not None and has_null_slots(request, x):
        pool = getattr(x, request.written_pool)
        pool[request.null_index] = 0
    return out


def takes_null_slots_for_one_step(forward: Any, request: Any, x: Any) -> Outputs:
    """What host and device disagree about is seen where work is cut, that is with many items."""
    out: Outputs = forward(request, x)
    if not request.packed and has_null_slots(request, x) and request.N * request.HV >= 28:
        out.o[-1] = 7
    return out


def overflows(forward: Any, request: Any, x: Any) -> Outputs:
    out: Outputs = forward(request, x)
    if x.A_log is not None and (np.asarray(x.A_log, np.float64) > 88.6).any():
        out.o[...] = np.nan
    return out


def starts_each_row_once(forward: Any, request: Any, x: Any) -> Outputs:
    if x.state_indices is None or x.state_indices.ndim != 1:
        plain: Outputs = forward(request, x)
        return plain
    table = np.array(x.state_indices)
    _, first = np.unique(table, return_index=True)
    again = np.ones(len(table), bool)
    again[first] = False
    table[again] = -1
    out: Outputs = forward(request, x._replace(state_indices=table))
    return out


PLANTED = [
    (writes_the_null_row, "null slots, dense"),
    (writes_the_null_row, "null slots, packed"),
    (takes_null_slots_for_one_step, "many items and null slots, dense"),
    (overflows, "gates at the ends of float32"),
    (starts_each_row_once, "rows that several sequences start from"),
]


@pytest.mark.parametrize(("fault", "trait"), PLANTED)
def test_a_fault_in_a_backend_fails(plant: Any, fault: Any, trait: str) -> None:
    plant(fault)
    some = itertools.islice(with_trait(trait, NAME, "numpy"), TRIED)
    assert any(run_case(case).status == "failed" for case in some)


# --- faults planted between call and backend -------------------------------------------------------------------------


def test_views_whose_negation_is_ignored_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    original = accuracy.forward

    def ignores(case: Case, given: dict[str, Any]) -> Any:
        import torch

        return original(case, {n: torch._neg_view(x) if x.is_neg() else x for n, x in given.items()})

    views = with_trait("lazily negated views")  # of one array: the signs of two may cancel
    cases = (c for c in views if c.check == "accuracy" and len({"q", "k", "v"} & {*c.negated}) == 1)
    case = next(cases)
    assert run_case(case).status == "served"
    monkeypatch.setattr(accuracy, "forward", ignores)
    assert run_case(case).status == "failed"


def test_a_call_that_inference_mode_breaks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(case: Case, given: dict[str, Any]) -> Any:
        assert case.mode == "inference"
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")

    cases = list(itertools.islice(with_trait("inference mode"), 4))
    assert {case.seed % 2 for case in cases} == {0, 1}, "arrays made in inference mode, and outside"
    for module in (accuracy, pool):
        monkeypatch.setattr(module, "forward", breaks)
    assert all("Inplace update" in run_case(case).message for case in cases)


def _refuse(case: Case, given: dict[str, Any], argument: str) -> None:
    raise ContractError(case.op, argument, "something", "something else")


def runs(case: Case, given: dict[str, Any]) -> None:
    """A fault that nobody notices."""


def names_another(case: Case, given: dict[str, Any]) -> None:
    _refuse(case, given, "nothing")


def writes_first(case: Case, given: dict[str, Any]) -> None:
    given["v"].detach()[...] = 0
    _refuse(case, given, case.fault.partition(":")[2].replace("wraps", "cu_seqlens"))


def ends_in_a_raw_error(case: Case, given: dict[str, Any]) -> None:
    raise RuntimeError("Inference tensors cannot be saved for backward")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (runs, "refused: error inf"),
        (names_another, "it named nothing, not"),
        (writes_first, "v unchanged: error inf"),
        (ends_in_a_raw_error, "cannot be saved for backward"),
    ],
)
@pytest.mark.parametrize("kind", ["offsets", "negated", "inference", "saved"])
def test_a_call_that_is_refused_badly_fails(
    monkeypatch: pytest.MonkeyPatch, kind: str, fault: Any, said: str
) -> None:
    found = (c for c in with_trait(REFUSED + kind) if "v" in specs(c) and c.fault != "saved:v")
    case = next(found)
    case = replace(case, fault="offsets:wraps" if kind == "offsets" else case.fault, seed=case.seed * 3 + 1)
    monkeypatch.setattr(refusal, "forward", fault)
    result = run_case(case)
    assert result.status == "failed" and said in result.message


# --- what must be refused --------------------------------------------------------------------------------------------

PACK = Case(
    check="pool",
    backend="reference",
    kind="torch",
    shape=Shape(1, 13, 1, 2, 8, 8, (5, 0, 3, 4), 1),
    host_offsets=True,
    out=True,
    options=options(output_final_state=True),
)
POOL = with_pool(PACK, Pool(inplace=True, null=True, writes=1, separate=True))
CALLS = [
    POOL,
    with_pool(PACK, Pool(inplace=True, negatives=True)),
    replace(PACK, out=False, check="gradients"),
]
FAULTS = [(i, fault) for i, call in enumerate(CALLS) for fault in faults_of(call)]


def test_calls_have_every_fault() -> None:
    kinds = {fault.partition(":")[0] for _, fault in FAULTS}
    assert kinds == {"offsets", "negated", "inference", "saved"} and len(FAULTS) > 30
    assert {f for _, f in FAULTS} >= {f"offsets:{how}" for how in (*OFFSETS, "disagree")}
    assert {written(call) for call in CALLS} == {("out", "write_pool"), ("out", "initial_state"), ()}


@pytest.mark.parametrize("seed", [0, 1], ids=["recognised", "new"])
@pytest.mark.parametrize(("call", "fault"), FAULTS)
def test_a_fault_is_refused_by_name(call: int, fault: str, seed: int) -> None:
    result: Result = run_case(replace(CALLS[call], check="refusal", fault=fault, seed=seed))
    assert result.status == "served", result.message


@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("how", [*OFFSETS, "disagree"])
def test_bad_offsets_of_other_arrays_are_refused(kind: ArrayKind, how: str) -> None:
    call = replace(PACK, kind=kind, out=False, index_dtype="int32" if kind == "jax" else "int64")
    result = run_case(replace(call, check="refusal", fault=f"offsets:{how}", seed=1))
    assert result.status == "served", result.message


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("lengths", [(4,), (0, 4), (2, 3), (4, 0, 1), (1, 2, 3, 4), (0, 0, 0, 0, 7)])
@pytest.mark.parametrize("how", OFFSETS)
def test_bad_offsets_are_none(how: str, lengths: tuple[int, ...], dtype: str) -> None:
    """Those that happen to be offsets after all are no fault of that pack."""
    bounds, T = offsets(lengths).tolist(), sum(lengths) + 2
    assert are_offsets(bounds, T)
    bad = OFFSETS[how](bounds, T, int(np.iinfo(dtype).max))
    assert len(bad) == len(bounds) and np.array(bad).astype(dtype).tolist() == bad
    shape = Shape(1, T, 1, 1, 8, 8, lengths, 2)
    named = f"offsets:{how}" in faults_of(replace(PACK, shape=shape, index_dtype=dtype))
    assert named is not are_offsets(bad, T)
    assert named or how == "decreasing"


# --- seeds that share a program --------------------------------------------------------------------------------------


def test_seeds_together_share_sizes_dtypes_and_options() -> None:
    cases = drawn(together=50)[:200]

    def program(case: Case) -> Case:
        shape = replace(case.shape, lengths=tuple(sorted(case.shape.lengths)))
        return replace(
            case,
            shape=shape,
            seed=0,
            note="",
            gates="",
            negated=(),
            mode="eager",
            fault="",
            check="",
            pool="",
        )

    blocks = [{program(case) for case in cases[n : n + 50]} for n in range(0, len(cases), 50)]
    assert [len(block) for block in blocks] == [1] * 4 and len(set.union(*blocks)) == 4
    assert len({replace(case, seed=0, note="") for case in cases}) > 30


def test_the_record_counts_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "probe", lambda: machine.Machine((), (), ()))
    monkeypatch.setattr(fuzz, "run_case", lambda case: Result(case, "served"))
    path = tmp_path / "fuzz.json"
    words = ["--backend", "reference", "--count", "60", "--together", "5", "--commit", "abc", "--json"]
    assert fuzz.main([*words, str(path)]) == 0
    found = json.loads(path.read_text())
    cases = [random_cases.random_case("reference", s, "cpu", limits=Limits(together=5)) for s in range(60)]
    assert found["limits"] == {"together": 5}
    assert sum(found["drawn"].values()) == sum(len(list(traits(case))) for case in cases) > 20
