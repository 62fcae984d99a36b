// Flags with which the launches of chunk_kda in segments hand results on while they run side by side.
//
// A flag says that something has been written, and has one reader, which clears it. Raised, it holds
// the number of the call's launches: memory of before does not by chance. Every flag that is raised
// is read in the same call, so none is left for the next replay of a graph, whose number is the same.
#pragma once

#include "sm90/bulk_copies.cuh"

// Of a unit: its operands have been written. Readers: the blocks of maps for A and for B of its
// segment, the one or two blocks of output.
struct UnitFlags {
  u64 map_a, map_b, output[2];
};
// Of a segment and value head: A and B of it have been written; 16 rows of the state at its start
// have. Readers: chain's blocks by their rows; output's blocks.
constexpr int ROW_GROUPS = 8;
struct SegmentFlags {
  u64 a[ROW_GROUPS], b[ROW_GROUPS], start[ROW_GROUPS];
};
constexpr u32 UNIT_FLAGS_BYTES = sizeof(UnitFlags), SEGMENT_FLAGS_BYTES = sizeof(SegmentFlags);

// Which flags of a unit have a reader, by bits: maps need neither A of a sequence's first segment, nor
// anything of its last.
__device__ __forceinline__ u32 readers_of(int chunk, int chunks, int segment, int output_blocks) {
  const int index = chunk / segment, last = (chunks - 1) / segment;
  return (index > 0 && index < last ? 1 : 0) | (index < last ? 2 : 0) | (output_blocks == 2 ? 12 : 4);
}

// Raises `count` flags from `flags` on whose bits are set, after all writes that this warp's lane 0
// knows of. All lanes.
__device__ __forceinline__ void raise_flags(u64 flags, u32 bits, u64 launch) {
  sync_warp();
  const int lane = thread_index() & 31;
  if (bits >> lane & 1) set_flag(flags + 8 * lane, launch);
}
