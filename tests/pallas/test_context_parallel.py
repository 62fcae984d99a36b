"""``cp=``: rows whose tokens are split over a mesh axis, on eight fake devices, against the oracle on the whole row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, error
from rank_cases import AXIS, SPLIT, TOKENS, Ranks, Split, mesh, options_of, split_call

import kdacore
from kdacore.errors import ContractError, UnsupportedError
from kdacore.parallel import compose, fold, segment_transition, slices

PACK = (3, 0, 40, 0, 21, 0, 1, 15, 32)
"""112 tokens of eight ranks of 16; the last holds padding alone. Sequences that lie in several ranks and in one, that
begin and end at borders (64, 80), and empty ones there and elsewhere."""


@pytest.fixture(scope="module")
def rows() -> Split:
    """Rows that are one sequence each, grouped value heads, the gate in the kernel, states ``[V, K]``."""
    return Split(Case(B=2, T=144, HV=2, K=16, V=24, gate="softplus", v_first=True), Ranks())


@pytest.fixture(scope="module")
def pack() -> Split:
    """One gate per head, a pack, and a rank of padding."""
    return Split(
        Case(lengths=PACK, K=16, V=16, op="chunk_gated_delta_rule"), Ranks(check_vma=False), padding=16
    )


def test_rows(rows: Split) -> None:
    rows.check()


@pytest.mark.exhaustive
def test_pack(pack: Split) -> None:
    pack.check()


@pytest.mark.exhaustive
def test_other_lengths_in_the_same_program(pack: Split) -> None:
    """Among them nothing but empty sequences and one, which has no beginning or end on most ranks."""
    for lengths in (
        (0, 0, 0, 112, 0, 0, 0, 0, 0),
        (16, 0, 16, 32, 0, 0, 48, 0, 0),
        (1, 2, 3, 4, 5, 6, 7, 15, 69),
    ):
        cu = np.cumsum([0, *lengths]).astype(np.int32)
        pack.check(pack.inputs._replace(cu_seqlens=cu))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "at",
    [
        {9: 129},
        {9: 2**31 - 1},
        {0: 3},
        {0: 17, 1: 18, 2: 19},
        {0: -1},
        {4: 20},
        {9: 0},
        {3: 2**31 - 1, 4: -5},
        {9: -(2**31)},
    ],
    ids=str,
)
def test_offsets_that_are_none_of_the_row(at: dict[int, int], pack: Split) -> None:
    """Beyond it, not from 0, falling, and so that their differences wrap: NaN in every token, state and gradient."""
    cu = np.array(pack.inputs.cu_seqlens)
    for i, offset in at.items():
        cu[i] = offset
    results, grads = pack.run(pack.inputs._replace(cu_seqlens=cu))
    for x in (*results, *(x for name, x in grads.items() if name in TOKENS or name == "initial_state")):
        assert np.isnan(x).all()


def test_later_tokens_change_no_earlier_bit(rows: Split) -> None:
    """Neither of outputs nor of gradients of a loss on the tokens before them."""
    t = 70
    changed = {n: np.array(getattr(rows.inputs, n)) for n in TOKENS}
    for x in changed.values():
        x[:, t:] *= 0.5
    do = np.array(rows.grads.o)
    do[:, t:] = 0
    rows.grads = rows.grads._replace(final_state=np.zeros_like(rows.grads.final_state))
    one, two = (rows.run(x, do) for x in (rows.inputs, rows.inputs._replace(**changed)))
    assert np.array_equal(one[0][0][:, :t], two[0][0][:, :t])
    assert not np.array_equal(one[0][0][:, t:], two[0][0][:, t:])
    for name in TOKENS:
        assert np.array_equal(one[1][name][:, :t], two[1][name][:, :t]), name


@pytest.mark.exhaustive
def test_what_is_in_one_sequence_stays_there(pack: Split) -> None:
    """NaN in a sequence that lies in four ranks changes no bit of the others."""
    clean, _ = pack.run()
    begin, end = 3, 43
    v = np.array(pack.inputs.v)
    v[:, begin:end] = np.nan
    results, grads = pack.run(pack.inputs._replace(v=v))
    inside = np.zeros(pack.request.T, bool)
    inside[begin:end] = True
    assert np.isnan(results[0][:, inside]).any()
    assert np.array_equal(results[0][:, ~inside], clean[0][:, ~inside])
    of_others = [n for n in range(len(PACK)) if n != 2]
    assert np.array_equal(results[1][of_others], clean[1][of_others])
    for name in TOKENS:
        assert np.isfinite(grads[name][:, ~inside]).all(), name


@pytest.mark.exhaustive
def test_the_pieces_under_jax() -> None:
    """Two halves, their maps composed and folded under ``jit``, and the gradient through all of it."""
    case = Case(T=80, K=16, V=8, H=1, HV=2)
    x, run = plain(case)
    initial, rest = x.pop("initial_state"), {n: x[n] for n in ("k", "v", "g", "beta")}

    def maps(x: dict[str, Any]) -> Any:
        halves = [{n: a[:, part] for n, a in x.items()} for part in (slice(0, 30), slice(30, 80))]
        return [segment_transition(**half, use_qk_l2norm_in_kernel=True, backend="xla") for half in halves]

    @jax.jit
    def end(x: dict[str, Any]) -> Any:
        one, two = maps(x)
        M, C = compose(one, two)
        by_fold = fold(jnp.stack([one[0], two[0]]), jnp.stack([one[1], two[1]]), initial)
        return M @ initial + C, by_fold

    want = run({**x, "initial_state": initial})[1]
    for state in end(rest):
        alike(state, want, 2e-5)
    got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(end(x)[1]))))(rest)
    plainly = jax.jit(jax.grad(lambda y: jnp.sum(jnp.sin(run({**x, **y, "initial_state": initial})[1]))))(
        rest
    )
    alike(got, plainly, 5e-5)


# --- what is exchanged ------------------------------------------------------------------------------------------------


def exchanged(case: Case, ranks: Ranks, differentiated: bool) -> list[tuple[str, int]]:
    """Collectives of the program, each with the bytes that one rank gives."""
    _, inputs = build(case)
    arrays = {n: jnp.asarray(x) for n, x in inputs._asdict().items() if x is not None}
    given = {n: arrays.pop(n) for n in ("cu_seqlens",) if n in arrays}
    function = split_call(case, ranks, (*arrays, *given))

    def loss(x: dict[str, Any]) -> Any:
        return sum(jnp.sum(y) for y in function({**x, **given}))

    traced = jax.jit(jax.grad(loss) if differentiated else loss).trace(arrays)
    found: list[tuple[str, int]] = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if re.match("all_gather|psum|ppermute|all_to_all|reduce_scatter|pmax", name):
                size = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
                if AXIS in equation.params.get("axes", ()) + (equation.params.get("axis_name") or ()):
                    found.append((name, size))
            for sub in jaxprs_in_params(equation.params):
                visit(sub)

    visit(traced.jaxpr.jaxpr)
    return found


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("lengths", [None, PACK])
def test_bytes_do_not_depend_on_tokens(lengths: tuple[int, ...] | None) -> None:
    """What docs/guide/jax.md says: (M, C) forward, one state gradient backward, and states only where asked for."""
    HV, K, V = 2, 16, 24
    item, sizes = 4, []
    for times in (1, 2):
        pack = None if lengths is None else (*lengths[:-1], lengths[-1] + 128 * times - 112)
        case = Case(B=1, T=128 * times, HV=HV, K=K, V=V, lengths=pack, initial=False, final=False)
        forward, both = (exchanged(case, Ranks(), differentiated) for differentiated in (False, True))
        sizes.append((forward, both))
    assert sizes[0] == sizes[1]
    forward, both = sizes[0]
    assert forward == [("all_gather", HV * K * (K + V) * item)]
    assert both == [*forward, ("all_gather", HV * K * V * item)]


def test_bytes_of_states_and_parameters() -> None:
    case = Case(B=2, T=128, HV=2, K=16, V=16, gate="softplus")
    states = 2 * 2 * 16 * 16 * 4
    forward = exchanged(case, Ranks(), False)
    assert sorted(forward) == [("all_gather", 2 * states), ("psum_invariant", states)]
    sums = Counter(size for name, size in exchanged(case, Ranks(), True) if name != "all_gather")
    # The gradients of A_log, dt_bias and the initial state, which are whole on every rank, and of the loss.
    assert sums[states] == 2 and {2 * 4, 2 * 16 * 4} <= set(sums)


# --- JAX's transformations --------------------------------------------------------------------------------------------


def plain(case: Case) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """The arrays of a call, and the call on the whole row."""
    _, inputs = build(case)
    arrays = {n: jnp.asarray(x) for n, x in inputs._asdict().items() if x is not None}
    return arrays, lambda x: kdacore.chunk_kda(**x, **options_of(case), backend="xla")


def alike(got: Any, want: Any, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < bound


@pytest.mark.exhaustive
@pytest.mark.parametrize("check_vma", [True, False])
def test_remat_and_a_scan_over_layers(check_vma: bool) -> None:
    """As a model does it: layers' parameters stacked, each layer computed again in the backward."""
    case = Case(T=64, K=16, V=32, H=2, gate="softplus", initial=False, final=False)
    x, run = plain(case)
    layers = {n: jnp.stack([x.pop(n)] * 2) for n in ("A_log", "dt_bias")}
    call = split_call(case, Ranks(4, check_vma), (*x, *layers))

    def loss(x: dict[str, Any], layers: dict[str, Any], op: Any) -> Any:
        def layer(v: Any, own: dict[str, Any]) -> Any:
            return v + op({**x, "v": v, **own})[0], None

        v, _ = jax.lax.scan(jax.checkpoint(layer), x["v"], layers)
        return jnp.sum(jnp.sin(v))

    got, want = (
        jax.jit(jax.grad(lambda x, y, op=op: loss(x, y, op), (0, 1)))(x, layers) for op in (call, run)
    )
    alike(got, want, 2e-5)


