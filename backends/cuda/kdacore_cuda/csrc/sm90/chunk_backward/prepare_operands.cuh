// Operands from the decays, by the kind of gate.
#pragma once

#include "sm90/chunk_backward/prepare_operands_bounded.cuh"
#include "sm90/chunk_backward/prepare_operands_unbounded.cuh"

// Decays of the chunk and, for the backward, of its first and of its second half.
__device__ __forceinline__ void write_decays(const ChunkBackwardParams& p, u32 shared, int channel) {
  float total[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    total[i] = load_shared1(shared + OFFSET(SharedMemory, totals) + 4 * (K * i + channel));
  const float first = BOUNDED ? total[0] : total[0] + total[1],
              second = BOUNDED ? total[1] : total[PARTS - 2] + total[PARTS - 1];
  if constexpr (FOR_SEGMENTS) {
    reinterpret_cast<float*>(record_of(p))[channel] = exp2_fast(first + second);
  } else {
    float* to = reinterpret_cast<float*>(place_of(p.last, LAST_BYTES)) + channel;
    to[0] = exp2_fast(first + second);
    to[K] = exp2_fast(first);
    to[2 * K] = exp2_fast(second);
  }
}
