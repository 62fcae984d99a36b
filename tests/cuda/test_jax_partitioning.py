"""Arrays that plain jit splits over eight CPU devices by rows and heads: nothing is gathered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",  # the emulator runs one launch at a time
    "NPROC": "16",
}


def run_script(which: str) -> dict[str, str]:
    script = Path(__file__).parent / "jax_partitioned.py"
    done = subprocess.run(
        [sys.executable, str(script), which], capture_output=True, text=True, env=os.environ | FLAGS
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_rows_and_heads_are_split(heads: int) -> None:
    """Results have the bits of one device alone, except for the gradients of parameters, which are added up over rows:
    one all-reduce. ``flat``: dt_bias with heads and channels in one axis."""
    found = run_script(str(heads))
    serving = dict.fromkeys(("decode", "verify", "commit"), "same")
    assert found == {"training": "same all-reduce=1", "pack": "same", "flat": "same", **serving}


def test_rows_split_along_their_tokens_are_refused() -> None:
    """Gathering them without a word is what ``cp=`` is there to avoid. What is asked for is served: arrays
    made whole first (the gathers are the caller's), results that are split afterwards, an axis of one."""
    found = run_script("tokens")
    gathers = found.pop("whole-first")
    assert gathers.startswith("same all-")
    assert found == {"refused": "q beta", "split-after": "same", "axis-of-one": "same"}


@pytest.mark.exhaustive
def test_the_gated_delta_rule_is_split() -> None:
    """As above: rows and heads with one all-reduce, a pack by heads with none."""
    assert run_script("gated-delta") == {"training": "same all-reduce=1", "pack": "same"}


@pytest.mark.exhaustive
def test_one_head_under_many_value_heads() -> None:
    """Rows are split, and gradients of what they share added up, where the heads' axis has size 1."""
    assert run_script("one-head") == {"training": "same all-reduce=1"}


@pytest.mark.exhaustive
def test_ranks_of_shard_map() -> None:
    """A row over two devices, by the kernels for slices: the maps of all ranks are gathered at once, and so are the
    gradients of states."""
    found = run_script("ranks")
    assert found == {
        "checked": "same all-gather=2",
        "unchecked": "same all-gather=2",
        "kernels": "slice_gradient transition",
    }
