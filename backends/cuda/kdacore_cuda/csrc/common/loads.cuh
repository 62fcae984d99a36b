// Typed loads of a few elements as float, the type known only at run time (uniform over the grid).
#pragma once

#include "common/ptx.cuh"
#include "generated/constants.cuh"

__device__ __forceinline__ u32 load_bits(u64 address, int type) {
  return type == TYPE_FLOAT32 ? *reinterpret_cast<const u32*>(address)
                              : *reinterpret_cast<const u16*>(address);
}
__device__ __forceinline__ float from_bits(u32 bits, int type) {
  return type == TYPE_FLOAT32    ? __uint_as_float(bits)
         : type == TYPE_BFLOAT16 ? bf16_low(bits)
                                 : half_to_float((u16)bits);
}
__device__ __forceinline__ float load_scalar(u64 base, long long index, int type) {
  return from_bits(load_bits(base + (type == TYPE_FLOAT32 ? 4 : 2) * index, type), type);
}

__device__ __forceinline__ int type_size(int type) { return type == TYPE_FLOAT32 ? 4 : 2; }

__device__ __forceinline__ void store_scalar(u64 base, long long index, int type, float x) {
  if (type == TYPE_FLOAT32) {
    reinterpret_cast<float*>(base)[index] = x;
  } else {
    reinterpret_cast<u16*>(base)[index] = type == TYPE_BFLOAT16 ? (u16)pack_bf16(x, 0.0f) : float_to_half(x);
  }
}

__device__ __forceinline__ void store_four(u64 base, long long index, int type, float4 x) {
  if (type == TYPE_FLOAT32) {
    *reinterpret_cast<float4*>(base + 4 * index) = x;
    return;
  }
  uint2 raw;
  if (type == TYPE_BFLOAT16) {
    raw.x = pack_bf16(x.x, x.y);
    raw.y = pack_bf16(x.z, x.w);
  } else {
    raw.x = (u32)float_to_half(x.x) | (u32)float_to_half(x.y) << 16;
    raw.y = (u32)float_to_half(x.z) | (u32)float_to_half(x.w) << 16;
  }
  *reinterpret_cast<uint2*>(base + 2 * index) = raw;
}

__device__ __forceinline__ long long load_index(u64 base, long long index, bool wide) {
  return wide ? reinterpret_cast<const long long*>(base)[index]
              : (long long)reinterpret_cast<const int*>(base)[index];
}
