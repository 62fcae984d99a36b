"""The memory of recent calls: it finds the same plan as the ordinary path, and only for the same call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore.acceleration import torch_arrays
from kdacore.acceleration.seen_calls import SeenCalls
from kdacore.arrays.numpy import NUMPY
from kdacore.arrays.torch.eager import TORCH
from kdacore.dispatch import call as dispatch
from kdacore.dispatch import plan as plans
from kdacore.errors import ContractError
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs

OPTIONS = (None, True, False, -5.0)
ASKED = ("reference", None)


class FakePlan:
    """What the memory knows of a plan."""

    request = SimpleNamespace(op="op", needs_grad=False)
    backend = SimpleNamespace(name="fake")
    check = None
    run = None

    def __init__(self, repeat: Any = None) -> None:
        self.impl = SimpleNamespace(fast_path=repeat)


PLAN: Any = FakePlan()


def adapter(kind: str) -> Any:
    """What the memory asks of an adapter."""
    return SimpleNamespace(kind=kind, runner=lambda plan, inputs: plan.run)


def find(memory: SeenCalls, op: str, inputs: Any, options: Any = OPTIONS, asked: Any = ASKED) -> Any:
    """The call that dispatch would recognise."""
    for kept in memory.calls.get(op, ()):
        if asked == kept.asked and kept.matches(tuple(inputs), options):
            return kept
    return None


def plan_found(memory: SeenCalls, op: str, inputs: Any, options: Any = OPTIONS, asked: Any = ASKED) -> Any:
    known = find(memory, op, inputs, options, asked)
    return None if known is None else known.plan


def arrays(T: int = 4) -> ChunkInputs:
    q, k, v, g = (torch.ones(1, T, 2, 8) for _ in range(4))
    return ChunkInputs(q, k, v, -g, torch.ones(1, T, 2), A_log=torch.zeros(2))


def of_torch() -> SeenCalls:
    return SeenCalls(adapter("torch"))


@pytest.fixture
def memory() -> SeenCalls:
    """Remembers one call."""
    made = of_torch()
    for _ in range(2):
        made.note("op", arrays(), OPTIONS, ASKED, PLAN)
    return made


def test_the_same_call_is_found(memory: SeenCalls) -> None:
    assert plan_found(memory, "op", arrays()) is PLAN
    assert find(memory, "other", arrays(), OPTIONS, ASKED) is None


def test_strides_and_offsets_do_not_matter(memory: SeenCalls) -> None:
    wide = torch.ones(1, 2, 8, 8)[:, :, 1:5].transpose(1, 2)
    assert wide.shape == (1, 4, 2, 8) and not wide.is_contiguous()
    assert plan_found(memory, "op", arrays()._replace(v=wide)) is PLAN


CHANGES: dict[str, Callable[[ChunkInputs], ChunkInputs]] = {
    "dtype": lambda x: x._replace(v=x.v.half()),
    "shape": lambda x: x._replace(v=torch.ones(1, 4, 2, 16)),
    "rank": lambda x: x._replace(beta=torch.ones(1, 4, 2, 1)),
    "device": lambda x: x._replace(k=x.k.to("meta")),
    "layout": lambda x: x._replace(k=x.k.to_sparse()),
    "requires_grad": lambda x: x._replace(g=x.g.clone().requires_grad_()),
    "type": lambda x: x._replace(v=torch.nn.Parameter(x.v, requires_grad=False)),
    "one more": lambda x: x._replace(dt_bias=torch.zeros(2, 8)),
    "one less": lambda x: x._replace(A_log=None),
    "another in its place": lambda x: x._replace(A_log=None, cu_seqlens=x.A_log),
    "not a tensor": lambda x: x._replace(A_log=x.A_log.numpy()),
    "a host copy beside it": lambda x: x._replace(cu_seqlens_cpu=x.A_log.numpy()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_array_is_seen(memory: SeenCalls, change: str) -> None:
    assert find(memory, "op", CHANGES[change](arrays()), OPTIONS, ASKED) is None


@pytest.mark.parametrize(
    "options",
    [
        (1.0, *OPTIONS[1:]),
        (None, 1, False, -5.0),
        (None, True, 0.0, -5.0),
        (None, True, False, -4.0),
        (None, torch.ones(3), False, -5.0),
    ],
    ids=["given", "1 for True", "0.0 for False", "value", "a tensor"],
)
def test_a_change_of_an_option_is_seen(memory: SeenCalls, options: tuple[Any, ...]) -> None:
    assert find(memory, "op", arrays(), options, ASKED) is None


def test_what_was_asked_of_dispatch_is_seen(memory: SeenCalls) -> None:
    assert find(memory, "op", arrays(), OPTIONS, (None, None)) is None


def test_one_tensor_in_two_places_is_recognised() -> None:
    """Torch's check refuses a tensor that comes twice; a server names the rows it reads and writes by one array."""
    memory, one = of_torch(), arrays()
    twice = one._replace(k=one.q)
    for _ in range(2):
        memory.note("chunk_kda", twice, OPTIONS, ASKED, PLAN)
    other = arrays()
    assert plan_found(memory, "chunk_kda", other._replace(k=other.q)) is PLAN
    assert plan_found(memory, "chunk_kda", other) is None
    assert plan_found(memory, "chunk_kda", other._replace(k=other.v)) is None
    longer = arrays(5)
    assert plan_found(memory, "chunk_kda", longer._replace(k=longer.q)) is None


