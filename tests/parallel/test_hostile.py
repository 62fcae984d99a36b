"""Ranks that do not do the same: a clear error on every rank, and never a finite wrong number. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore import ContractError, UnsupportedError
from kdacore.parallel import local_group
from kdacore.parallel.local_ranks import LocalRanks
from kdacore.parallel.torch_slice import SliceCall

T = 8
Work = Callable[[Any], Any]


def on_ranks(*works: Work, timeout: float = 20.0) -> list[list[Any]]:
    """What each rank's generator of steps came to: its results, and the errors that it caught on the way."""

    def run(ranks: Any, work: Work) -> list[Any]:
        found: list[Any] = []
        for step in work(ranks):
            try:
                found.append(step())
            except Exception as error:  # noqa: BLE001  which one is what is asked
                found.append(error)
        return found

    with ThreadPoolExecutor(len(works)) as pool:
        group = local_group(len(works), timeout)
        return [f.result() for f in [pool.submit(run, *pair) for pair in zip(group, works, strict=True)]]


def arrays(T: int = T, seed: int = 0, grad: bool = False, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(1, T, 1, 16, generator=generator) for _ in range(3)]
    x += [-torch.rand(1, T, 1, 16, generator=generator), torch.rand(1, T, 1, generator=generator)]
    return [a.to(dtype).requires_grad_(grad) for a in x]


def call(ranks: Any, T: int = T, seed: int = 0, grad: bool = False, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.float32)
    op = options.pop("op", "chunk_kda")
    x = arrays(T, seed, grad, dtype)
    if op != "chunk_kda":
        x[3] = x[3][..., 0]
    return getattr(kdacore, op)(*x, cp=ranks, **options)


def errors(found: list[Any], error: type[Exception], *parts: str) -> None:
    """The same step failed on every rank, with these parts in the message."""
    for x in found:
        assert isinstance(x, error), found
        for part in parts:
            assert part in str(x), (part, str(x))


def right(found: list[Any]) -> None:
    for x in found:
        assert not isinstance(x, Exception), x
        assert x[0].isfinite().all()


def then_in_step(ranks: Any) -> list[Callable[[], Any]]:
    """A call that every rank makes after the one that failed."""
    return [lambda: call(ranks)]


# --- ranks that make other calls -------------------------------------------------------------------------------------

OTHER_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "length": ({}, {"T": 9}, "'q'"),
    "dtype": ({}, {"dtype": torch.bfloat16}, "'q'"),
    "op": ({}, {"op": "chunk_gated_delta_rule"}, "'cp'"),
    "scale": ({}, {"scale": 0.5}, "'scale'"),
    "norm": ({"use_qk_l2norm_in_kernel": True}, {}, "'use_qk_l2norm_in_kernel'"),
    "final-state": ({"output_final_state": True}, {}, "'output_final_state'"),
    "layout": ({"state_v_first": True}, {}, "'state_v_first'"),
    "gradients": ({"grad": True}, {}, "'requires_grad'"),
    "packed": ({"cu_seqlens": torch.tensor([0, 2 * T])}, {}, "'cu_seqlens'"),
    "sequences": (
        {"cu_seqlens": torch.tensor([0, 2 * T])},
        {"cu_seqlens": torch.tensor([0, 3, 2 * T])},
        "'cu_seqlens'",
    ),
    "offsets": (
        {"cu_seqlens": torch.tensor([0, 3, 2 * T])},
        {"cu_seqlens": torch.tensor([0, 4, 2 * T])},
        "'cu_seqlens'",
    ),
    "initial-state": ({"initial_state": torch.zeros(1, 1, 16, 16)}, {}, "'initial_state'"),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
@pytest.mark.parametrize("known", ["both-new", "both-repeated", "one-repeated"])
def test_other_calls(name: str, known: str) -> None:
    """Whether the ranks have made them before or not. After the error the ranks are in step."""
    one, two, argument = OTHER_CALLS[name]
    before = {"both-new": [], "both-repeated": [one, two], "one-repeated": [one]}[known]

    def work(own: dict[str, Any]) -> Work:
        def steps(ranks: Any) -> Any:
            return [
                *[lambda x=x: call(ranks, **x) for x in before],
                lambda: call(ranks, **own),
                *then_in_step(ranks),
            ]

        return steps

    *made, wrong, after = zip(*on_ranks(work(one), work(two)), strict=True)
    for found in (*made, after):
        right(found)
    errors(wrong, ContractError, argument, "on rank 0", "on rank 1")


