"""The model of a row on 2 to 64 GPUs, and its table and picture in the guide."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import context_parallel_model as model

pytestmark = pytest.mark.quick


def test_the_table_and_the_picture_are_what_the_script_makes() -> None:
    text = model.PAGE.read_text(encoding="utf-8")
    assert text == model.page(text)
    assert model.PICTURE.read_text(encoding="utf-8") == model.picture()


def test_ranks_are_as_measured() -> None:
    """On H100s, T 262144, 16 heads: 6.67 and, on two, 3.41 ms forward; 23.7 and, on four, 6.30 ms forward and
    backward."""
    for on, alone, ranks, together in (
        (model.FORWARD, 6.668e-3, 2, 3.406e-3),
        (model.TRAINING, 23.73e-3, 4, 6.304e-3),
    ):
        assert abs(model.seconds(on, 262144, 16, 1) / alone - 1) < 0.02
        assert abs(model.seconds(on, 262144, 16, ranks) / together - 1) < 0.02


def test_more_ranks_never_beat_their_number() -> None:
    """But by what a slice's kernels are faster."""
    for on in (model.FORWARD, model.TRAINING):
        for T in model.TOKENS:
            one = model.seconds(on, T, model.HEADS, 1)
            for ranks in model.RANKS:
                assert 0 < one / model.seconds(on, T, model.HEADS, ranks) < 1.05 * ranks