@pytest.mark.exhaustive
def test_a_scan_inside_shard_map() -> None:
    """Blocks of a row one after another, each split over the ranks, with the state carried from one to the next."""
    case = Case(T=128, K=16, V=16)
    x, run = plain(case)
    state = x.pop("initial_state")

    def local(x: dict[str, Any], state: Any) -> Any:
        def block(state: Any, part: dict[str, Any]) -> Any:
            o, state = kdacore.chunk_kda(
                **part, initial_state=state, **options_of(case), cp=AXIS, backend="xla"
            )
            return state, o

        state, o = jax.lax.scan(block, state, x)
        return o, state

    blocks = {n: jnp.stack(jnp.split(a, 2, axis=1)) for n, a in x.items()}
    specs = dict.fromkeys(x, P(None, None, AXIS))
    o, last = jax.jit(
        jax.shard_map(local, mesh=mesh(8), in_specs=(specs, P()), out_specs=(P(None, None, AXIS), P()))
    )(blocks, state)
    want = run({**x, "initial_state": state})
    alike((jnp.concatenate([*o], axis=1), last), want, 2e-5)


@pytest.mark.exhaustive
def test_ranks_of_a_vmapped_axis() -> None:
    """``jax.vmap(axis_name=...)`` stands in for a mesh on one device."""
    case = Case(T=64, K=16, V=16, initial=False)
    x, run = plain(case)
    cut = {n: jnp.stack(jnp.split(a, 4, axis=1)) for n, a in x.items()}

    def split(x: dict[str, Any]) -> Any:
        return kdacore.chunk_kda(**x, **options_of(case), cp=AXIS, backend="xla")

    o, states = jax.jit(jax.vmap(split, axis_name=AXIS))(cut)
    want = run(x)
    alike(jnp.concatenate([*o], axis=1), want[0], 2e-5)
    for state in states:
        alike(state, want[1], 2e-5)