def test_grad_mode_is_seen_where_gradients_are_wanted() -> None:
    wanted = arrays()
    wanted.q.requires_grad_()
    memory = of_torch()
    for _ in range(2):
        memory.note("op", wanted, OPTIONS, ASKED, PLAN)
    assert plan_found(memory, "op", wanted) is PLAN
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert find(memory, "op", wanted) is None


def test_grad_mode_decides_nothing_without_gradients(memory: SeenCalls) -> None:
    with torch.no_grad():
        assert plan_found(memory, "op", arrays()) is PLAN


def test_autocast_is_seen(memory: SeenCalls) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert find(memory, "op", arrays(), OPTIONS, ASKED) is None
        other: Any = FakePlan()
        for _ in range(2):
            memory.note("op", arrays(), OPTIONS, ASKED, other)
        assert plan_found(memory, "op", arrays()) is other
    assert plan_found(memory, "op", arrays()) is PLAN


def test_lengths_that_change_with_every_call_leave_no_trace() -> None:
    memory = of_torch()
    plans: dict[int, Any] = {T: FakePlan() for T in range(4, 10)}
    for T in (*plans, *plans):
        memory.note("op", arrays(T), OPTIONS, ASKED, plans[T])
    assert not any(find(memory, "op", arrays(T), OPTIONS, ASKED) for T in plans)


def test_calls_in_turn_are_remembered() -> None:
    memory = of_torch()
    plans: dict[int, Any] = {T: FakePlan() for T in (4, 5)}
    for T in (4, 5, 4, 5):
        memory.note("op", arrays(T), OPTIONS, ASKED, plans[T])
    assert [plan_found(memory, "op", arrays(T)) for T in plans] == list(plans.values())


def test_the_memory_is_short() -> None:
    memory = of_torch()
    plans: dict[int, Any] = {T: FakePlan() for T in range(1, 9)}
    for T, plan in plans.items():
        for _ in range(2):
            memory.note("op", arrays(T), OPTIONS, ASKED, plan)
    found = [T for T, plan in plans.items() if plan_found(memory, "op", arrays(T)) is plan]
    assert found == [5, 6, 7, 8]


def widened(by: int) -> ChunkInputs:
    """Arrays whose v lies in a wider one."""
    x = arrays()
    return x._replace(v=torch.ones(1, 4, 2, 8 + by)[..., :8])


