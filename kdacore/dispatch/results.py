"""Holding what a backend returns to the request: a wrong result would otherwise fail far from the backend.

Types are checked at every call. Presence, shape, dtype, array kind and device are checked the first
time a plan runs: they depend only on what the plan was made of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kdacore.arrays import adapter_of
from kdacore.errors import PluginError
from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.types import GateGrads, InputGrads, Request


class Expected(NamedTuple):
    """What one result has to be."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@functools.cache
def typed_forward(backend: str, op: str) -> Callable[..., Any]:
    """A backend's forward that raises PluginError where it does not return what the op returns.

    One function for all plans of a backend and op, as adapters keep compiled programs by it.
    """
    forward, wanted = REGISTRY.get(backend).backend.ops[op].forward, OPS[op].outputs

    def named_tuple(request: Request, inputs: Any) -> Any:
        results = forward(request, inputs)
        if not isinstance(results, wanted):  # type: ignore[arg-type]
            raise _wrong_type(backend, op, results, f"kdacore.types.{wanted.__name__}")  # type: ignore[union-attr]
        return results

    def array(request: Request, inputs: Any) -> Any:
        result = forward(request, inputs)
        if adapter_of(result) is None:
            raise _wrong_type(backend, op, result, "an array")
        return result

    return array if wanted is None else named_tuple


def _wrong_type(backend: str, op: str, got: Any, want: str) -> PluginError:
    return PluginError(f"backend {backend!r}: forward of {op} returned {type(got).__name__}; wanted {want}")


def check_results(plan: Any, inputs: Any, results: Any) -> None:
    """Check the results of a plan's forward.

    Raises:
        PluginError: naming the backend and the result.
    """
    request: Request = plan.request
    expected = {e.name: e for e in expected_results(request, inputs)}
    named = results._asdict() if hasattr(results, "_asdict") else {_SINGLE[request.op]: results}
    for name, x in named.items():
        if name != "saved":
            _check(plan, "forward", name, x, expected.get(name))


def check_gradients(plan: Any, inputs: Any, grads: Any, needed: tuple[bool, ...] | None = None) -> None:
    """Check what a plan's backward returned: each gradient shaped and typed like its input, None where that is None
    and, if ``needed`` is given, where that says so.

    Raises:
        PluginError: naming the backend and the gradient.
    """
    request: Request = plan.request
    wanted = GateGrads if request.op == "kda_gate" else InputGrads
    if not isinstance(grads, wanted):
        got = type(grads).__name__
        raise PluginError(
            f"backend {plan.backend.name!r}: backward of {request.op} returned {got}; "
            f"wanted kdacore.types.{wanted.__name__}"
        )
    for i, (name, grad) in enumerate(zip(grads._fields, grads, strict=True)):
        x = getattr(inputs, name)
        spec = None if x is None or not (needed is None or needed[i]) else request.spec(name)
        expected = None if spec is None else Expected(name, spec.shape, (spec.dtype,))
        _check(plan, "backward", f"gradient of {name}", grad, expected)


def _check(plan: Any, function: str, name: str, x: Any, expected: Expected | None) -> None:
    problem = _problem(plan.request, x, expected)
    if problem:
        raise PluginError(
            f"backend {plan.backend.name!r}: {function} of {plan.request.op}: {name}: {problem}"
        )


def _problem(request: Request, x: Any, expected: Expected | None) -> str:
    """What is wrong with one result; empty when nothing is."""
    if expected is None:
        return "" if x is None else "returned, but the call did not ask for it"
    if x is None:
        return "the call asks for it, and it is None"
    adapter = adapter_of(x)
    if adapter is None or adapter.kind != request.kind:
        return f"got {type(x).__module__}.{type(x).__qualname__}; wanted a {request.kind} array"
    spec = adapter.spec(x)
    if spec.shape != expected.shape:
        return f"got shape {list(spec.shape)}; wanted {list(expected.shape)}"
    if spec.dtype not in expected.dtypes:
        return f"got dtype {spec.dtype}; wanted {' or '.join(expected.dtypes)}"
    # JAX may spread a result over several devices, of which one is compared.
    if adapter.placed(x) and request.kind != "jax" and adapter.device(x) != request.device:
        return f"got an array on {adapter.device(x)}; wanted one on {request.device}"
    return ""


# --- what each op returns -----------------------------------------------------------------------------------------

_SINGLE = {"kda_gate": "log decay", "kda_chunk_gate": "gc", "kda_chunk_output": "o"}
"""Names of the results of ops that return one array."""


def expected_results(request: Request, inputs: Any) -> Iterator[Expected]:
    """Every result that a forward owes for a request, in the order of the op's outputs."""
    r, single = request, ("float64",) if request.dtype == "float64" else ("float32",)
    # Intermediates of the stages carry the inputs' dtype, or float32 where a backend keeps more.
    middle = tuple(dict.fromkeys((r.dtype, *single)))
    whole = (r.B, r.T, r.HV)
    if r.op == "kda_gate":
        yield Expected("log decay", r.spec("g").shape, single)
    elif r.op == "kda_chunk_gate":
        yield Expected("gc", (*whole, r.K), single)
    elif r.op == "kda_chunk_intra":
        yield Expected("Aqk", (*whole, r.chunk_size), middle)
        yield Expected("Akk", (*whole, r.chunk_size), middle)
    elif r.op == "kda_recompute_w_u":
        yield Expected("w", (*whole, r.K), middle)
        yield Expected("u", (*whole, r.V), middle)
        yield Expected("kg", (*whole, r.K), middle)
        if r.has("q"):
            yield Expected("qg", (*whole, r.K), middle)
    elif r.op == "delta_rule_chunk_state":
        yield Expected("h", (r.B, r.num_chunks, r.HV, r.K, r.V), middle)
        yield Expected("v_new", (*whole, r.V), middle)
        yield Expected("final_state", r.state_shape, (r.state_dtype,))
    elif r.op == "kda_chunk_output":
        yield Expected("o", (*whole, r.V), (r.spec("v_new").dtype,))
    else:
        yield Expected("o", (*whole, r.V), (r.dtype,))
        if r.output_final_state:
            shape = r.spec(r.written_pool).shape if r.inplace_state else r.state_shape
            yield Expected("final_state", shape, (r.state_dtype,))
        if r.checkpoint_every:
            yield Expected("checkpoints", r.checkpoint_shape, (r.state_dtype,))
