// Flags with which prepare_units says to walk that a unit's operands have been written.
//
// A flag has one reader, a block of walk, which clears it. Raised, it holds the number of the call:
// memory of before does not by chance. Every flag that is raised is read in the same call, so none is
// left for the next replay of a graph, whose number is the same.
#pragma once

#include "sm90/bulk_copies.cuh"

struct UnitFlags {
  u64 written[2];  // for each of the two blocks that walk the unit's sequence and value head
};
constexpr u32 UNIT_FLAGS_BYTES = sizeof(UnitFlags);

// Raises a unit's flags, of as many as have a reader, after all writes that this warp's lanes know of. All lanes.
__device__ __forceinline__ void raise_flags(u64 flags, u64 launch, int count = 2) {
  sync_warp();
  const int lane = thread_index() & 31;
  if (lane < count) set_flag(flags + 8 * lane, launch);
}