def test_a_kind_of_call_forgotten_by_one_rank() -> None:
    """A rank whose caches were emptied compares again, and the others with it."""

    def steps(forgets: bool) -> Work:
        def work(ranks: Any) -> Any:
            yield lambda: call(ranks)
            if forgets:
                ranks.progress.agreed.clear()
                from kdacore.parallel import torch_slice

                torch_slice._calls.clear()
            yield lambda: call(ranks)

        return work

    for found in zip(*on_ranks(steps(False), steps(True)), strict=True):
        right(found)


# --- ranks that are at other steps -----------------------------------------------------------------------------------


def backward(o: Any, **options: Any) -> Any:
    o[0].square().sum().backward(**options)
    return o


def two_calls_then(order: tuple[int, ...], **other: Any) -> Work:
    """The forwards of two calls, and their backwards in an order."""

    def steps(ranks: Any) -> Any:
        made: list[Any] = []

        def forward(seed: int, **options: Any) -> Any:
            made.append(call(ranks, seed=seed, grad=True, **options))
            return made[-1]

        yield lambda: forward(1)
        yield lambda: forward(2, **other)
        for at in order:
            yield lambda at=at: backward(made[at])

    return steps


@pytest.mark.parametrize(
    "other", [{}, {"T": 12}, {"output_final_state": True}], ids=["same", "longer", "state"]
)
def test_backwards_in_another_order(other: dict[str, Any]) -> None:
    found = list(
        zip(*on_ranks(two_calls_then((0, 1), **other), two_calls_then((1, 0), **other)), strict=True)
    )
    for both in found[:2]:
        right(both)
    errors(
        found[2],
        ContractError,
        "'cp'",
        "the backward of call 1 on rank 0",
        "the backward of call 2 on rank 1",
    )
    errors(
        found[3],
        ContractError,
        "'cp'",
        "the backward of call 2 on rank 0",
        "the backward of call 1 on rank 1",
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_backwards_in_one_order(order: tuple[int, ...]) -> None:
    for found in zip(*on_ranks(two_calls_then(order), two_calls_then(order)), strict=True):
        right(found)


def test_three_ranks_of_which_one_differs() -> None:
    works = [two_calls_then(order) for order in ((0, 1), (1, 0), (0, 1))]
    *_, first, second = zip(*on_ranks(*works), strict=True)
    errors(first, ContractError, "the backward of call 1 on ranks 0, 2; the backward of call 2 on rank 1")
    errors(second, ContractError, "'cp'")


def test_a_rank_that_skips_a_backward() -> None:
    """Its next forward meets the others' backward; the group stays refused, since the ranks are out of step."""

    def work(skips: bool) -> Work:
        def steps(ranks: Any) -> Any:
            made: list[Any] = []
            yield lambda: made.append(call(ranks, grad=True)) or made[0]
            if not skips:
                yield lambda: backward(made[0])
            yield lambda: call(ranks, grad=True)
            if skips:
                yield lambda: call(ranks, grad=True)

        return steps

    one, *wrong = zip(*on_ranks(work(False), work(True)), strict=True)
    right(one)
    errors(wrong[0], ContractError, "the backward of call 1 on rank 0", "the forward of call 2 on rank 1")
    errors(wrong[1], ContractError, "the forward of call 2 on rank 0", "the forward of call 3 on rank 1")


def test_calls_in_another_order() -> None:
    def work(lengths: tuple[int, ...]) -> Work:
        return lambda ranks: [lambda n=n: call(ranks, T=n) for n in lengths]

    *before, wrong, back = zip(*on_ranks(work((8, 9, 8, 9)), work((8, 9, 9, 8))), strict=True)
    for found in before:
        right(found)
    errors(wrong, ContractError, "'q'", "[1, 8, 1, 16] on rank 0", "[1, 9, 1, 16] on rank 1")
    errors(back, ContractError, "'q'", "[1, 9, 1, 16] on rank 0", "[1, 8, 1, 16] on rank 1")


def test_backward_twice() -> None:
    def work(times: int) -> Work:
        def steps(ranks: Any) -> Any:
            x = arrays(grad=True)
            o = kdacore.chunk_kda(*x, cp=ranks)
            for _ in range(times):
                yield lambda: backward(o, retain_graph=True)
                yield lambda: [x[0].grad.clone()]
            yield lambda: call(ranks)

        return steps

    a, first, b, second, after = zip(*on_ranks(work(2), work(2)), strict=True)
    for found in (a, b, after):
        right(found)
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(two[0], 2 * one[0])


def test_backward_twice_on_one_rank() -> None:
    def work(again: bool) -> Work:
        def steps(ranks: Any) -> Any:
            o = call(ranks, grad=True)
            yield lambda: backward(o, retain_graph=True)
            yield (lambda: backward(o)) if again else (lambda: call(ranks))

        return steps

    one, wrong = zip(*on_ranks(work(True), work(False)), strict=True)
    right(one)
    errors(wrong, ContractError, "the backward of call 1 on rank 0", "the forward of call 2 on rank 1")


def test_no_backward_at_all_then_another_call() -> None:
    def steps(ranks: Any) -> Any:
        yield lambda: call(ranks, grad=True)
        yield lambda: backward(call(ranks, grad=True))

    for found in zip(*on_ranks(steps, steps), strict=True):
        right(found)


def test_checkpointing_counts_alike() -> None:
    from torch.utils.checkpoint import checkpoint

    def steps(ranks: Any) -> Any:
        for _ in range(2):
            x = arrays(grad=True)
            yield lambda x=x: backward(checkpoint(kdacore.chunk_kda, *x, cp=ranks, use_reentrant=False))

    for found in zip(*on_ranks(steps, steps), strict=True):
        right(found)


# --- a rank that cannot make its call ---------------------------------------------------------------------------------


def short_beta(ranks: Any) -> Any:
    x = arrays()
    return kdacore.chunk_kda(*x[:4], x[4][:, :5], cp=ranks)


def trained(ranks: Any, made: str = "") -> Any:
    """A call that needs gradients, with every argument that it can have. ``made``: the one made in inference mode."""
    q, k, v, g, beta = arrays()
    x = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": torch.zeros(1), "dt_bias": torch.zeros(1, 16),
        "initial_state": torch.zeros(1, 1, 16, 16), "cu_seqlens": torch.tensor([0, 2 * T]),
        "cu_seqlens_cpu": torch.tensor([0, 2 * T]),
    }  # fmt: skip
    if made:
        with torch.inference_mode():
            x[made] = x[made].clone()
    x["k" if made == "q" else "q"].requires_grad_()
    return kdacore.chunk_kda(**x, use_gate_in_kernel=True, cp=ranks)


