// A prepare warp turns 16 tokens of q, k, g, beta into a chunk image, alone: no barrier but those of the stages.
//
// Lane (g, t) = (lane / 4, lane % 4) holds tokens 2p and 2p + 1, p being g with its two low bits swapped, and 8 channels
// (8t ..) of each slice of 32. Those are the lane's elements of the matrix unit's fragments under a permutation of
// channels, which sums over channels do not see; the swap keeps the image's 16-byte stores free of bank conflicts.
#ifndef KDACORE_PREPARE_CUH
#define KDACORE_PREPARE_CUH

#include "common/chunk.cuh"
#include "common/gate.cuh"
#include "common/loads.cuh"
#include "generated/params.cuh"

constexpr int SLICES = K / 32;
constexpr int G_VECTORS = G_FLOAT ? 2 : 1;
// k 2^-G carries this factor (log2) so that G down to -116 overflows nothing.
constexpr float SHIFT = -64.0f;

struct Raw {
  uint4 k[2], q[2], g[2][G_VECTORS];
};

struct Gate {
  int kind;
  float unit;   // a step times this is a log2 decay
  float slope;  // sigmoid: -log2(e) exp(A_log)
};

__device__ __forceinline__ int pair_of(int g) { return (g & 4) | (g & 1) << 1 | (g & 2) >> 1; }

struct Source {
  const unsigned char *k, *q, *g;  // this lane's first channel of the sequence's first token
  long long k_step, q_step, g_step;
};

// Bytes with the sign and exponent of a very negative number: a gate input that decays nothing.
__device__ __forceinline__ u32 closed_gate(int kind) {
  return kind == GATE_LOG ? 0u : (G_FLOAT ? 0xf149f2cau : 0xf149f149u);
}

__device__ __forceinline__ void load_raw(Raw& raw, const Source& from, int token, int length, int slice, u32 closed) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool real = token + i < length;
    raw.k[i] = raw.q[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < G_VECTORS; ++j) raw.g[i][j] = make_uint4(closed, closed, closed, closed);
    if (real) {
      raw.k[i] = load_stream(from.k + (token + i) * from.k_step + 64 * slice);
      raw.q[i] = load_stream(from.q + (token + i) * from.q_step + 64 * slice);
#pragma unroll
      for (int j = 0; j < G_VECTORS; ++j) {
        raw.g[i][j] = load_stream(from.g + (token + i) * from.g_step + 64 * G_VECTORS * slice + 16 * j);
      }
    }
  }
}

__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ float element(const uint4& x, int e) {
  const u32 w = word(x, e >> 1);
  return e & 1 ? bf16_high(w) : bf16_low(w);
}
__device__ __forceinline__ float gate_input(const Raw& raw, int i, int e) {
#if G_FLOAT
  return __uint_as_float(word(raw.g[i][e >> 2], e & 3));
#else
  return element(raw.g[i][0], e);
#endif
}

// Steps of both tokens, in units of gate.unit.
__device__ __forceinline__ void gate_steps(const Raw& raw, const Gate& gate, u32 bias_at, float (&s)[2][8]) {
  if (gate.kind == GATE_LOG) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      s[0][e] = gate_input(raw, 0, e);
      s[1][e] = gate_input(raw, 1, e);
    }
    return;
  }
  const float4 b0 = load_shared4(bias_at), b1 = load_shared4(bias_at + 16);
  const float bias[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
  if (gate.kind == GATE_SIGMOID) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[i][e] = reciprocal(1.0f + exp2_fast(gate_input(raw, i, e) * gate.slope + bias[e]));
      }
    }
    return;
  }
#if !SAFE
#pragma unroll
  for (int e = 0; e < 8; ++e) {
#pragma unroll
    for (int i = 0; i < 2; ++i) s[i][e] = softplus(gate_input(raw, i, e) + bias[e]);
  }
#endif
}

// Steps to their sums from the chunk's first token, inclusive; `total` gets the whole chunk's. Sums of earlier tokens
// never depend on later ones.
__device__ __forceinline__ void sum_steps(float (&s)[2][8], float (&total)[8], int p) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float sum = s[0][e] + s[1][e];
    float before = 0.0f;
    float other = shuffle_xor(sum, 8);
    if (p & 1) before += other;
    sum += other;
    other = shuffle_xor(sum, 4);
    if (p & 2) before += other;
    sum += other;
    other = shuffle_xor(sum, 16);
    if (p & 4) before += other;
    total[e] = sum + other;
    s[0][e] += before;
    s[1][e] += s[0][e];
  }
}

