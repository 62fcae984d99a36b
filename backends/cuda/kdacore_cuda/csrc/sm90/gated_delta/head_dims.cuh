// Heads of fewer channels and values than the K and V that kernels compute with (chunk_backward/workspace.cuh: 128 of
// each, or 64), multiples of 16. In shared memory and in the workspace the others are zeros, which change no result. The
// caller's arrays are read and written where heads have elements.
//
// Macro from the host: NARROW, 1: heads have p.K channels and p.V values; 0, or none: K and V, and no instruction that
// asks.
#pragma once

#include "generated/gated_delta_params.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/narrow_heads.cuh"

__device__ __forceinline__ int channels_of(const GatedDeltaParams& p) { return NARROW ? p.K : K; }
__device__ __forceinline__ int values_of(const GatedDeltaParams& p) { return NARROW ? p.V : V; }
__device__ __forceinline__ int state_elements(const GatedDeltaParams& p) {
  return channels_of(p) * values_of(p);
}
// Bytes of a token's heads in contiguous arrays.
__device__ __forceinline__ long long key_row_bytes(const GatedDeltaParams& p) {
  return 2ll * p.H * channels_of(p);
}
__device__ __forceinline__ long long value_row_bytes(const GatedDeltaParams& p) {
  return 2ll * p.HV * values_of(p);
}
