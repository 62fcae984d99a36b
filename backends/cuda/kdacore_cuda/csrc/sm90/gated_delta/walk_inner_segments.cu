// The gated delta rule's backward with few heads on Hopper, fourth of five launches: every segment but a sequence's last
// in reverse from the gradient at its end, every one but the first forward from the state at its start.
//
// Grid: two blocks for each segment, value head and direction, with half of the value rows each. Those in reverse come
// first, as they take longer. Warps: walk_block.cuh. Those that load do not wait for the launch ahead: records are older, as
// it has waited for the one that made them.
//
// Macros from the host: WARPGROUPS, 1; OF_SLICE, for a slice of a row that several ranks share: the last segments in
// reverse, too, from the gradients at the slice's end; with FLAG_KEPT_MAPS, where the forward kept the states at segments'
// starts, the first ones forward, too.
#include "sm90/gated_delta/walk_backward_segment.cuh"

KDA_SHARED_BYTES(sizeof(ReverseMemory) > sizeof(StatesMemory) ? sizeof(ReverseMemory) : sizeof(StatesMemory));

KDA_KERNEL(THREADS, 1) walk_inner_segments(KDA_PARAM GatedDeltaBackwardSegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int warp = uniform(thread_index() >> 5), each = grid_blocks() / 2, block = opaque(block_index());
  const bool reverse = block < each;
  const SegmentItem x = find_later(p, reverse ? block : block - each, !OF_SLICE && reverse);
  const bool empty = !x.s.chunks, walks_first = OF_SLICE && p.flags & FLAG_KEPT_MAPS;
  // Of a slice, a sequence without tokens has a first segment, through which the gradient of its state goes.
  const bool idle = reverse ? (OF_SLICE ? empty && x.index : x.last) : empty || !(x.index || walks_first);
  if (idle) return wait_for_inputs();
  if (reverse)
    make_reverse_barriers(shared);
  else
    make_states_barriers(shared);
  if (warp < STATE_WARPS) {
    wait_for_inputs();
    const Lane l = make_lane(warp, x.part);
    if (reverse)
      carry_state_grad(p, x, shared, warp, l);
    else
      carry_state_alone(p, x, shared, warp, l);
  } else {
    const int thread = thread_index() - 32 * STATE_WARPS;
    if (reverse)
      load_reverse(p, x, shared, thread);
    else
      load_states(p, x, shared, thread);
  }
}
