// Decays the scanned state. Included by both scan.cuh, after ChunkImage.
#pragma once

#include "common/ptx.cuh"

// The chunk's total decay of this lane's channels of k-tile kk.
__device__ __forceinline__ float4 load_decay(u32 stage, int kk, int t) {
  return load_shared4(stage + OFFSET(ChunkImage, decay) + 64 * kk + 16 * t);
}
__device__ __forceinline__ void decay_tiles(float (&x)[4], float (&y)[4], const float4& d) {
  x[0] *= d.x, x[1] *= d.y, x[2] *= d.x, x[3] *= d.y;
  y[0] *= d.z, y[1] *= d.w, y[2] *= d.z, y[3] *= d.w;
}
