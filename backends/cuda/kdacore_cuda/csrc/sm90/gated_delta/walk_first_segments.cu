// The gated delta rule with few heads on Hopper, second of four launches. Sequences are cut into segments
// (segment_item.cuh). The first one of each is walked from the initial state, with its outputs, while the maps of the
// others are made. The third launch, chunk_forward/segments/chain.cu, finds the states at the later segments' starts.
//
// Grid: two blocks a sequence and value head, with half of the value rows each; then two for each segment with a map
// and value head, with half of the channels each. Warps: walk_block.cuh. Those that load then clear rows of o that
// belong to no sequence.
//
// Macros from the host: WARPGROUPS, 1; OF_SLICE, for a slice of a row that several ranks share: maps alone, as no initial
// state is known yet. First segments have one, too, and so has the last one of the sequence that goes on behind the
// slice, the one that the last token belongs to. COMPOSES: blocks of the next launch find their starts from the maps.
#include "sm90/gated_delta/walk_map.cuh"
#include "sm90/gated_delta/walk_segment.cuh"

static_assert(WARPGROUPS == 1, "a map has 64 rows a block");
constexpr u32 WALK_MEMORY = sizeof(ForwardMemory<false>);
KDA_SHARED_BYTES(WALK_MEMORY > sizeof(MapMemory) ? WALK_MEMORY : sizeof(MapMemory));

__device__ __forceinline__ int first_walks(const GatedDeltaSegmentParams& p) {
  return OF_SLICE ? 0 : PARTS * p.N * p.HV;
}
__device__ __forceinline__ SegmentItem find_first(const GatedDeltaSegmentParams& p, int block) {
  const int item = block / PARTS, n = item / p.HV;
  return segment_item(p, n, 0, item - n * p.HV, block % PARTS);
}
__device__ __forceinline__ SegmentItem find_mapped(const GatedDeltaSegmentParams& p, int block) {
  SegmentItem x = find_later(p, block - first_walks(p), !OF_SLICE);
  const bool goes_on = OF_SLICE && x.s.first + x.s.length == p.T;
  if ((!OF_SLICE && !x.index) || (x.last && !goes_on)) x.s.chunks = 0;  // it has no map
  return x;
}

KDA_KERNEL(THREADS, 1) walk_first_segments(KDA_PARAM GatedDeltaSegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int block = opaque(block_index()), warp = uniform(thread_index() >> 5);
  const bool maps = OF_SLICE || block >= first_walks(p);
  if (maps)
    make_map_barriers(shared);
  else
    make_forward_barriers(shared);
  wait_for_inputs();
  launch_dependents();  // the next launch waits for all of this one, and first loads what is older
  if (warp < STATE_WARPS) {
    const SegmentItem x = maps ? find_mapped(p, block) : find_first(p, block);
    const Lane l = make_lane(warp, x.part);
    if (!maps)
      carry_state<false>(p, x, StageRing<>{shared}, staging_at<false>(shared, warp), l);
    else if (x.s.chunks)
      carry_map(x, p.maps + x.place * MAP_BYTES, full_state_at(p.addends, x.place), shared, l);
    return;
  }
  const int thread = thread_index() - 32 * STATE_WARPS;
  if (maps)
    load_map(p, find_mapped(p, block), shared, thread);
  else
    load_forward(p, WrittenRecords{}, find_first(p, block), StageRing<>{shared}, thread);
  if constexpr (!OF_SLICE) {
    clear_unused_rows(p, value_row_bytes(p),
                      {(u32)(32 * LOAD_WARPS * block + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
  }
}
