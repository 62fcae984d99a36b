// Heads of chunk_kda with other channels and values than the 128 of each that its kernels compute with: p.K channels, a
// multiple of 16 up to 128, and p.V values, a multiple of 16. More than 128 values are p.value_blocks blocks of 128, the
// last one maybe of fewer, that share q, k, gates and betas. In shared memory and in the workspace what a head lacks is
// zeros, which change no result. The caller's arrays are read and written where heads have elements.
//
// Macro from the host: NARROW, 1: such heads; 0, or none: 128 of each, and no instruction that asks.
#pragma once

#include "sm90/narrow_heads.cuh"

constexpr int BLOCK_VALUES = 128;

template <class Params>
__device__ __forceinline__ int channels_of(const Params& p) {
  return NARROW ? p.K : 128;
}
template <class Params>
__device__ __forceinline__ int values_of(const Params& p) {
  return NARROW ? p.V : BLOCK_VALUES;
}
template <class Params>
__device__ __forceinline__ int value_blocks(const Params& p) {
  return NARROW ? p.value_blocks : 1;
}
// Of the blocks of all value heads, one head's after the other's, number `index`: the head, and which of its blocks.
template <class Params>
__device__ __forceinline__ int head_of_block(const Params& p, int index) {
  return !NARROW || p.value_blocks == 1 ? index : (u32)index / (u32)p.value_blocks;
}
template <class Params>
__device__ __forceinline__ int block_in_head(const Params& p, int index, int head) {
  return NARROW ? index - head * p.value_blocks : 0;
}
// Values that a block has.
template <class Params>
__device__ __forceinline__ int values_of_block(const Params& p, int block) {
  if (!NARROW) return BLOCK_VALUES;
  const int left = p.V - BLOCK_VALUES * block;
  return left < BLOCK_VALUES ? left : BLOCK_VALUES;
}
