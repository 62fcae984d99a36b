"""What is one number in all lanes of a warp has the same bits in all of them (compute-sanitizer's racecheck found
two writes of it that differed)."""

import pytest
from compiled_process import run_python

from kdacore_triton import warp_sum_check

PTX = """
.loc 1 7 3
mul.f32 %f1, %a, %b;
mov.b32 %r1, %f1;
shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1;
mov.b32 %f2, %r2;
{add}
.file 1 "/somewhere/kernel.py"
"""


@pytest.mark.parametrize(
    ("add", "wrong"),
    [
        ("fma.rn.f32 %f3, %a, %b, %f2;", True),
        ("add.f32 %f3, %f1, %f2;", True),
        ("add.f32 %f3, %f2, %f1;", True),
        ("fma.rn.f32 %f4, %a, %b, 0f00000000;\nadd.f32 %f3, %f4, %f2;", False),
        ("add.f32 %f4, %f1, %f1;\nadd.f32 %f3, %f4, %f2;", False),
    ],
)
def test_contracted_sums_are_found(add: str, wrong: bool) -> None:
    assert warp_sum_check.contracted_warp_sums(PTX.format(add=add)) == (["kernel.py:7"] if wrong else [])


SMALL = """
import itertools
import sys
from functools import partial
from kdacore_triton import chunk_backward_aot, recurrent_aot
from kdacore_triton.aot import compile_case, record
from kdacore_triton.chunk_backward import backward
from kdacore_triton.recurrent import forward

found = []
for K, state, v_first in itertools.product((16, 32, 64), ("float32", "bfloat16"), (False, True)):
    call = recurrent_aot._meta_call("sm_90", 5, state, v_first, K)
    found += record(f"recurrent K{K} {state} v_first={v_first}", partial(forward, *call))
for gate in sys.argv[1:]:
    found += record(f"backward {gate}", partial(backward, *chunk_backward_aot._meta_call("sm_90", gate, 16)))
for case in found:
    print(case.name, [p for p in compile_case(case, "sm_90").problems if "lanes" in p])
"""


def problems(*gates: str) -> list[str]:
    """What is found in kernels of few channels, where a lane holds one element of a row."""
    done = run_python("-c", SMALL, *gates)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.endswith("[]")]


@pytest.mark.exhaustive
def test_decode() -> None:
    assert problems() == []


@pytest.mark.exhaustive
def test_gradients() -> None:
    assert problems("bounded", "unbounded", "scalar") == []


ROUNDED = """
import re, sys
import triton
from kdacore_triton import aot

for case in aot.all_cases("sm_90"):
    if case.name in sys.argv[1:]:
        source, options = aot._source(case.call)
        ptx = triton.compile(source, target=aot._target("sm_90"), options=options).asm["ptx"]
        print(case.name, len(re.findall(r"fma\\.rn\\.f32 .*, 0f00000000;", ptx)))
"""


@pytest.mark.exhaustive
def test_only_sums_over_short_rows_round_their_products() -> None:
    """Where lanes hold several numbers of a row it is not needed, and made the forward 8 % slower (6937aca)."""
    cases = [
        "chunk forward bounded K128 bfloat16 C16 in 1024s:chunk_forward_prepare_kernel",
        "chunk forward bounded K32 float32 C16:chunk_forward_prepare_kernel",
    ]
    done = run_python("-c", ROUNDED, *cases)
    assert done.returncode == 0, done.stderr
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert sorted(counts) == sorted(cases)
    assert int(counts[cases[0]]) == 0 < int(counts[cases[1]])
