// Two tokens by eight channels of the inputs in a lane's registers; gates, beta and norms.
//
// Lane (g, t) = (lane / 4, lane % 4) holds tokens 2p and 2p + 1 of 16, where p is g with bits 0 and
// 1 swapped, and 8 channels (8t ..) of a slice of 32. Those are the lane's elements of mma
// fragments under a permutation of channels, which does not change sums over channels; the swap
// keeps 16-byte stores to a swizzled operand free of bank conflicts.
#pragma once

#include "common/gate_bias.cuh"
#include "common/l2norm.cuh"
#include "common/loads.cuh"
#include "generated/chunk_forward_params.cuh"

constexpr int G_VECTORS = G_FLOAT ? 2 : 1;

struct Raw {
  uint4 k[2], q[2], g[2][G_VECTORS];
};

__device__ __forceinline__ int token_pair_of(int g) { return (g & 4) | (g & 1) << 1 | (g & 2) >> 1; }

// Tokens past the end: zero queries and keys, no decay.
__device__ __forceinline__ void clear_past_end(Raw& raw, float (&steps)[2][8], int left) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i < left) continue;
    raw.k[i] = raw.q[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int e = 0; e < 8; ++e) steps[i][e] = 0.0f;
  }
}

__device__ __forceinline__ u32 word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
__device__ __forceinline__ float element(const uint4& x, int e) {
  const u32 w = word(x, e >> 1);
  return e & 1 ? bf16_high(w) : bf16_low(w);
}
__device__ __forceinline__ float gate_input(const Raw& raw, int i, int e) {
  return G_FLOAT ? __uint_as_float(word(raw.g[i][e >> 2], e & 3)) : element(raw.g[i][0], e);
}

struct Biases {
  float x[8];
};
__device__ __forceinline__ Biases load_biases(u32 at) {
  const float4 a = load_shared4(at), b = load_shared4(at + 16);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
template <class F>
__device__ __forceinline__ void each_input(const Raw& raw, float (&s)[2][8], F step) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
#pragma unroll
    for (int i = 0; i < 2; ++i) s[i][e] = step(gate_input(raw, i, e), e);
  }
}
// Of gates that are not rare.
__device__ __forceinline__ void usual_steps(const Raw& raw, const Gate& gate, u32 bias_at, float (&s)[2][8]) {
  if (gate.kind == GATE_LOG) {
    each_input(raw, s, [&](float x, int) { return x * LOG2E; });
    return;
  }
  const Biases bias = load_biases(bias_at);
  if (!BOUNDED && gate.kind == GATE_SOFTPLUS) {
    each_input(raw, s, [&](float x, int e) { return softplus_step(gate.unit, LOG2E * x + bias.x[e]); });
    return;
  }
  each_input(raw, s, [&](float x, int e) { return sigmoid_step(gate, x + bias.x[e]); });
}
__device__ __forceinline__ void rare_steps(const Raw& raw, const Gate& gate, u32 bias_at, float (&s)[2][8]) {
  const Biases bias = load_biases(bias_at);
  if (!BOUNDED && gate.slope != 0.0f) {
    each_input(raw, s, [&](float x, int e) { return softplus_step(gate.unit, LOG2E * (x + bias.x[e])); });
    return;
  }
  const float still = still_step(gate);
  each_input(raw, s, [&](float x, int e) { return nothing_of(x + bias.x[e]) + still; });
}
// log2 decays of both tokens, 0 past the end. One branch for all that is seldom.
__device__ __forceinline__ void gate_steps(Raw& raw, const Gate& gate, u32 bias_at, int left,
                                           float (&s)[2][8]) {
  usual_steps(raw, gate, bias_at, s);
  if (gate.rare || left < 2) {
    if (gate.rare) rare_steps(raw, gate, bias_at, s);
    clear_past_end(raw, s, left);
  }
}

struct Lane {
  int lane, g, t, p;
  float bit[3];  // the bits of p, as factors
};

__device__ __forceinline__ Lane make_lane() {
  Lane l;
  l.lane = opaque(thread_index() & 31);
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.p = token_pair_of(l.g);
#pragma unroll
  for (int i = 0; i < 3; ++i) l.bit[i] = (float)(l.p >> i & 1);
  return l;
}

// Replaces steps by `start` and their inclusive sums from the first of 16 tokens; `total` gets the sum of
// all. Sums of earlier tokens never depend on later ones.
__device__ __forceinline__ void sum_steps(float (&s)[2][8], float (&total)[8], const Lane& l,
                                          float start = 0.0f) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float sum = s[0][e] + s[1][e];
    float other = shuffle_xor(sum, 8);
    float before = other * l.bit[0] + start;
    sum += other;
    other = shuffle_xor(sum, 4);
    before += other * l.bit[1];
    sum += other;
    other = shuffle_xor(sum, 16);
    before += other * l.bit[2];
    total[e] = sum + other;
    s[0][e] += before;
    s[1][e] += s[0][e];
  }
}

// Of the lane's two tokens: beta, inverse norm of k, scale over norm of q.
struct Scalars {
  float beta[2], k_norm[2], q_factor[2];
};

// From the lane's sums of squares; four lanes share a token.
__device__ __forceinline__ void set_norms(const ChunkForwardParams& p, const float (&k_square)[2],
                                          const float (&q_square)[2], Scalars& s) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.k_norm[i] = 1.0f;
    s.q_factor[i] = p.scale;
    if (p.flags & FLAG_L2NORM) {
      float kk = k_square[i], qq = q_square[i];
      kk += shuffle_xor(kk, 1);
      qq += shuffle_xor(qq, 1);
      kk += shuffle_xor(kk, 2);
      qq += shuffle_xor(qq, 2);
      s.k_norm[i] = inverse_norm(kk);
      s.q_factor[i] *= inverse_norm(qq);
    }
  }
}

// Bits of beta of both of a lane's tokens (`token` bytes apart; `left` are real), not converted
// yet: that would wait for the load.
__device__ __forceinline__ void load_beta(const ChunkForwardParams& p, u64 from, long long token, int left,
                                          u32 (&beta)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    beta[i] = 0;
    if (i < left) beta[i] = load_bits(from + i * token, p.beta_type);
  }
}

__device__ __forceinline__ float activate_beta(const ChunkForwardParams& p, u32 bits, bool real) {
  float beta = from_bits(bits, p.beta_type);
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  return real ? beta : 0.0f;
}

__device__ __forceinline__ Gate make_gate(const ChunkForwardParams& p, int hv) {
  const float A_log = p.A_log ? reinterpret_cast<const float*>(p.A_log)[hv] : 0.0f;
  return make_gate<BOUNDED>(p.gate, A_log, 1.0f / p.lower_bound);
}

__device__ __forceinline__ float load_bias(const ChunkForwardParams& p, int hv, int channel) {
  return p.dt_bias ? held_bias(load_scalar(p.dt_bias, (long long)hv * K_DIM + channel, p.bias_type)) : 0.0f;
}
