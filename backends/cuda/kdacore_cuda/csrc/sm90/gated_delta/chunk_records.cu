// The gated delta rule (one decay a token) in two launches on Hopper, K = V = 128, first launch: the record of every
// chunk and value head (record.cuh), as unit_records.cuh makes them.
//
// Grid: two blocks a multiprocessor, or fewer, which make one unit (a chunk and key head) after another. The next unit's
// inputs come into registers meanwhile.
#include "sm90/gated_delta/unit_records.cuh"

KDA_SHARED_BYTES(sizeof(UnitMemory));
static_assert(2 * (sizeof(UnitMemory) + 1024) <= 228 * 1024, "a multiprocessor has no room for two blocks");

struct BlockThreads {
  int thread;
  const KeyUnit& u;
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
  const int units = count_units(p);
  int index = block_index();
  KeyUnit u, next = {};
  UnitInputs inputs;
  // From `index` on, with rows.
  const auto load_next = [&] {
    for (next.rows = 0; index < units && !next.rows; index += grid_blocks()) next = find_key_unit(p, index);
    if (next.rows) load_unit(inputs, p, next, thread_index());
  };
  const BlockThreads threads = {thread_index(), u};
  load_next();
  clear_images(shared, threads.thread);
#pragma unroll 1
  while (next.rows) {
    u = next;
    store_tiles(inputs, shared, threads.thread);
    make_records(p, inputs.tokens, shared, threads, load_next);
    threads.sync();  // tiles come where pairs and factors were
  }
}
