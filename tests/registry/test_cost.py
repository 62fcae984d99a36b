"""Cost tables: shipped ones are valid, sizes between measured ones are interpolated, far ones are not predicted, and a
device's own table counts where it can be used."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import kdacore
from kdacore import config
from kdacore.calls.description import CallDescription, options
from kdacore.calls.pools import Pool
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape
from kdacore.dispatch import cost, cost_tables
from kdacore.dispatch.cost_tables import Group, Table
from kdacore.errors import PerformanceWarning
from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.types import Device, Request, TensorSpec

DEVICE = Device("cuda", 0, "sm_x")
NAME = "NVIDIA X1"
CALL = Request(
    "chunk_kda", "torch", DEVICE, 1, 8192, 64, 64, 128, 128, 1, "bfloat16", "float32", gate="sigmoid"
)
GROUP = Group("chunk_kda", "torch", "bfloat16", False, 128, 128)
PLAIN = (("gate", "bounded"), ("initial_state", False), ("packed", False))
STATE = (("gate", "bounded"), ("initial_state", True), ("packed", False))


def table(**changes: Any) -> Table:
    """Times of the reference backend: 2 us a token and item from 64 items on, half as much for 32 of them."""
    plain = {32: ((1024, 1.0), (4096, 4.0)), 64: ((1024, 2.0), (4096, 8.0))}
    times = {("reference", GROUP): {PLAIN: plain, STATE: {64: ((16, 0.5),)}}}
    given = {"arch": "sm_x", "device": NAME, "when": "2026-11-25", "backends": {"reference": "0.1.0"}}
    return Table(**{**given, "times": MappingProxyType(times), **changes})


def call(**changes: Any) -> Request:
    return dataclasses.replace(CALL, **changes)


def shipped() -> list[Path]:
    return sorted((Path(kdacore.__file__).parent / "dispatch" / "profiles").glob("*.json"))


def test_there_is_a_table_for_the_measured_gpu() -> None:
    assert "sm_90.json" in [p.name for p in shipped()]
    assert cost_tables.shipped_archs() == tuple(p.stem for p in shipped())


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.name)
def test_shipped_tables_are_valid(path: Path) -> None:
    found = cost_tables.parse(path.read_text())
    assert found.arch == ("" if path.stem == "cpu" else path.stem)
    assert {name for name, _ in found.times} == set(found.backends) <= set(REGISTRY.backends())
    assert {group.op for _, group in found.times} <= set(OPS)
    for variants in found.times.values():
        for columns in variants.values():
            assert all(0 < seconds < 10 for column in columns.values() for _, seconds in column)
    assert cost_tables.dump(found) == path.read_text()


def test_text_and_table_are_the_same() -> None:
    read = cost_tables.parse(cost_tables.dump(table()), "here")
    assert read == table(source="here", times=read.times)
    assert dict(read.times) == dict(table().times)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 99}, "schema is 99"),
        ({"device": 5}, "damaged"),
        ({"times": [{"backend": "reference"}]}, "damaged: KeyError"),
        ({"times": 3}, "damaged"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, Any], said: str) -> None:
    text = json.dumps({**json.loads(cost_tables.dump(table())), **change})
    with pytest.raises(cost_tables.TableError, match=said):
        cost_tables.parse(text)


@pytest.mark.parametrize(
    "point", [[0, 64, 1.0], [16, 64, -1.0], [16, 64, float("nan")], [16, 64, float("inf")], [16]]
)
def test_points_are_positive(point: list[Any]) -> None:
    data = json.loads(cost_tables.dump(table()))
    data["times"][0]["points"].append(point)
    with pytest.raises(cost_tables.TableError, match="damaged"):
        cost_tables.parse(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(cost_tables.TableError):
        cost_tables.parse(text)


# --- predictions --------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_tables, "in_use", lambda device: table(source="a test"))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("change", "seconds", "how"),
    [
        ({"T": 4096}, 8.0, "measured"),
        ({"T": 2048}, 4.0, "interpolated"),
        ({"T": 2048, "H": 48, "HV": 48}, 3.0, "interpolated"),
        ({"T": 1024, "H": 4, "HV": 32}, 1.0, "measured"),
        ({"T": 2048, "B": 2, "N": 2, "H": 32, "HV": 32}, 4.0, "interpolated"),
        ({"T": 8192}, 16.0, "extrapolated"),
        ({"T": 512}, 2.0, "extrapolated"),
        ({"T": 4096, "H": 128, "HV": 128}, 16.0, "extrapolated"),
        ({"T": 4096, "H": 8, "HV": 8}, 4.0, "extrapolated"),
        ({"T": 4096, "packed": True}, 8.0, "taken from calls with packed=False"),
        ({"T": 2048, "gate": "log"}, 4.0, "interpolated from calls with gate=bounded"),
        ({"T": 2048, "gate": "log", "safe_gate": True}, 4.0, "interpolated"),
        ({"T": 2048, "lower_bound": -5.0}, 4.0, "interpolated"),
        ({"T": 2048, "lower_bound": -6.0}, 4.0, "interpolated from calls with gate=bounded"),
        ({"T": 2048, "kind": "jax"}, 4.0, "interpolated from calls with torch arrays"),
    ],
)
def test_sizes_between_measured_ones_are_interpolated(
    change: dict[str, Any], seconds: float, how: str
) -> None:
    found = cost.predict("reference", call(**change))
    assert found is not None
    assert found.seconds == pytest.approx(seconds)
    assert found.source == f"{how} ({NAME}; a test)"


@pytest.mark.usefixtures("measured")
def test_a_call_from_a_state_has_times_of_its_own_where_there_are_any() -> None:
    state = (("initial_state", TensorSpec((1, 64, 128, 128), "float32")),)
    near, far = (cost.predict("reference", call(T=T, tensors=state)) for T in (16, 2048))
    assert near is not None and far is not None
    assert (near.seconds, near.source.partition(" (")[0]) == (0.5, "measured")
    assert (far.seconds, far.source.partition(" (")[0]) == (
        4.0,
        "interpolated from calls with initial_state=False",
    )


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "change",
    [
        *({"T": 200}, {"T": 20000}, {"HV": 7}, {"HV": 257}),
        *({"K": 64}, {"dtype": "float16"}, {"needs_grad": True}, {"kind": "numpy"}),
    ],
)
def test_nothing_near_predicts_nothing(change: dict[str, Any]) -> None:
    assert cost.predict("reference", call(**{"T": 4096, **change})) is None
    assert cost.predict("another", call(T=4096)) is None


def of_one_size(kind: str, seconds: float, source: str = "") -> Table:
    """A time of 4096 tokens and 64 items."""
    key = "reference", GROUP._replace(kind=kind)
    sources = {(*key, PLAIN): source} if source else {}
    return table(times=MappingProxyType({key: {PLAIN: {64: ((4096, seconds),)}}}), sources=sources)


def test_one_size_does_not_tell_how_times_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_tables, "in_use", lambda device: of_one_size("torch", 7.0))
    found = cost.predict("reference", call(T=4096))
    assert found is not None and found.seconds == 7.0
    for change in (
        {"T": 4095},
        {"T": 4097},
        {"T": 4096, "H": 32, "HV": 32},
        {"T": 4096, "H": 128, "HV": 128},
    ):
        assert cost.predict("reference", call(**change)) is None


def test_jax_has_its_own_times_where_measured_and_those_of_torch_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = cost_tables._with_records(table(source="a test"), of_one_size("jax", 7.0, "a record"))
    monkeypatch.setattr(cost_tables, "in_use", lambda device: both)
    found = {T: cost.predict("reference", call(T=T, kind="jax")) for T in (4096, 2048)}
    assert found[4096] == cost.Prediction(7.0, f"measured ({NAME}; a record)")
    assert found[2048] == cost.Prediction(4.0, f"interpolated from calls with torch arrays ({NAME}; a test)")


@pytest.mark.parametrize(("when", "seconds"), [("2000-01-01", 2.0), ("2100-01-01", 99.0)])
def test_of_recorded_and_measured_times_the_newer_count(when: str, seconds: float) -> None:
    recorded = table(
        when=when,
        times=MappingProxyType(
            {("reference", GROUP): {PLAIN: {64: ((1024, 99.0), (2048, 3.0)), 128: ((16, 1.0),)}}}
        ),
        source="a record",
    )
    merged = cost_tables._with_records(table(source="a test"), recorded)
    assert merged.times["reference", GROUP] == {
        PLAIN: {
            32: ((1024, 1.0), (4096, 4.0)),
            64: ((1024, seconds), (2048, 3.0), (4096, 8.0)),
            128: ((16, 1.0),),
        },
        STATE: {64: ((16, 0.5),)},
    }
    assert merged.source_of("reference", GROUP, PLAIN) == "a test, and a record"
    assert merged.source_of("reference", GROUP, STATE) == "a test"


def test_steps_with_candidates_are_not_told_of_by_those_without() -> None:
    """One token, four by records, four by states: what was recorded on an H200."""
    sizes = Shape(32, 1, 32, 32, 128, 128)
    plain = CallDescription(
        op="fused_decode_kda",
        kind="torch",
        device="cuda",
        arch="sm_90",
        dtype="bfloat16",
        gate_dtype="bfloat16",
        beta_dtype="bfloat16",
        shape=sizes,
        pool=Pool(inplace=True),
        options=options(inplace_state=True),
    )
    four = dataclasses.replace(plain, shape=dataclasses.replace(sizes, T=4))
    by_records = dataclasses.replace(four, pool=Pool(inplace=True, records=True))
    by_states = dataclasses.replace(four, pool=Pool(indices=2, inplace=True))
    table = cost_tables.shipped("sm_90")
    assert table is not None
    times = []
    for asked in (plain, by_records, by_states):
        request = request_of(asked)
        (ordered,) = cost._measured(table, "cuda", request)
        found = cost._best(ordered, cost.tokens_of(request), request.N * request.HV)
        assert found is not None and found.source == f"measured ({table.device}; {FUSED_DECODE})"
        times.append(found.seconds)
        more = request_of(dataclasses.replace(asked, shape=dataclasses.replace(asked.shape, B=64)))
        (ordered,) = cost._measured(table, "cuda", more)
        found = cost._best(ordered, cost.tokens_of(more), more.N * more.HV)
        assert (found is None) == (asked is not plain)
    assert times == pytest.approx(recorded_seconds("kda-b32", "verify-records", "verify-states"), rel=1e-3)


FUSED_DECODE = "benchmarks/results/h200/fused-decode.json"


def recorded_seconds(*cases: str) -> list[float]:
    rows = json.loads((Path(__file__).parents[2] / FUSED_DECODE).read_text())["rows"]
    by_case = {row["case"]: row["seconds"] for row in rows if row["contender"] == "fused"}
    return [by_case[case] for case in cases]


# --- which table counts -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of a device's own tables, on a machine whose device is :data:`NAME`."""
    monkeypatch.setenv("KDACORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_tables, "_name", lambda device: NAME)
    config.refresh()
    (tmp_path / "costs").mkdir(mode=0o700)
    return tmp_path / "costs"


def put(folder: Path, given: Table, name: str = "") -> Path:
    path = folder / (name or cost_tables.path_of(given.arch, given.device).name)
    path.write_text(cost_tables.dump(given))
    cost_tables.forget()
    return path


def test_a_device_uses_its_own_table(folder: Path) -> None:
    assert cost_tables.in_use(DEVICE) is None
    path = put(folder, table())
    assert path.name == "sm_x-NVIDIA-X1.json"
    found = cost.predict("reference", call(T=2048))
    assert found is not None and found.source == f"interpolated ({NAME}; {path})"


def test_it_counts_before_the_shipped_one(folder: Path) -> None:
    hopper = Device("cuda", 0, "sm_90")
    before = cost_tables.in_use(hopper)
    assert before is not None and before.source.startswith("shipped")
    put(folder, table(arch="sm_90"))
    now = cost_tables.in_use(hopper)
    assert now is not None and now.device == NAME


def test_tables_of_other_devices_are_left_alone(folder: Path) -> None:
    put(folder, table(device="NVIDIA X2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cost_tables.in_use(DEVICE) is None


def test_without_a_device_the_only_table_of_its_architecture_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_tables, "_name", lambda device: "")
    put(folder, table())
    found = cost_tables.in_use(DEVICE)
    assert found is not None and found.device == NAME
    put(folder, table(device="NVIDIA X2"))
    assert cost_tables.in_use(DEVICE) is None


def damage(path: Path) -> None:
    path.write_text(path.read_text()[:100])


def rename(path: Path) -> None:
    text = path.read_text().replace(NAME, "NVIDIA X2")
    path.write_text(text)


def outdate(path: Path) -> None:
    path.write_text(path.read_text().replace('"0.1.0"', '"0.0.1"'))


def forget_backend(path: Path) -> None:
    path.write_text(path.read_text().replace('{"reference": ', '{"gone": '))


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (damage, "not JSON"),
        (rename, "measured on NVIDIA X2"),
        (outdate, "measured with reference 0.0.1"),
        (forget_backend, "here it is not installed"),
        (open_to_all, "ours alone"),
        (open_folder, "others may write it"),
        (binary, "not text"),
    ],
)
def test_a_table_that_cannot_be_used_is_ignored_and_said_so(folder: Path, spoil: Any, said: str) -> None:
    path = put(folder, table())
    spoil(path)
    cost_tables.forget()
    with pytest.warns(PerformanceWarning, match=said) as caught:
        assert cost_tables.in_use(DEVICE) is None
        assert cost_tables.in_use(DEVICE) is None
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    assert "kdacore tune" in str(caught[0].message)


def test_what_is_still_being_measured_is_no_table(folder: Path) -> None:
    put(folder, table(), f"sm_x-NVIDIA-X1{cost_tables.PARTIAL}")
    assert cost_tables.in_use(DEVICE) is None
    assert list(cost_tables.own_tables()) == []


def test_a_folder_that_cannot_be_read_has_no_tables(folder: Path) -> None:
    os.rmdir(folder)
    folder.write_text("a file")
    assert list(cost_tables.own_tables()) == []


def test_explain_says_where_costs_come_from(folder: Path) -> None:
    path = put(folder, table(arch="sm_90"))
    x = kdacore.ShapeDtype((1, 2048, 64, 128), "bfloat16", "cuda", "torch", "sm_90")
    beta = kdacore.ShapeDtype((1, 2048, 64), "bfloat16", "cuda", "torch", "sm_90")
    said = kdacore.explain("chunk_kda", q=x, k=x, v=x, g=x, beta=beta).text
    assert f"     cost interpolated from calls with gate=bounded ({NAME}; {path})" in said.splitlines()
