// Threads of a block that make records for walks that do not wait for the launch: each record has flags, which are raised
// once it has arrived in device memory. The warp that stored it waits for that while the next record is begun.
#pragma once

#include "generated/gated_delta_beside_params.cuh"
#include "sm90/chunk_forward/dataflow/flags.cuh"
#include "sm90/gated_delta/unit_order.cuh"
#include "sm90/gated_delta/unit_records.cuh"

// The threads of one of a block's PLACES, each of which makes a unit at a time. Named barriers: one for each place, then
// one for each half of its threads.
template <int PLACES>
struct PlaceThreads {
  const GatedDeltaBesideParams& p;
  int thread, place;
  u32 table;     // of unit_order.cuh
  int position;  // of the next unit in the order, or of one without tokens before it
  long long stored = -1;  // the number of this half's last record, whose flags have not been raised
  __device__ __forceinline__ KeyUnit next() {
    OrderedUnit x;
    do {
      x = find_ordered_unit(p, table, p.N, position);
      position += PLACES * grid_blocks();
    } while (!x.past && !x.unit.rows);
    return x.unit;
  }
  __device__ __forceinline__ void sync() const { sync_threads(1 + place, UNIT_THREADS); }
  __device__ __forceinline__ void sync_team(int i) const {
    sync_threads(1 + PLACES + TEAMS * place + i, 32 * TEAM_WARPS);
  }
  __device__ __forceinline__ void leaves(long long record) { stored = record; }
  __device__ __forceinline__ void end_record_before() {
    if (uniform(thread >> 5) % TEAM_WARPS == FACTOR_WARP && stored >= 0) {
      if ((thread & 31) == 0) copy_out_wait();
      raise_flags(p.ready + (u64)stored * UNIT_FLAGS_BYTES, p.launch, V / 64);
    }
    stored = -1;
  }
};
