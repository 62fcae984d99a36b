"""DTensors: what their placements give, and which are refused, by the argument's name. One rank of two, whose
collectives do nothing; numbers on several processes are compared in ``tests/parallel/gloo_dtensors.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kdacore
from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.values import Shape
from kdacore.ops import OPS

dist = pytest.importorskip("torch.distributed")
tensor = pytest.importorskip("torch.distributed.tensor")
DTensor, Shard, Replicate, Partial = tensor.DTensor, tensor.Shard, tensor.Replicate, tensor.Partial

SHARED = ("A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight")
"""What all rows have in common."""
HEADS = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "write_pool": 1}
CALL = CallDescription(
    kind="torch",
    shape=Shape(B=2, T=20, H=2, HV=4, K=16, V=16),
    initial_state=True,
    options=options(use_gate_in_kernel=True, output_final_state=True),
)
WHOLE = make_arrays(CALL)
OPTIONS: dict[str, Any] = dict(CALL.options)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of two ranks, of which this is one; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _placed(x: torch.Tensor, mesh: Any, placement: Any) -> Any:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _by(split: str, mesh: Any, arrays: dict[str, Any] = WHOLE) -> dict[str, Any]:
    """These arrays as this rank's part of others, twice as large where they are split."""
    found = {}
    for name, x in arrays.items():
        placement = Replicate()
        if split == "heads":
            placement = Shard(HEADS.get(name, 2))
        elif split == "rows" and name not in SHARED:
            placement = Shard(0)
        found[name] = _placed(x, mesh, placement)
    return found


def _refused(
    name: str, *parts: str, op: str = "chunk_kda", asked: dict[str, Any] = OPTIONS, **given: Any
) -> None:
    """A ContractError naming the argument, with these in its text; of the questions about it, too."""
    for run in (
        lambda: public_function(op)(**given, **asked),
        lambda: kdacore.explain(op, **given, **asked),
        lambda: kdacore.selection_of(op, **given, **asked),
    ):
        with pytest.raises(kdacore.ContractError) as caught:
            run()
        assert caught.value.argument == name
        for part in parts:
            assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "split, compiled",
    [
        ("rows", False),
        ("heads", False),
        ("nothing", False),
        pytest.param("heads", True, marks=pytest.mark.slow),
        pytest.param("rows", True, marks=pytest.mark.exhaustive),
        pytest.param("nothing", True, marks=pytest.mark.exhaustive),
    ],
)
def test_each_rank_computes_its_part(split: str, compiled: bool, mesh: Any) -> None:
    """The bits of a call with this rank's tensors, and its gradients."""
    function = kdacore.chunk_kda
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    plain = {n: x.clone().requires_grad_() for n, x in WHOLE.items()}
    given = {n: x.requires_grad_() for n, x in _by(split, mesh).items()}
    with kdacore.record_selections() as ran:
        found = function(**given, **OPTIONS)
    wanted = kdacore.chunk_kda(**plain, **OPTIONS)
    assert [s.backend for s in ran] == ["reference"]
    assert ran[0].request == kdacore.explain("chunk_kda", **given, **OPTIONS).request
    assert ran[0].request == kdacore.selection_of("chunk_kda", **given, **OPTIONS).request
    for name, x, y in zip(("v", "initial_state"), found, wanted, strict=True):
        assert x.placements == given[name].placements and x.device_mesh == mesh
        assert x.shape == given[name].shape and torch.equal(x.to_local(), y)
    sum(x.square().sum() for x in found).to_local().backward()  # type: ignore[union-attr]
    sum(x.square().sum() for x in wanted).backward()  # type: ignore[union-attr]
    for name, x in given.items():
        shared = split == "rows" and name in SHARED
        assert x.grad.placements == ((Partial(),) if shared else x.placements)
        assert torch.equal(x.grad.to_local(), plain[name].grad)  # type: ignore[arg-type]


