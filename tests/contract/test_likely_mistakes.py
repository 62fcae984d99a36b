"""Calls as newcomers make them: the error, or the warning under ``KDACORE_VALIDATE=values``, says how to mend it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config
from kdacore.errors import ContractError, InputWarning

B, T, H, HV, K, V = 1, 50, 2, 4, 8, 16
EXCHANGED = "x.swapaxes(1, 2)"


def _call(T: int = T, H: int = H, HV: int = HV, K: int = K, V: int = V) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    q, k = (rng.standard_normal((B, T, H, K), dtype=np.float32) for _ in range(2))
    return {
        "q": q,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((B, T, HV, V), dtype=np.float32),
        "g": -rng.random((B, T, HV, K), dtype=np.float32),
        "beta": rng.random((B, T, HV), dtype=np.float32),
    }


def _head_first(names: str, **sizes: int) -> dict[str, Any]:
    return {n: x.swapaxes(1, 2) if n in names.split() else x for n, x in _call(**sizes).items()}


def _said(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ContractError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        ("q k v g beta", f"all fit as [B, T, H, ...] with {EXCHANGED} of q, k, v, g and beta"),
        ("q k", f"with {EXCHANGED} of q and k"),
        ("g beta", f"with {EXCHANGED} of g and beta"),
        ("v", "v.swapaxes(1, 2) fits"),
        ("beta", "beta.swapaxes(1, 2) fits"),
    ],
)
@pytest.mark.parametrize("op", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_a_head_first_reading_that_fits_is_named(op: Any, names: str, hint: str) -> None:
    assert _said(op, **_head_first(names)).endswith(hint)


def test_of_two_readings_the_one_with_fewer_heads_than_tokens_is_named() -> None:
    said = _said(kdacore.chunk_kda, **_head_first("q k v g", T=64, H=2, HV=4))
    assert said.endswith(f"with {EXCHANGED} of q, k, v and g")
    one = _call(T=1, H=2, HV=2)
    said = _said(kdacore.fused_recurrent_kda, **{**one, "beta": one["beta"].swapaxes(1, 2)})
    assert said.endswith("beta.swapaxes(1, 2) fits")


def test_A_log_tells_that_the_arrays_are_head_first() -> None:
    call = _head_first("q k v g beta", T=64, H=2, HV=2)
    said = _said(kdacore.chunk_kda, **call, A_log=np.zeros(2, np.float32), use_gate_in_kernel=True)
    assert said.endswith(f"it fits with {EXCHANGED} of q, k, v, g and beta, which look head-first")


def test_what_the_message_says_to_write_runs() -> None:
    call = _head_first("q k v g beta")
    mended = {name: x.swapaxes(1, 2) for name, x in call.items()}
    o, _ = kdacore.chunk_kda(**mended)
    assert np.array_equal(o, kdacore.chunk_kda(**_call())[0])


def test_a_missing_batch_is_named_and_the_mend_runs() -> None:
    row = {name: x[0] for name, x in _call().items()}
    assert _said(kdacore.chunk_kda, **row).endswith("pass x[None] of q, k, v, g and beta")
    o, _ = kdacore.chunk_kda(**{name: x[None] for name, x in row.items()})
    assert np.array_equal(o, kdacore.chunk_kda(**_call())[0])
    state = np.zeros((HV, K, V), np.float32)
    assert _said(kdacore.chunk_kda, **_call(), initial_state=state).endswith("; initial_state[None] fits")


def test_heads_that_are_not_split_are_named() -> None:
    call = _call(HV=H)
    flat = {name: x.reshape(B, T, -1) if x.ndim == 4 else x for name, x in call.items()}
    assert _said(kdacore.chunk_kda, **flat).endswith(f"q.reshape({B}, {T}, heads, -1)")


def test_an_axis_of_one_at_the_end_is_named() -> None:
    call = _call()
    said = _said(kdacore.chunk_kda, **{**call, "beta": call["beta"][..., None]})
    assert said.endswith("; beta[..., 0] fits")


def test_a_shape_that_fits_in_no_reading_has_no_hint() -> None:
    said = _said(kdacore.chunk_kda, **{**_call(), "beta": np.ones((B, T + 1, HV), np.float32)})
    assert said.endswith(f"wanted shape [B, T, HV] = [{B}, {T}, {HV}]")


def test_a_gate_of_the_other_rule_names_its_ops() -> None:
    call = _call()
    assert "chunk_gated_delta_rule" in _said(kdacore.chunk_kda, **{**call, "g": call["g"][..., 0]})
    assert "KDA: chunk_kda" in _said(kdacore.chunk_gated_delta_rule, **call)


def test_arguments_as_flash_linear_attention_has_them_name_the_layer_for_it() -> None:
    A_log = np.zeros((1, 1, HV, 1), np.float32)
    said = _said(kdacore.chunk_kda, **_call(), A_log=A_log, use_gate_in_kernel=True)
    assert "A_log.reshape(-1) fits" in said and "kdacore.compat.fla" in said
    assert "kdacore.compat.fla" in _said(kdacore.chunk_kda, **_call(), backend="fla")
    for ask in (kdacore.chunk_kda, lambda *x: kdacore.explain("chunk_kda", *x)):
        with pytest.raises(
            TypeError, match=r"5 positional arguments, q, k, v, g, beta; 7 were .*compat\.fla"
        ):
            ask(*_call().values(), 0.5, None)


def test_a_state_in_the_other_layout() -> None:
    said = _said(kdacore.chunk_kda, **_call(), initial_state=np.zeros((B, HV, V, K), np.float32))
    assert said.endswith("it fits with the other value of state_v_first")


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"), [("scal", "scale"), ("a_log", "A_log"), ("use_qk_l2norm", "use_qk_l2norm_in_kernel")]
)
def test_unknown_keywords_name_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        kdacore.chunk_kda(**_call(), **{given: 1})


def test_unknown_backends_and_ops_name_the_nearest() -> None:
    assert _said(kdacore.chunk_kda, **_call(), backend="refrence").endswith("did you mean 'reference'?")
    assert _said(kdacore.explain, "chunk_kad").endswith("did you mean 'chunk_kda'?")
    assert "did you mean" not in _said(kdacore.chunk_kda, **_call(), backend="zzzz")


# --- options that are arrays ----------------------------------------------------------------------------------------


def test_arrays_in_place_of_options_say_what_to_pass() -> None:
    jax = pytest.importorskip("jax")
    call = {name: jax.numpy.asarray(x) for name, x in _call().items()}
    bound = {"use_gate_in_kernel": True, "lower_bound": jax.numpy.float32(-5)}
    assert _said(kdacore.chunk_kda, **call, **bound).endswith("pass float(x)")
    flag = {"use_qk_l2norm_in_kernel": np.True_}
    assert _said(kdacore.chunk_kda, **_call(), **flag).endswith("True or False; pass bool(x)")
    assert _said(kdacore.chunk_kda, **_call(), scale=np.ones(2)).endswith("wanted a finite real number")

    traced = jax.jit(lambda flag: kdacore.chunk_kda(**call, use_qk_l2norm_in_kernel=flag))
    said = _said(traced, True)
    assert "jax.jit(..., static_argnames='use_qk_l2norm_in_kernel')" in said
    static = jax.jit(
        lambda use_qk_l2norm_in_kernel: kdacore.chunk_kda(
            **call, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
        ),
        static_argnames="use_qk_l2norm_in_kernel",
    )
    assert static(use_qk_l2norm_in_kernel=True)[0].shape == (B, T, HV, V)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.fixture
def validate_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KDACORE_VALIDATE", "values")
    config.refresh()
    yield
    monkeypatch.undo()
    config.refresh()


@pytest.mark.usefixtures("validate_values")
def test_head_first_arrays_that_fit_are_warned_of_at_the_callers_line() -> None:
    call = _head_first("q k v g beta", H=3, HV=3, T=20)
    with pytest.warns(
        InputWarning, match=r"T=3 tokens of H=20 heads look head-first.*x\.swapaxes\(1, 2\)"
    ) as w:
        kdacore.chunk_kda(**call)
    assert w[0].filename == __file__


@pytest.mark.usefixtures("validate_values")
@pytest.mark.parametrize("op", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_keys_that_nobody_normalised_are_warned_of(op: Any) -> None:
    call = _call()
    call["k"] = call["k"] * np.float32(3)
    with pytest.warns(InputWarning, match=r"norms up to 3:.*use_qk_l2norm_in_kernel=True"):
        op(**call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(**call, use_qk_l2norm_in_kernel=True)
        call["k"][:, 20:] = 1e4  # padding, which nothing reads
        op(**{**call, "k": np.where(call["k"] > 1e3, call["k"], call["k"] / 3)}, cu_seqlens=np.array([0, 20]))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_of_python_numbers_says_how_to_make_an_array(kind: Any) -> None:
    said = _said(kdacore.chunk_kda, **_call(), cu_seqlens=kind([0, 5]))
    assert "cu_seqlens" in said and "np.array(x)" in said


@pytest.mark.usefixtures("validate_values")
def test_positive_log_decays_name_the_option_for_raw_gates() -> None:
    call = _call()
    assert "use_gate_in_kernel=True" in _said(kdacore.chunk_kda, **{**call, "g": -call["g"]})


def test_values_are_not_looked_at_otherwise() -> None:
    call = _call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kdacore.chunk_kda(**{**call, "k": call["k"] * np.float32(3)})
