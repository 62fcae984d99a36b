// One step of a chain of segments: the product of a state, or of its gradient, with a segment's A.
// Both are split in two bfloat16 parts and multiplied in three products, about 16 bits, as every
// later segment builds on the result. A block has ROWS (16 or 32) value rows; its eight warps share
// their channels.
//
// Macros from the host: ROWS.
#pragma once

#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/warp.cuh"

constexpr int THREADS = 256, BLOCKS_V = V / ROWS;
constexpr int STAGES = 3;  // of A: two are loaded ahead
struct SharedMemory {
  struct {
    StateImage high, low;
  } right[STAGES];          // A
  u16 left[2][2][ROWS][K];  // S in two parts, twice: one is written while the other is read
  u64 barriers[STAGES];
};
constexpr u32 PART_BYTES = sizeof(u16[ROWS][K]), RIGHT_BYTES = 2 * STATE_BYTES;
KDA_SHARED_BYTES(sizeof(SharedMemory));

constexpr int GROUPS = 128 / ROWS;                          // of channels: warps of 16 rows
constexpr int CHANNELS = K / GROUPS, TILES = CHANNELS / 8;  // of a warp
struct Sums {
  float x[TILES][4];
};
__device__ __forceinline__ void add(Sums& sums, const Sums& more) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.x[tile][e] += more.x[tile][e];
  }
}

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

// S A, or S A^T, without terms below 2^-16 of it. The products of low parts have sums of their own, so
// that none waits for another, or with ONE_SUM none, in the order of compose_start.cuh, which then gives
// the same bits.
template <bool TRANSPOSED, bool ONE_SUM>
__device__ __forceinline__ Sums multiply(u32 left, u32 right, const Lane& l) {
  const auto load_right = [&](u32(&b)[4], u32 image, int kk, int m) {
    if (TRANSPOSED) {
      const int channel = CHANNELS * l.group + 16 * m + 8 * (l.lane >> 4) + (l.lane & 7);
      load_matrix4(
          b, image + (kk >> 2) * (STATE_BYTES / 2) + swizzled(channel, 2 * (kk & 3) + (l.lane >> 3 & 1)));
    } else {  // rows 0-7, then 8-15, of eight channels, then of the next
      const int piece = TILES * l.group % 8 + (l.lane >> 4);
      load_matrix4_transposed(b, image + (TILES * l.group >> 3) * (STATE_BYTES / 2) +
                                     swizzled(16 * kk + (l.lane & 15), piece + 2 * m));
    }
  };
  Sums sums = {}, own_left = {}, own_right = {};
  Sums &low_left = ONE_SUM ? sums : own_left, &low_right = ONE_SUM ? sums : own_right;
  u32 high[K_TILES][4], b[K_TILES][TILES / 2][4];
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    load_matrix4(high[kk], left_at(left, l, kk));
#pragma unroll
    for (int m = 0; m < TILES / 2; ++m) {
      load_right(b[kk][m], right, kk, m);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_bf16(sums.x[2 * m + n], high[kk], b[kk][m][2 * n], b[kk][m][2 * n + 1]);
    }
  }
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    u32 low[4];
    load_matrix4(low, left_at(left, l, kk) + PART_BYTES);
#pragma unroll
    for (int m = 0; m < TILES / 2; ++m) {
      u32 b_low[4];
      load_right(b_low, right + STATE_BYTES, kk, m);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_bf16(low_left.x[2 * m + n], low, b[kk][m][2 * n], b[kk][m][2 * n + 1]);
        mma_bf16(low_right.x[2 * m + n], high[kk], b_low[2 * n], b_low[2 * n + 1]);
      }
    }
  }
  if (!ONE_SUM) {
    add(own_left, own_right);
    add(sums, own_left);
  }
  return sums;
}