def test_the_other_ops(mesh: Any) -> None:
    for op in OPS:
        if OPS[op].family not in ("recurrent", "decode", "gate"):
            continue
        shape = Shape(B=2, T=2, H=2, HV=4, K=16, V=16)
        asked = {} if op == "kda_gate" else {"output_final_state": True}
        call = CallDescription(op=op, kind="torch", shape=shape, initial_state=True, options=options(**asked))
        arrays = make_arrays(call)
        wanted = public_function(op)(**arrays, **asked)
        for split in ("rows", "nothing") if OPS[op].family == "decode" else ("rows", "heads"):
            found = public_function(op)(**_by(split, mesh, arrays), **asked)
            for x, y in zip(*[r if isinstance(r, tuple) else (r,) for r in (found, wanted)], strict=True):
                assert torch.equal(x.to_local(), y)


def test_through_flas_signatures(mesh: Any) -> None:
    from kdacore.compat.fla import chunk_kda

    names = ("q", "k", "v", "g", "beta")
    given = [_by("heads", mesh)[n] for n in names]
    o, _ = chunk_kda(*given, use_gate_in_kernel=True, A_log=_placed(WHOLE["A_log"], mesh, Shard(0)))
    wanted, _ = chunk_kda(*[WHOLE[n] for n in names], use_gate_in_kernel=True, A_log=WHOLE["A_log"])
    assert o.placements == (Shard(2),) and torch.equal(o.to_local(), wanted)


def test_records_are_committed_by_heads(mesh: Any) -> None:
    call = CallDescription(op="commit_records", kind="torch", shape=Shape(B=2, T=2, H=2, HV=4, K=16, V=16))
    arrays = make_arrays(call)
    wanted = kdacore.commit_records(**OPS[call.op].keywords({n: x.clone() for n, x in arrays.items()}))
    given = {
        n: _placed(x, mesh, Shard(HEADS.get(n, 2))) if x.is_floating_point() else x for n, x in arrays.items()
    }
    found = kdacore.commit_records(**OPS[call.op].keywords(given))
    assert found is given["initial_state"]
    torch.testing.assert_close(found.to_local(), wanted, equal_nan=True)


