"""The launches behind the walks of a backward of ``chunk_gated_delta_rule``: grads (every input gradient of each chunk
but that of v, which a walk in reverse has written and grads reads), and sums over chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.backward.workspace import Buffer
from kdacore_cuda.forms.chunk_numbers import chunk_slots
from kdacore_cuda.forms.gated_delta.kernels import (
    grads_kernel,
    sums_kernel,
)
from kdacore_cuda.forms.launches import TOKENS
from kdacore_cuda.gated_delta_variant import Variant
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.request_encoding import type_code
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Clear, Launch, Value

_PARTS = {"dA_part": "A_log", "dbias_part": "dt_bias"}
"""Float32 ``[slots, HV]`` -> the argument whose gradient is the sum."""


class GradientLaunches(NamedTuple):
    """What decides which they are."""

    unwanted: tuple[str, ...]
    """Tokens whose gradients nobody takes; they are written to the buffer ``second``."""
    parts: tuple[str, ...]
    """Those of :data:`_PARTS` whose sums are wanted."""
    sums_to_caller: bool
    """Sums over chunks are left to the caller, who gives the arrays of the parts."""
    packed: bool
    """Parts are in the buffer ``zeroed``, as no kernel writes a pack's unused slots; else in ``workspace``."""

    @classmethod
    def of(cls, r: Request, wanted: InputGrads, sums_to_caller: bool) -> GradientLaunches:
        """For a call, given for each gradient whether it is wanted."""
        parts = tuple([name for name, x in _PARTS.items() if getattr(wanted, x)])
        unwanted = tuple([x for x in TOKENS if not getattr(wanted, x)])
        return cls(unwanted, parts, sums_to_caller, r.packed)

    def numbers(self, r: Request, workspace: Buffer) -> tuple[dict[str, int], dict[str, int]]:
        """The numbers that they take, and the bytes of ``second`` and ``zeroed``. Adds parts to ``workspace``."""
        slots, second, zeroed = chunk_slots(r), Buffer(), Buffer()
        numbers = {}
        if not self.sums_to_caller:
            for name in self.parts:
                numbers[f"{name}_at"] = (zeroed if self.packed else workspace).add(4 * slots * r.HV)
        for x in self.unwanted:
            numbers[f"d{x}_at"] = second.add(_gradient_bytes(r, x))
        numbers |= {
            "grads_blocks": min(slots * r.H, multiprocessors_of(r)),
            "slots": slots,
            "A_type": type_code(r, "A_log"),
            "zeroed_bytes": zeroed.bytes,
        }
        return numbers, {"second": second.bytes, "zeroed": zeroed.bytes}

    def fields(self) -> dict[str, Value]:
        """Where walks and grads write gradients, and what sums are made of."""
        sums: dict[str, Value] = {name: NOTHING for name in _PARTS if name not in self.parts}
        for name in self.parts:
            buffer = "zeroed" if self.packed else "workspace"
            sums[name] = name if self.sums_to_caller else (buffer, f"{name}_at")
        return {f"d{x}": ("second", f"d{x}_at") for x in self.unwanted} | sums

    @property
    def _sums(self) -> bool:
        return bool(self.parts) and not self.sums_to_caller

    def cleared(self) -> list[Clear]:
        """What comes before all other launches."""
        return [Clear("zeroed", "zeroed_bytes")] if self.packed and self._sums else []

    def steps(self, fields: Mapping[str, Value], of: Variant) -> Iterator[Launch]:
        """The launches. ``fields``: those of the walks, :meth:`fields` among them; ``of``: the variant of the
        kernels."""
        yield Launch("grads", grads_kernel(of), "grads_blocks", fields)
        if self._sums:
            of_sums = {name: fields[name] for name in _PARTS}
            if "dA_part" not in self.parts:
                of_sums |= {"d_A": NOTHING, "A_type": NOTHING}
            if "dbias_part" not in self.parts:
                of_sums |= {"d_bias": NOTHING, "bias_type": NOTHING}
            yield Launch("sums", sums_kernel(), "HV", of_sums)


def _gradient_bytes(r: Request, name: str) -> int:
    """Those of the gradient of an array of tokens."""
    heads, width = {"q": (r.H, r.K), "k": (r.H, r.K), "v": (r.HV, r.V)}.get(name, (r.HV, 1))
    return r.B * r.T * heads * width * ITEM_SIZES[r.spec(name).dtype]
