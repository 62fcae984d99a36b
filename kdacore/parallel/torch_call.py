"""A torch call on several ranks: eager, through autograd, or through the operators for what is no plain tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kdacore import contract
from kdacore.arrays import adapter_of
from kdacore.dispatch.call import call as plain_call
from kdacore.dispatch.plan import PREFERENCE
from kdacore.errors import ContractError
from kdacore.ops import OpDef
from kdacore.parallel.local_call import without_cp
from kdacore.parallel.progress import Turn
from kdacore.parallel.torch_ranks import TorchRanks, ranks_of
from kdacore.parallel.torch_slice import SliceCall, run, slice_call, tell


def call(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object) -> Any:
    """A public call with torch tensors and ``cp=``, outside of a graph."""
    inputs = opdef.inputs(*arrays)
    cp, options = without_cp(opdef, options)
    ranks = ranks_of(opdef.name, cp)
    if ranks.size == 1:
        return plain_call(opdef, arrays, options, backend)
    adapter: Any = adapter_of(inputs.q)
    try:
        by_operators, readable = adapter.admit(opdef, arrays, options)
        if readable is not arrays:
            inputs = opdef.inputs(*readable)
    except Exception as error:
        _tell(opdef.name, inputs, ranks, error)
        raise
    if by_operators or torch.compiler.is_compiling():
        from kdacore.parallel import torch_operators  # here, as for plain calls: most calls need none

        try:
            with torch_operators.subclasses_named(opdef, inputs):
                contract.build_request(opdef, inputs, options)
        except Exception as error:
            _tell(opdef.name, inputs, ranks, error)
            raise
        try:
            return torch_operators.call(opdef, inputs, options, backend, ranks)
        except TypeError as error:
            refusal = torch_operators.refused_subclass(opdef, inputs, error)
            if refusal is None:
                raise
            _tell(opdef.name, inputs, ranks, refusal)  # the operator has not begun
            raise refusal from error

    def make() -> SliceCall:
        return slice_call(opdef, inputs, options, (backend, PREFERENCE.get()), ranks)

    return run(opdef, inputs, ranks, make)


def refused(opdef: OpDef, arrays: tuple[Any, ...], cp: Any, error: ContractError) -> None:
    """Tell the other ranks of a call that no kind of arrays serves, where ``cp`` names any."""
    try:
        ranks = ranks_of(opdef.name, cp)
    except ContractError:
        return
    if ranks.size > 1:
        with Turn(ranks.progress):
            tell(ranks, opdef.name, arrays, ranks.progress.begin(), error)


def _tell(op: str, arrays: Any, ranks: TorchRanks, error: Exception) -> None:
    """Tell the other ranks of an error before an operator runs; not while a graph is traced, which has no others."""
    if not torch.compiler.is_compiling() and not any(isinstance(x, FakeTensor) for x in arrays):
        with Turn(ranks.progress):
            tell(ranks, op, arrays, ranks.progress.begin(), error)
