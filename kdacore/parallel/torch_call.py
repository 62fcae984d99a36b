"""A torch call on several ranks: eager, through autograd, or through the operators for what is no plain tensor."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.arrays import adapter_of
from kdacore.dispatch.call import call as plain_call
from kdacore.dispatch.plan import PREFERENCE
from kdacore.ops import OpDef
from kdacore.parallel.local_call import without_cp
from kdacore.parallel.torch_ranks import ranks_of
from kdacore.parallel.torch_slice import run, slice_call


def call(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object) -> Any:
    """A public call with torch tensors and ``cp=``, outside of a graph."""
    inputs = opdef.inputs(*arrays)
    cp, options = without_cp(opdef, options)
    ranks = ranks_of(opdef.name, cp)
    if ranks.size == 1:
        return plain_call(opdef, arrays, options, backend)
    adapter: Any = adapter_of(inputs.q)
    by_operators, arrays = adapter.admit(opdef, arrays, options)
    inputs = opdef.inputs(*arrays)
    if by_operators or torch.compiler.is_compiling():
        from kdacore.parallel import torch_operators  # here, as for plain calls: most calls need none

        return torch_operators.call(opdef, inputs, options, backend, ranks)
    return run(slice_call(opdef, inputs, options, (backend, PREFERENCE.get()), ranks), inputs)
