// A prepare warp turns 16 tokens of q, k, g and beta into a chunk image. It works alone,
// synchronised only by the stages' barriers.
#pragma once

#include "common/chunk_forward/prepare_bounded.cuh"
#include "common/chunk_forward/prepare_unbounded.cuh"
#include "common/clear_rows.cuh"
#include "common/unit_triangle_inverse.cuh"
#include "common/warp_arrivals.cuh"

__device__ __forceinline__ void store_scalars(u32 stage, const Lane& l, const Scalars& s) {
  if (l.t) return;
  const u32 to = stage + OFFSET(ChunkImage, scalars) + 8 * l.p;
  store_shared(to + OFFSET(TokenScalars, beta), s.beta[0], s.beta[1]);
  store_shared(to + OFFSET(TokenScalars, beta_k_norm), s.beta[0] * s.k_norm[0], s.beta[1] * s.k_norm[1]);
  store_shared(to + OFFSET(TokenScalars, k_norm), s.k_norm[0], s.k_norm[1]);
  store_shared(to + OFFSET(TokenScalars, q_factor), s.q_factor[0], s.q_factor[1]);
}

// Columns of T = inverse of I + A, one a lane, by float32 substitution; r T below the diagonal goes
// to the image.
__device__ __forceinline__ void store_inverse(u32 stage, u32 scratch, int lane) {
  const int j = lane & 15;
  float x[C];
  invert_column(x, j, [&](int i, int m) { return scratch + 4 * (SCRATCH_PITCH * i + m); });
  const bool low = lane >= 16;
  const u32 norms = stage + OFFSET(ChunkImage, scalars) + OFFSET(TokenScalars, k_norm) + (low ? 32 : 0);
  const float4 r0 = load_shared4(norms), r1 = load_shared4(norms + 16);
  const float r[8] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
  const u32 to = stage + OFFSET(ChunkImage, inverse) + (j >> 3) * 256 + (j & 7) * 2 + (low ? 128 : 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = low ? i + 8 : i;
    const float value = row > j ? r[i] * (low ? x[i + 8] : x[i]) : 0.0f;
    store_shared16(to + 16 * i, pack_bf16(value, 0.0f));
  }
}

// The barrier that completes when a stage may be written.
struct EmptyBarrier {
  u32 empty, parity;
};

// The whole chunk, whose slice 0 is in `raw`; on return `from` is at the next chunk and slice 0 of
// that is in `raw`.
__device__ __forceinline__ void prepare_chunk(Raw& raw, Source& from, const Gate& gate,
                                              const ChunkForwardParams& p, const Lane& l, Scalars& s,
                                              int left, int stride, const EmptyBarrier& stage_empty,
                                              u32 stage, u32 scratch, u32 bias) {
  Products sums = {};
  // The instruction cache holds the scan's instructions and those of two slices (one if gates are
  // unbounded).
#pragma unroll UNROLL
  for (int slice = 0; slice < SLICES; ++slice) {
    float sum[2][8], total[8];
    const u32 biases = bias + 4 * (32 * slice + 8 * l.t);
    gate_steps(raw, gate, biases, left, sum);
    NextLoad next = {from, slice + 1, left};
    if (slice == SLICES - 1) {
      advance(from);
      next.slice = 0;
      next.left = left - stride;
    }
    load_gate(raw, next);
    if constexpr (!BOUNDED) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        sum[0][e] = max_or_nan(sum[0][e], LOWEST_STEP);
        sum[1][e] = max_or_nan(sum[1][e], LOWEST_STEP);
      }
    }
    sum_steps(sum, total, l);
    if (slice == 0) barrier_wait(stage_empty.empty, stage_empty.parity);
    prepare_slice(Form<BOUNDED>(), raw, sum, total, l, slice, stage, sums, next);
  }
  set_norms(p, sums.k_square, sums.q_square, s);
  store_scalars(stage, l, s);
  if constexpr (!BOUNDED) sync_warp();
  store_triangles(Form<BOUNDED>(), stage, scratch, l, s, sums);
  sync_warp();
  store_inverse(stage, scratch, l.lane);
}

