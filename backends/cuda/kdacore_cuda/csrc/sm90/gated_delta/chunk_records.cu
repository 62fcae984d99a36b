// The gated delta rule (one decay a token) in two launches on Hopper, K = V = 128, first launch: the record of every
// chunk and value head (record.cuh), as unit_records.cuh makes them.
//
// Grid: a block for each chunk and key head.
#include "sm90/gated_delta/unit_records.cuh"

KDA_SHARED_BYTES(sizeof(UnitMemory));
static_assert(2 * (sizeof(UnitMemory) + 1024) <= 228 * 1024, "a multiprocessor has no room for two blocks");

struct BlockThreads {
  int thread;
  KeyUnit u;
  __device__ __forceinline__ KeyUnit unit() const { return u; }
  __device__ __forceinline__ void sync() const { sync_block(); }
  __device__ __forceinline__ void sync_team(int i) const { sync_threads(1 + i, 32 * TEAM_WARPS); }
  __device__ __forceinline__ void leaves(long long) const {}
  __device__ __forceinline__ void end_record_before() const {}
};

KDA_KERNEL(UNIT_THREADS, 2) chunk_records(KDA_PARAM GatedDeltaParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  launch_dependents();  // walk_records waits for this launch as a whole
  const KeyUnit u = find_key_unit(p, block_index());
  if (!u.rows) return;
  const BlockThreads threads = {thread_index(), u};
  const TokenInputs inputs = fetch_unit(p, u, shared, threads.thread);
  clear_images(shared, threads.thread);
  make_records(p, inputs, shared, threads);
}
