"""The backend as data, and the hook kdacore finds it by. NumPy is imported by the first call, not here."""

from __future__ import annotations

from typing import Any

from kdacore import verifiers
from kdacore.hookspecs import hookimpl
from kdacore.types import Backend, InputGrads, OpImpl, OutputGrads, Outputs, Request

SERVES = frozenset({"final_state", "grouped_value_heads", "initial_state", "state_v_first"})
"""What a call may use beyond q, k, v, g and beta. Every other option, today's and tomorrow's, is
declined by kdacore for this backend: packed sequences, gates computed in the call, checkpoints, pools."""
VERIFIERS = (verifiers.dtypes("float32", "float64"),)
"""What the list above cannot say: NumPy has no bfloat16, and this example does not widen."""


def _forward(request: Request, inputs: Any) -> Outputs:
    from kdacore_example.scan import forward

    return forward(request, inputs)


def _backward(request: Request, inputs: Any, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    from kdacore_example.adjoint import backward

    return backward(request, inputs, grads)


def _seconds(request: Request) -> float:
    """What a call takes, for automatic choice. Measured on one core: 80 us a token, 2.5 ns an element of its states."""
    elements = request.B * request.HV * request.K * request.V
    return request.T * (8e-5 + 2.5e-9 * elements)


def make_backend() -> Backend:
    """The backend named ``example``."""
    everywhere = frozenset({"*"})  # portable code: verified on one machine is verified on all
    return Backend(
        name="example",
        version="0.1.0",
        kinds=("numpy",),
        device_types=("cpu",),
        ops={
            "chunk_kda": OpImpl(
                forward=_forward,
                backward=_backward,
                serves=SERVES,
                verifiers=VERIFIERS,
                cost=_seconds,
                verified_archs=everywhere,
            ),
            "fused_recurrent_kda": OpImpl(
                forward=_forward,
                serves=SERVES | {"out"},
                verifiers=VERIFIERS,
                cost=_seconds,
                verified_archs=everywhere,
            ),
        },
        summary="the recurrence in NumPy, as an example of a plugin",
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """What kdacore calls to find the backends of this plugin."""
    return [make_backend()]