def batch_invariant(ranks: Any) -> Any:
    with kdacore.batch_invariant():
        return call(ranks)


class Refuses(torch.Tensor):
    """Serves no function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def a_subclass(ranks: Any) -> Any:
    x = arrays()
    x[2] = x[2].as_subclass(Refuses)
    return kdacore.chunk_kda(*x, cp=ranks)


OWN_ERRORS: dict[str, tuple[Work, type[Exception], str]] = {
    "shape": (short_beta, ContractError, "'beta'"),
    "pool": (lambda ranks: call(ranks, inplace_state=True), ContractError, "'inplace_state'"),
    "option": (lambda ranks: call(ranks, scale="large"), ContractError, "'scale'"),
    "backend": (lambda ranks: call(ranks, backend="no-such"), ContractError, "'backend'"),
    "unsupported": (batch_invariant, UnsupportedError, "batch_invariant"),
    "inference": (lambda ranks: trained(ranks, "v"), ContractError, "'v'"),
    "forced": (lambda ranks: call(ranks, backend="cuda"), UnsupportedError, "cuda"),
    "numpy": (lambda ranks: kdacore.chunk_kda(*[x.numpy() for x in arrays()], cp=ranks), ContractError, "'cp'"),
    "list": (lambda ranks: kdacore.chunk_kda([1.0], *arrays()[1:], cp=ranks), ContractError, "'q'"),  # type: ignore[call-overload]
    "subclass": (a_subclass, ContractError, "'v': got a Refuses"),
    "device": (lambda ranks: kdacore.chunk_kda(arrays()[0].to("meta"), *arrays()[1:], cp=ranks), ContractError, "meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_ERRORS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_an_error_of_one_rank(name: str, first: bool) -> None:
    """It is an error of every rank, which names it. The rank that catches it is in step with the others."""
    wrong, kind, part = OWN_ERRORS[name]

    def work(faulty: bool) -> Work:
        def steps(ranks: Any) -> Any:
            made = [] if first else [lambda: call(ranks)]
            return [*made, lambda: wrong(ranks) if faulty else call(ranks), *then_in_step(ranks)]

        return steps

    *_, failed, after = zip(*on_ranks(work(False), work(True)), strict=True)
    errors(failed[:1], ContractError, part if kind is ContractError else f"{kind.__name__}: ", "on rank 1")
    errors(failed[1:], kind, part)
    right(after)


INFERENCE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")


@pytest.mark.parametrize("where", ["both", "second"])
def test_what_torch_would_refuse_to_save(where: str) -> None:
    """Tensors made in inference mode, in calls that need gradients; whether the ranks have made them before or not."""

    def work(wrong: bool) -> Work:
        def steps(ranks: Any) -> Any:
            yield lambda: trained(ranks)
            for name in INFERENCE:
                yield lambda name=name: trained(ranks, name if wrong else "")
                yield lambda: backward(trained(ranks))

        return steps

    found = list(zip(*on_ranks(work(where == "both"), work(True)), strict=True))
    right(found[0])
    for name, failed, after in zip(INFERENCE, found[1::2], found[2::2], strict=True):
        errors(failed, ContractError, f"'{name}'", "a tensor made in inference mode")
        right(after)


def test_tensors_made_in_inference_mode_without_gradients() -> None:
    def steps(ranks: Any) -> Any:
        with torch.inference_mode():
            x = [a.clone() for a in arrays()]
        yield lambda: call(ranks)
        yield lambda: kdacore.chunk_kda(*x, cp=ranks)
        with torch.inference_mode():
            yield lambda: kdacore.chunk_kda(*x, cp=ranks)

    for plain, made, inside in on_ranks(steps, steps):
        right([plain, made, inside])
        assert torch.equal(made[0], plain[0]) and torch.equal(inside[0], plain[0])


HUGE = 2**63 - 1
OFFSETS: dict[str, tuple[list[int], str]] = {
    "beyond": ([0, 10, 17], "last offset 17; wanted at most R*T=16"),
    "far-beyond": ([0, HUGE], "at most R*T=16"),
    "first": ([3, 10, 16], "first offset 3"),
    "first-on-the-second-rank": ([9, 10, 16], "first offset 9"),
    "first-negative": ([-1, 10, 16], "first offset -1"),
    "falls": ([0, 12, 10, 16], "offset 10 behind 12"),
    "wraps": ([0, HUGE, -5, 16], f"offset -5 behind {HUGE}"),
    "wraps-at-the-end": ([0, 10, -(2**63)], f"offset {-(2**63)} behind 10"),
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("where", ["both", "second"])
def test_offsets(name: str, where: str) -> None:
    """Refused on every rank, given to all of them or to one."""
    values, part = OFFSETS[name]
    fine = [0, *[10] * (len(values) - 2), 16]

    def work(wrong: bool) -> Work:
        own = torch.tensor(values if wrong else fine)
        return lambda ranks: [lambda: call(ranks, cu_seqlens=own), *then_in_step(ranks)]

    failed, after = zip(*on_ranks(work(where == "both"), work(True)), strict=True)
    errors(failed, ContractError, "'cu_seqlens'", part.split(";")[0])
    right(after)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_host_offsets_that_disagree(kind: str) -> None:
    host = torch.tensor([0, 9, 16]) if kind == "torch" else np.array([0, 9, 16])
    fine, options = torch.tensor([0, 10, 16]), {"cu_seqlens_cpu": host}

    def work(wrong: bool) -> Work:
        own = options if wrong else {"cu_seqlens_cpu": fine if kind == "torch" else fine.numpy()}
        return lambda ranks: [lambda: call(ranks, cu_seqlens=fine, **own), *then_in_step(ranks)]

    failed, after = zip(*on_ranks(work(False), work(True)), strict=True)
    errors(failed, ContractError, "'cu_seqlens_cpu'", "[0, 9, 16]")
    right(after)


def test_offsets_of_a_call_seen_before_are_checked() -> None:
    def steps(ranks: Any) -> Any:
        for values in ([0, 5, 16], [0, 5, 16], [0, 5, 17], [0, 6, 16]):
            yield lambda values=values: call(ranks, cu_seqlens=torch.tensor(values))

    one, two, wrong, after = zip(*on_ranks(steps, steps), strict=True)
    for found in (one, two, after):
        right(found)
    errors(wrong, ContractError, "last offset 17")


# --- a rank whose backend fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["begin", "finish", "backward_begin", "backward_finish"])
def test_a_failing_backend(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank takes part in what the others wait for. They raise too, or their results are complete."""
    made, failing = SliceCall.__init__, set()

    def init(
        found: Any, opdef: Any, request: Any, options: Any, ranks: Any, plan: Any, functions: Any, host: Any
    ) -> None:
        plain = getattr(functions, function)

        def maybe(*args: Any) -> Any:
            if ranks.name in failing:
                raise ZeroDivisionError
            return plain(*args)

        made(found, opdef, request, options, ranks, plan, functions._replace(**{function: maybe}), host)

    monkeypatch.setattr(SliceCall, "__init__", init)
    calls: dict[str, Any] = {"grad": True, "output_final_state": True}

    def steps(ranks: Any) -> Any:
        yield lambda: backward(call(ranks, **calls))
        if ranks.rank == 1:
            failing.add(ranks.name)
        yield lambda: backward(call(ranks, **calls))
        failing.discard(ranks.name)
        yield lambda: call(ranks)
        if (
            function == "finish" and ranks.rank == 1
        ):  # meets the last of the other rank, which went on to its backward
            yield lambda: call(ranks)

    one, wrong, after = zip(*on_ranks(steps, steps), strict=False)
    right(one)
    assert isinstance(wrong[1], ZeroDivisionError)
    if function in ("begin", "backward_begin"):
        errors(wrong[:1], RuntimeError, "rank 1 of cp failed in this call")
        right(after)
    elif function == "finish":  # the other rank had all it needed, but for the final state
        errors(wrong[:1], ContractError, "the backward of call 2 on rank 0; the forward of call 3 on rank 1")
    else:
        right(wrong[:1])
        right(after)


