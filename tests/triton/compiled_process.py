"""Run Python in a process whose kernels are compiled; the tests' own process interprets them without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's, without the interpreter, finding the packages of this checkout."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "backends" / "triton"), env.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **more}


def run_python(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A Python process there, with ``more`` in its environment; it may fail."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True)
