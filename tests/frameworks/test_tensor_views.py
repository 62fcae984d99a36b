"""Torch tensors whose values are not in their memory, and tensors that torch refuses to write or to save: served as
what they stand for, or refused by the argument's name with nothing written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import kdacore
from kdacore import config
from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.values import Shape
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES, OPS
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl

NAME = "reads-memory"
PACK = Shape(B=1, T=20, H=1, HV=2, K=16, V=16, lengths=(16, 4))
ROWS = Shape(B=2, T=2, H=1, HV=2, K=16, V=16)
CALLS = {
    "chunk_kda": CallDescription(
        op="chunk_kda",
        kind="torch",
        shape=PACK,
        host_offsets=True,
        pool="checkpoints_other_pool",
        out=True,
        options=options(use_gate_in_kernel=True, inplace_state=True),
    ),
    "chunk_gated_delta_rule": CallDescription(
        op="chunk_gated_delta_rule",
        kind="torch",
        shape=ROWS,
        pool="fresh",
        out=True,
        options=options(inplace_state=True),
    ),
    "fused_recurrent_kda": CallDescription(
        op="fused_recurrent_kda",
        kind="torch",
        shape=ROWS,
        pool="candidates_other_pool",
        out=True,
        options=options(use_gate_in_kernel=True, lower_bound=-5.0, inplace_state=True),
    ),
    "fused_recurrent_gated_delta_rule": CallDescription(
        op="fused_recurrent_gated_delta_rule", kind="torch", shape=ROWS, initial_state=True, pool="inplace_whole",
        options=options(inplace_state=True),
    ),
    "fused_decode_kda": CallDescription(
        op="fused_decode_kda", kind="torch", shape=Shape(B=3, T=4, HV=2), pool="records", conv_windows=True, out=True,
        norm="heads", z=True, conv_bias=True, options=options(use_gate_in_kernel=True, inplace_state=True),
    ),
    "fused_decode_gated_delta_rule": CallDescription(
        op="fused_decode_gated_delta_rule", kind="torch", shape=Shape(B=3, T=4, HV=2), pool="candidates_other_pool",
        norm="vector", options=options(inplace_state=True),
    ),
    "commit_records": CallDescription(op="commit_records", kind="torch", shape=ROWS),
    "kda_gate": CallDescription(op="kda_gate", kind="torch", shape=ROWS),
    "kda_chunk_gate": CallDescription(op="kda_chunk_gate", kind="torch", shape=PACK),
    "kda_chunk_intra": CallDescription(op="kda_chunk_intra", kind="torch", shape=PACK),
    "kda_recompute_w_u": CallDescription(op="kda_recompute_w_u", kind="torch", shape=PACK),
    "delta_rule_chunk_state": CallDescription(
        op="delta_rule_chunk_state", kind="torch", shape=PACK, initial_state=True
    ),
    "kda_chunk_output": CallDescription(op="kda_chunk_output", kind="torch", shape=PACK),
}  # fmt: skip


def _in_memory(x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or (not x.is_neg() and bool(x.data_ptr() or not x.numel()))


class ReadsMemory:
    """The reference, and nothing else than tensors whose memory can be read."""

    def __init__(self) -> None:
        self.calls = 0

    def _reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(request: Any, *given: Any) -> Any:
            self.calls += 1
            flat = [x for part in given for x in (part if isinstance(part, tuple) else (part,))]
            assert all(_in_memory(x) for x in flat)
            return function(request, *given)

        return run

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        ops = {}
        for name, op in REGISTRY.get("reference").backend.ops.items():
            backward = None if op.backward is None else self._reading(op.backward)
            ops[name] = OpImpl(
                self._reading(op.forward), backward, serves=FEATURES, verified_archs=frozenset({"*"})
            )
        return [Backend(name=NAME, version="0", kinds=("torch",), ops=ops, auto_kinds=())]


@pytest.fixture(autouse=True)
def reads_memory() -> Iterator[ReadsMemory]:
    made = ReadsMemory()
    REGISTRY.register(made, NAME)
    yield made
    REGISTRY.unregister(NAME)


def _negated(x: torch.Tensor) -> torch.Tensor:
    """The same values, as a view of the negated ones."""
    found: torch.Tensor = torch._neg_view(-x)
    assert found.is_neg() and _same([found.resolve_neg()], [x])
    return found


def _of_complex(x: torch.Tensor) -> torch.Tensor:
    """The same values, as users meet them."""
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg() and _same([found.resolve_neg()], [x])
    return found


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(tuple(x.shape), dtype=x.dtype)


def _tensors(results: Any) -> list[torch.Tensor]:
    whole = results if isinstance(results, tuple) else (results,)
    return [x for x in whole if isinstance(x, torch.Tensor)]


def _run(op: str, arrays: dict[str, Any], backend: str = NAME) -> list[torch.Tensor]:
    """The results, and what the call wrote."""
    written = [arrays[n] for n in ("out", "initial_state", "write_pool") if n in arrays]
    given = OPS[op].keywords(arrays)
    results = public_function(op)(**given, **dict(CALLS[op].options), backend=backend)
    return [*_tensors(results), *written]


def _copied(arrays: dict[str, Any]) -> dict[str, Any]:
    return {n: x.clone() for n, x in arrays.items()}


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, wanted, strict=True)
    )


def _written(op: str) -> tuple[str, ...]:
    opdef, arrays = OPS[op], make_arrays(CALLS[op])
    given = {**dict.fromkeys(opdef.options), **dict(CALLS[op].options)}
    return opdef.written([arrays.get(n) for n in opdef.arrays], [given[n] for n in opdef.options])


def _refused(op: str, name: str, arrays: dict[str, Any], call: Callable[[], Any]) -> str:
    """Raised as a ContractError naming the argument, or one of them, with every array as it was."""
    with torch.inference_mode():
        before = {n: x.resolve_neg().clone() for n, x in arrays.items() if type(x) in (torch.Tensor,)}
    with pytest.raises(kdacore.ContractError) as caught:
        call()
    assert caught.value.argument in name.split()
    with torch.inference_mode():
        assert all(_same([arrays[n].resolve_neg()], [x]) for n, x in before.items())
    return caught.value.got


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lazy", [_negated, _of_complex])
def test_lazily_negated_arguments(op: str, lazy: Any, reads_memory: ReadsMemory) -> None:
    arrays = make_arrays(CALLS[op])
    wanted = _run(op, _copied(arrays))
    for _ in range(3):  # there are calls that are recognised from here on
        _run(op, _copied(arrays))
    for name, x in arrays.items():
        if x.dtype is torch.bool or (lazy is _of_complex and not x.is_floating_point()):
            continue
        for _ in range(2):
            given = _copied(arrays)
            given[name] = lazy(given[name])
            calls = reads_memory.calls
            if name in _written(op):
                assert "negated" in _refused(op, name, given, lambda g=given: _run(op, g))  # type: ignore[misc]
                assert reads_memory.calls == calls
            else:
                assert _same(_run(op, given), wanted)
                assert reads_memory.calls == calls + 1
    assert _same(_run(op, _copied(arrays)), wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_the_modes_of_torch_change_nothing(mode: Any) -> None:
    arrays = make_arrays(CALLS["fused_recurrent_kda"])
    wanted = _run("fused_recurrent_kda", _copied(arrays))
    with mode():
        for _ in range(4):
            given = _copied(arrays)
            given["v"], given["q"] = _negated(given["v"]), _of_complex(given["q"])
            assert _same(_run("fused_recurrent_kda", given), wanted)
            assert _same(_run("fused_recurrent_kda", _copied(arrays)), wanted)


def test_other_views_of_complex_numbers() -> None:
    arrays = make_arrays(CALLS["kda_gate"])
    wanted = _run("kda_gate", arrays)
    g = arrays["g"]
    for same in (
        torch.complex(g, g).conj().real,
        torch.complex(g, -g).conj().conj().real,
        torch.complex(-g, -g).conj().imag.detach(),
        torch.view_as_real(torch.complex(g, g).conj().resolve_conj())[..., 0],
        torch.complex(g, -g).conj().imag.expand(g.shape)[:],
    ):
        assert _same(_run("kda_gate", {**arrays, "g": same}), wanted)
    with pytest.raises(kdacore.ContractError, match="'g'.*complex64"):
        _run("kda_gate", {**arrays, "g": torch.complex(g, g).conj()})


@pytest.mark.parametrize("op", OPS)
def test_zeros_without_memory(op: str) -> None:
    arrays = make_arrays(CALLS[op])
    for name, x in arrays.items():
        if not x.is_floating_point():
            continue
        given = {**_copied(arrays), name: _zeros(x)}
        if name in _written(op):
            _refused(op, name, {n: y for n, y in given.items() if n != name}, lambda g=given: _run(op, g))  # type: ignore[misc]
        else:
            assert _same(_run(op, given), _run(op, {**_copied(arrays), name: torch.zeros_like(x)}))


@pytest.mark.parametrize("op", OPS)
def test_tensors_whose_storage_has_been_freed(op: str, reads_memory: ReadsMemory) -> None:
    """torch reads such a tensor with an error that names nothing, and writes it with a crash."""
    arrays = make_arrays(CALLS[op])
    for name in arrays:
        for offset in (0, 1):
            given = _copied(arrays)
            whole = torch.stack([given[name], given[name]])
            given[name] = whole[offset]
            whole.untyped_storage().resize_(0)
            others = {n: x for n, x in given.items() if n != name}
            assert "freed" in _refused(op, name, others, lambda g=given: _run(op, g))  # type: ignore[misc]
    assert not reads_memory.calls


# --- gradients ------------------------------------------------------------------------------------------------------


def _train(
    op: str, view: Callable[[Any], Any], after: Callable[[Any], Any], backend: str
) -> list[torch.Tensor]:
    """Gradients of all float arguments, each of which goes through ``view``, and the results through ``after``."""
    call = CallDescription(
        op=op, kind="torch", shape=ROWS, initial_state=op != "kda_gate", options=options() if op == "kda_gate"
        else options(use_gate_in_kernel=True, output_final_state=True),
    )  # fmt: skip
    leaves = {n: x.requires_grad_() for n, x in make_arrays(call).items()}
    found: list[torch.Tensor] = []
    for _ in range(3):
        for x in leaves.values():
            x.grad = None
        results = public_function(op)(
            **{n: view(x) for n, x in leaves.items()}, **dict(call.options), backend=backend
        )
        sum(after(r).square().sum() for r in _tensors(results)).backward()  # type: ignore[attr-defined]
        found = [x.grad for x in leaves.values()]
    return found


def _pass_through(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@pytest.mark.parametrize("backend", [NAME, "reference"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_gated_delta_rule", "kda_gate"])
def test_gradients_of_lazy_views_and_lazy_gradients(op: str, backend: str) -> None:
    wanted = _train(op, lambda x: x, lambda o: o, backend)
    assert _same(_train(op, _pass_through, lambda o: o, backend), wanted)
    assert _same(_train(op, lambda x: x, _pass_through, backend), wanted)
    assert _same(_train(op, _pass_through, _pass_through, backend), wanted)


def test_gradients_given_as_lazy_views() -> None:
    leaves = {
        n: x.requires_grad_() for n, x in make_arrays(CallDescription(kind="torch", shape=ROWS)).items()
    }
    o = kdacore.chunk_kda(**leaves, backend=NAME)[0]
    do = torch.randn(o.shape)
    wanted = torch.autograd.grad(o, list(leaves.values()), do, retain_graph=True)
    for given in (_negated(do), _of_complex(do)):
        assert _same(
            list(torch.autograd.grad(o, list(leaves.values()), given, retain_graph=True)), list(wanted)
        )
    zeros = torch.autograd.grad(o, list(leaves.values()), _zeros(do), retain_graph=True)
    assert not any(x.any() for x in zeros)


def test_saved_tensors_that_a_hook_returns_as_lazy_views() -> None:
    def gradient(unpack: Callable[[Any], Any]) -> torch.Tensor:
        leaves = {
            n: x.requires_grad_() for n, x in make_arrays(CallDescription(kind="torch", shape=ROWS)).items()
        }
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            kdacore.chunk_kda(**leaves, backend=NAME)[0].sum().backward()
        return leaves["k"].grad  # type: ignore[return-value]

    assert torch.equal(gradient(lambda x: x), gradient(lambda x: _negated(x.detach())))


# --- tensors made in inference mode ---------------------------------------------------------------------------------


def _made_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("mode", [torch.no_grad, contextlib.nullcontext])
@pytest.mark.parametrize("op", [op for op in OPS if _written(op)])
def test_what_torch_would_refuse_to_write(op: str, mode: Any) -> None:
    arrays = make_arrays(CALLS[op])
    with mode():
        for name in _written(op):
            for _ in range(3):
                given = {**_copied(arrays), name: _made_in_inference_mode(arrays[name])}
                assert "inference" in _refused(op, name, given, lambda g=given: _run(op, g))  # type: ignore[misc]
                _run(op, _copied(arrays))


@pytest.mark.parametrize("op", OPS)
def test_plain_calls_with_tensors_made_in_inference_mode(op: str) -> None:
    arrays = make_arrays(CALLS[op])
    wanted = _run(op, _copied(arrays))
    with torch.inference_mode():
        for _ in range(3):  # pools of both sorts may be written there
            assert _same(_run(op, {n: _made_in_inference_mode(x) for n, x in arrays.items()}), wanted)
    with torch.inference_mode():
        outside = {n: _made_in_inference_mode(x) for n, x in arrays.items() if n not in _written(op)}
    for _ in range(3):
        assert _same(_run(op, {**_copied(arrays), **outside}), wanted)


@pytest.mark.parametrize("op", ["fused_recurrent_kda", "chunk_gated_delta_rule"])
def test_calls_recognised_inside_are_not_outside(op: str) -> None:
    """To torch's own check a plain tensor inside looks as one made in inference mode does outside."""
    arrays = make_arrays(CALLS[op])
    plain = [_copied(arrays) for _ in range(4)]
    with torch.inference_mode():
        for given in plain:
            _run(op, given)
    given = {n: _made_in_inference_mode(x) for n, x in arrays.items()}
    _refused(op, " ".join(_written(op)), given, lambda: _run(op, given))
    given = {n: _made_in_inference_mode(x) if n in _written(op) else x for n, x in arrays.items()}
    _refused(op, " ".join(_written(op)), given, lambda: _run(op, given))


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", "kda_gate"])
def test_what_torch_would_refuse_to_save(op: str, reads_memory: ReadsMemory) -> None:
    opts = () if op == "kda_gate" else options(use_gate_in_kernel=True)
    shape = ROWS if op == "kda_gate" else PACK
    call = CallDescription(op=op, kind="torch", shape=shape, initial_state=op != "kda_gate", options=opts)
    arrays = make_arrays(call)
    learned = "g"
    function = public_function(op)

    def train(given: dict[str, Any]) -> None:
        function(**{**given, learned: given[learned].requires_grad_()}, **dict(opts), backend=NAME)

    for _ in range(3):
        train(_copied(arrays))
    for name in arrays:
        if name == learned:
            continue
        given = {**_copied(arrays), name: _made_in_inference_mode(arrays[name])}
        calls = reads_memory.calls
        for _ in range(2):
            assert "inference" in _refused(op, name, given, lambda g=given: train(g))  # type: ignore[misc]
        assert reads_memory.calls == calls
        with torch.no_grad():
            function(**given, **dict(opts), backend=NAME)


