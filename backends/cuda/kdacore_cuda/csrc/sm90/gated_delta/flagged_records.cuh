// Records that a walk takes as their flags are raised (place_threads.cuh).
#pragma once

#include "generated/gated_delta_beside_params.cuh"
#include "sm90/chunk_forward/dataflow/flags.cuh"
#include "sm90/gated_delta/walk_block.cuh"

struct FlaggedRecords {
  static_assert(PARTS * 8 <= UNIT_FLAGS_BYTES, "a flag for each block");
  static constexpr bool COME_LATE = true;
  const GatedDeltaBesideParams& p;
  u64 flag = 0;
  __device__ __forceinline__ void begin(const Item& x) {
    flag = p.ready + (u64)((long long)x.s.slot * p.HV + x.hv) * UNIT_FLAGS_BYTES + 8 * x.part;
  }
  __device__ __forceinline__ void wait() {
    wait_and_clear_flag(flag, p.launch);
    fence_async_proxy_global();
  }
  __device__ __forceinline__ void next() { flag += (u64)p.HV * UNIT_FLAGS_BYTES; }
};
