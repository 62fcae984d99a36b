// Many short sequences of equal length: what the roles do instead of following schedule.cuh.
//
// A sequence and head of one to four steps is over before a role has looked up the next one: with
// schedule.cuh it takes 8,000 cycles, most of them for instructions that are no longer in the cache, as all
// roles together run through 41 KB of them. Here every sequence and head has the same number of steps, so a
// step number says all, inputs are loaded a step ahead across sequences, and 27 KB do. The steps themselves
// are the same functions, so the bits are those that a longer call computes for these tokens.
#pragma once

#include "sm90/chunk_forward/scan.cuh"
#include "sm90/chunk_forward/triangles.cuh"

// Of such a call nothing is cut, packed, looked up in a pool or kept between steps (kdacore_cuda/choice.py).
static_assert(!MANY_SHORT || !SEPARATE, "all blocks prepare");

// A step: chunk `chunk` of value head `hv` of sequence `n`.
struct ShortStep {
  int n, hv, chunk;
};

// The steps of a cluster: all of `count` sequences and heads, which follow each other.
struct ShortWork {
  ShortStep first;
  int chunks, steps;  // of a sequence; of the cluster
};
__device__ __forceinline__ ShortWork make_short_work(const ChunkForwardParams& p, int cluster) {
  const u32 items = p.N * p.HV, each = items / p.clusters, more = items % p.clusters, number = cluster;
  const u32 first = number * each + (number < more ? number : more), count = each + (number < more);
  const int chunks = uniform((u32)(p.T + C - 1) / C);
  return {{uniform(first / (u32)p.HV), uniform(first % (u32)p.HV), 0}, chunks, uniform(count * chunks)};
}
__device__ __forceinline__ void advance(const ChunkForwardParams& p, ShortStep& step, int chunks, int steps) {
  step.chunk += steps;
  while (step.chunk >= chunks) {
    step.chunk -= chunks;
    if (++step.hv == p.HV) step.hv = 0, ++step.n;
  }
}

__device__ __forceinline__ SequenceHead sequence_of(const ChunkForwardParams& p, const ShortStep& step) {
  return dense_sequence(p, step.n, step.hv);
}

__device__ __forceinline__ void short_slice_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank,
                                                 int cluster) {
  SliceWarp w = make_slice_warp(shared, warp);
  const ShortWork work = make_short_work(p, cluster);
  int c = w.group * CLUSTER + rank;
  if (c >= work.steps) return;
  ShortStep step = work.first;
  advance(p, step, work.chunks, c);
  Source from;
  int left;
  const auto find_inputs = [&] {
    const int token = step.chunk * C + w.at.half * HALF + 2 * w.l.p;
    from = make_source(p, sequence_of(p, step), w.l, w.at.slice, token);
    left = (int)p.T - token;
  };
  const auto find_bias = [&] {
    if (w.at.half) return 0.0f;
    const int channel = 32 * w.at.slice + w.l.lane;
    // opaque: recomputed for every head, as this kernel would spill a register otherwise.
    return load_bias(p, step.hv, BOUNDED && G_FLOAT ? opaque(channel) : channel);
  };
  Gate gate = make_gate(p, step.hv);
  float own_bias = find_bias();
  find_inputs();
  Raw raw = {};
  load_gate(raw, {from, left}, w.gate);
  load_rows(raw, {from, left});
  store_bias(w, shared, gate, own_bias);
#pragma unroll 1
  while (true) {
    const int hv = step.hv;
    const auto to_next = [&] {
      advance(p, step, work.chunks, STRIDE);
      find_inputs();
      if (c + STRIDE >= work.steps) left = 0;
    };
    slice_step(w, shared, gate, raw, own_step(c), from, left, to_next);
    c += STRIDE;
    if (c >= work.steps) return;
    if (step.hv != hv) {
      gate = make_gate(p, step.hv);
      store_bias(w, shared, gate, find_bias());
    }
  }
}

