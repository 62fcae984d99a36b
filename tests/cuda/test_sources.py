"""The kernels' sources: few conditional directives, headers that need nothing of the file that includes them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import emulator
import pytest

from kdacore_cuda.architectures import PACKAGED_ARCHS
from kdacore_cuda.build.kernel_source import CSRC, KernelSource, gather_headers
from kdacore_cuda.forms.packaged_kernels import packaged_kernels

MOST_CONDITIONS, MOST_LINES = 20, 50
"""Of all sources together: ``#if``, ``#ifdef``, ``#ifndef`` and ``#elif``, and lines with one of these, ``#else`` or
``#endif``. Roles and forms of a kernel are types, template parameters and ``if constexpr``."""

_DIRECTIVE = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b", re.MULTILINE)
_LARGEST_FORM = 4
"""Macros of larger values are sizes."""


def _directives(text: str) -> list[str]:
    return _DIRECTIVE.findall(text)


@pytest.mark.quick
def test_directives_are_found() -> None:
    text = '#if A\n  # ifdef B\n#elif C\n#else\n#endif // #if\n#include "if"\n#define X\n#pragma once\n'
    assert _directives(text) == ["if", "ifdef", "elif", "else", "endif"]


@pytest.mark.quick
def test_conditional_directives_are_few() -> None:
    files = [path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh")]
    found = [name for path in files for name in _directives(path.read_text())]
    assert len(files) > 100
    assert sum(name not in ("else", "endif") for name in found) <= MOST_CONDITIONS
    assert len(found) <= MOST_LINES


def _form(kernel: KernelSource) -> frozenset[tuple[str, int]]:
    """The macros that choose a form of a kernel."""
    return frozenset((name, value) for name, value in kernel.macros.items() if value <= _LARGEST_FORM)


@cache
def _forms() -> dict[str, list[KernelSource]]:
    """Source file -> a kernel of each form that it has."""
    found: dict[tuple[str, frozenset[tuple[str, int]]], KernelSource] = {}
    for arch in PACKAGED_ARCHS:
        for kernel in packaged_kernels(arch):
            found.setdefault((kernel.path, _form(kernel)), kernel)
    return {path: [kernel for key, kernel in found.items() if key[0] == path] for path, _ in found}


_COVERED: set[tuple[str, str, int]] = set()
"""Header, macro and its value."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", _forms())
def test_headers_compile_alone(path: str, tmp_path: Path) -> None:
    """Each header that a kernel includes, with each value of each macro that it or what it includes mentions: no name
    is missing that only another file defines. What the kernel of another file has covered is not compiled again."""
    problems = {}
    text = (CSRC / path).read_text()
    headers = gather_headers(text)
    for kernel in _forms()[path]:
        flags = [f"-D{name}={value}" for name, value in (kernel.macros | {"EVERY_LANE": 0}).items()]
        for header in emulator.headers_used(text, headers, flags, tmp_path):
            if header in emulator.INSTRUCTIONS:
                continue
            mentioned = headers[header] + "".join(gather_headers(headers[header]).values())
            covered = {(header, *macro) for macro in _form(kernel) if macro[0] in mentioned} | {
                (header, "", 0)
            }
            if not covered <= _COVERED:
                _COVERED.update(covered)
                problems[header] = problems.get(header, "") + emulator.problems_of(header, flags, tmp_path)
    assert {header: said for header, said in problems.items() if said} == {}


def test_a_header_that_needs_its_includer_is_found(tmp_path: Path) -> None:
    text = '#include "first.cuh"\n#include "second.cuh"\n'
    headers = {"first.cuh": "constexpr int FIRST = 1;\n", "second.cuh": "constexpr int SECOND = FIRST + 1;\n"}
    assert emulator.headers_used(text, headers, [], tmp_path) == list(headers)
    assert emulator.problems_of("first.cuh", [], tmp_path) == ""
    assert "FIRST" in emulator.problems_of("second.cuh", [], tmp_path)
