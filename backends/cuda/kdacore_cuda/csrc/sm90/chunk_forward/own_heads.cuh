// The caller's heads, where kernels take its value heads in blocks of 128 values (sm90/head_dims.cuh): p.HV counts blocks.
#pragma once

#include "common/chunk_forward/tokens.cuh"
#include "common/state_rows.cuh"
#include "sm90/chunk_forward/shared_memory.cuh"
#include "sm90/head_dims.cuh"

// Value heads of the caller.
__device__ __forceinline__ int heads_of(const ChunkForwardParams& p) {
  return NARROW ? p.HV / p.value_blocks : p.HV;
}
// The value head that block hv belongs to: that of its gates and betas.
__device__ __forceinline__ int gate_head(const ChunkForwardParams& p, int hv) { return head_of_block(p, hv); }

__device__ __forceinline__ float load_own_bias(const ChunkForwardParams& p, int hv, int channel) {
  if constexpr (NARROW) {
    if (!p.dt_bias || channel >= p.K) return 0.0f;
    return held_bias(load_scalar(p.dt_bias, (long long)gate_head(p, hv) * p.K + channel, p.bias_type));
  } else {
    return load_bias(p, hv, channel);
  }
}

// Elements of a token's values of all heads, and where those of block hv begin.
__device__ __forceinline__ long long value_row(const ChunkForwardParams& p) { return (long long)heads_of(p) * p.V; }
__device__ __forceinline__ int first_value(const ChunkForwardParams& p, int hv) {
  return BLOCK_VALUES * block_in_head(p, hv, gate_head(p, hv));
}

// Elements of a state of the caller's, and from its start to the values of block hv.
__device__ __forceinline__ int state_elements(const ChunkForwardParams& p) { return p.K * p.V; }
__device__ __forceinline__ int state_offset(const ChunkForwardParams& p, int hv) {
  return first_value(p, hv) * (p.flags & FLAG_V_FIRST ? p.K : 1);
}
// The address of block hv's part of a state at `base`, 0 if that is 0.
__device__ __forceinline__ u64 part_of_state(const ChunkForwardParams& p, u64 base, int hv) {
  return base ? base + (long long)state_size(p) * state_offset(p, hv) : 0;
}
// Bytes of a row of checkpoints, and the address of block hv's in one.
__device__ __forceinline__ long long checkpoint_row(const ChunkForwardParams& p) {
  return (long long)state_size(p) * heads_of(p) * state_elements(p);
}
__device__ __forceinline__ u64 own_checkpoint(const ChunkForwardParams& p, long long row, int hv) {
  const u64 at = p.ckpt + row * checkpoint_row(p) + (long long)state_size(p) * gate_head(p, hv) * state_elements(p);
  return part_of_state(p, at, hv);
}