# --- several threads of one rank --------------------------------------------------------------------------------------


class Signalling:
    """A lock that tells when a thread waits for it."""

    def __init__(self) -> None:
        self.lock, self.awaited = threading.RLock(), threading.Event()
        self.release = self.lock.release

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            self.awaited.set()
        return self.lock.acquire(blocking)


def test_two_threads_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which call of another rank each would meet is open: the second is an error, on every rank."""
    begins, group = threading.Event(), local_group(2, 20)
    lock = group[0].progress.lock = Signalling()  # type: ignore[assignment]
    heads = LocalRanks.heads

    def waiting(ranks: LocalRanks, head: Any) -> Any:
        if ranks.rank == 0 and not begins.is_set():
            begins.set()
            assert lock.awaited.wait(10)
        return heads(ranks, head)

    monkeypatch.setattr(LocalRanks, "heads", waiting)

    def caught(ranks: Any) -> Any:
        try:
            return call(ranks)
        except ContractError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(caught, group[0])
        assert begins.wait(10)
        second = pool.submit(caught, group[0])
        one, two = pool.submit(lambda: [caught(group[1]), caught(group[1])]).result()
        right([first.result(), one])
        errors([second.result(), two], ContractError, "'cp'", "another thread of this process")


# --- where nothing waits on the host ----------------------------------------------------------------------------------


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NCCL: known calls begin with their own exchange."""
    monkeypatch.setattr(LocalRanks, "on_host", lambda ranks, device: False)


