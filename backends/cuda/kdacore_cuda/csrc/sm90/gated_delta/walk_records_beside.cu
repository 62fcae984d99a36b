// The gated delta rule in two launches on Hopper that run side by side, second launch: every sequence and value head from
// its start, chunk after chunk, as chunk_records_beside makes the records; walk_forward.cuh has the products. The same
// outputs as those of walk_records, bit for bit.
//
// This launch begins when every block of chunk_records_beside is resident or has ended, and each of those has waited for
// all earlier launches. Its blocks wait only for flags that blocks of chunk_records_beside raise, which are then all
// running or done and wait for nobody, so there is no deadlock. It ends after chunk_records_beside, so a later launch
// that waits for this one has waited for both.
//
// Grid: two blocks a sequence and value head. Warps: walk_block.cuh.
//
// Macros from the host: WARPGROUPS, 1: a record has a flag for each of two blocks.
#include "sm90/gated_delta/flagged_records.cuh"
#include "sm90/gated_delta/walk_forward.cuh"

KDA_SHARED_BYTES(sizeof(ForwardMemory<false>));

KDA_KERNEL(THREADS, 1) walk_records_beside(KDA_PARAM GatedDeltaBesideParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_forward_barriers(shared);
  walk_forward<false>(p, shared, FlaggedRecords{p});
  // By a whole warp that has nothing else to do, as it stops all lanes.
  if (block_index() == 0 && thread_index() < 32) {
    sync_warp();
    wait_for_inputs();
  }
}
