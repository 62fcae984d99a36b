// What both recurrent kernels need of a call: where a sequence starts, and one token made ready.
#ifndef KDACORE_DECODE_TOKEN_CUH
#define KDACORE_DECODE_TOKEN_CUH

#include "common/gate.cuh"
#include "common/loads.cuh"
#include "common/ptx.cuh"
#include "generated/params.cuh"

constexpr int K = K_DIM;
constexpr int V = K_DIM;
constexpr int TOKEN_FLOATS = 3 * K + 4;  // q, k, decay, beta

struct Sequence {
  long long first, length, batch;
};

__device__ __forceinline__ Sequence sequence_of(const DecodeParams& p, int n) {
  if (!p.cu_seqlens) return {0, p.T, n};
  const bool wide = p.flags & FLAG_CU64;
  const long long first = load_index(p.cu_seqlens, n, wide);
  return {first, load_index(p.cu_seqlens, n + 1, wide) - first, 0};
}

// Pool row the sequence starts from, -1 for zeros.
__device__ __forceinline__ long long start_row(const DecodeParams& p, int n) {
  if (!p.h0) return -1;
  if (!p.indices) return n;
  const bool wide = p.flags & FLAG_INDEX64;
  if (!p.accepted) return load_index(p.indices, n * p.indices_row, wide);
  const long long accepted = load_index(p.accepted, n, p.flags & FLAG_ACCEPTED64);
  return accepted > 0 ? load_index(p.indices, n * p.indices_row + accepted - 1, wide) : -1;
}

__device__ __forceinline__ float sum_warp(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}

__device__ __forceinline__ float step_decay(const DecodeParams& p, float x, float a) {
  if (p.gate == GATE_LOG) return exp2_fast(LOG2E * x);
  if (p.gate == GATE_SOFTPLUS) return exp2_fast(-LOG2E * a * softplus(x));
  return exp2_fast(LOG2E * p.lower_bound * sigmoid(a * x));
}

// A lane's four channels of one token as they lie in memory. Converting them would wait for the loads.
struct RawToken {
  RawFour q, k, g, bias;
  u32 A_log, beta, scalar_g, scalar_bias;
};

__device__ __forceinline__ RawToken load_token(const DecodeParams& p, const Sequence& s, long long t, int hv, int lane) {
  const int h = hv / (p.HV / p.H), c = 4 * lane;
  RawToken raw = {};
  const bool scalar = p.flags & FLAG_SCALAR_GATE;
  const long long gate_at = s.batch * p.g_sb + t * p.g_st + hv * p.g_sh;
  if (c < K) {
    raw.q = load_raw_four(p.q, s.batch * p.q_sb + t * p.q_st + h * p.q_sh + c, p.qkv_type);
    raw.k = load_raw_four(p.k, s.batch * p.k_sb + t * p.k_st + h * p.k_sh + c, p.qkv_type);
    if (scalar) {
      raw.scalar_g = load_bits(p.g + type_size(p.g_type) * gate_at, p.g_type);
      if (p.dt_bias) raw.scalar_bias = load_bits(p.dt_bias + type_size(p.bias_type) * hv, p.bias_type);
    } else {
      raw.g = load_raw_four(p.g, gate_at + c, p.g_type);
      if (p.dt_bias) raw.bias = load_raw_four(p.dt_bias, (long long)hv * K + c, p.bias_type);
    }
    if (p.A_log) raw.A_log = reinterpret_cast<const u32*>(p.A_log)[hv];
  }
  if (lane == 0) {
    const long long at = s.batch * p.beta_sb + t * p.beta_st + hv * p.beta_sh;
    raw.beta = load_bits(p.beta + type_size(p.beta_type) * at, p.beta_type);
  }
  return raw;
}

__device__ __forceinline__ float4 all_four(float x) { return make_float4(x, x, x, x); }
__device__ __forceinline__ float square(const float4& x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
__device__ __forceinline__ void store_scaled(u32 to, const float4& x, float factor) {
  store_shared(to, x.x * factor, x.y * factor);
  store_shared(to + 8, x.z * factor, x.w * factor);
}

// One warp, one token: normalised q (times scale) and k, decays and beta, to shared memory at `to`.
__device__ __forceinline__ void finish_token(const DecodeParams& p, const RawToken& raw, int lane, u32 to) {
  const int c = 4 * lane;
  const float4 q = from_raw(raw.q, p.qkv_type), k = from_raw(raw.k, p.qkv_type);
  float q_factor = p.scale, k_factor = 1.0f;
  if (p.flags & FLAG_L2NORM) {
    q_factor *= inverse_sqrt(sum_warp(square(q)) + 1e-6f);
    k_factor = inverse_sqrt(sum_warp(square(k)) + 1e-6f);
  }
  if (c < K) {
    const bool scalar = p.flags & FLAG_SCALAR_GATE;
    float4 x = scalar ? all_four(from_bits(raw.scalar_g, p.g_type)) : from_raw(raw.g, p.g_type);
    if (p.dt_bias) {
      const float4 b = scalar ? all_four(from_bits(raw.scalar_bias, p.bias_type)) : from_raw(raw.bias, p.bias_type);
      x = make_float4(x.x + b.x, x.y + b.y, x.z + b.z, x.w + b.w);
    }
    const float a = p.A_log ? exp2_fast(LOG2E * __uint_as_float(raw.A_log)) : 1.0f;
    const float4 d = make_float4(step_decay(p, x.x, a), step_decay(p, x.y, a), step_decay(p, x.z, a), step_decay(p, x.w, a));
    store_scaled(to + 4 * c, q, q_factor);
    store_scaled(to + 4 * (K + c), k, k_factor);
    store_scaled(to + 4 * (2 * K + c), d, 1.0f);
  }
  if (lane == 0) {
    float beta = from_bits(raw.beta, p.beta_type);
    if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
    if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
    store_shared(to + 4 * (3 * K), beta, 0.0f);
  }
}

#endif
