"""Checks of a call with state pools: against the model, with NaN in what is not read, also by the fast path."""

from __future__ import annotations

from typing import Any

import torch
from cuda_calls import Draw, error, request_of
from server_model import Expected, expected, poison_unused

from kdacore.types import Request

NAN = float("nan")


def pool_of(
    P: int,
    K: int = 64,
    dtype: torch.dtype = torch.float32,
    *,
    V: int | None = None,
    HV: int = 2,
    seed: int = 1,
) -> torch.Tensor:
    """Rows ``[HV, K, V]`` (V as K if not given) that are not next to one another, with NaN between them."""
    matrix = (K, K if V is None else V)
    memory = torch.full((P, 3, HV, *matrix), NAN, dtype=dtype)
    memory[:, 1] = 0.3 * Draw(seed).normal(P, HV, *matrix, dtype=dtype)
    return memory[:, 1]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.contiguous().view(whole), y.contiguous().view(whole))


def check_pools(
    module: Any, op: str, inputs: Any, bounds: tuple[float, float], options: dict[str, Any]
) -> Expected:
    """Run ``module.forward`` and, where there is one, ``module.make_fast_call``.

    Args:
        module: of the backend.
        op: its public name.
        inputs: arrays of the call. Those that it writes are written.
        bounds: of the relative errors of the output and of states.
        options: of the call.

    Returns:
        What was expected.
    """
    request = request_of(op, inputs, **options)
    want = expected(request, inputs, options)
    inputs = poison_unused(request, inputs)
    written = ("initial_state", "write_pool", "out")
    before = {n: getattr(inputs, n).clone() for n in written if getattr(inputs, n) is not None}

    got = module.forward(request, inputs)
    _verify(request, inputs, before, want, bounds, got.o, got.final_state)
    first = got.o.clone()
    for name, x in before.items():
        getattr(inputs, name).copy_(x)
    step = module.make_fast_call(request, inputs)
    assert step is not None or inputs.g.dtype == torch.float16
    if step is not None:
        again = step(tuple(inputs))
        assert again is not None
        _verify(request, inputs, before, want, bounds, again[0], again[1])
        assert same_bits(again[0], first)
    return want


def _verify(
    request: Request,
    inputs: Any,
    before: dict[str, torch.Tensor],
    want: Expected,
    bounds: tuple[float, float],
    o: torch.Tensor,
    final: torch.Tensor | None,
) -> None:
    rows = torch.arange(request.T).expand(request.B, -1)
    unused = rows >= inputs.cu_seqlens[-1] if request.packed else torch.zeros_like(rows, dtype=torch.bool)
    assert error(o[~unused], want.o[~unused]) < bounds[0]
    if inputs.out is None:
        assert not o[unused].any()
    else:
        assert o is inputs.out
        assert same_bits(o[unused], before["out"][unused])
    if request.inplace_state:
        pool = getattr(inputs, request.written_pool)
        assert final is (pool if request.output_final_state else None)
        named = torch.from_numpy(want.written)
        assert error(pool[named], want.pool[want.written]) < bounds[1]
        assert same_bits(pool[~named], before[request.written_pool][~named])
    elif final is not None:
        assert error(final, want.final) < bounds[1]
    if request.written_pool != "initial_state" and "initial_state" in before:
        assert same_bits(inputs.initial_state, before["initial_state"])
