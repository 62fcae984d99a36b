// Unbounded gates: the triangles' levels to the image and to scratch. Part of triangles.cuh.
#pragma once

__device__ __forceinline__ void store_pair(u32 stage, u32 scratch, int half, int i, int j, float kk,
                                           float qk) {
  const u32 scalars = stage + OFFSET(ChunkImage, scalars) + 4 * HALF * half;
  const float factor = load_shared1(scalars + 4 * i) *
                       load_shared1(scalars + OFFSET(TokenScalars, k_norm) + 4 * i) *
                       load_shared1(scalars + OFFSET(TokenScalars, k_norm) + 4 * j);
  store_shared(scratch + 4 * (SCRATCH_PITCH * i + j), __float_as_uint(kk * factor));
  store_shared16(triangle_at(stage + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES * half, i, j),
                 pack_bf16(qk, 0.0f));
}

__device__ __forceinline__ void store_triangles(u32 stage, u32 scratch, int half, const Lane& l,
                                                const Scalars& s, Products& sums) {
  store_levels(stage + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES * half, scratch, l, sums.tile, sums.diagonal,
               [&](int i, int j, float kk, float qk) { store_pair(stage, scratch, half, i, j, kk, qk); });
}
