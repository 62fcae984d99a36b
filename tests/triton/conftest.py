"""Without a GPU the kernels run in Triton's interpreter. Triton reads the variable when it is first imported."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

GPU = torch.cuda.is_available()


def _patch_the_language_once_a_launch() -> None:
    """The interpreter puts functions of its own in the place of Triton's when a launch begins, again at every call
    inside of it, and takes them away when the launch ends. The calls inside find nothing left to replace, and their
    search takes 40 % of the interpreter's time: it is left out where this launch has already looked."""
    import triton.language as tl
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[int]] | None = None

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal patched
        patched = set()
        try:
            return launch(self, *args, **options)
        finally:
            patched = None

    def patch_once(fn: Any) -> Any:
        languages = frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)
        if patched is not None:
            if languages in patched:
                return None  # used by the launch's own call alone, which is the first
            patched.add(languages)
        return patch(fn)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patch_once


if not GPU:
    _patch_the_language_once_a_launch()


def pytest_configure(config: pytest.Config) -> None:
    """Triton 3.6's interpreter makes loop bounds of one-element arrays, which NumPy 2 deprecates."""
    config.addinivalue_line(
        "filterwarnings",
        r"ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton\.runtime\.interpreter",
    )


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run here."""
    return "cuda" if GPU else "cpu"
