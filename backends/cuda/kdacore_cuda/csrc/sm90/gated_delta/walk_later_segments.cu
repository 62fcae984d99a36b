// The gated delta rule with few heads on Hopper, last of four launches: every segment but a sequence's first, from its
// start, with outputs, checkpoints and final states; walk_forward.cuh has the products.
//
// Grid: two blocks a segment and value head, with half of the value rows each. Warps: walk_block.cuh. Those that load
// do not wait for the launch ahead: records are older, as it has waited for the one that made them.
//
// Macros from the host: WARPGROUPS, 1.
#include "sm90/gated_delta/walk_segment.cuh"

KDA_SHARED_BYTES(sizeof(ForwardMemory<false>));

KDA_KERNEL(THREADS, 1) walk_later_segments(KDA_PARAM GatedDeltaSegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_forward_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  const SegmentItem x = find_later(p, opaque(block_index()), 0);
  if (!x.index || !x.s.chunks) return wait_for_inputs();
  if (warp < STATE_WARPS) {
    wait_for_inputs();
    carry_state<false>(p, x, StageRing<>{shared}, staging_at<false>(shared, warp), make_lane(warp, x.part));
  } else {
    load_forward(p, WrittenRecords{}, x, StageRing<>{shared}, thread_index() - 32 * STATE_WARPS);
  }
}
