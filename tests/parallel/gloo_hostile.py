"""Two processes over gloo that do not do the same: an error on both, never a crash and never a finite wrong number.

``test_hostile.py`` has more of these, with ranks that are threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gloo_tools import Here, environment, plain_arrays, raises

import kdacore
from kdacore.parallel.torch_ranks import ProcessRanks


def own_group(here: Here, seconds: float = 60) -> Any:
    """A group in which no call was made, so that its calls count from 1."""
    return dist.new_group(list(range(here.size)), timeout=timedelta(seconds=seconds))


def leaves(here: Here, T: int = 16) -> list[Any]:
    return [x.clone().requires_grad_(True) for x in plain_arrays(here, T)]


@contextlib.contextmanager
def nothing_on_the_host() -> Iterator[None]:
    """As with NCCL."""
    with mock.patch.object(ProcessRanks, "on_host", lambda ranks, device: False):
        yield


def a_new_call_beside_a_repeated_one(here: Here) -> None:
    group = own_group(here)
    arrays = plain_arrays(here, 16)
    kdacore.chunk_kda(*arrays, cp=group)
    for changed in ({"scale": 0.5}, {"state_v_first": True}, {"output_final_state": True}):
        with raises(kdacore.ContractError, f"'{next(iter(changed))}'", "on rank 0", "on rank 1"):
            kdacore.chunk_kda(*arrays, cp=group, **(changed if here.rank else {}))  # type: ignore[call-overload]
    with raises(kdacore.ContractError, "'q'", "float32[1, 16", "float32[1, 20"):
        kdacore.chunk_kda(*plain_arrays(here, 20 if here.rank else 16), cp=group)
    assert kdacore.chunk_kda(*arrays, cp=group)[0].isfinite().all()


def backwards_in_another_order(here: Here) -> None:
    """Of calls of one kind, and of two whose exchanges have other sizes; compiled too."""

    def compiled(*x: Any, cp: Any) -> Any:
        return torch.compile(lambda *x: kdacore.chunk_kda(*x, cp=cp), backend="aot_eager", fullgraph=True)(*x)

    for call, heads in ((kdacore.chunk_kda, 1), (kdacore.chunk_kda, 2), (compiled, 1)):
        group = own_group(here)
        made = []
        for n in (1, heads):
            x = [a.requires_grad_(True) for a in plain_arrays(here, 16, heads=n)]
            made.append(call(*x, cp=group)[0])
        for o in made if here.rank else reversed(made):
            with raises(kdacore.ContractError, "'cp'", "the backward of call 1 on rank", "of call 2 on rank"):
                o.square().sum().backward()


def an_error_of_one_rank(here: Here) -> None:
    """Later than at the first call; the rank goes on, in step with the other."""
    group = own_group(here)
    arrays = plain_arrays(here, 16)
    first = kdacore.chunk_kda(*arrays, cp=group)[0]
    wrong = [*arrays[:4], arrays[4][:, :5]] if here.rank == 0 else arrays
    with raises(kdacore.ContractError, "'beta'", "[1, 5, 1]"):
        kdacore.chunk_kda(*wrong, cp=group)
    assert torch.equal(kdacore.chunk_kda(*arrays, cp=group)[0], first)


def offsets_of_one_rank_and_of_all(here: Here) -> None:
    group = own_group(here)
    arrays = plain_arrays(here, 16)
    for values, part in (
        ([0, 10, 33], "last offset 33"),
        ([3, 10, 32], "first offset 3"),
        ([20, 22, 32], "first offset 20"),
        ([0, 2**63 - 1, -5, 32], "offset -5 behind"),
    ):
        fine = torch.tensor([0, *[10] * (len(values) - 2), 32])
        for everywhere in (True, False):
            offsets = torch.tensor(values) if everywhere or here.rank else fine
            with raises(kdacore.ContractError, "'cu_seqlens'", part):
                kdacore.chunk_kda(*arrays, cp=group, cu_seqlens=offsets)
    own = torch.tensor([0, 10 + here.rank, 32])
    with raises(kdacore.ContractError, "'cu_seqlens'", "[0, 10, 32] on rank 0; [0, 11, 32] on rank 1"):
        kdacore.chunk_kda(*arrays, cp=group, cu_seqlens=own)


def a_destroyed_group(here: Here) -> None:
    """In the forward, of calls seen before too, and in a backward whose forward came before."""
    group = own_group(here)
    x = leaves(here)
    o, _ = kdacore.chunk_kda(*x, cp=group)
    alone = dist.new_group([here.rank], use_local_synchronization=True)
    dist.barrier(group)
    for destroyed in (group, alone):
        dist.destroy_process_group(destroyed)
        with raises(kdacore.ContractError, "'cp'", "has been destroyed"):
            kdacore.chunk_kda(*x, cp=destroyed)
        with raises(kdacore.ContractError, "'cp'", "has been destroyed"):
            kdacore.explain("chunk_kda", *x, cp=destroyed)
    with raises(kdacore.ContractError, "'cp'", "has been destroyed"):
        o.sum().backward()


def values_checked_on_one_rank(here: Here) -> None:
    around = environment(KDACORE_VALIDATE="values") if here.rank else contextlib.nullcontext()
    with around, raises(kdacore.ContractError, "'KDACORE_VALIDATE'", "shapes on rank 0; values on rank 1"):
        kdacore.chunk_kda(*plain_arrays(here, 16), cp=own_group(here))


def calls_compared_always_on_one_rank(here: Here) -> None:
    group = own_group(here)
    arrays = plain_arrays(here, 16)
    wanted = kdacore.chunk_kda(*arrays, cp=group)[0]
    around = environment(KDACORE_CP_CHECK="always") if here.rank else contextlib.nullcontext()
    with around:
        assert torch.equal(kdacore.chunk_kda(*arrays, cp=group)[0], wanted)


def two_groups_of_the_same_ranks(here: Here) -> None:
    """Each counts its own calls; their backwards may interleave in one order."""
    groups = [own_group(here) for _ in range(3)]
    made = []
    for group in (groups[0], groups[1], groups[0]):
        x = leaves(here)
        made.append((x, kdacore.chunk_kda(*x, cp=group)[0]))
    for at in (1, 0, 2):
        made[at][1].sum().backward()
        assert all(a.grad.isfinite().all() for a in made[at][0])


def a_rank_that_never_calls(here: Here) -> None:
    """Nothing can be paired: the group's own timeout."""
    group = own_group(here, seconds=1)
    if here.rank == 0:
        with raises(RuntimeError):
            kdacore.chunk_kda(*plain_arrays(here, 16), cp=group)


