"""Calls as servers make them, on the xla backend: values, and that nothing else is read or written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, check_backward, check_forward, to_jax
from server_cases import ROWS, TOKENS, Call, ServerCase, check, make, padded_training, served

import kdacore
from kdacore.types import (
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    Device,
    IntraInputs,
    OutputGrads,
    RecomputeInputs,
)
from kdacore_pallas.xla import chunk_forward_gpu, entry_points, stages, state_pool

GDN = "chunk_gated_delta_rule"
STEP = "fused_recurrent_kda"
small = Case(K=16, V=16, H=1, HV=2, gate="softplus")
pack = replace(small, lengths=(70, 0, 33, 16, 0))
dense = replace(small, B=3, T=70)
steps = replace(small, op=STEP, B=4, T=1)

CHUNK = {
    "padded pack": ServerCase(pack, padding=21),
    "padded pack, nothing else": ServerCase(replace(small, lengths=(0, 0)), padding=5),
    "slots of a pack": ServerCase(pack, 7, [3, 5, -1, 2, -7]),
    "slots of dense inputs": ServerCase(dense, 0, [3, 8, 2], null_index=8),
    "no slot at all": ServerCase(dense, 0, [-1, 8, -1], inplace_state=True, null_index=8),
    "some start from zeros": ServerCase(pack, 0, [3, 5, 1, 2, 4], has_initial_state=[1, 0, 0, 1, 1]),
    "states without a pool, some unread": ServerCase(dense, has_initial_state=[True, False, True]),
    "in place": ServerCase(pack, 3, [3, 5, -1, 2, 0], inplace_state=True),
    "in place without indices": ServerCase(dense, inplace_state=True),
    "in place, V first, bfloat16 states": ServerCase(
        replace(pack, v_first=True, state_dtype="bfloat16"), 3, [3, 5, -1, 2, 0], inplace_state=True
    ),
    "rows to write": ServerCase(
        pack, 0, [3, 3, 7, 2, 7], write_indices=[0, 7, 1, -1, 4], inplace_state=True, null_index=7
    ),
    "a pool to write": ServerCase(dense, 0, [3, 3, 6], write_indices=[0, 6, 3], write_pool=True, inplace_state=True),
    "a pool to write, rows as read": ServerCase(dense, 0, [3, -1, 6], write_pool=True, inplace_state=True),
    "a pool to write, zeros at first": ServerCase(
        replace(pack, initial=False), 0, write_indices=[0, 6, -1, 3, 1], write_pool=True, inplace_state=True
    ),
    "a pool to write, given states": ServerCase(dense, write_indices=[0, 6, 3], write_pool=True, inplace_state=True),
    "checkpoints": ServerCase(
        replace(pack, lengths=(70, 0, 133, 16, 9)), 5, [3, 5, 1, 2, 0], inplace_state=True,
        checkpoint_offsets=[102, 0, 70, 16, 64, 198, 86, 203],
        checkpoint_indices=[4, 6, 7, 8, -1, -1, -1, -1],
    ),
    "checkpoints in one chunk, some nowhere": ServerCase(
        replace(small, T=150), 0, [3], inplace_state=True, write_indices=[-1], write_pool=True,
        checkpoint_offsets=[48, 10**6, 32, 144, -5, 128, 32], checkpoint_indices=[0, -1, 7, 2, 8, 4, 5], null_index=8,
    ),
    "checkpoints of a sequence without a slot": ServerCase(
        replace(pack, lengths=(33, 40, 20)), 0, [3, -1, 2], inplace_state=True,
        checkpoint_offsets=[16, 33, 49, 73], checkpoint_indices=[0, 1, 4, 5],
    ),
    "both kinds of checkpoints": ServerCase(
        replace(pack, lengths=(200, 65), checkpoint_every=64), 0, [3, 4], inplace_state=True,
        checkpoint_offsets=[192, 80, 264, 200], checkpoint_indices=[0, 1, 2, 5],
    ),
    "gdn": ServerCase(
        replace(pack, op=GDN, HV=3), 2, [3, 5, -1, 2, 0], inplace_state=True,
        checkpoint_offsets=[64, 48, 103], checkpoint_indices=[7, 8, 6],
    ),
    "bfloat16": ServerCase(
        replace(pack, dtype="bfloat16", H=2, HV=4), 2, [3, 5, -1, 2, 0], inplace_state=True,
        checkpoint_offsets=[64, 48, 103], checkpoint_indices=[7, 8, 6],
    ),
}  # fmt: skip

RECURRENT = {
    "padded pack": ServerCase(replace(steps, B=1, lengths=(3, 0, 1, 0)), padding=4),
    "slots": ServerCase(steps, 0, [3, -1, 8, 2], inplace_state=True, null_index=8),
    "slots, fresh states": ServerCase(replace(steps, T=3), 0, [3, -1, 8, 2], null_index=8),
    "slots of a pack": ServerCase(replace(steps, B=1, lengths=(3, 2, 1, 0)), 3, [3, -1, 1, -2], inplace_state=True),
    "some start from zeros": ServerCase(steps, 0, [3, 5, 1, -1], has_initial_state=[1, 0, 1, 1], inplace_state=True),
    "rows to write": ServerCase(steps, 0, [3, 3, 1, 0], write_indices=[4, 5, -1, 0], inplace_state=True),
    "a pool to write": ServerCase(
        replace(steps, v_first=True), 0, [3, 3, 1, -1], write_indices=[4, 5, 8, 6], write_pool=True,
        inplace_state=True, null_index=8,
    ),
    "a pool to write, zeros at first": ServerCase(
        replace(steps, initial=False), write_indices=[4, 5, -1, 6], write_pool=True, inplace_state=True
    ),
    "accepted": ServerCase(
        replace(steps, B=3, T=2), 0, [[0, 1, 2], [3, 8, -1], [5, 6, -1]], [2, 0, 1], inplace_state=True, null_index=8
    ),
    "accepted, no slot": ServerCase(
        replace(steps, B=3, T=2), 0, [[0, 1, 2], [3, 8, -1], [5, 6, -1]], [2, 2, 3], inplace_state=True, null_index=8
    ),
    "accepted, last states only": ServerCase(
        replace(steps, B=3, T=2), 0, [[0, 1, 2], [3, 8, -1], [5, 6, -1]], [1, 1, 2], write_indices=[0, 3, 7],
        inplace_state=True,
    ),
    "accepted, other rows": ServerCase(
        replace(steps, B=1, lengths=(2, 1, 0)), 2, [[0, 1], [3, -1], [5, 6]], [1, 1, 2],
        write_indices=[[2, 4], [7, 8], [5, 6]], write_pool=True, inplace_state=True,
    ),
    "a row for each token of a fixed slot": ServerCase(
        replace(steps, B=2, T=3), 0, [0, 3], write_indices=[[0, 1, 2], [4, -1, 5]], inplace_state=True
    ),
    "gdn": ServerCase(
        replace(steps, op="fused_recurrent_gated_delta_rule", state_dtype="bfloat16"), 0, [3, -1, 8, 2],
        inplace_state=True, null_index=8,
    ),
}  # fmt: skip


def some(names: Any, quick: tuple[str, ...]) -> list[Any]:
    """Parameters of a test; those that are not ``quick`` run with the exhaustive tests."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.exhaustive) for n in names]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    some(CHUNK, ("no slot at all", "rows to write", "a pool to write, zeros at first", "checkpoints", "gdn")),
)
def test_chunk(name: str) -> None:
    call = make(CHUNK[name])
    with kdacore.record_selections() as ran:
        check(call, call.run())
    assert ran[-1].backend == "xla"


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    call = make(RECURRENT[name])
    with kdacore.record_selections() as ran:
        check(call, call.run())
    assert ran[-1].backend == "xla"


