// Clusters of two with helpers: who prepares which step of a sequence and value head.
//
// The cluster's own blocks prepare the first OWN_START steps, while helpers begin, and then, in turns, steps
// OWN_START + floor(j spacing), j = 0, 1, ...; p.spacing is in units of 2^-16, above 1 and at most LARGEST_SPACING.
// Helpers prepare the others of all sequences and value heads: step after step, and within a step one sequence and value
// head after the other, which they take in turns. So each head's next step is never far behind the others'.
#pragma once

#include "sm90/chunk_forward/schedule.cuh"

// A block's next own step is at most so much later, or a parity would not tell the phase of its stage's barrier.
constexpr int LARGEST_SPACING = STAGES / SCANNERS;
static_assert(!SPACED || LARGEST_SPACING == MOST_SPACING, "the host leaves helpers another part of the steps");

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
__device__ __forceinline__ bool is_own(const ChunkForwardParams& p, const HelpedStep& step) {
  return own_step_at(p, step.own) == step.c;
}

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
      for (++step.c; is_own(p, step); ++step.c) ++step.own;
    }
  }
  __device__ __forceinline__ SequenceHead sequence(const ChunkForwardParams& p) const {
    const int n = p.N == 1 ? 0 : (u32)item / (u32)p.HV;
    return dense_sequence(p, n, item - n * p.HV);
  }
};
// The first of all.
__device__ __forceinline__ HelperUnit first_helper_unit(const ChunkForwardParams& p) {
  HelperUnit unit = {p.N * p.HV, {-1, 0}};
  unit.advance(p, 0);
  return unit;
}