def test_plain_offsets_and_indices(mesh: Any) -> None:
    """They are the same on all ranks. Split rows have none: an offset counts tokens of the whole batch."""
    shape = Shape(B=1, T=20, H=2, HV=4, K=16, V=16, lengths=(16, 4))
    call = CallDescription(kind="torch", shape=shape, pool="fresh", options=OPTIONS and CALL.options)
    arrays = make_arrays(call)
    plain = {n: x for n, x in arrays.items() if not x.is_floating_point()}
    assert {*plain} == {"cu_seqlens", "state_indices", "has_initial_state"}
    floats = {n: x for n, x in arrays.items() if n not in plain}
    wanted = kdacore.chunk_kda(**arrays, **OPTIONS)
    for split in ("heads", "nothing"):
        found = kdacore.chunk_kda(**_by(split, mesh, floats), **plain, **OPTIONS)
        assert all(torch.equal(x.to_local(), y) for x, y in zip(found, wanted, strict=True))
    given = _by("rows", mesh, floats)
    _refused("cu_seqlens", "whole batch", "to_local()", **given, **plain)
    _refused("state_indices", "whole batch", **given, state_indices=torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_tokens_that_are_split(name: str, mesh: Any) -> None:
    for split in ("rows", "heads"):
        given = {**_by(split, mesh), name: _placed(WHOLE[name], mesh, Shard(1))}
        _refused(name, "(Shard(1))", "cp=", "Shard(0)" if split == "rows" else "Shard(2)", **given)
    given = {n: _placed(WHOLE[n], mesh, Shard(1)) for n in ("q", "k", "v", "g", "beta")}
    _refused("v", "Shard(0) (rows) or Shard(2) (heads)", "cp=", asked={}, **given)


@pytest.mark.parametrize("name", ["q", "v", "beta", "A_log", "dt_bias", "initial_state"])
def test_placements_that_disagree(name: str, mesh: Any) -> None:
    x = WHOLE[name]
    given = _by("heads", mesh)
    for wrong in (Partial(), Replicate(), *[Shard(d) for d in range(x.dim()) if d != HEADS.get(name, 2)]):
        at_fault, wanted = name, "Shard"
        if name == "v" and wrong in (Shard(0), Replicate()):
            at_fault = "q"  # all others are not as v is
            wanted = "Replicate()" if wrong == Replicate() else "Shard(0)"
        _refused(at_fault, wanted, **{**given, name: _placed(x, mesh, wrong)})
    if name != "v":
        _refused(
            name, "a plain tensor", f"a DTensor placed (Shard({HEADS.get(name, 2)}))", **{**given, name: x}
        )
        _refused(name, "a DTensor placed (Shard(0))", **{**WHOLE, name: _placed(x, mesh, Shard(0))})
    else:
        _refused("q", "a plain tensor, as v is", **{**given, name: x})


def test_heads_that_ranks_cannot_share(mesh: Any) -> None:
    """The shapes are those of the whole tensors."""
    three = {n: x.narrow(HEADS.get(n, 2), 0, 1) for n, x in WHOLE.items()}
    given = _by("heads", mesh, three)
    for name in ("q", "k"):
        given[name] = tensor.distribute_tensor(three[name], mesh, [Shard(2)])
    _refused("q", "1 heads over 2 ranks", "whole groups of value heads", **given)
    odd = DTensor.from_local(
        WHOLE["v"],
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((3, 20, 4, 16)),
        stride=WHOLE["v"].stride(),
    )
    _refused("v", "3 rows over 2 ranks", "a multiple of 2", **{**_by("rows", mesh), "v": odd})


def test_other_meshes(mesh: Any) -> None:
    other = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    far = DTensor.from_local(WHOLE["beta"], other, [Shard(2), Replicate()], run_check=False)
    _refused("beta", "another mesh", **{**_by("heads", mesh), "beta": far})
    # Both dimensions of a mesh may split the same thing.
    placed = {
        n: DTensor.from_local(x, other, [Shard(HEADS.get(n, 2))] * 2, run_check=False)
        for n, x in WHOLE.items()
    }
    o, _ = kdacore.chunk_kda(**placed, **OPTIONS)
    assert o.placements == (Shard(2), Shard(2)) and o.shape == (2, 20, 8, 16)


def test_what_takes_no_dtensors(mesh: Any) -> None:
    """Stages; rows of ranks; the channels of fused decoding by heads, which lie side by side."""
    given = {n: _placed(x, mesh, Replicate()) for n, x in WHOLE.items()}
    with pytest.raises(kdacore.ContractError, match="'q'.*DTensor.*cp="):
        kdacore.chunk_kda(**given, **OPTIONS, cp=dist.group.WORLD)
    with pytest.raises(kdacore.ContractError, match="'g'.*DTensor.*stages"):
        kdacore.stages.kda_chunk_gate(given["g"])
    call = CallDescription(
        op="fused_decode_kda", kind="torch", shape=Shape(B=2, T=2, H=2, HV=4), initial_state=True
    )
    arrays = make_arrays(call)
    _refused(
        "x",
        "Replicate() or Shard(0) (rows)",
        op=call.op,
        asked={},
        **{**_by("nothing", mesh, arrays), "x": _placed(arrays["x"], mesh, Shard(2))},
    )


@pytest.mark.exhaustive
def test_refused_while_compiling(mesh: Any) -> None:
    """With its text where a graph must not break, and by the call outside of it elsewhere."""
    given = {**_by("heads", mesh), "beta": _placed(WHOLE["beta"], mesh, Replicate())}
    text = r"'beta': got a DTensor placed \(Replicate\(\)\); wanted \(Shard\(2\)\)"
    for fullgraph, error in ((False, kdacore.ContractError), (True, torch._dynamo.exc.Unsupported)):
        torch._dynamo.reset()
        function = torch.compile(lambda **x: kdacore.chunk_kda(**x), backend="aot_eager", fullgraph=fullgraph)
        with pytest.raises(error, match=text):
            function(**given, **OPTIONS)
