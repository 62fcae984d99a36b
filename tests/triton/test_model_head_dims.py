"""Head dims of models, K = 96 with V = 192 and K = 256 with V = 512: every op, forward and training, by the oracle.

Without a GPU at few tokens, in Triton's interpreter; the cases for a GPU have the heads of a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kdacore import record_selections
from kdacore.calls.description import options
from kdacore.calls.pools import POOLS
from kdacore.calls.values import Shape
from kdacore.testing.cases import MODEL, UNBOUNDED_MODEL, Case
from kdacore.testing.suite import run_case
from kdacore_triton import configs

DIMS = ((96, 192), (256, 512))
NEGATIVE = {"allow_neg_eigval": True, "output_final_state": True}
GATED_DELTA = {**UNBOUNDED_MODEL, **NEGATIVE}
"""What flash-linear-attention's gated delta rule asks for: the gate is one number a head."""
KDA = {**MODEL, **NEGATIVE}
UNBOUNDED_KDA = {**UNBOUNDED_MODEL, **NEGATIVE}

pytestmark = [
    # Pairs above the diagonal overflow with one exponent offset. They are masked after the product.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


def case(op: str, K: int, V: int, device: str, check: str = "accuracy", **more: Any) -> Case:
    """A call from a state, on the Triton backend."""
    asked = more.pop("asked", GATED_DELTA if "gated_delta" in op else KDA)
    sizes = {"T": 70, "H": 1, "HV": 1} | more.pop("sizes", {})
    return Case(
        check=check, backend="triton", op=op, kind="torch", device=device, shape=Shape(K=K, V=V, **sizes),
        initial_state=True, options=options(**asked), seed=K + V, **more,
    )  # fmt: skip


def served(call: Case) -> None:
    with record_selections() as made:
        result = run_case(call)
    assert result.status == "served", result.message
    assert {s.backend for s in made} == {"triton"}


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(("K", "V"), DIMS)
@pytest.mark.parametrize("check", ["accuracy", "gradients"])
@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_kda"])
def test_chunk_ops(op: str, check: str, K: int, V: int, device: str) -> None:
    served(case(op, K, V, device, check))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("K", "V"), DIMS)
@pytest.mark.parametrize("check", ["accuracy", "gradients"])
def test_unbounded_gates(check: str, K: int, V: int, device: str) -> None:
    served(case("chunk_kda", K, V, device, check, asked=UNBOUNDED_KDA, sizes={"T": 130, "HV": 2}))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("op", ["fused_recurrent_gated_delta_rule", "fused_recurrent_kda"])
@pytest.mark.parametrize(("K", "V"), DIMS)
def test_recurrent_ops(K: int, V: int, op: str, device: str) -> None:
    served(case(op, K, V, device, sizes={"T": 3, "HV": 2}))
    served(case(op, K, V, device, "gradients", sizes={"T": 3}))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("check", ["accuracy", "gradients"])
@pytest.mark.parametrize(("K", "V"), [*DIMS, (16, 300)])
def test_packs_with_padding(K: int, V: int, check: str, device: str) -> None:
    sizes = {"T": 43, "lengths": (17, 0, 5), "padding": 21}
    served(case("chunk_gated_delta_rule", K, V, device, check, sizes=sizes))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("pool", ["checkpoints_moved", "moved_strided", "fresh"])
@pytest.mark.parametrize(("K", "V"), DIMS)
def test_rows_of_pools(K: int, V: int, pool: str, device: str) -> None:
    asked = {k: v for k, v in GATED_DELTA.items() if k != "output_final_state"}
    asked |= {k: v for k, v in POOLS[pool].options.items() if v is not None}
    served(
        case(
            "chunk_gated_delta_rule",
            K,
            V,
            device,
            "pool",
            asked=asked,
            sizes={"T": 40, "lengths": (17, 9, 14)},
            pool=pool,
        )
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("K", "V"), DIMS)
@pytest.mark.parametrize("v_first", [False, True])
def test_checkpoints_and_layouts(v_first: bool, K: int, V: int, device: str) -> None:
    asked = {**GATED_DELTA, "checkpoint_every": 64, "state_v_first": v_first}
    served(case("chunk_gated_delta_rule", K, V, device, asked=asked, sizes={"T": 130}))


@pytest.mark.exhaustive
def test_segments(device: str) -> None:
    """Wider keys have none."""
    call = case("chunk_gated_delta_rule", 96, 192, device, gates="slow", sizes={"T": 1040})
    config = configs.get("chunk_forward", "sm_90", gate="scalar", K=96, V=192, half=True, heads=1, T=1040)
    with configs.override("chunk_forward", {**config, "segment": 512}):
        served(call)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("K", "V"), DIMS)
@pytest.mark.parametrize(
    "op",
    ["kda_recompute_w_u", "delta_rule_chunk_state", "kda_chunk_output", "kda_chunk_gate", "kda_chunk_intra"],
)
def test_stages(op: str, K: int, V: int, device: str) -> None:
    whole = case(op, K, V, device, asked={}, sizes={"T": 70})
    served(replace(whole, A_log=False, dt_bias="", initial_state=op == "delta_rule_chunk_state"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("check", ["accuracy", "gradients"])
@pytest.mark.parametrize(
    ("op", "asked"),
    [("chunk_gated_delta_rule", GATED_DELTA), ("chunk_kda", KDA), ("chunk_kda", UNBOUNDED_KDA)],
    ids=["gated-delta", "bounded", "unbounded"],
)
@pytest.mark.parametrize(("K", "V"), DIMS)
def test_on_the_hardware(
    K: int, V: int, op: str, asked: dict[str, Any], check: str, dtype: str, device: str
) -> None:
    sizes = {"T": 400, "H": 1, "HV": 2}
    served(case(op, K, V, device, check, asked=asked, sizes=sizes, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("K", "V"), DIMS)
@pytest.mark.parametrize("op", ["fused_recurrent_gated_delta_rule", "fused_recurrent_kda"])
def test_recurrent_ops_on_the_hardware(op: str, K: int, V: int, dtype: str, device: str) -> None:
    for T in (1, 7):
        served(case(op, K, V, device, sizes={"B": 4, "T": T, "H": 8, "HV": 16}, dtype=dtype))
    served(case(op, K, V, device, "gradients", sizes={"B": 2, "T": 7, "H": 2, "HV": 4}, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["accuracy", "gradients"])
@pytest.mark.parametrize(("K", "V", "heads"), [(96, 192, 30), (256, 512, 6)])
def test_the_sizes_of_a_layer(K: int, V: int, heads: int, check: str, device: str) -> None:
    """Packed as in training. A default layer of flash-linear-attention has six heads."""
    sizes = {"T": 400, "H": heads, "HV": heads, "lengths": (150, 1, 249)}
    served(case("chunk_gated_delta_rule", K, V, device, check, gates="init", sizes=sizes, dtype="bfloat16"))
