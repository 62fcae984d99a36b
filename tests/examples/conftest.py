"""The examples as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def byte_lm() -> ModuleType:
    return _load("byte_lm")


@pytest.fixture(scope="session")
def serving_loop() -> ModuleType:
    return _load("serving_loop")


@pytest.fixture(scope="session")
def jax_byte_lm() -> ModuleType:
    return _load("jax_byte_lm")


@pytest.fixture(scope="session")
def jax_equinox_layer() -> ModuleType:
    return _load("jax_equinox_layer")