# --- NumPy and torch callers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(("in place", "checkpoints", "padded pack"), ("checkpoints",)))
def test_chunk_of_host_arrays(name: str) -> None:
    """Rows go to the caller's own arrays, and out is not written where there is no sequence."""
    call = make(CHUNK[name])
    for kind in ("numpy", "torch"):
        _check_host(call, kind)


@pytest.mark.parametrize(
    "name", ["slots", "accepted, other rows", "accepted, last states only", "a pool to write"]
)
def test_recurrent_of_host_arrays(name: str) -> None:
    call = make(RECURRENT[name])
    for kind in ("numpy", "torch"):
        _check_host(call, kind)


def _check_host(call: Call, kind: str) -> None:
    arrays = call.of_kind(kind)
    out = call.out.copy() if kind == "numpy" else torch.from_numpy(call.out.copy())
    result = served(call)[0](arrays, out=out)
    assert result[0] is out
    check(call, result, out=True)
    if call.request.inplace_state:
        assert result[1] is arrays[call.request.written_pool]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_host_pools_of_any_row_stride(kind: str) -> None:
    """And nothing of a pool is converted but the rows that are named."""
    call = make(RECURRENT["slots"])
    arrays = call.of_kind(kind)
    pool = arrays["initial_state"]
    wide = np.full((ROWS, 3, *pool.shape[1:]), 5, np.float32)
    wide = wide if kind == "numpy" else torch.from_numpy(wide)
    wide[:, 1] = pool
    arrays["initial_state"] = wide[:, 1]
    check(call, served(call)[0](arrays))
    assert (wide[:, ::2] == 5).all()


