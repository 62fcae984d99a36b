"""The torch join: autograd, torch.library operators, torch.compile without a graph break, refusals."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import kdacore
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.pools import POOLS
from kdacore.calls.values import Shape, normalise, tensors, to_kind
from kdacore.dispatch import torch_operators

SHAPE = Shape(B=1, T=70, H=1, HV=2, K=8, V=8)
GATE = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def call(grad: bool = True, seed: int = 0, dtype: str = "float32", shape: Shape = SHAPE) -> dict[str, Any]:
    x = tensors(shape, seed, raw_gate=True, raw_beta=True)
    x["initial_state"] = np.random.default_rng(seed).standard_normal((shape.N, shape.HV, shape.K, shape.V))
    made = {n: to_kind(a, "torch", dtype if n in ("q", "k", "v") else "float32") for n, a in x.items()}
    return {n: a.requires_grad_(grad) for n, a in made.items()}


def plain(shape: Shape = SHAPE) -> dict[str, Any]:
    return {n: to_kind(a, "torch", "float32") for n, a in normalise(tensors(shape, 0)).items()}


def loss(out: Any) -> Any:
    return sum(
        (x.double() * torch.arange(x.numel()).reshape(x.shape).cos()).sum() for x in out if x is not None
    )


def run(function: Any, arguments: dict[str, Any]) -> Any:
    return function(**arguments, **GATE, output_final_state=True)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("function", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_gradcheck_in_float64(function: Any) -> None:
    shape = Shape(B=1, T=5, H=1, HV=2, K=3, V=2)
    made = {n: x.detach().double().requires_grad_() for n, x in call(shape=shape, dtype="float64").items()}
    names = list(made)
    torch.autograd.gradcheck(
        lambda *xs: run(function, dict(zip(names, xs, strict=True))), tuple(made.values())
    )


def test_gate_gradcheck_in_float64() -> None:
    g = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    a = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda g, a, b: kdacore.kda_gate(g, A_log=a, dt_bias=b), (g, a, bias))
    torch.autograd.gradcheck(lambda g, b: kdacore.kda_gate(g, dt_bias=b, lower_bound=-5.0), (g, bias))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradients_are_finite_at_the_ends_of_what_numbers_may_be(size: float) -> None:
    arguments = call(shape=SERVED)
    kdacore.kda_gate(arguments["g"], lower_bound=-size).sum().backward()
    o, _ = kdacore.chunk_kda(**arguments, **GATE, scale=size, lower_bound=-size)
    (o / max(size, 1.0)).sum().backward()
    assert all(x.grad.isfinite().all() for x in arguments.values())


def test_only_what_needs_a_gradient_gets_one() -> None:
    arguments = call(grad=False)
    arguments["v"].requires_grad_()
    loss(run(kdacore.chunk_kda, arguments)).backward()
    assert arguments["v"].grad is not None
    assert all(x.grad is None for n, x in arguments.items() if n != "v")


def test_a_loss_on_the_state_alone() -> None:
    arguments = call()
    run(kdacore.chunk_kda, arguments)[1].sum().backward()
    assert arguments["k"].grad.abs().sum() > 0
    assert not arguments["q"].grad.any()


def test_no_graph_without_grad() -> None:
    with torch.no_grad():
        o, state = run(kdacore.chunk_kda, call())
    assert not o.requires_grad and not state.requires_grad


def test_checkpoints_carry_no_gradient() -> None:
    o, _, checkpoints = kdacore.chunk_kda(**call(), **GATE, checkpoint_every=64)
    assert o.requires_grad and not checkpoints.requires_grad


def test_parameters_and_hooks_work() -> None:
    arguments = call()
    arguments["A_log"] = torch.nn.Parameter(arguments["A_log"].detach())
    loss(run(kdacore.chunk_kda, arguments)).backward()
    assert arguments["A_log"].grad is not None


def test_double_backward_is_refused_clearly() -> None:
    for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
        arguments = call()
        (grad,) = torch.autograd.grad(loss(run(function, arguments)), arguments["q"], create_graph=True)
        with pytest.raises(kdacore.UnsupportedError, match="double backward"):
            grad.sum().backward()
    g = torch.randn(1, 3, 2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(kdacore.kda_gate(g, lower_bound=-5.0).sum(), g, create_graph=True)
    with pytest.raises(kdacore.UnsupportedError, match="double backward"):
        grad.sum().backward()


DIFFERENTIABLE_HERE = [
    (kdacore.chunk_kda, "reference"),
    (kdacore.chunk_kda, "xla"),
    (kdacore.fused_recurrent_kda, "reference"),
    (kdacore.fused_recurrent_kda, "xla"),
    (kdacore.chunk_kda, "triton"),
]
"""Whole ops with the backends that differentiate them on a CPU (the triton one interpreted)."""


SERVED = Shape(B=1, T=20, H=1, HV=2, K=16, V=16)
"""A shape that every backend takes."""


@pytest.fixture
def serving(request: pytest.FixtureRequest) -> Any:
    """A whole op and its backend; skipped where the backend cannot run on this machine's CPU."""
    function, backend = request.param
    chosen = kdacore.explain(function, **call(shape=SERVED), **GATE, output_final_state=True, backend=backend)
    if not chosen.backend:
        pytest.skip(f"{backend} does not run here: {chosen.candidate(backend).reasons}")
    return functools.partial(function, **GATE, output_final_state=True, backend=backend)


