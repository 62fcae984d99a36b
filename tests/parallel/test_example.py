"""examples/long_context.py on two processes: the losses of slices are those of the whole row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"


@pytest.mark.exhaustive
def test_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--tokens", "512"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes, 512 tokens" in done.stdout and "one process alone: within" in done.stdout