def _compiled(op: str, backend: str) -> Callable[[dict[str, Any]], Any]:
    """A graph of a call. ``aot_eager`` hands operators copies of what they write and writes those back; ``eager`` does
    not, and ``inductor`` does where something else reads the array later."""
    torch.compiler.reset()
    function, given = public_function(op), {**dict(CALLS[op].options), "backend": NAME}
    return torch.compile(lambda arrays: function(**arrays, **given), fullgraph=True, backend=backend)


OF_GRAPHS = [("chunk_kda", "aot_eager"), ("fused_recurrent_kda", "aot_eager"), ("chunk_kda", "eager")]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("op", "backend"), OF_GRAPHS)
def test_what_torch_would_refuse_to_write_for_a_graph(
    op: str, backend: str, reads_memory: ReadsMemory
) -> None:
    """Before the operator runs, whether a graph is there or is made, with the grad mode on and off."""
    arrays = make_arrays(CALLS[op])
    for seen in (False, True):
        graph = _compiled(op, backend)
        if seen:
            graph(_copied(arrays))
        for mode in (torch.no_grad, contextlib.nullcontext):
            for name in _written(op):
                given = {**_copied(arrays), name: _made_in_inference_mode(arrays[name])}
                calls = reads_memory.calls
                with mode():
                    assert "inference" in _refused(op, name, given, partial(graph, given))
                assert reads_memory.calls == calls


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("op", "backend"), OF_GRAPHS)
def test_graphs_with_tensors_made_in_inference_mode(op: str, backend: str) -> None:
    """Inside of it they may be written; outside, the same graph is refused them."""
    arrays = make_arrays(CALLS[op])
    wanted = _run(op, _copied(arrays))
    graph = _compiled(op, backend)
    for mode in (torch.inference_mode, torch.no_grad):
        outside = set() if mode is torch.inference_mode else {"initial_state", "write_pool", "out"}
        for made in (set(), set(arrays) - outside):
            given = _copied(arrays)
            given |= {n: _made_in_inference_mode(arrays[n]) for n in arrays if n in made}
            with mode():
                written = [given[n] for n in ("out", "initial_state", "write_pool") if n in given]
                assert _same([*_tensors(graph(given)), *written], wanted)
    given = {n: _made_in_inference_mode(x) if n in _written(op) else x for n, x in arrays.items()}
    with torch.no_grad():
        _refused(op, " ".join(_written(op)), given, partial(graph, given))


