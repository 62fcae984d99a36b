"""The common verifiers: each accepts what it says, and declines the rest with its documented code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kdacore import verifiers
from kdacore.dispatch.candidates import _is_marked
from kdacore.lazy import lazy_function
from kdacore.ops.shapes import LENGTH_AXES
from kdacore.registry import OWN_DISTRIBUTION, REGISTRY
from kdacore.types import Device, Request, TensorSpec, Verifier

BASE = Request(
    op="chunk_kda",
    kind="torch",
    device=Device("cuda", 0, "sm_90"),
    B=1,
    T=128,
    H=2,
    HV=4,
    K=64,
    V=64,
    N=1,
    dtype="bfloat16",
    state_dtype="float32",
    tensors=(("g", TensorSpec((1, 128, 4, 64), "float32")),),
    gate="sigmoid",
    lower_bound=-5.0,
)


@pytest.mark.parametrize(
    ("verifier", "change", "code"),
    [
        (verifiers.dtypes("bfloat16"), {"dtype": "float32"}, "dtype"),
        (verifiers.dtypes("bfloat16", "float32", arrays=("g", "beta")), {"dtype": "float16"}, "dtype"),
        (verifiers.state_dtypes("float32"), {"state_dtype": "bfloat16"}, "state_dtype"),
        (verifiers.head_dims((64, 128), equal=True), {"V": 128}, "head_dim"),
        (verifiers.head_dims(range(16, 257)), {"K": 257}, "head_dim"),
        (verifiers.key_dims((64,)), {"K": 60}, "head_dim"),
        (verifiers.compute_capability(80), {"device": Device("cuda", 0, "sm_75")}, "hardware"),
        (verifiers.compute_capability(80), {"device": Device("rocm", 0, "gfx942")}, "hardware"),
        (verifiers.architectures("sm_90"), {"device": Device("cuda", 0, "sm_100")}, "hardware"),
        (verifiers.grouped_heads(2), {"HV": 8}, "gva"),
        (verifiers.bounded_gates(), {"lower_bound": -6.0}, "gate"),
        (verifiers.bounded_gates(), {"gate": "softplus", "lower_bound": None}, "gate"),
        (verifiers.bounded_gates(), {"gate": "log"}, "gate"),
        (verifiers.lengths(128), {"T": 129}, "too_large"),
        (verifiers.lengths(1024, multiple=64), {"T": 100}, "length"),
    ],
)
def test_it_declines_with_its_code(verifier: Verifier, change: dict[str, Any], code: str) -> None:
    assert verifier(BASE) is None
    reason = verifier(dataclasses.replace(BASE, **change))
    assert reason is not None and reason.code == code and reason.got and reason.want


def test_further_arrays_are_checked_where_they_are_given() -> None:
    reason = verifiers.dtypes("bfloat16", arrays=("g", "beta"))(BASE)
    assert reason is not None and reason.got == "g: float32"


def test_a_promised_log_decay_is_bounded() -> None:
    promised = dataclasses.replace(BASE, gate="log", safe_gate=True)
    assert verifiers.bounded_gates()(promised) is None


# --- verifiers that read no lengths -------------------------------------------------------------------------------


class NoLength(int):
    """A size that cannot be computed with, compared or written."""

    def _refuse(self, *others: Any) -> Any:
        raise AssertionError("read a length")

    __add__ = __mul__ = __floordiv__ = __mod__ = __neg__ = __rmul__ = __radd__ = __bool__ = __str__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __repr__ = __format__ = __index__ = _refuse
    __hash__ = None  # type: ignore[assignment]


HIDDEN = dict.fromkeys(("B", "T", "N", "pool_size", "write_pool_size", "checkpoint_count"), NoLength(3))


def without_lengths(request: Request) -> Request:
    """The same request, whose lengths no code can read without an error."""
    tensors = tuple(
        [
            (name, TensorSpec((NoLength(3),) * LENGTH_AXES[name] + s.shape[LENGTH_AXES[name] :], s.dtype))
            for name, s in request.tensors
        ]
    )
    return dataclasses.replace(request, tensors=tensors, **HIDDEN)


def requests() -> list[Request]:
    found = []
    for op in ("chunk_kda", "fused_recurrent_kda", "kda_gate", "kda_chunk_intra", "kda_chunk_output"):
        for kind, device in (
            ("torch", Device("cuda", 0, "sm_90")),
            ("torch", Device("cpu")),
            ("torch", Device("meta")),
            ("jax", Device("tpu", 0, "v5e")),
            ("jax", Device("cuda", 0, "sm_100")),
        ):
            for change in ({}, {"dtype": "float64"}, {"K": 60}, {"needs_grad": True}, {"traced": True}):
                arrays = {"g": (1, 128, 4, 64), "beta": (1, 128, 4), "cu_seqlens": (3,), "A_log": (4,)}
                for wide in ("", "beta", "A_log"):
                    tensors = tuple(
                        [
                            (name, TensorSpec(shape, "float64" if name == wide else "float32"))
                            for name, shape in arrays.items()
                        ]
                    )
                    plain = dataclasses.replace(BASE, op=op, kind=kind, device=device, tensors=tensors)
                    found.append(dataclasses.replace(plain, **change))
    return found


def test_the_ready_made_say_which_read_lengths() -> None:
    free = (
        verifiers.dtypes("bfloat16"),
        verifiers.state_dtypes("float32"),
        verifiers.head_dims((64,)),
        verifiers.key_dims((64,)),
        verifiers.compute_capability(80),
        verifiers.architectures("sm_90"),
        verifiers.grouped_heads(2),
        verifiers.bounded_gates(),
    )
    for verifier in free:
        assert _is_marked(verifier)
        assert verifier(without_lengths(BASE)) == verifier(BASE)
    assert not _is_marked(verifiers.lengths(64))
    with pytest.raises(AssertionError, match="read a length"):
        verifiers.lengths(64)(without_lengths(BASE))


def test_marked_verifiers_of_our_backends_read_no_lengths() -> None:
    marked = 0
    for registered in REGISTRY.backends().values():
        if registered.distribution != OWN_DISTRIBUTION:
            continue
        for request in requests():
            impl = registered.backend.ops.get(request.op)
            for verifier in () if impl is None else impl.verifiers:
                answer = verifier(request)  # the first call imports it, and with it the mark
                if _is_marked(verifier):
                    marked += 1
                    assert verifier(without_lengths(request)) == answer
    assert marked > 100


def test_the_mark_of_a_lazy_verifier_is_known_after_its_first_call() -> None:
    verifier = lazy_function("kdacore_triton", "verifiers", "dtypes")
    assert not _is_marked(verifier)
    verifier(BASE)
    assert _is_marked(verifier)


def test_a_mark_is_read_of_functions_alone() -> None:
    class Verifier:
        reads_no_lengths = True

        def __call__(self, request: Request) -> None: ...

        def __getattr__(self, name: str) -> Any:
            raise SystemExit(name)

    assert not _is_marked(Verifier())
