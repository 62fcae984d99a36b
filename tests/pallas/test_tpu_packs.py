"""Packs on the TPU kernels, which read them where they lie: sequences share blocks of 128 rows, and nothing of one is
read for another."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads, to_jax
from server_cases import padded_training

import kdacore
from kdacore.types import InputGrads, OutputGrads, Outputs, Request
from kdacore_pallas.tpu import chunk_backward, chunk_forward, plan, report_calls, schedule, verifiers
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.schedule import CLOSES, FIRST, LAST, OPENS

TOKENS = ("q", "k", "v", "g", "beta")
INTERPRET = Launch(interpret=True)


@partial(jax.jit, static_argnums=(0, 1))
def forward(request: Request, keep: bool, inputs: Any) -> Outputs:
    return chunk_forward.forward(request, inputs, request.H, INTERPRET, keep)


@partial(jax.jit, static_argnums=0)
def backward(request: Request, inputs: Any, saved: Any, grads: OutputGrads) -> InputGrads:
    return chunk_backward.backward(request, inputs, saved, grads, request.H, INTERPRET)


def as_jax(grads: OutputGrads) -> OutputGrads:
    return OutputGrads(*(None if x is None else jnp.asarray(x) for x in grads))


def equal(a: Any, b: Any) -> bool:
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


# --- which steps visit which rows -----------------------------------------------------------------------------------


def check_visits(T: int, C: int, visits: Any, cu: np.ndarray, no_slot: np.ndarray) -> None:
    """Every token has one visit, of its sequence; a block's visits follow one another, and so do a sequence's."""
    seq, flags, end, first, block = (np.asarray(a) for a in visits)
    N, blocks = len(cu) - 1, -(-T // C)
    assert len(seq) == blocks + N - 1
    assert (np.diff(block) >= 0).all() and set(block) == set(range(blocks))
    assert (np.diff(seq) >= 0).all() and set(seq) == set(range(N))
    owner = np.full(blocks * C, -1)
    for s, a, b, n in zip(seq, first, end, block, strict=True):
        assert 0 <= a <= C and 0 <= b <= C
        assert (owner[n * C + a : n * C + b] == -1).all()
        owner[n * C + a : n * C + b] = s
    want = np.full(blocks * C, -1)
    for s in np.flatnonzero(~no_slot):
        want[cu[s] : cu[s + 1]] = s
    assert np.array_equal(owner, want)
    for name, edge in ((OPENS, 0), (CLOSES, -1)):
        at = np.flatnonzero(flags & name)
        assert at.tolist() == [np.flatnonzero(block == n)[edge] for n in range(blocks)]
    for s in range(N):
        own = np.flatnonzero(seq == s)
        begin, over = (own[(flags[own] & name) != 0] for name in (FIRST, LAST))
        assert len(begin) == len(over) == 1 and begin[0] == own[0]
        rows = np.flatnonzero(end > first)
        assert not len(rows[seq[rows] == s]) or rows[seq[rows] == s][-1] <= over[0]


@pytest.mark.parametrize(("T", "N"), [(37, 6), (32, 5), (4, 3), (1, 1)])
def test_every_token_has_one_visit(T: int, N: int) -> None:
    """Random borders, many of them at blocks' borders or twice the same, with padding and without; sequences without a
    slot."""
    C, rng = 4, np.random.default_rng(T)
    grid = plan.ChunkGrid(1, T, -(-T // C) + N - 1, C, 1, 1, 8, 8, 1, 1, True, True)
    run = jax.jit(lambda cu, no_slot: schedule.packed_schedule(grid, cu, no_slot).arrays())
    for case in range(60):
        cu = np.sort(rng.integers(0, T + 1, N + 1))
        cu = cu // C * C if case % 3 == 0 else cu
        cu[0], cu[-1] = 0, (T, cu[-1], 0)[case % 4 % 3]
        cu = np.minimum(cu, cu[-1])
        no_slot = rng.integers(0, 4, N) == 0
        check_visits(T, C, run(jnp.asarray(cu), jnp.asarray(no_slot)), cu, no_slot)


def test_offsets_that_break_the_contract_stay_within_the_arrays() -> None:
    """Values are not checked on the device: whatever they are, no step leaves the arrays."""
    grid = plan.ChunkGrid(1, 37, 15, 4, 1, 1, 8, 8, 1, 1, True, True)
    for cu in ([0, 99, 3, -7, 50, 2, 37], [5, 5, 5, 5, 5, 5, 5], [2**31 - 1] * 3 + [-(2**31)] * 4):
        found = schedule.packed_schedule(grid, jnp.asarray(cu, jnp.int32))
        assert found.first is not None and found.block is not None
        for a, top in ((found.seq, 5), (found.block, 9), (found.first, 4), (found.end, 4)):
            assert int(jnp.min(a)) >= 0 and int(jnp.max(a)) <= top


# --- numbers --------------------------------------------------------------------------------------------------------

EDGES = (0, 1, 15, 16, 17, 0, 63, 64, 65, 128, 0)
CASES = {
    "GVA, v first": Case(
        lengths=EDGES, H=1, HV=2, K=128, V=8, gate="softplus", beta_sigmoid=True, v_first=True, seed=71
    ),  # keys in whole registers, values not
    "values in whole registers": Case(lengths=(70, 0, 58, 129), H=2, HV=2, K=16, V=128, gate="softplus", seed=72),
    "gdn, mixed gates": Case(
        op="chunk_gated_delta_rule", lengths=(1, 17, 110, 20), H=2, HV=2, K=8, V=16, gates="mixed", seed=73
    ),
    "no states": Case(lengths=(130, 0, 126), HV=1, K=24, V=40, initial=False, final=False, seed=74),
    "bf16 inputs and states": Case(
        lengths=(65, 63, 5), dtype="bfloat16", state_dtype="bfloat16", HV=1, K=64, V=64, seed=75
    ),
    "near-collinear keys": Case(
        lengths=(100, 200), HV=1, K=64, V=64, gates="zero", collinear=True, initial=False, seed=76
    ),
    "all empty": Case(lengths=(0, 0, 0), HV=1, K=8, V=8, gate="softplus", seed=77),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "GVA, v first" else pytest.mark.exhaustive) for n in CASES]
)
def test_edge_lengths(name: str) -> None:
    """With NaN after the last sequence."""
    request, inputs, grads = padded_training(CASES[name], 140)
    end = request.T - 140
    arrays, d = to_jax(inputs), as_jax(grads)
    out = forward(request, True, arrays)
    check_forward(out, request, inputs, factor=2)
    assert not np.asarray(out.o)[:, end:].any()
    assert out.saved[0].shape[1] == -(-request.T // 128) and np.isfinite(np.asarray(out.saved[0])).all()
    got = backward(request, arrays, out.saved, d)
    check_backward(got, request, inputs, grads, factor=2)
    for n in TOKENS:
        assert not np.asarray(getattr(got, n))[:, end:].any(), n


@pytest.mark.parametrize(
    "name", ["GVA, v first", pytest.param("gdn, mixed gates", marks=pytest.mark.exhaustive)]
)
def test_what_is_in_one_sequence_stays_there(name: str) -> None:
    """NaN in all of a sequence that shares its blocks with others, and in its states: the others keep their bits."""
    request, inputs, grads = padded_training(CASES[name], 140)
    at = int(np.argmax(np.diff(inputs.cu_seqlens) == 17))
    own = np.s_[inputs.cu_seqlens[at] : inputs.cu_seqlens[at + 1]]
    poisoned = {n: np.array(getattr(inputs, n)) for n in (*TOKENS, "initial_state")}
    do, dfinal = np.array(grads.o), np.array(grads.final_state)
    for a in (*(poisoned[n] for n in TOKENS), do):
        a[:, own] = np.nan
    poisoned["initial_state"][at] = dfinal[at] = np.nan
    results = []
    for x, d in ((inputs, grads), (inputs._replace(**poisoned), OutputGrads(do, dfinal))):
        out = forward(request, True, to_jax(x))
        got = backward(request, to_jax(x), out.saved, as_jax(d))
        rows = [np.delete(np.asarray(a), own, 1) for a in (out.o, *got[:5])]
        results.append(rows + [np.delete(np.asarray(a), at, 0) for a in (out.final_state, got.initial_state)])
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a).all() and equal(a, b)


FOLLOWED = {
    "in the same sequence": (20, 115, 77),
    "by others in the same block": (20, 115, 15, 3, 0, 130),
    "by both": (20, 115, 40, 9, 190),
}
QUICK = ("chunk_kda", "by others in the same block")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("op", "how"),
    [
        pytest.param(op, how, marks=() if (op, how) == QUICK else pytest.mark.exhaustive)
        for op in ("chunk_kda", "chunk_gated_delta_rule")
        for how in FOLLOWED
    ],
)
def test_later_tokens_change_no_bit(op: str, how: str) -> None:
    """Of a loss on the first 150 tokens of a pack."""
    t, packs = 150, ((20, 115, 15), FOLLOWED[how])
    base = build(Case(op=op, lengths=packs[0], HV=1, K=16, V=16, gates="mixed", initial=False, final=False))
    results = []
    for n, lengths in enumerate(packs):
        case = Case(
            op=op, lengths=lengths, HV=1, K=16, V=16, gates="mixed", initial=False, final=False, seed=80 + n
        )
        request, other = build(case)
        rows = {m: np.concatenate([getattr(base[1], m), getattr(other, m)[:, t:]], 1) for m in TOKENS}
        inputs = to_jax(other._replace(**rows))
        do = np.zeros_like(rows["v"])
        do[:, :t] = output_grads(base[0]).o
        out = forward(request, True, inputs)
        got = backward(request, inputs, out.saved, OutputGrads(jnp.asarray(do)))
        results.append([np.asarray(a)[:, :t] for a in (out.o, *got[:5])])
    for a, b in zip(*results, strict=True):
        assert equal(a, b)


# --- public calls ---------------------------------------------------------------------------------------------------


def loss(x: dict[str, Any], cu: Any, backend: str = "pallas") -> Any:
    o, state = kdacore.chunk_kda(
        **x, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, output_final_state=True, backend=backend
    )[:2]
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_PALLAS_INTERPRET", "1")
    kdacore.config.refresh()


@pytest.mark.usefixtures("_interpreted")
def test_no_rows_are_moved() -> None:
    """The program of a gradient gathers and scatters nothing as long as the rows."""
    request, inputs = build(Case(lengths=(30, 0, 120, 5), HV=1, K=8, V=8))
    x = {n: jnp.asarray(getattr(inputs, n)) for n in (*TOKENS, "initial_state")}
    program = str(jax.make_jaxpr(jax.grad(loss))(x, jnp.asarray(inputs.cu_seqlens)))
    assert program.count("name=kdacore_chunk_backward") == 1
    moved = re.findall(r":\w+\[([\d,]*)\] = (?:gather|scatter\S*|dynamic_slice|sort)\b", program)
    sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in moved]
    assert sizes and max(sizes) < request.T


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("borders", ["alike", "apart"])
def test_under_vmap(borders: str) -> None:
    """Packs of equal or of different borders."""
    lengths = ((20, 0, 25), (20, 0, 25)) if borders == "alike" else ((20, 0, 25), (1, 43, 1))
    built = [build(Case(lengths=n, HV=1, K=8, V=8, seed=90 + i))[1] for i, n in enumerate(lengths)]
    x = {n: jnp.stack([jnp.asarray(getattr(b, n)) for b in built]) for n in (*TOKENS, "initial_state")}
    cu = jnp.stack([jnp.asarray(b.cu_seqlens) for b in built])
    axes = (0, None if borders == "alike" else 0)
    got = jax.jit(jax.vmap(jax.grad(loss), axes))(x, cu[0] if borders == "alike" else cu)
    for i in range(2):
        want = jax.jit(jax.grad(partial(loss, backend="xla")))({n: a[i] for n, a in x.items()}, cu[i])
        for n, a in got.items():
            assert error(a[i], want[n]) < 1e-5, n


def test_the_table_of_a_pack_in_scalar_memory() -> None:
    """Five numbers a visit."""
    dense = report_calls.chunk_request(report_calls.Size(T=2**20), "v5e")
    request = replace(dense, packed=True)
    assert verifiers.chunk_smem(dense) is None
    assert verifiers.chunk_smem(replace(request, N=4916)) is None  # 13107 visits
    reason = verifiers.chunk_smem(replace(request, N=4917))
    assert reason is not None and reason.code == "smem"