def steps(memory: SeenCalls, bys: list[int]) -> list[Any]:
    """What the step of each would return, None where there is none."""
    found = [find(memory, "op", tuple(widened(by)), OPTIONS, ASKED) for by in bys]
    assert all(known is not None for known in found)
    return [
        known.fast_call._fast_call(()) if known is not None and known.fast_call is not None else None
        for known in found
    ]


def test_a_step_serves_its_strides_only() -> None:
    """And a plan has two: strides that are always new must not make one each."""
    memory, made = of_torch(), []

    def repeat(request: Any, inputs: ChunkInputs) -> Any:
        strides = inputs.v.stride()
        made.append(strides)
        return lambda arrays: strides

    plan: Any = FakePlan(repeat)
    for by in (0, 0, 1, 2):
        memory.note("op", widened(by), OPTIONS, ASKED, plan)
    first, second = (widened(by).v.stride() for by in (0, 1))
    assert steps(memory, [0, 1, 2, 3]) == [first, second, None, None]
    assert made == [first, second]


def test_a_backend_may_have_no_step() -> None:
    memory = of_torch()
    plan: Any = FakePlan(lambda request, inputs: None)
    for _ in range(2):
        memory.note("op", arrays(), OPTIONS, ASKED, plan)
    assert steps(memory, [0, 1]) == [None, None]


def test_numpy_strides_are_seen_where_they_matter() -> None:
    memory = SeenCalls(adapter("numpy"))
    plan: Any = FakePlan(lambda request, inputs: lambda arrays: ())
    for _ in range(2):
        memory.note("op", numpy_arrays(), OPTIONS, ASKED, plan)
    assert plan_found(memory, "op", numpy_arrays()) is plan
    wide = numpy_arrays()._replace(v=np.ones((1, 4, 2, 9), np.float32)[..., :8])
    assert plan_found(memory, "op", wide) is None