def test_a_pool_that_is_only_read_and_written_back_by_the_graph() -> None:
    """The operator says that it may write ``initial_state`` even if it writes ``write_pool``: ``aot_eager`` would write
    back what has not changed, which torch refuses; where nothing is copied the call is served."""
    op = "fused_recurrent_kda"
    arrays = make_arrays(CALLS[op])
    assert "initial_state" not in _written(op) and "write_pool" in _written(op)
    wanted = _run(op, _copied(arrays))
    for backend in ("eager", "aot_eager"):
        given = {**_copied(arrays), "initial_state": _made_in_inference_mode(arrays["initial_state"])}
        graph = _compiled(op, backend)
        if backend == "eager":
            written = [given[n] for n in ("out", "initial_state", "write_pool")]
            assert _same([*_tensors(graph(given)), *written], wanted)
        else:
            _refused(op, "initial_state", given, partial(graph, given))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_graph_of_inductor_writes_the_pool_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's second look at the pool makes no copy of it necessary, in a graph of two steps and of a view."""
    from kdacore.dispatch import torch_operators

    seen: list[int] = []

    def forward(plan: Any, inputs: Any) -> Any:
        seen.append(inputs.initial_state.data_ptr())
        return run(plan, inputs)

    run = torch_operators._forward
    monkeypatch.setattr(torch_operators, "_forward", forward)
    made = make_arrays(CallDescription(op="fused_recurrent_kda", kind="torch", shape=ROWS))
    rows = torch.tensor([1, 3])

    def steps(layers: torch.Tensor, rows: torch.Tensor, x: dict[str, Any]) -> Any:
        found = [
            kdacore.fused_recurrent_kda(
                **x, initial_state=layers[1], state_indices=at, inplace_state=True, backend=NAME
            )
            for at in (rows, rows + 1)
        ]
        return [o for o, _ in found]

    torch.compiler.reset()
    graph = torch.compile(steps, fullgraph=True)
    layers = torch.zeros(2, 6, 2, 16, 16)
    graph(layers, rows, made)
    assert seen == [layers[1].data_ptr()] * 2 and layers[1].any() and not layers[0].any()