@pytest.mark.first_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("serving", DIFFERENTIABLE_HERE, indirect=True)
def test_activation_checkpointing(serving: Any) -> None:
    plain, checkpointed = call(shape=SERVED), call(shape=SERVED)
    loss(serving(**plain)).backward()
    names = list(checkpointed)
    out = checkpoint(
        lambda *xs: serving(**dict(zip(names, xs, strict=True))), *checkpointed.values(), use_reentrant=False
    )
    loss(out).backward()
    for name in names:
        torch.testing.assert_close(checkpointed[name].grad, plain[name].grad, rtol=0, atol=0, msg=name)


@pytest.mark.first_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("serving", DIFFERENTIABLE_HERE, indirect=True)
def test_saved_tensors_are_unpacked_once(serving: Any) -> None:
    packed: list[int] = []
    unpacked: list[int] = []

    def pack(x: Any) -> Any:
        packed.append(id(x))
        return x

    def unpack(x: Any) -> Any:
        unpacked.append(id(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        arguments = call(shape=SERVED)
        o, _ = serving(**arguments)
    o.sum().backward()
    assert len(packed) >= len(arguments)
    assert sorted(unpacked) == sorted(packed)


@pytest.mark.parametrize("serving", [x for x in DIFFERENTIABLE_HERE if x[1] != "xla"], indirect=True)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_results_may_be_changed_in_place(serving: Any, state_v_first: bool) -> None:
    """As a residual or a norm in place does, whether the call was differentiated or made under ``no_grad``."""
    factor = torch.full((), 3.0, requires_grad=True)
    for grad in (True, False):
        arguments = call(grad, shape=SERVED)
        if state_v_first:
            arguments["initial_state"] = arguments["initial_state"].detach().mT.contiguous()
        with torch.set_grad_enabled(grad):
            results = serving(**arguments, state_v_first=state_v_first)
        before = [x.detach().clone() for x in results]
        for x in results:
            x.mul_(factor)
        loss(results).backward()
        assert (arguments["q"].grad is not None) is grad
        same_bits([x.detach() for x in results], [3.0 * x for x in before])
    assert factor.grad is not None


@pytest.mark.parametrize("option", ["state_indices", "out", "inplace_state", "read_only_state"])
def test_inference_options_refuse_gradients(option: str) -> None:
    arguments = call(shape=Shape(B=1, T=4, H=1, HV=2, K=8, V=8))
    given = {
        "state_indices": torch.tensor([0]),
        "out": torch.empty(1, 4, 2, 8),
        "inplace_state": True,
        "read_only_state": True,
    }[option]
    with pytest.raises(kdacore.ContractError, match=rf"'{option}'.*no_grad"):
        kdacore.fused_recurrent_kda(**arguments, **GATE, **{option: given})
    with torch.no_grad():
        kdacore.fused_recurrent_kda(**arguments, **GATE, **{option: given})


@pytest.mark.parametrize(
    "option", ["state_indices", "has_initial_state", "write_pool", "write_indices", "out", "inplace_state"]
)
def test_a_server_s_prefill_refuses_gradients(option: str) -> None:
    arguments = call(shape=Shape(B=1, T=4, H=1, HV=2, K=8, V=8))
    rows = torch.tensor([0])
    asked: dict[str, Any] = {
        "state_indices": {"state_indices": rows},
        "has_initial_state": {"has_initial_state": torch.tensor([True])},
        "write_pool": {"write_pool": torch.zeros(1, 2, 8, 8), "write_indices": rows, "inplace_state": True},
        "write_indices": {"state_indices": rows, "write_indices": rows, "inplace_state": True},
        "out": {"out": torch.empty(1, 4, 2, 8)},
        "inplace_state": {"inplace_state": True},
    }[option]
    with pytest.raises(kdacore.ContractError, match="no_grad"):
        kdacore.chunk_kda(**arguments, **GATE, **asked)
    with torch.no_grad():
        kdacore.chunk_kda(**arguments, **GATE, **asked)


def test_stages_refuse_gradients() -> None:
    with pytest.raises(kdacore.ContractError, match="no_grad"):
        kdacore.stages.kda_chunk_gate(torch.randn(1, 4, 2, 8, requires_grad=True))


# --- what autograd in reverse cannot do --------------------------------------------------------------------------


def dual(x: Any) -> Any:
    return forward_ad.make_dual(x, torch.ones_like(x))


DUAL_CALLS = {
    "chunk": lambda x: kdacore.chunk_kda(**{**x, "k": dual(x["k"])}),
    "recurrent": lambda x: kdacore.fused_recurrent_kda(**{**x, "beta": dual(x["beta"])}),
    "with a gradient": lambda x: kdacore.chunk_kda(
        **{**x, "k": dual(x["k"]), "v": x["v"].clone().requires_grad_()}
    ),
    "gate": lambda x: kdacore.kda_gate(dual(x["g"]), lower_bound=-5.0),
    "stage": lambda x: kdacore.stages.kda_chunk_gate(dual(x["g"])),
}


ignore_jit = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
"""Of torch's own first step in a dual level."""


@ignore_jit
@pytest.mark.parametrize("name", DUAL_CALLS)
def test_tangents_are_refused(name: str) -> None:
    arguments = plain(SERVED)
    for _ in range(4):  # also once the same call without a tangent is recognised
        with forward_ad.dual_level(), pytest.raises(kdacore.UnsupportedError, match="forward-mode AD"):
            DUAL_CALLS[name](arguments)
        for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
            function(**arguments)
        kdacore.kda_gate(arguments["g"], lower_bound=-5.0)
        kdacore.stages.kda_chunk_gate(arguments["g"])


def test_a_call_without_tangents_in_a_dual_level_works() -> None:
    arguments = plain(SERVED)
    wanted = kdacore.chunk_kda(**arguments)
    with forward_ad.dual_level():
        for _ in range(4):
            same_bits(kdacore.chunk_kda(**arguments), wanted)


@ignore_jit
def test_tangents_are_refused_below_the_operators() -> None:
    arguments = {**plain(SERVED), "output_final_state": True}
    with forward_ad.dual_level():
        arguments["v"] = dual(arguments["v"])
        with pytest.raises(kdacore.UnsupportedError, match="forward-mode AD"):
            torch.ops.kdacore.chunk(*operator_arguments("chunk", arguments, False))


TRANSFORMS = {
    "grad": lambda f, v: torch.func.grad(lambda v: f(v).sum())(v),
    "vjp": lambda f, v: torch.func.vjp(f, v),
    "jvp": lambda f, v: torch.func.jvp(f, (v,), (v,)),
    "vmap": lambda f, v: torch.func.vmap(f)(torch.stack([v, v])),
    "jacrev": lambda f, v: torch.func.jacrev(f)(v),
    "per-sample gradients": lambda f, v: torch.func.vmap(torch.func.grad(lambda v: f(v).sum()))(v[None]),
    "a gradient from outside": lambda f, v: _scaled(f, v.clone().requires_grad_()),
    "batched gradients": lambda f, v: _batched_gradients(f, v.clone().requires_grad_()),
}


def _scaled(f: Any, v: Any) -> Any:
    return torch.func.vmap(lambda s: s * f(v))(torch.ones(2))


def _batched_gradients(f: Any, v: Any) -> Any:
    o = f(v)
    return torch.autograd.grad(o, v, torch.stack([o, o]).detach(), is_grads_batched=True)


@ignore_jit
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("op", ["chunk", "recurrent", "gate"])
def test_function_transforms_are_refused(name: str, op: str) -> None:
    arguments = plain(SERVED)

    def f(v: Any) -> Any:
        if op == "gate":
            return kdacore.kda_gate(v, lower_bound=-5.0)
        function = kdacore.chunk_kda if op == "chunk" else kdacore.fused_recurrent_kda
        return function(**{**arguments, "v": v})[0]

    for _ in range(3):
        f(arguments["v"])
    with pytest.raises(kdacore.UnsupportedError, match=r"torch\.func transforms"):
        TRANSFORMS[name](f, arguments["v"])


def test_a_call_inside_a_transform_of_something_else_works() -> None:
    arguments = plain(SERVED)
    wanted = kdacore.chunk_kda(**arguments)[0]
    found = torch.func.vmap(lambda s: s * kdacore.chunk_kda(**arguments)[0])(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(found[1], 2 * wanted)


# --- autocast ----------------------------------------------------------------------------------------------------


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def same_bits(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("function", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_autocast_changes_no_bit(function: Any) -> None:
    plain = call(shape=SERVED)
    results = run(function, plain)
    loss(results).backward()
    for _ in range(4):  # the later calls are recognised
        cast = call(shape=SERVED)
        with autocast():
            found = run(function, cast)
            loss(found).backward()
        same_bits(found, results)
        same_bits([x.grad for x in cast.values()], [x.grad for x in plain.values()])
        with torch.no_grad():
            with autocast():
                without_gradients = run(function, cast)
            same_bits(without_gradients, run(function, cast))


def test_autocast_changes_no_bit_of_the_gate_the_stages_and_decoding() -> None:
    x = plain(SERVED)
    gc = kdacore.stages.kda_chunk_gate(x["g"])
    stage = functools.partial(kdacore.stages.kda_chunk_intra, x["q"], x["k"], gc, x["beta"])
    gate = functools.partial(kdacore.kda_gate, x["g"], lower_bound=-5.0)

    def decode() -> Any:
        pool = torch.ones(3, 2, 16, 16)
        o, _ = kdacore.fused_recurrent_kda(
            **x, initial_state=pool, state_indices=torch.tensor([1]), inplace_state=True
        )
        return o, pool

    for function in (stage, lambda: [gate()], decode):
        wanted = function()
        for _ in range(4):
            with autocast():
                found = function()
            same_bits(found, wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast_changes_no_bit_of_a_compiled_call(backend: str) -> None:
    def step(arguments: dict[str, Any]) -> Any:
        o, state = run(kdacore.chunk_kda, arguments)
        return o, state, kdacore.kda_gate(arguments["g"], lower_bound=-5.0)

    torch._dynamo.reset()
    graph, eager = call(shape=SERVED), call(shape=SERVED)
    with autocast():
        found = torch.compile(step, fullgraph=True, backend=backend)(graph)
        loss(found).backward()
    wanted = step(eager)
    loss(wanted).backward()
    same_bits(found, wanted)
    same_bits([x.grad for x in graph.values()], [x.grad for x in eager.values()])


# --- operators -----------------------------------------------------------------------------------------------------


def operator_arguments(
    family: str, arguments: dict[str, Any], needs_grad: bool, writes: bool = False
) -> tuple[Any, ...]:
    """The flat arguments of an operator."""
    op = {"chunk": "chunk_kda", "recurrent": "fused_recurrent_kda", "gate": "kda_gate"}[family]
    arrays = [arguments.get(n) for n in torch_operators._ARRAYS[family]]
    options = [arguments.get(o.name, o.default) for o in torch_operators._OPTIONS[family]]
    given = [arguments[n] for n in torch_operators._WRITABLE[family] if arguments.get(n) is not None]
    return (op, *arrays, *options, needs_grad, "", "", "auto", False, *([given] if writes else []))


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_chunk(grad: bool) -> None:
    arguments = {**call(grad), **GATE, "output_final_state": True, "checkpoint_every": None if grad else 64}
    torch.library.opcheck(torch.ops.kdacore.chunk.default, operator_arguments("chunk", arguments, grad))


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_recurrent(grad: bool) -> None:
    arguments = {**call(grad, shape=Shape(B=2, T=3, H=1, HV=2, K=8, V=8)), **GATE, "output_final_state": True}
    torch.library.opcheck(
        torch.ops.kdacore.recurrent.default, operator_arguments("recurrent", arguments, grad)
    )


def test_opcheck_recurrent_in_place() -> None:
    arguments = {**call(False, shape=Shape(B=2, T=3, H=1, HV=2, K=8, V=8)), **GATE, "inplace_state": True}
    arguments["initial_state"] = torch.randn(5, 2, 8, 8)
    arguments["state_indices"] = torch.tensor([4, 2])
    arguments["out"] = torch.empty(2, 3, 2, 8)
    torch.library.opcheck(
        torch.ops.kdacore.recurrent_.default, operator_arguments("recurrent", arguments, False, True)
    )


def prefill(kind: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A server's prefill, everything it may use: arrays and options."""
    made = CallDescription(
        kind="torch",
        shape=Shape(1, 75, 1, 2, 8, 8, (35, 0, 17, 20), 3),
        pool=POOLS[kind],
        out=True,
        seed=seed,
        options=options(output_final_state=True),
    )
    made = made.having(**made.pool_use.options)  # type: ignore[union-attr]
    arrays = make_arrays(made)
    for name in ("q", "k", "v", "g", "beta", "initial_state", "write_pool", "out"):
        if name in arrays:
            arrays[name].nan_to_num_(nan=7.0)  # comparable; the oracle's tests are elsewhere
    return arrays, dict(made.options)


@pytest.mark.parametrize("kind", ["checkpoints_moved", "checkpoints_other_pool"])
def test_opcheck_chunk_in_place(kind: str) -> None:
    arrays, given = prefill(kind)
    torch.library.opcheck(
        torch.ops.kdacore.chunk_.default, operator_arguments("chunk", {**arrays, **given}, False, True)
    )


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_gate(grad: bool) -> None:
    g = torch.randn(1, 3, 2, 4, requires_grad=grad)
    A_log = torch.randn(2, requires_grad=grad)
    arguments = operator_arguments("gate", {"g": g, "A_log": A_log}, grad)
    torch.library.opcheck(torch.ops.kdacore.gate.default, arguments)


# --- torch.compile -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("function", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_compile_forward_and_backward(function: Any) -> None:
    def step(arguments: dict[str, Any]) -> Any:
        return loss(run(function, arguments))

    eager, graph = call(), call()
    step(eager).backward()
    with kdacore.record_selections() as ran:
        value = compiled(step)(graph)
        value.backward()
    assert [s.backend for s in ran] == ["reference"]
    torch.testing.assert_close(value, step(call()))
    for name in eager:
        torch.testing.assert_close(graph[name].grad, eager[name].grad, msg=name)


@pytest.mark.slow
def test_compile_with_changing_lengths() -> None:
    function = compiled(lambda **x: kdacore.chunk_kda(**x, output_final_state=True, checkpoint_every=64))
    for T in (64, 70, 129, 200):
        arguments = plain(Shape(B=1, T=T, H=1, HV=2, K=8, V=8))
        for ours, theirs in zip(
            function(**arguments),
            kdacore.chunk_kda(**arguments, output_final_state=True, checkpoint_every=64),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


def test_compile_packed() -> None:
    arguments = plain()
    offsets = torch.tensor([0, 0, 3, 70])
    function = compiled(lambda cu, **x: kdacore.chunk_kda(**x, cu_seqlens=cu, output_final_state=True))
    o, state = function(offsets, **arguments)
    assert state.shape[0] == 3
    torch.testing.assert_close(o, kdacore.chunk_kda(**arguments, cu_seqlens=offsets)[0])


def test_compile_in_place_decode() -> None:
    shape = Shape(B=2, T=1, H=1, HV=2, K=8, V=8)
    arguments, indices = plain(shape), torch.tensor([3, -1])
    pools = [torch.ones(5, 2, 8, 8), torch.ones(5, 2, 8, 8)]
    outs = [torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 2, 8)]

    def step(pool: Any, out: Any, **x: Any) -> Any:
        return kdacore.fused_recurrent_kda(
            **x,
            initial_state=pool,
            state_indices=indices,
            inplace_state=True,
            output_final_state=True,
            out=out,
        )

    o, state = compiled(step)(pools[0], outs[0], **arguments)
    step(pools[1], outs[1], **arguments)
    torch.testing.assert_close(pools[0], pools[1])
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(o, outs[1])
    torch.testing.assert_close(state, pools[1])


@pytest.mark.parametrize("kind", ["checkpoints_moved", "checkpoints_other_pool"])
def test_compile_in_place_prefill(kind: str) -> None:
    """Through ``chunk_``: the caller's pools and ``out`` are written, and a graph serves other rows and lengths."""
    arrays, given = prefill(kind)

    def step(x: dict[str, Any]) -> Any:
        return kdacore.chunk_kda(**x, **given)

    graph = compiled(step)
    written = "write_pool" if "write_pool" in arrays else "initial_state"
    for seed in (0, 1):
        (ours, _), (theirs, _) = prefill(kind, seed), prefill(kind, seed)
        before = ours[written].clone()
        with kdacore.record_selections() as ran:
            o, state = graph(ours)
        assert [s.backend for s in ran] == ["reference"]
        expected_o, expected_state = step(theirs)
        assert expected_state is theirs[written]
        for name in arrays:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, msg=name)
        torch.testing.assert_close(o, expected_o)
        torch.testing.assert_close(state, theirs[written])
        changed = (ours[written] != before).flatten(1).any(1)
        assert changed.any() and not changed.all()


def test_compile_a_padded_pack_with_gradients() -> None:
    """Offsets that end before the tokens do: an input of the graph, which serves any."""

    def total(cu: Any, x: dict[str, Any]) -> Any:
        return kdacore.chunk_kda(**x, cu_seqlens=cu)[0].square().sum()

    function = compiled(total)
    for end in (70, 41, 0):
        eager, graph = ({n: x.requires_grad_() for n, x in plain().items()} for _ in range(2))
        offsets = torch.tensor([0, end // 2, end])
        total(offsets, eager).backward()
        function(offsets, graph).backward()
        for name, x in graph.items():
            torch.testing.assert_close(x.grad, eager[name].grad, msg=name)
            assert not x.grad[:, end:].any()


def test_compile_gate_and_gdn() -> None:
    g = torch.randn(1, 6, 2, 4)
    torch.testing.assert_close(
        compiled(lambda g: kdacore.kda_gate(g, lower_bound=-5.0))(g), kdacore.kda_gate(g, lower_bound=-5.0)
    )
    x = plain()
    x["g"] = x["g"][..., 0].contiguous()
    function = compiled(lambda **x: kdacore.chunk_gated_delta_rule(**x)[0])
    torch.testing.assert_close(function(**x), kdacore.chunk_gated_delta_rule(**x)[0])


def test_a_contract_error_reaches_the_compiled_caller() -> None:
    arguments = plain()
    arguments["beta"] = arguments["beta"][:, :-1]
    with pytest.raises(Exception, match="argument 'beta'.*shape"):
        compiled(lambda **x: kdacore.chunk_kda(**x)[0])(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_stages_and_what_is_no_group_say_why_they_cannot_be_compiled(fullgraph: bool) -> None:
    def stage(g: Any) -> Any:
        return kdacore.stages.kda_chunk_gate(g)

    def cp(g: Any) -> Any:
        return kdacore.chunk_kda(g, g, g, -g.abs(), g[..., 0], cp=3)

    error = Exception if fullgraph else kdacore.ContractError  # where a graph may not break, Dynamo's own
    for function, message in (
        (stage, "kda_chunk_gate: argument 'g'.*stages are eager"),
        (cp, "chunk_kda: argument 'cp': got int; wanted a torch.distributed.ProcessGroup"),
    ):
        with pytest.raises(error, match=message):
            torch.compile(function, fullgraph=fullgraph, backend="aot_eager")(torch.ones(1, 4, 2, 8))


@pytest.mark.slow
def test_compiled_autograd_does_not_trace_through_the_backend() -> None:
    def step(arguments: dict[str, Any]) -> None:
        (
            loss(run(kdacore.chunk_kda, arguments)) + kdacore.kda_gate(arguments["g"], lower_bound=-5.0).sum()
        ).backward()

    eager, graph = call(shape=SERVED), call(shape=SERVED)
    step(eager)
    traced: list[Any] = []

    def look(program: Any, example: Any) -> Any:
        traced.append(program)
        return program

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=look)):
        step(graph)
    same_bits([x.grad for x in graph.values()], [x.grad for x in eager.values()])
    assert len(traced) < 10


NUMPY_NUMBER = np.float64(0.25)
NOT_FOR_A_GRAPH: dict[str, tuple[str, bool, Any]] = {
    "scale of NumPy's": ("scale", True, lambda: {"scale": NUMPY_NUMBER}),
    "scale made inside": ("scale", True, lambda: {"scale": 1 / np.sqrt(16)}),
    "bound made inside": ("lower_bound", True, lambda: {"lower_bound": np.float64(-5), "safe_gate": True}),
    "whole number of NumPy's": ("checkpoint_every", True, lambda: {"checkpoint_every": np.int64(64)}),
    "bool for a number": ("scale", False, lambda: {"scale": True}),
    "text for a number": ("scale", False, lambda: {"scale": "a"}),
    "number for a flag": ("output_final_state", False, lambda: {"output_final_state": 1}),
    "offsets in a list": (
        "cu_seqlens_cpu",
        False,
        lambda: {"cu_seqlens": torch.tensor([0, 20]), "cu_seqlens_cpu": [0, 20]},
    ),
    "state of NumPy's": ("initial_state", False, lambda: {"initial_state": np.zeros((1, 2, 16, 16), "f4")}),
    "number for a backend": ("backend", False, lambda: {"backend": 3}),
}
"""The argument, whether an eager call takes it, and the call's keywords."""


KINDS_OF_IT = (
    "scale of NumPy's",
    "bool for a number",
    "number for a flag",
    "offsets in a list",
    "state of NumPy's",
)


@pytest.mark.first_cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in KINDS_OF_IT else [pytest.mark.exhaustive]) for n in NOT_FOR_A_GRAPH],
)
def test_what_no_graph_can_hold_is_named_and_called_eagerly(name: str) -> None:
    argument, served, more = NOT_FOR_A_GRAPH[name]
    arguments = plain(SERVED)

    def step(**x: Any) -> Any:
        return kdacore.chunk_kda(**x, **more())

    with pytest.raises(Exception, match=f"chunk_kda: argument '{argument}': got"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(**arguments)
    function = torch.compile(step, backend="aot_eager")
    if served:
        same_bits(function(**arguments), step(**arguments))
        return
    with pytest.raises(kdacore.ContractError) as caught:
        function(**arguments)
    assert caught.value.argument == argument


class Subclass(torch.Tensor):
    """Runs through the operators, eagerly."""


def test_calls_of_tensor_subclasses_are_checked_like_others() -> None:
    arguments = plain(SERVED)
    wrapped = {n: x.as_subclass(Subclass) for n, x in arguments.items()}
    found = kdacore.chunk_kda(**wrapped, scale=np.float32(0.25), checkpoint_every=np.int64(64))  # type: ignore[arg-type]
    wanted = kdacore.chunk_kda(**arguments, scale=0.25, checkpoint_every=64)
    same_bits([None if x is None else x.as_subclass(torch.Tensor) for x in found], wanted)
    bad = {"output_final_state": 1, "scale": "a", "cp": 1, "k": arguments["k"].numpy(), "v": None}
    for name, value in bad.items():
        with pytest.raises(kdacore.ContractError) as caught:
            kdacore.chunk_kda(**{**wrapped, name: value})
        assert caught.value.argument == name


def test_a_graph_run_under_another_preference_says_so() -> None:
    arguments = plain()
    function = compiled(lambda **x: kdacore.chunk_kda(**x)[0])
    function(**arguments)
    with kdacore.use_backend("reference"), pytest.raises(kdacore.UnsupportedError, match="compile it inside"):
        function(**arguments)


def test_the_preference_at_tracing_is_part_of_the_graph() -> None:
    arguments = plain()
    function = compiled(lambda **x: kdacore.chunk_kda(**x)[0])
    with kdacore.use_backend("reference"), kdacore.record_selections() as ran:
        function(**arguments)
    assert ran[0].why == "preferred by use_backend"


@pytest.mark.slow
def test_fake_tensors_and_export(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            return kdacore.chunk_kda(q, k, v, g, beta, output_final_state=True)

    arguments = plain()
    program = torch.export.export(Layer(), tuple(arguments[n] for n in ("q", "k", "v", "g", "beta")))
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert any("kdacore.chunk" in t for t in targets)
    o, _state = program.module()(*(arguments[n] for n in ("q", "k", "v", "g", "beta")))
    torch.testing.assert_close(o, kdacore.chunk_kda(**arguments)[0])

    torch.export.save(program, tmp_path / "layer.pt2")
    code = """
import sys
import kdacore.dispatch.torch_operators
import torch
print(*[n.target for n in torch.export.load(sys.argv[1]).graph.nodes if n.op == "call_function"])
"""
    load = [sys.executable, "-c", code, str(tmp_path / "layer.pt2")]
    loaded = subprocess.run(load, capture_output=True, text=True)
    assert loaded.stdout.startswith("kdacore.chunk"), loaded.stderr


@pytest.mark.slow
def test_compiling_may_be_the_first_thing_a_process_does() -> None:
    code = """
import torch, kdacore
x = [torch.randn(1, 6, 2, 8) for _ in range(4)]
f = torch.compile(lambda *x: kdacore.chunk_kda(*x)[0], fullgraph=True, backend="aot_eager")
print(f(*x[:3], -x[3].abs(), torch.rand(1, 6, 2)).shape)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "torch.Size([1, 6, 2, 8])", run.stderr


INDUCTOR = """
import torch, kdacore
torch.manual_seed(0)
q, k, v, g = (torch.randn(2, 20, n, d) for n, d in ((1, 8), (1, 8), (2, 4), (2, 8)))
x = q, k, v, -g.abs(), torch.rand(2, 20, 2)
for op in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
    def state(*x):
        return op(*x, output_final_state=True, state_v_first=True)[1] * 2
    assert torch.allclose(torch.compile(state, fullgraph=True)(*x), state(*x), atol=1e-5)
    s = torch.randn(2, 2, 4, 8, requires_grad=True)
    def loss(s, *x):
        return op(*x, initial_state=s * 1.5, state_v_first=True)[0].square().sum()
    want = torch.autograd.grad(loss(s, *x), s)[0]
    assert torch.allclose(torch.autograd.grad(torch.compile(loss, fullgraph=True)(s, *x), s)[0], want, atol=1e-4)
"""


@pytest.mark.exhaustive
def test_states_v_first_through_inductor() -> None:
    """It reads results with the strides that were promised to it, which backends that only trace do not."""
    done = subprocess.run([sys.executable, "-c", INDUCTOR], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_offsets_on_the_host_as_numpy(fullgraph: bool) -> None:
    x = [torch.randn(1, 20, 1, 8, requires_grad=True) for _ in range(3)]
    x += [-torch.rand(1, 20, 1, 8), torch.rand(1, 20, 1)]
    offsets = torch.tensor([0, 7, 20])

    def step(host: Any, *x: Any) -> Any:
        return kdacore.chunk_kda(*x, cu_seqlens=offsets, cu_seqlens_cpu=host)[0]

    compiled = torch.compile(step, fullgraph=fullgraph, backend="aot_eager")
    host = offsets.numpy()
    assert torch.allclose(compiled(host, *x), step(host, *x), atol=1e-5)
