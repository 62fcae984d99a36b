// The norms' backward, and stores of the gradients.
#pragma once

#include "common/l2norm.cuh"
#include "sm90/chunk_backward/grads_gate.cuh"
#include "sm90/chunk_backward/grads_loads.cuh"
#include "sm90/chunk_backward/grads_pair_sums.cuh"
#include "sm90/chunk_backward/grads_token_sums.cuh"
#if BOUNDED
#include "sm90/chunk_backward/grads_pair_sums_bounded.cuh"
#else
#include "sm90/chunk_backward/grads_pair_sums_unbounded.cuh"
#endif

// This warp's channels of sum_d of each token of the half, to `which` of the block's sums.
__device__ __forceinline__ void store_channel_sum(int which, float x, u32 shared, const Lane& l) {
  const u32 at = OFFSET(SharedMemory, channel_sums) +
                 4 * ((which * 8 + 4 * l.channel_half + l.warp) * C + HALF * l.token_half + token_of(l));
  store_shared(shared + at, __float_as_uint(x));
}
// The sum over all channels of token `lane` of the half.
__device__ __forceinline__ float load_token_sum(int which, u32 shared, const Lane& l) {
  const u32 from =
      shared + OFFSET(SharedMemory, channel_sums) + 4 * (which * 8 * C + HALF * l.token_half + l.lane);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = load_shared1(from + 4 * C * i);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
// One float a token, of a warp that has one token a lane, for a lane's token pair j.
__device__ __forceinline__ float2 token_pair(float x, int j, const Lane& l) {
  return make_float2(shuffle(x, 8 * j + 2 * l.t), shuffle(x, 8 * j + 2 * l.t + 1));
}

// Sum over the warp's channels of d x, x from the warp's own rows, for token token_of(l).
__device__ __forceinline__ float dot_with_rows(const float (&d)[4][4], u32 image, u32 shared, const Lane& l) {
  Operand x;
  load_own(x, shared + image, l);
  OfTokens sum = {};
  each([&](int j, int e) { sum.x[j][e & 1] += element(x, j, e) * d[j][e]; });
  return sum_channels(sum, l);
}

// All sums over pairs, and then those over channels that the norms and dbeta need. dq in aq, dk,
// dgc in cs.
template <int TOKEN_HALF>
__device__ __forceinline__ void sum_pairs(Accumulators& d, float (&dk)[4][4], const Operands& o,
                                          const Decays& saved, const ChunkBackwardParams& p, u32 shared,
                                          u32 scalars, const Lane& l) {
  add_across<TOKEN_HALF>(d, o, p.centre, shared, l);
  u32 sk[4];
  start_own<TOKEN_HALF>(d, dk, o, sk, shared, l);
  float end[2][ANCHORS];
  load_anchor_ends<TOKEN_HALF>(end, shared, l);
  finish_pairs<TOKEN_HALF>(d, dk, o, saved, end, shared, scalars, l);
  const float rk =
      load_shared1(scalars + OFFSET(RowScalars, k_norm) + 4 * (HALF * l.token_half + token_of(l)));
  const float x = load_shared1(shared + OFFSET(SharedMemory, scaling[1])) * rk *
                  dot_with_rows(d.ax, OFFSET(SharedMemory, k), shared, l);
  store_channel_sum(2, x + load_shared1(shared + OFFSET(SharedMemory, values) + 4 * l.thread), shared, l);
  if (!GROUPED && p.flags & FLAG_L2NORM) {
    store_channel_sum(0, dot_with_rows(d.aq, OFFSET(SharedMemory, q), shared, l), shared, l);
    store_channel_sum(1, dot_with_rows(dk, OFFSET(SharedMemory, k), shared, l), shared, l);
  }
}

// The norm's gradient of token `lane` of the half: what its row of gradients is multiplied by, and how much of the row
// is taken away.
__device__ __forceinline__ NormGradient row_norm_gradient(int which, u32 norms, float grow,
                                                          const ChunkBackwardParams& p, u32 shared,
                                                          const Lane& l) {
  // Norms are 1 where rows are not to be normalised.
  const float norm = load_shared1(norms + 4 * (HALF * l.token_half + l.lane));
  return norm_gradient(p.flags & FLAG_L2NORM, norm, load_token_sum(which, shared, l), grow);
}

// dq or dk from d, `grow` smaller and with regard to normalised rows: out, and through the norm
// unless heads are grouped. The rows as they were given: where most of a gradient lies along them,
// what is taken away needs more bits than operands have.
__device__ __forceinline__ void store_row_gradient(const float (&d)[4][4], const NormGradient& norm,
                                                   u32 image, float grow, const ChunkBackwardParams& p,
                                                   u64 array, u32 shared, u32 unit, const OutputRows& to,
                                                   const Lane& l) {
  if constexpr (GROUPED) return store_floats([&](int j, int e) { return grow * d[j][e]; }, p, array, unit, K, l);
  Operand r;
  load_own(r, shared + image, l);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 by = token_pair(norm.by, j, l), less = token_pair(norm.less, j, l);
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const float x = d[j][e] * by.x - element(r, j, e) * less.x,
                  y = d[j][e + 1] * by.y - element(r, j, e + 1) * less.y;
      r[j >> 1][2 * (j & 1) + (e >> 1)] = pack_bf16(x, y);
    }
  }
  store_own(shared + image, r, p, array, channels_of(p), to, l);
}

