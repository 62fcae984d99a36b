"""The ranks of a ``torch.distributed`` process group, and what ``cp=`` may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kdacore.errors import ContractError
from kdacore.parallel.agreement import Head
from kdacore.parallel.exchange import Ranks
from kdacore.parallel.local_ranks import LocalRanks
from kdacore.parallel.progress import Progress

WANTED = "a torch.distributed.ProcessGroup or a DeviceMesh of one dimension"
_HOST_ONLY, _CUDA_ONLY = ("gloo", "mpi"), ("nccl",)

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13."""


class TorchRanks(Ranks, Protocol):
    """The ranks of a torch call."""

    name: str
    """The name that :func:`ranks_of_name` finds the ranks by."""

    def exchange(self, x: Any) -> list[Any]:
        """One object of every rank, in their order. Waits for all of them, on the host."""
        ...

    def heads(self, head: Head) -> list[Head]:
        """The heads of every rank's step, likewise. Of a few bytes, and the same number for any step."""
        ...

    def obstacle(self, device: str) -> tuple[str, str] | None:
        """Why tensors on a type of device cannot be exchanged: what the group is, and what is wanted."""
        ...

    def on_host(self, device: str) -> bool:
        """Do the ranks meet on the host before each step of a call with tensors on a type of device?"""
        ...

    def gone(self) -> bool:
        """Has the group been destroyed?"""
        ...


class ProcessRanks:
    """The ranks of a process group, one process each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.name: str = group.group_name
        self.progress = Progress()
        self._backends = _backends(group)

    def all_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = x.contiguous()
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        work = _all_gather(gathered, x, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()  # of NCCL: the current stream waits, not the host
            return gathered.view(self.size, *x.shape)

        return wait

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def exchange(self, x: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, group=self.group)
        return found

    def heads(self, head: Head) -> list[Head]:
        gathered = self.all_gather(torch.tensor(head, dtype=torch.int64, device="cpu"))()
        return [Head(*x) for x in gathered.tolist()]

    def on_host(self, device: str) -> bool:
        # A group that serves no other device has nowhere else to meet, where tensors are on the wrong one.
        return self.obstacle("cpu") is None and (device == "cpu" or self.obstacle(device) is not None)

    def gone(self) -> bool:
        return is_gone(self.group)

    def obstacle(self, device: str) -> tuple[str, str] | None:
        name = self._backends.get(device, "")
        wrong = _HOST_ONLY if device == "cuda" else _CUDA_ONLY if device == "cpu" else ()
        if name and name not in wrong:
            return None
        served = ", ".join(f"{backend} for {where}" for where, backend in self._backends.items())
        want = "nccl, for example" if device == "cuda" else "gloo, for example"
        return (
            f"a group with {served or 'no backend'}",
            f"one whose backend serves tensors on {device}: {want}",
        )


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Names of a group's backends by type of device."""
    parts = [part.partition(":") for part in dist.get_backend_config(group).split(",")]
    return {device: name for device, _, name in parts if name}


_known: dict[str, ProcessRanks] = {}
"""Known groups by name. Each is checked to be of that group: names come again after ``destroy_process_group``."""


def ranks_of(op: str, cp: Any) -> TorchRanks:
    """The ranks that a caller's ``cp=`` stands for.

    Raises:
        ContractError: it stands for none that this process belongs to.
    """
    if isinstance(cp, LocalRanks):
        return cp
    if not dist.is_available():
        raise ContractError(
            op, "cp", type(cp).__name__, "None: this torch is built without torch.distributed"
        )
    group = cp
    if isinstance(cp, dist.device_mesh.DeviceMesh):
        if cp.ndim != 1:
            names = f" {cp.mesh_dim_names}" if cp.mesh_dim_names else ""
            raise ContractError(
                op, "cp", f"a DeviceMesh of {cp.ndim} dimensions{names}", f"{WANTED}, mesh['cp'] say"
            )
        group = cp.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ContractError(op, "cp", "a group that this process does not belong to", WANTED)
    if not isinstance(group, dist.ProcessGroup):
        raise _no_group(op, cp)
    found = _known.get(group.group_name)
    if found is None or found.group is not group:
        if is_gone(group):
            raise _gone(op)
        if dist.get_rank(group) < 0:
            raise ContractError(op, "cp", "a group that this process does not belong to", WANTED)
        found = _known[group.group_name] = ProcessRanks(group)
    elif found.gone():
        raise _gone(op)
    return found


def check_group(op: str, ranks: TorchRanks) -> None:
    """Refuse a group that has been destroyed since the forward of a call.

    Raises:
        ContractError: naming ``cp``.
    """
    if ranks.gone():
        raise _gone(op)


def is_gone(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


def _gone(op: str) -> ContractError:
    return ContractError(op, "cp", "a process group that has been destroyed", f"{WANTED} that is in use")


def _no_group(op: str, cp: Any) -> ContractError:
    """The error for something in place of a group. Contexts of other libraries may have a layout that is not served."""
    kind = type(cp)
    got = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    layout = getattr(cp, "layout", "contiguous")
    if layout != "contiguous":
        got += f" with layout {layout!r}"
        return ContractError(
            op, "cp", got, "contiguous slices: rank r holds tokens [r*T, (r+1)*T) of the whole row"
        )
    if isinstance(getattr(cp, "group", None), dist.ProcessGroup):
        return ContractError(op, "cp", got, "its group, with cu_seqlens over the whole row")
    return ContractError(op, "cp", got, WANTED)


def ranks_of_name(op: str, name: str) -> TorchRanks:
    """The ranks of a group by its name, in the process of one of them.

    Raises:
        ContractError: there is no such group any more.
    """
    local = LocalRanks.by_name(name)
    if local is not None:
        return local
    try:
        group = dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError:
        raise _gone(op) from None
    return ranks_of(op, group)
