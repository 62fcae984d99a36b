"""The selection of a call that is asked about rather than made, from caches of its own.

Integrations ask at every call whether kdacore would serve it, so a repeated question has to cost microseconds. Refusals
are kept as well as selections, and nothing is warned of: the call may never run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdacore import contract
from kdacore.arrays import adapter_of, has_dtensor
from kdacore.arrays.base import ADAPTERS
from kdacore.dispatch import recognition, selection
from kdacore.dispatch.plan import PREFERENCE, asked_of, current_policy, is_plain, key_of
from kdacore.dispatch.recognition import Matcher
from kdacore.errors import ContractError, UnsupportedError
from kdacore.registry import REGISTRY

if TYPE_CHECKING:
    from kdacore.arrays.base import Adapter
    from kdacore.ops import OpDef
    from kdacore.types import Selection

_MAX_ANSWERS = 8192
_MAX_RECENT = 8
"""Questions of each op that are recognised by a generated test: a model has few shapes at a time."""


class Answer:
    """What is known of a call: its selection, or the error that making it would raise."""

    __slots__ = ("error", "repeated", "selection")

    def __init__(
        self, selected: Selection | None, error: ContractError | UnsupportedError | None = None
    ) -> None:
        self.selection = selected
        self.error = error
        self.repeated = False


_Recent = tuple[object, Matcher, Answer]
_answers: dict[Any, Answer] = {}
_recent: dict[Adapter, dict[str, tuple[_Recent, ...]]] = {}


def clear() -> None:
    """Forget every answer (the set of backends or the configuration changed)."""
    _answers.clear()
    _recent.clear()


REGISTRY.on_change(clear)


def answer(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object = None) -> Answer:
    """What :func:`kdacore.dispatch.call.call` would do with these arguments.

    Selecting may run the one-time self-check of a kernel, as a call does.

    Raises:
        ConfigError: ``KDACORE_BACKEND`` names no backend.
    """
    first = arrays[0]
    adapter: Adapter | None = ADAPTERS.get(type(first)) or adapter_of(first)
    if adapter is None:
        return _decide(opdef, opdef.inputs(*arrays), options, (backend, None))  # names the argument at fault
    asked = (backend, PREFERENCE.get())
    recent = _recent.get(adapter)
    if recent is not None:
        for of, matches, found in recent.get(opdef.name, ()):
            if of == asked and matches(arrays, options):
                return found
    return _look_up(opdef, adapter, arrays, options, asked)


def _look_up(
    opdef: OpDef, adapter: Adapter, arrays: tuple[Any, ...], options: tuple[Any, ...], asked: Any
) -> Answer:
    inputs = opdef.inputs(*arrays)
    if adapter.immutable:  # JAX
        inputs = adapter.unwrapped(inputs)
    try:
        if opdef.family != "stage" and has_dtensor(arrays):
            from kdacore.dispatch import torch_dtensors  # here: it imports torch

            return _decide(opdef, opdef.inputs(*torch_dtensors.local_arrays(opdef, arrays)), options, asked)
        adapter.refuse(opdef.name, inputs)
    except (ContractError, UnsupportedError) as error:
        return Answer(None, copied(error))
    key = key_of(adapter, opdef, inputs, options, asked)
    if key is None or not all(
        is_plain(x) for x in options
    ):  # validation names the option; a key would keep it
        return _decide(opdef, inputs, options, asked)
    found = _answers.get(key)
    if found is None:
        found = _decide(opdef, inputs, options, asked)
        if len(_answers) >= _MAX_ANSWERS:
            clear()
        _answers[key] = found
    elif not found.repeated:  # a question that came twice is expected again
        found.repeated = True
        _recognise(opdef, adapter, inputs, options, asked, found)
    return found


def _decide(opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Answer:
    try:
        policy = current_policy(opdef, asked[0])
        request, _ = contract.build_request(opdef, inputs, options)
        return Answer(selection.select(asked_of(request, policy), policy, warn=False))
    except (ContractError, UnsupportedError) as error:
        return Answer(None, copied(error))


def copied(error: ContractError | UnsupportedError) -> ContractError | UnsupportedError:
    """The same error without its traceback, which would keep the arrays of the call alive."""
    if isinstance(error, ContractError):
        return ContractError(error.op, error.argument, error.got, error.want)
    return UnsupportedError(error.op, error.message, error.reasons)


def _recognise(
    opdef: OpDef, adapter: Adapter, inputs: Any, options: tuple[Any, ...], asked: Any, found: Answer
) -> None:
    test = recognition.matcher(adapter, inputs, options)
    if test is not None:
        by_op = _recent.setdefault(adapter, {})
        by_op[opdef.name] = ((asked, test, found), *by_op.get(opdef.name, ())[: _MAX_RECENT - 1])
