// Heads of fewer than 128 channels (K) or values (V), multiples of 16. Kernels compute with 128 of each: in shared memory
// and in the workspace the others are zeros, which change no result. The caller's arrays are read and written where
// heads have elements.
//
// Macro from the host: NARROW, 1: heads have p.K channels and p.V values; 0, or none: 128 of each, and no instruction
// that asks.
#pragma once

#include "generated/gated_delta_params.cuh"
#include "sm90/chunk_backward/workspace.cuh"

#ifndef NARROW
#define NARROW 0
#endif

constexpr int PIECE = 8;  // elements of 16 bytes

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
// Whether a head of `size` elements has 16 bytes from element `first` on.
__device__ __forceinline__ bool has_piece(int first, int size) { return !NARROW || first < size; }
