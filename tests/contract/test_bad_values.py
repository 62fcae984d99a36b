"""``KDACORE_VALIDATE=values``: contents are read and checked, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config, stages
from kdacore.errors import ContractError

B, T, H, K, V = 1, 6, 2, 8, 8


@pytest.fixture
def validate_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KDACORE_VALIDATE", "values")
    config.refresh()
    yield
    monkeypatch.undo()
    config.refresh()


def _call(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    call = {n: rng.standard_normal((B, T, H, K), dtype=np.float32) for n in ("q", "k", "v")}
    call["k"] /= np.linalg.norm(call["k"], axis=-1, keepdims=True)
    call["g"] = -rng.random((B, T, H, K), dtype=np.float32)
    call["beta"] = rng.random((B, T, H), dtype=np.float32)
    return {**call, **changes}


def _with(x: np.ndarray, value: float) -> np.ndarray:
    x = x.copy()
    x[0, 1, 1] = value
    return x


def _pool(**changes: Any) -> dict[str, Any]:
    call = _call(
        initial_state=np.zeros((4, H, K, V), np.float32), state_indices=np.array([2]), inplace_state=True
    )
    return {**call, **changes}


def _speculative(**changes: Any) -> dict[str, Any]:
    return _pool(
        **{
            "initial_state": np.zeros((T, H, K, V), np.float32),
            "state_indices": np.arange(T)[None],
            "num_accepted_tokens": np.array([T]),
            **changes,
        }
    )


chunk, recurrent = kdacore.chunk_kda, kdacore.fused_recurrent_kda
BAD_VALUES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "nan in q": (chunk, _call(q=_with(_call()["q"], np.nan)), "q"),
    "inf in k": (chunk, _call(k=_with(_call()["k"], np.inf)), "k"),
    "nan in v": (recurrent, _call(v=_with(_call()["v"], np.nan)), "v"),
    "inf in g": (chunk, _call(g=_with(_call()["g"], np.inf)), "g"),
    "nan in beta": (chunk, _call(beta=_with(_call()["beta"], np.nan)), "beta"),
    "nan in the state": (
        chunk,
        _call(initial_state=np.full((1, H, K, V), np.nan, np.float32)),
        "initial_state",
    ),
    "growth instead of decay": (chunk, _call(g=_with(_call()["g"], 0.5)), "g"),
    "safe_gate broken": (chunk, _call(g=_with(_call()["g"], -5.5), safe_gate=True, lower_bound=-5.0), "g"),
    "first offset 1": (chunk, _call(cu_seqlens=np.array([1, 3, T])), "cu_seqlens"),
    "last offset beyond": (chunk, _call(cu_seqlens=np.array([0, 3, T + 1])), "cu_seqlens"),
    "offsets unsorted": (chunk, _call(cu_seqlens=np.array([0, 4, 3, T])), "cu_seqlens"),
    "host copy differs": (
        chunk,
        _call(cu_seqlens=np.array([0, 3, T]), cu_seqlens_cpu=np.array([0, 2, T])),
        "cu_seqlens_cpu",
    ),
    "index beyond the pool": (recurrent, _pool(state_indices=np.array([4])), "state_indices"),
    "a row named twice": (
        recurrent,
        {
            **{n: np.concatenate([x, x]) for n, x in _call().items()},
            "initial_state": np.zeros((4, H, K, V), np.float32),
            "state_indices": np.array([2, 2]),
            "inplace_state": True,
        },
        "state_indices",
    ),
    "a row named for two tokens": (
        recurrent,
        _speculative(state_indices=np.array([[0, 1, 2, 3, 4, 1]])),
        "state_indices",
    ),
    "accepted below zero": (
        recurrent,
        _speculative(num_accepted_tokens=np.array([-1])),
        "num_accepted_tokens",
    ),
    "nan in a row that is read": (
        recurrent,
        _pool(initial_state=np.full((4, H, K, V), np.nan, np.float32)),
        "initial_state",
    ),
    "too many candidates in one sequence": (
        recurrent,
        {
            **{n: np.repeat(x, 3, axis=1) for n, x in _call().items()},
            "initial_state": np.zeros((2, H, K, V), np.float32),
            "cu_seqlens": np.array([0, 17, 3 * T]),
            "read_only_state": True,
        },
        "cu_seqlens",
    ),
    "packed tokens beyond the columns": (
        recurrent,
        _speculative(
            state_indices=np.array([[0, 1], [2, 3]]),
            cu_seqlens=np.array([0, 1, T]),
            num_accepted_tokens=np.array([1, 2]),
        ),
        "state_indices",
    ),
    "accepted beyond": (
        recurrent,
        _speculative(num_accepted_tokens=np.array([T + 1])),
        "num_accepted_tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str, validate_values: None) -> None:
    function, arguments, argument = BAD_VALUES[name]
    before = {n: x.tobytes() for n, x in arguments.items() if isinstance(x, np.ndarray)}
    with kdacore.record_selections() as ran, pytest.raises(kdacore.ContractError) as caught:
        function(**arguments)
    assert caught.value.argument == argument
    assert caught.value.got and caught.value.want
    assert ran == []
    assert before == {n: x.tobytes() for n, x in arguments.items() if isinstance(x, np.ndarray)}


def test_rows_of_a_pool_that_are_not_read_may_hold_anything(validate_values: None) -> None:
    """As one does that was never written."""
    pool = np.full((4, H, K, V), np.nan, np.float32)
    pool[2] = 0
    recurrent(**_pool(initial_state=pool))
    assert np.isfinite(pool[2]).all() and np.isnan(pool[[0, 1, 3]]).all()
    pool = np.full((T, H, K, V), np.nan, np.float32)
    recurrent(**_speculative(initial_state=pool, num_accepted_tokens=np.array([0])))
    assert np.isfinite(pool).all()


def test_columns_past_a_sequence_s_end_may_name_a_row_again(validate_values: None) -> None:
    call = {n: x[:, :1] for n, x in _call().items()}
    pool = np.zeros((4, H, K, V), np.float32)
    more = {
        "state_indices": np.array([[2, 2, 2]]),
        "num_accepted_tokens": np.array([1]),
        "inplace_state": True,
    }
    recurrent(**call, initial_state=pool, **more)
    assert pool[2].any()


def test_two_sequences_without_a_slot_are_fine(validate_values: None) -> None:
    call = {n: np.concatenate([x, x]) for n, x in _call().items()}
    call["initial_state"] = np.zeros((4, H, K, V), np.float32)
    recurrent(**call, state_indices=np.array([-1, -1]), inplace_state=True)
    assert not call["initial_state"].any()


def test_good_values_pass(validate_values: None) -> None:
    chunk(**_call(cu_seqlens=np.array([0, 0, 3, T]), cu_seqlens_cpu=np.array([0, 0, 3, T])))
    bound = _call()
    bound["g"] = np.full_like(bound["g"], -5.0)
    chunk(**bound, safe_gate=True, lower_bound=-5.0)
    recurrent(**_pool())


@pytest.mark.parametrize("bound", [None, -5.0], ids=["unbounded", "bounded"])
def test_gate_inputs_may_be_infinite(bound: float | None, validate_values: None) -> None:
    """A gate has a limit where they are; a NaN has none."""
    raw = _call(A_log=np.array([-np.inf, np.inf], np.float32), use_gate_in_kernel=True, lower_bound=bound)
    raw["g"][0, :3, :, 0] = np.inf
    raw["g"][0, 3:, :, 0] = -np.inf
    raw["dt_bias"] = np.full((H, K), -np.inf, np.float32)
    o, _ = chunk(**raw)
    assert np.isfinite(o).all()
    for name in ("g", "A_log", "dt_bias"):
        with pytest.raises(ContractError) as caught:
            chunk(**{**raw, name: np.full_like(raw[name], np.nan)})
        assert caught.value.argument == name


def test_log_decays_may_be_minus_infinity(validate_values: None) -> None:
    g = np.full((B, T, H, K), -np.inf, np.float32)
    assert np.isfinite(chunk(**_call(g=g))[0]).all()
    with pytest.raises(ContractError) as caught:
        chunk(**_call(g=-g))
    assert caught.value.argument == "g"


def test_meta_tensors_have_no_values_to_read(validate_values: None) -> None:
    torch = pytest.importorskip("torch")
    call = {n: torch.empty(x.shape, device="meta") for n, x in _call().items()}
    o, state = chunk(**call, output_final_state=True)
    assert (o.device.type, tuple(state.shape)) == ("meta", (B, H, K, V))


READ_BY_THE_REFERENCE = (
    "index beyond the pool",
    "a row named twice",
    "a row named for two tokens",
    "too many candidates in one sequence",
    "accepted beyond",
    "accepted below zero",
    "packed tokens beyond the columns",
)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", READ_BY_THE_REFERENCE)
def test_the_reference_reads_indices_and_says_the_same_by_default(name: str, kind: str) -> None:
    from kdacore.calls.values import to_kind

    function, arguments, argument = BAD_VALUES[name]
    given = {
        n: to_kind(x, kind, x.dtype.name) if isinstance(x, np.ndarray) else x for n, x in arguments.items()
    }
    if kind == "jax" and "inplace_state" in given:
        given["output_final_state"] = True
    before = np.asarray(given["initial_state"]).tobytes()
    with pytest.raises(kdacore.ContractError) as caught:
        function(**given, backend="reference")
    assert caught.value.argument == argument
    assert np.asarray(given["initial_state"]).tobytes() == before


def test_values_are_not_read_by_default() -> None:
    o, _ = chunk(**_call(v=_with(_call()["v"], np.nan)))
    assert np.isnan(o).any()


@pytest.mark.parametrize("op", [chunk, recurrent, stages.kda_chunk_gate])
@pytest.mark.parametrize("wrong", [[1, 3, T], [0, 3, T + 1], [0, T + 4, T]])
def test_offsets_that_are_read_anyway_are_checked(op: Callable[..., Any], wrong: list[int]) -> None:
    """The reference reads them on the host: with ``KDACORE_VALIDATE`` or without."""
    call = {"g": _call()["g"]} if op is stages.kda_chunk_gate else _call()
    with pytest.raises(ContractError, match="cu_seqlens"):
        op(**call, cu_seqlens=np.array(wrong), backend="reference")
