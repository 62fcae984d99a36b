"""What a described call becomes: its validated request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kdacore import contract
from kdacore.calls.description import CallDescription, arguments
from kdacore.ops import OPS
from kdacore.types import Request


def request_of(call: CallDescription) -> Request:
    """The validated request of the call.

    Raises:
        ContractError: the call breaks the contract.
    """
    plain = replace(call, requires_grad=False)
    built = request_with(call.op, arguments(plain), needs_grad=call.requires_grad)
    return replace(built, traced=True) if call.traced else built


def request_with(op: str, given: dict[str, Any], *, needs_grad: bool = False) -> Request:
    """The validated request of a call with these keyword arguments, arrays and options alike."""
    opdef = OPS[op]
    inputs = opdef.inputs(*[given.get(name) for name in opdef.arrays])
    values = tuple([given.get(name, default) for name, default in opdef.defaults.items()])
    return contract.build_request(opdef, inputs, values, needs_grad=needs_grad)[0]
