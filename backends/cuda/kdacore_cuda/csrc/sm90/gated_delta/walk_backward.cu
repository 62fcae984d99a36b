// The gated delta rule's backward on Hopper, K = V = 128, second of three launches: what is carried over chunks, from
// the records of the first one. backward_workspace.cuh has the formulas and what is left for the third.
//
// Grid: reverse walks, a block a sequence and value head (WARPGROUPS 2), or two with half of the value rows each (1);
// WITH_STATES: then as many that recompute u and the states, which neither need nor disturb the others. Warps: four a
// warpgroup carry 64 value rows; four more load, each a quarter of a chunk's rows.
// Synchronisation: the rings' barriers (walk_block.cuh). What is stored for each chunk goes through a part of shared
// memory of the warp's own, so that no product waits for a store.
//
// Macros from the host: WARPGROUPS; WITH_STATES.
#include "sm90/gated_delta/walk_reverse.cuh"

static_assert(!WITH_STATES, "not written yet");
using SharedMemory = ReverseMemory;
KDA_SHARED_BYTES(sizeof(SharedMemory));

KDA_KERNEL(THREADS, 1) walk_backward(KDA_PARAM GatedDeltaBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_ring_barriers<REVERSE_STAGES>(shared + OFFSET(ReverseStage, barriers));
  const int warp = uniform(thread_index() >> 5), thread = thread_index() - 32 * STATE_WARPS;
  wait_for_inputs();
  if (warp < STATE_WARPS) {
    set_role_registers<STATE_REGISTERS>();
    const Item x = find_item(p, opaque(block_index()));
    carry_state_grad(p, x, shared, warp, make_lane(warp, x.part));
  } else {
    set_role_registers<LOAD_REGISTERS>();
    load_reverse(p, find_item(p, opaque(block_index())), shared, thread);
  }
}
