"""The fused decode ops: equal to the chain of their parts, and speculation has the bits of plain decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.calls.values import to_kind
from kdacore.oracle.host_values import to_float64

H, HV, K, V, W = 2, 4, 8, 6, 4
D = 2 * H * K + HV * V
OPS = {"fused_decode_kda": (HV, K), "fused_decode_gated_delta_rule": (HV,)}
"""Axes of a token's gate."""
FLAGS: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def tokens(rng: Any, op: str, *shape: int) -> dict[str, Any]:
    """Tokens of a call, float32."""
    x = {"x": rng.standard_normal((*shape, D)), "g": -rng.random((*shape, *OPS[op]))}
    x |= {"beta": rng.standard_normal((*shape, HV)), "z": rng.standard_normal((*shape, HV, V))}
    return {name: a.astype(np.float32) for name, a in x.items()}


def weights(rng: Any, taps: int = W) -> dict[str, Any]:
    x = {"conv_weight": rng.standard_normal((D, taps)), "conv_bias": rng.standard_normal(D)}
    x["norm_weight"] = 1 + rng.random((HV, V))
    return {name: a.astype(np.float32) for name, a in x.items()}


def chain(op: str, x: dict[str, Any], w: dict[str, Any], state: Any, window: Any, activation: str) -> Any:
    """One row of tokens, part by part: ``o``, the last state, and the last window ``[D, w - 1]``. In float64."""
    wide = {name: a.astype(np.float64) for name, a in {**x, **w}.items()}
    taps = wide["conv_weight"].shape[1]
    line = np.concatenate([window.T.astype(np.float64), wide["x"]])
    y = np.stack([(line[t : t + taps] * wide["conv_weight"].T).sum(0) for t in range(len(x["x"]))])
    y = y + wide["conv_bias"]
    y = y / (1 + np.exp(-y))
    q, k, v = np.split(y, [H * K, 2 * H * K], axis=1)
    o, final = getattr(kdacore, op.replace("decode", "recurrent"))(
        q.reshape(1, -1, H, K),
        k.reshape(1, -1, H, K),
        v.reshape(1, -1, HV, V),
        wide["g"][None],
        wide["beta"][None],
        initial_state=state[None].astype(np.float64),
        output_final_state=True,
        **FLAGS,
    )
    o = o[0] / np.sqrt((o[0] ** 2).mean(-1, keepdims=True) + 1e-5) * wide["norm_weight"]
    gate = 1 / (1 + np.exp(-wide["z"]))
    return o * (gate if activation == "sigmoid" else wide["z"] * gate), final[0], line[len(x["x"]) :].T


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize(("op", "activation"), [*zip(OPS, ("sigmoid", "silu"), strict=True)])
def test_it_is_the_chain_of_its_parts(op: str, activation: str, taps: int) -> None:
    """In a padded pack, into a pool, with a slot for all but one sequence; by default with the activation of its
    models."""
    rng = np.random.default_rng(taps)
    lengths, slots = (3, 1, 0, 16, 2, 1), np.array([4, 7, 2, -1, 0, 5])
    x, w = tokens(rng, op, 1, sum(lengths) + 3), weights(rng, taps)
    for a in x.values():
        a[:, sum(lengths) :] = np.nan
    pool = rng.standard_normal((9, HV, K, V)).astype(np.float32)
    conv = rng.standard_normal((9, D, taps + 1)).astype(np.float32)
    before, old = pool.copy(), conv.copy()
    cu = np.cumsum([0, *lengths])
    o, final = getattr(kdacore, op)(
        **x, **w, **FLAGS, initial_state=pool, conv_state=conv, cu_seqlens=cu, state_indices=slots,
        inplace_state=True, output_final_state=True,
    )  # fmt: skip
    assert final is pool
    for n, slot in enumerate(slots):
        here = slice(cu[n], cu[n + 1])
        if slot < 0:
            assert not o[0, here].any()
            continue
        if not lengths[n]:
            assert (
                pool[slot].tobytes() == before[slot].tobytes() and conv[slot].tobytes() == old[slot].tobytes()
            )
            continue
        alone = {name: a[0, here] for name, a in x.items()}
        want = chain(op, alone, w, before[slot], old[slot, :, : taps - 1], activation)
        np.testing.assert_allclose(o[0, here], want[0], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(pool[slot], want[1], rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(conv[slot, :, : taps - 1], want[2].astype(np.float32))
        np.testing.assert_array_equal(conv[slot, :, taps - 1 :], old[slot, :, taps - 1 :])
    unused = np.setdiff1d(np.arange(9), slots)
    assert (pool[unused] == before[unused]).all() and (conv[unused] == old[unused]).all()
    assert not o[0, sum(lengths) :].any()


def test_nothing_is_written_unless_asked() -> None:
    rng = np.random.default_rng(0)
    op = "fused_decode_kda"
    x, w = tokens(rng, op, 2, 3), weights(rng)
    given = {"initial_state": rng.random((2, HV, K, V)), "conv_state": rng.random((2, D, W))}
    given = {name: a.astype(np.float32) for name, a in given.items()}
    before = {name: a.tobytes() for name, a in given.items()}
    plain, none = getattr(kdacore, op)(**x, **w, **given)
    same, final = getattr(kdacore, op)(**x, **w, **given, output_final_state=True)
    assert none is None and final.shape == (2, HV, K, V) and (plain == same).all()
    assert {name: a.tobytes() for name, a in given.items()} == before


def test_weights_may_be_wider_than_x() -> None:
    """Kimi K3 has float32 weights of the convolution beside bfloat16 channels."""
    import ml_dtypes

    rng = np.random.default_rng(1)
    op = "fused_decode_kda"
    x, w = tokens(rng, op, 3, 1), weights(rng)
    half = {name: a.astype(ml_dtypes.bfloat16) for name, a in x.items()}
    wide = {name: a.astype(np.float32) for name, a in half.items()}
    state, conv = np.zeros((3, HV, K, V), np.float32), rng.random((3, D, W - 1)).astype(ml_dtypes.bfloat16)
    o, _ = getattr(kdacore, op)(**half, **w, **FLAGS, initial_state=state, conv_state=conv)
    want, _ = getattr(kdacore, op)(
        **wide, **w, **FLAGS, initial_state=state, conv_state=conv.astype(np.float32)
    )
    assert o.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(o, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["retrieve_parent_token", "parent_indices"])
@pytest.mark.parametrize("op", OPS)
def test_trees_of_drafts_are_declined_by_name(op: str, name: str) -> None:
    x = np.zeros((1, 1, D), np.float32)
    with pytest.raises(TypeError, match=f"'{name}': candidates are a chain: trees of drafts"):
        getattr(kdacore, op)(x, x, x, x, **{name: None})


# --- speculation -----------------------------------------------------------------------------------------------------

N, MOST, SLOTS = 4, 4, 9
SLOT = np.array([3, 5, 0, 1], np.int32)
"""Of the sequences; the third has none."""
ROW = np.array([2, 1, 3, -1], np.int32)
"""Of their records; the last decodes without."""
SERVE: dict[str, Any] = {**FLAGS, "inplace_state": True, "output_final_state": True, "null_index": 0}


@dataclasses.dataclass
class Server:
    """States and windows of convolutions in pools."""

    op: str
    kind: Any
    columns: int
    state_dtype: str = "float32"
    dtype: str = "float32"
    rows: int = SLOTS

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = {name: to_kind(a, self.kind, "float32") for name, a in weights(rng).items()}
        pool, conv = (np.full((self.rows, *tail), np.nan) for tail in ((HV, K, V), (D, self.columns)))
        pool[:SLOTS] = rng.standard_normal((SLOTS, HV, K, V))
        conv[:SLOTS, :, : W - 1] = rng.standard_normal((SLOTS, D, W - 1))
        pool[0] = conv[0] = np.nan
        self.pool = to_kind(pool, self.kind, self.state_dtype)
        self.conv = to_kind(conv, self.kind, self.dtype)

    def given(self, x: dict[str, Any]) -> dict[str, Any]:
        dtypes = {"x": self.dtype, "z": self.dtype}
        return {n: to_kind(a, self.kind, dtypes.get(n, a.dtype.name)) for n, a in x.items()}

    def call(self, x: dict[str, Any], **more: Any) -> Any:
        """A call that writes the pools. Returns ``o [tokens, HV, V]``."""
        o, self.pool, *rest = getattr(kdacore, self.op)(
            **self.given(x), **self.weights, **SERVE, **more, initial_state=self.pool, conv_state=self.conv,
            backend="reference",
        )  # fmt: skip
        self.keep(*rest)
        return to_float64(o)[0]

    def keep(self, *new: Any) -> None:
        """New arrays in place of those that cannot be written."""
        if new:
            self.conv = new[0]


@dataclasses.dataclass
class Recording(Server):
    """With records, and perhaps windows beside the pool."""

    apart: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        tails = ((HV, V), (H, K), OPS[self.op])
        self.records = tuple(to_kind(np.full((N, MOST, *t), np.nan), self.kind, "float32") for t in tails)
        self.windows = (
            to_kind(np.full((N, MOST, W - 1, D), np.nan), self.kind, self.dtype) if self.apart else None
        )
        self.accepted = np.zeros(N, np.int32)

    def keep(self, *new: Any) -> None:
        if new:
            self.conv, self.records = new[0], new[-1]
            self.windows = new[1] if self.apart else None

    def verify(self, x: dict[str, Any]) -> Any:
        more = self.given({"state_indices": SLOT, "record_indices": ROW, "num_replayed": self.accepted})
        return self.call(x, **more, records=self.records, conv_windows=self.windows)

    def commit(self) -> None:
        more = self.given({"state_indices": SLOT, "record_indices": ROW, "num_replayed": self.accepted})
        self.pool, self.conv = kdacore.commit_records(
            self.pool,
            records=self.records,
            conv_state=self.conv,
            conv_windows=self.windows,
            null_index=0,
            **more,
        )


def drafts(rng: Any, op: str) -> tuple[list[dict[str, Any]], Any]:
    """Candidates of each sequence, and how many are accepted."""
    counts = [1 if row < 0 else int(rng.integers(1, MOST + 1)) for row in ROW]
    found = [tokens(rng, op, 1, n) for n in counts]
    return found, np.array([int(rng.integers(1, n + 1)) for n in counts], np.int32)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    pack = {name: np.concatenate([x[name] for x in parts], axis=1) for name in parts[0]}
    return {**pack, "cu_seqlens": np.cumsum([0, *[x["x"].shape[1] for x in parts]]).astype(np.int32)}


STEPS = {"numpy": 120, "torch": 40, "jax": 3}


@pytest.mark.every_other
@pytest.mark.jax_later
@pytest.mark.parametrize("apart", [False, True], ids=["long rows", "windows"])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("op", OPS)
def test_records_have_the_bits_of_plain_decoding(op: str, kind: str, apart: bool) -> None:
    plain = Server(op, kind, W - 1)
    by_records = Recording(op, kind, W - 1 if apart else W + MOST - 2, apart=apart)
    rng = np.random.default_rng(2)
    for _ in range(STEPS[kind]):
        found, accepted = drafts(rng, op)
        o, first = by_records.verify(joined(found)), 0
        outputs: list[list[Any]] = [[] for _ in range(N)]
        for t in range(int(accepted.max())):
            there = np.flatnonzero(accepted > t)
            x = joined([{name: a[:, t : t + 1] for name, a in found[n].items()} for n in there])
            for n, row in zip(there, plain.call({**x, "state_indices": SLOT[there]}), strict=True):
                outputs[n].append(row)
        for n in range(N):
            np.testing.assert_array_equal(o[first : first + accepted[n]], np.stack(outputs[n]))
            first += found[n]["x"].shape[1]
        by_records.accepted = accepted
    by_records.commit()
    np.testing.assert_array_equal(to_float64(by_records.pool)[1:], to_float64(plain.pool)[1:])
    np.testing.assert_array_equal(to_float64(by_records.conv)[1:, :, : W - 1], to_float64(plain.conv)[1:])
    assert np.isnan(to_float64(by_records.pool)[0]).all() and np.isnan(to_float64(by_records.conv)[0]).all()


@pytest.mark.every_other
@pytest.mark.jax_later
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("op", OPS)
def test_16_bit_states_are_those_of_writing_each(op: str, kind: str) -> None:
    """A row for each candidate, the next step starting from the last accepted one: vLLM's way, with long rows."""
    by_records = Recording(op, kind, W + MOST - 2, "bfloat16", "bfloat16")
    by_states = Server(op, kind, W + MOST - 2, "bfloat16", "bfloat16", rows=SLOTS + N * MOST)
    table = np.arange(SLOTS, SLOTS + N * MOST).reshape(N, MOST).astype(np.int32)
    table[SLOT == 0] = 0
    rows: dict[str, Any] = {"conv_indices": SLOT, "state_indices": table.copy()}
    rows["state_indices"][:, 0] = SLOT
    rng = np.random.default_rng(3)
    accepted = np.ones(N, np.int32)
    for _ in range(STEPS[kind]):
        found, now = drafts(rng, op)
        x = joined(found)
        more = {**rows, "write_indices": table, "num_accepted_tokens": accepted}
        np.testing.assert_array_equal(by_records.verify(x), by_states.call({**x, **more}))
        rows["state_indices"] = table
        by_records.accepted = accepted = now
    by_records.commit()
    kept = SLOT != 0
    last = table[np.arange(N), accepted - 1]
    want, got = to_float64(by_states.pool)[last[kept]], to_float64(by_records.pool)[SLOT[kept]]
    np.testing.assert_array_equal(got, want)
    for n in np.flatnonzero(kept):
        first = accepted[n] - 1
        window = to_float64(by_states.conv)[SLOT[n], :, first : first + W - 1]
        np.testing.assert_array_equal(to_float64(by_records.conv)[SLOT[n], :, : W - 1], window)


@pytest.mark.parametrize("apart", [False, True], ids=["long rows", "windows"])
def test_replaying_in_a_call_is_to_commit_before_it(apart: bool) -> None:
    op = "fused_decode_kda"
    once, twice = (Recording(op, "numpy", W + MOST - 2, apart=apart) for _ in range(2))
    rng = np.random.default_rng(4)
    for _ in range(5):
        found, accepted = drafts(rng, op)
        twice.commit()
        twice.accepted = np.zeros(N, np.int32)
        x = joined(found)
        np.testing.assert_array_equal(once.verify(x), twice.verify(x))
        np.testing.assert_array_equal(once.pool[1:], twice.pool[1:])
        np.testing.assert_array_equal(once.conv[1:, :, : W - 1], twice.conv[1:, :, : W - 1])
        once.accepted = twice.accepted = accepted


def test_windows_of_candidates_that_write_states() -> None:
    """SGLang's way: a state and a window for each candidate apart from the pools, which stay."""
    rng = np.random.default_rng(5)
    op = "fused_decode_gated_delta_rule"
    x, w = tokens(rng, op, 2, 3), weights(rng)
    pool, conv = rng.random((6, HV, K, V)).astype(np.float32), rng.random((6, D, W - 1)).astype(np.float32)
    apart, windows = np.zeros((6, HV, K, V), np.float32), np.zeros((2, 3, W - 1, D), np.float32)
    before = pool.tobytes(), conv.tobytes()
    slots = np.array([4, 1])
    getattr(kdacore, op)(
        **x, **w, **FLAGS, initial_state=pool, conv_state=conv, state_indices=slots, write_pool=apart,
        write_indices=np.arange(6).reshape(2, 3), conv_windows=windows, inplace_state=True,
    )  # fmt: skip
    assert (pool.tobytes(), conv.tobytes()) == before
    for n, slot in enumerate(slots):
        for t in range(3):
            alone = {name: a[n, : t + 1] for name, a in x.items()}
            _, state, window = chain(op, alone, w, pool[slot], conv[slot], "silu")
            np.testing.assert_allclose(apart[3 * n + t], state, rtol=2e-4, atol=2e-5)
            np.testing.assert_array_equal(windows[n, t].T, window.astype(np.float32))