// Publishes a finished stage: to this block's scan warps, and as a bulk copy to the other blocks of
// the cluster.
__device__ __forceinline__ void publish(u32 stage, u32 full, int lane, int rank) {
  if constexpr (CLUSTER > 1 || WARPGROUP) fence_async_proxy();
  warp_arrive(full, lane);
  if constexpr (CLUSTER > 1) {
    if (lane == 0) {
#pragma unroll
      for (int i = 1; i < CLUSTER; ++i) {
        const int to = (rank + i) % CLUSTER;
        const u32 remote = cluster_address(full, to);
        warp_expect_remote(remote, IMAGE_BYTES);
        copy_to_block(cluster_address(stage, to), stage, IMAGE_BYTES, remote);
      }
    }
  }
}

__device__ __forceinline__ Source make_source(const ChunkForwardParams& p, const SequenceHead& w,
                                              const Lane& l, int token) {
  const long long g_size = G_FLOAT ? 4 : 2, beta_size = p.beta_type == TYPE_FLOAT32 ? 4 : 2;
  const long long at = w.first + token;
  Source s;
  s.k_token = (int)(2 * p.k_st);
  s.q_token = (int)(2 * p.q_st);
  s.g_token = (int)(g_size * p.g_st);
  s.beta_token = (int)(beta_size * p.beta_st);
  s.k = reinterpret_cast<const unsigned char*>(p.k + 2 * (w.batch * p.k_sb + w.h * p.k_sh) + at * s.k_token +
                                               16 * l.t);
  s.q = reinterpret_cast<const unsigned char*>(p.q + 2 * (w.batch * p.q_sb + w.h * p.q_sh) + at * s.q_token +
                                               16 * l.t);
  s.g = reinterpret_cast<const unsigned char*>(p.g + g_size * (w.batch * p.g_sb + w.hv * p.g_sh) +
                                               at * s.g_token + 8 * g_size * l.t);
  s.beta = p.beta + beta_size * (w.batch * p.beta_sb + w.hv * p.beta_sh) + at * s.beta_token;
  return s;
}

__device__ __forceinline__ void prepare_warp(const ChunkForwardParams& p, const SequenceHead& sequence,
                                             const Gate& gate, u32 shared, int warp, int rank) {
  const Lane l = make_lane();
  const u32 scratch = shared + OFFSET(SharedMemory, scratch) + warp * C * SCRATCH_PITCH * 4;
  constexpr int STRIDE = PREPARE_WARPS * CLUSTER;
  int c = warp * CLUSTER + rank,
      left = sequence.length - c * C - 2 * l.p;  // tokens of this lane that are real: left, up to 2
  Source from = make_source(p, sequence, l, c * C + 2 * l.p);
  Raw raw = {};
  u32 beta[2];
  load_gate(raw, {from, 0, left});
  load_rows(raw, {from, 0, left});
  load_beta(p, from.beta, from.beta_token, left, beta);
  for (; c < sequence.chunks; c += STRIDE, left -= STRIDE * C) {
    const int slot = c % STAGES;
    Scalars s;
    s.beta[0] = activate_beta(p, beta[0], left > 0);
    s.beta[1] = activate_beta(p, beta[1], left > 1);
    const u32 stage = shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH;
    const EmptyBarrier stage_empty = {shared + OFFSET(SharedMemory, empty) + 8 * slot,
                                      (u32)(c / STAGES & 1) ^ 1};
    prepare_chunk(raw, from, gate, p, l, s, left, STRIDE * C, stage_empty, stage, scratch,
                  shared + OFFSET(SharedMemory, bias));
    load_beta(p, from.beta, from.beta_token, left - STRIDE * C, beta);
    publish(stage, shared + OFFSET(SharedMemory, full) + 8 * slot, l.lane, rank);
  }
  const u32 number = block_index() * PREPARE_WARPS + warp;
  clear_unused_rows(p, 2ll * p.HV * V,
                    {32 * number + (thread_index() & 31), 32u * grid_blocks() * PREPARE_WARPS});
}
