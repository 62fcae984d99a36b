// Typed loads of a few elements as float, the type known only at run time (uniform over the grid).
#ifndef KDACORE_LOADS_CUH
#define KDACORE_LOADS_CUH

#include "common/ptx.cuh"
#include "generated/constants.cuh"

__device__ __forceinline__ u32 load_bits(u64 address, int type) {
  return type == TYPE_FLOAT32 ? *reinterpret_cast<const u32*>(address) : *reinterpret_cast<const u16*>(address);
}
__device__ __forceinline__ float from_bits(u32 bits, int type) {
  return type == TYPE_FLOAT32 ? __uint_as_float(bits) : type == TYPE_BFLOAT16 ? bf16_low(bits) : half_to_float((u16)bits);
}
__device__ __forceinline__ float load_scalar(u64 base, long long index, int type) {
  return from_bits(load_bits(base + (type == TYPE_FLOAT32 ? 4 : 2) * index, type), type);
}

__device__ __forceinline__ int type_size(int type) { return type == TYPE_FLOAT32 ? 4 : 2; }

// Four consecutive elements as they lie in memory; `index` is a multiple of four and the base is aligned to four elements.
struct RawFour {
  u32 x, y, z, w;
};
__device__ __forceinline__ RawFour load_raw_four(u64 base, long long index, int type) {
  if (type == TYPE_FLOAT32) {
    const uint4 r = *reinterpret_cast<const uint4*>(base + 4 * index);
    return {r.x, r.y, r.z, r.w};
  }
  const uint2 r = *reinterpret_cast<const uint2*>(base + 2 * index);
  return {r.x, r.y, 0, 0};
}
__device__ __forceinline__ float4 from_raw(const RawFour& r, int type) {
  if (type == TYPE_FLOAT32) {
    return make_float4(__uint_as_float(r.x), __uint_as_float(r.y), __uint_as_float(r.z), __uint_as_float(r.w));
  }
  if (type == TYPE_BFLOAT16) return make_float4(bf16_low(r.x), bf16_high(r.x), bf16_low(r.y), bf16_high(r.y));
  return make_float4(half_to_float((u16)r.x), half_to_float((u16)(r.x >> 16)), half_to_float((u16)r.y),
                     half_to_float((u16)(r.y >> 16)));
}
__device__ __forceinline__ float4 load_four(u64 base, long long index, int type) {
  return from_raw(load_raw_four(base, index, type), type);
}

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
  return wide ? reinterpret_cast<const long long*>(base)[index] : (long long)reinterpret_cast<const int*>(base)[index];
}

#endif
