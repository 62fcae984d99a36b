"""One of several processes with a GPU each, over NCCL: ``python nccl_rank.py <rank> <size> <folder> [check ...]``.

With ``fake`` among the checks, the others' tensors are pretended to be this process's: what a rank does can so be
captured and compiled on one GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import rank_calls
import torch
import torch.distributed as dist
from test_gpu import cases

import kdacore


def results(rank: int, size: int, backend: str) -> None:
    for whole in cases(size, backend):
        arrays = rank_calls.share(whole, size, rank, "cuda")
        if not kdacore.explain(whole.op, **arrays, **dict(whole.options), cp=size, backend=backend).backend:
            continue
        begun = time.perf_counter()
        shares: list[Any] = [None] * size
        mine = rank_calls.run_rank(whole, dist.group.WORLD, size, rank, "cuda")
        dist.all_gather_object(shares, mine)
        if rank == 0:
            rank_calls.check(whole, shares)
            print(backend, whole.note, f"{time.perf_counter() - begun:.1f} s", flush=True)


def arrays_of(T: int, seed: int, grad: bool = False) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(1, T, *shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    found = [draw(8, 128), draw(8, 128), draw(8, 128), -draw(8, 128).abs() * 0.1, draw(8).sigmoid()]
    return [x.requires_grad_(grad) for x in found]


def captured(rank: int) -> None:
    """Forward and backward in a CUDA graph give the bits of eager calls, on new values."""
    options: Any = {"use_qk_l2norm_in_kernel": True, "cp": dist.group.WORLD, "output_final_state": True}
    offsets = torch.tensor([0, 100, 1500, 1500, 2048 * dist.get_world_size()], device="cuda")

    def step(x: list[Any]) -> list[Any]:
        o, state = kdacore.chunk_kda(*x, cu_seqlens=offsets, **options)
        return [o, state, *torch.autograd.grad((o.float().square().sum() + state.square().sum()), x)]

    held = arrays_of(2048, rank, grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(held)
    fresh = arrays_of(2048, rank + 100, grad=True)
    with torch.no_grad():
        for x, y in zip(held, fresh, strict=True):
            x.copy_(y)
    graph.replay()
    for found, wanted in zip(results, step(fresh), strict=True):
        assert found.isfinite().all() and torch.equal(found, wanted)


def compiled(rank: int) -> None:
    x = arrays_of(1024, rank, grad=True)
    group = dist.group.WORLD

    def call(*arrays: Any) -> Any:
        return kdacore.chunk_kda(*arrays, use_qk_l2norm_in_kernel=True, cp=group)[0] * 2

    found, wanted = torch.compile(call, backend="aot_eager", fullgraph=True)(*x), call(*x)
    assert found.isfinite().all() and torch.equal(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found.float().sum(), x), torch.autograd.grad(wanted.float().sum(), x), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def no_synchronisation(rank: int) -> None:
    x = arrays_of(1024, rank, grad=True)

    def step() -> None:
        o, _ = kdacore.chunk_kda(*x, use_qk_l2norm_in_kernel=True, cp=dist.group.WORLD)
        o.float().sum().backward()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def groups_and_devices(rank: int, size: int) -> None:
    x = arrays_of(64, rank)
    gloo = dist.new_group(backend="gloo")
    for arrays, group, wanted in ((x, gloo, "nccl"), ([a.cpu() for a in x], dist.group.WORLD, "gloo")):
        try:
            kdacore.chunk_kda(*arrays, cp=group)
        except kdacore.ContractError as error:
            assert error.argument == "cp" and wanted in str(error), error
        else:
            raise AssertionError("no error")
    try:
        kdacore.chunk_kda(*arrays_of(64 * (1 + rank), 0), cp=dist.group.WORLD)
    except kdacore.ContractError as error:
        assert error.argument == "q" and "on rank 0" in str(error), error
    else:
        raise AssertionError("no error")


def assert_refused(arrays: list[Any], group: Any) -> None:
    try:
        kdacore.chunk_kda(*arrays, cp=group)
    except kdacore.ContractError as error:
        assert error.argument == "cp" and "NaN" in str(error), error
        return
    raise AssertionError("no error")


def out_of_step(rank: int) -> None:
    """Backwards in another order, and a call that failed on one rank alone: NaN on every rank, then an error."""
    group = dist.new_group()

    def call(x: list[Any]) -> Any:
        return kdacore.chunk_kda(*x, use_qk_l2norm_in_kernel=True, cp=group)[0]

    arrays = [arrays_of(1024, 2 * rank + i, grad=True) for i in range(2)]
    for x, o in [(x, call(x)) for x in arrays][:: 1 if rank else -1]:
        o.float().sum().backward()
        assert x[1].grad.isnan().all()
    assert_refused(arrays_of(512, rank), group)
    assert call(arrays[0]).isfinite().all()
    if rank == 0:
        try:
            call([*arrays[0][:4], arrays[0][4][:, :5]])
        except kdacore.ContractError as error:
            assert error.argument == "beta", error
    assert call(arrays[0]).isnan().all()
    assert_refused(arrays_of(256, rank), group)


CHECKS: dict[str, Callable[[int, int], None]] = {
    "groups": groups_and_devices,
    "synchronisation": lambda rank, size: no_synchronisation(rank),
    "out of step": lambda rank, size: out_of_step(rank),
    "captured": lambda rank, size: captured(rank),
    "compiled": lambda rank, size: compiled(rank),
    "cuda": lambda rank, size: results(rank, size, "cuda"),
    "triton": lambda rank, size: results(rank, size, "triton"),
}


def start(rank: int, size: int, folder: Path, fake: bool) -> None:
    """Join the group: over NCCL, or a pretended one, in which every rank's tensors are this one's."""
    if fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    fake = "fake" in names
    start(rank, size, folder, fake)
    for name in [name for name in names if name != "fake"] or CHECKS:
        CHECKS[name](rank, size)
        if rank == 0 or fake:
            print(name, "passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
