// w = T k 2^gc and u = (T v)^T with T of prepare_inverse.cuh. A warpgroup has one of the two, a warp
// of it 16 tokens; 64 channels (values) at a time. u is transposed on its way to shared memory.
#pragma once

#include "sm90/chunk_forward/segments/prepare_pairs.cuh"
#include "sm90/warp.cuh"

constexpr int IMAGE_TILES = 8;

// sums (+)= T y for tokens 16 FIRST to 16 BEYOND - 1 of the image y.
template <int FIRST, int BEYOND>
__device__ __forceinline__ void multiply_rows(float (&sums)[IMAGE_TILES][4], u32 shared, u32 y, bool add) {
  const u64 inverse = operand_descriptor(shared + OFFSET(SharedMemory, inverse), 16, 8 * IMAGE_ROW),
            right = operand_descriptor(y, 16, 8 * IMAGE_ROW);
  fence_registers(sums);
  warpgroup_fence();
#pragma unroll
  for (int kk = FIRST; kk < BEYOND; ++kk)
    warpgroup_mma_shared<1>(sums, inverse + (kk * 32 >> 4), right + (kk * 16 * IMAGE_ROW >> 4),
                            add || kk > FIRST);
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(sums);
}

// The factors of a lane's two rows.
__device__ __forceinline__ float2 row_factors(u32 shared, int row_block, int lane) {
  const u32 at = shared + OFFSET(SharedMemory, row_factor) + 4 * (16 * row_block + (lane >> 2));
  return make_float2(load_shared1(at), load_shared1(at + 32));
}

// Tiles 2j and 2j + 1 times the factors of their rows.
__device__ __forceinline__ void pack_rows(const float (&x)[IMAGE_TILES][4], int j, float2 factor,
                                          u32 (&r)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float (&y)[4] = x[2 * j + n];
    r[2 * n] = pack_bf16(y[0] * factor.x, y[1] * factor.x);
    r[2 * n + 1] = pack_bf16(y[2] * factor.y, y[3] * factor.y);
  }
}

__device__ __forceinline__ void make_w(u32 shared, int row_block, int lane, float unit) {
  float2 factor = row_factors(shared, row_block, lane);
  factor.x *= unit, factor.y *= unit;
#pragma unroll
  for (int image = 0; image < 2; ++image) {
    float x[IMAGE_TILES][4];
    const u32 zb = shared + OFFSET(SharedMemory, k) + image * SQUARE_BYTES;
    multiply_rows<2, 4>(x, shared, zb, false);
    if (row_block >= 2) {  // else zeros
      const u32 decay = shared + OFFSET(SharedMemory, first_decay) + 256 * image + 8 * (lane & 3);
#pragma unroll
      for (int n = 0; n < IMAGE_TILES; ++n) {
        const float2 d = load_shared2(decay + 32 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] *= e & 1 ? d.y : d.x;
      }
    }
    multiply_rows<0, 2>(x, shared, zb, true);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 r[4];
      pack_rows(x, j, factor, r);
      store_matrix4(block_at(shared + OFFSET(SharedMemory, w) + image * SQUARE_BYTES, row_block, j, lane), r);
    }
  }
}

__device__ __forceinline__ void make_u(u32 shared, int row_block, int lane) {
  const float2 factor = row_factors(shared, row_block, lane);
  const u32 at = shared + swizzled((lane & 7) + (lane >> 1 & 8), 2 * row_block + (lane >> 3 & 1));
#pragma unroll
  for (int image = 0; image < 2; ++image) {
    float x[IMAGE_TILES][4];
    multiply_rows<0, 4>(x, shared, shared + keys_offset(image), false);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 r[4];
      pack_rows(x, j, factor, r);
      store_matrix4_transposed(at + u_offset(4 * image + j), r);
    }
  }
}
