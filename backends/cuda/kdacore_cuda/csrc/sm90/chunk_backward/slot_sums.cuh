// Sums over chunk slots of what the gradients kernel left for each, in one fixed order. Parts are SUM_SCALE times what
// they stand for; a sum is cut off at the largest number of its type.
#pragma once

#include "common/gate.cuh"
#include "common/loads.cuh"
#include "generated/chunk_backward_params.cuh"

constexpr int AHEAD = 4;  // loads in flight

__device__ __forceinline__ void store_sum(u64 base, long long index, int type, float parts) {
  const float largest = type == TYPE_FLOAT32 ? LARGEST : type == TYPE_BFLOAT16 ? LARGEST_BF16 : 65504.0f;
  store_scalar(base, index, type, limit(parts * (1.0f / SUM_SCALE), largest));
}

// The sum of part[slot * step] over slots first, first + stride, ...
__device__ __forceinline__ float sum_slots(const float* part, long long step, int first, int stride,
                                           int slots) {
  float total = 0.0f;
  int slot = first;
  for (; slot + (AHEAD - 1) * stride < slots; slot += AHEAD * stride) {
    float x[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) x[i] = part[(slot + i * stride) * step];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) total += x[i];
  }
  for (; slot < slots; slot += stride) total += part[slot * step];
  return total;
}

// The sum of the parts of value head hv, [slots, HV], by one warp.
__device__ __forceinline__ void sum_head(u64 parts, int HV, int hv, int slots, u64 out, int type, int lane) {
  float total = sum_slots(reinterpret_cast<const float*>(parts) + hv, HV, lane, 32, slots);
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) total += shuffle_xor(total, mask);
  if (lane == 0) store_sum(out, hv, type, total);
}