@pytest.mark.exhaustive
def test_a_mesh_of_two_axes() -> None:
    """Sequences over one axis, tokens over the other: what is exchanged stays inside the rows of the mesh."""
    case = Case(B=2, T=64, K=16, V=16, gate="softplus")
    x, run = plain(case)
    both = jax.sharding.Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", AXIS))
    specs = {n: P("data", AXIS) if n in TOKENS else P() for n in x} | {"initial_state": P("data")}

    def local(x: dict[str, Any]) -> Any:
        return kdacore.chunk_kda(**x, **options_of(case), cp=AXIS, backend="xla")

    split = jax.shard_map(local, mesh=both, in_specs=(specs,), out_specs=(P("data", AXIS), P("data")))

    def loss(x: dict[str, Any], op: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y)) for y in op(x))

    alike(split(x), run(x), 2e-5)
    got, want = (jax.jit(jax.grad(lambda x, op=op: loss(x, op)))(x) for op in (split, run))
    alike(got, want, 5e-5)


def test_one_rank_is_a_plain_call() -> None:
    """No transition is computed, and nothing gathered."""
    case = Case(T=40, K=8, V=8)
    assert {name for name, _ in exchanged(case, Ranks(1), True)} == {"psum_invariant"}
    x, run = plain(case)
    one = jax.make_jaxpr(split_call(case, Ranks(1), tuple(x)))(x)
    assert str(one).count("jit[") == str(jax.make_jaxpr(run)(x)).count("jit[")


