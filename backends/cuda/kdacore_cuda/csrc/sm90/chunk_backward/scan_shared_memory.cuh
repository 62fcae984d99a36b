// Blocks of the scan: the state that each has, and its shared memory.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

// Macros from the host: WARPGROUPS, SHARED_BYTES.
static_assert(WARPGROUPS == 1 || WARPGROUPS == 2, "64 rows of V a warpgroup");
constexpr int BLOCKS_V = 2 / WARPGROUPS;  // blocks that share a state
constexpr int BLOCK_V = 64 * WARPGROUPS;
constexpr int STATE_WARPS =
    4 * WARPGROUPS;  // warps with 16 rows of the state each; the warp after them copies, two more d_o
constexpr int OUTPUT_WARPS = 2;
// Registers are moved by warpgroups, so the producers' has an idle warp; a single state warpgroup
// has enough anyway.
constexpr int THREADS = WARPGROUPS == 2 ? 384 : 32 * (STATE_WARPS + 1 + OUTPUT_WARPS);
constexpr int START_REGISTERS = 168, STATE_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");

constexpr u32 U_BYTES = BLOCK_V * IMAGE_ROW, DECAY_BYTES = sizeof(float[K]), DO_ROW = 2 * BLOCK_V;

// Forward: operands of one chunk.
struct ForwardStage {
  TileImage kg, w;
  u16 u[BLOCK_V][64];  // this block's rows
  float decay[K];      // of the whole chunk
};
// Reverse: three parts, each with a ring of its own, as they are used at different times. d_o goes
// to registers before its chunk begins; then come the operands of dv, then those of the state's
// gradient and dr.
struct OutputGradStage {
  u16 rows[C][BLOCK_V];  // 16-byte pieces ordered by output_piece
};
struct ValueGradStage {
  TileImage kg, kg_low;
  SquareImage aqk;
};
struct StateGradStage {
  TileImage w, qg;
  SquareImage inverse;
};
constexpr u32 FORWARD_BYTES = sizeof(ForwardStage), VALUE_GRAD_BYTES = sizeof(ValueGradStage),
              STATE_GRAD_BYTES = sizeof(StateGradStage);
__device__ __forceinline__ u32 output_piece(int row, int piece) {
  return row * DO_ROW + swizzled_piece(row, piece);
}

template <class T>
struct alignas(1024) Aligned {
  T stage;
};
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
static_assert(OFFSET(SharedMemory, barriers) + RINGS * RING_BARRIERS <= SHARED_BYTES,
              "the host's shared memory size is too small");

// The work of a block.
struct Task {
  bool reverse;
  int hv, part;  // value head, which rows of the state if two blocks share it
  long long nh;  // sequence and value head: place of its states
  Sequence s;
  long long at;  // place of the first chunk in the workspace
};

// Reverse ones first, as they take longer.
__device__ __forceinline__ Task find_task(const ChunkBackwardParams& p, int block) {
  const int each = p.N * p.HV * BLOCKS_V;
  Task task;
  task.reverse = block < each;
  const int index = task.reverse ? block : block - each;
  task.part = index % BLOCKS_V;
  task.nh = index / BLOCKS_V;
  const int n = (int)task.nh / p.HV;
  task.hv = (int)task.nh - n * p.HV;
  task.s = find_sequence(p, n);
  task.at = (long long)task.s.slot * p.HV + task.hv;
  return task;
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
