// The gated delta rule in two launches on Hopper, second launch: every sequence and value head from its start, chunk
// after chunk; walk_forward.cuh has the products.
//
// Grid: a block a sequence and value head (WARPGROUPS 2), or two with half of the value rows each (1). Warps:
// walk_block.cuh. Those that load then clear rows of o that belong to no sequence.
//
// Macros from the host: WARPGROUPS.
#include "sm90/gated_delta/walk_forward.cuh"

KDA_SHARED_BYTES(sizeof(ForwardMemory<false>));

KDA_KERNEL(THREADS, 1) walk_records(KDA_PARAM GatedDeltaParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_forward_barriers(shared);
  wait_for_inputs();
  walk_forward<false>(p, shared);
}
