// The triangular inverse of one chunk: float32 substitution inside blocks of 16, block columns
// merged on the matrix unit with operands in two bfloat16 parts (about 16 bits). Used by intra.cu.
//
// The system lies in shared memory as 64 x SYSTEM_PITCH floats, its strictly lower triangle, zeros
// above it inside the diagonal blocks. Diagonal blocks are replaced by their inverses. With A the
// system and D its inverse diagonal blocks, block column c of the inverse is X_c = D_c, X_b = -D_b
// (sum over c <= m < b of A_bm X_m); a warp takes one column and keeps X transposed, so that each
// sum is the next product's left operand.
#pragma once

#include "common/mma_operands.cuh"
#include "common/stages/chunk.cuh"
#include "common/unit_triangle_inverse.cuh"

constexpr int SYSTEM_PITCH = 72;  // floats
constexpr int TILE_PITCH = 144;   // bytes of a row of 64 16-bit results

__device__ __forceinline__ u32 system_at(u32 system, int row, int column) {
  return system + 4 * (SYSTEM_PITCH * row + column);
}

// Diagonal block `block` to its inverse, in place and rounded into `tile`. One column a lane; both
// halves of a warp compute the same.
__device__ __forceinline__ void invert_diagonal(u32 system, u32 tile, int block, int lane) {
  const int j = lane & 15, row0 = 16 * block;
  float x[16];
  invert_column(x, j, [&](int i, int m) { return system_at(system, row0 + i, row0 + m); });
  sync_warp();
  const bool low = lane < 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = low ? x[i] : x[i + 8];
    const int row = row0 + i + (low ? 0 : 8);
    store_shared(system_at(system, row, row0 + j), __float_as_uint(value));
    store_shared16(tile + TILE_PITCH * row + 2 * (row0 + j), pack_half(value, 0.0f));
  }
}

// d += x y^T, y a 16 x 16 block of the system.
__device__ __forceinline__ void add_product(float (&d)[2][4], const Split& x, u32 system, int row, int column,
                                            int g, int t) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const u32 at = system_at(system, row + 8 * n + g, column + 2 * t);
    const float2 y0 = load_shared2(at), y1 = load_shared2(at + 32);
    u32 high[2], low[2];
    split(y0.x, y0.y, high[0], low[0]);
    split(y1.x, y1.y, high[1], low[1]);
    mma_split(d[n], x, high[0], high[1], low[0], low[1]);
  }
}

// The inverse's block column `c` below the diagonal, rounded into `tile`.
__device__ __forceinline__ void merge_column(u32 system, u32 tile, int c, int lane) {
  const int g = lane >> 2, t = lane & 3;
  Split x[3];
  float d[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d[n][e] = load_shared1(system_at(system, 16 * c + 8 * n + 2 * t + (e & 1), 16 * c + g + 8 * (e >> 1)));
    }
  }
  x[0] = split_tiles(d[0], d[1]);
#pragma unroll
  for (int b = 1; b < 4; ++b) {
    if (c + b > 3) break;
    float sum[2][4] = {};
#pragma unroll
    for (int m = 0; m < b; ++m) add_product(sum, x[m], system, 16 * (c + b), 16 * (c + m), g, t);
    const Split s = split_tiles(sum[0], sum[1]);
    float negative[2][4] = {};
    add_product(negative, s, system, 16 * (c + b), 16 * (c + b), g, t);
    u32 out[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) negative[n][e] = -negative[n][e];
#pragma unroll
      for (int h = 0; h < 2; ++h) out[2 * n + h] = pack_half(negative[n][2 * h], negative[n][2 * h + 1]);
    }
    if (b < 3) x[b] = split_tiles(negative[0], negative[1]);
    const int row = 16 * (c + b) + 8 * (lane >> 4) + (lane & 7), column = 16 * c + (lane & 8);
    store_matrix4_transposed(tile + TILE_PITCH * row + 2 * column, out);
  }
}
