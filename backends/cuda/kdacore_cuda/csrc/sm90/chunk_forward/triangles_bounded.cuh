// Bounded gates: both triangles to the image and to scratch. Part of triangles.cuh.
#pragma once

__device__ __forceinline__ void store_triangles(u32 stage, u32 scratch, int half, const Lane& l,
                                                const Scalars& s, const Products& sums) {
  store_bounded_triangles(stage + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES * half, scratch, l, s, sums.tile,
                          1.0f, KQ_SCALE);
}
