// Decays the scanned state.
#pragma once

#include "common/ptx.cuh"

// The chunk's total decay of this lane's channels of k-tile kk; `decay`: where its image has them.
__device__ __forceinline__ float4 load_decay(u32 decay, int kk, int t) {
  return load_shared4(decay + 64 * kk + 16 * t);
}
__device__ __forceinline__ void decay_tiles(float (&x)[4], float (&y)[4], const float4& d) {
  x[0] *= d.x, x[1] *= d.y, x[2] *= d.x, x[3] *= d.y;
  y[0] *= d.z, y[1] *= d.w, y[2] *= d.z, y[3] *= d.w;
}
