// A solver warp finishes a chunk image: it adds up what the slices' warps found, scales, inverts the triangle and publishes
// the stage.
#ifndef KDACORE_SOLVE_CUH
#define KDACORE_SOLVE_CUH

#include "sm90/slices.cuh"

// Of the lane's two tokens: beta, inverse norm of k, scale over norm of q.
struct Scalars {
  float beta[2], k_norm[2], q_factor[2];
};

#if SAFE
#include "sm90/triangles_safe.cuh"
#else
#include "sm90/triangles_free.cuh"
#endif

__device__ __forceinline__ void store_scalars(u32 stage, int half, const Lane& l, const Scalars& s) {
  if (l.t) return;
  const u32 to = stage + SCALARS_AT + 4 * (HALF * half + 2 * l.p);
  store_shared(to, s.beta[0], s.beta[1]);
  store_shared(to + 4 * C, s.k_norm[0], s.k_norm[1]);
  store_shared(to + 8 * C, s.q_factor[0], s.q_factor[1]);
}

// Row i = 2p + h of the second half against tokens 2n and 2n + 1 of each column pair of the first.
__device__ __forceinline__ void store_across(u32 stage, const Lane& l, const Across& sums) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int j = 2 * pair_of(2 * l.t + c);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 to = stage + (j >> 3) * 256 + (2 * l.p + h) * 16 + (j & 7) * 2;
      store_shared(to + A21_AT, pack_bf16(sums.tile[0][2 * h + c], sums.tile[1][2 * h + c]));
      store_shared(to + Q21_AT, pack_bf16(sums.tile[2][2 * h + c], sums.tile[3][2 * h + c]));
    }
  }
}

// Columns of T = inverse of I + A, one a lane (16 lanes a half), by float32 substitution; r T below the diagonal goes to the
// image.
__device__ __forceinline__ void store_inverse(u32 stage, u32 scratch, int lane) {
  const int j = lane & 15, half = lane >> 4;
  const u32 a_at = scratch + half * SCRATCH_BYTES;
  float x[HALF];
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    float even = i == j ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 a = load_shared4(a_at + 4 * (SCRATCH_PITCH * i + m));
      even -= a.x * x[m];
      if (m + 1 < i) odd -= a.y * x[m + 1];
      if (m + 2 < i) even -= a.z * x[m + 2];
      if (m + 3 < i) odd -= a.w * x[m + 3];
    }
    x[i] = even + odd;
  }
  const u32 norms = stage + SCALARS_AT + 4 * C + 4 * HALF * half;
  const u32 to = stage + T_AT + TRIANGLE_BYTES * half + (j >> 3) * 256 + (j & 7) * 2;
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    const float4 y = load_shared4(norms + 4 * i);
    const float r[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      store_shared16(to + 16 * (i + n), pack_bf16(i + n > j ? r[n] * x[i + n] : 0.0f, 0.0f));
    }
  }
}

// Publish a finished stage: to this block's scan warps, and as a bulk copy to the other scanning blocks of the cluster.
__device__ __forceinline__ void publish(u32 stage, u32 full, int lane, int rank) {
  fence_async_proxy();
  sync_warp();
  if (lane == 0) {
    if (rank < SCANNERS) barrier_arrive(full);
#if CLUSTER > 1
#pragma unroll
    for (int to = 0; to < SCANNERS; ++to) {
      if (to == rank) continue;
      const u32 remote = cluster_address(full, to);
      barrier_expect_remote(remote, STAGE_BYTES);
      copy_to_block(cluster_address(stage, to), stage, STAGE_BYTES, remote);
    }
#endif
  }
}

__device__ __forceinline__ void add_tiles(float (&x)[4][4], u32 from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 y = load_shared4(from + i * PART_BYTES);
    x[i][0] += y.x, x[i][1] += y.y, x[i][2] += y.z, x[i][3] += y.w;
  }
}

