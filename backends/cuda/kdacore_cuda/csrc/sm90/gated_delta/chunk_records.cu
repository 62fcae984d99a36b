// The gated delta rule (one decay a token) in two launches on Hopper, first launch: the record of every chunk and value
// head (record.cuh), as unit_records.cuh makes them.
//
// Grid: two blocks for each multiprocessor, or fewer; each makes one unit, a chunk of a key head, after another. Those
// that walks read first are made last, so that they find them in the L2, with their keys and queries.
#include "generated/gated_delta_records_params.cuh"
#include "sm90/gated_delta/unit_records.cuh"

KDA_SHARED_BYTES(sizeof(UnitMemory));
static_assert(2 * (sizeof(UnitMemory) + 1024) <= 228 * 1024, "a multiprocessor has no room for two blocks");

struct BlockThreads {
  const GatedDeltaRecordsParams& p;
  int thread, unit;
  // The unit at a position of the order: of all dense sequences the last chunks come first. A pack's slots are taken from
  // the last one on.
  __device__ __forceinline__ int place_of(int position) const {
    const int left = (int)p.units - 1 - position;
    if (p.cu_seqlens) return left;
    const int slot = divide(left, p.h_factor, p.h_shift), chunk = (u32)slot / (u32)p.N;
    return ((slot - chunk * p.N) * p.NT + chunk) * p.H + left - slot * p.H;
  }
  __device__ __forceinline__ KeyUnit next() {
    KeyUnit u;
    u.rows = 0;
    for (; unit < p.units && !u.rows; unit += grid_blocks()) u = find_key_unit(p, place_of(unit));
    return u;
  }
  __device__ __forceinline__ void sync() const { sync_block(); }
  __device__ __forceinline__ void sync_team(int i) const { sync_threads(1 + i, 32 * TEAM_WARPS); }
  __device__ __forceinline__ void leaves(long long) const {}
  __device__ __forceinline__ void end_record_before() const {}
};

KDA_KERNEL(UNIT_THREADS, 2) chunk_records(KDA_PARAM GatedDeltaRecordsParams p) {
  KDA_SHARED(memory);
  wait_for_inputs();
  launch_dependents();  // walk_records waits for this launch as a whole
  BlockThreads threads = {p, thread_index(), block_index()};
  // An address in a register, not one computed anew: otherwise 24 bytes are spilled.
  make_records(p, (u32)opaque((int)shared_address(memory)), threads);
}
