// One step of a chain of segments: the product of a state, or of its gradient, with a segment's A.
// Both are split in two bfloat16 parts and multiplied in three products, about 16 bits, as every
// later segment builds on the result. A block has ROWS (16 or 32) value rows; four warps share the
// channels of 16 of them.
//
// Macros from the host: ROWS, SHARED_BYTES.
#pragma once

#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/warp.cuh"

constexpr int GROUPS = 4;                                   // of channels: warps of 16 rows
constexpr int CHANNELS = K / GROUPS, TILES = CHANNELS / 8;  // of a warp
constexpr int THREADS = ROWS / 16 * GROUPS * 32, BLOCKS_V = V / ROWS;
constexpr int STAGES = 3;  // of A
struct SharedMemory {
  struct {
    StateImage high, low;
  } right[STAGES];          // A
  u16 left[2][2][ROWS][K];  // S in two parts, twice: one is written while the other is read
  u64 barriers[STAGES];
};
constexpr u32 PART_BYTES = sizeof(u16[ROWS][K]), RIGHT_BYTES = 2 * STATE_BYTES;
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host's shared memory size is too small");

struct Sums {
  float x[TILES][4];
};

struct Lane {
  int lane;
  int strip, group;  // 16 rows of the block, CHANNELS channels
  int row, channel;  // of this lane's first numbers in a float [V][K]
};

// Lane 8i + r: row r of matrix i in the four of 16 rows and 16 channels; `left`: images of 32 rows.
__device__ __forceinline__ u32 left_at(u32 left, const Lane& l, int kk) {
  return left + (kk >> 2) * (PART_BYTES / 2) +
         swizzled(16 * l.strip + (l.lane & 15), 2 * (kk & 3) + (l.lane >> 4));
}

__device__ __forceinline__ void store_left(const Sums& sums, u32 left, const Lane& l) {
#pragma unroll
  for (int m = 0; m < TILES / 2; ++m) {
    const Split s = split_tiles(sums.x[2 * m], sums.x[2 * m + 1]);
    const u32 to = left_at(left, l, TILES / 2 * l.group + m);
    store_matrix4(to, s.high);
    store_matrix4(to + PART_BYTES, s.low);
  }
}

// A warp's fragments of A, or of A^T, for 16 of its rows and 16 channels, in both parts.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_right_tile(u32 (&high)[4], u32 (&low)[4], u32 right, const Lane& l,
                                                int kk, int m) {
  if (TRANSPOSED) {
    const int channel = CHANNELS * l.group + 16 * m + 8 * (l.lane >> 4) + (l.lane & 7);
    const u32 at =
        right + (kk >> 2) * (STATE_BYTES / 2) + swizzled(channel, 2 * (kk & 3) + (l.lane >> 3 & 1));
    load_matrix4(high, at);
    load_matrix4(low, at + STATE_BYTES);
  } else {
    // Rows 0-7, then 8-15, of eight channels, then of the next.
    const u32 image = right + (TILES * l.group >> 3) * (STATE_BYTES / 2);
    const u32 at = image + swizzled(16 * kk + (l.lane & 15), TILES * l.group % 8 + (l.lane >> 4) + 2 * m);
    load_matrix4_transposed(high, at);
    load_matrix4_transposed(low, at + STATE_BYTES);
  }
}

// A warp's fragments of a whole A, for all K.
struct Right {
  u32 high[K_TILES][TILES / 2][4], low[K_TILES][TILES / 2][4];
};

template <bool TRANSPOSED>
__device__ __forceinline__ void load_right(Right& a, u32 right, const Lane& l) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
#pragma unroll
    for (int m = 0; m < TILES / 2; ++m)
      load_right_tile<TRANSPOSED>(a.high[kk][m], a.low[kk][m], right, l, kk, m);
  }
}

// sums += S A, without terms below 2^-16 of it. Each fragment of A is then replaced by that of the A at
// `after`. The products of low parts have sums of their own, so that none waits for another.
template <bool TRANSPOSED>
__device__ __forceinline__ void multiply(Sums& sums, u32 left, Right& a, u32 after, const Lane& l) {
  Sums low_left = {}, low_right = {};
  Split s, next;
  const auto load_left = [&](Split& to, int kk) {
    load_matrix4(to.high, left_at(left, l, kk));
    load_matrix4(to.low, left_at(left, l, kk) + PART_BYTES);
  };
  load_left(s, 0);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    if (kk + 1 < K_TILES) load_left(next, kk + 1);
#pragma unroll
    for (int m = 0; m < TILES / 2; ++m) {
      u32(&high)[4] = a.high[kk][m];
      u32(&low)[4] = a.low[kk][m];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int tile = 2 * m + n;
        mma_bf16(sums.x[tile], s.high, high[2 * n], high[2 * n + 1]);
        mma_bf16(low_left.x[tile], s.low, high[2 * n], high[2 * n + 1]);
        mma_bf16(low_right.x[tile], s.high, low[2 * n], low[2 * n + 1]);
      }
      load_right_tile<TRANSPOSED>(high, low, after, l, kk, m);
    }
    sync_warp();  // else the assembler puts all loads of the next A behind the last product
    s = next;
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.x[tile][e] += low_left.x[tile][e] + low_right.x[tile][e];
  }
}
