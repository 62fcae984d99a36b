"""``disable_recompute`` on the TPU kernels, interpreted: the forward keeps the state that each chunk starts from, and
the backward reads it instead of computing it again. Gradients are the same bits either way."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads, to_jax
from rank_cases import AXIS, SPLIT, TOKENS
from server_cases import padded_training
from split_arrays import BOTH, Layout, collectives

import kdacore
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_pallas.tpu import chunk_backward, chunk_forward, entry_points, report_calls, vmem
from kdacore_pallas.tpu.launch import Launch

GDN = "chunk_gated_delta_rule"
INTERPRET = Launch(interpret=True)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_PALLAS_INTERPRET", "1")
    kdacore.config.refresh()


@partial(jax.jit, static_argnums=(0, 1))
def forward(request: Request, keep: bool, inputs: Any) -> Outputs:
    return chunk_forward.forward(request, inputs, request.H, INTERPRET, keep)


@partial(jax.jit, static_argnums=0)
def backward(request: Request, inputs: Any, saved: Any, grads: OutputGrads) -> InputGrads:
    return chunk_backward.backward(request, inputs, saved, grads, request.H, INTERPRET)


def equal(a: Any, b: Any) -> bool:
    """All arrays of two trees, bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


CASES = {
    "dense, a ragged end": Case(B=2, T=140, H=1, HV=2, K=16, V=8, gate="softplus", seed=31),
    "pack, GVA, v first": Case(
        lengths=(0, 1, 63, 129, 0, 17), H=2, HV=4, K=24, V=40, gate="softplus", beta_sigmoid=True, v_first=True, seed=32
    ),
    "gdn, no states": Case(op=GDN, T=256, HV=1, K=16, V=16, initial=False, final=False, seed=33),
    "bf16, near-collinear keys": Case(
        dtype="bfloat16", T=256, K=64, V=64, HV=1, gates="zero", collinear=True, initial=False, seed=34
    ),
    "edge lengths": Case(lengths=(15, 16, 64, 65, 128), HV=1, K=8, V=8, gates="mixed", seed=35),
}  # fmt: skip
QUICK = "pack, GVA, v first"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == QUICK else pytest.mark.exhaustive) for n in CASES]
)
def test_the_same_bits(name: str) -> None:
    request, inputs = build(CASES[name])
    arrays, grads = to_jax(inputs), output_grads(request)
    d = OutputGrads(*(None if x is None else jnp.asarray(x) for x in grads))
    plain, kept = forward(request, False, arrays), forward(request, True, arrays)
    assert plain.saved == () and equal(plain[:2], kept[:2])
    check_forward(kept, request, inputs)
    (starts,) = kept.saved
    blocks = -(-request.T // 128)  # a pack keeps no more than a dense call
    assert starts.shape == (request.B, blocks, request.HV, request.V, request.K)
    got = backward(request, arrays, kept.saved, d)
    assert equal(got, backward(request, arrays, (), d))
    check_backward(got, request, inputs, grads)


@pytest.mark.exhaustive
def test_padding_of_a_pack_is_not_read() -> None:
    """NaN after the last sequence."""
    request, inputs, grads = padded_training(
        Case(lengths=(20, 0, 5), HV=1, K=8, V=8, gate="softplus", beta_sigmoid=True, seed=36), 9
    )
    arrays = to_jax(inputs)
    saved = forward(request, True, arrays).saved
    got = backward(request, arrays, saved, OutputGrads(*(jnp.asarray(x) for x in grads)))
    for n in TOKENS:
        assert not np.asarray(getattr(got, n))[:, 25:].any(), n
    check_backward(got, request, inputs, grads)


# --- public calls ---------------------------------------------------------------------------------------------------


def loss(x: dict[str, Any], **options: Any) -> Any:
    o, state = kdacore.chunk_kda(
        **x, use_qk_l2norm_in_kernel=True, output_final_state=True, backend="pallas", **options
    )[:2]
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))


def arrays_of(case: Case) -> dict[str, Any]:
    return {n: jnp.asarray(a) for n, a in build(case)[1]._asdict().items() if a is not None}


def kernels(function: Any, *arrays: Any) -> list[str]:
    """The kernels of a program, in order."""
    return re.findall(r"name=(kdacore_chunk_[a-z_]+)", str(jax.make_jaxpr(function)(*arrays)))


SMALL = Case(T=140, HV=1, K=8, V=8, seed=37)
FORWARD, BACKWARD = "kdacore_chunk_forward", "kdacore_chunk_backward"


def test_one_pass_over_the_states_is_left_out() -> None:
    """Which kernels a gradient runs; without gradients nothing is kept."""
    x = arrays_of(SMALL)
    plain, kept = jax.grad(loss), jax.grad(partial(loss, disable_recompute=True))
    assert sorted(kernels(plain, x)) == [BACKWARD, FORWARD, FORWARD]
    assert sorted(kernels(kept, x)) == [BACKWARD, FORWARD]
    states = f"f32[1,2,{SMALL.HV},{SMALL.V},{SMALL.K}]"
    assert states in str(jax.make_jaxpr(kept)(x))
    assert states not in str(jax.make_jaxpr(partial(loss, disable_recompute=True))(x))


