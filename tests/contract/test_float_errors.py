"""Whatever ``np.errstate`` asks for: an exponential that underflows is no error, and results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.values import GATES, Shape
from kdacore.ops import OPS

PACK = Shape(B=1, T=70, H=1, HV=2, K=16, V=16, lengths=(66, 0, 4))


def _results(call: CallDescription, **errors: Any) -> list[Any]:
    arrays = make_arrays(call)
    with np.errstate(**errors):
        given = OPS[call.op].keywords(arrays)
    found = public_function(call.op)(**given, **dict(call.options), backend="reference")
    whole = found if isinstance(found, tuple) else (found,)
    return [x for x in (*whole, arrays.get("initial_state"), arrays.get("out")) if x is not None]


def _calls() -> list[CallDescription]:
    found = []
    for op, opdef in OPS.items():
        if opdef.family in ("chunk", "recurrent"):
            given = options(use_gate_in_kernel=True, inplace_state=True)
            call = CallDescription(op=op, shape=PACK, pool="inplace", out=True, options=given)
            found += [
                call.changed(gates=gates) for gates in (GATES if not opdef.scalar_gate else ("random",))
            ]
            found += [call.changed(dtype="float16"), call.changed(dtype="bfloat16", state_dtype="bfloat16")]
        elif opdef.family == "decode":
            shape, around = Shape(B=5, T=3, HV=2), {"norm": "vector", "z": True, "conv_bias": True}
            given = options(use_gate_in_kernel=True, inplace_state=True)
            call = CallDescription(op=op, shape=shape, pool="records", out=True, options=given, **around)  # type: ignore[arg-type]
            found += [
                call.changed(gates=gates) for gates in (GATES if not opdef.scalar_gate else ("random",))
            ]
        elif opdef.family == "commit":
            found.append(CallDescription(op=op, shape=Shape(B=5, T=3, HV=2), pool="records"))
        else:
            shape = PACK if opdef.family == "stage" else Shape(B=1, T=70, H=1, HV=2, K=16, V=16)
            found += [CallDescription(op=op, shape=shape, dtype=dtype) for dtype in ("float32", "float16")]
    return found


@pytest.mark.parametrize("op", OPS)
def test_raise(op: str) -> None:
    for call in _calls():
        if call.op != op:
            continue
        for found, wanted in zip(_results(call, all="raise"), _results(call, all="ignore"), strict=True):
            assert found.tobytes() == wanted.tobytes()


def test_no_warnings_of_numpy() -> None:
    """Not a number gives not a number, as in the other libraries, without a word on the way."""
    call = CallDescription(shape=Shape(B=1, T=40, H=1, HV=1, K=8, V=8))
    arrays = make_arrays(call)
    arrays["v"][0, 30] = np.inf
    arrays["q"][0, 35] = np.nan
    for op in ("chunk_kda", "fused_recurrent_kda"):
        with np.errstate(all="raise"):
            o = public_function(op)(**arrays)[0]
        assert np.isnan(o[0, 35]).all()
