"""Where machine code waits for the launch ahead of it, and what it does before."""

from __future__ import annotations

import re

_WAIT = re.compile(r"\bACQBULK\b")
# SYNCS.CCTL is a cluster's barriers becoming visible, in shared memory. CCTL.IVALL, which follows the wait for a
# cluster, drops what the L1 holds and reads nothing.
_MEMORY = re.compile(
    r"(?<!SYNCS\.)\b(?!CCTL\.IVALL)(LDG|STG|LDGSTS|UBLKCP|UBLKPF|UBLKRED|UTMALDG|RED|REDG|ATOM|ATOMG|LD|ST|CCTL)\b"
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


_WRITES = re.compile(r"\b(STG|RED|REDG|ATOM|ATOMG|ST|UBLKRED|UTMASTG)\b|\bUBLKCP\.T\.S\b|\bUBLKCP\.G\.S\b")
_JUMP = re.compile(r"\bBRA\S* .*`\((\.L_\w+)\)")
_ALWAYS = re.compile(r"\*/\s+(BRA `|EXIT)")


def waits_before_it_writes(code: str) -> bool:
    """Does every way from the first instruction to one that writes device memory wait? Subroutines, which only
    divide, are passed over."""
    lines = code.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith(".L_")}
    open_ends, seen = [0], set[int]()
    while open_ends:
        i = open_ends.pop()
        if i in seen or i >= len(lines) or _WAIT.search(lines[i]):
            continue
        seen.add(i)
        if _WRITES.search(lines[i]):
            return False
        if jump := _JUMP.search(lines[i]):
            open_ends.append(labels[jump[1]])
        if not _ALWAYS.search(lines[i]):
            open_ends.append(i + 1)
    return any(_WAIT.search(line) for line in lines)