def test_it_is_recorded() -> None:
    case = Case(T=64, K=8, V=8)
    with kdacore.record_selections() as ran:
        exchanged(case, Ranks(2), False)
    assert [s.backend for s in ran] == ["xla"]


def test_explain_inside_shard_map() -> None:
    x, _ = plain(replace(SMALL, lengths=None))
    shown: list[str] = []

    def local(x: dict[str, Any]) -> Any:
        shown.append(str(kdacore.explain("chunk_kda", **x, output_final_state=True, cp=AXIS)))
        return x["q"]

    specs = dict.fromkeys(x, SPLIT) | {"initial_state": P()}
    jax.eval_shape(jax.shard_map(local, mesh=mesh(4), in_specs=(specs,), out_specs=SPLIT), x)
    assert re.search("ranks: 4, each with T=16 of 64 tokens", shown[0])
    assert re.search(r"-> xla: supported", shown[0])


# --- bad input --------------------------------------------------------------------------------------------------------

SMALL = Case(T=64, K=8, V=8, lengths=(30, 34))


def refused(
    argument: str, message: str, drop: tuple[str, ...] = (), check_vma: bool = True, **changed: Any
) -> None:
    """A call inside shard_map raises ContractError for an argument. ``changed`` may be arrays, options or specs."""
    x, _ = plain(SMALL)
    specs = {n: SPLIT if n in TOKENS else P() for n in x} | changed.pop("specs", {})
    arrays = {n: a for n, a in changed.items() if isinstance(a, jax.Array)}
    options = {n: a for n, a in changed.items() if n not in arrays}
    x = {n: a for n, a in (x | arrays).items() if n not in drop}

    def local(x: dict[str, Any]) -> Any:
        return kdacore.chunk_kda(**{"cp": AXIS, **x, **options})[0]

    specs = {n: specs.get(n, P()) for n in x}
    run = jax.shard_map(local, mesh=mesh(2), in_specs=(specs,), out_specs=SPLIT, check_vma=check_vma)
    with pytest.raises(ContractError, match=f"'{argument}'.*{message}"):
        jax.eval_shape(run, x)


def test_axes_that_are_none() -> None:
    x, _ = plain(SMALL)
    for around in (lambda f: f, jax.jit):
        with pytest.raises(ContractError, match="'cp'.*'seq'.*no axis that is bound.*shard_map"):
            around(lambda: kdacore.chunk_kda(**x, cp="seq")[0])()
    refused("cp", "'rows', no axis that is bound", cp="rows")
    for wrong in (("seq",), 1, jnp, True):
        refused("cp", "the name of one axis", cp=wrong)
    two = jax.sharding.Mesh(np.asarray(jax.devices()[:2]).reshape(2, 1), (AXIS, "other"))
    half = jax.shard_map(
        lambda x: kdacore.chunk_kda(**x, cp="other")[0],
        mesh=two, in_specs=(dict.fromkeys(x, P()),), out_specs=P(), axis_names={AXIS}, check_vma=False,
    )  # fmt: skip
    with pytest.raises(ContractError, match="'cp'.*'other'.*no axis that is bound"):
        jax.eval_shape(jax.jit(half), x)


def test_what_does_not_go_with_ranks() -> None:
    rows = jnp.zeros(2, jnp.int32)
    refused("state_indices", "no pool", state_indices=rows)
    refused("has_initial_state", "no pool", has_initial_state=rows > 0)
    refused("inplace_state", "no pool", inplace_state=True, output_final_state=True)
    refused("checkpoint_every", "with cu_seqlens and cp.*border", checkpoint_every=64)
    refused(
        "checkpoint_every",
        "T=32 tokens a rank.*border.*divisor",
        checkpoint_every=64,
        drop=("cu_seqlens", "initial_state"),
    )
    for function in (kdacore.fused_recurrent_kda, kdacore.fused_recurrent_gated_delta_rule):
        with pytest.raises(TypeError, match="cp"):
            function(*[None] * 5, cp=AXIS)


