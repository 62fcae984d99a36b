// Reads and writes the scanned state. Included by scan.cuh after ScanState, ScanLane and
// each_element.
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
