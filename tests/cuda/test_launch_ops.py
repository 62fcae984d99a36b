"""Every op of the backend through a stub driver: which kernels it launches, with what in each of their parameters."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, request_of
from recording_driver import EXECUTORS, Stub

from kdacore.types import (
    ChunkInputs,
    Device,
    IntraInputs,
    OutputGrads,
    RecomputeInputs,
    RecurrentInputs,
    Request,
)
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.backward import workspace as chunk_backward_workspace
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import gradients as gated_delta_gradients
from kdacore_cuda.forms.gated_delta.workspace import unit_bytes
from kdacore_cuda.forms.recurrent import forward as recurrent
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_cuda.forms.segments.workspace import CHUNK_OPERANDS_BYTES, MAP_BYTES
from kdacore_cuda.forms.stages import forward as stages
from kdacore_cuda.forms.stages.kernels import hopper_recompute_kernel
from kdacore_cuda.kernel_parameters import (
    CHECKPOINT_TAIL,
    CHUNK_BACKWARD,
    CHUNK_FORWARD,
    FLAGS,
    GATED_DELTA,
    GATED_DELTA_BACKWARD,
    GATED_DELTA_RECORDS,
    GATES,
    GROUPS,
    INTRA,
    ITEM_SIZES,
    PREPARE_MARKED,
    RECOMPUTE,
    RECURRENT,
    SEGMENTS,
    SUMS,
    TYPES,
    WALK,
)
from kdacore_cuda.runtime import torch_launch

pytestmark = pytest.mark.quick

PARAMS = {
    "recurrent": RECURRENT,
    "chunk_forward": CHUNK_FORWARD,
    "intra": INTRA,
    "recompute": RECOMPUTE,
    "recompute_hopper": RECOMPUTE,
    **dict.fromkeys(
        ("prepare", "prepare_units", "segment_maps", "segment_chain", "scan", "grads"), CHUNK_BACKWARD
    ),
    "sums": SUMS,
    "gate_sums": SUMS,
    "groups": GROUPS,
    "chunk_records": GATED_DELTA_RECORDS,
    "walk_records": GATED_DELTA,
    **dict.fromkeys(("walk_records_keeping", "walk_backward", "unit_grads"), GATED_DELTA_BACKWARD),
    "checkpoint_tail": CHECKPOINT_TAIL,
    "prepare_marked": PREPARE_MARKED,
    **dict.fromkeys(("maps", "chain", "output"), SEGMENTS),
    "walk": WALK,
}
"""Entry -> the struct it takes."""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(tmp_path_factory.mktemp("driver"), PARAMS)


@pytest.fixture(params=EXECUTORS)
def seen(request: pytest.FixtureRequest, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Launches of this test, through each executor."""
    stub.install(monkeypatch, request.param)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    # The arrays lie on the CPU, which the host code is not asked about.
    monkeypatch.setattr(torch_launch, "current_device", lambda: -1)
    monkeypatch.setattr(torch_launch, "current_stream", lambda index: 0)
    return stub


def on_hopper(request: Request) -> Request:
    return dataclasses.replace(request, device=Device("cuda", 0, "sm_90"))


def holds(params: dict[str, Any], **expected: Any) -> None:
    """Every value named is what was packed; tensors by their address, floats as float32."""
    for name, x in expected.items():
        if isinstance(x, torch.Tensor):
            x = x.data_ptr()
        elif x is None:
            x = 0
        assert params[name] == (pytest.approx(x) if isinstance(x, float) else x), name


def strided(params: dict[str, Any], **arrays: torch.Tensor) -> None:
    """Batch, token and head strides are those of the arrays."""
    for name, x in arrays.items():
        given = tuple(params[f"{name}_{axis}"] for axis in ("sb", "st", "sh"))
        assert given == x.stride()[:3], name


