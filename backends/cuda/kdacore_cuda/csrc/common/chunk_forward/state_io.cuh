// Reads, writes and decays the scanned state. Included by both scan.cuh after ScanState, ScanLane
// and each_element, which differ.
#pragma once
#include "common/mma_operands.cuh"

__device__ __forceinline__ void read_state(ScanState& state, const ScanLane& l, u64 base, int flags) {
  if (flags & FLAG_STATE_BF16) {
    each_element(state, l, flags,
                 [&](float& x, int at) { x = bf16_low(reinterpret_cast<const u16*>(base)[at]); });
  } else {
    each_element(state, l, flags, [&](float& x, int at) { x = reinterpret_cast<const float*>(base)[at]; });
  }
}

__device__ __forceinline__ void write_state(ScanState& state, const ScanLane& l, u64 base, int flags) {
  if (flags & FLAG_STATE_BF16) {
    each_element(state, l, flags,
                 [&](float& x, int at) { reinterpret_cast<u16*>(base)[at] = (u16)pack_bf16(x, 0.0f); });
  } else {
    each_element(state, l, flags, [&](float& x, int at) { reinterpret_cast<float*>(base)[at] = x; });
  }
}

// The chunk's total decay of this lane's channels of k-tile kk.
__device__ __forceinline__ float4 load_decay(u32 stage, int kk, int t) {
  return load_shared4(stage + OFFSET(ChunkImage, decay) + 64 * kk + 16 * t);
}
__device__ __forceinline__ void decay_tiles(float (&x)[4], float (&y)[4], const float4& d) {
  x[0] *= d.x, x[1] *= d.y, x[2] *= d.x, x[3] *= d.y;
  y[0] *= d.z, y[1] *= d.w, y[2] *= d.z, y[3] *= d.w;
}
