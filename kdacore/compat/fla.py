"""flash-linear-attention's functions for KDA and the gated delta rule, computed by kdacore.

Names, positional arguments, defaults and results are those of flash-linear-attention 0.6, its former spellings
included::

    from kdacore.compat.fla import chunk_kda  # was: from fla.ops.kda import chunk_kda

What kdacore cannot serve raises, naming the argument; nothing is ignored that would have an effect.
flash-linear-attention itself is not needed. The arguments are described in :mod:`kdacore.compat.fla_arguments`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from kdacore.compat import fla_arguments
from kdacore.compat.call import Call, run

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
]

P = ParamSpec("P")


def computed(translate: Callable[P, Call]) -> Callable[P, Any]:
    """The function that runs the call which ``translate`` makes of its arguments."""

    @functools.wraps(translate)
    def function(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run(translate(*args, **kwargs))

    function.__module__ = __name__
    signature = inspect.signature(translate)
    function.__signature__ = signature.replace(return_annotation=Any)  # type: ignore[attr-defined]
    return function


chunk_kda = computed(fla_arguments.chunk_kda)
chunk_gated_delta_rule = chunk_gdn = computed(fla_arguments.chunk_gated_delta_rule)
fused_recurrent_kda = computed(fla_arguments.fused_recurrent_kda)
fused_recurrent_kda_fwd = computed(fla_arguments.fused_recurrent_kda_fwd)
fused_recurrent_gated_delta_rule = fused_recurrent_gdn = computed(
    fla_arguments.fused_recurrent_gated_delta_rule
)
fused_kda_gate = computed(fla_arguments.fused_kda_gate)
fused_gdn_gate = computed(fla_arguments.fused_gdn_gate)
