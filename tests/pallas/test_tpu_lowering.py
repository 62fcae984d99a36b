"""Every kernel and class of shapes goes through Mosaic's lowering for TPUs, on a machine that has
none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

import kdacore
from kdacore.types import ChunkInputs, OutputGrads, RecurrentInputs, Request, TensorSpec
from kdacore_pallas import make_pallas
from kdacore_pallas.tpu import report_calls
from kdacore_pallas.tpu.entry_points import _backward, _forward, _recurrent
from kdacore_pallas.tpu.report_calls import Size

GENERATION = "v5e"


def spec(dtype: str, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def lowers(fn: Callable[..., Any], *args: Any) -> None:
    exported = jax.export.export(jax.jit(fn), platforms=["tpu"])(*args)
    assert "tpu_custom_call" in exported.mlir_module()


def served(request: Request) -> None:
    """No verifier declines the request."""
    verifiers = make_pallas().ops[request.op].verifiers
    assert verifiers and [verify(request) for verify in verifiers] == [None] * len(verifiers)


def chunk_call(
    size: Size, packed: int = 0, initial: bool = False, scalar: bool = False, v_first: bool = False
) -> tuple[Request, ChunkInputs]:
    inputs = report_calls.chunk_inputs(size, spec)
    request = replace(report_calls.chunk_request(size, GENERATION), state_v_first=v_first)
    g = inputs.g
    if scalar:
        g = spec(size.dtype, size.B, size.T, size.HV)
        inputs = inputs._replace(g=g, dt_bias=spec("float32", size.HV))
        request = replace(request, op="chunk_gated_delta_rule", scalar_gate=True)
    tensors = [("g", TensorSpec(tuple(g.shape), str(g.dtype)))]
    if packed:
        inputs = inputs._replace(cu_seqlens=spec("int32", packed + 1))
        request = replace(request, packed=True, N=packed)
    if initial:
        inputs = inputs._replace(initial_state=spec("float32", *request.state_shape))
        tensors.append(("initial_state", TensorSpec(request.state_shape, "float32")))
    return replace(request, tensors=tuple(tensors)), inputs


CHUNKS: dict[str, dict[str, Any]] = {
    "production": {"size": Size(T=512, H=16, HV=16)},
    "float32, a ragged end": {"size": Size(B=2, T=200, H=2, HV=2, dtype="float32")},
    "pack, GVA, state, v first": {"size": Size(T=300, H=8, HV=16), "packed": 3, "initial": True, "v_first": True},
    "many narrow heads": {"size": Size(T=128, H=32, HV=32, K=8, V=24, dtype="float32")},
    "narrow heads": {"size": Size(T=128, H=2, HV=2, K=24, V=40)},
    "wide heads": {"size": Size(T=128, H=1, HV=1, K=256, V=256)},
    "one gate a head": {"size": Size(T=256, H=8, HV=8), "scalar": True},
}  # fmt: skip


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CHUNKS)
def test_chunk(name: str) -> None:
    request, inputs = chunk_call(**CHUNKS[name])
    served(request)
    lowers(lambda x: _forward(request, x)[:2], inputs)
    lowers(lambda x, do: _backward(request, x, (), OutputGrads(do)), inputs, inputs.v)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CHUNKS)
def test_chunk_with_kept_start_states(name: str) -> None:
    """Whose backward is one kernel."""
    request, inputs = chunk_call(**CHUNKS[name])

    def both(x: ChunkInputs, do: Any) -> Any:
        out = _forward(request, x, keep_starts=True)
        return out[:2], _backward(request, x, out.saved, OutputGrads(do))

    exported = jax.export.export(jax.jit(both), platforms=["tpu"])(inputs, inputs.v)
    found = Counter(re.findall(r'kernel_name = "(kdacore_[a-z_]+)', exported.mlir_module()))
    assert found == {"kdacore_chunk_forward": 1, "kdacore_chunk_backward": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("K", [128, 256])
def test_ranks(packed: bool, K: int) -> None:
    """``cp=`` on a mesh of TPUs that are not here: one exchange forward, one backward. With K = 256 the two parts of a
    slice's map take a kernel each."""
    chips = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((4,), ("seq",), abstract_device=chips)
    size = Size(T=512, H=8, HV=8, K=K, V=K)
    inputs = report_calls.chunk_inputs(size, spec)
    x = {n: a for n, a in inputs._asdict().items() if a is not None}
    given = {"cu_seqlens": spec("int32", 4)} if packed else {}
    split, tokens = P(None, "seq"), ("q", "k", "v", "g", "beta")
    specs = {n: split if n in tokens else P() for n in (*x, *given)}

    def local(x: dict[str, Any]) -> Any:
        options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
        return kdacore.chunk_kda(**x, **options, cp="seq", backend="pallas")[0]

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=split)

    def both(x: dict[str, Any], given: dict[str, Any]) -> Any:
        o, vjp = jax.vjp(lambda x: run({**x, **given}), x)
        return o, vjp(o)

    exported = jax.export.export(jax.jit(both), platforms=["tpu"])(x, given)
    program = exported.mlir_module()
    assert program.count("stablehlo.all_gather") == 2
    wanted = {"kdacore_chunk_forward", "kdacore_chunk_start_gradients", "kdacore_chunk_backward"}
    assert set(re.findall(r"kdacore_chunk_[a-z_]+", program)) >= wanted


