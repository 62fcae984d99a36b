"""Writes ``kdacore/api.pyi``, what type checkers read in place of ``kdacore/api.py``.

The stub has the signatures of the source with one overload for each array library, so that a checker knows that
torch tensors come out where torch tensors went in. ``python tests/typing/api_stub.py`` writes it anew;
``test_types.py`` fails when it is not what this file makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kdacore import api

STUB = Path(api.__file__).with_suffix(".pyi")
KINDS = ("Tensor", "NDArray[Any]", "jax.Array")
HOST_ARRAYS = ("cu_seqlens_cpu",)
"""Arguments that may be NumPy arrays beside arrays of any library."""
HEADER = '''"""Signatures of kdacore/api.py for type checkers. Written by tests/typing/api_stub.py; do not edit."""

from collections.abc import Callable
from typing import Any, overload

import jax
from numpy.typing import NDArray
from torch import Tensor

from kdacore.types import Selection

'''


def make() -> str:
    """The text of the stub."""
    parts = [HEADER]
    for function in (api.chunk_kda, api.chunk_gated_delta_rule):
        for kind in KINDS:
            parts += [_whole(function, kind, checkpoints) for checkpoints in (False, True)]
    for function in (api.fused_recurrent_kda, api.fused_recurrent_gated_delta_rule):
        parts += [_whole(function, kind, None) for kind in KINDS]
    parts += [_overload(api.kda_gate, kind, kind, {}) for kind in KINDS]
    parts += [_plain(function) for function in (api.explain, api.public_function)]
    return "".join(parts).rstrip() + "\n"


def _whole(function: Callable[..., Any], kind: str, checkpoints: bool | None) -> str:
    results = [kind, f"{kind} | None"] + ([kind] if checkpoints else [])
    changed = {}
    if checkpoints is not None:
        changed["checkpoint_every"] = "int" if checkpoints else "None = ..."
    return _overload(function, kind, f"tuple[{', '.join(results)}]", changed)


def _overload(function: Callable[..., Any], kind: str, result: str, changed: dict[str, str]) -> str:
    lines = ["@overload", f"def {function.__name__}("]
    lines += [f"    {parameter}," for parameter in _parameters(function, kind, changed)]
    return "\n".join([*lines, f") -> {result}: ...", ""])


def _parameters(function: Callable[..., Any], kind: str, changed: dict[str, str]) -> Iterator[str]:
    keywords = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            yield "*"
        if parameter.kind is not parameter.VAR_KEYWORD:
            here = kind
            if name in HOST_ARRAYS and "NDArray" not in kind:
                here = f"{kind} | NDArray[Any]"
            annotation = parameter.annotation.replace("Array", here)
            default = "" if parameter.default is parameter.empty else " = ..."
            yield f"{name}: {changed.get(name, annotation + default)}"


def _plain(function: Callable[..., Any]) -> str:
    return f"def {function.__name__}{inspect.signature(function)}: ...\n".replace("'", "")


if __name__ == "__main__":
    STUB.write_text(make())
