"""Two cores are shared by two test workers, so array libraries use one thread each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is first imported, and torch may import it in any test: so before all of them.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where there is one; their record from the hardware is in benchmarks/results."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