// The slices' sums, always added in the same order.
__device__ __forceinline__ void add_parts(Products& sums, u32 from) {
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) {
    const u32 at = from + slice * SLICE_PARTS;
    add_tiles(sums.tile, at);
    const float4 y = load_shared4(at + 4 * PART_BYTES);
    sums.square[0][0] += y.x, sums.square[0][1] += y.y, sums.square[1][0] += y.z, sums.square[1][1] += y.w;
#if !SAFE
    const float4 d = load_shared4(at + 5 * PART_BYTES);
    sums.diagonal[0] += d.x, sums.diagonal[1] += d.y;
#endif
  }
}

__device__ __forceinline__ void set_norms(const PrefillParams& p, const Products& sums, Scalars& s) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.k_norm[i] = 1.0f;
    s.q_factor[i] = p.scale;
    if (p.flags & FLAG_L2NORM) {
      float kk = sums.square[0][i], qq = sums.square[1][i];
      kk += shuffle_xor(kk, 1);
      qq += shuffle_xor(qq, 1);
      kk += shuffle_xor(kk, 2);
      qq += shuffle_xor(qq, 2);
      s.k_norm[i] = inverse_sqrt(kk + 1e-6f);
      s.q_factor[i] *= inverse_sqrt(qq + 1e-6f);
    }
  }
}

__device__ __forceinline__ void solver_warp(const PrefillParams& p, const Work& work, u32 shared, int warp, int rank) {
  const Lane l = make_lane();
  const u32 scratch = shared + SCRATCH_AT + warp * 2 * SCRATCH_BYTES;
  int i = warp, c = warp * CLUSTER + rank;   // of the block's chunks, of all
  int left = work.length - c * C - 2 * l.p;  // tokens of this lane that are real: left, up to 2 (HALF fewer in the second half)
  const long long size = type_size(p.beta_type), token = size * p.beta_st;
  u64 from = p.beta + size * (work.batch * p.beta_sb + work.hv * p.beta_sh) + (work.first + c * C + 2 * l.p) * token;
  u32 beta[2][2];
  load_beta(p, from, token, left, beta[0]);
  load_beta(p, from + HALF * token, token, left - HALF, beta[1]);
#pragma unroll 1
  for (; c < work.chunks; c += SOLVERS * CLUSTER, i += SOLVERS) {
    const int slot = c % STAGES, group = i % GROUPS;
    const u32 stage = shared + STAGES_AT + slot * STAGE_PITCH;
    const u32 parts = shared + PARTS_AT + group * SLICES * SLICE_PARTS + 16 * l.lane;
    barrier_wait(shared + SUMMED_AT + 8 * warp, (u32)(i / SOLVERS & 1));
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      Scalars s;
#pragma unroll
      for (int n = 0; n < 2; ++n) s.beta[n] = activate_beta(p, half ? beta[1][n] : beta[0][n], left - HALF * half > n);
      Products sums = {};
      add_parts(sums, parts + half * PARTS * PART_BYTES);
      set_norms(p, sums, s);
      store_scalars(stage, half, l, s);
#if !SAFE
      sync_warp();
#endif
      Lane here = l;
#if !SAFE  // offsets are made anew, for want of registers
      here.p = opaque(l.p);
      here.t = opaque(l.t);
#endif
      store_triangles(stage, scratch + half * SCRATCH_BYTES, half, here, s, sums);
    }
    Across across = {};
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) add_tiles(across.tile, parts + slice * SLICE_PARTS + 2 * PARTS * PART_BYTES);
    sync_warp();
    if (l.lane == 0) barrier_arrive(shared + TAKEN_AT + 8 * group);
    store_across(stage, l, across);
    left -= SOLVERS * CLUSTER * C;
    from += SOLVERS * CLUSTER * C * token;
    load_beta(p, from, token, left, beta[0]);
    load_beta(p, from + HALF * token, token, left - HALF, beta[1]);
    store_inverse(stage, scratch, l.lane);
    publish(stage, shared + FULL_AT + 8 * slot, l.lane, rank);
  }
}

#endif
