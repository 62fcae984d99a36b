"""What processes of the suite and of random calls are started with."""

from __future__ import annotations

import operator
import os

import pytest

from kdacore.testing import processes

NAME = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.mark.parametrize(("given", "want"), [(None, "false"), ("true", "true")])
def test_processes_leave_each_other_gpu_memory(
    monkeypatch: pytest.MonkeyPatch, given: str | None, want: str
) -> None:
    """``kdacore verify --jobs 8`` on a GPU: with three quarters of its memory taken by each, all but one failed."""
    if given is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, given)
    work = processes.Work(run=os.getenv, failed=operator.not_, lost=max)
    assert list(processes.run(work, iter([NAME]), 1)) == [want]
    assert os.environ.get(NAME) == given, "the caller's own environment is left alone"
