"""What servers ask for, asked wrongly: each call names the argument and nothing is written. Without values, and with
``KDACORE_VALIDATE=values`` or on a backend that reads them anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config

H, K, V, P = 2, 8, 8, 12
LENGTHS = (33, 20, 3)
T = sum(LENGTHS) + 4
chunk, recurrent = kdacore.chunk_kda, kdacore.fused_recurrent_kda
Row = tuple[Callable[..., Any], dict[str, Any], str]


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def tokens(lengths: tuple[int, ...] = LENGTHS, padding: int = 4) -> dict[str, Any]:
    T = sum(lengths) + padding
    x = {name: numbers(1, T, H, K) for name in ("q", "k", "v")}
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    x |= {"g": -np.abs(numbers(1, T, H, K)), "beta": np.full((1, T, H), 0.5, np.float32)}
    return {**x, "cu_seqlens": np.cumsum([0, *lengths])}


def prefill(**changes: Any) -> dict[str, Any]:
    """A valid call of a chunked op that uses everything; None takes an argument away."""
    call = tokens()
    call |= {"initial_state": numbers(P, H, K, V), "state_indices": np.array([1, 2, -1])}
    call |= {"has_initial_state": np.array([True, False, True]), "write_indices": np.array([1, 3, 4])}
    call |= {"checkpoint_offsets": np.array([16, 33, 0]), "checkpoint_indices": np.array([5, 6, -1])}
    call |= {"inplace_state": True, "output_final_state": True, "null_index": 0}
    return {name: x for name, x in {**call, **changes}.items() if x is not None}


def verify(**changes: Any) -> dict[str, Any]:
    """A valid call of a recurrent op with candidates."""
    call = tokens((2, 1, 3))
    call |= {"initial_state": numbers(P, H, K, V), "inplace_state": True, "null_index": 0}
    call |= {"state_indices": np.array([[1, 2, 0], [3, -1, 4], [0, 0, 0]])}
    call |= {"num_accepted_tokens": np.array([2, 1, 1])}
    call |= {"write_indices": np.array([[5, 6, 7], [8, 0, 9], [10, 11, 10]])}
    return {name: x for name, x in {**call, **changes}.items() if x is not None}


POOL_ARGUMENTS = (
    "state_indices",
    "has_initial_state",
    "write_indices",
    "write_pool",
    "checkpoint_offsets",
    "checkpoint_indices",
)
_NO_CHECKPOINTS: dict[str, Any] = {"checkpoint_offsets": None, "checkpoint_indices": None}
_NO_POOL: dict[str, Any] = {
    **_NO_CHECKPOINTS,
    "state_indices": None,
    "write_indices": None,
    "null_index": None,
}
_STATES = numbers(3, H, K, V)
BAD: dict[str, Row] = {
    **{f"{name} a list": (chunk, prefill(**{name: [1, 2, 3]}), name) for name in POOL_ARGUMENTS},
    "mask other N": (chunk, prefill(has_initial_state=np.ones(2, bool)), "has_initial_state"),
    "mask ints": (chunk, prefill(has_initial_state=np.ones(3, int)), "has_initial_state"),
    "mask without a state": (
        chunk,
        {**tokens(), "has_initial_state": np.ones(3, bool)},
        "has_initial_state",
    ),
    "chunk rows [N, T]": (chunk, prefill(state_indices=np.ones((3, 2), int)), "state_indices"),
    "chunk write rows [N, T]": (chunk, prefill(write_indices=np.ones((3, 2), int)), "write_indices"),
    "write rows other N": (chunk, prefill(write_indices=np.array([1, 3])), "write_indices"),
    "write rows floats": (chunk, prefill(write_indices=np.ones(3)), "write_indices"),
    "write rows not in place": (
        chunk,
        prefill(**_NO_CHECKPOINTS, inplace_state=None),
        "write_indices",
    ),
    "write rows without a pool": (
        chunk,
        prefill(**{**_NO_POOL, "write_indices": np.array([0, 1, 2]), "initial_state": _STATES}),
        "write_indices",
    ),
    "write pool not in place": (
        chunk,
        prefill(**_NO_CHECKPOINTS, inplace_state=None, write_indices=None, write_pool=numbers(P, H, K, V)),
        "write_pool",
    ),
    "write pool without rows": (
        chunk,
        prefill(**{**_NO_POOL, "initial_state": _STATES, "write_pool": numbers(P, H, K, V)}),
        "write_indices",
    ),
    "write pool heads": (chunk, prefill(write_pool=numbers(P, H + 1, K, V)), "write_pool"),
    "write pool rank": (chunk, prefill(write_pool=numbers(P, H, K)), "write_pool"),
    "write pool int32": (chunk, prefill(write_pool=numbers(P, H, K, V, dtype=np.int32)), "write_pool"),
    "pools of two dtypes": (
        chunk,
        prefill(write_pool=numbers(P, H, K, V), initial_state=numbers(P, H, K, V, dtype=np.float64)),
        "initial_state",
    ),
    "offsets without rows": (chunk, prefill(checkpoint_indices=None), "checkpoint_indices"),
    "rows without offsets": (chunk, prefill(checkpoint_offsets=None), "checkpoint_offsets"),
    "other number of rows": (chunk, prefill(checkpoint_indices=np.array([5, 6])), "checkpoint_indices"),
    "offsets rank 2": (chunk, prefill(checkpoint_offsets=np.zeros((1, 3), int)), "checkpoint_offsets"),
    "offsets floats": (chunk, prefill(checkpoint_offsets=np.zeros(3)), "checkpoint_offsets"),
    "checkpoints not in place": (
        chunk,
        prefill(write_indices=None, inplace_state=None),
        "checkpoint_offsets",
    ),
    "checkpoints without a pool": (
        chunk,
        prefill(
            state_indices=None,
            write_indices=None,
            null_index=None,
            has_initial_state=None,
            initial_state=_STATES,
        ),
        "checkpoint_offsets",
    ),
    "checkpoints of a batch": (
        chunk,
        {
            **{n: np.concatenate([x, x]) for n, x in tokens().items() if n != "cu_seqlens"},
            "initial_state": numbers(P, H, K, V),
            "state_indices": np.array([1, 2]),
            "checkpoint_offsets": np.array([0]),
            "checkpoint_indices": np.array([3]),
            "inplace_state": True,
        },
        "checkpoint_offsets",
    ),
    "null_index below zero": (chunk, prefill(null_index=-1), "null_index"),
    "null_index beyond int32": (chunk, prefill(null_index=2**31), "null_index"),
    "null_index a flag": (chunk, prefill(null_index=True), "null_index"),
    "null_index a float": (recurrent, verify(null_index=0.0), "null_index"),
    "null_index without rows": (chunk, {**tokens(), "null_index": 0}, "null_index"),
    "chunk out shape": (chunk, prefill(out=numbers(1, T, H, V + 1)), "out"),
    "chunk out dtype": (chunk, prefill(out=numbers(1, T, H, V, dtype=np.float16)), "out"),
    "chunk in place without a state": (chunk, {**tokens(), "inplace_state": True}, "inplace_state"),
    "candidates without counts": (recurrent, verify(num_accepted_tokens=None), "num_accepted_tokens"),
    "write rows rank 3": (recurrent, verify(write_indices=np.ones((3, 1, 1), int)), "write_indices"),
    "recurrent mask ints": (recurrent, verify(has_initial_state=np.ones(3, int)), "has_initial_state"),
    "fewer columns than tokens": (
        recurrent,
        {
            **{n: x[:, :2] for n, x in tokens().items() if n != "cu_seqlens"},
            "write_pool": numbers(P, H, K, V),
            "write_indices": np.array([[1]]),
            "inplace_state": True,
        },
        "write_indices",
    ),
}


def arrays_of(call: dict[str, Any]) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in call.items() if isinstance(x, np.ndarray)}


@pytest.mark.parametrize("name", BAD)
def test_bad_call(name: str) -> None:
    function, call, argument = BAD[name]
    before = arrays_of(call)
    with kdacore.record_selections() as ran, pytest.raises(kdacore.ContractError) as caught:
        function(**call)
    assert (caught.value.argument, caught.value.op) == (argument, function.__name__)
    assert caught.value.got and caught.value.want
    assert ran == [] and arrays_of(call) == before


def test_the_calls_the_tables_break_are_valid() -> None:
    chunk(**prefill())
    chunk(**prefill(write_pool=numbers(P, H, K, V)))
    recurrent(**verify())


def test_chunked_ops_have_no_candidates() -> None:
    with pytest.raises(TypeError, match="num_accepted_tokens"):
        chunk(**prefill(), num_accepted_tokens=np.array([1, 1, 1]))


# --- values -------------------------------------------------------------------------------------------------------


BAD_VALUES: dict[str, Row] = {
    "a read row beyond the pool": (chunk, prefill(state_indices=np.array([1, P, -1])), "state_indices"),
    "a written row beyond the pool": (chunk, prefill(write_indices=np.array([1, P, 4])), "write_indices"),
    "a written row beyond the other pool": (
        chunk,
        prefill(write_pool=numbers(8, H, K, V), write_indices=np.array([1, 8, 4])),
        "write_indices",
    ),
    "a checkpoint beyond the pool": (
        chunk,
        prefill(checkpoint_indices=np.array([5, P, -1])),
        "checkpoint_indices",
    ),
    "a row written twice": (chunk, prefill(write_indices=np.array([3, 3, 4])), "write_indices"),
    "a row written twice in the other pool": (
        recurrent,
        verify(write_pool=numbers(P, H, K, V), write_indices=np.array([[5, 6, 7], [6, 0, 9], [1, 2, 3]])),
        "write_indices",
    ),
    "a row read and written by two": (chunk, prefill(write_indices=np.array([2, 1, 4]), has_initial_state=None),
                                      "write_indices"),
    "a candidate's row that another reads": (
        recurrent,
        verify(write_indices=np.array([[3, 6, 7], [8, 0, 9], [10, 11, 10]])),
        "write_indices",
    ),
    "a checkpoint where a final state goes": (
        chunk,
        prefill(checkpoint_indices=np.array([5, 3, -1])),
        "checkpoint_indices",
    ),
    "two checkpoints in one row": (
        chunk,
        prefill(checkpoint_indices=np.array([5, 5, -1])),
        "checkpoint_indices",
    ),
    "a checkpoint where one starts": (
        chunk,
        prefill(checkpoint_indices=np.array([5, 1, -1]), write_indices=np.array([7, 3, 4])),
        "checkpoint_indices",
    ),
    "an offset off the grid": (chunk, prefill(checkpoint_offsets=np.array([16, 34, 0])), "checkpoint_offsets"),
    "an offset on another sequence's grid": (
        chunk,
        prefill(checkpoint_offsets=np.array([16, 48, 0])),
        "checkpoint_offsets",
    ),
    "an offset in the padding": (
        chunk,
        prefill(checkpoint_offsets=np.array([16, sum(LENGTHS), 0])),
        "checkpoint_offsets",
    ),
    "an offset below zero": (chunk, prefill(checkpoint_offsets=np.array([-16, 33, 0])), "checkpoint_offsets"),
    "an accepted count beyond the columns": (
        recurrent,
        verify(num_accepted_tokens=np.array([2, 1, 4])),
        "num_accepted_tokens",
    ),
    "fewer columns than a sequence's tokens": (
        recurrent,
        verify(write_indices=np.array([[5, 6], [8, 0], [10, 11]]), state_indices=np.array([1, 3, 4]),
               num_accepted_tokens=None),
        "write_indices",
    ),
}  # fmt: skip


@pytest.fixture
def validate_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KDACORE_VALIDATE", "values")
    config.refresh()
    yield
    monkeypatch.undo()
    config.refresh()


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str, validate_values: None) -> None:
    function, call, argument = BAD_VALUES[name]
    before = arrays_of(call)
    with kdacore.record_selections() as ran, pytest.raises(kdacore.ContractError) as caught:
        function(**call)
    assert (caught.value.argument, caught.value.op) == (argument, function.__name__)
    assert ran == [] and arrays_of(call) == before


@pytest.mark.parametrize("name", BAD_VALUES)
def test_the_reference_says_the_same_by_default(name: str) -> None:
    """It reads the indices anyway, and nothing is written."""
    function, call, argument = BAD_VALUES[name]
    before = arrays_of(call)
    with pytest.raises(kdacore.ContractError) as caught:
        function(**call, backend="reference")
    assert caught.value.argument == argument
    assert arrays_of(call) == before


@pytest.mark.parametrize("build", [prefill, verify], ids=lambda f: f.__name__)
def test_what_is_not_read_may_hold_anything(build: Any, validate_values: None) -> None:
    """Padding, the tokens of a sequence without a slot, rows that nobody starts from, the pool that is written."""
    call = build(write_pool=np.full((P, H, K, V), np.nan, np.float32))
    function, last = (chunk, 2) if build is prefill else (recurrent, 2)
    starts = call["cu_seqlens"]
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, starts[last] :] = np.nan
    read = [1] if build is prefill else [2, 3]
    call["initial_state"][np.setdiff1d(np.arange(P), read)] = np.nan
    o, _ = function(**call)
    assert np.isfinite(o).all() and not o[:, starts[last] :].any()


def test_tokens_that_are_read_are_looked_at(validate_values: None) -> None:
    for where in (0, LENGTHS[0]):
        call = prefill()
        call["v"][:, where] = np.nan
        with pytest.raises(kdacore.ContractError) as caught:
            chunk(**call)
        assert caught.value.argument == "v"


def test_an_offset_that_is_not_written_may_be_anything(validate_values: None) -> None:
    for wild in (-7, 5, T, 2**40):
        chunk(**prefill(checkpoint_offsets=np.array([16, 33, wild])))


def test_rows_of_what_has_no_slot_may_be_named_again(validate_values: None) -> None:
    """Nothing is written for it: not its row, nor a checkpoint in it."""
    start = sum(LENGTHS[:2])
    call = prefill(write_indices=np.array([1, 3, 3]))
    call |= {"checkpoint_offsets": np.array([16, 33, start]), "checkpoint_indices": np.array([5, 6, 6])}
    before = call["initial_state"].copy()
    chunk(**call)
    changed = (call["initial_state"] != before).any((1, 2, 3))
    assert np.flatnonzero(changed).tolist() == [1, 3, 5, 6]
