// Solver warps finish a chunk image: they add up the slices' partial sums, scale them, invert the
// triangles and publish the stage.
#pragma once

#include "common/clear_rows.cuh"
#include "common/unit_triangle_inverse.cuh"
#include "sm90/chunk_forward/slices.cuh"
#include "sm90/chunk_forward/helpers.cuh"
#include "sm90/chunk_forward/stage_copies.cuh"

// Unbounded gates: a pair's products to the image and to scratch.
__device__ __forceinline__ void store_pair(u32 stage, u32 scratch, int half, int i, int j, float kk,
                                           float qk) {
  const u32 scalars = stage + OFFSET(ChunkImage, scalars) + 4 * HALF * half;
  const float factor = load_shared1(scalars + 4 * i) *
                       load_shared1(scalars + OFFSET(TokenScalars, k_norm) + 4 * i) *
                       load_shared1(scalars + OFFSET(TokenScalars, k_norm) + 4 * j);
  store_shared(scratch + 4 * (SCRATCH_PITCH * i + j), __float_as_uint(kk * factor));
  store_shared16(triangle_at(stage + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES * half, i, j),
                 pack_bf16(qk, 0.0f));
}

// Both triangles of a half to the image and to scratch.
__device__ __forceinline__ void store_triangles(u32 stage, u32 scratch, int half, const Lane& l,
                                                const Scalars& s, Products& sums) {
  const u32 image = stage + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES * half;
  if constexpr (BOUNDED) {
    store_bounded_triangles(image, scratch, l, s, sums.tile, 1.0f, KQ_SCALE);
  } else {
    store_levels(image, scratch, l, sums.tile, sums.diagonal,
                 [&](int i, int j, float kk, float qk) { store_pair(stage, scratch, half, i, j, kk, qk); });
  }
}

__device__ __forceinline__ void store_scalars(u32 stage, int half, const Lane& l, const Scalars& s) {
  if (l.t) return;
  const u32 to = stage + OFFSET(ChunkImage, scalars) + 4 * (HALF * half + 2 * l.p);
  store_shared(to + OFFSET(TokenScalars, beta), s.beta[0] * KQ_SCALE, s.beta[1] * KQ_SCALE);
  store_shared(to + OFFSET(TokenScalars, k_norm), s.k_norm[0] / KQ_SCALE, s.k_norm[1] / KQ_SCALE);
  store_shared(to + OFFSET(TokenScalars, q_factor), s.q_factor[0] / KQ_SCALE, s.q_factor[1] / KQ_SCALE);
}

// Row i = 2p + h of the second half against tokens 2n and 2n + 1 of each column pair of the first.
__device__ __forceinline__ void store_across(u32 stage, const Lane& l, const Across& sums) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int j = 2 * token_pair_of(2 * l.t + c);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 to = stage + (j >> 3) * 256 + (2 * l.p + h) * 16 + (j & 7) * 2;
      store_shared(to + OFFSET(ChunkImage, kk_across),
                   pack_bf16(sums.tile[0][2 * h + c], sums.tile[1][2 * h + c]));
      store_shared(to + OFFSET(ChunkImage, qk_across),
                   pack_bf16(sums.tile[2][2 * h + c], sums.tile[3][2 * h + c]));
    }
  }
}

// Columns of T = inverse of I + A, one a lane (16 lanes a half), by float32 substitution; r T below
// the diagonal goes to the image.
__device__ __forceinline__ void store_inverse(u32 stage, u32 scratch, int lane) {
  const int j = lane & 15, half = lane >> 4;
  const u32 a_at = scratch + half * SCRATCH_BYTES;
  float x[HALF];
  invert_column(x, j, [&](int i, int m) { return a_at + 4 * (SCRATCH_PITCH * i + m); });
  const u32 norms = stage + OFFSET(ChunkImage, scalars) + OFFSET(TokenScalars, k_norm) + 4 * HALF * half;
  const u32 to = stage + OFFSET(ChunkImage, inverse) + TRIANGLE_BYTES * half + (j >> 3) * 256 + (j & 7) * 2;
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    const float4 y = load_shared4(norms + 4 * i);
    const float r[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) store_shared16(to + 16 * (i + n), pack_bf16(r[n] * x[i + n], 0.0f));
  }
  store_shared16(to + 16 * j, 0);  // above the diagonal x is zero
}

