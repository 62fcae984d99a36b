"""A public call with ``cp=``: handed to the part for its kind of arrays."""

from __future__ import annotations

import sys
from typing import Any

from kdacore import contract
from kdacore.arrays import adapter_of
from kdacore.errors import ContractError
from kdacore.ops import OpDef
from kdacore.parallel.local_call import without_cp


def call(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object) -> Any:
    """Run one public call on this rank. Returns what :func:`kdacore.dispatch.call.call` returns.

    Raises:
        ContractError: the call breaks the contract, or the ranks' calls are not the same.
        UnsupportedError: no backend, or not the forced one, can serve a slice of it.
    """
    torch = sys.modules.get("torch")
    # Asked first: nothing that a traced graph would have to guard may come before.
    if torch is not None and torch.compiler.is_dynamo_compiling():
        from kdacore.parallel import torch_operators

        return torch_operators.traced_call(opdef, arrays, options, backend, eager_call=call)
    try:
        kind = kind_of(opdef, arrays, options)
    except ContractError as error:
        if torch is not None:
            from kdacore.parallel import torch_call

            torch_call.refused(opdef, arrays, without_cp(opdef, options)[0], error)
        raise
    if kind == "jax":
        from kdacore.parallel import jax_ranks

        return jax_ranks.call(opdef, arrays, options, without_cp(opdef, options)[0], backend)
    from kdacore.parallel import torch_call

    return torch_call.call(opdef, arrays, options, backend)


def kind_of(opdef: OpDef, arrays: Any, options: tuple[Any, ...]) -> str:
    """``"torch"`` or ``"jax"``, by the first array.

    Raises:
        ContractError: it is neither.
    """
    adapter = adapter_of(arrays[0])
    if adapter is None:
        contract.build_request(
            opdef, opdef.inputs(*arrays), without_cp(opdef, options)[1]
        )  # names the argument
        raise ContractError(opdef.name, opdef.arrays[0], type(arrays[0]).__name__, "an array")
    if adapter.kind == "numpy":
        cp = type(without_cp(opdef, options)[0]).__name__
        raise ContractError(
            opdef.name, "cp", f"{cp} with numpy arrays", "None: ranks share rows of torch or jax"
        )
    return adapter.kind
