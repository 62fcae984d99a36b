"""The conformance suite's cases of the fused decode ops, and random calls of them, whose kernels the CPU emulates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

import emulated_backend
import pytest
from emulated_backend import NAME, run_emulated
from jax_emulation import Device
from test_jax_conformance import run_all

from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.random_cases import random_case
from kdacore.testing.serving import judge
from kdacore.testing.suite import run_case
from kdacore.types import ArrayKind

OPS = ("fused_decode_kda", "fused_decode_gated_delta_rule")


@pytest.fixture
def registered() -> Iterator[None]:
    with emulated_backend.registered(*OPS):
        yield


def cases(op: str, kind: ArrayKind) -> list[Case]:
    """The op's cases, of heads that there are kernels for; not those of compilers."""
    planned = matrix.plan(NAME, device="cpu", kinds=(kind,)).cases
    eager = [c for c in planned if c.op == op and c.mode in ("eager", "jit")]
    wide = [dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=64, V=64)) for c in eager]
    return [c for c in wide if not judge(c)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS)
def test_torch(op: str, registered: None, emulated: list[str]) -> None:
    run_emulated(cases(op, "torch"), emulated, "decode")


def jax_cases() -> list[Case]:
    found = [case for op in OPS for case in cases(op, "jax")]
    assert {c.mode for c in found} == {"eager", "jit"}
    return found


def test_some_cases_from_jax(from_jax: Device) -> None:
    """One of candidates and their windows, one by records, and one that is traced."""
    found = jax_cases()
    by_records = [c for c in found if c.pool_use is not None and c.pool_use.records]
    windows = next(c for c in found if c.conv_windows and c not in by_records)
    traced = next(c for c in found if c.mode == "jit" and c.op != windows.op)
    run_all([windows, by_records[0], traced], from_jax)


def test_wide_heads_from_jax(from_jax: Device) -> None:
    """By records and by states, by the kernel for several tokens."""
    of_kda = [c for c in jax_cases() if c.op == OPS[0] and c.mode == "eager"]
    by_records = next(c for c in of_kda if c.pool_use is not None and c.pool_use.records)
    by_states = next(c for c in of_kda if c.conv_windows and c != by_records)
    for case in (by_records, by_states):
        wide = dataclasses.replace(case.shape, HV=case.shape.H, K=128, V=128)
        narrow = dict.fromkeys(("dtype", "gate_dtype", "beta_dtype"), "bfloat16")
        run_all([dataclasses.replace(case, shape=wide, **narrow)], from_jax)
        assert [x.kernel.entry for x in from_jax.launched] == ["decode_tokens"], case.id


@pytest.mark.exhaustive
def test_every_case_from_jax(from_jax: Device) -> None:
    run_all(jax_cases(), from_jax)


def run_random(seeds: Iterable[int], launched: list[str]) -> None:
    """Each call is right, declined, or one that must be refused; most are served, and each of those by the kernel."""
    counts: Counter[str] = Counter()
    problems = []
    for seed in seeds:
        launched.clear()
        result = run_case(random_case(NAME, seed, "cpu", only=("torch",)))
        counts.update((result.status, result.case.op))
        if result.status == "failed":
            problems.append(f"seed {seed}: {result.message}\n{result.case}")
        if result.status == "declined":
            assert not launched
        elif result.case.check != "refusal":
            kernels = [name for name in launched if not name.startswith("decode_windows-")]
            assert kernels, f"seed {seed}: {launched}"
            assert all(name.startswith(("decode-", "decode_head-", "decode_tokens-")) for name in kernels), (
                f"seed {seed}: {kernels}"
            )
    assert not problems, "\n".join(problems)
    assert counts["served"] > 2 * counts["declined"]
    assert all(counts[op] for op in OPS)


def test_some_random_calls(registered: None, emulated: list[str]) -> None:
    run_random(range(15), emulated)


@pytest.mark.exhaustive
def test_many_random_calls(registered: None, emulated: list[str]) -> None:
    run_random(range(15, 400), emulated)
