"""What the emulator sees: toy kernels with one mistake each, and the same kernels without."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import emulator
import pytest

from kdacore_cuda.build.kernel_source import gather_headers

pytestmark = pytest.mark.quick

_TOY = """
#include "sm90/bulk_copies.cuh"
{body}
#pragma GCC visibility push(default)
extern "C" void count_banks(bool on) {{ emu::counts_banks = on; }}
extern "C" const char* run(int wrong, float* in, float* out, int threads, unsigned seed) {{
  emu::left_operands_stay = true;
  emu::operands_are_f16 = false;
  return emu::run([&] {{ toy(wrong, in, out); }}, 1, 1, threads, 16384, seed);
}}
"""


class Toy:
    """A kernel ``toy(wrong, in, out)``."""

    def __init__(self, body: str, folder: Path, threads: int) -> None:
        text = _TOY.format(body=body)
        library = emulator.compile_library(text, gather_headers(text), [], folder, "toy")
        self.library = ctypes.CDLL(str(library))
        self.run = self.library.run
        self.run.restype = ctypes.c_char_p
        self.threads = threads

    def count_banks(self, on: bool) -> None:
        self.library.count_banks(on)

    def __call__(self, wrong: int, seed: int = 0) -> tuple[str, list[float]]:
        """What the emulator says, and the results."""
        given, out = _on_a_sector(4096), _on_a_sector(512)
        given[:] = [i % 64 for i in range(4096)]
        message = self.run(wrong, given, out, self.threads, seed)
        return "" if message is None else message.decode(), list(out)


def _on_a_sector(count: int) -> Any:
    """Floats that begin at a multiple of 128 bytes, as device memory does: the emulator complains of copies that split
    a sector of 32 bytes."""
    raw = ctypes.create_string_buffer(4 * count + 128)
    return (ctypes.c_float * count).from_buffer(raw, -ctypes.addressof(raw) % 128)


_PRODUCTS = """
// Ones times ones: 32 rows of the right operand, 128 bytes each, 16 of 64 columns used a product.
void toy(int wrong, float*, float* out) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int thread = thread_index(), warp = thread >> 5;
  const u32 ones = pack_bf16(1.0f, 1.0f), twos = pack_bf16(2.0f, 2.0f);
  const auto fill = [&](u32 value) {
    for (int i = thread; i < 256; i += 128) store_shared(shared + 16 * i, value, value, value, value);
  };
  if (wrong == 1) fence_async_proxy();
  fill(ones);
  if (wrong == 2 ? thread == 0 : wrong != 1 && wrong != 102) fence_async_proxy();
  sync_block();
  if (wrong == 102) {  // right: by a warp that has met the writers
    if (warp == 3) fence_async_proxy();
    sync_block();
  }
  u32 a[4] = {ones, ones, ones, ones}, other[4] = {ones, ones, ones, ones};
  float d[4][4] = {}, e[4][4];
  const u64 b = operand_descriptor(shared, 16, 1024);
  if (wrong == 14 || wrong == 15 || wrong == 101) {
    warpgroup_fence();
    warpgroup_mma<0>(d, a, b, 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    if (wrong == 101) warpgroup_fence();
    for (int i = 0; i < 16; ++i) (&d[0][0])[i] = 0.0f;
    if (wrong == 14) a[1] = pack_bf16(1.0f, 1.5f), warpgroup_fence(), a[1] = ones;
    if (wrong == 15) warpgroup_fence(), d[1][1] = 1.0f;
  }
  if (wrong != 3 && wrong != 14 && wrong != 15) warpgroup_fence();
  warpgroup_mma<0>(d, a, b + (wrong == 4 && warp == 2 ? 2 : 0), 1);
  if (wrong == 5) d[0][0] = 1.0f;
  warpgroup_mma<0>(d, a, b + 2, 1);
  if (wrong != 6) warpgroup_commit();
  warpgroup_mma<0>(e, other, b + 4, 0);
  warpgroup_commit();
  if (wrong == 7) out[thread] = d[0][0];
  if (wrong == 8) d[3][3] = 0.0f;
  if (wrong == 9) a[2] = twos;
  if (wrong == 10 && thread == 5) store_shared(shared, twos);
  if (wrong == 11 && warp == 1) warpgroup_wait<0>();
  if (wrong != 7) {
    warpgroup_wait<1>();
    out[thread] = d[0][0] + d[3][3];
    if (wrong == 12) out[thread] += e[0][0];
  }
  if (wrong != 13) warpgroup_wait<0>();
  out[128 + thread] = e[1][2];
}
"""


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(_PRODUCTS, tmp_path_factory.mktemp("products"), 128)


@pytest.mark.parametrize("wrong", [0, 101, 102])
def test_products_of_a_warpgroup(products: Toy, wrong: int) -> None:
    message, out = products(wrong)
    assert not message
    assert out[:128] == [64.0] * 128 and out[128:256] == [16.0] * 128


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (1, "without fence_async_proxy"),
        (2, "without fence_async_proxy"),
        (3, "without warpgroup_fence"),
        (4, "others in its warpgroup"),
        (5, "accumulators written"),
        (8, "accumulators written"),
        (9, "left operand changed"),
        (10, "right operand changed"),
        (11, "others in its warpgroup"),
        (13, "not waited for"),
        (14, "left operand written since warpgroup_fence"),
        (15, "accumulators written since warpgroup_fence"),
    ],
)
def test_mistakes_with_products(products: Toy, wrong: int, complaint: str) -> None:
    assert complaint in products(wrong)[0]


@pytest.mark.parametrize("wrong", [6, 7, 12])
def test_accumulators_read_early(products: Toy, wrong: int) -> None:
    """Not committed, read before the wait, waited for another group."""
    assert all(math.isnan(x) for x in products(wrong)[1][:128])


_SHARED_PRODUCTS = """
#include "common/swizzle.cuh"
// Both operands in shared memory: row r of the left one has a one in column r % 16, row n of the right one n + k in
// column k.
void toy(int wrong, float*, float* out) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int thread = thread_index(), warp = thread >> 5;
  for (int i = thread; i < 64 * 16; i += 128) {
    const int row = i >> 4, k = i & 15;
    const u32 at = shared + swizzled(row, k >> 3) + 2 * (k & 7);
    store_shared16(at, pack_bf16(k == row % 16 ? 1.0f : 0.0f, 0.0f));
    store_shared16(at + 8192, pack_bf16(float(row + k), 0.0f));
  }
  if (wrong != 1) fence_async_proxy();
  sync_block();
  float d[8][4];
  const u64 a = operand_descriptor(shared, 16, 1024), b = operand_descriptor(shared + 8192, 16, 1024);
  if (wrong != 2) warpgroup_fence();
  warpgroup_mma_shared<0>(d, a + (wrong == 3 && warp == 2 ? 64 : 0), b, 0);
  warpgroup_commit();
  if (wrong == 4 && thread == 40) store_shared(shared + 16 * 128, 0u);
  if (wrong == 5 && thread == 40) store_shared(shared + 8192, 0u);
  warpgroup_wait<0>();
  out[thread] = d[1][2];
}
"""


@pytest.fixture(scope="module")
def shared_products(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(_SHARED_PRODUCTS, tmp_path_factory.mktemp("shared_products"), 128)


def test_products_of_two_operands_in_shared_memory(shared_products: Toy) -> None:
    message, out = shared_products(0)
    assert not message
    rows, columns = [lane // 4 + 8 for lane in range(32)], [8 + 2 * (lane % 4) for lane in range(32)]
    assert out[:128] == [float(r + c) for r, c in zip(rows, columns, strict=True)] * 4


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (1, "without fence_async_proxy"),
        (2, "without warpgroup_fence"),
        (3, "others in its warpgroup"),
        (4, "left operand changed"),
        (5, "right operand changed"),
    ],
)
def test_mistakes_with_operands_in_shared_memory(shared_products: Toy, wrong: int, complaint: str) -> None:
    assert complaint in shared_products(wrong)[0]


_COPIES = """
constexpr u32 BARRIER = 8192, OTHER = 8200;
void toy(int wrong, float* in, float* out) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int thread = thread_index();
  if (thread == 0) {
    barrier_init(shared + BARRIER, 1);
    barrier_init(shared + OTHER, 1);
    if (wrong != 13) fence_barrier_init();
  }
  sync_block();
  // In, read by everybody, in again.
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    if (thread == 0) {
      barrier_expect(shared + BARRIER, 256);
      copy_in(shared, in + 64 * turn, 256, shared + BARRIER);
    }
    if (wrong != 1) barrier_wait(shared + BARRIER, wrong == 2 ? turn ^ 1 : turn);
    sum += load_shared1(shared + 4 * thread);
    if (wrong != 3) sync_block();
  }
  out[thread] = sum;
  // Out, and written again.
  store_shared(shared + 1024 + 4 * thread, __float_as_uint(sum));
  if (wrong != 4) fence_async_proxy();
  sync_block();
  if (thread == 0) {
    copy_out(out + 64, shared + 1024, 256);
    copy_out_commit();
    if (wrong != 5 && wrong != 6) copy_out_wait_read<0>();
  }
  if (wrong != 7) sync_block();
  if (wrong != 6 && thread == 63) store_shared(shared + 1024, 0u);
  if (wrong == 5 && thread == 0) copy_out_wait_read<0>();
  // Sixteen bytes a thread, read by a neighbour.
  copy_async16(shared + 2048 + 16 * thread + (wrong == 14 ? 16 : 0), in + 4 * (thread & 15), true);
  copy_async_commit();
  if (wrong != 8) copy_async_wait<0>();
  if (wrong != 9) sync_block();
  out[128 + thread] = load_shared1(shared + 2048 + 16 * (thread ^ 32));
  sync_block();
  // In place of what was written.
  if (wrong == 10) sync_block();
  if (wrong != 10) fence_async_proxy();
  sync_block();
  if (thread == 0) {
    barrier_expect(shared + OTHER, wrong == 11 ? 512 : 256);
    copy_in(shared + 1024, in, 256, shared + OTHER);
  }
  if (wrong != 12) barrier_wait(shared + OTHER, 0);
  // Told of what went out.
  if (thread == 0) {
    if (wrong != 15) copy_out_wait();
    set_flag((u64)(out + 256), 1);
  }
}
"""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(_COPIES, tmp_path_factory.mktemp("copies"), 64)


@pytest.mark.parametrize("seed", range(4))
def test_copies(copies: Toy, seed: int) -> None:
    message, out = copies(0, seed)
    assert not message
    assert out[:64] == [2.0 * i for i in range(64)] == out[64:128]
    assert out[128:192] == [float(4 * (i & 15)) for i in range(64)]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (1, "overwritten without a"),
        (2, "overwritten without a"),
        (3, "read while a copy into it is on its way"),
        (4, "read by the async proxy without fence_async_proxy"),
        (5, "written while a bulk copy reads it"),
        (6, "overwritten while a bulk copy reads it"),
        (7, "overwritten without a barrier since it was read"),
        (8, "read while a copy into it is on its way"),
        (9, "overwritten without a barrier since it was read"),
        (10, "overwritten by a bulk copy without fence_async_proxy"),
        (11, "deadlock"),
        (13, "a barrier that the async proxy has not heard of"),
        (12, "a bulk copy in that nobody waited for"),
        (14, "a sector split by a copy"),
        (15, "a flag before copies of its warp have arrived"),
    ],
)
def test_mistakes_with_copies(copies: Toy, wrong: int, complaint: str) -> None:
    """Some only show in some orders."""
    assert any(complaint in copies(wrong, seed)[0] for seed in range(8))


_LANES = """
void toy(int wrong, float* in, float* out) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int thread = thread_index(), lane = thread & 31;
  const u32 own = shared + 128 * (thread >> 5), more = shared + 1024 + 4096 * (thread >> 5);
  store_shared(own + 4 * lane, __float_as_uint(in[lane]));
  if (wrong != 1) sync_warp();
  const float x = load_shared1(own + 4 * (lane ^ 1));
  if (wrong != 2) sync_warp();
  store_shared(own + 4 * lane, __float_as_uint(x));
  sync_block();
  out[thread] = load_shared1(shared + (4 * thread ^ 128));
  if (wrong != 3) sync_block();
  store_shared(shared + 4 * thread, 0u);
  u32 r[4] = {};
  store_matrix4(more + 128 * lane, r);
  if (wrong != 4) sync_warp();
  out[thread] += load_shared1(more + 128 * (lane ^ 1));
}
"""


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(_LANES, tmp_path_factory.mktemp("lanes"), 64)


def test_lanes_and_warps(lanes: Toy) -> None:
    message, out = lanes(0)
    assert not message
    assert out[:64] == [float((i & 31) ^ 1) for i in range(64)]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (1, "another lane"),
        (2, "another lane"),
        (3, "without a barrier since"),
        (4, "without sync_warp() since it was written"),
    ],
)
def test_mistakes_between_lanes_and_warps(lanes: Toy, wrong: int, complaint: str) -> None:
    assert complaint in lanes(wrong)[0]


def test_banks(lanes: Toy, capfd: pytest.CaptureFixture[str]) -> None:
    """Eight rows of a matrix, 128 bytes apart, lie in the same banks; so do words 128 bytes apart."""
    lanes.count_banks(True)
    lanes(0)
    lanes.count_banks(False)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(line.split(" ", 2)[2] for line in lines) == [
        "2 accesses, 64 passes where 2 are enough",
        "2 accesses, 64 passes where 8 are enough",
    ]


_REGISTERS = """
void toy(int wrong, float*, float*) {
  const int warp = thread_index() >> 5;
  if (wrong == 3) {
    set_registers<240, 160>();
  } else if (warp < 8) {
    if (wrong == 1) set_registers<240, 168>();
    else if (wrong != 2 || warp) set_registers<232, 168>();
  } else {
    set_registers<40, 168>();
  }
}
"""


def test_registers(tmp_path: Path) -> None:
    toy = Toy(_REGISTERS, tmp_path, 384)
    assert not toy(0)[0]
    assert "more registers than a multiprocessor has" in toy(1)[0]
    assert "warps ask for other registers" in toy(2)[0]
    assert "not what the block begins with" in toy(3)[0]
