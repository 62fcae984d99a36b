"""The xla backend's forward for GPUs, run on a CPU: plain JAX against the float64 oracle, and its
promise of bits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, check_forward, error, full_speed, to_jax

from kdacore.types import ChunkInputs, Device, OutputGrads, Request
from kdacore_pallas.xla import chunk_backward, chunk_forward, chunk_forward_gpu

GDN = "chunk_gated_delta_rule"
LENGTHS = (0, 1, 2, 63, 64, 65, 0, 127, 128, 129, 300, 0)
ROWS = ("q", "k", "v", "g", "beta")
forward = jax.jit(chunk_forward_gpu.forward, static_argnums=0)
optimised = full_speed(chunk_forward_gpu.forward)
base = Case(T=300, dtype="bfloat16")

CASES = {
    "softplus gate, GVA, odd dims": replace(
        base, B=2, H=2, HV=4, K=60, V=100, gate="softplus", beta_sigmoid=True
    ),
    "bounded gate without A_log, beta logits, states [V, K]": replace(
        base, gate="sigmoid", lower_bound=-5.0, A_log=False, beta_sigmoid=True, neg_eigval=True, v_first=True
    ),
    "no normalisation": replace(base, l2norm=False),
    "no states": replace(base, initial=False, final=False, HV=1),
    "bf16 states": replace(base, state_dtype="bfloat16"),
    "gdn": replace(base, op=GDN, gate="softplus", HV=3),
    "fp16 pack": replace(base, dtype="float16", lengths=LENGTHS, H=2, HV=4, v_first=True, K=24),
    "pack without a state": replace(base, lengths=LENGTHS, initial=False, gates="mixed"),
    "gdn pack": replace(base, op=GDN, lengths=LENGTHS, gates="mixed", beta_sigmoid=True),
    "checkpoints": replace(base, B=2, T=700, checkpoint_every=128),
    "checkpoints of a pack": replace(base, lengths=(0, 128, 129, 400), checkpoint_every=256, v_first=True),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_options(name: str) -> None:
    request, inputs = build(CASES[name])
    check_forward(forward(request, to_jax(inputs)), request, inputs)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 2500])
def test_lengths(T: int) -> None:
    request, inputs = build(replace(base, T=T, gates="random"))
    check_forward(forward(request, to_jax(inputs)), request, inputs)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("collinear", [False, True], ids=["", "collinear"])
@pytest.mark.parametrize("l2norm", [True, False], ids=["unit", "raw"])
def test_hard_gates(collinear: bool, l2norm: bool) -> None:
    case = replace(base, T=520, K=128, V=128, HV=1, collinear=collinear, l2norm=l2norm)
    for gates in ("zero", "five", "sixty", "mixed", "random"):
        request, inputs = build(replace(case, gates=gates))
        check_forward(forward(request, to_jax(inputs)), request, inputs, factor=2)


def test_gates_without_a_bound() -> None:
    """Sums of decays this large would lose their differences; they decay a float32 state to zero
    anyway."""
    request, inputs = build(replace(base, gates="mixed"))
    g = np.array(inputs.g)
    g[:, 50:200:7] = -1e6
    g[:, 60:200:9] = -np.inf
    inputs = inputs._replace(g=g)
    check_forward(forward(request, to_jax(inputs)), request, inputs, factor=2)


def cut(request: Request, inputs: ChunkInputs, T: int) -> tuple[Request, ChunkInputs]:
    """The first T tokens of a dense call."""
    return replace(request, T=T), inputs._replace(**{n: getattr(inputs, n)[:, :T] for n in ROWS})


@pytest.mark.exhaustive
@pytest.mark.parametrize("gates", ["random", "mixed"])
@pytest.mark.parametrize("t", [77, 130])
def test_later_tokens_change_no_bit(gates: str, t: int) -> None:
    case = replace(base, T=1300, K=16, V=16, HV=1, gates=gates, final=False)
    request, inputs = build(case)
    other = build(replace(case, seed=9))[1]
    mixed = inputs._replace(
        **{n: np.concatenate([getattr(inputs, n)[:, :t], getattr(other, n)[:, t:]], 1) for n in ROWS}
    )

    def run(request: Request, inputs: ChunkInputs) -> Any:
        return np.asarray(optimised(request, to_jax(inputs)).o[:, :t]).view(np.uint16)

    whole = run(request, inputs)
    assert np.array_equal(whole, run(request, mixed))
    assert np.array_equal(whole, run(*cut(request, inputs, t)))
    assert np.array_equal(whole, run(request, inputs))


def test_another_sequence_changes_no_bit() -> None:
    """NaN in a neighbour of a pack, whose rows a chunk may read and must not use."""
    request, inputs = build(replace(base, lengths=(100, 60, 90)))
    dirty = inputs._replace(
        **{n: np.array(getattr(inputs, n)) for n in ROWS}, initial_state=np.array(inputs.initial_state)
    )
    for n in ROWS:
        getattr(dirty, n)[:, 100:160] = np.nan
    one, two = (forward(request, to_jax(x)) for x in (inputs, dirty))
    for part in (slice(0, 100), slice(160, 250)):
        assert np.array_equal(np.asarray(one.o)[:, part], np.asarray(two.o)[:, part])
    assert np.array_equal(np.asarray(one.final_state)[[0, 2]], np.asarray(two.final_state)[[0, 2]])


def test_which_calls_it_serves() -> None:
    request, _ = build(replace(base, checkpoint_every=128))
    assert not chunk_forward_gpu.serves(request)
    request = replace(request, device=Device("cuda", 0, "sm_90"))
    assert chunk_forward_gpu.serves(request)
    assert not chunk_forward_gpu.serves(replace(request, needs_grad=True))
    assert not chunk_forward_gpu.serves(replace(request, dtype="float32"))
    assert not chunk_forward_gpu.serves(replace(request, checkpoint_every=64))


@pytest.mark.exhaustive
def test_inside_shard_map_and_vmap() -> None:
    request, inputs = build(replace(base, B=2, K=16, V=16))
    want = forward(request, to_jax(inputs))
    one = replace(request, B=1, N=1)
    arrays = ChunkInputs(*to_jax(inputs))

    def local(x: ChunkInputs) -> Any:
        return tuple(chunk_forward_gpu.forward(one, x)[:2])

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))
    shared = jax.shard_map(local, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    split = jax.tree.map(lambda x: x[:, None], arrays)
    for got in (jax.jit(shared)(arrays), jax.tree.map(lambda x: x[:, 0], jax.jit(jax.vmap(local))(split))):
        for a, b in zip(got, want[:2], strict=True):
            assert error(a, b) < 2e-3


def test_padding_is_not_fused_on_a_gpu() -> None:
    """If padding were fused with a sum inside the only segment, the order of the sum, and so the
    bits, would depend on the length."""
    request, inputs = build(replace(base, T=135))
    request = replace(request, device=Device("cuda", 0, "sm_90"))
    arrays = to_jax(inputs)

    def gradients(x: ChunkInputs) -> Any:
        wanted = replace(request, needs_grad=True)
        out = chunk_forward.forward(wanted, x)
        return chunk_backward.backward(wanted, x, out.saved, OutputGrads(out.o, None))

    for program in (gradients, lambda x: chunk_forward_gpu.forward(request, x)):
        steps = jax.make_jaxpr(program)(arrays).eqns
        pads = {v for e in steps if e.params.get("name") == "_pad" for v in e.outvars}
        readers = {e.primitive.name for e in steps for v in e.invars if isinstance(v, Hashable) and v in pads}
        assert len(pads) >= 5 and readers == {"optimization_barrier"}
