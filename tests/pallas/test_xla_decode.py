"""The fused decode ops and records of candidates on the xla backend: values, bits of speculation, and that nothing else
is read or written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from pallas_cases import O_BOUND, STATE_BOUND, error

import kdacore
from kdacore.calls.requests import request_with
from kdacore.oracle.commit import oracle_commit
from kdacore.oracle.decode import oracle_decode
from kdacore.oracle.recurrence import oracle_forward
from kdacore.testing.matrix import plan
from kdacore.testing.random_cases import random_case
from kdacore.testing.random_limits import Limits
from kdacore.testing.suite import run_case
from kdacore.types import CommitInputs, DecodeInputs, RecurrentInputs

H, HV, K, V, W = 1, 2, 16, 8, 4
D = 2 * H * K + HV * V
KDA, GDN = "fused_decode_kda", "fused_decode_gated_delta_rule"
GATES = {KDA: (HV, K), GDN: (HV,)}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
SERVE: dict[str, Any] = {**FLAGS, "inplace_state": True, "output_final_state": True, "null_index": 0}
N, MOST, SLOTS = 4, 3, 9
SLOT = np.array([3, 5, 0, 1], np.int32)
"""Of the sequences; the third has none."""
ROW = np.array([2, 1, 3, -1], np.int32)
"""Of their records; the last decodes without."""


def tokens(rng: Any, op: str, count: int, dtype: str = "float32") -> dict[str, Any]:
    """``count`` tokens of a pack."""
    x = {"x": (D,), "g": GATES[op], "beta": (HV,), "z": (HV, V)}
    return {name: rng.standard_normal((1, count, *tail)).astype(DTYPES[dtype]) for name, tail in x.items()}


def weights(rng: Any, op: str, taps: int = W) -> dict[str, Any]:
    x = {"conv_weight": rng.standard_normal((D, taps)), "conv_bias": rng.standard_normal(D)}
    x |= {"norm_weight": 1 + rng.random(V), "A_log": rng.uniform(0, 1, HV)}
    return {n: a.astype(np.float32) for n, a in x.items()} | {"dt_bias": np.full(GATES[op], -2, np.float32)}


def records(op: str, rows: int = N) -> tuple[Any, ...]:
    return tuple(np.full((rows, MOST, *tail), np.nan, np.float32) for tail in ((HV, V), (H, K), GATES[op]))


# --- speculation has the bits of plain decoding -------------------------------------------------------------------


class Server:
    """States and convolution windows in pools; every call has the same shapes, so each is compiled once."""

    def __init__(self, op: str, columns: int, dtype: str = "float32", rows: int = SLOTS) -> None:
        rng = np.random.default_rng(0)
        self.op, self.weights = op, {n: jnp.asarray(a) for n, a in weights(rng, op).items()}
        pool, conv = np.full((rows, HV, K, V), np.nan), np.full((rows, D, columns), np.nan)
        pool[1:SLOTS] = rng.standard_normal((SLOTS - 1, HV, K, V))
        conv[1:SLOTS, :, : W - 1] = rng.standard_normal((SLOTS - 1, D, W - 1))
        self.arrays = {
            "initial_state": jnp.asarray(pool, DTYPES[dtype]),
            "conv_state": jnp.asarray(conv, np.float32),
        }
        self.arrays |= {"records": tuple(map(jnp.asarray, records(op)))}
        self.accepted = np.zeros(N, np.int32)
        self.program = jax.jit(
            lambda x: getattr(kdacore, self.op)(**x, **self.weights, **SERVE, backend="xla")
        )

    def call(self, x: dict[str, Any], *unused: str, **more: Any) -> Any:
        arrays = {n: a for n, a in self.arrays.items() if n not in unused}
        o, *new = self.program({**arrays, **x, **more})
        self.arrays |= dict(zip(arrays, new, strict=True))
        return np.asarray(o)[0]

    def verify(self, x: dict[str, Any]) -> Any:
        return self.call(x, state_indices=SLOT, record_indices=ROW, num_replayed=self.accepted)

    def commit(self) -> None:
        pool, conv = kdacore.commit_records(
            self.arrays["initial_state"], jnp.asarray(SLOT), self.arrays["records"], jnp.asarray(ROW),
            jnp.asarray(self.accepted), conv_state=self.arrays["conv_state"], null_index=0, backend="xla",
        )  # fmt: skip
        self.arrays |= {"initial_state": pool, "conv_state": conv}


def drafts(rng: Any, op: str) -> tuple[dict[str, Any], Any, Any]:
    """A padded pack of candidates, how many each sequence has, and how many of them come true."""
    counts = np.where(ROW < 0, 1, rng.integers(1, MOST + 1, N))
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    accepted = np.array([int(rng.integers(1, n + 1)) for n in counts], np.int32)
    return {**tokens(rng, op, N * MOST), "cu_seqlens": cu}, counts, accepted


def true_tokens(x: dict[str, Any], accepted: Any, t: int) -> dict[str, Any]:
    """Token t of those sequences that accepted one, in a pack of N tokens."""
    there = accepted > t
    cu = np.concatenate([[0], np.cumsum(there)]).astype(np.int32)
    found = {n: np.full_like(a[:, :N], np.nan) for n, a in x.items() if n != "cu_seqlens"}
    for n, a in found.items():
        a[:, : cu[-1]] = x[n][:, x["cu_seqlens"][:-1][there] + t]
    return {**found, "cu_seqlens": cu}


@pytest.mark.parametrize("op", [KDA, pytest.param(GDN, marks=pytest.mark.exhaustive)])
def test_records_have_the_bits_of_plain_decoding(op: str) -> None:
    by_records, plain = Server(op, W + MOST - 2), Server(op, W + MOST - 2)
    rng = np.random.default_rng(1)
    for _ in range(25):
        x, counts, accepted = drafts(rng, op)
        o = np.split(by_records.verify(x)[: counts.sum()], np.cumsum(counts)[:-1])
        for t in range(int(accepted.max())):
            one = true_tokens(x, accepted, t)
            want = plain.call(one, "records", state_indices=SLOT)
            for n, at in zip(np.flatnonzero(accepted > t), range(N), strict=False):
                assert np.array_equal(o[n][t], want[at])
        by_records.accepted = accepted
    by_records.commit()
    for name, last in (("initial_state", V), ("conv_state", W - 1)):
        one, two = (np.asarray(s.arrays[name])[..., :last] for s in (by_records, plain))
        assert np.array_equal(one[1:], two[1:]) and np.isnan(one[0]).all()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_16_bit_states_are_those_of_writing_each(dtype: str) -> None:
    by_records = Server(KDA, W + MOST - 2, dtype)
    by_states = Server(KDA, W + MOST - 2, dtype, rows=SLOTS + N * MOST)
    table = np.arange(SLOTS, SLOTS + N * MOST).reshape(N, MOST).astype(np.int32)
    table[SLOT == 0] = 0
    reads = table.copy()
    reads[:, 0] = SLOT
    rng, accepted = np.random.default_rng(2), np.ones(N, np.int32)
    for _ in range(20):
        x, counts, now = drafts(rng, KDA)
        more = {"state_indices": reads, "write_indices": table, "num_accepted_tokens": accepted}
        want = by_states.call(x, "records", conv_indices=SLOT, **more)
        assert np.array_equal(by_records.verify(x)[: counts.sum()], want[: counts.sum()])
        reads, accepted = table, now
        by_records.accepted = now
    by_records.commit()
    kept, last = SLOT != 0, table[np.arange(N), accepted - 1]
    got = np.asarray(by_records.arrays["initial_state"])[SLOT[kept]]
    assert got.dtype == DTYPES[dtype]
    assert np.array_equal(got, np.asarray(by_states.arrays["initial_state"])[last[kept]])


# --- against the oracle, nothing else read or written ---------------------------------------------------------------


def served(
    kind: str, op: str, dtype: str, state: str, taps: int, how: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A padded pack over pools with NaN wherever nothing may be read, NumPy; and its options."""
    rng = np.random.default_rng([len(kind), len(op), taps])
    lengths = np.array([2, 3, 1, 0])
    x = tokens(rng, op, lengths.sum() + 3, dtype)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    for a in x.values():
        a[:, cu[-1] :] = np.nan
        a[:, cu[2] : cu[3]] = np.nan  # of no slot
    columns = taps + MOST - 2 if how == "records" else taps - 1
    pool, conv = np.full((SLOTS, HV, K, V), np.nan), np.full((SLOTS, D, columns), np.nan)
    pool[SLOT[SLOT > 0]] = rng.standard_normal((3, HV, K, V))
    conv[SLOT[SLOT > 0]] = rng.standard_normal((3, D, columns))
    arrays = {**x, **weights(rng, op, taps), "initial_state": pool.astype(DTYPES[state]), "cu_seqlens": cu}
    arrays |= {"conv_state": conv.astype(DTYPES[dtype]), "state_indices": SLOT}
    if how != "plain":
        parts = records(op)
        for part in parts:
            part[ROW[:2], :2] = 0.5 * rng.random((2, 2, *part.shape[2:]))
        arrays |= dict(zip(("record_update", "record_key", "record_decay"), parts, strict=True))
        arrays |= {"record_indices": ROW, "num_replayed": np.array([2, 0, 1, 0], np.int32)}
    if how == "windows":
        windows = np.full((N, MOST, taps - 1, D), np.nan)
        windows[ROW[0], 1] = rng.standard_normal((taps - 1, D))
        arrays["conv_windows"] = windows.astype(DTYPES[dtype])
    return arrays, dict(SERVE)


