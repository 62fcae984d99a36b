"""Asking which backend would serve a call, quickly enough to ask before every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdacore.dispatch.call import opdef_of
from kdacore.dispatch.selection_queries import answer, copied
from kdacore.errors import UnsupportedError
from kdacore.ops.binding import binder
from kdacore.types import Selection


def selection_of(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Selection:
    """The selection that a call would have, without making the call. A repeated question takes microseconds.

    :func:`kdacore.explain` gathers every backend's reasons and costs anew each time, to be read by a person.
    This function is for code that asks before every call, such as an integration that leaves a call to someone
    else where only the reference backend would serve it. The answer is cached by what a call's own selection is
    cached by: shapes, dtypes, devices, options, whether gradients are wanted, and the preferred backends.

    Nothing runs but the one-time self-check of a kernel, as for a call, and nothing is warned of. Arrays are the
    caller's own; :class:`kdacore.ShapeDtype` is for ``explain``.

    Args:
        op: an op's name, or the public function.
        *args, **kwargs: the call's own arguments.

    Returns:
        The :class:`~kdacore.types.Selection`: ``backend`` will run the call, ``why`` says why, and ``candidates``
        carry the reasons of those that cannot. Costs are there only if there was a choice.

    Raises:
        ContractError, UnsupportedError: as the call would.
        TypeError: a missing or an unknown argument.

    Examples:
        >>> import numpy as np, kdacore
        >>> x, beta = np.zeros((1, 64, 2, 16), np.float32), np.zeros((1, 64, 2), np.float32)
        >>> kdacore.selection_of("chunk_kda", x, x, x, x, beta).backend
        'reference'
    """
    opdef = opdef_of(op)
    arrays, options, backend = binder(opdef)(*args, **kwargs)
    if "cp" in opdef.options and options[opdef.options.index("cp")] is not None:
        from kdacore.parallel.explain import explain  # here: few calls are spread over ranks

        spread = explain(opdef, opdef.inputs(*arrays), options, backend)
        if not spread.backend:
            raise UnsupportedError(opdef.name, spread.why, {c.backend: c.reasons for c in spread.candidates})
        return spread
    found = answer(opdef, arrays, options, backend)
    if found.error is not None:
        raise copied(found.error)
    return found.selection  # type: ignore[return-value]
