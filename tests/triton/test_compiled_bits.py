"""Candidates by records have the bits of decoding one token at a time in compiled kernels too.

Sums over K are added up in the order that a tile's layout gives, which the compiler derives from all of a kernel. In
Triton's interpreter all kernels add up alike, but an H200 showed that compiled ones did not. Here their PTX runs on
the CPU.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_process import run_python
from ptx_interpreter import Instruction, Program, fused, left_to_contract

from kdacore_triton import configs

SCRIPT = Path(__file__).with_name("compiled_bits.py")
RECURRENT = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
FUSED = ("fused_decode_kda", "fused_decode_gated_delta_rule")


def problems(*cases: dict[str, Any]) -> list[list[str]]:
    done = run_python(SCRIPT, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def shipped(arch: str) -> list[dict[str, Any]]:
    """A case for each rule of the recurrent kernel, state dtype and layout; two tiles of V where there are as many."""
    found = []
    for choice in configs.shipped_for(arch):
        when, config = choice.when, dict(choice.config)
        if choice.kernel != "recurrent":
            continue
        K = when.get("K", [None, 128])[1] or 256
        for state in [when["state"]] if "state" in when else ["float32", "bfloat16"]:
            for v_first in [when["v_first"]] if "v_first" in when else [False, True]:
                shape = {"K": K, "V": min(K, 2 * config["BV"]), "v_first": v_first, "state": state}
                case = {**shape, "config": config, "arch": arch}
                if case not in found:
                    found.append(case)
    return found


SIX = [
    {"op": op, "K": K, "v_first": v_first, "config": {"BV": BV, "num_warps": 1, "num_stages": 1}}
    for K, v_first, BV in ((64, False, 32), (128, False, 32), (64, True, 32), (128, True, 8))
    for op in RECURRENT
]
"""Calls of a GPU test, with its tiles; but for [V, K] states with K = 128 they failed on an H200."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", SIX, ids=lambda c: f"{c['op']}-{c['K']}-{c['v_first']}")
def test_the_recurrent_ops_at_the_head_dims_of_models(case: dict[str, Any]) -> None:
    assert problems(case) == [[]]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", FUSED)
def test_the_fused_ops(op: str, K: int, v_first: bool) -> None:
    assert problems({"op": op, "K": K, "v_first": v_first, "HV": 1 if K == 128 else 2}) == [[]]


def test_another_tile_is_found_out() -> None:
    other = {"BV": 64, "num_warps": 2, "num_stages": 1}
    (found,) = problems({**SIX[0], "records_config": other})
    assert "state" in found


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_shipped_tile(arch: str, op: str) -> None:
    cases = [{**case, "op": op} for case in shipped(arch)]
    assert cases
    assert dict(zip(map(str, cases), problems(*cases), strict=True)) == {str(case): [] for case in cases}


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", RECURRENT)
def test_other_calls(op: str) -> None:
    """Odd head dims, input dtypes, neither norms nor gates in the kernel, packs, several value heads a key head."""
    more: list[dict[str, Any]] = [
        {"K": 60, "V": 100}, {"K": 16, "dtype": "float32"}, {"K": 96, "raw": False}, {"K": 128, "raw": False},
        {"K": 128, "packed": True, "dtype": "float32"}, {"K": 64, "HV": 2, "tokens": 3}, {"K": 64, "state": "float16"},
        {"K": 128, "dtype": "float32", "arch": "sm_80"},
    ]  # fmt: skip
    cases = [{"op": op, **case, "v_first": v_first} for case in more for v_first in (False, True)]
    assert dict(zip(map(str, cases), problems(*cases), strict=True)) == {str(case): [] for case in cases}


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", FUSED)
def test_other_fused_calls(op: str) -> None:
    more: list[dict[str, Any]] = [
        {"K": 128, "state": "bfloat16"}, {"K": 64, "state": "float16"}, {"K": 64, "packed": True, "dtype": "float32"},
        {"K": 128, "packed": True}, {"K": 96, "V": 60}, {"K": 32, "dtype": "float32", "tokens": 3},
        {"K": 64, "arch": "sm_80"},
    ]  # fmt: skip
    cases = [{"op": op, **case} for case in more]
    assert dict(zip(map(str, cases), problems(*cases), strict=True)) == {str(case): [] for case in cases}


# --- the interpreter of PTX ----------------------------------------------------------------------------------------


def nearest(x: Fraction) -> float:
    """The float32 nearest to a number, in exact arithmetic."""
    if x == 0:
        return 0.0
    exponent = max(math.frexp(float(x))[1] - 24, -149)
    unit = Fraction(2) ** exponent
    return float(round(x / unit) * unit)


def test_fused_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(500).astype(np.float32) for _ in range(2))
    # Sums whose float64 lies halfway between two float32.
    near = (a.astype(np.float64) * b).astype(np.float32) * np.float32(2.0**30)
    for c in (-(a * b), near, rng.standard_normal(500).astype(np.float32) * np.float32(1e-30)):
        exact = [
            nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            for x, y, z in zip(a, b, c, strict=True)
        ]
        assert np.array_equal(fused(a, b, c), np.array(exact, np.float32))


def test_sums_of_products_are_left_to_ptxas() -> None:
    def program(*lines: tuple[str, ...]) -> Program:
        return Program(tuple(Instruction(name, tuple(r), "", False) for name, *r in lines), {}, (), 32)

    product, copy = ("mul.f32", "%r1", "%r2", "%r3"), ("mov.b32", "%r4", "%r1")
    total = ("add.f32", "%r5", "%r6", "%r4")
    assert len(left_to_contract(program(product, copy, total))) == 1
    assert left_to_contract(program(("fma.rn.f32", "%r1", "%r2", "%r3", "%r6"), copy, total)) == []
