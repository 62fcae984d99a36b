"""What serving engines do: padded packs, sequences without a slot, pools that are read and written in
prefill and decoding, checkpoints at chosen tokens. The oracle is held to calls of one sequence each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.calls.requests import request_with
from kdacore.contract.state_rows import INDEX_VALUES
from kdacore.ops import OPS
from kdacore.oracle.host_values import to_float64, to_numpy
from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore_reference import _READ_ON_HOST

KINDS = ["numpy", "torch", "jax"]
H, HV, K, V = 2, 4, 16, 8
LENGTHS = (17, 0, 70, 5, 33, 9)
PADDING = 6
Error = Callable[[Any, Any], float]
Arrays = dict[str, Any]


@dataclasses.dataclass
class Scene:
    """A call, and what each sequence and row should hold after it."""

    op: str
    arrays: Arrays
    options: dict[str, Any]
    o: Any
    final: Any
    pool: Any
    """The pool that is written, as it should be; None where none is."""
    written: set[int]

    def oracle(self) -> Any:
        opdef = OPS[self.op]
        request = request_with(self.op, {**self.arrays, **self.options})
        return oracle_forward(request, opdef.inputs(*[self.arrays.get(n) for n in opdef.arrays]))

    def call(self, kind: str, to_kind: Any) -> tuple[Arrays, tuple[Any, Any]]:
        arrays = {n: to_kind(x.copy(), kind) for n, x in self.arrays.items()}
        given = {n: x for n, x in arrays.items() if n not in OPS[self.op].required}
        positional = [arrays[n] for n in OPS[self.op].required]
        function = getattr(kdacore, self.op)
        return arrays, function(*positional, **given, **self.options, backend="reference")


def tokens_of(rng: Any, op: str, lengths: tuple[int, ...], padding: int) -> Arrays:
    T = sum(lengths) + padding
    x: Arrays = {name: rng.standard_normal((1, T, H, K)) for name in ("q", "k")}
    x["k"] = x["k"] / np.linalg.norm(x["k"], axis=-1, keepdims=True)
    x["v"] = rng.standard_normal((1, T, HV, V))
    x["g"] = -rng.random((1, T, HV, *(() if OPS[op].scalar_gate else (K,))))
    x["beta"] = rng.random((1, T, HV))
    for name in x:
        x[name] = x[name].astype(np.float32)
        x[name][:, T - padding :: 2] = np.nan
        x[name][:, T - padding + 1 :: 2] = 1e30
    x["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
    return x


def alone(op: str, x: Arrays, start: int, stop: int, S: Any, **options: Any) -> tuple[Any, Any]:
    """``o`` and the last state of a call of one sequence, from the oracle."""
    if start == stop:
        return np.zeros((0, HV, V)), S
    plain = "fused_recurrent_" + op.removeprefix("chunk_").removeprefix("fused_recurrent_")
    cut = {n: x[n][:, start:stop] for n in ("q", "k", "v", "g", "beta")}
    given = {**cut, "initial_state": S[None].astype(np.float64)}
    given = {n: a.astype(np.float64) for n, a in given.items()}
    request = request_with(plain, {**given, **options, "output_final_state": True})
    opdef = OPS[plain]
    done = oracle_forward(request, opdef.inputs(*[given.get(n) for n in opdef.arrays]))
    return done.o[0], done.final_state[0]


def prefill(rng: Any, op: str, *, separate: bool, null: int | None) -> Scene:
    """A pack of prompts whose states are read from a pool and written to other rows, or to another pool."""
    x = tokens_of(rng, op, LENGTHS, PADDING)
    no_slot = -5 if null is None else null
    pool = np.full((14, HV, K, V), np.nan, np.float32)
    x["state_indices"] = np.array([3, 4, 5, no_slot, 6, -1], np.int64)
    pool[[3, 5]] = rng.standard_normal((2, HV, K, V))  # rows 4 and 6 are read by nobody: NaN
    x["has_initial_state"] = np.array([True, False, True, True, False, True])
    x["write_indices"] = np.array([3, 1, 8, 2, no_slot, 9], np.int64)
    starts = np.cumsum([0, *LENGTHS])
    offsets = [
        int(starts[2]) + 48,
        int(starts[4]),
        int(starts[2]) + 64,
        16,
        999,
        int(starts[2]),
        int(starts[3]),
    ]
    x["checkpoint_offsets"] = np.array(offsets, np.int32)
    x["checkpoint_indices"] = np.array([10, 11, 12, 7, no_slot, 0 if null is None else 13, 2], np.int32)
    x["initial_state"] = pool
    target = pool.copy()
    if separate:
        target = np.full((14, HV, K, V), np.nan, np.float32)
        x["write_pool"] = target
    options = {"inplace_state": True, "output_final_state": True}
    options |= {} if null is None else {"null_index": null}
    o, want, written = np.zeros(x["v"].shape), target.astype(np.float64), set()
    for n, row in enumerate(x["state_indices"].tolist()):
        if row < 0 or row == null:
            continue
        start, stop = starts[n], starts[n + 1]
        S = pool[row] if x["has_initial_state"][n] else np.zeros((HV, K, V))
        o[0, start:stop], last = alone(op, x, start, stop, S)
        rows = [(int(x["write_indices"][n]), last)]
        if OPS[op].family == "chunk":
            for c, offset in enumerate(offsets):
                if start <= offset < stop:
                    rows.append((int(x["checkpoint_indices"][c]), alone(op, x, start, offset, S)[1]))
        for to, state in rows:
            if to >= 0 and to != null:
                want[to] = state
                written.add(to)
    if OPS[op].family != "chunk":
        del x["checkpoint_offsets"], x["checkpoint_indices"]
    return Scene(op, x, options, o, None, want, written)


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("null", [None, 0])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_of_prompts_from_a_pool(
    kind: str, op: str, separate: bool, null: int | None, rng: Any, error: Error, to_kind: Any
) -> None:
    scene = prefill(rng, op, separate=separate, null=null)
    expected = scene.oracle()
    rows = sorted(scene.written)
    assert error(expected.o, scene.o) < 1e-12
    assert error(expected.final_state[rows], scene.pool[rows]) < 1e-12

    arrays, (o, after) = scene.call(kind, to_kind)
    assert error(o, scene.o) < 2e-5
    name = "write_pool" if separate else "initial_state"
    if kind == "jax":
        np.testing.assert_array_equal(to_numpy(arrays[name]), scene.arrays[name])
    else:
        assert after is arrays[name]
    assert error(to_float64(after)[rows], scene.pool[rows]) < 2e-5
    others = [row for row in range(len(scene.pool)) if row not in scene.written]
    same = to_numpy(after)[others].tobytes() == scene.arrays[name][others].tobytes()
    assert same, "a row that nobody names was written"
    if separate:
        assert to_numpy(arrays["initial_state"]).tobytes() == scene.arrays["initial_state"].tobytes()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_out_is_written_as_far_as_the_sequences_reach(
    kind: str, op: str, rng: Any, error: Error, to_kind: Any
) -> None:
    """Zeros for sequences without a slot; nothing beyond the last offset."""
    scene = prefill(rng, op, separate=False, null=0)
    scene.arrays["out"] = np.full(scene.arrays["v"].shape, 7.0, np.float32)
    arrays, (o, _) = scene.call(kind, to_kind)
    assert o is arrays["out"]
    assert error(o[:, : sum(LENGTHS)], scene.o[:, : sum(LENGTHS)]) < 2e-5
    assert (to_numpy(o)[:, sum(LENGTHS) :] == 7.0).all()


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_for_each_candidate(kind: str, rng: Any, error: Error, to_kind: Any) -> None:
    """Speculative verification: read after the last accepted token, write elsewhere, nothing copied."""
    op, lengths = "fused_recurrent_kda", (3, 2, 4, 1)
    x = tokens_of(rng, op, lengths, 2)
    pool = np.full((30, HV, K, V), np.nan, np.float32)
    x["state_indices"] = np.array([[1, 2, 3], [4, 0, 6], [7, 8, 9], [-1, 10, 11]], np.int64)
    x["num_accepted_tokens"] = np.array([2, 2, 0, 3], np.int64)  # reads 2, none (padding), zeros, 11
    pool[[2, 11]] = rng.standard_normal((2, HV, K, V))
    x["write_indices"] = np.array(
        [[12, 0, 13, 14], [15, 16, 17, 18], [19, 20, -1, 21], [22, 23, 24, 25]], np.int32
    )
    x["initial_state"] = pool
    options = {"inplace_state": True, "output_final_state": True, "null_index": 0}
    o, want, written = np.zeros(x["v"].shape), pool.astype(np.float64), set()
    start = 0
    for n, (length, row) in enumerate(zip(lengths, (2, None, -1, 11), strict=True)):
        for t in range(length if row is not None else 0):
            S = pool[row] if row >= 0 else np.zeros((HV, K, V))
            here, after = alone(op, x, start, start + t + 1, S)
            o[0, start + t] = here[-1]
            to = int(x["write_indices"][n, t])
            if to > 0:
                want[to] = after
                written.add(to)
        start += length
    scene = Scene(op, x, options, o, None, want, written)
    rows = sorted(written)
    expected = scene.oracle()
    assert error(expected.o, o) < 1e-12 and error(expected.final_state[rows], want[rows]) < 1e-12
    _, (got, after) = scene.call(kind, to_kind)
    assert error(got, o) < 2e-5 and error(to_float64(after)[rows], want[rows]) < 2e-5
    others = [row for row in range(len(pool)) if row not in written]
    assert to_numpy(after)[others].tobytes() == pool[others].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_state_goes_to_the_rows_written(
    kind: str, rng: Any, error: Error, to_kind: Any
) -> None:
    """``write_indices`` ``[N]`` beside ``state_indices`` ``[N, W]``."""
    op, lengths = "fused_recurrent_kda", (3, 2)
    x = tokens_of(rng, op, lengths, 0)
    pool = rng.standard_normal((9, HV, K, V)).astype(np.float32)
    x |= {"initial_state": pool, "state_indices": np.array([[1, 2, 3], [4, 5, 6]])}
    x |= {"num_accepted_tokens": np.array([3, 1]), "write_indices": np.array([3, 8])}
    last = [alone(op, x, 0, 3, pool[3])[1], alone(op, x, 3, 5, pool[4])[1]]
    scene = Scene(op, x, {"inplace_state": True, "output_final_state": True}, None, None, None, {3, 8})
    assert error(scene.oracle().final_state[[3, 8]], np.stack(last)) < 1e-12
    _, (_, after) = scene.call(kind, to_kind)
    assert error(to_float64(after)[[3, 8]], np.stack(last)) < 2e-5
    np.testing.assert_array_equal(to_numpy(after)[[0, 1, 2, 4, 5, 6, 7]], pool[[0, 1, 2, 4, 5, 6, 7]])


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_that_is_only_written(
    kind: str, given: bool, op: str, rng: Any, error: Error, to_kind: Any
) -> None:
    """From zeros, or from one state a sequence."""
    x = tokens_of(rng, op, (20, 40), 0)
    starts = rng.standard_normal((2, HV, K, V)).astype(np.float32) if given else np.zeros((2, HV, K, V))
    x |= {"write_pool": np.full((5, HV, K, V), np.nan, np.float32), "write_indices": np.array([4, 2])}
    if given:
        x["initial_state"] = starts
    last = [alone(op, x, 0, 20, starts[0])[1], alone(op, x, 20, 60, starts[1])[1]]
    scene = Scene(op, x, {"inplace_state": True, "output_final_state": True}, None, None, None, set())
    assert error(scene.oracle().final_state[[4, 2]], np.stack(last)) < 1e-12
    _, (_, after) = scene.call(kind, to_kind)
    assert error(to_float64(after)[[4, 2]], np.stack(last)) < 2e-5
    assert np.isnan(to_numpy(after)[[0, 1, 3]]).all()


@pytest.mark.first_cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_returned(kind: str, op: str, rng: Any, error: Error, to_kind: Any) -> None:
    """Without ``inplace_state``: a new array, zero for sequences without a slot; the pool as it was."""
    scene = prefill(rng, op, separate=False, null=0)
    for name in ("write_indices", "checkpoint_offsets", "checkpoint_indices"):
        scene.arrays.pop(name, None)
    scene.options["inplace_state"] = False
    expected = scene.oracle()
    arrays, (o, final) = scene.call(kind, to_kind)
    assert final.shape == (len(LENGTHS), HV, K, V)
    assert error(o, scene.o) < 2e-5 and error(final, expected.final_state) < 2e-5
    assert not to_numpy(final)[[3, 5]].any()
    assert to_numpy(arrays["initial_state"]).tobytes() == scene.arrays["initial_state"].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_change_no_bit_of_the_rest(kind: str, rng: Any, to_kind: Any) -> None:
    scene = prefill(rng, "chunk_kda", separate=True, null=None)
    _, (o, after) = scene.call(kind, to_kind)
    kept = scene.arrays["checkpoint_indices"]
    for name in ("checkpoint_offsets", "checkpoint_indices"):
        del scene.arrays[name]
    _, (plain_o, plain_after) = scene.call(kind, to_kind)
    assert to_numpy(o).tobytes() == to_numpy(plain_o).tobytes()
    others = [row for row in range(14) if row not in kept.tolist()]
    assert to_numpy(after)[others].tobytes() == to_numpy(plain_after)[others].tobytes()


@pytest.mark.parametrize("every", [None, 64])
def test_checkpoints_of_blocks_beside_chosen_ones(
    every: int | None, rng: Any, error: Error, to_kind: Any
) -> None:
    scene = prefill(rng, "chunk_kda", separate=False, null=0)
    scene.options["checkpoint_every"] = every
    found = scene.call("numpy", to_kind)[1]
    assert len(found) == (2 if every is None else 3)
    if every is not None:
        assert error(found[2], scene.oracle().checkpoints) < 2e-5  # type: ignore[misc]


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda"])
@pytest.mark.parametrize("gate", [{}, {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}])
def test_gradients_of_padding_are_zero(
    kind: str, op: str, gate: dict[str, Any], rng: Any, error: Error, to_kind: Any
) -> None:
    """Whatever the rows of a pack that belong to no sequence hold, and the loss says of them."""
    x = tokens_of(rng, op, LENGTHS, PADDING)
    if gate:
        x["A_log"] = np.log(rng.uniform(0.5, 4, HV)).astype(np.float32)
        tail = () if OPS[op].scalar_gate else (K,)
        x["dt_bias"] = rng.standard_normal((HV, *tail)).astype(np.float32)
    x["initial_state"] = rng.standard_normal((len(LENGTHS), HV, K, V)).astype(np.float32)
    options = {**gate, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    opdef, total = OPS[op], sum(LENGTHS)
    do = rng.standard_normal(x["v"].shape).astype(np.float32)
    do[:, total:] = np.nan
    dstate = rng.standard_normal(x["initial_state"].shape).astype(np.float32)

    def gradients(arrays: Arrays, do: Any, dstate: Any, kind: str) -> Any:
        from kdacore.types import OutputGrads

        inputs = opdef.inputs(*[arrays.get(n) for n in opdef.arrays])
        request = request_with(op, {**arrays, **options}, needs_grad=True)
        if kind == "oracle":
            return oracle_backward(request, inputs, OutputGrads(do, dstate))
        from kdacore_reference import make_backend

        impl = make_backend().ops[op]
        outputs = impl.forward(request, inputs)
        assert not to_numpy(outputs.o)[:, total:].any()
        assert impl.backward is not None
        return impl.backward(request, inputs, outputs.saved, OutputGrads(do, dstate))

    cut = {n: a[:, :total] if n in ("q", "k", "v", "g", "beta") else a for n, a in x.items()}
    want = gradients(cut, do[:, :total], dstate, "oracle")
    expected = gradients(x, do, dstate, "oracle")
    got = gradients(
        {n: to_kind(a, kind) for n, a in x.items()}, to_kind(do, kind), to_kind(dstate, kind), kind
    )
    for name, plain in want._asdict().items():
        if plain is None:
            continue
        reached = slice(None) if name in ("A_log", "dt_bias", "initial_state") else slice(total)
        for grad, bound in ((getattr(expected, name), 1e-12), (getattr(got, name), 5e-5)):
            grad = to_float64(grad)
            per_token = reached == slice(total)
            assert error(grad[:, reached] if per_token else grad, plain) < bound, name
            if per_token:
                assert not grad[:, total:].any(), name


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stages_do_not_read_the_padding(kind: str, rng: Any, error: Error, to_kind: Any) -> None:
    """Each stage on a padded pack, its rows of no sequence NaN, equals the stage on the pack alone."""
    x = tokens_of(rng, "chunk_kda", LENGTHS, PADDING)
    total = sum(LENGTHS)

    def padded(array: Any) -> Any:
        whole = np.full((1, total + PADDING, *array.shape[2:]), np.nan, np.float32)
        whole[:, :total] = to_numpy(array)
        return to_kind(whole, kind)

    cut = {n: to_kind(a[:, :total] if n != "cu_seqlens" else a, kind) for n, a in x.items()}
    long = {n: to_kind(a, kind) for n, a in x.items()}
    packed = {"cu_seqlens": cut["cu_seqlens"], "backend": "reference"}

    def both(stage: str, *names: str, **given: Any) -> Any:
        function = getattr(kdacore.stages, stage)
        short = function(*[cut[n] for n in names], **given, **packed)
        far = function(*[long[n] for n in names], **given, **packed)
        many = isinstance(short, tuple)
        for a, b in zip(short if many else (short,), far if many else (far,), strict=True):
            if a is not None:
                rows = total if b.shape[1] == total + PADDING else b.shape[1]
                np.testing.assert_array_equal(to_numpy(b)[:, :rows][:, : a.shape[1]], to_numpy(a))
        return short

    def keep(**found: Any) -> None:
        for name, array in found.items():
            cut[name], long[name] = array, padded(array)

    keep(gc=both("kda_chunk_gate", "g", lower_bound=-5.0))
    Aqk, Akk = both("kda_chunk_intra", "q", "k", "gc", "beta")
    keep(Aqk=Aqk, Akk=Akk)
    w, u, kg, _ = both("kda_recompute_w_u", "k", "v", "beta", "gc", "Akk")
    keep(w=w, u=u, kg=kg)
    h, v_new, _ = both("delta_rule_chunk_state", "kg", "w", "u", "gc")
    keep(v_new=v_new)
    spare = (total + PADDING) // 64 - total // 64
    cut["h"] = h
    grown = np.concatenate([to_numpy(h), np.full((1, spare, *h.shape[2:]), np.nan, np.float32)], axis=1)
    long["h"] = to_kind(grown, kind)
    both("kda_chunk_output", "q", "v_new", "gc", "Aqk", "h")


def test_nothing_is_written_when_the_rows_are_wrong(rng: Any, to_kind: Any) -> None:
    for op in ("chunk_kda", "fused_recurrent_kda"):
        scene = prefill(rng, op, separate=True, null=0)
        scene.arrays["write_indices"] = np.array([3, 3, 8, 2, 0, 9])
        scene.arrays["out"] = np.full(scene.arrays["v"].shape, 7.0, np.float32)
        arrays = {n: a.copy() for n, a in scene.arrays.items()}
        positional = [arrays.pop(n) for n in OPS[op].required]
        with pytest.raises(kdacore.ContractError, match="write_indices"):
            getattr(kdacore, op)(*positional, **arrays, **scene.options, backend="reference")
        assert (arrays["out"] == 7.0).all() and np.isnan(arrays["write_pool"]).all()


def test_every_array_that_is_read_on_the_host_needs_values() -> None:
    assert set(_READ_ON_HOST) == {"cu_seqlens", *INDEX_VALUES}