def pack(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("K", [64, 128])
def test_chunk_forward(seen: Stub, monkeypatch: pytest.MonkeyPatch, K: int, packed: bool) -> None:
    """The fused kernel, also where heads are few."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    d = Draw(0)
    B, T, H, HV, N = (1, 96, 2, 4, 3) if packed else (3, 96, 2, 4, 3)
    inputs = ChunkInputs(
        q=d.normal(B, T, H, K),
        k=d.normal(B, T, H, K),
        v=d.normal(B, T, HV, K),
        beta=d.normal(B, T, HV),
        **d.gate("random", B, T, HV, K),
        initial_state=d.normal(N, HV, K, K, dtype=torch.float32),
        cu_seqlens=pack(1, 64, 31) if packed else None,
    )
    request = on_hopper(
        request_of("chunk_kda", inputs, output_final_state=True, checkpoint_every=64, **BOUNDED_MODEL)
    )
    got = chunk_forward.forward(request, inputs)
    (x,) = seen()
    cluster = 4 if K == 128 else 1
    assert (x.entry, x.grid) == ("chunk_forward", N * HV * cluster)
    assert (x.block, x.shared) == chunk_forward_kernel(K, cluster, bounded=True, float_gate=False).block(
        "sm_90a"
    )
    assert x.block == {64: 384, 128: 512}[K]
    assert x.limit == x.shared
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    holds(x.params, **named, cu_seqlens=inputs.cu_seqlens, o=got.o, h0=inputs.initial_state)
    holds(x.params, ht=got.final_state, ckpt=got.checkpoints, workspace=None, clusters=0)
    holds(
        x.params,
        T=T,
        N=N,
        H=H,
        HV=HV,
        ckpt_every=64,
        gate=GATES["sigmoid"],
        lower_bound=-5.0,
    )
    holds(
        x.params,
        scale=K**-0.5,
        beta_type=TYPES["bfloat16"],
        bias_type=TYPES["float32"],
    )
    flags = FLAGS["L2NORM"] | FLAGS["BETA_SIGMOID"] | (FLAGS["CU64"] | FLAGS["CLEAR_TAIL"]) * packed
    assert x.params["flags"] == flags
    strided(x.params, **{name: named[name] for name in ("q", "k", "v", "g")})
    chunk_forward.forward(request, inputs)
    assert seen()[1].params["launch"] == x.params["launch"] + 1


def test_chunk_forward_of_strided_arrays(seen: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    d = Draw(0)
    wide = d.normal(2, 40, 6, 3 * 128)
    q, k, v = (wide[..., 128 * i : 128 * (i + 1)] for i in range(3))
    inputs = ChunkInputs(q, k, v, d.gate("spread", 2, 40, 6, 128)["g"], d.uniform(2, 40, 6))
    chunk_forward.forward(on_hopper(request_of("chunk_kda", inputs)), inputs)
    (x,) = seen()
    holds(x.params, q=q, k=k, v=v, ht=None, h0=None, ckpt=None, A_log=None, gate=GATES["log"])
    strided(x.params, q=q, k=k, v=v, g=inputs.g)


@pytest.mark.parametrize("packed", [False, True])
def test_chunk_forward_in_segments(seen: Stub, packed: bool) -> None:
    """Prepare's operands lie one after another; the other launches have the same parameters and read them there."""
    d = Draw(0)
    B, T, H, HV, N = (1, 1100, 2, 4, 2) if packed else (2, 1100, 2, 4, 2)
    inputs = ChunkInputs(
        q=d.normal(B, T, H, 128),
        k=d.normal(B, T, H, 128),
        v=d.normal(B, T, HV, 128),
        beta=d.normal(B, T, HV),
        **d.gate("random", B, T, HV, 128),
        initial_state=d.normal(N, HV, 128, 128, dtype=torch.float32),
        cu_seqlens=pack(1, 1099) if packed else None,
    )
    options = BOUNDED_MODEL | {"output_final_state": True, "checkpoint_every": 128}
    got = chunk_forward.forward(on_hopper(request_of("chunk_kda", inputs, **options)), inputs)
    prepare, *rest = seen()
    assert [x.entry for x in (prepare, *rest)] == ["prepare", "maps", "chain", "output"]
    chunks, slots = (T // 64 + N, 1 + N) if packed else (B * 18, B * 2)
    with_map = slots if packed else B
    assert [x.grid for x in (prepare, *rest)] == [chunks * HV, 2 * with_map * HV, 8 * N * HV, 2 * slots * HV]
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    holds(
        prepare.params, **named, cu_seqlens=inputs.cu_seqlens, T=T, N=N, H=H, HV=HV, NT=18, units=chunks * HV
    )
    strided(prepare.params, **{name: named[name] for name in ("q", "k", "v", "g")})
    operands = rest[0].params["chunk_operands"]
    holds(prepare.params, last=operands)
    addends = operands + chunks * HV * CHUNK_OPERANDS_BYTES
    maps = addends + slots * HV * 64 * 1024
    for x in rest:
        assert x.params == rest[0].params
        assert x.limit == x.shared
        holds(
            x.params,
            chunk_operands=operands,
            addends=addends,
            maps=maps,
            starts=maps + slots * HV * MAP_BYTES,
        )
        strided(x.params, v=inputs.v)
        holds(
            x.params,
            v=inputs.v,
            cu_seqlens=inputs.cu_seqlens,
            o=got.o,
            h0=inputs.initial_state,
            ht=got.final_state,
        )
        holds(
            x.params,
            ckpt=got.checkpoints,
            T=T,
            N=N,
            HV=HV,
            NT=18,
            segment=16 if packed else 17,
            segments=2,
            ckpt_every=128,
        )
        assert x.params["flags"] == prepare.params["flags"]


def test_chunk_forward_side_by_side(seen: Stub) -> None:
    """Operands lie one after another, their flags behind them; both launches have the same number, which no other
    call has."""
    d = Draw(0)
    B, T, H, HV = 3, 400, 3, 6
    inputs = ChunkInputs(
        q=d.normal(B, T, H, 128),
        k=d.normal(B, T, H, 128),
        v=d.normal(B, T, HV, 128),
        beta=d.normal(B, T, HV),
        **d.gate("random", B, T, HV, 128),
        initial_state=d.normal(B, HV, 128, 128, dtype=torch.float32),
    )
    options = MODEL | {"output_final_state": True, "checkpoint_every": 128}
    request = on_hopper(request_of("chunk_kda", inputs, **options))
    got = chunk_forward.forward(request, inputs)
    chunk_forward.forward(request, inputs)
    prepare, walk, *again = seen()
    assert [x.entry for x in (prepare, walk, *again)] == ["prepare_units", "walk"] * 2
    assert [prepare.grid, walk.grid] == [132 - 2 * B * HV, 2 * B * HV]
    units = B * 7 * HV
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    holds(prepare.params, **named, cu_seqlens=None, T=T, N=B, H=H, HV=HV, NT=7, units=units)
    strided(prepare.params, **{name: named[name] for name in ("q", "k", "v", "g")})
    operands = walk.params["chunk_operands"]
    ready = operands + units * CHUNK_OPERANDS_BYTES
    holds(prepare.params, ready=ready, last=operands)
    strided(walk.params, v=inputs.v)
    holds(
        walk.params,
        v=inputs.v,
        o=got.o,
        h0=inputs.initial_state,
        ht=got.final_state,
        ckpt=got.checkpoints,
        ready=ready,
    )
    holds(walk.params, T=T, N=B, HV=HV, NT=7, ckpt_every=128)
    for x in (prepare, walk):
        assert x.limit == x.shared
    assert walk.params["flags"] == prepare.params["flags"]
    assert (
        walk.params["launch"]
        == prepare.params["launch"]
        != again[0].params["launch"]
        == again[1].params["launch"]
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_q", [False, True])
def test_stages(seen: Stub, packed: bool, with_q: bool) -> None:
    d = Draw(0)
    B, T, H, HV, K = (1, 96, 2, 4, 128) if packed else (2, 96, 2, 4, 128)
    cu = pack(1, 64, 31) if packed else None
    q, k, v = d.unit(B, T, H, K), d.unit(B, T, H, K), d.normal(B, T, HV, K)
    gc, beta, Akk = d.uniform(B, T, HV, K), d.uniform(B, T, HV), d.normal(B, T, HV, 64)
    # Chunks there may be: T // 64 + N of a pack, which leaves one place unused.
    N, NT = (3, 4) if packed else (B, 2)
    given = IntraInputs(q, k, gc, beta, cu)
    A = stages.chunk_intra(on_hopper(request_of("kda_chunk_intra", given, chunk_size=64)), given)
    more = RecomputeInputs(k, v, beta, gc, Akk, q if with_q else None, cu)
    R = stages.recompute_w_u(on_hopper(request_of("kda_recompute_w_u", more, chunk_size=64)), more)
    intra, recompute = seen()
    assert (intra.entry, recompute.entry) == ("intra", "recompute_hopper")
    sizes = {"T": T, "N": N, "H": H, "HV": HV, "NT": NT, "beta_type": TYPES["float32"]}
    items = (1 if packed else B) * NT * HV
    assert (intra.grid, recompute.grid) == (items, 2 * items)  # halves of so few
    assert (intra.limit, recompute.limit) == (intra.shared, 0)  # up to 48 KB need no raised limit
    half = hopper_recompute_kernel(False, with_q, whole_items=False)
    assert (recompute.block, recompute.shared) == half.block("sm_90a")
    holds(recompute.params, whole=0, kept=0)  # all that so few write is to stay in L2
    for x in (intra, recompute):
        assert x.block == 128
        holds(
            x.params,
            **sizes,
            k=k,
            g=gc,
            beta=beta,
            cu_seqlens=cu,
            flags=FLAGS["CU64"] * packed,
        )
        strided(x.params, k=k, g=gc, beta=beta)
    holds(intra.params, q=q, Aqk=A.Aqk, Akk=A.Akk, scale=K**-0.5)
    strided(intra.params, q=q)
    holds(recompute.params, v=v, Akk=Akk, q=q if with_q else None, w=R.w, u=R.u, kg=R.kg, qg=R.qg)
    strided(recompute.params, v=v, Akk=Akk)
    assert (R.qg is not None) == with_q


@pytest.mark.parametrize("HV", [2, 4])
def test_backward(seen: Stub, HV: int) -> None:
    """Prepare, scan and gradients hand the workspace on; sums over chunks and groups read what gradients left."""
    d, T, N = Draw(0), 150, 2
    inputs = draw(T, 2, HV, B=N, initial_state=d.normal(N, HV, 128, 128, dtype=torch.float32))
    options = BOUNDED_MODEL | {"output_final_state": True}
    request = on_hopper(request_of("chunk_kda", inputs, **options))
    do, dht = d.normal(*inputs.v.shape), d.normal(*request.state_shape, dtype=torch.float32)
    got = chunk_backward.backward(request, inputs, (), OutputGrads(do, dht))
    launches = seen()
    groups = ["groups", "groups"] if HV != 2 else []
    assert [x.entry for x in launches] == ["prepare", "scan", "grads", *groups, "sums"]
    prepare, scan, grads, *_, sums = launches
    for x in (prepare, scan, grads):
        named = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
        holds(x.params, **named, h0=inputs.initial_state, T=T, N=N, H=2, HV=HV, NT=3, units=6 * HV)
        holds(x.params, scale=128**-0.5, lower_bound=-5.0, gate=GATES["sigmoid"])
        strided(x.params, **{name: named[name] for name in ("q", "k", "v", "g")})
        assert x.limit >= x.shared > 48 * 1024
    assert (prepare.grid, grads.grid) == (6 * HV, min(6 * HV, 132))
    holds(scan.params, d_o=do, d_ht=dht, d_h0=got.initial_state)
    for first, second, handed in (
        (prepare, scan, ("kg", "qg", "w", "u", "aqk", "last")),
        (scan, grads, ("h", "dh", "u", "dr", "last", "rows")),
    ):
        for name in handed:
            assert first.params[name] == second.params[name] != 0, name
    holds(grads.params, d_o=do, dv=got.v, dg=got.g, dbeta=got.beta)
    holds(sums.params, d_A=got.A_log, d_bias=got.dt_bias, slots=6, HV=HV)
    holds(sums.params, **{name: grads.params[name] for name in ("dA_part", "dbias_part")})
    if groups:
        for x, given, part, out in zip(
            launches[3:5], (inputs.q, inputs.k), ("dq", "dk"), (got.q, got.k), strict=True
        ):
            holds(x.params, x=given, part=grads.params[part], out=out, T=T, rows=N * T * 2, H=2, HV=HV)
            strided(x.params, x=given)
    else:
        holds(grads.params, dq=got.q, dk=got.k)


def test_recurrent(seen: Stub) -> None:
    d, N, H, HV, K = Draw(0), 3, 2, 4, 128
    inputs = RecurrentInputs(
        q=d.normal(N, 1, H, K),
        k=d.normal(N, 1, H, K),
        v=d.normal(N, 1, HV, K),
        beta=d.normal(N, 1, HV),
        **d.gate("random", N, 1, HV, K),
        initial_state=d.normal(7, HV, K, K, dtype=torch.float32),
        state_indices=torch.tensor([5, -1, 2]),
    )
    options = BOUNDED_MODEL | {"inplace_state": True, "output_final_state": True}
    request = on_hopper(request_of("fused_recurrent_kda", inputs, **options))
    got = recurrent.forward(request, inputs)
    (x,) = seen()
    assert x.entry == "recurrent"
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    holds(x.params, **named, o=got.o, h0=inputs.initial_state, ht=inputs.initial_state)
    holds(x.params, indices=inputs.state_indices, accepted=None, cu_seqlens=None, T=1, H=H, HV=HV)
    holds(x.params, h0_row=HV * K * K, ht_row=HV * K * K, scale=K**-0.5, lower_bound=-5.0)
    strided(x.params, **{name: named[name] for name in ("q", "k", "v", "g")})
    holds(x.params, writes=inputs.state_indices, writes_row=1, has_initial=None, null_index=-1, N=N)
    assert x.params["flags"] & FLAGS["INDEX64"] and x.params["flags"] & FLAGS["INDEXED_OUT"]
    assert x.grid % (N * HV) == 0


def backward_call(packed: bool, groups: bool, float_gate: bool) -> tuple[Request, ChunkInputs]:
    more: dict[str, Any] = {}
    if packed:
        more = {"cu_seqlens": pack(10, 200, 90), "initial_state": torch.randn(3, 4, 128, 128)}
    inputs = draw(300, 2 if groups else 4, 4, B=1 if packed else 2, **more)
    if float_gate:
        inputs = inputs._replace(g=inputs.g.float())
    request = request_of("chunk_kda", inputs, output_final_state=packed, **BOUNDED_MODEL)
    return on_hopper(dataclasses.replace(request, needs_grad=True)), inputs


WORKSPACE = {*chunk_backward_workspace.WORKSPACE, "dA_part", "dbias_part"}
RESULTS = {"dq", "dk", "dv", "dg", "dbeta", "d_h0", "d_A", "d_bias", "part", "out"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("float_gate, cut", [(False, False), (True, False), (False, True)])
def test_cached_chunk_backward(
    seen: Stub, monkeypatch: pytest.MonkeyPatch, packed: bool, groups: bool, float_gate: bool, cut: bool
) -> None:
    """What is packed once is what a first call packs; arrays of the workspace do not overlap."""
    monkeypatch.setattr(choice, "use_segments_backward", lambda items, multiprocessors: cut)
    monkeypatch.setattr(chunk_backward_segments, "backward_segment_chunks", lambda *given: 1)
    request, inputs = backward_call(packed, groups, float_gate)
    do = torch.randn_like(inputs.v)
    dht = torch.randn(3, 4, 128, 128) if packed else None
    wanted = tuple(x is not None for x in inputs[:8])
    made = chunk_backward.make_fast_gradients(request, inputs, wanted)
    assert made is not None and not seen()
    got = made.backward(tuple(inputs), (), do, dht)
    assert got is not None
    want = chunk_backward.backward(request, inputs, (), OutputGrads(do, dht))
    calls = seen()
    again, first = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    scan = ["segment_maps", "segment_chain", "scan"] if cut else ["scan"]
    entries = ["prepare", *scan, "grads", *(["groups"] * 2 if groups else []), "sums"]
    assert [x.entry for x in again] == [x.entry for x in first] == entries
    memory = WORKSPACE | RESULTS | set(chunk_backward_segments.WORKSPACE)
    for x, y in zip(again, first, strict=True):
        assert x._replace(params={}) == y._replace(params={})
        same = [{k: v for k, v in z.params.items() if k not in memory} for z in (x, y)]
        assert same[0] == same[1]
        given = [{k for k in memory & set(z.params) if z.params[k]} for z in (x, y)]
        assert given[0] == given[1]
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    for x in again[1 : 1 + len(scan)]:
        assert x.params == again[0].params
    del again[2 : 1 + len(scan)]
    grads, *groups_of, sums = again[2:]
    holds(again[1].params, d_h0=got[7], d_o=do, d_ht=dht)
    holds(grads.params, dv=got[2], dg=got[3], dbeta=got[4])
    holds(sums.params, d_A=got[5], d_bias=got[6])
    for name in ("dA_part", "dbias_part"):
        assert sums.params[name] == grads.params[name]
    if groups:
        for x, name, out in zip(groups_of, ("dq", "dk"), got[:2], strict=True):
            holds(x.params, part=grads.params[name], out=out)
    else:
        holds(grads.params, dq=got[0], dk=got[1])
    for x, y, handed in (
        (again[0], again[1], ("kg", "qg", "w", "u", "aqk", "last")),
        (again[1], grads, ("h", "dh", "u", "dr", "last", "rows")),
    ):
        for name in handed:
            assert x.params[name] == y.params[name] != 0, name
    units = grads.params["units"]
    per_head = 4 * 128 * inputs.v.numel() // 128 if groups else None
    sizes = {
        name: n * ITEM_SIZES[dtype] * units for name, (n, dtype) in chunk_backward_workspace.WORKSPACE.items()
    }
    sizes |= {"dA_part": 4 * units, "dbias_part": 4 * 128 * units}
    if cut:
        stored = 4 * (300 // 64 + 3 if packed else 2 * 5)  # heads, and segments of one chunk
        for name, (n, dtype) in chunk_backward_segments.WORKSPACE.items():
            sizes[name] = n * ITEM_SIZES[dtype] * stored
            assert again[1].params[name]
    if per_head:
        sizes |= {"dq": per_head, "dk": per_head}
    for x in (again[1], grads):  # what these two take exists at the same time
        places = sorted((x.params[name], size) for name, size in sizes.items() if x.params[name])
        assert all(at + size <= other for (at, size), (other, _) in itertools.pairwise(places))
        assert not any(at % 16 for at, _ in places)


def test_cached_chunk_backward_of_some_gradients(seen: Stub) -> None:
    """Sums that nobody asks for are left out; the kernel's own results go where they may be forgotten."""
    request, inputs = backward_call(True, True, False)
    do = torch.randn_like(inputs.v)
    for unwanted, entries in (
        ("dt_bias", "prepare scan grads groups groups sums"),
        ("A_log", "prepare scan grads groups groups sums"),
        ("A_log dt_bias initial_state", "prepare scan grads groups groups"),
        ("q v g beta", "prepare scan grads groups sums"),
    ):
        before = len(seen())
        wanted = tuple(name not in unwanted.split() for name in inputs._fields[:8])
        made = chunk_backward.make_fast_gradients(request, inputs, wanted)
        assert made is not None
        got = made.backward(tuple(inputs), (), do, None)
        assert got is not None and tuple(x is not None for x in got) == wanted
        launches = seen()[before:]
        assert " ".join(x.entry for x in launches) == entries
        scan, grads = launches[1], launches[2]
        holds(scan.params, d_h0=got[7], d_ht=None)
        assert all(grads.params[name] for name in ("dq", "dk", "dv", "dg", "dbeta"))
        assert [bool(grads.params[name]) for name in ("dA_part", "dbias_part")] == list(wanted[5:7])
        if "sums" in entries:
            holds(launches[-1].params, d_A=got[5], d_bias=got[6])


def gated_delta_call(packed: bool, saves: bool) -> tuple[Request, ChunkInputs]:
    d, T, H, HV = Draw(0), 150, 2, 6
    B, N = (1, 3) if packed else (2, 2)
    gate = {n: x if n == "A_log" else x[..., 0] for n, x in d.gate("init", B, T, HV, 1).items()}
    inputs = ChunkInputs(
        q=d.normal(B, T, H, 128),
        k=d.normal(B, T, H, 128),
        v=d.normal(B, T, HV, 128),
        beta=d.normal(B, T, HV, dtype=torch.float32),
        **gate,
        initial_state=d.normal(N, HV, 128, 128, dtype=torch.float32),
        cu_seqlens=pack(10, 100, 30) if packed else None,
    )
    options = MODEL | {"output_final_state": True, "disable_recompute": saves}
    request = request_of("chunk_gated_delta_rule", inputs, **options)
    return on_hopper(dataclasses.replace(request, needs_grad=True)), inputs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_gated_delta_backward(seen: Stub, monkeypatch: pytest.MonkeyPatch, packed: bool, saves: bool) -> None:
    """Every launch is told where the same workspace lies, and what the forward saved of it."""
    monkeypatch.setattr(choice, "most_cut", lambda count: 0)
    request, inputs = gated_delta_call(packed, saves)
    out = gated_delta.forward(request, inputs)
    do, dht = torch.randn_like(inputs.v), torch.randn(request.state_shape)
    got = gated_delta_gradients.backward(request, inputs, out.saved, OutputGrads(do, dht))
    forward, backward = seen()[:2], seen()[2:]
    kept = "_keeping" if saves else ""
    assert [x.entry for x in forward] == ["chunk_records", f"walk_records{kept}"]
    entries = ["chunk_records", "walk_backward", "unit_grads", "gate_sums"]
    assert [x.entry for x in backward] == entries[saves:]
    walk, grads, sums = backward[-3:]
    N, slots = (3, 150 // 64 + 3) if packed else (2, 6)
    records = (slots * 2,)
    assert tuple(x.grid for x in forward) == (*records, 2 * 6 * N)
    for x in (*forward, *backward):
        if x.entry == "chunk_records":
            holds(x.params, units=slots * 2)
    walks = 2 * 6 * N * (1 if saves else 2)  # half a state a block
    assert tuple(x.grid for x in backward) == (*records * (not saves), walks, slots * 2, 6)
    named = {n: getattr(inputs, n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")}
    for x in (*forward, *backward[:-1]):
        holds(x.params, **named, T=150, N=N, H=2, HV=6, NT=3, scale=128**-0.5)
        holds(x.params, gate=GATES["softplus"], g_type=TYPES["bfloat16"], beta_type=TYPES["float32"])
        strided(x.params, **{n: named[n] for n in ("q", "k", "v")})
        assert bool(x.params["flags"] & FLAGS["NONZERO_BETA"]) == (saves or x not in forward)
        assert bool(x.params["flags"] & FLAGS["CLEAR_TAIL"]) == packed
    for x in (walk, grads):
        holds(x.params, d_o=do, d_ht=dht, d_h0=got.initial_state, h0=inputs.initial_state, units=slots * 2)
        holds(x.params, dq=got.q, dk=got.k, dv=got.v, dg=got.g, dbeta=got.beta)
        assert all(x.params[name] == walk.params[name] != 0 for name in unit_bytes())
    units = slots * 6
    if saves:
        saved = [walk.params[name] for name in ("records", "u", "states")]
        assert saved == [forward[1].params[name] for name in ("records", "u", "states")]
        assert saved[0] == forward[0].params["records"] == out.saved[0].data_ptr()
    else:
        assert backward[0].params["records"] == walk.params["records"]
    places = sorted((walk.params[name], units * size) for name, size in unit_bytes().items())
    assert all(at + size <= other for (at, size), (other, _) in itertools.pairwise(places))
    assert not any(at % 16 for at, _ in places)
    holds(sums.params, d_A=got.A_log, d_bias=got.dt_bias, slots=slots, HV=6)
    holds(sums.params, **{name: grads.params[name] for name in ("dA_part", "dbias_part")})


def test_recurrent_reads_one_pool_and_writes_another(seen: Stub) -> None:
    d, N, HV, K = Draw(0), 3, 4, 128
    inputs = RecurrentInputs(
        q=d.normal(N, 2, 2, K),
        k=d.normal(N, 2, 2, K),
        v=d.normal(N, 2, HV, K),
        beta=d.normal(N, 2, HV),
        **d.gate("random", N, 2, HV, K),
        initial_state=d.normal(7, HV, K, K, dtype=torch.float32),
        state_indices=torch.tensor([5, 0, 2], dtype=torch.int32),
        has_initial_state=torch.tensor([True, False, True]),
        write_indices=torch.zeros(N, 5, dtype=torch.int64),
        write_pool=d.normal(9, 2 * HV, K, K, dtype=torch.float32)[:, :HV],
    )
    options = BOUNDED_MODEL | {"inplace_state": True, "output_final_state": True, "null_index": 0}
    request = on_hopper(request_of("fused_recurrent_kda", inputs, **options))
    assert recurrent.forward(request, inputs).final_state is inputs.write_pool
    step = recurrent.make_fast_call(request, inputs)
    assert step is not None and step(tuple(inputs)) is not None
    first, second = seen()
    for x in (first, second):
        holds(x.params, h0=inputs.initial_state, ht=inputs.write_pool, null_index=0)
        holds(x.params, h0_row=HV * K * K, ht_row=2 * HV * K * K, indices_row=1, writes_row=5)
        holds(x.params, indices=inputs.state_indices, writes=inputs.write_indices)
        holds(x.params, has_initial=inputs.has_initial_state)
        flags = FLAGS["L2NORM"] | FLAGS["BETA_SIGMOID"] | FLAGS["WRITES64"] | FLAGS["SCATTER_TOKENS"]
        assert x.params["flags"] == flags


def test_chosen_checkpoints(seen: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that follows takes up what the others kept."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    d = Draw(0)
    wide = d.normal(1, 300, 4, 256)
    inputs = ChunkInputs(
        q=d.normal(1, 300, 2, 128),
        k=wide[:, :, :2, :128],
        v=wide[..., 128:],
        beta=d.normal(1, 300, 4),
        **d.gate("random", 1, 300, 4, 128),
        initial_state=d.normal(3, 4, 128, 128, dtype=torch.float32),
        cu_seqlens=pack(10, 200, 70),
        state_indices=torch.tensor([2, 0, 1]),
        checkpoint_offsets=torch.tensor([42, 0, 16, 10], dtype=torch.int32),
        checkpoint_indices=torch.tensor([0, -1, 1, 2]),
    )
    request = on_hopper(request_of("chunk_kda", inputs, inplace_state=True, **BOUNDED_MODEL))
    step = chunk_forward.make_fast_call(request, inputs)
    assert step is not None and step(tuple(inputs)) is not None
    chunk_forward.forward(request, inputs)
    named = {
        name: getattr(inputs, name) for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
    }
    found = seen()
    assert len(found) == 4
    for main, tail in (found[:2], found[2:]):
        assert (main.entry, tail.entry, tail.grid, tail.block) == (
            "chunk_forward",
            "checkpoint_tail",
            4 * 4 * 4,
            128,
        )
        for x in (main, tail):
            marked = {"mark_offsets": inputs.checkpoint_offsets, "mark_rows": inputs.checkpoint_indices}
            holds(x.params, **marked, marks=4)
            assert x.params["mark_states"] == main.params["mark_states"] != 0
            assert x.params["flags"] & FLAGS["MARK_ROWS64"]
            assert not x.params["flags"] & FLAGS["MARK_OFFSETS64"]
        holds(tail.params, **named, ht=inputs.initial_state, reads=inputs.state_indices, ht_row=4 * 128 * 128)
        holds(tail.params, T=300, N=3, H=2, HV=4, step=32, null_index=-1, lower_bound=-5.0)
        holds(tail.params, g_type=TYPES["bfloat16"])
        strided(tail.params, **{name: named[name] for name in ("k", "v", "g")})


def test_chosen_checkpoints_in_segments(seen: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of states before checkpoints, of records of cut chunks, of those of whole chunks, in this order."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: True)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(2))
    d, HV = Draw(0), 4
    inputs = ChunkInputs(
        **{name: d.normal(1, 300, HV, 128) for name in ("q", "k", "v")},
        beta=d.normal(1, 300, HV),
        **d.gate("random", 1, 300, HV, 128),
        initial_state=d.normal(3, HV, 128, 128, dtype=torch.float32),
        cu_seqlens=pack(10, 200, 70),
        state_indices=torch.tensor([2, 0, 1]),
        checkpoint_offsets=torch.tensor([42, 0, 16, 10], dtype=torch.int32),
        checkpoint_indices=torch.tensor([0, -1, 1, 2]),
    )
    request = on_hopper(request_of("chunk_kda", inputs, inplace_state=True, null_index=0, **BOUNDED_MODEL))
    step = chunk_forward.make_fast_call(request, inputs)
    assert step is not None and step(tuple(inputs)) is not None
    chunk_forward.forward(request, inputs)
    found = seen()
    entries = ["prepare_marked", "maps", "chain", "output"]
    assert [x.entry for x in found] == 2 * entries
    states, records, units = 4 * HV * 65536, 4 * HV * 57856, (300 // 64 + 3) * HV
    for prepare, *others in (found[:4], found[4:]):
        marked = {"mark_offsets": inputs.checkpoint_offsets, "mark_rows": inputs.checkpoint_indices}
        holds(prepare.params, **marked, marks=4, null_index=0, units=units)
        assert prepare.grid == 4 * HV + units
        for x in others:
            holds(x.params, **marked, marks=4, null_index=0)
            assert prepare.params["last"] - x.params["mark_states"] == states
            assert x.params["chunk_operands"] - prepare.params["last"] == records
            assert x.params["addends"] - x.params["chunk_operands"] == 57856 * units


FRESH = {
    "o",
    "ht",
    "launch",
    "chunk_operands",
    "ready",
    "addends",
    "maps",
    "starts",
    "kg",
    "qg",
    "w",
    "u",
    "aqk",
    "last",
}
"""Parameters that are memory of the call's own, and the number of a launch."""


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("pools", [False, True])
def test_cached_chunk_forward(seen: Stub, monkeypatch: pytest.MonkeyPatch, few: bool, pools: bool) -> None:
    """What is packed once is what a first call packs."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: few)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(2))
    d = Draw(0)
    inputs = ChunkInputs(
        q=d.normal(1, 300, 2, 128),
        k=d.normal(1, 300, 2, 128),
        v=d.normal(1, 300, 4, 128),
        beta=d.normal(1, 300, 4),
        **d.gate("random", 1, 300, 4, 128),
        initial_state=d.normal(3, 4, 128, 128, dtype=torch.float32),
        cu_seqlens=pack(10, 200, 90),
    )
    options = BOUNDED_MODEL | {"output_final_state": True}
    if pools:
        inputs = inputs._replace(
            state_indices=torch.tensor([2, 0, 1], dtype=torch.int32),
            has_initial_state=torch.tensor([True, True, False]),
            write_indices=torch.tensor([1, 4, 0]),
            write_pool=d.normal(5, 8, 128, 128, dtype=torch.float32)[:, 2:6],
            out=torch.empty_like(inputs.v),
        )
        options |= {"inplace_state": True, "null_index": 0}
    request = on_hopper(request_of("chunk_kda", inputs, **options))
    step = chunk_forward.make_fast_call(request, inputs)
    assert step is not None
    got = step(tuple(inputs))
    assert got is not None
    chunk_forward.forward(request, inputs)
    calls = seen()
    again, first = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert len(first) == (4 if few else 1)
    for x, y in zip(again, first, strict=True):
        assert x._replace(params={}) == y._replace(params={})
        assert {k: v for k, v in x.params.items() if k not in FRESH} == {
            k: v for k, v in y.params.items() if k not in FRESH
        }
        assert {k for k in FRESH & set(x.params) if x.params[k]} == {
            k for k in FRESH & set(y.params) if y.params[k]
        }
    holds(again[-1].params, o=got[0], ht=got[1], h0=inputs.initial_state, marks=0)
    rows = {"reads": "state_indices", "has_initial": "has_initial_state", "writes": "write_indices"}
    holds(again[-1].params, **{name: getattr(inputs, given) for name, given in rows.items()})
    size = 4 * 128 * 128
    holds(again[-1].params, h0_row=size, ht_row=2 * size if pools else size, null_index=0 if pools else -1)
    if pools:
        assert got[0] is inputs.out and got[1] is inputs.write_pool
        assert (
            again[-1].params["flags"] & FLAGS["WRITES64"] and not again[-1].params["flags"] & FLAGS["INDEX64"]
        )
    assert bool(again[-1].params["flags"] & FLAGS["CLEAR_TAIL"]) != pools
    if few:
        assert again[0].params["last"] == again[-1].params["chunk_operands"]
        assert again[-1].params["v"] == again[0].params["v"] == inputs.v.data_ptr()
        sizes = [
            [x.params[k] - x.params["chunk_operands"] for k in ("addends", "maps", "starts")]
            for x in (again[-1], first[-1])
        ]
        assert sizes[0] == sizes[1]


def test_cached_chunk_forward_side_by_side(seen: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of its two launches."""
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: True)
    inputs = draw(130, 1, 2, B=2, initial_state=torch.randn(2, 2, 128, 128))
    request = on_hopper(request_of("chunk_kda", inputs, output_final_state=True, **MODEL))
    step = chunk_forward.make_fast_call(request, inputs)
    assert step is not None
    got = step(tuple(inputs))
    assert got is not None
    chunk_forward.forward(request, inputs)
    again, first = seen()[:2], seen()[2:]
    assert [x.entry for x in again] == [x.entry for x in first] == ["prepare_units", "walk"]
    for x, y in zip(again, first, strict=True):
        assert x._replace(params={}) == y._replace(params={})
        assert {k: v for k, v in x.params.items() if k not in FRESH} == {
            k: v for k, v in y.params.items() if k not in FRESH
        }
        assert {k for k in FRESH & set(x.params) if x.params[k]} == {
            k for k in FRESH & set(y.params) if y.params[k]
        }
    holds(again[1].params, o=got[0], ht=got[1], h0=inputs.initial_state)
    assert again[0].params["ready"] == again[1].params["ready"]
    assert again[0].params["last"] == again[1].params["chunk_operands"]