__device__ __forceinline__ void short_solver_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank,
                                                  int cluster) {
  const SolverWarp w = make_solver_warp(shared, warp);
  const ShortWork work = make_short_work(p, cluster);
  const long long size = type_size(p.beta_type);
  int c = w.pair * CLUSTER + rank;
  ShortStep step = work.first;
  advance(p, step, work.chunks, c);
  int left;
  u32 beta[2];
  const auto load = [&] {
    const int token = step.chunk * C + HALF * w.half + 2 * w.l.p;
    left = (int)p.T - token;
    load_beta(p, p.beta + size * (step.n * p.beta_sb + step.hv * p.beta_sh + token * p.beta_st),
              size * p.beta_st, c < work.steps ? left : 0, beta);
  };
  load();
#pragma unroll 1
  while (c < work.steps) {
    solver_step(p, w, shared, c, rank, beta, left, [&] {
      c += SOLVER_STRIDE;
      advance(p, step, work.chunks, SOLVER_STRIDE);
      load();
    });
  }
  clear_rows(p, warp);
}

__device__ __forceinline__ void short_scan_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank,
                                                int cluster) {
  const ShortWork work = make_short_work(p, cluster);
  const ScanLane l = make_scan_lane(shared, warp, rank);
  const unsigned char* unread_address = reinterpret_cast<const unsigned char*>(p.v);
  const int token = l.lane >> 1, at_v = l.v0 + 8 * (l.lane & 1);
  const long long v_half = 2ll * HALF * p.v_st, o_half = 2ll * HALF * p.HV * V;
  ShortStep step = work.first, ahead = work.first;
  int c = 0, fetched = 0, slot = 0, parity = 0, ring = 0;
  const auto fetch = [&](int to) {
    const int at = ahead.chunk * C + token;
    fetch_values(l,
                 reinterpret_cast<const unsigned char*>(
                     p.v + 2 * (ahead.n * p.v_sb + at * p.v_st + ahead.hv * p.v_sh + at_v)),
                 v_half, unread_address, to, fetched < work.steps ? (int)p.T - at : 0);
    copy_async_commit();
    advance(p, ahead, work.chunks, 1);
    ++fetched;
  };
#pragma unroll
  for (int i = 0; i < V_DEPTH - 1; ++i) fetch(i);
  ScanState state = {};
  Output out = {};  // of the step before, stored while the matrix unit works on the next
  unsigned char* o = nullptr;
  int out_left = 0;
  bool zero = false;
#pragma unroll 1
  for (; c < work.steps; ++c) {
    if (step.chunk == 0) {
      const u64 from = initial_state_at(p, step.n, step.hv, K * V);
      zero = !from;
      if (from) {
        read_state(state, l, from, p.flags);
        if (step.hv + 1 < p.HV) prefetch_state(l, from + (long long)K * V * state_size(p), p.flags);
      } else {
        state = {};
      }
    }
    const StageRef at = {(u32)slot, shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH,
                         shared + OFFSET(SharedMemory, full) + 8 * slot, (u32)parity};
    scan_chunk<true>(
        state, out, l, at, l.values + ring * 2 * TILE_BYTES, zero, (int)p.T - step.chunk * C > HALF,
        [&](const uint4(&rows)[2]) {
          store_output(rows, o, o_half, out_left);
          out_left = (int)p.T - step.chunk * C - token;
          o = reinterpret_cast<unsigned char*>(
              p.o + 2 * (((step.n * p.T + step.chunk * C + token) * p.HV + step.hv) * V + at_v));
          copy_async_wait<V_DEPTH - 2>();
          sync_warp();
        },
        [&] {
          fetch(ring == 0 ? V_DEPTH - 1 : ring - 1);
          ring = ring + 1 == V_DEPTH ? 0 : ring + 1;
        });
    warp_arrive_empty(shared, slot, l.lane);
    if (++slot == STAGES) slot = 0, parity ^= 1;
    zero = false;
    if (step.chunk == work.chunks - 1) {
      if (const u64 to = final_state_at(p, step.n, step.hv, K * V)) write_state(state, l, to, p.flags);
    }
    advance(p, step, work.chunks, 1);
  }
  uint4 rows[2];
  write_output(out, l);
  read_output(rows, l);
  store_output(rows, o, o_half, out_left);
  copy_async_wait<0>();
}
