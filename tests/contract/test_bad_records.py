"""Records of candidates, given wrongly: each call names the argument and nothing is written. Without values, and on a
backend that reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdacore

H, HV, K, V, P, R, MOST, N = 2, 4, 8, 6, 9, 5, 3, 2


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).random(shape).astype(dtype)


def records(**changes: Any) -> tuple[Any, ...]:
    parts = {
        "update": numbers(R, MOST, HV, V),
        "key": numbers(R, MOST, H, K),
        "decay": numbers(R, MOST, HV, K),
    }
    return tuple({**parts, **changes}.values())


def verify(T: int = 3, **changes: Any) -> dict[str, Any]:
    """A valid call that replays records and writes others; None takes an argument away."""
    call: dict[str, Any] = {name: numbers(N, T, H, K) for name in ("q", "k")}
    call |= {"v": numbers(N, T, HV, V), "g": -numbers(N, T, HV, K), "beta": numbers(N, T, HV)}
    call |= {"initial_state": numbers(P, HV, K, V), "state_indices": np.array([4, 2]), "inplace_state": True}
    call |= {"records": records(), "record_indices": np.array([1, 3]), "num_replayed": np.array([3, 0])}
    return {name: x for name, x in {**call, **changes}.items() if x is not None}


def pack(*lengths: int, **changes: Any) -> dict[str, Any]:
    call = verify(T=sum(lengths), **changes)
    call |= {name: call[name][:1] for name in ("q", "k", "v", "g", "beta")}
    return {**call, "cu_seqlens": np.cumsum([0, *lengths])}


def commit(**changes: Any) -> dict[str, Any]:
    call = {
        "initial_state": numbers(P, HV, K, V),
        "state_indices": np.array([4, 2]),
        "records": records(),
        "record_indices": np.array([1, 3]),
        "num_replayed": np.array([3, 0]),
    }
    return {**call, **changes}


CALLS = {"verify": (kdacore.fused_recurrent_kda, verify), "commit": (kdacore.commit_records, commit)}
BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "no tuple": ({"records": records()[0]}, "records"),
    "two arrays": ({"records": records()[:2]}, "records"),
    "one None": ({"records": records(key=None)}, "record_key"),
    "another H": ({"records": records(key=numbers(R, MOST, 3, K))}, "record_key"),
    "another K": ({"records": records(key=numbers(R, MOST, H, K + 1))}, "record_key"),
    "another R": ({"records": records(key=numbers(R + 1, MOST, H, K))}, "record_key"),
    "another n": ({"records": records(decay=numbers(R, MOST + 1, HV, K))}, "record_decay"),
    "another V": ({"records": records(update=numbers(R, MOST, HV, V + 1))}, "record_update"),
    "no rows": ({"records": records(update=numbers(0, MOST, HV, V))}, "record_update"),
    "float16 records": (
        {"records": records(update=numbers(R, MOST, HV, V, dtype=np.float16))},
        "record_update",
    ),
    "float64 decays": ({"records": records(decay=numbers(R, MOST, HV, K, dtype=np.float64))}, "record_decay"),
    "rows of floats": ({"record_indices": numbers(N)}, "record_indices"),
    "rows of three": ({"record_indices": np.arange(3)}, "record_indices"),
    "counts of floats": ({"num_replayed": numbers(N)}, "num_replayed"),
    "counts [N, 1]": ({"num_replayed": np.ones((N, 1), int)}, "num_replayed"),
}
VERIFY: dict[str, tuple[dict[str, Any], str]] = {
    "rows alone": (verify(records=None, num_replayed=None), "record_indices"),
    "counts alone": (verify(records=None, record_indices=None), "num_replayed"),
    "no rows given": (verify(record_indices=None), "record_indices"),
    "not in place": (verify(inplace_state=False), "records"),
    "read only": (verify(inplace_state=False, read_only_state=True), "records"),
    "no pool": (verify(state_indices=None, initial_state=numbers(N, HV, K, V)), "records"),
    "rows for each token": (
        verify(state_indices=np.arange(6).reshape(2, 3), num_accepted_tokens=np.ones(N, int)),
        "records",
    ),
    "writes for each token": (verify(write_indices=np.arange(6).reshape(2, 3)), "write_indices"),
    "more tokens than records": (verify(T=4), "q"),
    "decays of the gated delta rule": (verify(records=records(decay=numbers(R, MOST, HV))), "record_decay"),
}
BAD = {
    **{f"{name}: {what}": (call[0], call[1](**given), argument)
       for name, call in CALLS.items() for what, (given, argument) in BOTH.items()},
    **{f"verify: {what}": (kdacore.fused_recurrent_kda, *row) for what, row in VERIFY.items()},
    "commit: heads that do not divide": (
        kdacore.commit_records, commit(records=records(key=numbers(R, MOST, 3, K))), "record_key"),
    "commit: other V": (kdacore.commit_records, commit(initial_state=numbers(P, HV, K, V + 1)), "record_update"),
    "commit: state rows [N, W]": (
        kdacore.commit_records, commit(state_indices=np.ones((2, 2), int)), "state_indices"),
    "commit: write rows of three": (kdacore.commit_records, commit(write_indices=np.arange(3)), "write_indices"),
}  # fmt: skip
BAD_VALUES: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{f"{name}: {what}": (call[0], call[1](**given), argument)
       for name, call in CALLS.items()
       for what, (given, argument) in {
           "a row beyond": ({"record_indices": np.array([R, 0])}, "record_indices"),
           "a row twice": ({"record_indices": np.array([1, 1])}, "record_indices"),
           "more than there are": ({"num_replayed": np.array([MOST + 1, 0])}, "num_replayed"),
           "fewer than none": ({"num_replayed": np.array([0, -1])}, "num_replayed"),
           "a state row twice": ({"state_indices": np.array([4, 4])}, "state_indices"),
           "a state row beyond": ({"state_indices": np.array([4, P])}, "state_indices"),
       }.items()},
    "a sequence longer than its records": (kdacore.fused_recurrent_kda, pack(4, 1), "cu_seqlens"),
}  # fmt: skip


def memory_of(call: dict[str, Any]) -> list[bytes]:
    parts = call.get("records")
    arrays = [*call.values(), *(() if parts is None else parts)]
    return [x.tobytes() for x in arrays if isinstance(x, np.ndarray)]


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    function, call, argument = BAD[name]
    before = memory_of(call)
    with kdacore.record_selections() as ran, pytest.raises(kdacore.ContractError) as caught:
        function(**call)
    assert (caught.value.argument, caught.value.op) == (argument, function.__name__)
    assert ran == [] and memory_of(call) == before


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str) -> None:
    function, call, argument = BAD_VALUES[name]
    before = memory_of(call)
    with pytest.raises(kdacore.ContractError) as caught:
        function(**call, backend="reference")
    assert caught.value.argument == argument and memory_of(call) == before


def test_a_longer_sequence_without_records_is_served() -> None:
    call = pack(4, 1, record_indices=np.array([-1, 0]))
    o, _ = kdacore.fused_recurrent_kda(**call)
    assert np.isfinite(o).all()


def test_counts_of_sequences_without_records_may_be_anything() -> None:
    kdacore.fused_recurrent_kda(**verify(record_indices=np.array([-1, 0]), num_replayed=np.array([99, 1])))


def test_records_that_overlap_are_refused() -> None:
    shared = numbers(R, MOST, HV, V)
    for name, bad in {
        "record_update": records(update=np.broadcast_to(shared[:1], shared.shape)),
        "record_decay": records(decay=np.broadcast_to(numbers(1, 1, HV, K), (R, MOST, HV, K))),
    }.items():
        with pytest.raises(kdacore.ContractError) as caught:
            kdacore.fused_recurrent_kda(**verify(records=bad))
        assert caught.value.argument == name


@pytest.mark.parametrize("backend", ["pallas"])
def test_backends_that_do_not_know_records_decline_them(backend: str) -> None:
    arrays = {name: x for name, x in verify().items() if name != "records"}
    found = kdacore.explain("fused_recurrent_kda", **arrays, records=records())
    reasons = {r.code: r for r in found.candidate(backend).reasons}
    assert "records" in reasons["option"].message
