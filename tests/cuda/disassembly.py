"""Machine code as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin."""
    triton = pytest.importorskip("triton", reason="its wheel carries the disassembler")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
