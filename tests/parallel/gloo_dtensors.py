"""Checks of calls with DTensors, for ``gloo_rank.py``: the batch or the heads are split over processes, and outputs,
states and gradients equal those of one process. Placements that are refused: ``tests/frameworks/test_dtensors.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gloo_tools import Here
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import kdacore
from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.values import Shape
from kdacore.ops import OPS

HEADS = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "write_pool": 1}
"""The dimension of the heads, where it is not 2."""
ROWS = ("q", "k", "v", "g", "beta", "initial_state", "out")
GATE: dict[str, Any] = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}


def placement(split: str, name: str) -> Any:
    if split == "heads":
        return Shard(HEADS.get(name, 2))
    return Shard(0) if split == "rows" and name in ROWS else Replicate()


def placed(arrays: dict[str, Any], mesh: Any, split: str) -> dict[str, Any]:
    """The whole arrays of every rank as DTensors."""
    return {n: distribute_tensor(x, mesh, [placement(split, n)]) for n, x in arrays.items()}


def tensors(results: Any) -> list[Any]:
    return [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]


def run(function: Any, given: dict[str, Any], asked: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Results, and the gradients of a loss that all of them enter."""
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    found = tensors(function(**leaves, **asked))
    differentiable = [x for x in found if x.requires_grad]
    sum([x.square().sum() for x in differentiable]).backward()  # type: ignore[union-attr]
    return found, {n: x.grad for n, x in leaves.items()}


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def equal(x: Any, wanted: Any) -> None:
    torch.testing.assert_close(whole(x).detach(), wanted.detach(), rtol=1e-4, atol=2e-5)


def calls() -> Iterator[CallDescription]:
    shape = Shape(B=4, T=20, H=2, HV=4, K=16, V=8)
    for op in OPS:
        if OPS[op].family in ("chunk", "recurrent"):
            asked = options(**GATE, output_final_state=True)
            yield CallDescription(op=op, kind="torch", shape=shape, initial_state=True, options=asked)
    yield CallDescription(op="chunk_kda", kind="torch", shape=shape, options=options(checkpoint_every=64))
    yield CallDescription(op="kda_gate", kind="torch", shape=shape, options=options(lower_bound=-5.0))


def compare(call: CallDescription, mesh: Any, split: str, function: Any = None) -> None:
    arrays, asked = make_arrays(call), dict(call.options)
    function = function or public_function(call.op)
    wanted, wanted_grads = run(public_function(call.op), arrays, asked)
    with kdacore.record_selections() as ran:
        found, grads = run(function, placed(arrays, mesh, split), asked)
    assert [s.backend for s in ran] == ["reference"]
    shape = call.shape
    parts = {"rows": (shape.B // mesh.size(), shape.HV), "heads": (shape.B, shape.HV // mesh.size())}
    assert parts.get(split, (shape.B, shape.HV)) == (ran[0].request.B, ran[0].request.HV)
    for x, y, name in zip(
        found, wanted, ("v", "g" if "checkpoint_every" in asked else "initial_state"), strict=False
    ):
        assert x.placements == (placement(split, name),)
        equal(x, y)
    for name, x in grads.items():
        shared = split == "rows" and name not in ROWS
        assert x.placements == ((Partial(),) if shared else (placement(split, name),)), name
        equal(x, wanted_grads[name])


def calls_by_rows_and_heads(here: Here) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (here.size,))
    for call in calls():
        for split in ("rows", "heads"):
            compare(call, mesh, split)
    compare(call, mesh, "nothing")


def a_tensor_that_is_still_gathered(here: Here) -> None:
    """``redistribute`` does not wait for its communication; whoever reads the tensor does."""
    arrays = make_arrays(next(calls()))
    asked, mesh = dict(next(calls()).options), dist.device_mesh.init_device_mesh("cpu", (here.size,))
    given = placed(arrays, mesh, "nothing")
    given["q"] = distribute_tensor(arrays["q"], mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    for x, y in zip(kdacore.chunk_kda(**given, **asked), kdacore.chunk_kda(**arrays, **asked), strict=True):
        equal(x, y)


def compiled_calls(here: Here) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (here.size,))
    function = torch.compile(kdacore.chunk_kda, backend="aot_eager", fullgraph=True)
    for split in ("rows", "heads"):
        torch._dynamo.reset()  # else the number of heads were symbolic, which torch's DTensors are not made for
        compare(next(calls()), mesh, split, function)


def a_pool_by_heads(here: Here) -> None:
    """Offsets and indices are plain tensors; the pool and ``out`` are written, and are what is returned."""
    call = CallDescription(
        op="chunk_kda", kind="torch", shape=Shape(T=20, H=2, HV=4, K=16, V=8, lengths=(16, 4)), pool="inplace",
        out=True, options=options(inplace_state=True, output_final_state=True),
    )  # fmt: skip
    arrays, mesh = make_arrays(call), dist.device_mesh.init_device_mesh("cpu", (here.size,))
    plain = {n: x for n, x in arrays.items() if not x.is_floating_point()}
    given = placed({n: x for n, x in arrays.items() if n not in plain}, mesh, "heads")
    asked = dict(call.options)
    o, pool = kdacore.chunk_kda(**given, **plain, **asked)
    assert o is given["out"] and pool is given["initial_state"]
    kdacore.chunk_kda(**arrays, **asked)
    equal(o, arrays["out"])
    torch.testing.assert_close(whole(pool), arrays["initial_state"], equal_nan=True)  # rows without values


# --- layers ---------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """The parts of flash-linear-attention's KDA layer that tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        D, self.K, H, HV = 32, 16, 2, 4
        for name, width in (("q", H), ("k", H), ("v", HV), ("f", HV), ("g", HV)):
            setattr(self, f"{name}_proj", torch.nn.Linear(D, width * self.K, bias=False))
        self.b_proj = torch.nn.Linear(D, HV, bias=False)
        self.o_proj = torch.nn.Linear(HV * self.K, D, bias=False)
        self.A_log = torch.nn.Parameter(torch.rand(HV))
        self.dt_bias = torch.nn.Parameter(torch.rand(HV * self.K))

    def forward(self, x: Any) -> Any:
        project = [self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj]
        q, k, v, f, g = [p(x).unflatten(2, (-1, self.K)) for p in project]
        o, _ = kdacore.chunk_kda(
            q, k, v, f, self.b_proj(x), A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True, **GATE
        )  # fmt: skip
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * torch.sigmoid(g)
        return x + self.o_proj(o.flatten(2))


def tensor_parallel(layer: Layer, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"{n}_proj": ColwiseParallel(use_local_output=False) for n in "qkvfgb"}
    parallelize_module(layer, mesh, {**plan, "o_proj": RowwiseParallel()})
    for name in ("A_log", "dt_bias"):
        param = distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)])
        setattr(layer, name, torch.nn.Parameter(param))


