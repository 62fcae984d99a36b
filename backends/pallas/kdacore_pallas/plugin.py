"""The JAX backends as data: ``xla`` everywhere, ``pallas`` on TPUs. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.metadata
from functools import partial

from kdacore.hookspecs import hookimpl
from kdacore.lazy import lazy_function
from kdacore.types import Backend, OpImpl, Requirement
from kdacore_pallas import checks, pallas_checks

VERSION = "0.1.0"
MINIMUM_JAX = (0, 10)
VERIFIED = frozenset({""})
"""CPUs, where the conformance suite has run in full. On an H200 six of 501 tests have not ended, so a GPU counts as
compiled only until they have (docs/lab/pallas.md)."""


def _probe_jax() -> str | None:
    """Is a jax recent enough installed? Read from its metadata, so that nothing is imported."""
    try:
        found = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return "jax is not installed"
    if tuple(int(p) for p in found.split(".")[:2]) < MINIMUM_JAX:
        return f"jax {found} is older than {'.'.join(map(str, MINIMUM_JAX))}"
    return None


JAX = Requirement("jax", _probe_jax, "pip install 'kdacore[pallas]'")


_lazy = partial(lazy_function, "kdacore_pallas")

WHOLE = frozenset(
    {
        "beta_sigmoid",
        "final_state",
        "gate.bounded",
        "gate.unbounded",
        "grouped_value_heads",
        "initial_state",
        "neg_eigval",
        "packed",
        "qk_l2norm",
        "state_v_first",
    }
)
"""Features of the chunked and the recurrent ops that are served beyond the plain call."""
POOL = frozenset({"accepted_tokens", "inplace_state", "out", "read_only_state", "state_pool"})
"""Those of the recurrent ops alone."""
GATES = frozenset({"gate.bounded", "gate.unbounded"})
STAGE = frozenset({"grouped_value_heads", "packed"})


def _xla_op(forward: str, backward: str | None, serves: frozenset[str], compiles: bool = False) -> OpImpl:
    module = "calls"
    return OpImpl(
        forward=_lazy(module, forward),
        backward=None if backward is None else _lazy(module, backward),
        serves=serves,
        verifiers=(checks.no_float64, checks.host_arrays_on_cpu, checks.not_captured),
        verified_archs=VERIFIED,
        compiles=compiles,
    )


def make_xla() -> Backend:
    """Plain JAX: every op, any platform, traceable; NumPy and torch-CPU arrays when asked for by name."""
    chunk = _xla_op("chunk_forward", "chunk_backward", WHOLE | {"checkpoints"}, compiles=True)
    recurrent = _xla_op("recurrent_forward", "recurrent_backward", WHOLE | POOL)
    return Backend(
        name="xla",
        version=VERSION,
        kinds=("jax", "numpy", "torch"),
        auto_kinds=("jax",),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
            "kda_gate": _xla_op("gate_forward", "gate_backward", GATES),
            "kda_chunk_gate": _xla_op("chunk_gate", None, GATES | {"packed"}),
            "kda_chunk_intra": _xla_op("chunk_intra", None, STAGE),
            "kda_recompute_w_u": _xla_op("recompute_w_u", None, STAGE | {"q"}),
            "delta_rule_chunk_state": _xla_op(
                "chunk_state", None, frozenset({"initial_state", "packed", "state_v_first"})
            ),
            "kda_chunk_output": _xla_op("chunk_output", None, STAGE),
        },
        summary="plain JAX on any platform; float32 arithmetic; jit, grad, vmap, shard_map",
        requirements=(JAX,),
        rank=10,
        traceable=True,
    )


def make_pallas() -> Backend:
    """TPU kernels: chunk forward and backward, decode over a state pool."""
    module = "pallas_calls"
    chunk = OpImpl(
        forward=_lazy(module, "chunk_forward"),
        backward=_lazy(module, "chunk_backward"),
        serves=WHOLE,
        verifiers=pallas_checks.CHUNK_CHECKS,
    )
    recurrent = OpImpl(
        forward=_lazy(module, "recurrent_forward"),
        backward=_lazy(module, "recurrent_backward"),
        serves=WHOLE | POOL - {"out"},
        verifiers=pallas_checks.DECODE_CHECKS,
    )
    return Backend(
        name="pallas",
        version=VERSION,
        kinds=("jax",),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
        },
        summary="Pallas TPU kernels (compiled by the TPU compiler, never yet run on a TPU)",
        requirements=(JAX,),
        rank=20,
        device_types=("*",) if pallas_checks.interpreted() else ("tpu",),
        traceable=True,
    )


def make_backends() -> list[Backend]:
    """The backends of this plugin."""
    return [make_xla(), make_pallas()]


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds these backends by."""
    return make_backends()
