// Numbers for the clusters of a launch, in the order in which they begin.
//
// CUDA promises no order in which blocks begin, nor that all of a grid run at once. So where clusters wait for others, each
// takes the part of the work that belongs to its ticket, not to its place in the grid, and waits only for parts of
// lower tickets: those have begun.
//
// The counter is in the workspace, which is uninitialised. A cluster begins the count with an atomic maximum: a
// count is larger than almost any value that memory may hold. Where the memory holds a larger one, one cluster
// replaces it. The last cluster to draw a ticket resets the counter, as a graph is replayed with the launch number
// that it was captured with.
#pragma once

#include "generated/chunk_forward_params.cuh"
#include "generated/steps.cuh"
#include "sm90/chunk_forward/shared_memory.cuh"

constexpr int TICKET_BITS = 12;

// What the counter holds before the first ticket is drawn. Taken as signed numbers only those that begin with 27 ones behind
// the sign are larger: not the bytes 0xff, nor NaN as libraries write it.
__device__ __forceinline__ u64 first_ticket(const ChunkForwardParams& p) {
  return 0x7ffffffull << 36 | ((u64)p.launch & 0xffffff) << TICKET_BITS;
}

// One thread of each cluster. What it returns goes to finish_ticket(), so that other work comes between.
__device__ __forceinline__ u64 draw_ticket(const ChunkForwardParams& p) {
  atomic_maximum(p.workspace, (long long)first_ticket(p));
  return atomic_add(p.workspace, 1);
}
__device__ __forceinline__ int finish_ticket(const ChunkForwardParams& p, u64 drawn) {
  const u64 first = first_ticket(p), clusters = grid_blocks() / CLUSTER;
  u64 ticket = drawn - first, seen = drawn + 1;
  while (ticket >= clusters) {  // what was there is larger
    const u64 found = atomic_replace(p.workspace, seen, first + 1);
    if (found == seen) {
      ticket = 0;
    } else if (found - first <= clusters) {
      ticket = atomic_add(p.workspace, 1) - first;
    } else {
      seen = found;
    }
  }
  if (ticket == clusters - 1) atomic_store(p.workspace, 0);
  return (int)ticket;
}

// To the same place of all blocks of the cluster, which have begun.
__device__ __forceinline__ void share_ticket(u32 at, int ticket) {
#pragma unroll
  for (u32 rank = 0; rank < CLUSTER; ++rank) store_cluster_shared(cluster_address(at, rank), ticket);
}