// Sums over channels: both triangles (as tiles, or by dyadic level), squares and the diagonal.
struct Products {
#if SAFE
  float kk[2][4], qk[2][4];
#else
  float level[4][4], diagonal[2];
#endif
  float k_square[2], q_square[2];
};

struct Lane {
  int lane, g, t, p;
};

// Where this lane's 8 channels of `slice` go in an operand half, for token i.
__device__ __forceinline__ u32 piece_offset(const Lane& l, int i, int slice) {
  return swizzled(2 * l.p + i, (slice & 1) * 4 + l.t);
}

// Decay of the whole chunk, in the order scan lanes read it: 4 floats (channels 2t, 2t+1, 2t+8, 2t+9) a lane and 16
// channels.
__device__ __forceinline__ void store_decay(u32 stage, const Lane& l, int slice, const float (&decay)[8]) {
  if (l.g) return;
  const u32 to = stage + DECAY_AT + 4 * (32 * slice + 16 * (l.t >> 1) + 2 * (l.t & 1));
#pragma unroll
  for (int e = 0; e < 8; e += 2) store_shared(to + 8 * e, decay[e], decay[e + 1]);
}

// Of the lane's two tokens: beta, inverse norm of k, scale over norm of q.
struct Scalars {
  float beta[2], k_norm[2], q_factor[2];
};

#if SAFE
#include "common/prepare_safe.cuh"
#else
#include "common/prepare_free.cuh"
#endif

__device__ __forceinline__ void store_scalars(u32 stage, const Lane& l, const Scalars& s) {
  if (l.t) return;
  const u32 to = stage + SCALARS_AT + 8 * l.p;
  store_shared(to, s.beta[0], s.beta[1]);
  store_shared(to + 64, s.beta[0] * s.k_norm[0], s.beta[1] * s.k_norm[1]);
  store_shared(to + 128, s.k_norm[0], s.k_norm[1]);
  store_shared(to + 192, s.q_factor[0], s.q_factor[1]);
}

// Columns of T = inverse of I + A, one a lane, by float32 substitution; r T below the diagonal goes to the image.
__device__ __forceinline__ void store_inverse(u32 stage, u32 scratch, int lane) {
  const int j = lane & 15;
  float x[C];
#pragma unroll
  for (int i = 0; i < C; ++i) {
    float even = i == j ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 a = load_shared4(scratch + 4 * (SCRATCH_PITCH * i + m));
      even -= a.x * x[m];
      if (m + 1 < i) odd -= a.y * x[m + 1];
      if (m + 2 < i) even -= a.z * x[m + 2];
      if (m + 3 < i) odd -= a.w * x[m + 3];
    }
    x[i] = even + odd;
  }
  const bool low = lane >= 16;
  const u32 norms = stage + SCALARS_AT + 128 + (low ? 32 : 0);
  const float4 r0 = load_shared4(norms), r1 = load_shared4(norms + 16);
  const float r[8] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
  const u32 to = stage + T_AT + (j >> 3) * 256 + (j & 7) * 2 + (low ? 128 : 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = low ? i + 8 : i;
    const float value = row > j ? r[i] * (low ? x[i + 8] : x[i]) : 0.0f;
    store_shared16(to + 16 * i, pack_bf16(value, 0.0f));
  }
}

// The whole chunk; on entry `raw` holds slice 0 of it, on exit slice 0 of the chunk at `next_token`.
__device__ __forceinline__ void prepare_chunk(Raw& raw, const Source& from, const Work& work, const Gate& gate, u32 closed,
                                              const PrefillParams& p, const Lane& l, Scalars& s, int first, int next,
                                              u32 stage, u32 scratch, u32 bias) {
  Products sums = {};
#pragma unroll 1
  for (int slice = 0; slice < SLICES; ++slice) {
    Raw ahead;
    const bool last = slice == SLICES - 1;
    load_raw(ahead, from, (last ? next : first) + 2 * l.p, work.length, last ? 0 : slice + 1, closed);
    prepare_slice(raw, gate, bias + 4 * (32 * slice + 8 * l.t), l, slice, stage, sums);
    raw = ahead;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.k_norm[i] = 1.0f;
    s.q_factor[i] = p.scale;
    if (p.flags & FLAG_L2NORM) {
      float kk = sums.k_square[i], qq = sums.q_square[i];
      kk += shuffle_xor(kk, 1);
      qq += shuffle_xor(qq, 1);
      kk += shuffle_xor(kk, 2);
      qq += shuffle_xor(qq, 2);
      s.k_norm[i] = inverse_sqrt(kk + 1e-6f);
      s.q_factor[i] *= inverse_sqrt(qq + 1e-6f);
    }
  }
  store_scalars(stage, l, s);
#if !SAFE
  sync_warp();
#endif
  store_triangles(stage, scratch, l, s, sums);
  sync_warp();
  store_inverse(stage, scratch, l.lane);
}

