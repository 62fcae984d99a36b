// Blocks of clusters of two that have helpers: they scan, and prepare steps that are p.spacing apart. Each cluster has
// one sequence and value head, whose scan is as elsewhere (scan.cuh).
#pragma once

#include "sm90/chunk_forward/triangles.cuh"

// The sequence and value head of this cluster.
__device__ __forceinline__ SequenceHead own_sequence(const ChunkForwardParams& p, u32 shared) {
  const Task task = load_task(shared + OFFSET(SharedMemory, interval));
  return dense_sequence(p, task.n, task.hv);
}

__device__ __forceinline__ void spaced_slice_warp(const ChunkForwardParams& p, u32 shared, int warp,
                                                  int rank) {
  const int steps = steps_of_length((int)p.T);
  u32 own = rank;  // of the cluster's own steps
  int c = own_step_at(p, own);
  if (c >= steps) return;
  SliceWarp w = make_slice_warp(shared, warp);
  const SequenceHead sequence = own_sequence(p, shared);
  const int token = c * C + w.at.half * HALF + 2 * w.l.p;
  int left = (int)p.T - token;  // this lane's tokens from the next load on
  Source from = make_source(p, sequence, w.l, w.at.slice, token);
  // What comes from the caches is requested before what comes from memory, as answers come in order.
  Gate gate = make_gate(p, sequence.hv);
  const float own_bias = w.at.half ? 0.0f : load_own_bias(p, sequence.hv, 32 * w.at.slice + w.l.lane);
  Raw raw = {};
  load_gate(raw, {from, left}, w.gate);
  load_rows(raw, {from, left});
  store_bias(w, shared, gate, own_bias);
#pragma unroll 1
  while (c < steps) {
    const OwnStep step = {c, own / CLUSTER};
    slice_step(w, shared, gate, raw, step, from, left, [&] {
      own += CLUSTER;
      const int next = own_step_at(p, own), tokens = (next - c) * C;
      advance(from, p, tokens, 0, 0);
      left -= tokens;
      c = next;
    });
  }
}

__device__ __forceinline__ void spaced_solver_warp(const ChunkForwardParams& p, u32 shared, int warp,
                                                   int rank) {
  const SolverWarp w = make_solver_warp(shared, warp);
  const SequenceHead sequence = own_sequence(p, shared);
  const int steps = steps_of_length((int)p.T);
  const long long size = type_size(p.beta_type), token = size * p.beta_st;
  const u64 first = p.beta + size * (sequence.batch * p.beta_sb + sequence.hv * p.beta_sh);
  // The first warp has less to do for a step than the second.
  const bool fetches = w.pair == 0 && !w.half;
  Fetcher fetcher = {load_own(shared + OWN_CLUSTER), fetches ? steps : 0, BEFORE_FIRST};
  to_next_helped(p, fetcher.step);
  u32 own = rank + CLUSTER * w.pair;  // of the cluster's own steps
  int c, left;
  u32 beta[2];
  const auto load = [&] {
    c = own_step_at(p, own);
    const int at = c * C + HALF * w.half + 2 * w.l.p;
    left = (int)p.T - at;
    load_beta(p, first + at * token, token, left, beta);
  };
  const auto wait = [&](u32 barrier, u32 parity) {
    do {
      while (fetcher.next(p, shared, rank, w.l.lane)) {
      }
    } while (!shuffle((int)barrier_try_briefly(barrier, parity), 0));
    barrier_wait(barrier, parity);  // for all lanes
  };
  load();
#pragma unroll 1
  while (c < steps) {
    const OwnStep step = {c, own / CLUSTER};
    solve_step<false>(p, w, shared, step, rank, beta, left, wait,
                      [&] {
                        own += CLUSTER * SOLVERS;
                        load();
                      },
                      [] {});
  }
  while (fetcher.step.c < fetcher.steps) {
    if (!fetcher.next(p, shared, rank, w.l.lane)) sleep_briefly();
  }
}
