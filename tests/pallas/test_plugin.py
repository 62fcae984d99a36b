"""The plugin's declarations import nothing else of the package, and every function they name
exists."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kdacore_pallas
from kdacore_pallas import make_backends


def test_declaring_imports_no_other_module() -> None:
    code = (
        "import sys, kdacore_pallas as p; p.make_backends();"
        "print(sorted(m for m in sys.modules if m.startswith(('kdacore_pallas', 'jax', 'torch'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kdacore_pallas']"


def test_every_declared_function_exists() -> None:
    from kdacore_pallas.tpu import entry_points as tpu
    from kdacore_pallas.tpu import verifiers as tpu_verifiers
    from kdacore_pallas.xla import entry_points as xla

    modules: dict[str, tuple[Any, Any]] = {"xla": (xla, kdacore_pallas), "pallas": (tpu, tpu_verifiers)}
    for backend in make_backends():
        entry_points, verifiers = modules[backend.name]
        for op in backend.ops.values():
            declared: list[tuple[Any, Callable[..., Any] | None]] = [
                (entry_points, op.forward),
                (entry_points, op.backward),
                *((verifiers, verifier) for verifier in op.verifiers),
            ]
            for module, function in declared:
                assert function is None or callable(getattr(module, function.__name__))
