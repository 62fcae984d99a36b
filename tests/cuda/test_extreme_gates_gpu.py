"""Gates at the ends of float32 on a GPU: its exponentials, minima of NaN and roundings, from torch and from JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import O_BOUND, STATE_BOUND, Draw, request_of
from extreme_gates import (
    EVERY_KIND,
    KINDS,
    LENGTHS,
    NOTHING,
    assert_bias_gradient,
    beyond,
    draw,
    draw_scalar,
    expected,
    expected_gradients,
    options_of,
)

import kdacore
from kdacore.types import ChunkInputs, OutputGrads, RecurrentInputs
from kdacore_cuda.forms.chunk_numbers import UNBOUNDED_FLOOR
from kdacore_reference.oracle import to_float64

pytestmark = pytest.mark.gpu
SHAPES = {"few heads": (9, 300), "dataflow": (17, 300), "clusters of four": (26, 300), "many heads": (90, 300),
          "many short": (600, 40)}  # fmt: skip
"""Value heads and tokens, by the form that the forward takes."""


def arrays(inputs: Any, kind: str) -> dict[str, Any]:
    """By name, on the GPU, of torch or JAX."""
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    if kind == "torch":
        return {name: x.cuda() for name, x in given.items()}
    jax = pytest.importorskip("jax")
    return {name: to_jax(jax, x) for name, x in given.items()}


def to_jax(jax: Any, x: torch.Tensor) -> Any:
    return jax.numpy.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch."))


def on_host(x: Any) -> Any:
    return x.cpu() if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x, np.float32))


def check(op: str, inputs: Any, kind: str, library: str, bounds: tuple[float, float]) -> None:
    options = options_of(kind)
    want = expected(request_of(op, inputs, **options), inputs, options)
    o, state = getattr(kdacore, op)(**arrays(inputs, library), **options, backend="cuda")
    assert not beyond(bounds[0], on_host(o), want.o, 2)
    assert not beyond(bounds[1], on_host(state), want.final_state, 1)


@EVERY_KIND
@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("form", SHAPES)
def test_forward(form: str, kind: str, library: str) -> None:
    HV, T = SHAPES[form]
    check("chunk_kda", draw(T, HV), kind, library, (2 * O_BOUND, 2 * STATE_BOUND))


@EVERY_KIND
@pytest.mark.parametrize("HV", [9, 26, 90])
def test_packs(kind: str, HV: int) -> None:
    cu = torch.tensor(np.cumsum([0, *LENGTHS]))
    check("chunk_kda", draw(sum(LENGTHS), HV, cu_seqlens=cu, dtype=torch.float32), kind, "torch",
          (2 * O_BOUND, 2 * STATE_BOUND))  # fmt: skip


@EVERY_KIND
def test_narrow_heads(kind: str) -> None:
    check("chunk_kda", draw(100, K=64), kind, "torch", (2 * O_BOUND, 2 * STATE_BOUND))


@EVERY_KIND
@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("T", [1, 5])
def test_decode(kind: str, T: int, library: str) -> None:
    x = draw(T, 17)
    state = torch.randn(1, 17, 128, 128, generator=torch.Generator().manual_seed(2))
    inputs = RecurrentInputs(x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, initial_state=state)
    check("fused_recurrent_kda", inputs, kind, library, (O_BOUND, 1e-4))


@pytest.mark.parametrize("kind", ["softplus", "wide bound"])
def test_decode_with_a_gate_of_a_head(kind: str) -> None:
    check("fused_recurrent_gated_delta_rule", draw_scalar(10), kind, "torch", (O_BOUND, 1e-4))


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("HV", "T", "size"), [(9, 300, 1.0), (40, 200, 1.0), (9, 300, 1e4)])
def test_gradients(kind: str, dtype: torch.dtype, HV: int, T: int, size: float) -> None:
    """In segments and in one chain a head; and larger than any number."""
    inputs: ChunkInputs = draw(T, HV, dtype=dtype)
    if size > 1:
        inputs.g.zero_()
        inputs.dt_bias.zero_()
    options = KINDS[kind]
    request = request_of("chunk_kda", inputs, **options)
    given = OutputGrads(size * Draw(9).normal(*inputs.v.shape), None)
    floor = None if kind == "bounded" else UNBOUNDED_FLOOR
    want = expected_gradients(request, inputs, options, given, floor)
    got = gradients(inputs, options, given, "cuda")
    for name in ("q", "k", "v", "g", "beta"):
        assert not beyond(1.6e-2, got[name], getattr(want, name), 2), name
    assert_bias_gradient(got["dt_bias"], want)
    size = np.maximum(want.rate_size, NOTHING)
    off = np.abs(to_float64(got["A_log"]) - want.A_log) / size
    allowed = np.full_like(off, 3e-2)
    if kind == "softplus":
        # Where tokens hardly decay, errors of them all have the same sign. Triton's, which has another floor:
        triton = to_float64(gradients(inputs, options, given, "triton")["A_log"])
        exact = expected_gradients(request, inputs, options, given, -126.0)
        others = np.abs(triton - exact.A_log) / np.maximum(exact.rate_size, NOTHING)
        allowed = np.maximum(allowed, 2 * others)
    assert (off <= allowed).all(), (off, allowed)


def gradients(
    inputs: ChunkInputs, options: dict[str, Any], given: OutputGrads, backend: str
) -> dict[str, torch.Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in arrays(inputs, "torch").items()}
    o, _ = kdacore.chunk_kda(**leaves, **options, backend=backend)
    assert torch.isfinite(o).all()
    o.backward(given.o.cuda())
    return {name: x.grad.cpu() for name, x in leaves.items() if x.grad is not None}


@EVERY_KIND
def test_gradients_from_jax(kind: str) -> None:
    jax = pytest.importorskip("jax")
    inputs, options = draw(100, 9), KINDS[kind]
    request = request_of("chunk_kda", inputs, **options)
    do = Draw(9).normal(*inputs.v.shape)
    floor = None if kind == "bounded" else UNBOUNDED_FLOOR
    want = expected_gradients(request, inputs, options, OutputGrads(do, None), floor)
    x, given = arrays(inputs, "jax"), to_jax(jax, do)
    _, pull = jax.vjp(lambda y: kdacore.chunk_kda(**y, **options, backend="cuda")[0], x)
    got = {name: on_host(y) for name, y in pull(given)[0].items()}
    for name in ("q", "k", "v", "g", "beta"):
        assert not beyond(1.6e-2, got[name], getattr(want, name), 2), name
    assert_bias_gradient(got["dt_bias"], want)
