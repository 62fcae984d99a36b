"""One call takes one kind of array on one device, and gives that kind back on that device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import kdacore
from kdacore.calls.values import Shape, normalise, tensors, to_kind

SHAPE = Shape(B=2, T=20, H=2, HV=4, K=8, V=12)


def _call(kind: Any, dtype: str = "float32") -> dict[str, Any]:
    x = normalise(tensors(SHAPE, seed=3))
    return {name: to_kind(a, kind, dtype) for name, a in x.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_results_are_of_the_callers_kind(kind: Any, dtype: str) -> None:
    call = _call(kind, dtype)
    for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
        o, state = function(**call, output_final_state=True)
        assert type(o) is type(state)
        assert o.dtype == call["v"].dtype
        assert tuple(o.shape) == (2, 20, 4, 12)
        assert tuple(state.shape) == (2, 4, 8, 12)
        assert str(state.dtype).endswith("float32")
        wanted = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array}[kind]
        assert isinstance(o, wanted)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_the_final_state_comes_only_when_asked_for(kind: Any) -> None:
    assert kdacore.chunk_kda(**_call(kind))[1] is None
    assert kdacore.fused_recurrent_kda(**_call(kind))[1] is None


@pytest.mark.parametrize("name", ["k", "v", "g", "beta"])
@pytest.mark.parametrize("other", ["torch", "jax"])
def test_mixed_kinds(name: str, other: Any) -> None:
    call = _call("numpy")
    call[name] = to_kind(np.asarray(call[name]), other, "float32")
    with pytest.raises(kdacore.ContractError, match=f"'{name}'.*{other} array.*numpy array"):
        kdacore.chunk_kda(**call)


def test_mixed_devices() -> None:
    call = _call("torch")
    call["beta"] = call["beta"].to("meta")
    with pytest.raises(kdacore.ContractError, match="'beta'.*on meta.*on cpu"):
        kdacore.chunk_kda(**call)


def test_a_sparse_tensor() -> None:
    call = _call("torch")
    call["beta"] = call["beta"].to_sparse()
    with pytest.raises(kdacore.ContractError, match="'beta'.*sparse"):
        kdacore.chunk_kda(**call)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor(layout: torch.layout) -> None:
    call = _call("torch")
    call["beta"] = torch.nested.nested_tensor(list(call["beta"]), layout=layout)
    with pytest.raises(kdacore.ContractError, match="'beta'.*a nested tensor"):
        kdacore.chunk_kda(**call)


def test_a_masked_array() -> None:
    call = _call("numpy")
    call["beta"] = np.ma.masked_array(call["beta"])
    with pytest.raises(kdacore.ContractError, match="'beta'.*masked array"):
        kdacore.chunk_kda(**call)


def test_the_host_copy_may_be_numpy_beside_torch() -> None:
    call = {n: x[:1] for n, x in _call("torch").items()}
    offsets = np.array([0, 3, 20])
    a, _ = kdacore.chunk_kda(**call, cu_seqlens=torch.as_tensor(offsets), cu_seqlens_cpu=offsets)
    b, _ = kdacore.chunk_kda(
        **call, cu_seqlens=torch.as_tensor(offsets), cu_seqlens_cpu=torch.as_tensor(offsets)
    )
    assert torch.equal(a, b)


def test_the_host_copy_must_be_on_the_host() -> None:
    call = {n: x[:1] for n, x in _call("torch").items()}
    offsets = torch.tensor([0, 3, 20])
    with pytest.raises(kdacore.ContractError, match="'cu_seqlens_cpu'.*on the host"):
        kdacore.chunk_kda(**call, cu_seqlens=offsets, cu_seqlens_cpu=offsets.to("meta"))


def test_jax_arrays_cannot_be_written() -> None:
    call = _call("jax")
    with pytest.raises(kdacore.ContractError, match="'out'.*cannot be written"):
        kdacore.fused_recurrent_kda(**call, out=jnp.zeros((2, 20, 4, 12)))
    with pytest.raises(kdacore.ContractError, match="'inplace_state'.*output_final_state=True"):
        kdacore.fused_recurrent_kda(**call, initial_state=jnp.zeros((2, 4, 8, 12)), inplace_state=True)


def test_jax_in_place_returns_the_new_pool() -> None:
    call = _call("jax")
    pool = jnp.ones((5, 4, 8, 12))
    _, new = kdacore.fused_recurrent_kda(
        **call,
        initial_state=pool,
        state_indices=jnp.array([4, 1]),
        inplace_state=True,
        output_final_state=True,
    )
    assert new.shape == pool.shape
    changed = [bool((new[i] != 1).any()) for i in range(5)]
    assert changed == [False, True, False, False, True]
    assert bool((pool == 1).all())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_in_place_returns_the_pool_itself(kind: Any) -> None:
    call = _call(kind)
    pool = to_kind(np.ones((5, 4, 8, 12)), kind, "float32")
    indices = to_kind(np.array([4, 1]), kind, "int64")
    _, state = kdacore.fused_recurrent_kda(
        **call, initial_state=pool, state_indices=indices, inplace_state=True, output_final_state=True
    )
    assert state is pool


def test_numpy_bfloat16_is_ml_dtypes() -> None:
    o, _ = kdacore.chunk_kda(**_call("numpy", "bfloat16"))
    assert o.dtype == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_inputs_are_not_changed(kind: Any) -> None:
    call = _call(kind)
    call["initial_state"] = to_kind(np.ones((2, 4, 8, 12)), kind, "float32")
    before = {n: np.array(np.asarray(x)) for n, x in call.items()}
    kdacore.chunk_kda(**call, output_final_state=True)
    kdacore.fused_recurrent_kda(**call, output_final_state=True)
    for name, x in call.items():
        np.testing.assert_array_equal(np.asarray(x), before[name])


def test_a_jax_tracer_gets_a_plain_answer() -> None:
    call = _call("jax")
    with pytest.raises(kdacore.UnsupportedError, match="reference.*trac"):
        jax.jit(lambda **c: kdacore.chunk_kda(**c, backend="reference")[0])(**call)
