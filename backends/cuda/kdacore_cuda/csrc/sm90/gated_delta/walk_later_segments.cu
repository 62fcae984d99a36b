// The gated delta rule with few heads on Hopper, last of four launches: every segment but a sequence's first, from its
// start, with outputs, checkpoints and final states; walk_forward.cuh has the products.
//
// Grid: two blocks a segment and value head, with half of the value rows each. Warps: walk_block.cuh. Those that load
// do not wait for the launch ahead: records are older, as it has waited for the one that made them.
//
// Macros from the host: WARPGROUPS, 1; OF_SLICE, for a slice of a row that several ranks share: the first segments, too,
// from the states at the slice's start. Warps that load then clear rows of o that belong to no sequence. COMPOSES: the
// launch ahead is that of the first segments and maps, and blocks find their starts themselves (composed_start.cuh).
#include "sm90/gated_delta/composed_start.cuh"

KDA_SHARED_BYTES(COMPOSES ? sizeof(ComposingMemory) : sizeof(ForwardMemory<false>));

KDA_KERNEL(THREADS, 1) walk_later_segments(KDA_PARAM GatedDeltaSegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  if constexpr (COMPOSES)
    make_composing_barriers(shared);
  else
    make_forward_barriers(shared);
  if (!COMPOSES && p.segments < 2) wait_for_inputs();  // then another launch is ahead
  const int warp = uniform(thread_index() >> 5);
  const int block = opaque(block_index());
  const SegmentItem x = find_later(p, block, 0);
  // A sequence without tokens has a first segment, whose final state is written.
  const bool idle = x.index ? !x.s.chunks : !OF_SLICE;
  if (!OF_SLICE && idle) return wait_for_inputs();
  if (warp < STATE_WARPS) {
    wait_for_inputs();
    if constexpr (COMPOSES)
      carry_state<false>(p, ComposedItem{x, shared}, StageRing<>{shared}, staging_at<false>(shared, warp),
                         make_lane(warp, x.part));
    else if (!idle)
      carry_state<false>(p, x, StageRing<>{shared}, staging_at<false>(shared, warp), make_lane(warp, x.part));
  } else if constexpr (COMPOSES) {
    const int thread = thread_index() - 32 * STATE_WARPS;
    const ComposedItem own = {x, shared};
    load_forward(p, MapsAhead{p, own, thread}, x, StagesBehindMaps{shared, own.maps()}, thread);
  } else {
    const int thread = thread_index() - 32 * STATE_WARPS;
    load_forward(p, WrittenRecords{}, x, StageRing<>{shared}, thread);
    if constexpr (OF_SLICE) {
      wait_for_inputs();
      clear_tail(p, value_row_bytes(p),
                 {(u32)(32 * LOAD_WARPS * block + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
    }
  }
}
