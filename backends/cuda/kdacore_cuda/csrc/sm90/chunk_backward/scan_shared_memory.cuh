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
constexpr int CARRIERS = 4 * WARPGROUPS;  // warps with 16 rows of the state each; the warp after them copies, two more d_o
constexpr int OUTPUT_WARPS = 2;
// Registers are traded by warpgroups, so that the producers' has an idle warp; one group has all it can use anyway.
constexpr int THREADS = WARPGROUPS == 2 ? 384 : 32 * (CARRIERS + 1 + OUTPUT_WARPS);
constexpr int START_REGISTERS = 168, CARRIER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * CARRIER_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS, "more registers than the block has");

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
__device__ __forceinline__ u32 output_piece(int row, int piece) { return row * DO_ROW + exchanged(row, piece); }
constexpr u32 EARLY_KG_AT = 0;
constexpr u32 EARLY_LOW_AT = EARLY_KG_AT + TILE_BYTES;
constexpr u32 EARLY_AQK_AT = EARLY_LOW_AT + TILE_BYTES;
constexpr u32 EARLY_BYTES = EARLY_AQK_AT + SQUARE_BYTES;  // the decays have a place of their own
constexpr u32 LATE_W_AT = 0;
constexpr u32 LATE_QG_AT = LATE_W_AT + TILE_BYTES;
constexpr u32 LATE_INV_AT = LATE_QG_AT + TILE_BYTES;
constexpr u32 LATE_BYTES = LATE_INV_AT + SQUARE_BYTES;

constexpr u32 pitch_of(u32 bytes) { return (bytes + 1023) / 1024 * 1024; }
constexpr u32 most(u32 x, u32 y) { return x > y ? x : y; }

// Shared memory of a block.
constexpr int FORWARD_STAGES = WARPGROUPS == 2 ? 3 : 4, DO_STAGES = WARPGROUPS == 2 ? 1 : 3, EARLY_STAGES = 2, LATE_STAGES = 2, MAX_STAGES = 4;
constexpr u32 FORWARD_AT = 0, EARLY_AT = 0;
constexpr u32 LATE_AT = EARLY_AT + EARLY_STAGES * pitch_of(EARLY_BYTES);
constexpr u32 DO_AT = LATE_AT + LATE_STAGES * pitch_of(LATE_BYTES);
constexpr u32 DECAYS_AT = DO_AT + DO_STAGES * pitch_of(DO_BYTES);
constexpr u32 OUT_AT = most(FORWARD_AT + FORWARD_STAGES * pitch_of(FORWARD_BYTES), DECAYS_AT + EARLY_STAGES * DECAY_BYTES);
constexpr u32 ROWS_OUT = 16 * IMAGE_ROW;     // a warp's rows in 64 columns of an image
constexpr u32 OUT_BYTES = 3 * ROWS_OUT;      // of a warp: its rows of h or dh, and of v or dr
constexpr u32 BARRIERS_AT = OUT_AT + CARRIERS * OUT_BYTES;
constexpr u32 RING_BARRIERS = 2 * 8 * MAX_STAGES;  // full, then empty
constexpr int RINGS = 3, DO_RING = 2;
static_assert(BARRIERS_AT + RINGS * RING_BARRIERS <= SHARED_BYTES, "the host's shared memory size is too small");

// What a block does.
struct Job {
  bool reverse;
  int hv, part;   // value head, which rows of the state if two blocks share it
  long long nh;   // sequence and value head: place of its states
  Sequence s;
  long long at;   // place of the first chunk in the workspace
};

// Reverse ones first, as they take longer.
__device__ __forceinline__ Job find_job(const ChunkBackwardParams& p, int block) {
  const int each = p.N * p.HV * BLOCKS_V;
  Job job;
  job.reverse = block < each;
  const int index = job.reverse ? block : block - each;
  job.part = index % BLOCKS_V;
  job.nh = index / BLOCKS_V;
  const int n = (int)job.nh / p.HV;
  job.hv = (int)job.nh - n * p.HV;
  job.s = find_sequence(p, n);
  job.at = (long long)job.s.slot * p.HV + job.hv;
  return job;
}

// The ring whose barriers are those of number WHICH.
template <int STAGES, u32 AT, u32 BYTES, int WHICH>
using ScanRing = Ring<STAGES, AT, pitch_of(BYTES), BARRIERS_AT + WHICH * RING_BARRIERS, 8 * MAX_STAGES>;
using ForwardRing = ScanRing<FORWARD_STAGES, FORWARD_AT, FORWARD_BYTES, 0>;
using EarlyRing = ScanRing<EARLY_STAGES, EARLY_AT, EARLY_BYTES, 0>;
using LateRing = ScanRing<LATE_STAGES, LATE_AT, LATE_BYTES, 1>;
using OutputRing = ScanRing<DO_STAGES, DO_AT, DO_BYTES, DO_RING>;
static_assert(most(most(FORWARD_STAGES, DO_STAGES), most(EARLY_STAGES, LATE_STAGES)) <= MAX_STAGES, "no barriers for so many");
__device__ __forceinline__ u32 decays_of(const EarlyRing& ring) { return ring.shared + DECAYS_AT + ring.slot * DECAY_BYTES; }