def compare_layer(parallel: Callable[[Layer], None], given: Callable[[Any], Any], times: float = 1) -> None:
    """``given``: a rank's part of the input. ``times``: what the ranks' gradients are to be multiplied with."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 20, 32)
    alone = copy.deepcopy(layer)
    wanted = alone(x)
    wanted.square().sum().backward()
    parallel(layer)
    o = layer(given(x))
    o.square().sum().backward()
    equal(o, wanted if isinstance(o, DTensor) else given(wanted))
    for (name, a), b in zip(layer.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(times * whole(a.grad), b.grad, rtol=1e-3, atol=1e-4, msg=name)


def a_layer_in_tensor_parallel(here: Here) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (here.size,))
    compare_layer(lambda layer: tensor_parallel(layer, mesh), lambda x: x)


def a_layer_on_a_split_batch(here: Here) -> None:
    from torch.distributed.tensor import distribute_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (here.size,))
    compare_layer(
        lambda layer: distribute_module(layer, mesh), lambda x: distribute_tensor(x, mesh, [Shard(0)])
    )


def a_fully_sharded_layer(here: Here) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (here.size,))
    compare_layer(
        lambda layer: fully_shard(layer, mesh=mesh), lambda x: x.chunk(here.size)[here.rank], times=here.size
    )


def fully_sharded_and_tensor_parallel(here: Here) -> None:
    """Four processes: tensor parallelism by two, and the parameters sharded over two data-parallel ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, here.size // 2), mesh_dim_names=("dp", "tp"))

    def parallel(layer: Layer) -> None:
        tensor_parallel(layer, mesh["tp"])
        fully_shard(layer, mesh=mesh["dp"])

    compare_layer(parallel, lambda x: x.chunk(2)[mesh["dp"].get_local_rank()], times=2)


def rows_and_heads_of_one_call(here: Here) -> None:
    """Four processes: a mesh of two dimensions."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, here.size // 2))
    arrays = make_arrays(next(calls()))
    asked = dict(next(calls()).options)
    wanted, wanted_grads = run(kdacore.chunk_kda, arrays, asked)
    placements = {n: [placement("rows", n), placement("heads", n)] for n in arrays}
    found, grads = run(
        kdacore.chunk_kda, {n: distribute_tensor(x, mesh, placements[n]) for n, x in arrays.items()}, asked
    )
    assert found[0].placements == (Shard(0), Shard(2)) and found[1].placements == (Shard(0), Shard(1))
    assert grads["A_log"].placements == (Partial(), Shard(0))
    for x, y in zip(found, wanted, strict=True):
        equal(x, y)
    for name, x in grads.items():
        equal(x, wanted_grads[name])


def compiled_layers(here: Here) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (here.size,))

    def parallel(layer: Layer) -> None:
        tensor_parallel(layer, mesh)
        layer.compile(backend="aot_eager", fullgraph=True)

    compare_layer(parallel, lambda x: x)


QUICK: tuple[Callable[[Here], None], ...] = (
    calls_by_rows_and_heads,
    a_pool_by_heads,
    a_tensor_that_is_still_gathered,
    a_layer_in_tensor_parallel,
    a_layer_on_a_split_batch,
    a_fully_sharded_layer,
)
LONGER = (compiled_calls, compiled_layers)
ON_FOUR = (rows_and_heads_of_one_call, fully_sharded_and_tensor_parallel)
