"""The backend as data, and the hook kdacore finds it by. NumPy is imported by the first call, not here."""

from __future__ import annotations

from typing import Any

from kdacore.hookspecs import hookimpl
from kdacore.types import Backend, InputGrads, OpImpl, OutputGrads, Outputs, Request
from kdacore_example import checks


def _forward(request: Request, inputs: Any) -> Outputs:
    from kdacore_example.scan import forward

    return forward(request, inputs)


def _backward(request: Request, inputs: Any, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    from kdacore_example.adjoint import backward

    return backward(request, inputs, grads)


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
                verifiers=(*checks.COMMON, checks.no_checkpoints),
                verified_archs=everywhere,
            ),
            "fused_recurrent_kda": OpImpl(
                forward=_forward,
                verifiers=(*checks.COMMON, checks.no_pool),
                verified_archs=everywhere,
            ),
        },
        summary="the recurrence in NumPy, as an example of a plugin",
        rank=5,  # above the reference backend, so that auto chooses it where it can serve
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """What kdacore calls to find the backends of this plugin."""
    return [make_backend()]
