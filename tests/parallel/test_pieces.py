"""The public pieces: the map of a segment, composing maps, and applying them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore.parallel import compose, fold, segment_transition
from kdacore.parallel.local_ranks import local_group

pytestmark = pytest.mark.quick


def segment(
    kind: str, T: int = 40, scalar: bool = False, seed: int = 0, gate: float = 1e-3
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    H, HV, K, V = 1, 2, 16, 8
    x = {
        "q": rng.standard_normal((1, T, H, K)),
        "k": rng.standard_normal((1, T, H, K)),
        "v": rng.standard_normal((1, T, HV, V)),
        "g": -gate * rng.random((1, T, HV) if scalar else (1, T, HV, K)),
        "beta": rng.random((1, T, HV)),
    }
    if kind == "numpy":
        return x
    if kind == "torch":
        return {n: torch.tensor(a, dtype=torch.float64) for n, a in x.items()}
    import jax.numpy as jnp

    return {n: jnp.asarray(a, dtype=jnp.float32) for n, a in x.items()}


def function_of(scalar: bool) -> Any:
    return kdacore.chunk_gated_delta_rule if scalar else kdacore.chunk_kda


@pytest.mark.parametrize(
    ("kind", "scalar"),
    [
        ("numpy", False),
        ("torch", False),
        ("torch", True),
        pytest.param("jax", False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_segment_maps_every_state_as_its_map_says(kind: str, scalar: bool) -> None:
    x = segment(kind, scalar=scalar)
    q = x.pop("q")
    M, C = segment_transition(**x, use_qk_l2norm_in_kernel=True)
    start = np.random.default_rng(1).standard_normal(C.shape).astype(str(C.dtype).removeprefix("torch."))
    given = torch.tensor(start) if kind == "torch" else start
    if kind == "jax":
        import jax.numpy as jnp

        given = jnp.asarray(start)
    _, end = function_of(scalar)(
        q, *x.values(), initial_state=given, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    size = 1e-9 if kind != "jax" else 2e-5
    np.testing.assert_allclose(np.asarray(M @ given + C), np.asarray(end), rtol=size, atol=size)
    np.testing.assert_allclose(
        np.asarray(fold(M[None], C[None], given)), np.asarray(end), rtol=size, atol=size
    )


def test_pieces_of_a_pack_with_empty_ones() -> None:
    x = segment("torch")
    q = x.pop("q")
    offsets = torch.tensor([0, 16, 16, 40])
    M, C = segment_transition(**x, cu_seqlens=offsets)
    assert torch.equal(M[1], torch.eye(16, dtype=M.dtype).expand(2, 16, 16)) and not C[1].any()
    whole = segment_transition(**x)
    for found, wanted in zip(compose((M[0], C[0]), compose((M[1], C[1]), (M[2], C[2]))), whole, strict=True):
        torch.testing.assert_close(found, wanted[0])
    _, end = kdacore.chunk_kda(q, *x.values(), output_final_state=True)
    torch.testing.assert_close(fold(M, C), end[0])


def test_gradients_flow_through_the_map_of_a_segment() -> None:
    """Maps, composed and folded, give the gradients of one call."""
    x = {n: a.requires_grad_(True) for n, a in segment("torch", gate=0.5).items()}
    weight = torch.randn(1, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = torch.randn(1, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    start.requires_grad_(True)
    names = ("k", "v", "g", "beta")
    arrays = [x[n] for n in names]
    _, end = kdacore.chunk_kda(
        *x.values(), initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    wanted = torch.autograd.grad((end * weight).sum(), [*arrays, start])
    parts = [
        segment_transition(*[a[:, at] for a in arrays], use_qk_l2norm_in_kernel=True)
        for at in (slice(0, 13), slice(13, 40))
    ]
    M, C = compose(*parts)
    for folded in (M @ start + C, fold(*(torch.stack(m) for m in zip(*parts, strict=True)), start)):
        found = torch.autograd.grad((folded * weight).sum(), [*arrays, start], retain_graph=True)
        for name, a, b in zip((*names, "start"), found, wanted, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_products_are_exact_where_torch_allows_less() -> None:
    """Many maps near the identity: bfloat16 or TF32 products would lose four digits."""
    rng = torch.Generator().manual_seed(0)
    M = torch.eye(32) + 1e-3 * torch.randn(64, 2, 32, 32, generator=rng)
    C = torch.randn(64, 2, 32, 8, generator=rng)
    wanted = C[0].double()
    for q in range(1, 64):
        wanted = M[q].double() @ wanted + C[q].double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = fold(M, C)
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-7


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("first", lambda: compose((np.eye(2), np.ones((3, 2))), (np.eye(2), np.ones((2, 2))))),
        ("second", lambda: compose((np.eye(2), np.ones((2, 2))), (np.eye(3), np.ones((3, 2))))),
        ("second", lambda: compose((np.eye(2), np.ones((2, 2))), (np.eye(2, dtype=np.float32),) * 2)),
        ("first", lambda: compose((3, 4), (np.eye(2), np.eye(2)))),
        ("M", lambda: fold(np.ones((2, 3, 4)), np.ones((2, 3, 4)))),
        ("M", lambda: fold(np.ones((0, 3, 3)), np.ones((0, 3, 4)))),
        ("state", lambda: fold(np.ones((2, 3, 3)), np.ones((2, 3, 4)), np.ones((3, 3)))),
        ("beta", lambda: segment_transition(**{**_kvg(), "beta": np.ones((1, 3, 2))})),
        ("k", lambda: segment_transition(**{**_kvg(), "k": None})),
        ("size", lambda: local_group(0)),
    ],
)
def test_what_does_not_fit_is_named(argument: str, call: Any) -> None:
    with pytest.raises(kdacore.ContractError) as caught:
        call()
    assert caught.value.argument == argument


def _kvg() -> dict[str, Any]:
    x = segment("numpy")
    x.pop("q")
    return x
