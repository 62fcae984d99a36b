// walk_records.cu where a backward follows that is to recompute nothing: u and the states are kept for it. The same
// outputs, bit for bit.
//
// Macros from the host: WARPGROUPS.
#include "sm90/gated_delta/walk_forward.cuh"

KDA_SHARED_BYTES(sizeof(ForwardMemory<true>));

KDA_KERNEL(THREADS, 1) walk_records_keeping(KDA_PARAM GatedDeltaBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_forward_barriers(shared);
  wait_for_inputs();
  walk_forward<true>(p, shared);
}
