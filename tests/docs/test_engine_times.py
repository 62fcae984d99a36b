"""The table and the picture of steps inside engines are what the record gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import engine_times  # noqa: E402


def test_the_page_is_what_the_script_would_write() -> None:
    command = [sys.executable, "-m", "benchmarks.engine_times", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("kernel", "counted"),
    [
        ("fused_recurrent_kda_packed_decode_kernel", True),
        ("_causal_conv1d_update_kernel", True),
        ("layer_norm_gated_fwd_kernel", True),
        ("_gather_initial_states_kernel", True),
        ("void (anonymous namespace)::kda_decode_fusion_many_heads_kernel<true, true, 24>", True),
        ("decode_head", True),
        ("chunk_forward", True),
        ("walk_records_beside", True),
        ("nvjet_sm90_tst_64x8_64x16_4x2_h_bz_TNT", False),
        ("vllm::fused_add_rms_norm_kernel<c10::BFloat16>", False),
        ("cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", False),
    ],
)
def test_what_counts_as_between_the_projections(kernel: str, counted: bool) -> None:
    assert engine_times.between_projections({kernel: 3.0, "others": 1.0}) == (3.0 if counted else 0.0)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ([4.0, 6.0], [2.0, 3.0], "**2.00x**"),
        ([2.0, 3.0], [4.0, 6.0], "**0.50x**"),
        ([2.0, 6.0], [3.0, 5.0], "1.00x, ranges overlap"),
    ],
)
def test_a_ratio_says_whether_ranges_overlap(theirs: list[float], ours: list[float], said: str) -> None:
    assert engine_times._faster(theirs, ours) == said
