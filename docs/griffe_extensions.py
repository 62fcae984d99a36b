"""For the API pages: docstrings without roles such as ``:func:`chunk_kda```, and one signature of each function."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Names are shown as plain code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)


class OneSignature(griffe.Extension):
    """Functions with overloads, one for each array library and result, are shown with the first: that of torch.

    The implementation's own signature has parameters besides that catch wrong calls.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for module in _modules(pkg):
            for function in module.functions.values():
                if not function.is_alias and function.overloads:
                    first, own = function.overloads[0], function.parameters
                    for parameter in first.parameters:
                        if str(parameter.annotation) == "None":  # given in another overload
                            parameter.annotation = own[parameter.name].annotation
                    function.parameters, function.returns = first.parameters, first.returns
                    function.overloads = None


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [m for m in module.modules.values() if not m.is_alias]
    return [module, *[found for m in inner for found in _modules(m)]]