def test_an_array_that_is_no_tensor_is_never_remembered() -> None:
    memory = of_torch()
    mixed = arrays()._replace(cu_seqlens_cpu=torch.zeros(2).numpy())
    for _ in range(3):
        memory.note("op", mixed, OPTIONS, ASKED, PLAN)
    assert find(memory, "op", mixed, OPTIONS, ASKED) is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops of the public calls that took the ordinary path."""
    seen: list[str] = []
    ordinary = dispatch.cached_plan

    def counted(adapter: Any, opdef: Any, *rest: Any) -> Any:
        seen.append(opdef.name)
        return ordinary(adapter, opdef, *rest)

    forget(TORCH)
    monkeypatch.setattr(dispatch, "cached_plan", counted)
    yield seen
    forget(TORCH)


def forget(adapter: Any) -> None:
    """As if no call with these arrays had been made in this process."""
    plans.clear()
    adapter.seen_calls = None


def chunk(**options: Any) -> Any:
    x = arrays()
    return kdacore.chunk_kda(*x[:5], **options)[0]


@pytest.mark.skipif(torch_arrays.TensorGuards is None, reason="this torch has no such check")
def test_the_third_call_skips_the_ordinary_path(calls: list[str]) -> None:
    results = [chunk(output_final_state=True) for _ in range(5)]
    assert len(calls) == 2
    assert all(torch.equal(o, results[0]) for o in results)
    with kdacore.record_selections() as ran:
        chunk(output_final_state=True)
    assert len(calls) == 2 and [r.backend for r in ran] == ["reference"]


def test_a_wrong_type_is_refused_after_the_right_one(calls: list[str]) -> None:
    for _ in range(4):
        chunk(output_final_state=True)
    with pytest.raises(ContractError, match="output_final_state"):
        chunk(output_final_state=1)


def test_a_preference_is_not_overlooked(calls: list[str]) -> None:
    for _ in range(4):
        chunk()
    with kdacore.use_backend("reference"), kdacore.record_selections() as ran:
        chunk()
    assert "use_backend" in ran[0].why


def test_a_change_of_the_backends_clears_it(calls: list[str]) -> None:
    for _ in range(4):
        chunk()
    REGISTRY.reset()
    chunk()
    assert len(calls) == 3


def test_without_torchs_check_every_call_is_ordinary(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_arrays, "TensorGuards", None)
    for _ in range(4):
        chunk()
    assert len(calls) == 4


def test_gradients_flow_through_a_remembered_call(calls: list[str]) -> None:
    grads = []
    for _ in range(4):
        x = arrays()
        v = x.v.clone().requires_grad_()
        kdacore.chunk_kda(x.q, x.k, v, x.g, x.beta)[0].sum().backward()
        grads.append(v.grad)
    assert all(torch.equal(g, grads[0]) for g in grads if g is not None) and grads[3] is not None


# --- NumPy ---------------------------------------------------------------------------------------------------------


def numpy_arrays(T: int = 4) -> ChunkInputs:
    return ChunkInputs(*(None if x is None else x.numpy() for x in arrays(T)))


def remembered(inputs: ChunkInputs) -> SeenCalls:
    memory = SeenCalls(adapter("numpy"))
    for _ in range(2):
        memory.note("op", inputs, OPTIONS, ASKED, PLAN)
    return memory


class Subclass(np.ndarray):
    """Not a plain array."""


NUMPY_CHANGES: dict[str, Callable[[ChunkInputs], ChunkInputs]] = {
    "dtype": lambda x: x._replace(v=x.v.astype(np.float16)),
    "byte order": lambda x: x._replace(v=x.v.astype(">f4")),
    "shape": lambda x: x._replace(v=np.ones((1, 4, 2, 16), np.float32)),
    "type": lambda x: x._replace(v=x.v.view(Subclass)),
    "a tensor": lambda x: x._replace(v=torch.from_numpy(x.v)),
    "one more": lambda x: x._replace(dt_bias=np.zeros((2, 8), np.float32)),
    "one less": lambda x: x._replace(A_log=None),
    "another in its place": lambda x: x._replace(A_log=None, cu_seqlens=x.A_log),
    "no array": lambda x: x._replace(A_log=[0.0, 0.0]),
}


def test_the_same_numpy_call_is_found() -> None:
    assert plan_found(remembered(numpy_arrays()), "op", numpy_arrays()) is PLAN
    strided = numpy_arrays()._replace(v=np.ones((1, 2, 8, 8), np.float32)[:, :, 1:5].swapaxes(1, 2))
    assert plan_found(remembered(numpy_arrays()), "op", strided) is PLAN


@pytest.mark.parametrize("change", NUMPY_CHANGES)
def test_a_change_of_a_numpy_array_is_seen(change: str) -> None:
    changed = NUMPY_CHANGES[change](numpy_arrays())
    assert find(remembered(numpy_arrays()), "op", changed, OPTIONS, ASKED) is None


@pytest.mark.parametrize("change", ["byte order", "type", "a tensor"])
def test_numpy_arrays_out_of_the_ordinary_are_never_remembered_for_plain_ones(change: str) -> None:
    memory = remembered(NUMPY_CHANGES[change](numpy_arrays()))
    assert find(memory, "op", numpy_arrays(), OPTIONS, ASKED) is None


def test_the_third_numpy_call_skips_the_ordinary_path(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    ordinary = dispatch.cached_plan
    monkeypatch.setattr(dispatch, "cached_plan", lambda *a: seen.append(1) or ordinary(*a))
    forget(NUMPY)
    results = [kdacore.chunk_kda(*numpy_arrays()[:5])[0] for _ in range(5)]
    assert len(seen) == 2 and all(np.array_equal(o, results[0]) for o in results)
    with pytest.raises(ContractError, match="output_final_state"):
        kdacore.chunk_kda(*numpy_arrays()[:5], output_final_state=0)
