"""Without a GPU the kernels run in Triton's interpreter. Triton reads the variable when it is first imported."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

GPU = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Triton 3.6's interpreter makes loop bounds of one-element arrays, which NumPy 2 deprecates."""
    config.addinivalue_line(
        "filterwarnings",
        r"ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton\.runtime\.interpreter",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need one."""
    if not GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run here."""
    return "cuda" if GPU else "cpu"
