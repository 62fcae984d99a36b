"""The suite must fail a backend that has a bug: each mutant is the reference with one bug users met somewhere."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.testing.matrix import plan
from kdacore.testing.suite import Result, coverage_problems, judged, run_case
from kdacore.testing.verify import verify
from kdacore.types import Backend, GateGrads, InputGrads, OpImpl, Outputs, Reason

NAME = "mutant"
CHUNK, DECODE, INTRA = "chunk_kda", "fused_recurrent_kda", "kda_chunk_intra"
Wrap = Callable[..., Any]


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers a backend made of mutated reference ops; takes it out again."""

    def add(
        op: str,
        *,
        forward: Wrap | None = None,
        backward: Wrap | None = None,
        kind: str = "numpy",
        **more: Any,
    ) -> None:
        original = REGISTRY.get("reference").backend.ops[op]
        impl = dataclasses.replace(
            original,
            forward=_wrapped(original.forward, forward),
            backward=_wrapped(original.backward, backward),
            **more,
        )
        backend = Backend(NAME, "0", (kind,), {op: impl})  # type: ignore[arg-type]

        class Plugin:
            @hookimpl
            def kdacore_backends(self) -> list[Backend]:
                return [backend]

        REGISTRY.register(Plugin(), NAME)

    yield add
    REGISTRY.unregister(NAME)


def _wrapped(original: Any, mutation: Wrap | None) -> Any:
    return original if mutation is None else lambda *args: mutation(original, *args)


def failures(*until: str) -> dict[str, Result]:
    """Failed cases of the quick suite, the first one of each check; ends early once these checks have failed."""
    found: dict[str, Result] = {}
    for case in plan(NAME).cases:
        if case.check in found:
            continue
        if until and set(until) <= set(found):
            break
        result = run_case(case)
        if result.status == "failed":
            found.setdefault(case.check, result)
    return found


def test_an_unchanged_backend_passes(register: Any) -> None:
    register(CHUNK, forward=lambda f, *a: f(*a), backward=lambda f, *a: f(*a))
    assert not failures()


# --- forward mutations: original forward, request, inputs -> outputs -------------------------------------------------


def later_anchor(f: Any, request: Any, x: Any) -> Outputs:
    """Right to the last bits, which depend on the last row: what an exponent anchored there does."""
    out = f(request, x)
    if request.has("out"):
        return out
    last = np.clip(np.nan_to_num(np.asarray(x.g, np.float32)[:, -1]), -10, 10)
    anchor = np.float32(1.0 + abs(float(last.mean())) / 3)
    return out._replace(o=((out.o * anchor) / anchor).astype(out.o.dtype))


