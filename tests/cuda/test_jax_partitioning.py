"""Arrays that plain jit splits over eight CPU devices by rows and heads: nothing is gathered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",  # the emulator runs one launch at a time
    "NPROC": "16",
}


@pytest.mark.parametrize("heads", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_rows_and_heads_are_split(heads: int) -> None:
    """Results have the bits of one device alone. Gradients of parameters are added up over rows: one
    all-reduce. ``flat``: dt_bias with heads and channels in one axis."""
    script = Path(__file__).parent / "jax_partitioned.py"
    done = subprocess.run(
        [sys.executable, str(script), str(heads)], capture_output=True, text=True, env=os.environ | FLAGS
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found == {"training": "same all-reduce=1", "pack": "same", "decode": "same", "flat": "same"}
