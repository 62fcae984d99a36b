// Blocks of the scan: which state each carries, and its shared memory.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/warp.cuh"
#include "sm90/ring.cuh"

// Macros from the host: WARPGROUPS, SHARED_BYTES.
static_assert(WARPGROUPS == 1 || WARPGROUPS == 2, "64 rows of V a warpgroup");
constexpr int BLOCKS_V = 2 / WARPGROUPS;  // blocks that share a state
constexpr int BLOCK_V = 64 * WARPGROUPS;
constexpr int STATE_WARPS = 4 * WARPGROUPS;  // warps with 16 rows of the state each; the warp after them copies, two more d_o
constexpr int OUTPUT_WARPS = 2;
// Registers are traded by warpgroups, so that the producers' has an idle warp; one group has all it can use anyway.
constexpr int THREADS = WARPGROUPS == 2 ? 384 : 32 * (STATE_WARPS + 1 + OUTPUT_WARPS);
constexpr int START_REGISTERS = 168, STATE_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS, "more registers than the block has");

// Forward, operands of one chunk.
constexpr u32 KG_AT = 0;
constexpr u32 W_AT = KG_AT + TILE_BYTES;
constexpr u32 U_AT = W_AT + TILE_BYTES;  // this block's rows of u
constexpr u32 U_BYTES = BLOCK_V * IMAGE_ROW;
constexpr u32 LAST_AT = U_AT + U_BYTES;  // the first row of `last`
constexpr u32 DECAY_BYTES = 4 * K;
constexpr u32 FORWARD_BYTES = LAST_AT + DECAY_BYTES;

// Reverse, three parts with a ring each, as each has done its work long before the next: d_o goes to registers before its
// chunk begins; kg, aqk and the decays make dv.
constexpr u32 DO_ROW = 2 * BLOCK_V;
constexpr u32 DO_BYTES = C * DO_ROW;
__device__ __forceinline__ u32 output_piece(int row, int piece) { return row * DO_ROW + swizzled_piece(row, piece); }
constexpr u32 VALUE_GRAD_KG_AT = 0;
constexpr u32 VALUE_GRAD_LOW_AT = VALUE_GRAD_KG_AT + TILE_BYTES;
constexpr u32 VALUE_GRAD_AQK_AT = VALUE_GRAD_LOW_AT + TILE_BYTES;
constexpr u32 VALUE_GRAD_BYTES = VALUE_GRAD_AQK_AT + SQUARE_BYTES;  // the decays have a place of their own
constexpr u32 STATE_GRAD_W_AT = 0;
constexpr u32 STATE_GRAD_QG_AT = STATE_GRAD_W_AT + TILE_BYTES;
constexpr u32 STATE_GRAD_INV_AT = STATE_GRAD_QG_AT + TILE_BYTES;
constexpr u32 STATE_GRAD_BYTES = STATE_GRAD_INV_AT + SQUARE_BYTES;

constexpr u32 pitch_of(u32 bytes) { return (bytes + 1023) / 1024 * 1024; }
constexpr u32 maximum(u32 x, u32 y) { return x > y ? x : y; }

// Shared memory of a block.
constexpr int FORWARD_STAGES = WARPGROUPS == 2 ? 3 : 4, DO_STAGES = WARPGROUPS == 2 ? 1 : 3, VALUE_GRAD_STAGES = 2, STATE_GRAD_STAGES = 2, MAX_STAGES = 4;
constexpr u32 FORWARD_AT = 0, VALUE_GRAD_AT = 0;
constexpr u32 STATE_GRAD_AT = VALUE_GRAD_AT + VALUE_GRAD_STAGES * pitch_of(VALUE_GRAD_BYTES);
constexpr u32 DO_AT = STATE_GRAD_AT + STATE_GRAD_STAGES * pitch_of(STATE_GRAD_BYTES);
constexpr u32 DECAYS_AT = DO_AT + DO_STAGES * pitch_of(DO_BYTES);
constexpr u32 OUT_AT = maximum(FORWARD_AT + FORWARD_STAGES * pitch_of(FORWARD_BYTES), DECAYS_AT + VALUE_GRAD_STAGES * DECAY_BYTES);
constexpr u32 ROWS_OUT = 16 * IMAGE_ROW;     // a warp's rows in 64 columns of an image
constexpr u32 OUT_BYTES = 3 * ROWS_OUT;      // of a warp: its rows of h or dh, and of v or dr
constexpr u32 BARRIERS_AT = OUT_AT + STATE_WARPS * OUT_BYTES;
constexpr u32 RING_BARRIERS = 2 * 8 * MAX_STAGES;  // full, then empty
constexpr int RINGS = 3, DO_RING = 2;
static_assert(BARRIERS_AT + RINGS * RING_BARRIERS <= SHARED_BYTES, "the host's shared memory size is too small");

// What a block does.
struct Task {
  bool reverse;
  int hv, part;   // value head, which rows of the state if two blocks share it
  long long nh;   // sequence and value head: place of its states
  Sequence s;
  long long at;   // place of the first chunk in the workspace
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

// The ring whose barriers are those of number WHICH.
template <int STAGES, u32 AT, u32 BYTES, int WHICH>
using ScanRing = Ring<STAGES, AT, pitch_of(BYTES), BARRIERS_AT + WHICH * RING_BARRIERS, 8 * MAX_STAGES>;
using ForwardRing = ScanRing<FORWARD_STAGES, FORWARD_AT, FORWARD_BYTES, 0>;
using ValueGradRing = ScanRing<VALUE_GRAD_STAGES, VALUE_GRAD_AT, VALUE_GRAD_BYTES, 0>;
using StateGradRing = ScanRing<STATE_GRAD_STAGES, STATE_GRAD_AT, STATE_GRAD_BYTES, 1>;
using OutputGradRing = ScanRing<DO_STAGES, DO_AT, DO_BYTES, DO_RING>;
static_assert(maximum(maximum(FORWARD_STAGES, DO_STAGES), maximum(VALUE_GRAD_STAGES, STATE_GRAD_STAGES)) <= MAX_STAGES, "no barriers for so many");
__device__ __forceinline__ u32 decays_of(const ValueGradRing& ring) { return ring.shared + DECAYS_AT + ring.slot * DECAY_BYTES; }