// dgc to gradients of the decays, in place: sums from each token to the half's end, `following`
// beyond it.
__device__ __forceinline__ void sum_following_tokens(float (&d)[4][4], const float (&following)[2],
                                                     const Lane& l) {
  float sums[4] = {following[0], following[0], following[1], following[1]};
  sum_tiles<true, 4>(d, sums, l);
}

// What all tokens after the half's give to its steps: through the chunk's end, through the other
// half, and the part of the half's own contribution to the chunk's end that dgc counted.
__device__ __forceinline__ void load_following_sums(float (&following)[2], u32 shared, u32 sums, u32 last,
                                                    float shrink, const Lane& l) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 channel = 4 * (l.channel + 8 * r), at = shared + channel;
    const float states = load_shared1(sums + channel) + load_shared1(sums + channel + 4 * K);
    following[r] =
        states * load_shared1(last + channel) * shrink + load_shared1(at + OFFSET(SharedMemory, suffix_sums));
    following[r] += load_shared1(
        at + (l.token_half ? OFFSET(SharedMemory, suffix_sums) + 4 * K : OFFSET(SharedMemory, across)));
  }
}

// The gate's gradient out, and its sums to shared memory.
__device__ __forceinline__ void store_gate_gradient(float (&d)[4][4], const ChunkBackwardParams& p, u32 gate,
                                                    float grow, u32 shared, u32 unit, const OutputRows& to,
                                                    const Lane& l) {
  const GateSums sums =
      gate_backward(d, p, gate, grow, unit_int(unit, OFFSET(SharedUnit, rows)), shared, l);
  if constexpr (G_FLOAT) {
    store_floats([&](int j, int e) { return d[j][e]; }, p, p.dg, unit, channels_of(p), l);
  } else {
    Operand x;
    make_operand(x, [&](int j, int e) { return d[j][e]; });
    store_own(shared + OFFSET(SharedMemory, g), x, p, p.dg, channels_of(p), to, l);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_quad(sums.bias[r]);
    if (l.t == 0)
      store_shared(shared + OFFSET(SharedMemory, bias) + 4 * (K * l.token_half + l.channel + 8 * r),
                   __float_as_uint(sum));
  }
  float rate = sums.rate;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) rate += shuffle_xor(rate, mask);
  if (l.lane == 0)
    store_shared(shared + OFFSET(SharedMemory, rate) + 4 * (l.thread >> 5), __float_as_uint(rate));
}

// The parts of dbias and dA_log of a unit, times SUM_SCALE, once every warp's are there.
__device__ __forceinline__ void store_partial_sums(const ChunkBackwardParams& p, u32 shared, u32 unit,
                                                   const Lane& l) {
  if (l.thread > K) return;
  const u64 place = unit_long(unit, OFFSET(SharedUnit, place));
  if (p.dbias_part && l.thread < K) {
    const u32 from = shared + OFFSET(SharedMemory, bias) + 4 * l.thread;
    reinterpret_cast<float*>(p.dbias_part)[place * K + l.thread] =
        load_shared1(from) + load_shared1(from + 4 * K);
  }
  if (p.dA_part && l.thread == K) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += load_shared1(shared + OFFSET(SharedMemory, rate) + 4 * i);
    reinterpret_cast<float*>(p.dA_part)[place] = sum;
  }
}

// dbeta: one warp a side has all tokens' sums.
__device__ __forceinline__ void store_beta_gradient(const ChunkBackwardParams& p, u32 shared, u32 scalars,
                                                    u32 unit, const Lane& l) {
  if (l.channel_half || l.warp != BETA_WARP) return;
  const int token = HALF * l.token_half + l.lane;
  const float beta = load_shared1(scalars + 4 * token);
  float d = load_token_sum(2, shared, l);
  if (p.flags & FLAG_BETA_SIGMOID) d *= beta * (1.0f - (p.flags & FLAG_NEG_EIGVAL ? 0.5f * beta : beta));
  if (token < unit_int(unit, OFFSET(SharedUnit, rows)))
    store_scalar(p.dbeta, unit_long(unit, OFFSET(SharedUnit, row)) + (long long)token * p.HV, p.beta_type, d);
}