def test_what_must_be_alike_and_what_must_not() -> None:
    refused("cu_seqlens", "differs along 'seq'.*whole row", cu_seqlens=jnp.array([0, 30, 64, 64]),
            specs={"cu_seqlens": P(AXIS)}, drop=("initial_state",))  # fmt: skip
    refused("q", "same array on every rank.*in_specs", specs=dict.fromkeys(TOKENS, P()))
    # The rest of the contract, of the rank's own call.
    refused("beta", "shape", beta=jnp.zeros((1, 60, 2)))
    refused("initial_state", "shape", initial_state=jnp.zeros((3, 2, 8, 8)), check_vma=False)


def test_backends_that_cannot_be_traced() -> None:
    x, _ = plain(replace(SMALL, lengths=None))
    run = jax.shard_map(
        lambda x: kdacore.chunk_kda(**x, cp=AXIS, backend="reference")[0],
        mesh=mesh(2), in_specs=(dict.fromkeys(x, SPLIT) | {"initial_state": P()},), out_specs=SPLIT,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="trac"):
        jax.eval_shape(run, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gates", ["zero", "slow", "five", "sixty", "mixed"])
@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_gates(op: str, gates: str) -> None:
    """Near 0 a state lives as long as the row: a low-precision exchange fails there."""
    Split(Case(T=1024, K=32, V=32, op=op, gates=gates), Ranks(4)).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_random_packs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 15, 16, 17, 63, 64, 65, 100], rng.integers(1, 9))
    count = int(rng.choice([2, 3, 4, 8]))
    padding = -int(lengths.sum()) % count + count * int(rng.integers(1, 20))
    case = Case(
        lengths=(*map(int, lengths),), seed=seed, H=int(rng.choice([1, 2])), HV=2, K=16,
        V=int(rng.choice([8, 24])), op=str(rng.choice(["chunk_kda", "chunk_gated_delta_rule"])),
        gate=str(rng.choice(["log", "softplus"])), v_first=bool(rng.integers(2)), final=bool(rng.integers(4)),
        beta_sigmoid=True, neg_eigval=bool(rng.integers(2)), initial=bool(rng.integers(4)),
    )  # fmt: skip
    Split(case, Ranks(count, check_vma=bool(seed % 2)), padding).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "state_dtype": "bfloat16", "gates": "zero"},
        {"gate": "sigmoid", "lower_bound": -5.0, "A_log": False},
        {"collinear": True, "gates": "zero"},
        {"B": 3, "initial": False},
    ],
    ids=str,
)
def test_other_options(changed: dict[str, Any]) -> None:
    Split(replace(Case(T=512, K=32, V=32), **changed), Ranks(8)).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [None, (3, 0, 30, 7)])
def test_the_tpu_kernels(lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted. JAX's interpreter of kernels does not run under check_vma=True."""
    monkeypatch.setenv("KDACORE_PALLAS_INTERPRET", "1")
    kdacore.config.refresh()
    case = Case(T=40, K=16, V=24, lengths=lengths, gate="softplus")
    Split(case, Ranks(2, check_vma=False, backend="pallas")).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_slices_that_are_composed_of_whole_calls(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a backend that has no functions for a slice."""
    monkeypatch.setenv("KDACORE_PALLAS_INTERPRET", "1")
    monkeypatch.setattr(slices, "slice_functions", lambda name, request, **_: slices.composed(name, request))
    kdacore.config.refresh()
    for lengths in (None, (3, 0, 30, 7)):
        case = Case(T=40, K=16, V=16, lengths=lengths, gate="softplus", H=2, HV=2)
        Split(case, Ranks(2, check_vma=False, backend=backend)).check()


@pytest.mark.exhaustive
def test_checkpoints() -> None:
    """Each rank returns those of its own blocks: split over the mesh, they are those of the row."""
    case = Case(B=2, T=512, K=16, V=16, checkpoint_every=64, v_first=True)
    x, _ = plain(case)

    def run(x: dict[str, Any], **options: Any) -> Any:
        return kdacore.chunk_kda(**x, **options_of(case), checkpoint_every=64, backend="xla", **options)

    specs = {n: SPLIT if n in TOKENS else P() for n in x}
    split = jax.shard_map(
        lambda x: run(x, cp=AXIS), mesh=mesh(4), in_specs=(specs,), out_specs=(SPLIT, P(), SPLIT)
    )
    alike(jax.jit(split)(x), run(x), 2e-5)
