// The gated delta rule in two launches on Hopper that run side by side, second launch: every sequence and value head from
// its start, chunk after chunk, as chunk_records_beside makes the records; walk_forward.cuh has the products. The same
// outputs as those of walk_records, bit for bit.
//
// This launch begins when every block of chunk_records_beside is resident or has ended, and each of those has waited for
// all earlier launches. Its blocks wait only for flags that blocks of chunk_records_beside raise, which are then all
// running or done and wait for nobody, so there is no deadlock. It ends after chunk_records_beside, so a later launch
// that waits for this one has waited for both.
//
// Grid: two blocks a sequence and value head; one if a state has 64 values. Warps: walk_block.cuh.
//
// Macros from the host: WARPGROUPS, 1: a record has flags for two blocks.
#include "generated/gated_delta_beside_params.cuh"
#include "sm90/chunk_forward/dataflow/flags.cuh"
#include "sm90/gated_delta/walk_forward.cuh"

KDA_SHARED_BYTES(sizeof(ForwardMemory<false>));

struct FlaggedRecords {
  static constexpr bool COME_LATE = true;
  const GatedDeltaBesideParams& p;
  u64 flag = 0;
  __device__ __forceinline__ void begin(const Item& x) {
    flag = p.ready + (u64)((long long)x.s.slot * p.HV + x.hv) * UNIT_FLAGS_BYTES + 8 * x.part;
  }
  __device__ __forceinline__ void wait() {
    wait_and_clear_flag(flag, p.launch);
    fence_async_proxy_global();
    flag += (u64)p.HV * UNIT_FLAGS_BYTES;
  }
};

KDA_KERNEL(THREADS, 1) walk_records_beside(KDA_PARAM GatedDeltaBesideParams p) {
  static_assert(PARTS * 8 <= UNIT_FLAGS_BYTES, "a flag for each block");
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