@pytest.mark.parametrize(
    ("op", "name"), [("chunk_kda", "v"), ("fused_recurrent_kda", "initial_state"), ("kda_gate", "A_log")]
)
def test_what_torch_would_refuse_to_save_for_a_graph(op: str, name: str, reads_memory: ReadsMemory) -> None:
    call = CallDescription(op=op, kind="torch", shape=ROWS, initial_state=op != "kda_gate", A_log=True)
    arrays, function = make_arrays(call), public_function(op)
    torch.compiler.reset()
    graph = torch.compile(lambda given: function(**given, backend=NAME), fullgraph=True, backend="aot_eager")
    given = {**_copied(arrays), name: _made_in_inference_mode(arrays[name])}
    given["g"].requires_grad_()
    assert "inference" in _refused(op, name, given, partial(graph, given))
    assert not reads_memory.calls
    with torch.no_grad():
        graph(given)
    assert reads_memory.calls == 1


# --- subclasses, transforms, meshes ---------------------------------------------------------------------------------


class Functions(torch.Tensor):
    """Has memory of its own; torch's functions return its class."""


class Learned(torch.nn.Parameter):
    """A subclass of parameters."""


class Refuses(torch.Tensor):
    """Serves no operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class RefusesFunctions(torch.Tensor):
    """Serves no function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def _two(x: torch.Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x.clone())


