"""What a backend returns is held to the request, the first time a call of a shape runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl

Change = Callable[[Any], Any]


@pytest.fixture
def changed() -> Iterator[Callable[..., None]]:
    """Registers the backend ``changed``: the reference with its results changed by a function."""

    def register(change: Change, grads: Change = lambda x: x) -> None:
        reference = REGISTRY.get("reference").backend.ops

        def wrapped(op: str) -> OpImpl:
            own = reference[op]
            backward = own.backward
            return OpImpl(
                forward=lambda request, inputs: change(own.forward(request, inputs)),
                backward=None if backward is None else lambda *a: grads(backward(*a)),
                serves=FEATURES,
                verified_archs=frozenset({"*"}),
            )

        ops = {op: wrapped(op) for op in reference}

        class Plugin:
            @hookimpl
            def kdacore_backends(self) -> list[Backend]:
                return [Backend("changed", "1", ("numpy", "torch"), ops, auto_kinds=())]

        REGISTRY.register(Plugin(), "changed")

    yield register
    REGISTRY.unregister("changed")


def call(**options: Any) -> Any:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 2, 16), dtype=np.float32) for _ in range(3))
    g, beta = -rng.random((2, 9, 2, 16), dtype=np.float32), rng.random((2, 9, 2), dtype=np.float32)
    return kdacore.chunk_kda(q, k, v, g, beta, backend="changed", **options)


def dropped(name: str) -> Change:
    return lambda out: out._replace(**{name: None})


WRONG: list[tuple[Change, dict[str, Any], str]] = [
    (dropped("o"), {}, "o: the call asks for it, and it is None"),
    (dropped("final_state"), {"output_final_state": True}, "final_state: the call asks for it"),
    (dropped("checkpoints"), {"checkpoint_every": 64}, "checkpoints: the call asks for it"),
    (lambda out: out._replace(final_state=out.o), {}, "final_state: returned, but the call did not ask"),
    (lambda out: out._replace(checkpoints=out.o), {}, "checkpoints: returned, but the call did not ask"),
    (lambda out: out._replace(o=out.o[:, :-1]), {}, "o: got shape [2, 8, 2, 16]; wanted [2, 9, 2, 16]"),
    (lambda out: out._replace(o=out.o.astype("float64")), {}, "o: got dtype float64; wanted float32"),
    (lambda out: out._replace(o=out.o.tolist()), {}, "o: got builtins.list; wanted a numpy array"),
    (
        lambda out: out._replace(final_state=out.final_state[:1]),
        {"output_final_state": True},
        "final_state: got shape [1, 2, 16, 16]; wanted [2, 2, 16, 16]",
    ),
    (lambda out: tuple(out), {}, "forward of chunk_kda returned tuple; wanted kdacore.types.Outputs"),
]


@pytest.mark.parametrize(("change", "options", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_result_names_the_backend_and_the_result(
    changed: Callable[..., None], change: Change, options: dict[str, Any], said: str
) -> None:
    changed(change)
    with pytest.raises(kdacore.PluginError) as caught:
        call(**options)
    assert "backend 'changed'" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"output_final_state": True}, {"checkpoint_every": 64}])
def test_the_number_of_results_follows_the_request(
    changed: Callable[..., None], options: dict[str, Any]
) -> None:
    changed(lambda out: out)
    results = call(**options)
    assert len(results) == (3 if "checkpoint_every" in options else 2)
    assert (results[1] is not None) == options.get("output_final_state", False)


def test_a_gate_of_the_wrong_dtype(changed: Callable[..., None]) -> None:
    changed(lambda decay: decay.astype("float16"))
    with pytest.raises(kdacore.PluginError, match="'changed'.*log decay: got dtype float16; wanted float32"):
        kdacore.kda_gate(np.zeros((1, 3, 2, 16), np.float32), lower_bound=-5.0, backend="changed")


@pytest.mark.parametrize(
    ("grads", "said"),
    [
        (lambda g: g._replace(k=None), "gradient of k: the call asks for it, and it is None"),
        (lambda g: g._replace(g=g.g.double()), "gradient of g: got dtype float64; wanted float32"),
        (lambda g: g._replace(beta=g.beta[..., None]), "gradient of beta: got shape [2, 9, 2, 1]"),
        (lambda g: g._replace(A_log=g.beta), "gradient of A_log: returned, but"),
        (lambda g: tuple(g), "backward of chunk_kda returned tuple; wanted kdacore.types.InputGrads"),
    ],
)
def test_a_wrong_gradient(changed: Callable[..., None], grads: Change, said: str) -> None:
    import torch

    changed(lambda out: out, grads)
    x = [torch.rand(2, 9, 2, 16, requires_grad=True) for _ in range(3)]
    g, beta = -torch.rand(2, 9, 2, 16), torch.rand(2, 9, 2)
    o, _ = kdacore.chunk_kda(*x, g, beta, backend="changed")
    with pytest.raises(kdacore.PluginError) as caught:
        o.sum().backward()
    assert "backend 'changed'" in str(caught.value) and said in str(caught.value)


def test_a_result_on_another_device(changed: Callable[..., None]) -> None:
    import torch

    changed(lambda out: out._replace(o=out.o.to("meta")))
    q, k, v = (torch.rand(1, 9, 2, 16) for _ in range(3))
    with pytest.raises(kdacore.PluginError, match="o: got an array on meta:0; wanted one on cpu"):
        kdacore.chunk_kda(q, k, v, -torch.rand(1, 9, 2, 16), torch.rand(1, 9, 2), backend="changed")


def test_results_of_every_op_of_ours_pass(changed: Callable[..., None]) -> None:
    changed(lambda out: out)
    gc = kdacore.stages.kda_chunk_gate(-np.ones((1, 70, 2, 16), np.float32), backend="changed")
    assert gc.shape == (1, 70, 2, 16)
