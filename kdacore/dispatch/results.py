"""Holding what a backend returns to the request: a wrong result would otherwise fail far from the backend.

Types are checked at every call. Presence, shape, dtype, array kind, device and memory are checked the first time a plan
runs, and at the first call of its fast path: they depend only on what the plan was made of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore import plugin_faults
from kdacore.arrays import adapter_of, exact_memory, extent_of, memory_of, outlines
from kdacore.arrays.base import ADAPTERS
from kdacore.errors import PluginError
from kdacore.ops import OPS
from kdacore.registry import OWN_DISTRIBUTION, REGISTRY
from kdacore.types import GateGrads, InputGrads, Outputs, Request

if TYPE_CHECKING:
    from kdacore.arrays.base import Extent, Outline


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

    @plugin_faults.guarded
    def named_tuple(request: Request, inputs: Any) -> Any:
        try:
            results = forward(request, inputs)
        except BaseException as error:
            failed(backend, "forward", request, error)
            raise
        if not isinstance(results, wanted):  # type: ignore[arg-type]
            raise wrong(backend, "forward", request, results, f"kdacore.types.{wanted.__name__}")  # type: ignore[union-attr]
        return results

    @plugin_faults.guarded
    def array(request: Request, inputs: Any) -> Any:
        try:
            result = forward(request, inputs)
        except BaseException as error:
            failed(backend, "forward", request, error)
            raise
        if adapter_of(result) is None:
            raise wrong(backend, "forward", request, result, "an array")
        return result

    return array if wanted is None else named_tuple


def failed(backend: str, function: str, request: Request, error: BaseException) -> None:
    """Say of an error that a function of a backend raised whose it is, and what may have been written.

    What the backends of kdacore itself raise is left as it is: they have written nothing then.

    Raises:
        PluginError: in place of an error that would end the caller's process.
    """
    registered = REGISTRY.backends().get(backend)
    own = registered is not None and registered.distribution == OWN_DISTRIBUTION
    if own and isinstance(error, Exception):
        return
    written = () if own else _written(request)
    plugin_faults.failed(f"backend {backend!r}", f"{function} of {request.op}", written, error)


def _written(request: Request) -> tuple[str, ...]:
    from kdacore.contract.aliasing import written_arguments  # here: first calls load no more than they need

    return written_arguments(request)


def wrong(backend: str, function: str, request: Request, got: Any, want: str) -> PluginError:
    """The error for what a function of a backend returned, ``got``."""
    text = f"returned {type(got).__name__}; wanted {want}"
    return error_of(backend, f"{function} of {request.op} {text}", request)


def error_of(backend: str, text: str, request: Request) -> PluginError:
    """An error of a backend, in words, with the arguments that it may have written."""
    return PluginError(f"backend {backend!r}: {text}{plugin_faults.may_have_written(_written(request))}")


def check_results(
    plan: Any,
    inputs: Any,
    results: Any,
    function: str = "forward",
    given: list[Outline] | None = None,
) -> None:
    """Check the results of a plan's forward.

    Args:
        plan: of the call.
        inputs: its arrays.
        results: what the function returned.
        function: its name, for the error.
        given: outlines of the arrays, where they are known.

    Raises:
        PluginError: naming the backend and the result.
    """
    request: Request = plan.request
    if isinstance(results, Outputs):
        named = {"o": results[0], "final_state": results[1], "checkpoints": results[2]}
        named |= {f"written[{i}]": x for i, x in enumerate(results.written)}
    else:
        named = results._asdict() if hasattr(results, "_asdict") else {_SINGLE[request.op]: results}
    expected = {e.name: e for e in expected_results(request, inputs)}
    for name, x in named.items():
        if x is not None or name in expected:
            _check(plan, function, name, x, expected.get(name))
    written = {"o": "out"} if request.has("out") else {}
    if request.op == "commit_records":
        written |= {"pool": "initial_state", "conv_state": "conv_state"}
    elif request.inplace_state:
        written["final_state"] = request.written_pool
    _check_memory(plan, function, named, inputs, written, given)


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
    named = {}
    specs = dict(request.tensors)
    for i, (name, grad) in enumerate(zip(grads._fields, grads, strict=True)):
        expected = None
        if getattr(inputs, name) is not None and (needed is None or needed[i]):
            spec = specs[name]
            expected = Expected(name, spec.shape, (spec.dtype,))
        if grad is not None or expected is not None:
            named[f"gradient of {name}"] = grad
            _check(plan, "backward", f"gradient of {name}", grad, expected)
    _check_memory(plan, "backward", named, inputs, {})


def _check(plan: Any, function: str, name: str, x: Any, expected: Expected | None) -> None:
    problem = problem_of(plan.request, x, expected)
    if problem:
        raise error_of(plan.backend.name, f"{function} of {plan.request.op}: {name}: {problem}", plan.request)


def _check_memory(
    plan: Any,
    function: str,
    named: dict[str, Any],
    inputs: Any,
    written: dict[str, str],
    given: list[Outline] | None = None,
) -> None:
    if plan.adapter.immutable:
        return
    if problem := memory_problem(named, inputs, written, given):
        raise error_of(plan.backend.name, f"{function} of {plan.request.op}: {problem}", plan.request)


def memory_problem(
    named: dict[str, Any], inputs: Any, written: dict[str, str], given: list[Outline] | None = None
) -> str:
    """A result that has no memory of its own, in words: what a caller does to it would change an input, another result,
    or more elements than one. Empty when there is none.

    Args:
        named: results by name.
        inputs: the call's arrays, a named tuple.
        written: names of results that are an argument, which the call writes, to the argument's name.
        given: the arrays' outlines, where they are known.
    """
    if given is None:
        given = outlines(inputs)
    before: list[Outline] = []
    for name, x in named.items():
        extent = extent_of(x)
        if extent is None:
            continue
        argument = written.get(name)
        if argument is not None:
            theirs = getattr(inputs, argument)
            if x is not theirs and memory_of(x) != memory_of(theirs):
                return f"{name}: got other memory than that of {argument!r}, which the call writes"
        elif not extent[2] and exact_memory(x).overlaps_itself():
            return f"{name}: got memory that overlaps itself; wanted memory of its own for each element"
        elif shared := _sharing(x, extent, given):
            return f"{name}: got memory of the argument {shared!r}; wanted memory of its own"
        elif shared := _sharing(x, extent, before):
            return f"{name}: got memory of the {shared}; wanted memory of its own"
        before.append((name, x, extent))
    return ""


def _sharing(x: Any, extent: Extent, others: list[Outline]) -> str:
    """The name of the first of some arrays that shares a byte with one; empty when none does."""
    first, end, _ = extent
    for name, y, (start, stop, _) in others:
        if start < end and first < stop and exact_memory(x).overlaps(exact_memory(y)):
            return name
    return ""


def problem_of(request: Request, x: Any, expected: Expected | None) -> str:
    """What is wrong with one result; empty when nothing is."""
    if expected is None:
        return "" if x is None else "returned, but the call did not ask for it"
    if x is None:
        return "the call asks for it, and it is None"
    adapter = ADAPTERS.get(type(x)) or adapter_of(x)
    if adapter is None or adapter.kind != request.kind:
        return f"got {type(x).__module__}.{type(x).__qualname__}; wanted a {request.kind} array"
    spec = adapter.spec(x)
    if spec.shape != expected.shape:
        return f"got shape {list(spec.shape)}; wanted {list(expected.shape)}"
    if spec.dtype not in expected.dtypes:
        return f"got dtype {spec.dtype}; wanted {' or '.join(expected.dtypes)}"
    # JAX may spread a result over several devices, of which one is compared.
    if request.kind == "jax" or not adapter.placed(x):
        return ""
    where = adapter.device(x)
    if where is not request.device and where != request.device:
        return f"got an array on {where}; wanted one on {request.device}"
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
    elif r.op == "commit_records":
        yield Expected("pool", r.spec("initial_state").shape, (r.state_dtype,))
        if r.has("conv_state"):
            yield Expected("conv_state", r.spec("conv_state").shape, (r.spec("conv_state").dtype,))
    else:
        yield Expected("o", (*whole, r.V), (r.dtype,))
        if r.output_final_state:
            shape = r.spec(r.written_pool).shape if r.inplace_state else r.state_shape
            yield Expected("final_state", shape, (r.state_dtype,))
        if r.checkpoint_every:
            yield Expected("checkpoints", r.checkpoint_shape, (r.state_dtype,))
        if r.kind == "jax":
            for i, name in enumerate(_written_beside_states(r)):
                yield Expected(f"written[{i}]", r.spec(name).shape, (r.spec(name).dtype,))


def _written_beside_states(request: Request) -> list[str]:
    """Arrays that a call writes beside ``out`` and its pool."""
    given = [name for name, _ in request.tensors]
    written = OPS[request.op].written_of(given, request.inplace_state)
    return [name for name in written if name not in ("out", request.written_pool)]