PACK = torch.tensor([0, 3, 6, 12, 14, 16])


def test_marks_of_backwards(on_the_device: None) -> None:
    """The case of two finite wrong gradients: NaN on both ranks."""

    def work(order: tuple[int, ...]) -> Work:
        def steps(ranks: Any) -> Any:
            x = [arrays(seed=i, grad=True) for i in range(2)]
            made = [kdacore.chunk_kda(*y, cp=ranks) for y in x]
            for at in order:
                yield lambda at=at: [backward(made[at]), [a.grad for a in x[at]]][1]

        return steps

    for found in on_ranks(work((0, 1)), work((1, 0))):
        for dq, *others in found:
            assert dq.isfinite().all()  # needs states alone, and these are of this call
            for x in others:
                assert x.isnan().all()
    for found in on_ranks(work((1, 0)), work((1, 0))):
        for grads in found:
            assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("packed", [False, True])
def test_marks_of_forwards(packed: bool, on_the_device: None) -> None:
    """A rank at its next call: no state passes for a result, of whichever sequence, on whichever rank."""
    options: dict[str, Any] = {"output_final_state": True, "cu_seqlens": PACK if packed else None}

    def work(skips: bool) -> Work:
        def steps(ranks: Any) -> Any:
            yield lambda: call(ranks, **options)
            if skips:
                ranks.progress.begin()  # a call that failed on this rank alone
            yield lambda: call(ranks, **options)
            yield lambda: call(ranks, **options)

        return steps

    one, *wrong = zip(*on_ranks(work(False), work(True)), strict=True)
    right(one)
    for found in wrong:
        for o, state in found:
            assert state.isnan().all()
            assert o.isnan().all() or packed
            assert o.isnan().any()


