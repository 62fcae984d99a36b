// The norms' backward, and stores of the gradients.
#pragma once

#include "common/l2norm.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_backward/grads_channel_sums.cuh"
#include "sm90/chunk_backward/grads_gate.cuh"
#include "sm90/chunk_backward/grads_loads.cuh"
#include "sm90/chunk_backward/grads_pair_sums.cuh"
#include "sm90/chunk_backward/grads_token_sums.cuh"
#if BOUNDED
#include "sm90/chunk_backward/grads_pair_sums_bounded.cuh"
#else
#include "sm90/chunk_backward/grads_pair_sums_unbounded.cuh"
#endif

// Where a warp's channels' sums of the tokens of its half are.
__device__ __forceinline__ u32 channel_sums_address(u32 shared, int which, int warp, const Lane& l) {
  return shared + OFFSET(SharedMemory, channel_sums) + 4 * ((which * 8 + warp) * C + HALF * l.token_half);
}
__device__ __forceinline__ void store_channel_sums(int which, const float (&d)[4][4], u32 image, u32 shared,
                                                   const Lane& l) {
  TokenSums sums;
  dot_with_rows(sums, d, shared + image, l);
  store_token_sums(channel_sums_address(shared, which, 4 * l.channel_half + l.warp, l), sums, l);
}
// The sum over all channels of the token whose place is `lane`.
__device__ __forceinline__ float load_token_sum(int which, u32 shared, const Lane& l) {
  return add_warps(channel_sums_address(shared, which, 0, l) + 4 * l.lane, 4 * C);
}

// All sums over pairs. dq in aq, x in ax, dk, dgc in cs.
template <int TOKEN_HALF>
__device__ __forceinline__ void sum_pairs(Accumulators& d, float (&dk)[4][4], const Operands& o,
                                          const Decays& saved, const ChunkBackwardParams& p, u32 shared,
                                          u32 scalars, const Lane& l) {
  add_across<TOKEN_HALF>(d, o, p.centre, shared, l);
  u32 sk[4];
  start_own<TOKEN_HALF>(d, dk, o, sk, shared, l);
  finish_pairs<TOKEN_HALF>(d, dk, o, saved, shared, scalars, l);
}
// Sums over channels that the norms and dbeta need, of x in ax, dq in aq and dk.
__device__ __forceinline__ void sum_channels(const Accumulators& d, const float (&dk)[4][4],
                                             const ChunkBackwardParams& p, u32 shared, const Lane& l) {
  store_channel_sums(2, d.ax, OFFSET(SharedMemory, k), shared, l);
  if (!GROUPED && p.flags & FLAG_L2NORM) {
    store_channel_sums(0, d.aq, OFFSET(SharedMemory, q), shared, l);
    store_channel_sums(1, dk, OFFSET(SharedMemory, k), shared, l);
  }
}

// The norm's gradient of the token whose place is `lane`: what its row of gradients is multiplied by, and how much of
// the row is taken away.
__device__ __forceinline__ NormGradient row_norm_gradient(int which, u32 norms, float grow,
                                                          const ChunkBackwardParams& p, u32 shared,
                                                          const Lane& l) {
  // Norms are 1 where rows are not to be normalised.
  const float norm = load_shared1(norms + 4 * (HALF * l.token_half + token_at(l.lane)));
  return norm_gradient(p.flags & FLAG_L2NORM, norm, load_token_sum(which, shared, l), grow);
}

// Where the factors of the half's rows (0: of q, 1: of k) are: in the place of dA.
__device__ __forceinline__ u32 norm_gradients_address(u32 shared, int which, const Lane& l) {
  return shared + OFFSET(SharedMemory, dA) + sizeof(NormGradient) * (C * which + HALF * l.token_half);
}
__device__ __forceinline__ u32 norms_full_address(u32 shared, const Lane& l) {
  return shared + OFFSET(SharedMemory, norms_full) + 8 * l.token_half;
}
// By a warp for each array, for all warps of the half, which wait for them when they need them.
__device__ __forceinline__ void share_norm_gradients(const ChunkBackwardParams& p, u32 shared, u32 scalars, float grow,
                                                     const Lane& l) {
  if (!l.channel_half || l.warp >= NORM_WARPS) return;
  const u32 norms = scalars + (l.warp ? OFFSET(RowScalars, k_norm) : OFFSET(RowScalars, q_norm));
  const NormGradient x = row_norm_gradient(l.warp, norms, grow, p, shared, l);
  store_shared(norm_gradients_address(shared, l.warp, l) + sizeof(NormGradient) * token_at(l.lane), x.by, x.less);
  warp_arrive(norms_full_address(shared, l), l.lane);
}

