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

// One warp, one token: normalised q (times scale) and k, decays and beta, to shared memory at `to`.
__device__ __forceinline__ void prepare_token(const DecodeParams& p, const Sequence& s, long long t, int hv, int lane,
                                              u32 to) {
  const int h = hv / (p.HV / p.H);
  const int c = 4 * lane;
  const bool real = c < K;
  float4 q = make_float4(0, 0, 0, 0), k = q, d = q;
  if (real) {
    q = load_four(p.q, s.batch * p.q_sb + t * p.q_st + h * p.q_sh + c, p.qkv_type);
    k = load_four(p.k, s.batch * p.k_sb + t * p.k_st + h * p.k_sh + c, p.qkv_type);
    const long long gate_at = s.batch * p.g_sb + t * p.g_st + hv * p.g_sh;
    const bool scalar = p.flags & FLAG_SCALAR_GATE;
    float4 x;
    if (scalar) {
      const float g = load_scalar(p.g, gate_at, p.g_type);
      x = make_float4(g, g, g, g);
    } else {
      x = load_four(p.g, gate_at + c, p.g_type);
    }
    if (p.dt_bias) {
      const float one = scalar ? load_scalar(p.dt_bias, hv, p.bias_type) : 0.0f;
      const float4 b = scalar ? make_float4(one, one, one, one) : load_four(p.dt_bias, (long long)hv * K + c, p.bias_type);
      x = make_float4(x.x + b.x, x.y + b.y, x.z + b.z, x.w + b.w);
    }
    const float a = p.A_log ? exp2_fast(LOG2E * reinterpret_cast<const float*>(p.A_log)[hv]) : 1.0f;
    d = make_float4(step_decay(p, x.x, a), step_decay(p, x.y, a), step_decay(p, x.z, a), step_decay(p, x.w, a));
  }
  float q_factor = p.scale, k_factor = 1.0f;
  if (p.flags & FLAG_L2NORM) {
    q_factor *= inverse_sqrt(sum_warp(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w) + 1e-6f);
    k_factor = inverse_sqrt(sum_warp(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w) + 1e-6f);
  }
  if (real) {
    store_shared(to + 4 * c, q.x * q_factor, q.y * q_factor);
    store_shared(to + 4 * c + 8, q.z * q_factor, q.w * q_factor);
    store_shared(to + 4 * (K + c), k.x * k_factor, k.y * k_factor);
    store_shared(to + 4 * (K + c) + 8, k.z * k_factor, k.w * k_factor);
    store_shared(to + 4 * (2 * K + c), d.x, d.y);
    store_shared(to + 4 * (2 * K + c) + 8, d.z, d.w);
  }
  if (lane == 0) {
    float beta = load_scalar(p.beta, s.batch * p.beta_sb + t * p.beta_st + hv * p.beta_sh, p.beta_type);
    if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
    if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
    store_shared(to + 4 * (3 * K), beta, 0.0f);
  }
}

#endif
