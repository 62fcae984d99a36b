"""Running a case's call on the backend it names, through the public functions wherever they can do it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import kdacore
from kdacore.api import public_function
from kdacore.calls import requests
from kdacore.dispatch import selection
from kdacore.dispatch.forms import answered
from kdacore.dispatch.plan import asked_of, current_policy
from kdacore.ops import DIFFERENTIABLE, OPS
from kdacore.registry import REGISTRY
from kdacore.testing.cases import Case
from kdacore.testing.compare import Findings
from kdacore.testing.expected import named_results, written_arguments
from kdacore.types import OutputGrads

Arrays = dict[str, Any]


def forward(case: Case, arrays: Arrays) -> dict[str, Any]:
    """Results by name, absent ones left out.

    Raises:
        UnsupportedError: as the public function does; whatever the backend raises.
    """
    if case.mode == "jit":
        return _jitted(case, arrays)
    if case.mode == "compile":
        return _compiled(case, arrays)
    with _autocast(case), inference_mode(case.mode == "inference"):
        return _plain(case, arrays)


def inference_mode(entered: bool) -> contextlib.AbstractContextManager[Any]:
    """``torch.inference_mode()``, or nothing where it is not ``entered``."""
    if not entered:
        return contextlib.nullcontext()
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.inference_mode()
    return context


def _autocast(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.mode != "autocast":
        return contextlib.nullcontext()
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.autocast(case.device, torch.bfloat16)
    return context


def _plain(case: Case, arrays: Arrays) -> dict[str, Any]:
    given = OPS[case.op].keywords(arrays)
    result = public_function(case.op)(**given, **dict(case.options), backend=case.backend)
    return _named(case, result)


def _named(case: Case, result: Any) -> dict[str, Any]:
    if case.family == "commit":
        whole = result if isinstance(result, tuple) else (result,)
        return dict(zip(("final_state", "conv_state"), whole, strict=False))
    if case.family in ("recurrent", "decode"):
        found = {n: x for n, x in zip(("o", "final_state"), result, strict=False) if x is not None}
        written = [x for part in result[2:] for x in (part if isinstance(part, tuple) else (part,))]
        return found | dict(zip(written_arguments(case), written, strict=bool(written)))
    if case.family == "chunk":
        names = ("o", "final_state", "checkpoints")
        return {n: x for n, x in zip(names, result, strict=False) if x is not None}
    return named_results(case, result)


def _jitted(case: Case, arrays: Arrays) -> dict[str, Any]:
    import jax

    fixed = {n: x for n, x in arrays.items() if not isinstance(x, jax.Array)}
    traced = {n: x for n, x in arrays.items() if n not in fixed}
    run = jax.jit(lambda given: _plain(case, {**given, **fixed}))
    found: dict[str, Any] = run(traced)
    return found


def _compiled(case: Case, arrays: Arrays) -> dict[str, Any]:
    """``aot_eager``: the graph is captured whole and run as it is, no code generator needed."""
    import torch

    torch.compiler.reset()  # each case is a program of its own, not a recompilation of the last one's
    function, given = public_function(case.op), {**dict(case.options), "backend": case.backend}

    def call(arrays: Arrays) -> Any:
        return function(**OPS[case.op].keywords(arrays), **given)

    return _named(case, torch.compile(call, fullgraph=True, backend="aot_eager")(arrays))


@contextlib.contextmanager
def watched(case: Case, findings: Findings) -> Iterator[None]:
    """Every call inside must have run on the case's backend: a test that passed through another proves nothing."""
    with kdacore.record_selections() as ran:
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a form that raises is a finding here
        made = list(ran)
    wrong = sorted({s.backend for s in made} - {case.backend})
    findings.require("ran on the backend", not wrong, f"ran on {', '.join(wrong)}")
    for one in made:
        form = REGISTRY.get(one.backend).backend.ops[one.op].form
        error = None if form is None else answered(form, one.request)[1]
        findings.require("form is a line of text", error is None, f"OpImpl.form: {error!r}")
    findings.require("went through dispatch", bool(ran), "no call was dispatched")


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients(
    case: Case, arrays: Arrays, grads: OutputGrads, *, recompute: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results, and gradients by argument, of ``sum(o * grads.o) + sum(final_state * grads.final_state)``.

    torch goes through autograd and JAX through ``jax.vjp`` where the backend can be traced. NumPy cannot
    differentiate, so there (and with ``recompute``, which hands the backward no residuals, as compiled graphs do)
    the forced backend's own functions are called.
    """
    if is_direct(case, recompute):
        return _direct(case, arrays, grads, recompute)
    return _autograd(case, arrays, grads) if case.kind == "torch" else _vjp(case, arrays, grads)


def is_direct(case: Case, recompute: bool) -> bool:
    """Does :func:`gradients` call the backend's functions itself?"""
    if recompute or case.kind == "numpy":
        return True
    return case.kind == "jax" and case.mode == "eager" and not REGISTRY.get(case.backend).backend.traceable


def _differentiable(case: Case, arrays: Arrays) -> list[str]:
    return [n for n in DIFFERENTIABLE if n in arrays]


def _autograd(case: Case, arrays: Arrays, grads: OutputGrads) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    names = _differentiable(case, arrays)
    given = {n: x.detach().requires_grad_() if n in names else x for n, x in arrays.items()}
    results = forward(case, given)
    first = results["log_decay" if case.family == "gate" else "o"]
    outputs, weights = [first], [grads.o]
    if grads.final_state is not None:
        outputs.append(results["final_state"])
        weights.append(grads.final_state)
    with _autocast(case):
        found = torch.autograd.grad(outputs, [given[n] for n in names], weights)
    return {n: x.detach() for n, x in results.items()}, dict(zip(names, found, strict=True))


def _vjp(case: Case, arrays: Arrays, grads: OutputGrads) -> tuple[dict[str, Any], dict[str, Any]]:
    import jax

    names = _differentiable(case, arrays)

    def call(*given: Any) -> Any:
        results = _plain(case, {**arrays, **dict(zip(names, given, strict=True))})
        first = results["log_decay" if case.family == "gate" else "o"]
        return (first, results.get("final_state")), results

    inputs = tuple(arrays[n] for n in names)
    _, pull, results = jax.vjp(jax.jit(call) if case.mode == "jit" else call, *inputs, has_aux=True)
    return results, dict(zip(names, pull((grads.o, grads.final_state)), strict=True))


def _direct(
    case: Case, arrays: Arrays, grads: OutputGrads, recompute: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    opdef = OPS[case.op]
    inputs = opdef.inputs(*(arrays.get(n) for n in opdef.arrays))
    request = requests.request_with(case.op, {**arrays, **dict(case.options)}, needs_grad=True)
    policy = current_policy(opdef, case.backend)
    request = asked_of(request, policy)
    chosen = selection.select(request, policy)
    impl = REGISTRY.get(chosen.backend).backend.ops[case.op]
    outcome = impl.forward(request, inputs)
    if impl.backward is None:
        raise RuntimeError(f"{case.backend} was selected for a gradient it cannot compute")
    if case.family == "gate":
        found = impl.backward(request, inputs, grads.o)
    else:
        found = impl.backward(request, inputs, () if recompute else outcome.saved, grads)
    named = {n: x for n, x in found._asdict().items() if x is not None}
    return named_results(case, outcome), named
