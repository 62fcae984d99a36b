"""Where machine code waits for the launch ahead of it, and what it does before."""

from __future__ import annotations

import re

_WAIT = re.compile(r"\bACQBULK\b")
# SYNCS.CCTL is a cluster's barriers becoming visible, in shared memory.
_MEMORY = re.compile(
    r"(?<!SYNCS\.)\b(LDG|STG|LDGSTS|UBLKCP|UBLKPF|UBLKRED|UTMALDG|RED|REDG|ATOM|ATOMG|LD|ST|CCTL)\b"
)


def waits_first(code: str) -> bool:
    """Does it wait once, before every instruction that reaches device memory?"""
    lines = code.splitlines()
    waits = [i for i, line in enumerate(lines) if _WAIT.search(line)]
    reached = next((i for i, line in enumerate(lines) if _MEMORY.search(line)), len(lines))
    return len(waits) == 1 and waits[0] < reached


def waits_last(code: str) -> bool:
    """Does it wait once, and then reach no device memory any more before it ends?"""
    lines = code.splitlines()
    waits = [i for i, line in enumerate(lines) if _WAIT.search(line)]
    if len(waits) != 1:
        return False
    end = next(i for i, line in enumerate(lines) if i > waits[0] and re.search(r"\bEXIT\b", line))
    return not any(_MEMORY.search(line) for line in lines[waits[0] : end])
