"""Progress where standard error is no terminal: a line now and then."""

from __future__ import annotations

import pytest

from kdacore import progress


def test_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Bar("tune", 40) as bar:
        for done in range(4):
            bar.begin(f"call {done}")
            now[0] += 11.0
            progress.within(0.5)
            bar.advance(f"{done} served")
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 40" in line]
    assert lines == ["call 2: 2 of 40 1 served, 33 s"]


def test_no_lines_of_a_bar_that_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Bar("tune", 2, show=False) as bar:
        now[0] += 99.0
        bar.advance()
    assert capsys.readouterr().err == ""