// dq or dk from d, `grow` smaller and with regard to normalised rows: out, and through the norm
// unless heads are grouped. The rows as they were given: where most of a gradient lies along them,
// what is taken away needs more bits than operands have.
__device__ __forceinline__ void store_row_gradient(const float (&d)[4][4], int which, u32 image, float grow,
                                                   const ChunkBackwardParams& p, u64 array, u32 shared, u32 unit,
                                                   const OutputRows& to, const Lane& l) {
  if constexpr (GROUPED) return store_floats([&](int j, int e) { return grow * d[j][e]; }, p, array, unit, K, l);
  const u32 factors = norm_gradients_address(shared, which, l) + sizeof(NormGradient) * 2 * l.t;
  Operand r;
  load_own(r, shared + image, l);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 norms = load_shared4(factors + sizeof(NormGradient) * 8 * j);
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const float x = d[j][e] * norms.x - element(r, j, e) * norms.y,
                  y = d[j][e + 1] * norms.z - element(r, j, e + 1) * norms.w;
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

// What all tokens after the half's give to its steps: through the chunk's end, with the part of the halves' own
// contributions to it that dgc counted, and of the first half through the other one.
__device__ __forceinline__ void load_following_sums(float (&following)[2], u32 shared, u32 sums, u32 last,
                                                    float shrink, const Lane& l) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 channel = 4 * (l.channel + 8 * r), at = shared + channel;
    const float states = load_shared1(sums + channel) + load_shared1(sums + channel + 4 * K);
    following[r] = states * load_shared1(last + channel) * shrink;
    following[r] += load_shared1(at + OFFSET(SharedMemory, suffix_sums)) +
                    load_shared1(at + OFFSET(SharedMemory, suffix_sums[1]));
    if (!l.token_half) following[r] += load_shared1(at + OFFSET(SharedMemory, later_sums));
  }
}

// The gate's gradient out, and its sums to shared memory.
__device__ __forceinline__ void store_gate_gradient(float (&d)[4][4], const ChunkBackwardParams& p, u32 gate,
                                                    float grow, u32 shared, u32 unit, const OutputRows& to,
                                                    const Lane& l) {
  Operand packed;
  const GateSums sums =
      gate_backward(d, packed, p, gate, grow, unit_int(unit, OFFSET(SharedUnit, rows)), shared, l);
  if constexpr (G_FLOAT) {
    store_floats([&](int j, int e) { return d[j][e]; }, p, p.dg, unit, channels_of(p), l);
  } else {
    store_own(shared + OFFSET(SharedMemory, g), packed, p, p.dg, channels_of(p), to, l);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (l.t == 0)
      store_shared(shared + OFFSET(SharedMemory, bias) + 4 * (K * l.token_half + l.channel + 8 * r),
                   __float_as_uint(sums.bias[r]));
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
                                                    u32 unit, float grow, const Lane& l) {
  if (l.channel_half || l.warp != BETA_WARP) return;
  const int token = HALF * l.token_half + token_at(l.lane);
  const float beta = load_shared1(scalars + 4 * token),
              by = load_shared1(scalars + OFFSET(RowScalars, k_norm) + 4 * token) * grow;
  float d = by * load_token_sum(2, shared, l) +
            load_shared1(shared + OFFSET(SharedMemory, of_values) + 4 * (HALF * l.token_half + l.lane));
  if (p.flags & FLAG_BETA_SIGMOID) d *= beta * (1.0f - (p.flags & FLAG_NEG_EIGVAL ? 0.5f * beta : beta));
  if (token < unit_int(unit, OFFSET(SharedUnit, rows)))
    store_scalar(p.dbeta, unit_long(unit, OFFSET(SharedUnit, row)) + (long long)token * p.HV, p.beta_type, d);
}
