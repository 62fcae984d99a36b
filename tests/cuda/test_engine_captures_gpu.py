"""Engines' captures of CUDA graphs on a GPU; ``test_engine_captures.py`` does the same on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import engine_captures
import pytest
from engine_captures import DECODE, PREFILL, CudaGraphs

pytestmark = pytest.mark.gpu

BACKENDS = pytest.mark.parametrize("backend", ["cuda", "triton"])
SIZES = (2304, 640)
_FIRST = """
import sys
sys.path.insert(0, {folder!r})
from engine_captures import *
{call}
"""


@BACKENDS
@pytest.mark.parametrize("op", DECODE)
def test_decoding(op: str, backend: str) -> None:
    engine_captures.decode_by_graphs(op, backend, CudaGraphs())


@BACKENDS
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "piecewise"])
@pytest.mark.parametrize("heads", [(1, 2), (8, 8), (64, 64)], ids=str)
@pytest.mark.parametrize("op", PREFILL)
def test_prompts(op: str, heads: tuple[int, int], whole: bool, backend: str) -> None:
    engine_captures.prompts_by_graphs(op, backend, CudaGraphs(), whole=whole, sizes=SIZES, heads=heads)


@BACKENDS
@pytest.mark.parametrize(("op", "decode"), list(zip(PREFILL, DECODE[:2], strict=True)))
def test_prompts_and_decoding(op: str, decode: str, backend: str) -> None:
    engine_captures.prompts_and_decoding(op, decode, backend, CudaGraphs())


@pytest.mark.parametrize(
    "call",
    [
        *[f"decode_without_a_warm_up({op!r}, 'cuda', CudaGraphs())" for op in DECODE],
        *[
            f"prompts_by_graphs({op!r}, 'cuda', CudaGraphs(), whole=True, sizes={SIZES}, heads={heads}, warm_up=False)"
            for op in PREFILL
            for heads in ((1, 2), (64, 64))
        ],
    ],
)
def test_a_first_launch_inside_a_capture(call: str) -> None:
    """In a process that has launched nothing before: the kernels are loaded while the stream is captured. Those of
    triton have to be compiled before."""
    code = _FIRST.format(folder=str(Path(__file__).parent), call=call)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=300
    )
    assert done.returncode == 0, done.stderr