def of_kind(kind: str, x: Any) -> Any:
    if kind == "jax":
        return jnp.asarray(x)
    if kind == "numpy":
        return np.array(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def as_numpy(x: Any) -> Any:
    return np.asarray(x.float() if isinstance(x, torch.Tensor) else x).astype(np.float64)


def public(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the public function, its records a tuple."""
    found = {n: x for n, x in arrays.items() if not n.startswith("record_") or n == "record_indices"}
    parts = [arrays[n] for n in ("record_update", "record_key", "record_decay") if n in arrays]
    return {**found, "records": tuple(parts)} if parts else found


CALLS = [
    ("jax", KDA, "float32", "float32", 4, "plain"),
    ("jax", GDN, "bfloat16", "float32", 3, "records"),
    ("jax", KDA, "float16", "float16", 2, "windows"),
    ("numpy", KDA, "bfloat16", "bfloat16", 4, "windows"),
    ("torch", GDN, "float32", "float16", 4, "records"),
    ("numpy", GDN, "float16", "float32", 2, "plain"),
    ("torch", KDA, "bfloat16", "float32", 3, "windows"),
]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("kind", "op", "dtype", "state", "taps", "how"), CALLS)
def test_a_padded_pack_over_pools(kind: str, op: str, dtype: str, state: str, taps: int, how: str) -> None:
    arrays, options = served(kind, op, dtype, state, taps, how)
    request = request_with(op, {**arrays, **options})
    want = oracle_decode(request, DecodeInputs(**arrays))
    given = {n: of_kind(kind, x) for n, x in arrays.items()}
    with kdacore.record_selections() as ran:
        o, final, *new = getattr(kdacore, op)(**public(given), **options, backend="xla")
    assert ran[-1].backend == "xla"
    written = ["conv_state"] + ["conv_windows"] * (how == "windows")
    if kind == "jax":
        flat = [x for part in new for x in (part if isinstance(part, tuple) else (part,))]
    else:
        assert final is given["initial_state"] and not new
        flat = [given[n] for n in written]
        flat += [given[n] for n in ("record_update", "record_key", "record_decay") if n in given]
    assert error(as_numpy(o), want.o) < O_BOUND[dtype]
    assert len(flat) == len(want.written)
    bound = max(STATE_BOUND[dtype], STATE_BOUND[state])
    for got, ref, before in zip(
        (final, *flat),
        (want.final_state, *want.written),
        (
            arrays["initial_state"],
            *[arrays[n] for n in written],
            *[a for n, a in arrays.items() if n in PARTS],
        ),
        strict=True,
    ):
        check_array(as_numpy(got), np.asarray(ref), before.astype(np.float64), bound)


PARTS = ("record_update", "record_key", "record_decay")


def check_array(got: Any, want: Any, before: Any, bound: float) -> None:
    """What the oracle changed is within the bound, and all else is as it was, NaN included."""
    same = (want == before) | (np.isnan(want) & np.isnan(before))
    assert np.array_equal(got[same], before[same], equal_nan=True)
    if not same.all():
        assert error(got[~same], want[~same]) < bound


@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_commit(kind: str) -> None:
    arrays, _ = served(kind, KDA, "float32", "float32", W, "records")
    names = (*PARTS, "initial_state", "state_indices", "record_indices", "num_replayed", "conv_state")
    given = {n: arrays[n] for n in names} | {"write_indices": np.array([6, 5, 0, 7], np.int32)}
    request = request_with("commit_records", {**given, "null_index": 0})
    want = oracle_commit(request, CommitInputs(**given))
    with kdacore.record_selections() as ran:
        got = kdacore.commit_records(
            **public({n: of_kind(kind, x) for n, x in given.items()}), null_index=0, backend="xla"
        )
    assert ran[-1].backend == "xla"
    for x, ref, name in zip(got, want, ("initial_state", "conv_state"), strict=True):
        check_array(as_numpy(x), np.asarray(ref), given[name].astype(np.float64), 2e-5)


@pytest.mark.parametrize("state", ["float16", "bfloat16"])
def test_16_bit_states_of_the_recurrent_op(state: str) -> None:
    rng = np.random.default_rng(3)
    x = {
        n: rng.standard_normal((2, 3, h, d)).astype(np.float32)
        for n, h, d in (("q", H, K), ("k", H, K), ("v", HV, V))
    }
    x |= {
        "g": -rng.random((2, 3, HV, K)).astype(np.float32),
        "beta": rng.random((2, 3, HV)).astype(np.float32),
    }
    x["initial_state"] = rng.standard_normal((2, HV, K, V)).astype(DTYPES[state])
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    request = request_with("fused_recurrent_kda", {**x, **options})
    want = oracle_forward(request, RecurrentInputs(**x))
    o, final = kdacore.fused_recurrent_kda(
        **{n: jnp.asarray(a) for n, a in x.items()}, **options, backend="xla"
    )
    assert str(final.dtype) == state and error(final, want.final_state) < STATE_BOUND[state]
    assert error(o, want.o) < 2e-5


# --- under JAX's transformations --------------------------------------------------------------------------------------


def test_donated_pools_are_updated_in_their_own_memory() -> None:
    arrays, options = served("jax", KDA, "float32", "float32", W, "records")
    given = {n: jnp.asarray(x) for n, x in arrays.items()}
    pools = {n: given.pop(n) for n in ("initial_state", "conv_state", *PARTS)}
    run = jax.jit(
        lambda pools, x: getattr(kdacore, KDA)(**public({**pools, **x}), **options, backend="xla"),
        donate_argnums=0,
    )
    compiled = run.lower(pools, given).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in pools.values())


def test_sequences_split_over_devices() -> None:
    """Plain ``jit`` on arrays that are split over a mesh: the values of one device."""
    rng = np.random.default_rng(4)
    x = {n: a.reshape(4, 2, *a.shape[2:]) for n, a in tokens(rng, GDN, 8).items()}
    arrays = {**x, **weights(rng, GDN)}
    arrays |= {
        "initial_state": rng.standard_normal((4, HV, K, V)).astype(np.float32),
        "conv_state": rng.standard_normal((4, D, W - 1)).astype(np.float32),
    }
    run = jax.jit(lambda a: getattr(kdacore, GDN)(**a, **FLAGS, output_final_state=True, backend="xla"))
    whole = run({n: jnp.asarray(a) for n, a in arrays.items()})
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("sequences",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("sequences"))
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = {
        n: jax.device_put(a, split if a.shape[0] == 4 and n != "A_log" else both) for n, a in arrays.items()
    }
    for one, two in zip(whole, run(placed), strict=True):
        assert error(two, np.asarray(one)) < 2e-6


def test_records_split_over_heads() -> None:
    """Plain ``jit`` on arrays whose heads are split over a mesh: results are split alike, with the values of one
    device."""
    rng = np.random.default_rng(9)
    heads, size, count = 2, 4, 2
    tails = {"q": (heads, K), "k": (heads, K), "v": (size, V), "g": (size, K), "beta": (size,)}
    x = {n: rng.standard_normal((3, count, *tail)).astype(np.float32) for n, tail in tails.items()}
    x["g"] = -np.abs(x["g"])
    pool = rng.standard_normal((SLOTS, size, K, V)).astype(np.float32)
    kept = [rng.random((N, MOST, *tail)).astype(np.float32) for tail in ((size, V), (heads, K), (size, K))]
    index = {"state_indices": [3, 0, 5], "record_indices": [1, 0, -1], "num_replayed": [2, 0, 0]}

    def run(x: dict[str, Any], pool: Any, records: Any) -> Any:
        more = {n: jnp.asarray(a, jnp.int32) for n, a in index.items()}
        given = {
            "initial_state": pool,
            "records": records,
            "inplace_state": True,
            "output_final_state": True,
            "null_index": 0,
        }
        return kdacore.fused_recurrent_kda(**x, **more, **given, backend="xla")

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("heads",))

    def split(a: Any, axis: int) -> Any:
        spec = jax.sharding.PartitionSpec(*[None] * axis, "heads")
        return jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))

    whole = jax.jit(run)(x, pool, tuple(kept))
    apart = jax.jit(run)(
        {n: split(a, 2) for n, a in x.items()}, split(pool, 1), tuple(split(a, 2) for a in kept)
    )
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(apart), strict=True):
        assert error(two, np.asarray(one)) < 2e-6
        assert two.sharding.shard_shape(two.shape) != two.shape


def small_batch(op: str) -> dict[str, Any]:
    """Two sequences of two tokens each, with states of their own."""
    rng = np.random.default_rng(5)
    x = {n: a.reshape(2, 2, *a.shape[2:]) for n, a in tokens(rng, op, 4).items()}
    x |= {"initial_state": rng.standard_normal((2, HV, K, V)).astype(np.float32)}
    x |= {"conv_state": rng.standard_normal((2, D, W - 1)).astype(np.float32)}
    return {n: jnp.asarray(a) for n, a in x.items()}


def test_inside_shard_map() -> None:
    x, w = small_batch(KDA), {n: jnp.asarray(a) for n, a in weights(np.random.default_rng(6), KDA).items()}

    def run(x: dict[str, Any], w: dict[str, Any]) -> Any:
        return getattr(kdacore, KDA)(
            **x, **w, **FLAGS, inplace_state=True, output_final_state=True, backend="xla"
        )

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("sequences",))
    one, none = jax.sharding.PartitionSpec("sequences"), jax.sharding.PartitionSpec()
    split = jax.shard_map(run, mesh=mesh, in_specs=(one, none), out_specs=one)
    for got, want in zip(jax.jit(split)(x, w), run(x, w), strict=True):
        assert error(got, np.asarray(want)) < 2e-6


def test_under_vmap() -> None:
    """Over sets of weights, as over the layers of a model."""
    x = small_batch(GDN)
    sets = [weights(np.random.default_rng(n), GDN) for n in (7, 8)]

    def run(w: dict[str, Any]) -> Any:
        return getattr(kdacore, GDN)(
            **x, **w, **FLAGS, inplace_state=True, output_final_state=True, backend="xla"
        )

    both = jax.jit(jax.vmap(run))({n: jnp.stack([a[n] for a in sets]) for n in sets[0]})
    for n, w in enumerate(sets):
        for got, want in zip(both, run({name: jnp.asarray(a) for name, a in w.items()}), strict=True):
            assert error(got[n], np.asarray(want)) < 2e-6


# --- conformance ------------------------------------------------------------------------------------------------------

PICKED = (
    "fused_decode_kda-pool-records_gated-jax-float32",
    "fused_decode_kda-causality_append-base-jax-float32",
    "fused_decode_gated_delta_rule-pool-windows_pack-jax-float32",
    "fused_decode_gated_delta_rule-accuracy-w3-jax-float32",
    "fused_recurrent_kda-pool-jit_records-jax-float32",
    "commit_records-pool-windows-jax-float32",
)


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("name", PICKED)
def test_case_of_the_suite(name: str) -> None:
    cases = {case.id: case for case in plan("xla", device="cpu", level="quick", kinds=("jax",)).cases}
    result = run_case(cases[name])
    assert result.status == "served", result.message


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("seed", range(20))
def test_random_call(seed: int) -> None:
    op = (KDA, GDN)[seed % 2]
    result = run_case(random_case("xla", seed, "cpu", only=("jax",), limits=Limits(op=op)))
    assert result.status == "served", result.message
