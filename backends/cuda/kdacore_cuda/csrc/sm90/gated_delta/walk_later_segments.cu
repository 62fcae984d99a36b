// The gated delta rule with few heads on Hopper, last of four launches: every segment but a sequence's first, from its
// start, with outputs, checkpoints and final states; walk_forward.cuh has the products.
//
// Grid: two blocks a segment and value head, with half of the value rows each. Warps: walk_block.cuh.
//
// Macros from the host: WARPGROUPS, 1.
#include "sm90/gated_delta/segment_item.cuh"

KDA_SHARED_BYTES(sizeof(ForwardMemory<false>));

KDA_KERNEL(THREADS, 1) walk_later_segments(KDA_PARAM GatedDeltaSegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_forward_barriers(shared);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const SegmentItem x = find_later(p, opaque(block_index()), 0);
  if (!x.index || !x.s.chunks) return;
  if (warp < STATE_WARPS)
    carry_state<false>(p, x, shared, warp, make_lane(warp, x.part));
  else
    load_forward(p, x, shared, thread_index() - 32 * STATE_WARPS);
}
