"""Context parallelism: rows whose tokens are split over ranks, each of which computes its slice."""

from __future__ import annotations

from typing import Any

from kdacore.arrays import adapter_of
from kdacore.errors import ContractError
from kdacore.ops import OpDef


def call(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object) -> Any:
    """Run one public call with ``cp=``."""
    adapter = adapter_of(arrays[0])
    cp = options[opdef.options.index("cp")]
    if adapter is not None and adapter.kind == "jax":
        from kdacore.parallel import jax_ranks

        return jax_ranks.call(opdef, adapter.unwrapped(opdef.inputs(*arrays)), options, cp, backend)
    raise ContractError(opdef.name, "cp", type(cp).__name__, "None: for these arrays it is reserved")