def test_export_for_a_device_that_is_not_here() -> None:
    """Plain ``jit`` within a mesh that describes its devices: a forced backend is served, and automatic choice takes
    no kernels that were never checked."""
    chips = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("one",), abstract_device=chips)
    inputs = report_calls.chunk_inputs(Size(T=128, H=2, HV=2), spec)
    x = {n: a for n, a in inputs._asdict().items() if a is not None}
    explained = []

    def layer(x: dict[str, Any], backend: str | None) -> Any:
        options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
        explained.append(kdacore.explain("chunk_kda", **x, **options))
        return kdacore.chunk_kda(**x, **options, backend=backend)[0]

    def exported(backend: str | None) -> str:
        both = jax.jit(lambda x: jax.vjp(lambda x: layer(x, backend), x)[0])
        return str(jax.export.export(both, platforms=["tpu"])(x).mlir_module())

    with jax.sharding.use_abstract_mesh(mesh):
        assert "kdacore_chunk_forward" in exported("pallas")
        with kdacore.record_selections() as chosen:
            assert "tpu_custom_call" not in exported(None)
    assert {s.backend for s in chosen} == {"xla"}
    for selection in (chosen[0], explained[-1]):
        (reason,) = next(c for c in selection.candidates if c.backend == "pallas").reasons
        assert reason.code == "selfcheck" and selection.backend == "xla"
        assert "none here to check" in str(reason) and "backend='pallas'" in str(reason)
    with pytest.raises(kdacore.UnsupportedError, match="pallas"):
        exported("pallas")  # outside the mesh


RECURRENT_CALLS: dict[str, dict[str, Any]] = {
    "one token, pool in place": {},
    "verification of four tokens": {
        "T": 4, "inplace_state": False, "read_only_state": True, "output_final_state": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT_CALLS)
def test_recurrent(name: str) -> None:
    request = replace(report_calls.recurrent_request(GENERATION, B=8, H=8, pool=16), **RECURRENT_CALLS[name])
    inputs: RecurrentInputs = report_calls.recurrent_inputs(request, spec)
    if request.T > 1:
        size = Size(request.B, request.T, request.H, request.HV)
        rows = report_calls.chunk_inputs(size, spec)
        inputs = inputs._replace(q=rows.q, k=rows.k, v=rows.v, g=rows.g, beta=rows.beta)
    served(request)
    lowers(lambda x: _recurrent(request, x)[:2], inputs)


def test_state_pools() -> None:
    """A pool that is written and another that is read; slots of a padded pack."""
    request = report_calls.recurrent_request(GENERATION, B=8, H=8, pool=16)
    inputs = report_calls.recurrent_inputs(request, spec)
    pool, rows = spec("float32", 12, *request.state_shape[1:]), spec("int32", 8)
    request = replace(request, write_pool_size=12, write_indices_ndim=1, null_index=0)
    served(request)
    lowers(lambda x: _recurrent(request, x)[:2], inputs._replace(write_pool=pool, write_indices=rows))

    chunk, arrays = chunk_call(Size(T=300, H=8, HV=8), packed=3, initial=True)
    chunk = replace(chunk, pool_size=12, state_indices_ndim=1, inplace_state=True)
    served(chunk)
    lowers(
        lambda x: _forward(chunk, x)[:2], arrays._replace(initial_state=pool, state_indices=spec("int32", 3))
    )


@pytest.mark.exhaustive
def test_in_other_modes_of_jax() -> None:
    """In x64 mode Python integers have 64 bits; under strict promotion masks are not numbers.
    Neither may affect the kernels."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        test_chunk("narrow heads")
        test_chunk("pack, GVA, state, v first")
        test_recurrent("one token, pool in place")