// A finished part of a stage to the other scanning blocks of the cluster; their barriers count its
// bytes.
__device__ __forceinline__ void copy_out(u32 stage, u32 full, u32 at, u32 bytes, int rank) {
  if constexpr (CLUSTER > 1) {
#pragma unroll
    for (int to = 0; to < SCANNERS; ++to) {
      if (to != rank)
        copy_to_block(cluster_address(stage + at, to), stage + at, bytes, cluster_address(full, to));
    }
  }
}

// The slices' operands are complete when their sums are: they are copied while the solver works.
__device__ __forceinline__ void publish_operands(u32 stage, u32 full, int lane, int rank) {
  fence_async_proxy();
  sync_warp();
  if (lane == 0) copy_out(stage, full, 0, OFFSET(ChunkImage, inverse), rank);
}

// The rest of the image. Only now are the barriers told how many bytes to expect, so they cannot
// complete earlier.
__device__ __forceinline__ void publish(u32 stage, u32 full, int lane, int rank) {
  fence_async_proxy();
  warp_arrive(full, lane);
  if (lane == 0) {
    if constexpr (CLUSTER > 1) {
#pragma unroll
      for (int to = 0; to < SCANNERS; ++to) {
        if (to != rank) warp_expect_remote(cluster_address(full, to), IMAGE_BYTES);
      }
    }
    copy_out(stage, full, OFFSET(ChunkImage, inverse), IMAGE_BYTES - OFFSET(ChunkImage, inverse), rank);
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
#pragma unroll 2  // to save registers
  for (int slice = 0; slice < SLICES; ++slice) {
    const u32 at = from + slice * SLICE_PARTS;
    add_tiles(sums.tile, at);
    const float4 y = load_shared4(at + 4 * PART_BYTES);
    sums.square[0][0] += y.x, sums.square[0][1] += y.y, sums.square[1][0] += y.z, sums.square[1][1] += y.w;
    if constexpr (!BOUNDED) {
      const float4 d = load_shared4(at + 5 * PART_BYTES);
      sums.diagonal[0] += d.x, sums.diagonal[1] += d.y;
    }
  }
}

// Two warps finish a chunk, a half each, because a stage is occupied for as long as this lasts and
// stages are scarce. The first adds up the products across the halves while the second inverts both
// triangles at once, a column a lane.
struct SolverWarp {
  Lane l;
  int pair, half;
  u32 scratch;
};
constexpr int SOLVER_STRIDE = SOLVERS * PREPARERS;  // steps to a pair's next

// This warp's part of a step, whose beta is in `beta`. `wait_for_parts` waits for a barrier's phase, `to_next` moves on
// and loads the next, `send` gives the finished chunk to others than this block's own warps; by the second warp.
template <bool ALONE, class W, class F, class S>
__device__ __forceinline__ void solve_step(const ChunkForwardParams& p, const SolverWarp& w, u32 shared,
                                           const OwnStep& step, int rank, u32 (&beta)[2], int left,
                                           W wait_for_parts, F to_next, S send) {
  const Lane& l = w.l;
  const int slot = own_stage<ALONE>(step), i = step.i, group = i % GROUPS;
  const u32 stage = shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH,
            full = shared + OFFSET(SharedMemory, full) + 8 * slot;
  const u32 parts =
      shared + OFFSET(SharedMemory, parts) + group * SLICES * SLICE_PARTS + 16 * l.lane + sums_offset<ALONE>(i);
  const u32 parts_read = shared + OFFSET(SharedMemory, parts_read) + 8 * read_barrier<ALONE>(group, i);
  wait_for_parts(shared + OFFSET(SharedMemory, parts_ready) + 8 * w.pair, (u32)(i / SOLVERS & 1));
  if (w.half && !ALONE) publish_operands(stage, full, l.lane, rank);
  Scalars s;
#pragma unroll
  for (int n = 0; n < 2; ++n) s.beta[n] = activate_beta(p, beta[n], left > n);
  Products sums = {};
  add_parts(sums, parts + w.half * PARTS * PART_BYTES);
  if constexpr (!BOUNDED) warp_arrive(shared + tiles_read() + 8 * read_barrier<ALONE>(group, i), l.lane);
  if (w.half) {
    warp_arrive(parts_read, l.lane);
  }
  set_norms(p, sums.square[0], sums.square[1], s);
  store_scalars(stage, w.half, l, s);
  Lane here = l;
  if constexpr (!BOUNDED) {  // offsets recomputed to save registers
    sync_warp();
    here.p = opaque(l.p);
    here.t = opaque(l.t);
  }
  store_triangles(stage, w.scratch + w.half * SCRATCH_BYTES, w.half, here, s, sums);
  sync_pair(SOLVER_BARRIER + w.pair);
  if (w.half) {
    store_inverse(stage, w.scratch, l.lane);
  } else {
    Across across = {};
#pragma unroll 2
    for (int slice = 0; slice < SLICES; ++slice)
      add_tiles(across.tile, parts + slice * SLICE_PARTS + 2 * PARTS * PART_BYTES);
    warp_arrive(parts_read, l.lane);
    store_across(stage, l, across);
  }
  sync_pair(SOLVER_BARRIER + w.pair);
  to_next();
  if constexpr (ALONE) {
    send();
  } else if (w.half) {
    publish(stage, full, l.lane, rank);
  } else if (EVERY_LANE && !SPACED) {
    warp_arrive(full, l.lane);  // racecheck does not see that the second warp arrives for both
  }
}

// The same of step c where blocks take turns.
template <class F>
__device__ __forceinline__ void solver_step(const ChunkForwardParams& p, const SolverWarp& w, u32 shared,
                                            int c, int rank, u32 (&beta)[2], int left, F to_next) {
  const auto wait = [](u32 barrier, u32 parity) { barrier_wait(barrier, parity); };
  solve_step<SEPARATE>(p, w, shared, {c, (u32)(c / PREPARERS)}, rank, beta, left, wait, to_next, [&] {
    if constexpr (HELPERS) {
      if (w.half && rank == HELPER) store_stage(p, shared, c, w.l.lane);
      if (w.half && rank != HELPER) send_stage(shared, c, w.l.lane);
    } else {
      if (w.half) send_stage(shared, c, w.l.lane);
    }
  });
}

__device__ __forceinline__ SolverWarp make_solver_warp(u32 shared, int warp) {
  const int pair = warp >> 1;
  return {make_lane(), pair, warp & 1, shared + OFFSET(SharedMemory, scratch) + pair * 2 * SCRATCH_BYTES};
}

// Solver warps are done first: this one's part of the rows that no sequence writes.
__device__ __forceinline__ void clear_rows(const ChunkForwardParams& p, int warp) {
  const u32 number = block_index() * SOLVER_SLOTS + warp;
  clear_unused_rows(p, NARROW ? 2ll * value_row(p) : 2ll * p.HV * V,
                    {32 * number + (thread_index() & 31), 32u * grid_blocks() * SOLVER_SLOTS});
}

__device__ __forceinline__ void solver_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  const SolverWarp w = make_solver_warp(shared, warp);
  const long long size = type_size(p.beta_type), token = size * p.beta_st;
  int c = w.pair * PREPARERS + preparer_of(rank);  // of the cluster's steps
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
  int length, shift,
      left;  // of the sequence; from a step to its chunk; this lane's tokens from the next load on
  u64 from;
  const auto first_token = [&] { return (c + shift) * C + HALF * w.half + 2 * w.l.p; };
  int stopped = 0, heads = 0;
  Move move = advance_to_step(p, shared, task, c) ? NEXT_SEQUENCE : NO_STEP;
  while (move != NO_STEP) {
    if (move == NEXT_SEQUENCE) {
      const TaskPart part = make_task_part(p, shared, task);
      length = uniform(part.sequence.length);
      shift = part.shift;
      left = part.tokens - first_token();
      from = p.beta + size * (part.sequence.batch * p.beta_sb + gate_head(p, task.hv) * p.beta_sh) +
             (part.sequence.first + first_token()) * token;
    } else {
      shift = shift_to_end(task, length);
      left = length - first_token();
      from += (c + shift - stopped) * C * token + size * heads * p.beta_sh;
    }
    u32 beta[2];
    load_beta(p, from, token, left, beta);
#pragma unroll 1
    for (; c < task.stop; c += SOLVER_STRIDE)
      solver_step(p, w, shared, c, rank, beta, left, [&] {
        left -= SOLVER_STRIDE * C;
        from += SOLVER_STRIDE * C * token;
        load_beta(p, from, token, left, beta);
      });
    stopped = c + shift;
    const int hv = task.hv;
    move = move_to_step(p, shared, task, length, c);
    heads = gate_head(p, task.hv) - gate_head(p, hv);
  }
}
