// Clusters of two with helpers: who prepares which step of a sequence and value head.
//
// The cluster's own two blocks alternate in preparing the first OWN_START steps, which gives helpers time to start, and
// then steps OWN_START + floor(j spacing), j = 0, 1, ...; p.spacing is in units of 2^-16.
// Helpers prepare all other steps of all sequences and value heads, assigned round-robin: all heads of one step, then all
// heads of the next one, so no head falls far behind.
#pragma once

#include "sm90/chunk_forward/schedule.cuh"

// Who waits until a stage is free knows the phase of its barrier by a parity: that the step before the last in this
// stage has been read, what it waited for before says, if that was at most STAGES steps earlier. So there is a limit for
// the steps between two of a block's own (MOST_SPACING), and for those between two that a block fetches.
static_assert(!SPACED || (MOST_SPACING * SCANNERS <= (STAGES << 16) && OWN_START <= STAGES),
              "a block's next step could be more than a ring later");
static_assert(!SPACED || LEAST_SPACING * (STAGES - 1ll) >= (STAGES << 16),
              "the next step that a block fetches could be more than a ring later");

// The j-th step that the cluster's own blocks prepare.
__device__ __forceinline__ int own_step_at(const ChunkForwardParams& p, u32 j) {
  const u32 start = j < OWN_START ? j : OWN_START;
  return start + (int)((u64)(j - start) * (u32)p.spacing >> 16);
}

// A step, and how many of those before it the cluster prepares itself.
struct HelpedStep {
  int c;
  u32 own;
};

// To the next one that a helper prepares.
__device__ __forceinline__ void to_next_helped(const ChunkForwardParams& p, HelpedStep& step) {
  for (++step.c; own_step_at(p, step.own) == step.c; ++step.c) ++step.own;
}
constexpr HelpedStep BEFORE_FIRST = {-1, 0};

// What a helper prepares: a step of a sequence and value head, their number being `item`.
struct HelperUnit {
  int item;
  HelpedStep step;

  // To the unit that is `units` later.
  __device__ __forceinline__ void advance(const ChunkForwardParams& p, int units) {
    const int items = p.N * p.HV;
    item += units;
    while (item >= items) {
      item -= items;
      to_next_helped(p, step);
    }
  }
  __device__ __forceinline__ SequenceHead sequence(const ChunkForwardParams& p) const {
    const int n = p.N == 1 ? 0 : (u32)item / (u32)p.HV;
    return dense_sequence(p, n, item - n * p.HV);
  }
};
// The first of all.
__device__ __forceinline__ HelperUnit first_helper_unit(const ChunkForwardParams& p) {
  HelperUnit unit = {p.N * p.HV, BEFORE_FIRST};
  unit.advance(p, 0);
  return unit;
}
