"""Makes the helpers beside the tests importable, and adds the option that names a folder of wheels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-wheels", help="folder with the wheels of sglang and vllm")