WHOLE = make_arrays(CallDescription(op="fused_recurrent_kda", kind="torch", shape=ROWS, initial_state=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.as_subclass(Functions),
        lambda x: Learned(x, requires_grad=False),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: torch.nn.Buffer(x),
        _two,
    ],
    ids=["functions", "parameters", "parameter", "buffer", "wrapper"],
)
def test_subclasses_that_are_served(make: Any) -> None:
    wanted = kdacore.fused_recurrent_kda(**WHOLE, backend=NAME)[0]
    for name, x in WHOLE.items():
        for _ in range(2):
            o = kdacore.fused_recurrent_kda(**{**WHOLE, name: make(x)}, backend=NAME)[0]
            same = o.a if hasattr(o, "a") else torch.Tensor(o)
            assert torch.equal(same, wanted)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize(
    "make", [lambda x: x.as_subclass(Functions), lambda x: Learned(x, requires_grad=False)]
)
def test_subclasses_are_checked_as_plain_tensors(op: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values are there: offsets are compared, and ``KDACORE_VALIDATE=values`` finds what it does elsewhere."""
    arrays = make_arrays(CallDescription(op=op, kind="torch", shape=PACK))
    function = public_function(op)
    other = arrays["cu_seqlens"].clone()
    other[1] += 1
    for name in ("q", "beta", "cu_seqlens"):
        given = {**arrays, name: make(arrays[name]), "cu_seqlens_cpu": other}
        _refused(op, "cu_seqlens_cpu", given, lambda g=given: function(**g))  # type: ignore[misc]
    monkeypatch.setenv("KDACORE_VALIDATE", "values")
    config.refresh()
    REGISTRY.register(ReadsMemory(), NAME)  # which the refresh took out
    wrong = arrays["v"].clone()
    wrong[0, 3] = float("nan")
    given = {**arrays, "v": make(wrong)}
    _refused(op, "v", given, lambda: function(**given))


def _masked(x: torch.Tensor) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(x, torch.ones_like(x, dtype=torch.bool))


def _functional(x: torch.Tensor) -> Any:
    return torch._to_functional_tensor(x)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda x: torch.Tensor._make_subclass(Refuses, x), "Refuses"),
        (lambda x: x.as_subclass(RefusesFunctions), "RefusesFunctions"),
        (_masked, "MaskedTensor"),
        (_functional, "functional"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.to_mkldnn(), "mkldnn"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "qint8"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "nested"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged), "nested"),
        (lambda x: torch.nn.parameter.UninitializedParameter(), "Uninitialized"),
    ],
    ids=[
        "dispatch",
        "functions",
        "masked",
        "functional",
        "sparse",
        "mkldnn",
        "quantized",
        "nested",
        "jagged",
        "lazy",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_refused(make: Any, said: str) -> None:
    for name in ("q", "v", "beta", "initial_state"):
        for _ in range(2):
            with pytest.raises(kdacore.ContractError) as caught:
                kdacore.fused_recurrent_kda(**{**WHOLE, name: make(WHOLE[name])}, backend=NAME)
            assert caught.value.argument == name
            assert said in caught.value.got
        if said in ("MaskedTensor", "nested", "sparse", "mkldnn", "qint8", "Uninitialized"):
            with pytest.raises(kdacore.ContractError, match=f"'{name}'.*{said}"):
                kdacore.explain("fused_recurrent_kda", **{**WHOLE, name: make(WHOLE[name])})


def test_tensors_left_over_from_transforms() -> None:
    wanted = kdacore.fused_recurrent_kda(**WHOLE, backend=NAME)[0]
    left: list[Any] = []
    torch.func.grad(lambda v: (left.append(v), v.sum())[1])(WHOLE["v"])
    for _ in range(3):
        assert torch.equal(kdacore.fused_recurrent_kda(**{**WHOLE, "v": left[0]}, backend=NAME)[0], wanted)
    torch.vmap(lambda v: (left.append(v), v.sum())[1])(WHOLE["v"][None])
    torch.func.functionalize(lambda v: (left.append(v), v.sum())[1])(WHOLE["v"])
    for x in left[1:]:
        with pytest.raises((kdacore.UnsupportedError, kdacore.ContractError)):
            kdacore.fused_recurrent_kda(**{**WHOLE, "v": x}, backend=NAME)


# --- the Triton backend, and compiled graphs ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_triton_reads_values() -> None:
    if torch.cuda.is_available():
        pytest.skip("for the interpreter, which runs where there is no GPU")
    wanted = kdacore.fused_recurrent_kda(**WHOLE, backend="triton")[0]
    for name, x in WHOLE.items():
        for _ in range(3):
            o = kdacore.fused_recurrent_kda(**{**WHOLE, name: _negated(x)}, backend="triton")[0]
            assert torch.equal(o, wanted)
    pool = _negated(WHOLE["initial_state"])
    with pytest.raises(kdacore.ContractError, match="'initial_state'.*negated"):
        kdacore.fused_recurrent_kda(**{**WHOLE, "initial_state": pool}, inplace_state=True, backend="triton")


@pytest.mark.slow
def test_compiled_graphs_read_values() -> None:
    arrays = make_arrays(CallDescription(kind="torch", shape=ROWS))
    wanted = kdacore.chunk_kda(**arrays, backend=NAME)[0]
    compiled = torch.compile(lambda **given: kdacore.chunk_kda(**given, backend=NAME)[0], backend="aot_eager")
    for lazy in (_negated, _of_complex):
        assert torch.equal(compiled(**{n: lazy(x) for n, x in arrays.items()}), wanted)
