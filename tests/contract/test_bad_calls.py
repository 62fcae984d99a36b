"""Every way to call kdacore wrongly: a ContractError that names the argument, and nothing run or written."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import stages

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 12


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def whole_call(**changes: Any) -> dict[str, Any]:
    """A valid call of a whole op, with changes."""
    call = {
        "q": _numbers(B, T, H, K),
        "k": _numbers(B, T, H, K),
        "v": _numbers(B, T, HV, V),
        "g": -np.abs(_numbers(B, T, HV, K)),
        "beta": np.full((B, T, HV), 0.5, np.float32),
    }
    return {**call, **changes}


def packed_call(**changes: Any) -> dict[str, Any]:
    call = whole_call()
    call = {name: x[:1] for name, x in call.items()}
    return {**call, "cu_seqlens": np.array([0, 2, T]), **changes}


def pool_call(**changes: Any) -> dict[str, Any]:
    call = whole_call(
        initial_state=_numbers(5, HV, K, V), state_indices=np.array([3, -1]), inplace_state=True
    )
    return {**call, **changes}


def speculative_call(**changes: Any) -> dict[str, Any]:
    indices = np.arange(B * T).reshape(B, T)
    call = pool_call(initial_state=_numbers(B * T, HV, K, V), state_indices=indices)
    return {**call, "num_accepted_tokens": np.array([1, 2]), **changes}


def gate_call(**changes: Any) -> dict[str, Any]:
    return {"g": _numbers(B, T, HV, K), "A_log": _numbers(HV), **changes}


def raw(**changes: Any) -> dict[str, Any]:
    """A valid call with the gate computed in the kernel."""
    return whole_call(**{"use_gate_in_kernel": True, "A_log": _numbers(HV), **changes})


def stage_intra(**changes: Any) -> dict[str, Any]:
    call = {n: x for n, x in whole_call().items() if n in ("q", "k", "beta")}
    return {**call, "gc": -np.abs(_numbers(B, T, HV, K)), **changes}


def stage_recompute(**changes: Any) -> dict[str, Any]:
    call = {n: x for n, x in whole_call().items() if n in ("k", "v", "beta")}
    return {**call, "gc": _numbers(B, T, HV, K), "Akk": _numbers(B, T, HV, 64), **changes}


def stage_state(**changes: Any) -> dict[str, Any]:
    call = {"kg": _numbers(B, T, HV, K), "w": _numbers(B, T, HV, K), "u": _numbers(B, T, HV, V)}
    return {**call, "gc": _numbers(B, T, HV, K), **changes}


def stage_output(**changes: Any) -> dict[str, Any]:
    call = {"q": _numbers(B, T, H, K), "v_new": _numbers(B, T, HV, V), "gc": _numbers(B, T, HV, K)}
    return {**call, "Aqk": _numbers(B, T, HV, 64), "h": _numbers(B, 1, HV, K, V), **changes}


chunk, recurrent, gate = kdacore.chunk_kda, kdacore.fused_recurrent_kda, kdacore.kda_gate
gdn, gdn_recurrent = kdacore.chunk_gated_delta_rule, kdacore.fused_recurrent_gated_delta_rule

Bad = tuple[Callable[..., Any], dict[str, Any], str]

BAD: dict[str, Bad] = {
    # --- not arrays, missing arrays, mixed kinds
    "q is None": (chunk, whole_call(q=None), "q"),
    "q is a list": (chunk, whole_call(q=[1.0]), "q"),
    "v is a float": (chunk, whole_call(v=1.0), "v"),
    "beta is None": (chunk, whole_call(beta=None), "beta"),
    "g is None": (recurrent, whole_call(g=None), "g"),
    "initial_state is a list": (chunk, whole_call(initial_state=[0.0]), "initial_state"),
    "cu_seqlens is a list": (chunk, packed_call(cu_seqlens=[0, 2, T]), "cu_seqlens"),
    "gate g is None": (gate, gate_call(g=None), "g"),
    # --- rank
    "q rank 3": (chunk, whole_call(q=_numbers(B, T, K)), "q"),
    "k rank 5": (chunk, whole_call(k=_numbers(B, T, H, K, 1)), "k"),
    "v rank 3": (chunk, whole_call(v=_numbers(B, T, V)), "v"),
    "g rank 3": (chunk, whole_call(g=_numbers(B, T, HV)), "g"),
    "g rank 4 for one gate a head": (gdn, whole_call(), "g"),
    "beta rank 4": (chunk, whole_call(beta=_numbers(B, T, HV, 1)), "beta"),
    "A_log rank 4": (chunk, raw(A_log=_numbers(1, 1, HV, 1)), "A_log"),
    "cu_seqlens rank 2": (chunk, packed_call(cu_seqlens=np.array([[0, T]])), "cu_seqlens"),
    "state rank 3": (chunk, whole_call(initial_state=_numbers(HV, K, V)), "initial_state"),
    "gate g rank 2": (gate, gate_call(g=_numbers(T, K)), "g"),
    "state_indices rank 3": (recurrent, pool_call(state_indices=np.zeros((B, 1, 1), int)), "state_indices"),
    # --- shape
    "q empty": (chunk, whole_call(q=_numbers(B, 0, H, K)), "q"),
    "k other K": (chunk, whole_call(k=_numbers(B, T, H, K + 1)), "k"),
    "k other H": (chunk, whole_call(k=_numbers(B, T, HV, K)), "k"),
    "v other T": (chunk, whole_call(v=_numbers(B, T + 1, HV, V)), "v"),
    "v other B": (chunk, whole_call(v=_numbers(1, T, HV, V)), "v"),
    "HV not a multiple of H": (chunk, whole_call(v=_numbers(B, T, 3, V)), "v"),
    "HV below H": (chunk, whole_call(v=_numbers(B, T, 1, V)), "v"),
    "g in query heads": (chunk, whole_call(g=_numbers(B, T, H, K)), "g"),
    "g other K": (chunk, whole_call(g=_numbers(B, T, HV, K + 1)), "g"),
    "beta in query heads": (chunk, whole_call(beta=_numbers(B, T, H)), "beta"),
    "A_log in query heads": (chunk, raw(A_log=_numbers(H)), "A_log"),
    "dt_bias one value a head": (chunk, raw(dt_bias=_numbers(HV)), "dt_bias"),
    "dt_bias transposed": (chunk, raw(dt_bias=_numbers(K, HV)), "dt_bias"),
    "state in query heads": (chunk, whole_call(initial_state=_numbers(B, H, K, V)), "initial_state"),
    "state V first": (chunk, whole_call(initial_state=_numbers(B, HV, V, K)), "initial_state"),
    "state K first with state_v_first": (
        chunk,
        whole_call(initial_state=_numbers(B, HV, K, V), state_v_first=True),
        "initial_state",
    ),
    "a state too many": (chunk, whole_call(initial_state=_numbers(B + 1, HV, K, V)), "initial_state"),
    "a state for each batch row of a pack": (
        chunk,
        packed_call(initial_state=_numbers(1, HV, K, V)),
        "initial_state",
    ),
    "cu_seqlens one offset": (chunk, packed_call(cu_seqlens=np.array([0])), "cu_seqlens"),
    "cu_seqlens_cpu other length": (chunk, packed_call(cu_seqlens_cpu=np.array([0, T])), "cu_seqlens_cpu"),
    "pack with B=2": (chunk, whole_call(cu_seqlens=np.array([0, T])), "cu_seqlens"),
    "out other shape": (recurrent, whole_call(out=_numbers(B, T, HV, K)), "out"),
    "state_indices other N": (recurrent, pool_call(state_indices=np.array([1])), "state_indices"),
    "too few index columns": (
        recurrent,
        speculative_call(state_indices=np.zeros((B, T - 1), int)),
        "state_indices",
    ),
    "num_accepted other N": (
        recurrent,
        speculative_call(num_accepted_tokens=np.array([1])),
        "num_accepted_tokens",
    ),
    "gate A_log other heads": (gate, gate_call(A_log=_numbers(HV + 1)), "A_log"),
    "gate dt_bias other heads": (gate, gate_call(dt_bias=_numbers(HV + 1, K)), "dt_bias"),
    # --- dtype
    "q integers": (chunk, whole_call(q=np.ones((B, T, H, K), np.int32)), "q"),
    "q complex": (chunk, whole_call(q=np.ones((B, T, H, K), np.complex64)), "q"),
    "q big-endian": (chunk, whole_call(q=np.ones((B, T, H, K), ">f4")), "q"),
    "k other dtype": (chunk, whole_call(k=_numbers(B, T, H, K).astype(np.float16)), "k"),
    "v other dtype": (chunk, whole_call(v=_numbers(B, T, HV, V).astype(np.float64)), "v"),
    "g booleans": (chunk, whole_call(g=np.zeros((B, T, HV, K), bool)), "g"),
    "beta float64 beside float32": (chunk, whole_call(beta=np.ones((B, T, HV))), "beta"),
    "A_log float16": (chunk, raw(A_log=np.zeros(HV, np.float16)), "A_log"),
    "dt_bias integers": (chunk, raw(dt_bias=np.zeros((HV, K), np.int64)), "dt_bias"),
    "state int32": (chunk, whole_call(initial_state=np.zeros((B, HV, K, V), np.int32)), "initial_state"),
    "state float64 beside float32": (
        chunk,
        whole_call(initial_state=np.zeros((B, HV, K, V))),
        "initial_state",
    ),
    "cu_seqlens floats": (chunk, packed_call(cu_seqlens=np.array([0.0, T])), "cu_seqlens"),
    "cu_seqlens int16": (chunk, packed_call(cu_seqlens=np.array([0, T], np.int16)), "cu_seqlens"),
    "cu_seqlens_cpu floats": (chunk, packed_call(cu_seqlens_cpu=np.array([0.0, 2, T])), "cu_seqlens_cpu"),
    "state_indices floats": (recurrent, pool_call(state_indices=np.array([1.0, 2.0])), "state_indices"),
    "num_accepted floats": (
        recurrent,
        speculative_call(num_accepted_tokens=np.array([1.0, 2.0])),
        "num_accepted_tokens",
    ),
    "out other dtype": (recurrent, whole_call(out=np.zeros((B, T, HV, V))), "out"),
    "gate g integers": (gate, gate_call(g=np.zeros((B, T, HV, K), int)), "g"),
    # --- flags are bool, numbers are finite and real
    "output_final_state=1": (chunk, whole_call(output_final_state=1), "output_final_state"),
    "use_qk_l2norm_in_kernel=None": (
        chunk,
        whole_call(use_qk_l2norm_in_kernel=None),
        "use_qk_l2norm_in_kernel",
    ),
    "use_gate_in_kernel='yes'": (chunk, whole_call(use_gate_in_kernel="yes"), "use_gate_in_kernel"),
    "use_beta_sigmoid_in_kernel=0": (
        chunk,
        whole_call(use_beta_sigmoid_in_kernel=0),
        "use_beta_sigmoid_in_kernel",
    ),
    "safe_gate numpy bool": (chunk, whole_call(safe_gate=np.True_, lower_bound=-5.0), "safe_gate"),
    "state_v_first=1.0": (chunk, whole_call(state_v_first=1.0), "state_v_first"),
    "disable_recompute=[]": (chunk, whole_call(disable_recompute=[]), "disable_recompute"),
    "inplace_state=1": (recurrent, pool_call(inplace_state=1), "inplace_state"),
    "scale=True": (chunk, whole_call(scale=True), "scale"),
    "scale text": (chunk, whole_call(scale="0.1"), "scale"),
    "scale nan": (chunk, whole_call(scale=math.nan), "scale"),
    "scale inf": (recurrent, whole_call(scale=math.inf), "scale"),
    "scale beyond float32": (chunk, whole_call(scale=-1e39), "scale"),
    "scale near the end of float32": (recurrent, whole_call(scale=1e38), "scale"),
    "scale that is not normal": (chunk, whole_call(scale=1e-40), "scale"),
    "stage intra scale": (stages.kda_chunk_intra, stage_intra(scale=1e39), "scale"),
    "stage output scale": (stages.kda_chunk_output, stage_output(scale=1e-39), "scale"),
    "lower_bound beyond float32": (gate, gate_call(lower_bound=-1e39), "lower_bound"),
    "lower_bound that is not normal": (chunk, raw(lower_bound=-1e-40), "lower_bound"),
    "scale complex": (chunk, whole_call(scale=1j), "scale"),
    "scale an array": (chunk, whole_call(scale=np.ones(3)), "scale"),
    "lower_bound nan": (chunk, raw(lower_bound=math.nan), "lower_bound"),
    "lower_bound 0": (chunk, raw(lower_bound=0.0), "lower_bound"),
    "lower_bound positive": (gate, gate_call(lower_bound=5.0), "lower_bound"),
    "lower_bound -6 with safe_gate": (chunk, whole_call(safe_gate=True, lower_bound=-6.0), "lower_bound"),
    "checkpoint_every 0": (chunk, whole_call(checkpoint_every=0), "checkpoint_every"),
    "checkpoint_every 100": (chunk, whole_call(checkpoint_every=100), "checkpoint_every"),
    "checkpoint_every 2**31": (chunk, whole_call(checkpoint_every=2**31), "checkpoint_every"),
    "checkpoint_every -64": (chunk, whole_call(checkpoint_every=-64), "checkpoint_every"),
    "checkpoint_every True": (chunk, whole_call(checkpoint_every=True), "checkpoint_every"),
    "checkpoint_every 64.0": (chunk, whole_call(checkpoint_every=64.0), "checkpoint_every"),
    # --- combinations with no effect or no meaning
    "A_log without the gate": (chunk, whole_call(A_log=_numbers(HV)), "A_log"),
    "dt_bias without the gate": (chunk, whole_call(dt_bias=_numbers(HV, K)), "dt_bias"),
    "unbounded gate without A_log": (chunk, whole_call(use_gate_in_kernel=True), "A_log"),
    "lower_bound alone": (chunk, whole_call(lower_bound=-5.0), "lower_bound"),
    "safe_gate without lower_bound": (chunk, whole_call(safe_gate=True), "safe_gate"),
    "neg_eigval without sigmoid": (chunk, whole_call(allow_neg_eigval=True), "allow_neg_eigval"),
    "cu_seqlens_cpu alone": (chunk, whole_call(cu_seqlens_cpu=np.array([0, T])), "cu_seqlens_cpu"),
    "cp": (chunk, whole_call(cp=object()), "cp"),
    "gate with neither A_log nor bound": (gate, gate_call(A_log=None), "A_log"),
    "indices without a pool": (recurrent, whole_call(state_indices=np.array([0, 1])), "state_indices"),
    "in place without a state": (recurrent, whole_call(inplace_state=True), "inplace_state"),
    "read only without a state": (recurrent, whole_call(read_only_state=True), "read_only_state"),
    "read only and in place": (recurrent, pool_call(read_only_state=True), "read_only_state"),
    "read only with a final state": (
        recurrent,
        pool_call(inplace_state=False, read_only_state=True, output_final_state=True),
        "read_only_state",
    ),
    "17 candidates": (
        recurrent,
        {
            "q": _numbers(1, 17, H, K),
            "k": _numbers(1, 17, H, K),
            "v": _numbers(1, 17, HV, V),
            "g": -np.abs(_numbers(1, 17, HV, K)),
            "beta": _numbers(1, 17, HV),
            "initial_state": _numbers(1, HV, K, V),
            "read_only_state": True,
        },
        "read_only_state",
    ),
    "2-D indices without num_accepted": (
        recurrent,
        speculative_call(num_accepted_tokens=None),
        "num_accepted_tokens",
    ),
    "num_accepted with 1-D indices": (
        recurrent,
        pool_call(num_accepted_tokens=np.array([1, 1])),
        "num_accepted_tokens",
    ),
    "num_accepted without indices": (
        recurrent,
        whole_call(num_accepted_tokens=np.array([1, 1])),
        "num_accepted_tokens",
    ),
    # --- backends
    "unknown backend": (chunk, whole_call(backend="cudnn"), "backend"),
    "empty backend": (chunk, whole_call(backend=""), "backend"),
    "backend not a name": (recurrent, whole_call(backend=3), "backend"),
    "gate unknown backend": (gate, gate_call(backend="nope"), "backend"),
    # --- one gate a head
    "gdn dt_bias for each channel": (
        gdn,
        whole_call(
            g=_numbers(B, T, HV), use_gate_in_kernel=True, A_log=_numbers(HV), dt_bias=_numbers(HV, K)
        ),
        "dt_bias",
    ),
    "gdn recurrent g for each channel": (gdn_recurrent, whole_call(), "g"),
    # --- stages
    "stage chunk_size 48": (
        stages.kda_chunk_gate,
        {"g": _numbers(B, T, HV, K), "chunk_size": 48},
        "chunk_size",
    ),
    "stage chunk_size text": (
        stages.kda_chunk_gate,
        {"g": _numbers(B, T, HV, K), "chunk_size": "64"},
        "chunk_size",
    ),
    "stage bias alone": (
        stages.kda_chunk_gate,
        {"g": _numbers(B, T, HV, K), "dt_bias": _numbers(HV, K)},
        "dt_bias",
    ),
    "stage intra gc heads": (stages.kda_chunk_intra, stage_intra(gc=_numbers(B, T, 3, K)), "gc"),
    "stage intra gc float16": (
        stages.kda_chunk_intra,
        stage_intra(gc=np.zeros((B, T, HV, K), np.float16)),
        "gc",
    ),
    "stage intra k dtype": (
        stages.kda_chunk_intra,
        stage_intra(k=np.zeros((B, T, H, K), np.float16)),
        "k",
    ),
    "stage recompute Akk width": (stages.kda_recompute_w_u, stage_recompute(chunk_size=32), "Akk"),
    "stage recompute q shape": (stages.kda_recompute_w_u, stage_recompute(q=_numbers(B, T, H, V)), "q"),
    "stage state w shape": (stages.delta_rule_chunk_state, stage_state(w=_numbers(B, T, HV, V)), "w"),
    "stage state initial_state": (
        stages.delta_rule_chunk_state,
        stage_state(initial_state=_numbers(B, HV, V, K)),
        "initial_state",
    ),
    "stage output h chunks": (stages.kda_chunk_output, stage_output(h=_numbers(B, 2, HV, K, V)), "h"),
    "stage output Aqk width": (stages.kda_chunk_output, stage_output(Aqk=_numbers(B, T, HV, 32)), "Aqk"),
}


def test_a_number_that_no_float_holds() -> None:
    x = np.zeros((1, 2, 1, 4), np.float32)
    for given in ({"scale": 10**400}, {"safe_gate": True, "lower_bound": -(10**400)}):
        with pytest.raises(kdacore.ContractError, match="no float holds"):
            kdacore.chunk_kda(x, x, x, x, x[..., 0], **given)


def test_the_table_is_large_enough() -> None:
    assert len(BAD) >= 80


@pytest.mark.parametrize("name", BAD)
def test_bad_call(name: str) -> None:
    function, arguments, argument = BAD[name]
    arrays = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray)}
    before = {n: x.copy() for n, x in arrays.items()}
    with kdacore.record_selections() as ran, pytest.raises(kdacore.ContractError) as caught:
        function(**arguments)
    error = caught.value
    assert error.argument == argument
    assert f"'{argument}'" in str(error)
    assert error.got and error.want
    assert error.op == function.__name__
    assert ran == []
    for n, x in arrays.items():
        assert x.tobytes() == before[n].tobytes(), f"{n} was written"


@pytest.mark.parametrize("build", [whole_call, packed_call, raw], ids=lambda f: f.__name__)
def test_the_calls_the_table_breaks_are_valid(build: Callable[..., dict[str, Any]]) -> None:
    chunk(**build())


@pytest.mark.parametrize(
    "build", [whole_call, packed_call, pool_call, speculative_call], ids=lambda f: f.__name__
)
def test_the_decode_calls_the_table_breaks_are_valid(build: Callable[..., dict[str, Any]]) -> None:
    recurrent(**build())


@pytest.mark.parametrize("function", [chunk, gdn, recurrent, gdn_recurrent, gate, stages.kda_chunk_gate])
def test_unknown_keyword_is_a_type_error(function: Callable[..., Any]) -> None:
    positional = whole_call()["g"] if next(iter(inspect.signature(function).parameters)) == "g" else None
    arrays = whole_call() if positional is None else {"g": positional}
    with pytest.raises(TypeError, match="use_gate_in_kernels"):
        function(**arrays, use_gate_in_kernels=True)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        chunk(*whole_call().values(), None)


def test_a_cached_call_does_not_hide_a_bad_flag() -> None:
    """True == 1 as dictionary keys, so a cache keyed on values alone would let 1 through."""
    chunk(**whole_call(output_final_state=True))
    with pytest.raises(kdacore.ContractError, match="output_final_state"):
        chunk(**whole_call(output_final_state=1))
