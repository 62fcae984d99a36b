"""What a chunk forward keeps for its backward under ``disable_recompute``: when, which arrays, and
where they lie in one buffer.

Kept is what prepare and the walk forward of the scan leave in the backward's workspace. The backward
then launches neither; its gradients have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdacore.lazy import lazy_module
from kdacore.types import Request
from kdacore_cuda.forms.backward.segments_kernels import use_segments
from kdacore_cuda.forms.backward.sizes import WORKSPACE
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.request_encoding import items_for_choice
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import aligned_bytes

if TYPE_CHECKING:
    import torch
else:  # plans are made for JAX too, where torch need not be installed
    torch = lazy_module("torch")

KEPT = ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "h", "last", "rows")
"""Arrays of :data:`kdacore_cuda.forms.backward.sizes.WORKSPACE`; u is v minus the state's
prediction, as the scan leaves it."""


def _keeps(r: Request) -> bool:
    if not (r.disable_recompute and r.needs_grad and r.kind == "torch" and not r.traced):
        return False
    if r.checkpoint_every or r.checkpoint_count or r.pool_size or r.inplace_state or r.has("out"):
        return False
    return bool(r.B * r.T) and not use_segments(items_for_choice(r), multiprocessors_of(r))


keeps = PlanCache(_keeps)
"""``keeps(request)``: whether a call keeps anything. Not with so few heads that the backward is cut
in segments, which makes its states in another order; not where the forward also gives checkpoints,
or works on pools of states. The number of tokens does not matter, as long as there are any."""


def bytes_per_unit() -> int:
    """Bytes kept of a chunk of 64 tokens and one value head."""
    return sum(_bytes(name) for name in KEPT)


def _bytes(name: str) -> int:
    elements, dtype = WORKSPACE[name]
    return elements * ITEM_SIZES[dtype]


def kept_places(units: int) -> dict[str, int]:
    """Offset of each array in the buffer, in bytes, for ``units`` chunk slots times value heads. All
    are multiples of 256."""
    places, at = {}, 0
    for name in KEPT:
        places[name] = at
        at += units * _bytes(name)
    return places


def kept_bytes(units: int) -> int:
    """Bytes of the buffer."""
    return units * bytes_per_unit()


def kept_arrays(buffer: torch.Tensor, units: int) -> dict[str, torch.Tensor]:
    """The buffer's arrays, as views of bytes. A buffer that lies off 16 bytes is copied."""
    buffer = aligned_bytes(buffer)
    return {name: buffer[at : at + units * _bytes(name)] for name, at in kept_places(units).items()}
