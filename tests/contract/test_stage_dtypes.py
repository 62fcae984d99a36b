"""dtypes of the stages' arrays: which go together, and what their results have. No mix is blamed on a backend."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdacore
from kdacore import stages

T, H, K, C = 16, 1, 16, 16
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float64": np.float64,
}
TOKENS, WIDE, TABLE = (1, T, H, K), (1, T, H), (1, T, H, C)
ARRAYS: dict[str, dict[str, tuple[int, ...]]] = {
    "kda_chunk_intra": {"q": TOKENS, "k": TOKENS, "gc": TOKENS, "beta": WIDE},
    "kda_recompute_w_u": {"k": TOKENS, "v": TOKENS, "beta": WIDE, "gc": TOKENS, "Akk": TABLE, "q": TOKENS},
    "delta_rule_chunk_state": {
        "kg": TOKENS, "w": TOKENS, "u": TOKENS, "gc": TOKENS, "initial_state": (1, H, K, K),
    },
    "kda_chunk_output": {"q": TOKENS, "v_new": TOKENS, "gc": TOKENS, "Aqk": TABLE, "h": (1, 1, H, K, K)},
}  # fmt: skip


def _arrays(op: str, dtypes: tuple[str, ...], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (name, shape), dtype in zip(ARRAYS[op].items(), dtypes, strict=True):
        found[name] = np.full(shape, 0.125).astype(DTYPES[dtype])
        if kind == "torch":
            import torch

            found[name] = torch.full(shape, 0.125, dtype=getattr(torch, dtype))
    return found


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("op", ARRAYS)
def test_any_mix_is_served_or_refused_by_name(op: str, kind: str) -> None:
    mixes = list(itertools.product(DTYPES, repeat=len(ARRAYS[op])))
    served = 0
    for dtypes in mixes[:: max(1, len(mixes) // 251)]:
        arrays = _arrays(op, dtypes, kind)
        try:
            getattr(stages, op)(**arrays, chunk_size=C)
            served += 1
        except kdacore.ContractError as error:
            assert error.argument in arrays
    assert served


@pytest.mark.parametrize("op", ARRAYS)
def test_float64_goes_with_float64(op: str) -> None:
    names = list(ARRAYS[op])
    for name in names:
        double = ["float64" if n == name else "float32" for n in names]
        with pytest.raises(kdacore.ContractError) as caught:
            getattr(stages, op)(**_arrays(op, tuple(double), "numpy"), chunk_size=C)
        # What differs from the first array is named.
        assert caught.value.argument == (name if name != names[0] else names[1])
    every = getattr(stages, op)(**_arrays(op, ("float64",) * len(names), "numpy"), chunk_size=C)
    assert all(
        x.dtype == np.float64 for x in (every if isinstance(every, tuple) else (every,)) if x is not None
    )


@pytest.mark.parametrize("v_new", ["float32", "bfloat16", "float16"])
def test_the_output_has_the_dtype_of_v_new(v_new: str) -> None:
    for q in ("float32", "bfloat16", "float16"):
        dtypes = (q, v_new, "float32", "float32", "float32")
        assert (
            stages.kda_chunk_output(**_arrays("kda_chunk_output", dtypes, "numpy"), chunk_size=C).dtype
            == v_new
        )