def test_host_indices_are_checked() -> None:
    call = make(ServerCase(dense, 0, [3, 5, 1], inplace_state=True))
    for name, changed in (("state_indices", [3, 5, ROWS]), ("state_indices", [3, 3, 1])):
        arrays = call.of_kind("numpy") | {name: np.array(changed)}
        with pytest.raises(kdacore.ContractError, match=name):
            served(call)[0](arrays)


# --- under JAX's transformations ----------------------------------------------------------------------------


def copies(text: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of a compiled program that copy an array of this shape."""
    size = f"f32[{','.join(map(str, shape))}]"
    return [line for line in text.splitlines() if size in line.split("=")[-1][:80] and " copy(" in line]


@pytest.mark.parametrize(
    "server",
    [
        CHUNK["checkpoints"],
        pytest.param(
            ServerCase(dense, 0, [3, -1, 6], write_indices=[0, 6, 3], write_pool=True, inplace_state=True),
            marks=pytest.mark.exhaustive,
        ),
        RECURRENT["slots"],
        RECURRENT["accepted"],
    ],
    ids=["chunk", "chunk, another pool", "recurrent", "recurrent, a row for each token"],
)
def test_a_donated_pool_is_updated_in_its_own_memory(server: ServerCase) -> None:
    """One program for all indices and offsets, which copies no pool."""
    call = make(server)
    run, arrays = served(call)
    pool = arrays.pop(call.request.written_pool)
    name = call.request.written_pool
    program = jax.jit(lambda pool, x: run({**x, name: pool}), donate_argnums=0)
    compiled = program.lower(pool, arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert not copies(compiled.as_text(), pool.shape)
    at = pool.unsafe_buffer_pointer()
    result = compiled(pool, arrays)
    assert result[1].unsafe_buffer_pointer() == at and pool.is_deleted()
    check(call, result)


def test_new_offsets_and_slots_run_the_same_program() -> None:
    servers = [
        replace(
            CHUNK["checkpoints"],
            checkpoint_offsets=offsets,
            state_indices=slots,
            case=replace(pack, lengths=lengths),
        )
        for offsets, slots, lengths in (
            ([102, 0, 70, 16, 64, 198, 86, 203], [3, 5, 1, 2, 0], (70, 0, 133, 16, 9)),
            ([16, 48, 0, 32, -9, 0, 0, 999], [3, -1, 1, -1, 0], (80, 0, 83, 60, 5)),
        )
    ]
    calls = [make(server) for server in servers]
    program = jax.jit(served(calls[0])[0])
    for call in calls:
        check(call, program(call.of_kind("jax")))
    assert program._cache_size() == 1


def test_shard_map_over_heads() -> None:
    """Pools split over heads, indices on every device."""
    call = make(replace(CHUNK["checkpoints"], case=replace(pack, lengths=(70, 0, 133, 16, 9), H=2, HV=2)))
    run, arrays = served(call)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("heads",))
    tokens, per_head, pool = P(None, None, "heads"), P("heads"), P(None, "heads")
    named = dict.fromkeys(TOKENS, tokens) | {"A_log": per_head, "dt_bias": per_head, "initial_state": pool}
    specs = {n: named.get(n, P()) for n in arrays}
    split = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=(tokens, pool))
    check(call, jax.jit(split)(arrays))


def test_vmap() -> None:
    call = make(ServerCase(replace(dense, B=1, T=20), 0, [3], inplace_state=True))
    run, arrays = served(call)
    both = {n: jnp.stack([x, x]) for n, x in arrays.items()}
    both["state_indices"] = jnp.array([[3], [-1]])
    o, pool = jax.vmap(run)(both)
    check(call, (o[0], pool[0]))
    assert not o[1].any() and np.array_equal(pool[1], arrays["initial_state"], equal_nan=True)


def test_x64_mode_and_strict_promotion() -> None:
    call = make(CHUNK["checkpoints"])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        run, arrays = served(call)
        wide = {n: x.astype("int64") if x.dtype == "int32" else x for n, x in arrays.items()}
        for got, want in zip(jax.eval_shape(run, wide), jax.eval_shape(run, arrays), strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype == "float32"


BF16 = replace(dense, dtype="bfloat16")
GPU = {
    "pack": ServerCase(
        replace(pack, dtype="bfloat16", lengths=(70, 0, 133, 16, 9)), 5, [3, 5, 1, 2, -1], inplace_state=True,
        checkpoint_offsets=[102, 0, 70, 16, 64, 198, 86, 203],
        checkpoint_indices=[4, 6, 7, 8, -1, -1, -1, -1],
    ),
    "dense": ServerCase(BF16, 0, [3, -1, 6], has_initial_state=[0, 1, 1], inplace_state=True),
    "dense, not normalised": ServerCase(replace(BF16, l2norm=False), 0, [3, -1, 6]),
}  # fmt: skip


@pytest.mark.parametrize("name", some(GPU, ("pack",)))
def test_the_program_for_gpus(name: str) -> None:
    """Run on a CPU."""
    call = make(GPU[name])
    request = replace(call.request, device=Device("cuda", 0, "sm_90"))
    assert chunk_forward_gpu.serves(request)

    def forward(inputs: Any) -> Any:
        return tuple(state_pool.around(chunk_forward_gpu.forward, request, inputs)[:2])

    check(call, jax.jit(forward)(call.inputs()))


# --- what must not depend on what ---------------------------------------------------------------------------


def test_checkpoints_do_not_depend_on_later_tokens() -> None:
    call = make(CHUNK["checkpoints in one chunk, some nowhere"])
    changed = make(CHUNK["checkpoints in one chunk, some nowhere"])
    for n in TOKENS:
        changed.arrays[n][:, 128:] = np.nan
    run, _ = served(call)
    program = jax.jit(run)
    one, two = (np.asarray(program(x.of_kind("jax"))[1]) for x in (call, changed))
    rows = [7, 5, 0, 4]  # the checkpoints at 32, 48 and 128
    assert np.array_equal(one[rows], two[rows]) and np.isfinite(one[rows]).all()


def test_padding_changes_no_bit() -> None:
    """Other values in tokens of no sequence, or of one without a slot, and in rows that are not read."""
    server = CHUNK["slots of a pack"]
    clean, poisoned = make(server, poison=False), make(server)
    program = jax.jit(served(clean)[0])
    for one, two in zip(*(program(x.of_kind("jax")) for x in (clean, poisoned)), strict=True):
        assert np.array_equal(one, two)


# --- padded packs train, and have stages --------------------------------------------------------------------


@pytest.mark.parametrize("op", some(("chunk_kda", GDN, STEP), ("chunk_kda",)))
def test_gradients_of_a_padded_pack(op: str) -> None:
    lengths = (3, 0, 2, 0) if op == STEP else pack.lengths
    request, inputs, grads = padded_training(replace(pack, op=op, lengths=lengths, beta_sigmoid=True), 40)
    arrays, d = to_jax(inputs), OutputGrads(*(jnp.asarray(x) for x in grads))
    if op == STEP:
        got = entry_points.recurrent_backward(request, arrays, (), d)
    else:
        out = entry_points.chunk_forward(request, arrays)
        check_forward(out, request, inputs)
        got = entry_points.chunk_backward(request, arrays, out.saved, d)
    for n in TOKENS:
        assert not np.asarray(getattr(got, n))[:, inputs.cu_seqlens[-1] :].any(), n
    check_backward(got, request, inputs, grads)


def test_stages_of_a_padded_pack() -> None:
    """The pipeline of all five; what each of them gives after the last sequence is zero."""
    call = make(ServerCase(replace(pack, l2norm=False, gate="log"), padding=9))
    given, end = call.inputs(), call.arrays["cu_seqlens"][-1]
    request = replace(call.request, chunk_size=64)

    @jax.jit
    def pipeline(x: Any) -> Any:
        cu = {"cu_seqlens": x.cu_seqlens}
        gc = stages.chunk_gate(request, ChunkGateInputs(x.g, **cu))
        pair = stages.chunk_intra(request, IntraInputs(x.q, x.k, gc, x.beta, **cu))
        made = stages.recompute_w_u(request, RecomputeInputs(x.k, x.v, x.beta, gc, pair.Akk, **cu))
        start = {"initial_state": x.initial_state}
        h = stages.chunk_state(request, ChunkStateInputs(made.kg, made.w, made.u, gc, **start, **cu))
        o = stages.chunk_output(request, ChunkOutputInputs(x.q, h.v_new, gc, pair.Aqk, h.h, **cu))
        return (gc, *pair, *made[:3], h.v_new, o), h.final_state

    per_token, state = pipeline(given)
    for x in per_token:
        assert not np.asarray(x)[:, end:].any()
    check(call, (per_token[-1], state))
