"""Calls on rows that are split over the fake devices of a mesh axis, and the float64 answer on the whole row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from pallas_cases import GRAD_BOUND, O_BOUND, STATE_BOUND, Case, build, error, output_grads

import kdacore
from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore.types import ChunkInputs, OutputGrads, Request

AXIS = "seq"
TOKENS = ("q", "k", "v", "g", "beta")
SPLIT = P(None, AXIS)
WHOLE = ("cu_seqlens",)
"""Arrays that no gradient is asked of."""


@dataclass(frozen=True)
class Ranks:
    """How a call is split."""

    count: int = 8
    check_vma: bool = True
    backend: str = "xla"


def mesh(count: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()[:count]), (AXIS,))


def options_of(case: Case) -> dict[str, Any]:
    return {
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": case.gate != "log",
        "use_beta_sigmoid_in_kernel": case.beta_sigmoid,
        "allow_neg_eigval": case.neg_eigval,
        "lower_bound": case.lower_bound,
        "state_v_first": case.v_first,
        "output_final_state": case.final,
    }


def split_call(case: Case, ranks: Ranks, names: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    """The op on the arrays of the whole row, each rank computing its slice; ``o`` and the final state."""
    op = kdacore.chunk_gated_delta_rule if case.scalar else kdacore.chunk_kda

    def local(x: dict[str, Any]) -> Any:
        return op(**x, **options_of(case), cp=AXIS, backend=ranks.backend)[: 1 + case.final]

    specs = {n: SPLIT if n in TOKENS else P() for n in names}
    whole = (SPLIT, P())[: 1 + case.final]
    return jax.shard_map(
        local, mesh=mesh(ranks.count), in_specs=(specs,), out_specs=whole, check_vma=ranks.check_vma
    )


def with_padding(request: Request, inputs: ChunkInputs, tokens: int) -> tuple[Request, ChunkInputs]:
    """The call with so many NaN tokens after the last sequence."""

    def padded(x: Any) -> Any:
        width = [(0, 0), (0, tokens), *[(0, 0)] * (x.ndim - 2)]
        return np.pad(x.astype(np.float32), width, constant_values=np.nan).astype(x.dtype)

    arrays = {n: padded(getattr(inputs, n)) for n in TOKENS}
    return replace(request, T=request.T + tokens), inputs._replace(**arrays)


class Split:
    """One compiled call with its gradients, for arrays of the same shapes."""

    def __init__(self, case: Case, ranks: Ranks, padding: int = 0) -> None:
        request, inputs = build(case)
        if padding:
            request, inputs = with_padding(request, inputs, padding)
        self.case, self.request, self.inputs, self.padding = case, request, inputs, padding
        assert request.T % ranks.count == 0, (request.T, ranks.count)
        self.grads = output_grads(request)
        names = tuple(n for n, x in inputs._asdict().items() if x is not None)
        function = split_call(case, ranks, names)

        def both(x: dict[str, Any], given: dict[str, Any], cotangents: Any) -> Any:
            results, vjp = jax.vjp(lambda x: function({**x, **given}), x)
            return results, vjp(cotangents)[0]

        self._program = jax.jit(both)

    def run(self, inputs: ChunkInputs | None = None, do: Any = None) -> tuple[list[Any], dict[str, Any]]:
        """Results, and gradients by name."""
        arrays = {n: jnp.asarray(x) for n, x in (inputs or self.inputs)._asdict().items() if x is not None}
        given = {n: arrays.pop(n) for n in WHOLE if n in arrays}
        cotangents = tuple(
            jnp.asarray(x)
            for x in (self.grads.o if do is None else do, self.grads.final_state)[: 1 + self.case.final]
        )
        results, grads = self._program(arrays, given, cotangents)
        return [np.asarray(x) for x in results], {n: np.asarray(x) for n, x in grads.items()}

    def check(self, inputs: ChunkInputs | None = None) -> None:
        """Results, states and every gradient against the oracle on the whole row."""
        inputs, case, used = inputs or self.inputs, self.case, self.request.T - self.padding
        request = replace(self.request, T=used)
        sound = inputs._replace(**{n: getattr(inputs, n)[:, :used] for n in TOKENS})
        grads = OutputGrads(self.grads.o[:, :used], self.grads.final_state)
        results, found = self.run(inputs)
        want, factor = oracle_forward(request, sound), 2.0 if case.hard else 1.0
        assert error(results[0][:, :used], want.o) < factor * O_BOUND[case.dtype]
        assert not results[0][:, used:].any()
        if case.final:
            assert str(results[1].dtype) == case.state_dtype
            bound = 3.3e-3 if case.state_dtype == "bfloat16" else STATE_BOUND[case.dtype]
            assert error(results[1], want.final_state) < factor * bound
        wanted = oracle_backward(request, sound, grads)
        for name, x in found.items():
            if name in TOKENS:
                assert not x[:, used:].any(), name
                x = x[:, :used]
            coarse = case.state_dtype == "bfloat16" and name == "initial_state"
            bound = 8e-3 if coarse else GRAD_BOUND[case.dtype]
            assert error(x, getattr(wanted, name)) < factor * bound, name
