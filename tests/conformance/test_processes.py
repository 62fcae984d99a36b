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
    monkeypatch.setenv(NAME, given or "")  # so that the test leaves the variable as it was
    if given is None:
        monkeypatch.delenv(NAME)
    work = processes.Work(run=os.getenv, failed=operator.not_, lost=max)
    assert list(processes.run(work, iter([NAME]), 1)) == [want]
