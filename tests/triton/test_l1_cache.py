"""How much shared memory a kernel asks for, so that the rest of it is L1 cache."""

import pytest

from kdacore_triton import chunk_backward
from kdacore_triton.l1_cache import carveout_percent

AVAILABLE = 228 * 1024


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "programs"),
    [
        (255, 8, 92 * 1024, 1),  # one program's registers fill the multiprocessor
        (128, 8, 60 * 1024, 2),
        (255, 2, 10 * 1024, 4),
        (250, 2, 10 * 1024, 4),  # registers of a warp come in blocks of 256
        (32, 4, 0, 16),  # more programs than there is room for warps
    ],
)
def test_as_much_as_the_programs_need(registers: int, warps: int, shared: int, programs: int) -> None:
    percent = carveout_percent(registers, warps, shared, AVAILABLE)
    need = programs * (shared + 1024)
    assert need <= percent * AVAILABLE / 100 < need + AVAILABLE / 100


def test_never_more_than_all() -> None:
    assert carveout_percent(16, 1, 48 * 1024, AVAILABLE) == 100


def test_the_kernels_it_was_measured_for_prefer_l1() -> None:
    launchers = (
        chunk_backward._prepare_offset_c64,
        chunk_backward._prepare_offset_c32,
        chunk_backward._grads_offset,
    )
    assert all(launcher.prefer_l1 for launcher in launchers)
    assert not chunk_backward._scan.prefer_l1
