"""What the float64 oracle says about a case: results, the weights of its loss, gradients."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kdacore.calls.arrays import Values, host_values
from kdacore.ops import OPS
from kdacore.oracle.host_values import rounded
from kdacore.testing.cases import Case
from kdacore.testing.serving import request_of
from kdacore.types import OutputGrads, Request


class Weights(NamedTuple):
    """The loss of the gradient checks: ``sum(o * weights.o) + sum(final_state * weights.final_state)``."""

    o: Any
    final_state: Any | None


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> Values:
    """Float64 results of the case's call, by name. Cases that differ only in kind or layout share them."""
    return _expected(_content(case))


@functools.lru_cache(maxsize=64)
def expected_gradients(case: Case) -> Values:
    """Float64 gradients of the loss :func:`weights`, by argument."""
    return _expected_gradients(_content(case))


def _content(case: Case) -> Case:
    """The case without what does not change its numbers."""
    return replace(
        case,
        check="",
        backend="reference",
        kind="numpy",
        device="cpu",
        layout="contiguous",
        mode="eager",
        negated=(),
        fault="",
        factor=1.0,
        slow=False,
        note="",
        index_dtype="int64",
    )


def exact_call(case: Case) -> tuple[Request, Any]:
    """The case's request and inputs as the oracle takes them: NumPy float64 values."""
    values = host_values(case)
    return request_of(_content(case)), OPS[case.op].inputs(**values)


@functools.lru_cache(maxsize=64)
def _expected(case: Case) -> Values:
    from kdacore.oracle import commit, decode, gate, recurrence, stages

    request, inputs = exact_call(case)
    if case.family == "gate":
        return {"log_decay": gate.oracle_gate(request, inputs)}
    if case.family == "stage":
        of_stage: dict[str, Any] = {
            "kda_chunk_gate": stages.oracle_chunk_gate,
            "kda_chunk_intra": stages.oracle_chunk_intra,
            "kda_recompute_w_u": stages.oracle_recompute_w_u,
            "delta_rule_chunk_state": stages.oracle_chunk_state,
            "kda_chunk_output": stages.oracle_chunk_output,
        }
        return named_results(case, of_stage[case.op](request, inputs))
    if case.family == "commit":
        return named_results(case, commit.oracle_commit(request, inputs))
    if case.family == "decode":
        return named_results(case, decode.oracle_decode(request, inputs))
    return named_results(case, recurrence.oracle_forward(request, inputs))


def named_results(case: Case, result: Any) -> Values:
    """What an op returned, by name; absent results left out."""
    if case.family == "gate":
        return {"log_decay": result}
    if not isinstance(result, tuple):
        return {"gc" if case.op == "kda_chunk_gate" else "o": result}
    if case.family == "commit":
        return {"final_state": result[0]} | ({} if result[1] is None else {"conv_state": result[1]})
    named: Values = result._asdict()  # type: ignore[attr-defined]
    named.pop("saved", None)
    named |= zip(written_arguments(case), named.pop("written", ()), strict=False)
    return {k: v for k, v in named.items() if v is not None}


def written_arguments(case: Case) -> tuple[str, ...]:
    """Arguments that the call writes beside ``out`` and its pool, in the order of the op's arrays."""
    given = [name for name in OPS[case.op].arrays if case.gives(name)]
    use = case.pool_use
    written = OPS[case.op].written_of(given, use is not None and use.inplace)
    return tuple([name for name in written if name not in ("out", "initial_state", "write_pool")])


def weights(case: Case) -> Weights:
    """Weights of the loss, partly aligned with the results so that sums over tokens do not cancel to nothing."""
    content = _content(case)
    rng = np.random.default_rng(case.seed + 2)
    results = expected(content)
    o = results["log_decay" if case.family == "gate" else "o"]
    dtype = "float32" if case.family == "gate" and case.dtype != "float64" else case.dtype
    state = results.get("final_state")
    return Weights(
        rounded(_aligned(o, rng), dtype),
        None if state is None else rounded(_aligned(state, rng), request_of(content).state_dtype),
    )


def _aligned(x: Any, rng: Any) -> Any:
    size = float(np.sqrt(np.mean(x * x))) or 1.0
    return x / size + 0.5 * rng.standard_normal(x.shape)


@functools.lru_cache(maxsize=64)
def _expected_gradients(case: Case) -> Values:
    from kdacore.oracle import gate, recurrence

    request, inputs = exact_call(case)
    w = weights(case)
    if case.family == "gate":
        grads: Any = gate.oracle_gate_backward(request, inputs, w.o)
    else:
        grads = recurrence.oracle_backward(request, inputs, OutputGrads(w.o, w.final_state))
    return {name: x for name, x in grads._asdict().items() if x is not None}
