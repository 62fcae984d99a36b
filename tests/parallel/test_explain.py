"""What ``explain`` and ``selection_of`` say of calls on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kdacore
from kdacore.parallel import cost, slices
from kdacore.parallel.explain import RanksSelection
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl

pytestmark = pytest.mark.quick


def arrays(T: int, **changed: Any) -> tuple[Any, ...]:
    kind: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "kind": "torch", "arch": "sm_90"} | changed
    wide = kdacore.ShapeDtype((1, T, 16, 128), **kind)
    return wide, wide, wide, wide, kdacore.ShapeDtype((1, T, 16), **kind)


def explain(T: int = 65536, cp: Any = 4, **options: Any) -> Any:
    return kdacore.explain("chunk_kda", *arrays(T), cp=cp, use_qk_l2norm_in_kernel=True, **options)


def test_ranks_bytes_and_times_are_shown() -> None:
    found = explain()
    assert isinstance(found, RanksSelection) and found.backend == "cuda" and found.ranks == 4
    # Three other ranks' transitions and states, 16 heads of 128 x 256 float32, and 16 bytes that mark the call.
    assert found.exchange == cost.Exchange(3 * (16 * 128 * 256 * 4 + 16), 0, 0, 1)
    text = str(found)
    assert "ranks: 4, each with T=65536 of 262144 tokens" in text
    assert f"each rank receives {found.exchange.total} bytes in 1 collectives" in text
    assert "on 4 ranks" in text and "on one" in text


def test_bytes_do_not_depend_on_the_length() -> None:
    assert explain(256).exchange == explain(65536).exchange
    packed = kdacore.ShapeDtype((9,), "int64", "cuda", "torch", "sm_90")
    with_states = explain(256, output_final_state=True, cu_seqlens=packed).exchange
    assert with_states.final_states == 2 * 3 * 8 * 16 * 128 * 128 * 4 // 4


def test_times_grow_less_with_more_ranks_than_alone() -> None:
    found = [explain(8192 * 8 // ranks, cp=ranks) for ranks in (2, 4, 8)]
    known = [s for s in found if s.seconds is not None]
    assert known, "no cost of the cuda backend is known on sm_90"
    for said in known:
        assert said.seconds_alone is not None and said.seconds > 0
        slices_work = said.seconds - said.exchange.total / cost.LINK_BYTES - cost.LINK_START
        assert slices_work > 0


def test_many_heads_and_packs_gain_less() -> None:
    """As measured on two H100s: one GPU takes a faster kernel there that has no slices."""
    packed = kdacore.ShapeDtype((35,), "int64", "cuda", "torch", "sm_90")
    few, pack = explain(131072, cp=2), explain(131072, cp=2, cu_seqlens=packed)
    assert few.seconds == pytest.approx(3.42e-3, rel=0.02)
    assert pack.seconds == pytest.approx(few.seconds)


def test_which_slices_have_functions_of_their_own() -> None:
    """On Hopper, those of both chunk ops with K = V = 128."""
    *wide, beta = arrays(65536)
    for op, g in (("chunk_kda", wide[3]), ("chunk_gated_delta_rule", beta)):
        found = kdacore.explain(op, *wide[:3], g, beta, cp=2, use_qk_l2norm_in_kernel=True, backend="cuda")
        assert isinstance(found, RanksSelection) and found.backend == "cuda" and not found.composed
        assert "slices: 16 heads, segments of 128 chunks" in str(found)


def test_one_rank_is_a_plain_call() -> None:
    assert type(explain(cp=1)) is kdacore.Selection


def test_selection_of() -> None:
    x = torch.zeros(1, 8, 1, 16)
    beta = torch.zeros(1, 8, 1)
    found = kdacore.selection_of("chunk_kda", x, x, x, x, beta, cp=2)
    assert found.backend == "reference"
    with pytest.raises(kdacore.UnsupportedError, match="cuda"):
        kdacore.selection_of("chunk_kda", x, x, x, x, beta, cp=2, backend="cuda")
    with pytest.raises(kdacore.ContractError, match="'cp'"):
        kdacore.selection_of("chunk_kda", x, x, x, x, beta, cp=0)


@pytest.fixture
def without_states() -> Any:
    """A backend that has neither functions for a slice nor states, so that none can be composed of it."""
    impl = OpImpl(
        forward=lambda request, inputs: None,
        serves=frozenset({"qk_l2norm", "initial_state"}),
        verified_archs=frozenset({"*"}),
    )

    class Plugin:
        @staticmethod
        @kdacore.hookspecs.hookimpl  # type: ignore[attr-defined]
        def kdacore_backends() -> list[Backend]:
            return [Backend("stateless", "1", ("torch",), {"chunk_kda": impl}, rank=1000)]

    REGISTRY.register(Plugin(), "stateless plugin")
    yield
    REGISTRY.unregister("stateless plugin")


def test_a_backend_without_a_transition(without_states: None) -> None:
    x, beta = torch.zeros(1, 8, 1, 16), torch.zeros(1, 8, 1)
    assert kdacore.explain("chunk_kda", x, x, x, x, beta).backend == "stateless"
    found = kdacore.explain("chunk_kda", x, x, x, x, beta, cp=2)
    assert found.backend == "reference" and "stateless would be chosen, but can serve no slice" in found.why
    forced = kdacore.explain("chunk_kda", x, x, x, x, beta, cp=2, backend="stateless")
    assert not forced.backend and "no transition of a slice" in forced.why
    assert any(r.code == "option" for r in forced.candidate("stateless").reasons)


def test_functions_of_a_backend_are_preferred() -> None:
    request = kdacore.explain(
        "chunk_kda", *[torch.zeros(1, 8, 1, 16)] * 4, torch.zeros(1, 8, 1), cp=2
    ).request
    assert slices.is_composed("reference", request)