def wrong_layout(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if out.final_state is None:
        return out
    return out._replace(
        final_state=np.ascontiguousarray(out.final_state.swapaxes(-1, -2)).reshape(out.final_state.shape)
    )


def nan_on_one_token(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if request.packed:
        starts = np.asarray(x.cu_seqlens)
        for start, end in itertools.pairwise(starts):
            if end - start == 1:
                out.o[:, start] = np.nan
    return out


def writes_an_input(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    x.k[..., 0] *= 1.0000001
    return out


def writes_past_the_end(f: Any, request: Any, x: Any) -> Outputs:
    beyond = np.lib.stride_tricks.as_strided(x.v, shape=(x.v.size + 1,), strides=(x.v.itemsize,))
    if x.v.flags.c_contiguous:
        beyond[-1] = 0.0
    return f(request, x)


def reads_past_the_end(f: Any, request: Any, x: Any) -> Outputs:
    """A tile that is not masked: the row after the last one times zero."""
    out = f(request, x)
    if x.q.flags.c_contiguous:
        row = np.lib.stride_tricks.as_strided(x.q, shape=(x.q.size + 1,), strides=(x.q.itemsize,))[-1]
        out.o[:, -1] += out.o.dtype.type(0) * row.astype(out.o.dtype)
    return out


def ignores_initial_state(f: Any, request: Any, x: Any) -> Outputs:
    return f(request, x._replace(initial_state=None))


def never_the_same(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    noise = 1 + 1e-6 * np.random.default_rng().standard_normal(out.o.shape)
    return out._replace(o=(out.o * noise).astype(out.o.dtype))


def bounds_the_gate(f: Any, request: Any, x: Any) -> Outputs:
    """A kernel for bounded gates fed an unbounded one."""
    return (
        f(request, x._replace(g=np.maximum(x.g, -5).astype(x.g.dtype)))
        if request.gate == "log"
        else f(request, x)
    )


def rounds_beta(f: Any, request: Any, x: Any) -> Outputs:
    """sigmoid(beta) rounded to eight bits of mantissa on its way into the state."""
    if not request.beta_sigmoid:
        return f(request, x)
    beta = (2.0 if request.neg_eigval else 1.0) / (1 + np.exp(-np.asarray(x.beta, np.float32)))
    beta = (np.float32(beta).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)
    return f(dataclasses.replace(request, beta_sigmoid=False, neg_eigval=False), x._replace(beta=beta))


def returns_unasked_state(f: Any, request: Any, x: Any) -> Outputs:
    return f(dataclasses.replace(request, output_final_state=True), x)


def wide_output(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    return out._replace(o=out.o.astype(np.float32))


def checkpoints_at_the_end(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if out.checkpoints is not None:
        out.checkpoints[:, :-1] = out.checkpoints[:, 1:].copy()
    return out


def asks_the_reference(f: Any, request: Any, x: Any) -> Outputs:
    """A fast backend that is silently never used."""
    kdacore.kda_gate(np.zeros((1, 1, 1, 1), np.float32), lower_bound=-5.0, backend="reference")
    return f(request, x)


def raises(f: Any, request: Any, x: Any) -> Outputs:
    raise IndexError("off by one")


def refuses_late(f: Any, request: Any, x: Any) -> Outputs:
    raise kdacore.UnsupportedError(request.op, "not today", {})


def depends_on_the_pack(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    return out._replace(o=(out.o * np.float32(1 + 2e-7 * request.N)).astype(out.o.dtype))


def unclamped_rate(f: Any, request: Any, x: Any) -> Outputs:
    """``exp(A_log)`` in float32 as it comes: infinite above 88.7."""
    if request.gate == "log" or x.A_log is None:
        return f(request, x)
    a = np.float32(x.A_log) if request.scalar_gate else np.float32(x.A_log)[:, None]
    with np.errstate(all="ignore"):
        rate = np.exp(a)
        g = np.float32(x.g) + (0 if x.dt_bias is None else np.float32(x.dt_bias).reshape(x.g.shape[2:]))
        if request.gate == "softplus":
            log = -rate * np.logaddexp(np.float32(0), g)
        else:
            log = np.float32(request.lower_bound) / (1 + np.exp(-rate * g))
    given = x._replace(g=log, A_log=None, dt_bias=None)
    with np.errstate(all="ignore"):
        return f(dataclasses.replace(request, gate="log", lower_bound=None, safe_gate=False), given)


def subtracts_sums(f: Any, request: Any, x: Any) -> Outputs:
    """Sums of log decays that reach minus infinity: the difference of two is not a number."""
    out = f(request, x)
    if request.gate == "log" and not request.has("out"):
        with np.errstate(all="ignore"):
            sums = np.cumsum(np.float32(x.g) * np.float32(1.442695), axis=1)
            out.o[...] += 0 * np.nan_to_num((sums - sums[:, :1]).sum(), nan=np.nan, posinf=0, neginf=0)
    return out


def rows_of_neighbours(f: Any, request: Any, x: Any) -> Outputs:
    """The last tile of a sequence is not masked: what follows it in the pack is multiplied by zero."""
    out = f(request, x)
    if request.packed and not request.has("out"):
        for end in np.asarray(x.cu_seqlens)[1:]:
            if 0 < end < np.asarray(x.cu_seqlens)[-1]:
                out.o[:, end - 1] += 0 * np.asarray(x.k, out.o.dtype)[:, end].sum()
    return out


def mixes_heads(f: Any, request: Any, x: Any) -> Outputs:
    """A product of all heads with a mask of one."""
    out = f(request, x)
    if not request.has("out"):
        out.o[...] += 0 * out.o.sum(2, keepdims=True)
    return out


def mixes_states(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if out.final_state is not None and not request.inplace_state:
        out.final_state[...] += 0 * out.final_state.sum(0, keepdims=True)
    return out


FORWARD = [
    (unclamped_rate, {"accuracy"}),
    (subtracts_sums, {"accuracy"}),
    (rows_of_neighbours, {"nan_containment"}),
    (mixes_heads, {"nan_containment"}),
    (mixes_states, {"nan_containment"}),
    (later_anchor, {"causality", "causality_append"}),
    (wrong_layout, {"accuracy", "split"}),
    (nan_on_one_token, {"accuracy"}),
    (writes_an_input, {"accuracy"}),
    (writes_past_the_end, {"accuracy"}),
    (reads_past_the_end, {"accuracy"}),
    (ignores_initial_state, {"accuracy", "split"}),
    (never_the_same, {"determinism"}),
    (bounds_the_gate, {"accuracy"}),
    (rounds_beta, {"accuracy"}),
    (returns_unasked_state, {"accuracy"}),
    (wide_output, {"accuracy"}),
    (checkpoints_at_the_end, {"accuracy"}),
    (asks_the_reference, {"accuracy"}),
    (raises, {"accuracy"}),
    (refuses_late, {"accuracy"}),
]


def exits(f: Any, request: Any, x: Any) -> Outputs:
    raise SystemExit(3)


def on_the_meta_device(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    return out._replace(o=out.o.to("meta"))


@pytest.mark.parametrize(
    ("mutation", "kind", "said"),
    [
        (exits, "numpy", "SystemExit: 3"),
        (lambda f, *a: f(*a)._replace(o=[1.0]), "numpy", "o: got builtins.list; wanted a numpy array"),
        (on_the_meta_device, "torch", "o: got an array on meta:0; wanted one on cpu"),
    ],
    ids=["exits", "list", "meta"],
)
def test_what_is_no_result_is_a_finding(register: Any, mutation: Wrap, kind: str, said: str) -> None:
    """Neither the end of the suite nor an error of its own."""
    register(CHUNK, forward=mutation, kind=kind)
    result = run_case(plan(NAME).cases[0])
    assert result.status == "failed" and said in result.message
    assert mutation is exits or "Traceback" not in result.message


@pytest.mark.first_cases(6)
@pytest.mark.parametrize(("mutation", "checks"), FORWARD, ids=[m.__name__ for m, _ in FORWARD])
def test_a_wrong_forward_fails(register: Any, mutation: Wrap, checks: set[str]) -> None:
    register(CHUNK, forward=mutation)
    assert checks <= set(failures(*checks))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("op", "buffers", "check"),
    [(CHUNK, 1, "determinism"), (DECODE, 2, "determinism"), (CHUNK, 1, "gradient_determinism")],
)
def test_results_in_memory_that_is_used_again_fail(
    register: Any, kind: str, op: str, buffers: int, check: str
) -> None:
    """The caller's array changes at a later call: the next one, or where two buffers take turns, the one after it."""
    kept: dict[Any, Any] = {}
    turns = itertools.count()

    def again(x: Any, what: str) -> Any:
        held = kept.setdefault((what, next(turns) % buffers, tuple(x.shape), x.dtype), x)
        held[...] = x
        return held

    def static(f: Any, request: Any, x: Any) -> Outputs:
        out = f(request, x)
        return out if request.has("out") else out._replace(o=again(out.o, "o"))

    def static_gradient(f: Any, *args: Any) -> InputGrads:
        grads = f(*args)
        return grads._replace(k=again(grads.k, "k"))

    mutation = {"forward": static} if check == "determinism" else {"backward": static_gradient}
    register(op, kind=kind, **mutation)
    cases = [c for c in plan(NAME).cases if c.check == check]
    results = [run_case(c) for c in cases]
    assert cases and all(r.status == "failed" and "stays" in r.message for r in results)


def returns_v(f: Any, request: Any, x: Any) -> Outputs:
    return f(request, x)._replace(o=x.v)


def o_in_the_memory_of_v(f: Any, request: Any, x: Any) -> Outputs:
    """Saves an allocation, from the second call of a shape on: dispatch has looked at the first."""
    out = f(request, x)
    if request.has("out") or not _again(request):
        return out
    x.v[...] = out.o
    return out._replace(o=x.v)


def checkpoints_are_the_state(f: Any, request: Any, x: Any) -> Outputs:
    """Right values: the first checkpoint is the state that the call starts from."""
    out = f(request, x)
    if out.checkpoints is None or x.initial_state is None or out.checkpoints.shape[1] != 1:
        return out
    return out._replace(checkpoints=x.initial_state[:, None])


_calls: dict[Any, int] = {}


def _again(request: Any) -> bool:
    _calls[request] = _calls.get(request, 0) + 1
    return _calls[request] > 1


@pytest.mark.parametrize(
    ("mutation", "check", "said"),
    [
        (returns_v, "accuracy", "o: got memory of the argument 'v'; wanted memory of its own"),
        (o_in_the_memory_of_v, "determinism", "o has memory of its own: error inf"),
    ],
)
def test_results_in_the_memory_of_an_argument_fail(
    register: Any, mutation: Wrap, check: str, said: str
) -> None:
    _calls.clear()
    register(CHUNK, forward=mutation)
    assert said in failures(check)[check].message


def test_a_checkpoint_in_the_memory_of_the_state_fails(register: Any) -> None:
    register(CHUNK, forward=checkpoints_are_the_state)
    x = {name: np.full((1, 64, 1, 8), -0.1, np.float32) for name in ("q", "k", "v", "g")}
    with pytest.raises(kdacore.PluginError, match="checkpoints: got memory of the argument 'initial_state'"):
        kdacore.chunk_kda(
            **x,
            beta=np.ones((1, 64, 1), np.float32),
            initial_state=np.zeros((1, 1, 8, 8), np.float32),
            checkpoint_every=64,
            backend=NAME,
        )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("other", ["an input", "another gradient"])
def test_gradients_in_memory_of_others_fail(register: Any, kind: str, other: str) -> None:
    def shares(f: Any, request: Any, x: Any, *rest: Any) -> InputGrads:
        grads = f(request, x, *rest)
        return grads._replace(k=x.k if other == "an input" else grads.q)

    register(CHUNK, kind=kind, backward=shares)
    said = failures("gradients")["gradients"].message
    assert "gradient of k" in said and "memory of its own" in said


def _zero_state(x: tuple[Any, ...]) -> Any:
    (B, _, HV, V), K = x[2].shape, x[0].shape[3]
    return np.zeros((B, HV, K, V), np.float32)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: (x[2], _zero_state(x), None), "o: got memory of the argument 'v'"),
        (lambda x: (x[2].copy(),), "returned a tuple of 1; wanted a tuple of 3 results or None"),
        (lambda x: (x[2][:, :1].copy(), None, None), "o: got shape"),
        (lambda x: "done", "returned str; wanted a tuple of 3 results or None"),
    ],
    ids=["input", "short", "shape", "text"],
)
def test_a_fast_path_that_returns_no_results_fails(
    register: Any, answer: Callable[..., Any], said: str
) -> None:
    def offers(request: Any, inputs: Any) -> Any:
        return answer

    register(DECODE, fast_path=offers)
    message = failures("determinism")["determinism"].message
    assert "fast path of fused_recurrent_kda" in message and said in message


@pytest.mark.exhaustive
def test_a_later_anchor_passes_every_accuracy_case(register: Any) -> None:
    """It is the bit comparison alone that catches it."""
    register(CHUNK, forward=later_anchor)
    assert not {"accuracy", "split", "determinism", "gradients"} & set(failures())


def test_a_broken_promise_of_batch_invariance_fails(register: Any) -> None:
    register(CHUNK, forward=depends_on_the_pack, batch_invariant=True)
    assert "batch_invariance" in failures("batch_invariance")


def test_a_promise_of_batch_invariance_that_nothing_shows_fails(register: Any) -> None:
    def one_sequence(request: Any) -> Reason | None:
        return Reason("packed", "one sequence") if request.N > 1 else None

    register(CHUNK, verifiers=(one_sequence,), batch_invariant=True)
    said = "batch_invariant of chunk_kda: declared, but every case is declined (packed 3x)"
    assert coverage_problems(judged(plan(NAME).cases)) == [said]


# --- backward mutations ----------------------------------------------------------------------------------------------


def one_percent_off(f: Any, *args: Any) -> InputGrads:
    grads = f(*args)
    return grads._replace(v=grads.v * grads.v.dtype.type(1.01))


def swapped_gradients(f: Any, *args: Any) -> InputGrads:
    grads = f(*args)
    return grads._replace(q=grads.k, k=grads.q)


def nan_under_strong_decay(f: Any, request: Any, x: Any, *rest: Any) -> InputGrads:
    """An exponential taken before its mask."""
    grads = f(request, x, *rest)
    if request.gate == "log" and (np.asarray(x.g, np.float32) < -50).any():
        grads.g[..., 0] = np.nan
    return grads


def gradient_of_a_later_row(f: Any, request: Any, x: Any, *rest: Any) -> InputGrads:
    grads = f(request, x, *rest)
    anchor = np.float32(1.0 + abs(float(np.nan_to_num(np.asarray(x.k, np.float32)[:, -1]).mean())) / 3)
    return grads._replace(k=((grads.k * anchor) / anchor).astype(grads.k.dtype))


def forgets_the_state_gradient(f: Any, request: Any, x: Any, saved: Any, grads: Any) -> InputGrads:
    return f(request, x, saved, grads._replace(final_state=None))


def no_initial_state_gradient(f: Any, *args: Any) -> InputGrads:
    return f(*args)._replace(initial_state=None)


def needs_residuals(f: Any, request: Any, x: Any, saved: Any, grads: Any) -> InputGrads:
    if not saved:
        raise IndexError("tuple index out of range")
    return f(request, x, saved, grads)


def random_order_sum(f: Any, *args: Any) -> InputGrads:
    grads = f(*args)
    noise = 1 + 1e-6 * np.random.default_rng().standard_normal(grads.q.shape)
    return grads._replace(q=(grads.q * noise).astype(grads.q.dtype))


def unmasked_slope(f: Any, request: Any, x: Any, *rest: Any) -> InputGrads:
    """An infinite rate times a slope of zero."""
    grads = f(request, x, *rest)
    if request.gate == "sigmoid" and x.A_log is not None:
        with np.errstate(all="ignore"):
            rate = np.exp(np.asarray(x.A_log, np.float32))
            grads.g[...] += (0 * rate if request.scalar_gate else (0 * rate)[:, None]).astype(grads.g.dtype)
    return grads


def mixes_sequences(f: Any, request: Any, x: Any, *rest: Any) -> InputGrads:
    """A product of the rows of all sequences with a mask."""
    grads = f(request, x, *rest)
    grads.v[...] += 0 * grads.v[:, np.isfinite(grads.v).all((0, 2, 3)).argmin()][:, None]
    return grads


BACKWARD = [
    (unmasked_slope, {"gradients"}),
    (mixes_sequences, {"gradient_nan_containment"}),
    (one_percent_off, {"gradients", "recomputed_gradients"}),
    (swapped_gradients, {"gradients"}),
    (nan_under_strong_decay, {"gradients"}),
    (gradient_of_a_later_row, {"gradient_causality", "gradient_causality_append"}),
    (forgets_the_state_gradient, {"gradients"}),
    (no_initial_state_gradient, {"gradients"}),
    (random_order_sum, {"gradient_determinism"}),
]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("mutation", "checks"), BACKWARD, ids=[m.__name__ for m, _ in BACKWARD])
def test_a_wrong_backward_fails(register: Any, mutation: Wrap, checks: set[str]) -> None:
    register(CHUNK, backward=mutation)
    assert checks <= set(failures(*checks))


def test_a_backward_that_cannot_recompute_fails(register: Any) -> None:
    def keeps(f: Any, request: Any, x: Any) -> Outputs:
        return f(request, x)._replace(saved=(x.q,))

    register(CHUNK, forward=keeps, backward=lambda f, r, x, s, g: needs_residuals(f, r, x, s, g))
    assert "recomputed_gradients" in failures("recomputed_gradients")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "form", [lambda f, r: 3, lambda f, r: "", lambda f, r: 1 / 0], ids=["number", "none", "raises"]
)
def test_a_form_that_is_no_text_fails(register: Any, form: Wrap) -> None:
    register(CHUNK, form=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = next(iter(failures("forward").values()))
    assert "OpImpl.form" in found.message


def test_a_wrong_gate_gradient_fails(register: Any) -> None:
    def doubled(f: Any, *args: Any) -> GateGrads:
        grads = f(*args)
        return grads if grads.A_log is None else grads._replace(A_log=2 * grads.A_log)

    register("kda_gate", backward=doubled)
    assert "gradients" in failures("gradients")


# --- pools -----------------------------------------------------------------------------------------------------------


def minus_one_is_the_last_row(f: Any, request: Any, x: Any) -> Outputs:
    if x.state_indices is None or request.state_indices_ndim != 1:
        return f(request, x)
    table = np.where(x.state_indices < 0, request.pool_size - 1, x.state_indices)
    return f(request, x._replace(state_indices=table))


def slots_in_order(f: Any, request: Any, x: Any) -> Outputs:
    if request.state_indices_ndim != 1:
        return f(request, x)
    return f(request, x._replace(state_indices=np.arange(request.N)))


def verification_commits(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if request.read_only_state:
        x.initial_state[0] *= 0.5
    return out


def accepted_off_by_one(f: Any, request: Any, x: Any) -> Outputs:
    if x.num_accepted_tokens is None:
        return f(request, x)
    return f(request, x._replace(num_accepted_tokens=np.maximum(x.num_accepted_tokens - 1, 0)))


def copies_a_strided_pool(f: Any, request: Any, x: Any) -> Outputs:
    """``contiguous()`` before an in-place write: the caller's rows are never written."""
    if not request.inplace_state:
        return f(request, x)
    return f(request, x._replace(initial_state=np.ascontiguousarray(x.initial_state)))


POOL = [
    minus_one_is_the_last_row,
    slots_in_order,
    verification_commits,
    accepted_off_by_one,
    copies_a_strided_pool,
]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("mutation", POOL, ids=[m.__name__ for m in POOL])
def test_a_wrong_use_of_the_pool_fails(register: Any, mutation: Wrap) -> None:
    register(DECODE, forward=mutation)
    assert "pool" in failures("pool")


# --- what servers ask for --------------------------------------------------------------------------------------------


def ignores_null_index(f: Any, request: Any, x: Any) -> Outputs:
    return f(dataclasses.replace(request, null_index=-1), x)


def without_slot(request: Any, x: Any) -> Any:
    """Which sequences are padding, by one index each."""
    named = np.asarray(x.state_indices)
    return (named < 0) | (named == request.null_index)


def tokens_of(request: Any, x: Any, sequences: Any) -> Any:
    """``[T]`` bool of a pack: the tokens of these sequences."""
    found, starts = np.zeros(request.T, bool), np.asarray(x.cu_seqlens)
    for n in np.flatnonzero(sequences):
        found[starts[n] : starts[n + 1]] = True
    return found


def computes_what_has_no_slot(f: Any, request: Any, x: Any) -> Outputs:
    """From zeros, as if its tokens were wanted."""
    out = f(request, x)
    if request.state_indices_ndim == 1 and request.packed:
        there = tokens_of(request, x, without_slot(request, x))
        out.o[:, there] = 1e-6 * x.v[:, there]
    return out


def computes_the_padding(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if request.packed and x.out is None:
        out.o[:, int(x.cu_seqlens[-1]) :] = 1e-20
    return out


def multiplies_the_padding_by_zero(f: Any, request: Any, x: Any) -> Outputs:
    """A tile that is masked by a product, not by a load that leaves it out."""
    out = f(request, x)
    if request.packed and x.out is None:
        rows = slice(int(x.cu_seqlens[-1]), None)
        out.o[:, rows] = out.o.dtype.type(0) * x.v[:, rows]
    return out


def writes_the_padding_of_out(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if request.packed and x.out is not None:
        out.o[:, int(x.cu_seqlens[-1]) :] = 0.0
    return out


def reads_rows_that_hold_no_state(f: Any, request: Any, x: Any) -> Outputs:
    if x.has_initial_state is None:
        return f(request, x)
    return f(request, x._replace(has_initial_state=np.ones(request.N, bool)))


def masks_rows_by_a_product(f: Any, request: Any, x: Any) -> Outputs:
    """``state * has_initial_state``: NaN stays NaN."""
    if x.has_initial_state is None or request.state_indices_ndim != 1 or not request.packed:
        return f(request, x)
    rows = np.where(without_slot(request, x), 0, np.asarray(x.state_indices))
    stale = ~np.asarray(x.has_initial_state) & ~without_slot(request, x)
    nan = stale & np.isnan(x.initial_state[rows]).any((1, 2, 3))
    out = f(request, x)
    out.o[:, tokens_of(request, x, nan)] = np.nan
    return out


def checkpoints_one_token_late(f: Any, request: Any, x: Any) -> Outputs:
    """The state after the chosen token."""
    if not request.checkpoint_count or not request.packed or request.gate != "log":
        return f(request, x)
    before = np.array(x.initial_state)
    out = f(request, x)
    pool, starts = getattr(x, request.written_pool), np.asarray(x.cu_seqlens)
    for offset, row in zip(x.checkpoint_offsets.tolist(), x.checkpoint_indices.tolist(), strict=True):
        n = int(np.searchsorted(starts, offset, "right")) - 1
        if row < 0 or row == request.null_index or without_slot(request, x)[n]:
            continue
        here = {name: getattr(x, name)[:, starts[n] : offset + 1] for name in ("q", "k", "v", "g", "beta")}
        if x.has_initial_state is None or x.has_initial_state[n]:
            here["initial_state"] = before[[int(x.state_indices[n])]]
        options = {"output_final_state": True, "state_v_first": request.state_v_first}
        pool[row] = kdacore.chunk_kda(**here, **options, backend="reference")[1][0]
    return out


def writes_the_null_row(f: Any, request: Any, x: Any) -> Outputs:
    """A row to throw states away into."""
    out = f(request, x)
    if request.inplace_state and request.null_index == 0:
        getattr(x, request.written_pool)[0] = 0.0
    return out


def writes_for_what_has_no_slot(f: Any, request: Any, x: Any) -> Outputs:
    out = f(request, x)
    if request.write_indices_ndim == 1 and request.state_indices_ndim == 1:
        for n in np.flatnonzero(without_slot(request, x)):
            row = int(x.write_indices[n])
            if row > 0:
                getattr(x, request.written_pool)[row] = 0.0
    return out


def writes_where_it_reads(f: Any, request: Any, x: Any) -> Outputs:
    if not request.write_indices_ndim or not request.state_indices_ndim:
        return f(request, x)
    return f(dataclasses.replace(request, write_indices_ndim=0), x._replace(write_indices=None))


def keeps_the_last_candidate(f: Any, request: Any, x: Any) -> Outputs:
    """Every candidate's row gets the state after the first candidates of all."""
    out = f(request, x)
    if request.write_indices_ndim == 2:
        pool, table = getattr(x, request.written_pool), np.asarray(x.write_indices)
        if (table[:, :2] > 0).all(1).any():
            n = int(np.flatnonzero((table[:, :2] > 0).all(1))[0])
            pool[table[n, 1]] = pool[table[n, 0]]
    return out


SERVER = [
    (CHUNK, ignores_null_index, "not finite"),
    (DECODE, ignores_null_index, "not finite"),
    (CHUNK, computes_what_has_no_slot, "o of tokens that are not read: "),
    (DECODE, computes_what_has_no_slot, "o of tokens that are not read: "),
    (CHUNK, computes_the_padding, "o of tokens that are not read: "),
    (DECODE, computes_the_padding, "o of tokens that are not read: "),
    (CHUNK, multiplies_the_padding_by_zero, "not finite"),
    (CHUNK, writes_the_padding_of_out, "out behind the last sequence: "),
    (DECODE, writes_the_padding_of_out, "out behind the last sequence: "),
    (CHUNK, reads_rows_that_hold_no_state, "not finite"),
    (DECODE, reads_rows_that_hold_no_state, "not finite"),
    (CHUNK, masks_rows_by_a_product, "not finite"),
    (CHUNK, checkpoints_one_token_late, "rows written: "),
    (CHUNK, writes_the_null_row, "pool row 0 untouched: "),
    (DECODE, writes_the_null_row, "pool row 0 untouched: "),
    (CHUNK, writes_for_what_has_no_slot, "untouched: "),
    (CHUNK, writes_where_it_reads, "untouched: "),
    (DECODE, writes_where_it_reads, "untouched: "),
    (DECODE, keeps_the_last_candidate, "rows written: "),
]


@pytest.mark.first_cases(8)
@pytest.mark.parametrize(
    ("op", "mutation", "said"), SERVER, ids=[f"{op}-{m.__name__}" for op, m, _ in SERVER]
)
def test_a_wrong_answer_to_a_server_fails(register: Any, op: str, mutation: Wrap, said: str) -> None:
    register(op, forward=mutation)
    cases = [c for c in plan(NAME).cases if c.pool_use or c.shape.padding]
    message = next(r.message for c in cases if (r := run_case(c)).status == "failed")
    assert "Traceback" not in message and said in message, message


def gradients_of_padding(f: Any, request: Any, x: Any, *rest: Any) -> InputGrads:
    grads = f(request, x, *rest)
    if request.packed:
        grads.k[:, int(x.cu_seqlens[-1]) :] = 1e-20
    return grads


def sums_the_padding(f: Any, request: Any, x: Any, saved: Any, grads: Any) -> InputGrads:
    """Into the gradient of the gate's parameters."""
    found = f(request, x, saved, grads)
    if request.packed and found.A_log is not None:
        found = found._replace(A_log=found.A_log + 0 * x.g[0, int(x.cu_seqlens[-1]) :, :, 0].sum(0))
    return found


@pytest.mark.parametrize("mutation", [gradients_of_padding, sums_the_padding])
def test_a_gradient_of_padding_fails(register: Any, mutation: Wrap) -> None:
    register(CHUNK, backward=mutation)
    cases = [c for c in plan(NAME).cases if c.check == "gradients" and c.shape.padding]
    assert any(run_case(c).status == "failed" for c in cases)


def test_a_backend_that_does_not_serve_it_declines_by_its_features(register: Any) -> None:
    """Code ``option``, for whatever the backend does not list."""
    new = {
        "state_pool",
        "has_initial_state",
        "null_index",
        "write_indices",
        "write_pool",
        "checkpoint_offsets",
        "out",
    }
    served = REGISTRY.get("reference").backend.ops[CHUNK].serves - new
    register(CHUNK, serves=served)
    results = [run_case(c) for c in plan(NAME).cases if c.check == "pool" or c.out]
    declined = [r for r in results if r.status == "declined"]
    assert len(declined) >= len(results) - 1 and {r.codes for r in declined} == {("option",)}
    assert not [r for r in results if r.status == "failed"]


def test_a_state_rounded_at_every_step_drifts(register: Any) -> None:
    """Right within bounds for one call, wrong after hundreds."""

    def rounded(f: Any, request: Any, x: Any) -> Outputs:
        out = f(request, x)
        if out.final_state is None or request.inplace_state or request.dtype == "float64":
            return out
        return out._replace(final_state=out.final_state * out.final_state.dtype.type(1 + 2e-6))

    register(DECODE, forward=rounded)
    found = failures()
    assert "drift" in found
    assert "accuracy" not in found


# --- stages, torch, verifiers ----------------------------------------------------------------------------------------


def test_a_half_precision_power_series_fails_on_collinear_keys(register: Any) -> None:
    def series(f: Any, request: Any, x: Any) -> Any:
        """The inverse of ``I + L`` as ``(I - L)(I + L^2)(I + L^4)...`` in float16."""
        right = f(request, x)
        C, found = request.chunk_size, right.Akk.copy()
        for start in range(0, request.T, C):
            rows = right.Akk[0, start : start + C].swapaxes(0, 1)[..., : min(C, request.T - start)]
            eye = np.eye(rows.shape[-1])
            power = (eye - np.linalg.inv(rows.astype(np.float64))).astype(np.float16)
            product = (eye + power).astype(np.float16)
            for _ in range(6):
                power = power @ power
                product = product + product @ power
            found[0, start : start + C, :, : rows.shape[-1]] = product.swapaxes(0, 1)
        return right._replace(Akk=found)

    register(INTRA, forward=series)
    with np.errstate(all="ignore"):
        found = [
            r for c in plan(NAME).cases if "collinear" in c.note and (r := run_case(c)).status == "failed"
        ]
    assert found


def test_memory_read_before_it_is_written_fails(register: Any) -> None:
    torch = pytest.importorskip("torch")

    def skips_empty(f: Any, request: Any, x: Any) -> Outputs:
        """The final state of an empty sequence is never written."""
        out = f(request, x)
        if request.packed and out.final_state is not None:
            fresh = torch.empty_like(out.final_state)
            lengths = x.cu_seqlens.diff()
            fresh[lengths > 0] = out.final_state[lengths > 0]
            return out._replace(final_state=fresh)
        return out

    register(CHUNK, forward=skips_empty, kind="torch")
    assert "uninitialised" in failures("uninitialised")


def test_a_torch_result_that_is_a_view_fails(register: Any) -> None:
    pytest.importorskip("torch")

    def returns_a_view(f: Any, request: Any, x: Any) -> Outputs:
        out = f(request, x)
        return out._replace(o=out.o.view(out.o.shape))

    register(CHUNK, forward=returns_a_view, kind="torch")
    assert "is no view" in failures("accuracy")["accuracy"].message


def test_a_verifier_that_raises_fails(register: Any) -> None:
    def broken(request: Any) -> Reason | None:
        raise KeyError("g")

    register(CHUNK, verifiers=(broken,))
    with pytest.warns(RuntimeWarning, match="verifier"):
        assert "accuracy" in failures("accuracy")


def test_a_verifier_that_changes_its_mind_fails(register: Any) -> None:
    answers = iter(range(10**9))

    def moody(request: Any) -> Reason | None:
        return Reason("mood", "not now", str(next(answers)))

    register(CHUNK, verifiers=(moody,))
    assert "accuracy" in failures("accuracy")


def test_declining_everything_is_not_passing(register: Any) -> None:
    def never(request: Any) -> Reason | None:
        return Reason("never", "serves nothing at all")

    register(CHUNK, verifiers=(never,))
    cases = plan(NAME).cases
    assert not failures()
    report = verify(NAME, random=2, progress=False)
    assert f"no random calls: backend '{NAME}' serves none of its whole ops on cpu here" in report.notes
    assert not report.ok and "declared, but every case is declined" in "\n".join(report.lines())
    problems = coverage_problems(judged(cases))
    assert any("chunk_kda: declared, but every case is declined (never" in p for p in problems)
    assert any("numpy arrays" in p for p in problems)


def test_an_op_that_is_never_served_is_found_beside_one_that_is(register: Any) -> None:
    op = OpImpl(forward=lambda *a: None, verifiers=(lambda request: Reason("never", "no"),))
    register(CHUNK)
    backend = REGISTRY.get(NAME).backend
    both = dataclasses.replace(backend, name="half", ops={**backend.ops, DECODE: op})

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [both]

    REGISTRY.register(Plugin(), "half")
    try:
        problems = coverage_problems(judged(plan("half").cases))
    finally:
        REGISTRY.unregister("half")
    assert [p.split(":")[0] for p in problems] == [DECODE]
