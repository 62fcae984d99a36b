// Device memory accesses of the recurrent kernels: state rows in 16-byte pieces, token arrays with
// their own types.
#pragma once

#include "common/loads.cuh"
#include "common/ptx.cuh"

// What a kernel assumes about a call. PLAIN: bfloat16 q, k and v, no float16, a gate for each
// channel; q, k, v, g and beta contiguous, with fewer than 2^31 elements; not packed; rows of
// states on 16 bytes. ONE: besides that one token a sequence, bfloat16 g and beta, float32 dt_bias,
// a pool with one row a sequence. HEAD: as ONE, but a gate for each head, and g, beta and dt_bias
// bfloat16 or float32.
constexpr bool PLAIN = MODE > 0, ONE = MODE > 1, HEAD = MODE > 2;

// N neighbouring elements of a token array in their own type; 16-bit types use half of the words.
// Converting them here would wait for the load.
template <int N>
struct Bits {
  u32 w[N];
};

// `index` is a multiple of N, and the array is aligned to 16 bytes where N > 1.
template <int N, typename Index>
__device__ __forceinline__ Bits<N> load_elements(u64 base, Index index, int type) {
  Bits<N> r;
  const u64 at = base + (u64)index * (type == TYPE_FLOAT32 ? 4 : 2);
  if (type == TYPE_FLOAT32) {
    if constexpr (N == 1) r.w[0] = load_global4(at);
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) {
      const uint4 x = load_global16(at + 4 * i);
      r.w[i] = x.x, r.w[i + 1] = x.y, r.w[i + 2] = x.z, r.w[i + 3] = x.w;
    }
  } else if constexpr (N == 1) {
    r.w[0] = load_global2(at);
  } else if constexpr (N == 4) {
    const uint2 x = load_global8(at);
    r.w[0] = x.x, r.w[1] = x.y;
  } else {
    const uint4 x = load_global16(at);
    r.w[0] = x.x, r.w[1] = x.y, r.w[2] = x.z, r.w[3] = x.w;
  }
  return r;
}

template <int N>
__device__ __forceinline__ void to_floats(float (&y)[N], const Bits<N>& x, int type) {
  if (type == TYPE_FLOAT32) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __uint_as_float(x.w[i]);
  } else if (PLAIN || type == TYPE_BFLOAT16) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = i & 1 ? bf16_high(x.w[i / 2]) : bf16_low(x.w[i / 2]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = half_to_float((u16)(x.w[i / 2] >> 16 * (i & 1)));
  }
}
__device__ __forceinline__ float to_float(const Bits<1>& x, int type) {
  float y[1];
  to_floats(y, x, type);
  return y[0];
}

template <int N>
__device__ __forceinline__ void store_elements(u64 base, long long index, int type, const float (&x)[N]) {
  if constexpr (N == 1) {
    store_scalar(base, index, type, x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      store_four(base, index + i, type, make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
  }
}

// States are float32, unless one of these says bfloat16 or float16; not every kernel is compiled for the latter.
#ifndef STATE_F16
#define STATE_F16 0
#endif
constexpr bool HALF_STATE = STATE_BF16 || STATE_F16;
// A 16-byte piece of state: VECTOR elements.
constexpr int VECTOR = HALF_STATE ? 8 : 4;
constexpr int STATE_BYTES = HALF_STATE ? 2 : 4;

// The same for rows that need not start on 16 bytes.
__device__ __forceinline__ uint4 load_state_elements(u64 a) {
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = HALF_STATE ? load_global2(a + 4 * i) | load_global2(a + 4 * i + 2) << 16 : load_global4(a + 4 * i);
  return make_uint4(w[0], w[1], w[2], w[3]);
}
__device__ __forceinline__ void store_state_elements(u64 a, const uint4& x) {
  const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if constexpr (HALF_STATE) {
      reinterpret_cast<u16*>(a)[i] = (u16)(w[i / 2] >> 16 * (i & 1));
    } else {
      reinterpret_cast<u32*>(a)[i] = w[i % 4];
    }
  }
}

__device__ __forceinline__ void unpack_state(float (&y)[VECTOR], const uint4& x) {
  const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if constexpr (STATE_F16) {
      y[i] = half_to_float((u16)(w[i / 2] >> 16 * (i & 1)));
    } else {
      y[i] = !STATE_BF16 ? __uint_as_float(w[i % 4]) : i & 1 ? bf16_high(w[i / 2]) : bf16_low(w[i / 2]);
    }
  }
}
__device__ __forceinline__ uint4 pack_state(const float (&x)[VECTOR]) {
  if constexpr (STATE_BF16) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[VECTOR - 4], x[VECTOR - 3]),
                      pack_bf16(x[VECTOR - 2], x[VECTOR - 1]));
  }
  if constexpr (STATE_F16) {
    return make_uint4(pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[VECTOR - 4], x[VECTOR - 3]),
                      pack_f16(x[VECTOR - 2], x[VECTOR - 1]));
  }
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                    __float_as_uint(x[3]));
}