def without_the_host(here: Here) -> None:
    """Marks alone: NaN in both ranks' gradients, where a rank runs its backwards in another order; compiled too."""
    with nothing_on_the_host():
        for compile_it in (False, True):
            group = own_group(here)

            def call(*x: Any, group: Any = group) -> Any:
                return kdacore.chunk_kda(*x, cp=group)[0]

            run = torch.compile(call, backend="aot_eager", fullgraph=True) if compile_it else call
            made = [(x, run(*x)) for x in (leaves(here), leaves(here))]
            for x, o in made if here.rank else reversed(made):
                o.square().sum().backward()
                assert all(a.grad.isnan().all() for a in x[1:])
            with raises(kdacore.ContractError, "'cp'", "ranks that were at different calls", "NaN"):
                call(*plain_arrays(here, 16))  # the first without gradients
            assert call(*plain_arrays(here, 16)).isfinite().all()  # in step again


def compared_always_without_the_host(here: Here) -> None:
    """Backwards, too, are compared then, and named."""
    with nothing_on_the_host(), environment(KDACORE_CP_CHECK="always"):
        group = own_group(here)
        made = [kdacore.chunk_kda(*leaves(here), cp=group)[0] for _ in range(2)]
        for o in made if here.rank else reversed(made):
            with raises(kdacore.ContractError, "'cp'", "the backward of call 1 on rank", "of call 2 on rank"):
                o.sum().backward()


CHECKS: tuple[Callable[[Here], None], ...] = (
    a_new_call_beside_a_repeated_one,
    backwards_in_another_order,
    an_error_of_one_rank,
    offsets_of_one_rank_and_of_all,
    a_destroyed_group,
    values_checked_on_one_rank,
    calls_compared_always_on_one_rank,
    two_groups_of_the_same_ranks,
    a_rank_that_never_calls,
    without_the_host,
    compared_always_without_the_host,
)