@pytest.mark.exhaustive
def test_remat_and_vmap() -> None:
    """Under remat the forward is computed again, with the states; under vmap they get one more axis."""
    x = {n: a for n, a in arrays_of(replace(SMALL, B=2, T=24)).items() if n != "initial_state"}
    kept = partial(loss, disable_recompute=True)
    want = jax.jit(jax.grad(loss))(x)
    assert equal(jax.jit(jax.grad(jax.checkpoint(kept)))(x), want)

    def mapped(x: dict[str, Any]) -> Any:
        return jnp.sum(jax.vmap(lambda row: kept({n: a[None] for n, a in row.items()}))(x))

    got = jax.jit(jax.grad(mapped))(x)
    for n, a in got.items():
        assert error(a, want[n]) < 1e-6, n


@pytest.mark.exhaustive
def test_split_over_devices() -> None:
    """Batch and heads: nothing is gathered, the states are split with them, and the one sum is that of the gradients
    that sequences share."""
    request, inputs = build(Case(B=2, T=40, H=4, HV=8, K=8, V=16, gate="softplus", seed=38))
    request = replace(request, needs_grad=True, disable_recompute=True)
    grads, layout = output_grads(request), Layout(BOTH, P("data", "heads"))
    x, d = layout.place(inputs, grads)

    @jax.jit
    def both(x: dict[str, Any], d: Any) -> Any:
        given = ChunkInputs(**x)
        out = entry_points.chunk_forward(request, given)
        return out, entry_points.chunk_backward(request, given, out.saved, d)

    program = both.lower(x, d).compile()
    assert collectives(program) == {"all-reduce": 1}
    out, found = program(x, d)
    assert out.saved[0].sharding.spec == P("data", None, "heads")
    check_forward(out, request, inputs)
    check_backward(InputGrads(*found), request, inputs, grads)


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [True, False])
def test_slices_of_a_row(packed: bool) -> None:
    """``cp=``: each rank's slice keeps the states of its chunks."""
    case = Case(lengths=(70, 0, 58) if packed else None, T=128, HV=1, K=8, V=8, initial=False, seed=39)
    x = arrays_of(case)
    specs = {n: SPLIT if n in TOKENS else P() for n in x}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), (AXIS,))

    def gradient(keep: bool) -> Any:
        def local(x: dict[str, Any]) -> Any:
            return kdacore.chunk_kda(
                **x, use_qk_l2norm_in_kernel=True, cp=AXIS, backend="pallas", disable_recompute=keep
            )[0]

        run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=SPLIT, check_vma=False)
        rest = {n: a for n, a in x.items() if n not in TOKENS}
        return jax.grad(lambda x: jnp.sum(jnp.sin(run(x | rest))))

    wanted = {n: x[n] for n in TOKENS}
    assert kernels(gradient(False), wanted).count(FORWARD) == 3  # the map of the slice, and two more
    assert kernels(gradient(True), wanted).count(FORWARD) == 2
    assert equal(jax.jit(gradient(False))(wanted), jax.jit(gradient(True))(wanted))


# --- where it is decided --------------------------------------------------------------------------------------------


def test_a_backward_without_kernel_keeps_nothing() -> None:
    """Then plain JAX computes it, which reads no such states."""
    wide = report_calls.Size(T=256, H=16, HV=16, K=128, V=128, dtype="float32")
    asked = {"needs_grad": True, "disable_recompute": True}
    on_v4, on_v5e = (replace(report_calls.chunk_request(wide, gen), **asked) for gen in ("v4", "v5e"))
    assert not entry_points._keeps_starts(on_v4) and entry_points._keeps_starts(on_v5e)
    assert not entry_points._keeps_starts(replace(on_v5e, needs_grad=False))
    assert not entry_points._keeps_starts(replace(on_v5e, disable_recompute=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 64), (6, 6), (1, 1)])
@pytest.mark.parametrize("D", [8, 64, 128, 256])
def test_a_forward_that_keeps_fits_where_the_backward_does(
    dtype: str, heads: tuple[int, int], D: int
) -> None:
    size = report_calls.Size(T=256, H=heads[0], HV=heads[1], K=D, V=D, dtype=dtype)
    request = report_calls.chunk_request(size, "v4")
    hb = vmem.heads_per_step(request)
    plain, kept = (vmem.chunk_forward_bytes(request, hb, keep) for keep in (False, True))
    block = heads[1] // heads[0] * hb * max(D, 8) * max(D, 128) * 4
    assert kept - plain == 2 * block  # two buffers
    assert kept <= vmem.chunk_backward_bytes(request, hb)
