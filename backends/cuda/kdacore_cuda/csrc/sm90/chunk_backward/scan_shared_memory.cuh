// Blocks of the scan: their shared memory, and which of them does what.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_backward/scan_block.cuh"
#include "sm90/ring.cuh"

// Forward: operands of one chunk.
struct ForwardStage {
  TileImage kg, w;
  u16 u[BLOCK_V][64];  // this block's rows
  float decay[K];      // of the whole chunk
};
// Reverse: the operands of a chunk are loaded in three parts, which are used one after another, so
// each part has a ring of its own: d_o (OutputGradStage), copied to registers before its chunk
// begins; the operands of dv; and those of the state's gradient and dr.
struct ValueGradStage {
  TileImage kg, kg_low;
  SquareImage aqk;
};
struct StateGradStage {
  TileImage w, qg;
  SquareImage inverse;
};
constexpr u32 VALUE_GRAD_BYTES = sizeof(ValueGradStage), STATE_GRAD_BYTES = sizeof(StateGradStage);

constexpr u32 ROWS_OUT = 16 * IMAGE_ROW;  // a warp's rows in 64 columns of an image
// What a warp stores: its rows of h or dh in two halves, and of v or dr.
struct OutputStaging {
  u16 state[2][16][64], rows[16][64];
};

constexpr int FORWARD_STAGES = WARPGROUPS == 2 ? 3 : 4, DO_STAGES = WARPGROUPS == 2 ? 1 : 3,
              VALUE_GRAD_STAGES = 2, STATE_GRAD_STAGES = 2;
constexpr int MAX_STAGES = 4, RINGS = 3, DO_RING = 2;
struct SharedMemory {
  union {
    Aligned<ForwardStage> forward[FORWARD_STAGES];
    struct {
      Aligned<ValueGradStage> value_grad[VALUE_GRAD_STAGES];
      Aligned<StateGradStage> state_grad[STATE_GRAD_STAGES];
      Aligned<OutputGradStage> output_grad[DO_STAGES];
      float decays[VALUE_GRAD_STAGES][K];  // beside the operands of dv
    };
  };
  OutputStaging out[STATE_WARPS];
  u64 barriers[RINGS][2][MAX_STAGES];  // full, then empty
};
constexpr u32 OUT_BYTES = sizeof(OutputStaging), RING_BARRIERS = sizeof(u64[2][MAX_STAGES]);

// Reverse ones first, as they take longer.
__device__ __forceinline__ Task find_segment_task(const ChunkBackwardParams& p, int block) {
  const int each = grid_blocks() >> 1;
  const bool reverse = block < each;
  const int index = reverse ? block : block - each, m = index / BLOCKS_V, slot = m / p.HV;
  return find_slot_segment(p, slot, [&](int n, int j) {
    return segment_task(p, find_segment(p, n, j, m - slot * p.HV), reverse, index % BLOCKS_V);
  });
}
__device__ __forceinline__ Task find_sequence_task(const ChunkBackwardParams& p, int block) {
  const int each = p.N * p.HV * value_blocks(p) * BLOCKS_V;
  const bool reverse = block < each;
  const int index = reverse ? block : block - each, nh = head_of_block(p, index / BLOCKS_V), n = nh / p.HV;
  return make_task(p, reverse, n, nh - n * p.HV, index % BLOCKS_V, block_in_head(p, index / BLOCKS_V, nh));
}
__device__ __forceinline__ Task find_task(const ChunkBackwardParams& p, int block) {
  if constexpr (IN_SEGMENTS) return find_segment_task(p, block);
  return find_sequence_task(p, block);
}

// The ring of stages T that begins at AT, with the barriers of number WHICH.
template <int STAGES, class T, u32 AT, int WHICH>
using ScanRing = Ring<STAGES, AT, sizeof(Aligned<T>), OFFSET(SharedMemory, barriers) + WHICH * RING_BARRIERS,
                      8 * MAX_STAGES>;
using ForwardRing = ScanRing<FORWARD_STAGES, ForwardStage, OFFSET(SharedMemory, forward), 0>;
using ValueGradRing = ScanRing<VALUE_GRAD_STAGES, ValueGradStage, OFFSET(SharedMemory, value_grad), 0>;
using StateGradRing = ScanRing<STATE_GRAD_STAGES, StateGradStage, OFFSET(SharedMemory, state_grad), 1>;
using OutputGradRing = ScanRing<DO_STAGES, OutputGradStage, OFFSET(SharedMemory, output_grad), DO_RING>;
static_assert(FORWARD_STAGES <= MAX_STAGES && DO_STAGES <= MAX_STAGES && VALUE_GRAD_STAGES <= MAX_STAGES,
              "no barriers for so many");
__device__ __forceinline__ u32 decays_of(const ValueGradRing& ring) {
  return ring.shared + OFFSET(SharedMemory, decays) + ring.slot * DECAY_BYTES;
}
