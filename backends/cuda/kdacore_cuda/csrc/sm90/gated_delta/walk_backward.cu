// The gated delta rule's backward on Hopper, K = V = 128, second of three launches: what is carried over chunks, from
// the records of the first one. backward_workspace.cuh has the formulas and what is left for the third.
//
// Grid: reverse walks, a block a sequence and value head (WARPGROUPS 2), or two with half of the value rows each (1);
// WITH_STATES: then as many that recompute u and the states. Neither needs the other, and they run side by side. Warps:
// walk_block.cuh.
// Synchronisation: the rings' barriers. What is stored for each chunk goes through a part of shared memory of the
// warp's own, so that no product waits for a store.
//
// Macros from the host: WARPGROUPS; WITH_STATES.
#include "sm90/gated_delta/walk_reverse.cuh"
#include "sm90/gated_delta/walk_states.cuh"

constexpr u32 STATES_BYTES = WITH_STATES ? sizeof(StatesMemory) : 0;
KDA_SHARED_BYTES(sizeof(ReverseMemory) > STATES_BYTES ? sizeof(ReverseMemory) : STATES_BYTES);

// Blocks of one direction. Reverse ones come first, as they take longer.
__device__ __forceinline__ int blocks_each() { return grid_blocks() >> WITH_STATES; }
__device__ __forceinline__ bool is_reverse() { return !WITH_STATES || block_index() < blocks_each(); }
__device__ __forceinline__ Item find_item(const GatedDeltaParams& p) {
  const int block = opaque(block_index());  // each role finds it anew
  return find_item(p, is_reverse() ? block : block - blocks_each());
}

KDA_KERNEL(THREADS, 1) walk_backward(KDA_PARAM GatedDeltaBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  if (is_reverse())
    make_reverse_barriers(shared);
  else
    make_states_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  if (warp < STATE_WARPS) {
    set_role_registers<STATE_REGISTERS>();
    const Item x = find_item(p);
    const Lane l = make_lane(warp, x.part);
    if (is_reverse())
      carry_state_grad(p, x, shared, warp, l);
    else
      carry_state_alone(p, x, shared, warp, l);
  } else {
    set_role_registers<LOAD_REGISTERS>();
    const Item x = find_item(p);
    const int thread = thread_index() - 32 * STATE_WARPS;
    if (is_reverse())
      load_reverse(p, x, shared, thread);
    else
      load_states(p, x, shared, thread);
  }
}