__device__ __forceinline__ float load_beta(const PrefillParams& p, const Work& w, int token) {
  if (token >= w.length) return 0.0f;
  float beta = load_scalar(p.beta, w.batch * p.beta_sb + (w.first + token) * p.beta_st + w.hv * p.beta_sh, p.beta_type);
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  return p.flags & FLAG_NEG_EIGVAL ? 2.0f * beta : beta;
}

__device__ __forceinline__ Gate make_gate(const PrefillParams& p, int hv) {
  const float a = p.A_log ? exp2_fast(LOG2E * reinterpret_cast<const float*>(p.A_log)[hv]) : 1.0f;
  const float unit = p.gate == GATE_LOG ? LOG2E : p.gate == GATE_SOFTPLUS ? -LOG2E * a : LOG2E * p.lower_bound;
  return {p.gate, unit, -LOG2E * a};
}

// Per channel what gate_steps adds: the bias itself, or the bias times the sigmoid's slope.
__device__ __forceinline__ void store_bias(const PrefillParams& p, int hv, float* bias) {
  const Gate gate = make_gate(p, hv);
  for (int c = thread_index(); c < K; c += THREADS) {
    const float b = p.dt_bias ? load_scalar(p.dt_bias, (long long)hv * K + c, p.bias_type) : 0.0f;
    bias[c] = gate.kind == GATE_SIGMOID ? gate.slope * b : b;
  }
}

// Publish a finished stage: to this block's scan warps, and as a bulk copy to the other blocks of the cluster.
__device__ __forceinline__ void publish(u32 stage, u32 full, int lane, int rank) {
#if CLUSTER > 1
  fence_async_proxy();
#endif
  sync_warp();
  if (lane == 0) {
    barrier_arrive(full);
#if CLUSTER > 1
#pragma unroll
    for (int i = 1; i < CLUSTER; ++i) {
      const int to = (rank + i) % CLUSTER;
      const u32 remote = cluster_address(full, to);
      barrier_expect_remote(remote, STAGE_BYTES);
      copy_to_block(cluster_address(stage, to), stage, STAGE_BYTES, remote);
    }
#endif
  }
}

__device__ __forceinline__ void prepare_warp(const PrefillParams& p, const Work& work, u32 shared, int warp, int rank) {
  Lane l;
  l.lane = thread_index() & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.p = pair_of(l.g);
  const Gate gate = make_gate(p, work.hv);
  const u32 closed = closed_gate(p.gate);
  const long long g_size = G_FLOAT ? 4 : 2;
  const Source from = {
      reinterpret_cast<const unsigned char*>(p.k + 2 * (work.batch * p.k_sb + work.first * p.k_st + work.h * p.k_sh) + 16 * l.t),
      reinterpret_cast<const unsigned char*>(p.q + 2 * (work.batch * p.q_sb + work.first * p.q_st + work.h * p.q_sh) + 16 * l.t),
      reinterpret_cast<const unsigned char*>(p.g + g_size * (work.batch * p.g_sb + work.first * p.g_st + work.hv * p.g_sh) +
                                             8 * g_size * l.t),
      2 * p.k_st, 2 * p.q_st, g_size * p.g_st};
  const u32 scratch = shared + SCRATCH_AT + warp * C * SCRATCH_PITCH * 4;
  constexpr int STRIDE = PREPARE_WARPS * CLUSTER;
  Raw raw;
  load_raw(raw, from, (warp * CLUSTER + rank) * C + 2 * l.p, work.length, 0, closed);
  for (int c = warp * CLUSTER + rank; c < work.chunks; c += STRIDE) {
    const int slot = c % STAGES, first = c * C;
    Scalars s;
    s.beta[0] = load_beta(p, work, first + 2 * l.p);
    s.beta[1] = load_beta(p, work, first + 2 * l.p + 1);
    const u32 stage = shared + STAGES_AT + slot * STAGE_PITCH;
    barrier_wait(shared + EMPTY_AT + 8 * slot, (c / STAGES & 1) ^ 1);
    prepare_chunk(raw, from, work, gate, closed, p, l, s, first, first + STRIDE * C, stage, scratch, shared + BIAS_AT);
    publish(stage, shared + FULL_AT + 8 * slot, l.lane, rank);
  }
}

#endif