@pytest.mark.parametrize("states", [False, True])
def test_marks_of_backwards_of_packs(states: bool, on_the_device: None) -> None:
    """Gradients of every sequence and state, those that lie on one rank too: what was summed was of two calls."""

    def work(order: tuple[int, ...]) -> Work:
        def steps(ranks: Any) -> Any:
            made = []
            for seed in range(2):
                S = torch.zeros(5, 1, 16, 16, requires_grad=True) if states else None
                x = arrays(seed=seed, grad=True)
                o, end = kdacore.chunk_kda(
                    *x, cu_seqlens=PACK, initial_state=S, output_final_state=True, cp=ranks
                )
                made.append(([*x[1:], *([S] if states else [])], o.sum() + end.square().sum()))
            for at in order:
                yield lambda at=at: [made[at][1].backward(), [a.grad for a in made[at][0]]][1]

        return steps

    for found in on_ranks(work((0, 1)), work((1, 0))):
        for grads in found:
            assert all(x.isnan().all() for x in grads)


def test_a_new_kind_of_call_tells_of_backwards_in_another_order(on_the_device: None) -> None:
    """Those gave NaN. After the error the ranks are in step again."""

    def work(order: tuple[int, ...]) -> Work:
        def steps(ranks: Any) -> Any:
            yield from two_calls_then(order)(ranks)
            yield lambda: call(ranks, T=12)
            yield lambda: call(ranks, T=12)

        return steps

    *_, wrong, after = zip(*on_ranks(work((0, 1)), work((1, 0))), strict=True)
    errors(wrong, ContractError, "'cp'", "ranks that were at different calls", "NaN")
    right(after)


def test_an_error_of_one_rank_is_found_by_its_next_call(on_the_device: None) -> None:
    """It could not be told. The call that it leaves out is paired with its next: NaN, then an error, and the numbers of
    calls where they are compared."""

    def work(faulty: bool) -> Work:
        def steps(ranks: Any) -> Any:
            yield lambda: call(ranks)
            if faulty:
                yield lambda: short_beta(ranks)
            yield lambda: call(ranks)
            if not faulty:
                yield lambda: None
            yield lambda: call(ranks, scale=0.5)
            yield lambda: call(ranks, scale=0.5)

        return steps

    one, two = on_ranks(work(False), work(True))
    right([one[0], two[0]])
    errors([two[1]], ContractError, "'beta'")
    assert one[1][0].isnan().all() and two[2][0].isnan().all()
    errors([one[3], two[3]], ContractError, "'cp'", "ranks that were at different calls")
    errors(
        [one[4], two[4]], ContractError, "the forward of call 4 on rank 0; the forward of call 5 on rank 1"
    )


@pytest.mark.parametrize("function", ["begin", "backward_begin"])
def test_a_failing_backend_gives_nan(
    function: str, on_the_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SliceCall.__init__

    def init(
        found: Any, opdef: Any, request: Any, options: Any, ranks: Any, plan: Any, functions: Any, host: Any
    ) -> None:
        def fail(*args: Any) -> Any:
            raise ZeroDivisionError

        if ranks.rank == 1:
            functions = functions._replace(**{function: fail})
        plain(found, opdef, request, options, ranks, plan, functions, host)

    monkeypatch.setattr(SliceCall, "__init__", init)

    def steps(ranks: Any) -> Any:
        x, o = arrays(grad=True), []
        yield lambda: o.extend(kdacore.chunk_kda(*x, cp=ranks, output_final_state=True))
        if function == "begin":
            yield lambda: o
        else:
            yield lambda: [o[0].sum().backward(), [x[1].grad]][1]
        yield lambda: call(ranks, T=12)

    (_, found, one), (*failed, two) = on_ranks(steps, steps)
    errors([one, two], ContractError, "'cp'", "ranks that were at different calls")
    assert isinstance(failed[0 if function == "begin" else 1], ZeroDivisionError)
    for x in found:
        assert x.isnan().all()
