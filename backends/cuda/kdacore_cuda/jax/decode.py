"""The fused decode ops on JAX arrays: the launch of the torch calls, made by XLA's programs through the handler."""

from __future__ import annotations

from kdacore.types import DecodeInputs, Outputs, Request
from kdacore_cuda.forms.decode.launches import launches_of
from kdacore_cuda.forms.recurrent.record_numbers import PARTS
from kdacore_cuda.jax.batching import Arrays, new_name, run_batched
from kdacore_cuda.jax.launch import Form, given_arrays, make_launches

_WRITABLE = ("conv_state", "conv_windows", *PARTS)
"""Arguments that a call writes beside the pool of states."""


def forward(request: Request, inputs: DecodeInputs) -> Outputs:
    """As :func:`kdacore_cuda.forms.decode.forward.forward`, on traced arrays of CUDA devices: what is written in place
    comes back as it then is. Arrays that plain ``jit`` splits over devices are brought together."""
    found = run_batched(_run, request, given_arrays(request, inputs), joins=False)
    final = found.get("final_state") if request.output_final_state else None
    return Outputs(found["o"], final, written=tuple(found[new_name(name)] for name in _written(request)))


def _written(r: Request) -> list[str]:
    return [name for name in _WRITABLE if r.inplace_state and r.has(name)]


def _run(r: Request, arrays: Arrays, groups: int) -> Arrays:
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    in_place = {"final_state": r.written_pool} if r.inplace_state else {}
    in_place |= {new_name(name): name for name in _written(r)}
    if r.output_final_state and not r.inplace_state:
        results["final_state"] = r.state_shape, r.state_dtype
    found = make_launches(r, launches_of(r), arrays, results, in_place)
    return {name: found[name] for name in (*results, *in_place)}
