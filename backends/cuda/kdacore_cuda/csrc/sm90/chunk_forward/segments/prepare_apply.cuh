// kt = T^T kg and aqt = aqk T with T of prepare_inverse.cuh. A warpgroup has one of the two, a warp of it
// 16 tokens; of kt 64 channels at a time.
#pragma once

#include "sm90/chunk_forward/segments/prepare_pairs.cuh"

constexpr int IMAGE_TILES = 8;

// Tiles 2j and 2j + 1 as a left operand, each number as product(number, its tile, its place in the tile).
template <class F>
__device__ __forceinline__ void pack_scaled(const float (&x)[IMAGE_TILES][4], int j, u32 (&r)[4], F product) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int tile = 2 * j + n;
    r[2 * n] = pack_bf16(product(x[tile][0], tile, 0), product(x[tile][1], tile, 1));
    r[2 * n + 1] = pack_bf16(product(x[tile][2], tile, 2), product(x[tile][3], tile, 3));
  }
}

__device__ __forceinline__ void make_kt(u32 shared, int row_block, int lane) {
  const u32 ratios = shared + OFFSET(SharedMemory, ratio) + 4 * (16 * row_block + (lane >> 2));
  const float2 ratio = make_float2(load_shared1(ratios), load_shared1(ratios + 32));
  const u64 transform = operand_descriptor(shared + TRANSFORM, 16, 8 * IMAGE_ROW);
#pragma unroll 1  // to keep the code small: prepare_strips.cuh
  for (int image = 0; image < 2; ++image) {
    const u64 kg =
        operand_descriptor(shared + OFFSET(SharedMemory, kg) + image * SQUARE_BYTES, 16, 8 * IMAGE_ROW);
    float x[IMAGE_TILES][4];
    fence_registers(x);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C / 16; ++kk)
      warpgroup_mma_shared<1>(x, transform + (kk * 32 >> 4), kg + (kk * 16 * IMAGE_ROW >> 4), kk > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 r[4];
      pack_scaled(x, j, r, [&](float y, int, int e) { return y * (e < 2 ? ratio.x : ratio.y); });
      store_matrix4(block_at(shared + OFFSET(SharedMemory, kt) + image * SQUARE_BYTES, row_block, j, lane),
                    r);
    }
  }
}

__device__ __forceinline__ void make_aqt(u32 shared, int row_block, int lane) {
  const u64 transform = operand_descriptor(shared + TRANSFORM, 16, 8 * IMAGE_ROW),
            aqk = operand_descriptor(shared + AQK, 16, 8 * IMAGE_ROW);
  float x[IMAGE_TILES][4];
  fence_registers(x);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < C / 16; ++kk)
    warpgroup_mma_shared<0>(x, aqk + (kk * 32 >> 4), transform + (kk * 32 >> 4), kk > 0);
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(x);
  const u32 ratios = shared + OFFSET(SharedMemory, ratio) + 8 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 r[4];
    pack_scaled(x, j, r, [&](float y, int tile, int e) {
      const float2 ratio = load_shared2(ratios + 32 * tile);
      return y * (e & 1 ? ratio.y : ratio.x);
    });
    store_matrix4(block_at(shared + OFFSET(SharedMemory, aqt), row_block, j, lane), r);
  }
}
