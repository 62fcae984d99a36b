// Numbers for those that a launch's work is shared out among, in the order in which they come.
//
// CUDA promises no order in which blocks begin, nor that all of a grid run at once. So where some wait for others' work,
// each takes the part that belongs to its ticket, not to its place in the grid: parts of lower tickets have begun.
//
// The counter is in the workspace, which is uninitialised. Whoever draws begins the count with an atomic maximum: a
// count is larger than almost any value that memory may hold. Where the memory holds a larger one, one of them
// replaces it. The last to draw a ticket resets the counter, as a graph is replayed with the launch number that it was
// captured with.
#pragma once

#include "common/ptx.cuh"

// BITS: of a ticket; the others of 36 are the launch number's.
template <int BITS>
struct TicketCounter {
  u64 at, launch;
  // What the counter holds before the first ticket is drawn. Taken as signed numbers only those that begin with 27 ones
  // behind the sign are larger: not the bytes 0xff, nor NaN as libraries write it.
  __device__ __forceinline__ u64 first() const {
    return 0x7ffffffull << 36 | (launch & ((1ull << (36 - BITS)) - 1)) << BITS;
  }
  // One thread of those that share a ticket. What it returns goes to finish(), so that other work comes between.
  __device__ __forceinline__ u64 draw() const {
    atomic_maximum(at, (long long)first());
    return atomic_add(at, 1);
  }
  // `draws`: tickets that are drawn in all, fewer than 2^BITS.
  __device__ __forceinline__ int finish(u64 drawn, u64 draws) const {
    u64 ticket = drawn - first(), seen = drawn + 1;
    while (ticket >= draws) {  // what was there is larger
      const u64 found = atomic_replace(at, seen, first() + 1);
      if (found == seen) {
        ticket = 0;
      } else if (found - first() <= draws) {
        ticket = atomic_add(at, 1) - first();
      } else {
        seen = found;
      }
    }
    if (ticket == draws - 1) atomic_store(at, 0);
    return (int)ticket;
  }
};
