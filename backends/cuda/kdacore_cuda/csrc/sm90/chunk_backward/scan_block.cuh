// Blocks that carry a state or its gradient over chunks: warps, registers, and the work of each.
#pragma once

#include "sm90/chunk_backward/segments.cuh"
#include "sm90/head_dims.cuh"
#include "sm90/warp.cuh"

// Macros from the host: WARPGROUPS; IN_SEGMENTS (a block has a segment, not a whole sequence).
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
template <int STATE>
__device__ __forceinline__ void set_role_registers() {
  if constexpr (WARPGROUPS == 2)
    set_registers<STATE ? STATE_REGISTERS : PRODUCER_REGISTERS, START_REGISTERS>();
}

constexpr u32 U_BYTES = BLOCK_V * IMAGE_ROW, DECAY_BYTES = sizeof(float[K]), DO_ROW = 2 * BLOCK_V;
struct OutputGradStage {
  u16 rows[C][BLOCK_V];  // 16-byte pieces ordered by output_piece
};
__device__ __forceinline__ u32 output_piece(int row, int piece) {
  return row * DO_ROW + swizzled_piece(row, piece);
}
template <class T>
struct alignas(1024) Aligned {
  T stage;
};

// Which of a head's blocks of values.
template <bool SEVERAL>
struct ValueBlock {
  static constexpr int block = 0;
  __device__ __forceinline__ void set_block(int) {}
};
template <>
struct ValueBlock<true> {
  int block;
  __device__ __forceinline__ void set_block(int x) { block = x; }
};

// The work of a block: chunks begin .. end - 1, in one direction.
struct Task : ValueBlock<NARROW> {
  bool reverse, idle;  // idle: there is nothing to do, not even for a sequence without chunks
  int hv, part;  // value head, which rows of the state if two blocks share it
  long long nh;  // sequence and value head: place of its states
  Sequence s;
  int begin, end;
  u64 given;     // the float state, or gradient, that it begins with; 0: what the caller gave
  long long at;  // place of the sequence's first chunk in the workspace
};
// The place of a block's values, given that of the chunk's operands.
__device__ __forceinline__ long long value_place(const ChunkBackwardParams& p, const Task& task, long long place) {
  if constexpr (NARROW) return place * p.value_blocks + task.block;
  return place;
}

__device__ __forceinline__ Task make_task(const ChunkBackwardParams& p, bool reverse, int n, int hv,
                                          int part, int block = 0) {
  Task task;
  task.reverse = reverse;
  task.idle = false;
  task.hv = hv;
  task.part = part;
  task.set_block(block);
  task.nh = (long long)n * p.HV + hv;
  task.s = find_sequence(p, n);
  task.begin = 0;
  task.end = task.s.chunks;
  task.given = 0;
  task.at = (long long)task.s.slot * p.HV + hv;
  return task;
}
// Of a segment, from its start or its end.
__device__ __forceinline__ Task segment_task(const ChunkBackwardParams& p, const Segment& x, bool reverse,
                                             int part) {
  Task task = make_task(p, reverse, x.n, x.hv, part);
  task.idle = x.index && x.begin >= x.s.chunks;
  task.begin = x.begin;
  task.end = x.end;
  if (reverse ? !x.last() : x.index > 0)
    task.given = (reverse ? p.ends : p.starts) + x.place * FULL_STATE_BYTES;
  return task;
}

// Rows of d_o. Warp `part` of OUTPUT_WARPS loads its part of a chunk's rows; zeros from row `rows`
// on. `from`: this lane's 16 bytes of the part's first row. Not bulk copies: a warp issues those of
// single rows one after another.
constexpr int ROW_LANES = DO_ROW / 16, ROWS_AT_ONCE = 32 / ROW_LANES, PART_ROWS = C / OUTPUT_WARPS;

__device__ __forceinline__ void fetch_rows(u32 to, const unsigned char* from, long long token, int lane,
                                           int rows) {
#pragma unroll 8
  for (int row = lane / ROW_LANES; row < PART_ROWS; row += ROWS_AT_ONCE) {
    copy_async16(to + output_piece(row, lane % ROW_LANES), from, row < rows);
    from += ROWS_AT_ONCE * token;
  }
}
// These warps only have this to do: issuing so many copies takes long, and waiting for a stage
// delays no other copies.
template <class Ring>
__device__ __forceinline__ void produce_output_gradients(const ChunkBackwardParams& p, const Task& task,
                                                         Ring ring, u32 rows_at, int part) {
  const int lane = thread_index() & 31;
  const long long token = 2ll * p.HV * values_of(p);  // bytes from one to the next
  const u64 first = p.d_o +
                    (task.s.batch * p.T + task.s.first + part * PART_ROWS + lane / ROW_LANES) * token +
                    2 * (task.hv * values_of(p) + task.block * V + task.part * BLOCK_V) + lane % ROW_LANES * 16;
  const bool real = has_piece(task.part * BLOCK_V + lane % ROW_LANES * PIECE, values_of_block(p, task.block));
  for (int c = task.end - 1; c >= task.begin; --c) {
    const u32 to = ring.stage() + rows_at + part * PART_ROWS * DO_ROW;
    ring.wait_empty();
    sync_warp();
    fetch_rows(to, reinterpret_cast<const unsigned char*>(first + c * C * token), token, lane,
               real ? task.s.length - c * C - part * PART_ROWS : 0);
    copy_async_arrive(ring.full());
    ring.next();
  }
}

// A chunk's rows of d_o, transposed: 16 values from `row` by 64 tokens.
__device__ __forceinline__ void load_output_gradient(TokenOperand& o, int lane, int row, u32 rows) {
  const u32 from = rows + output_piece((lane >> 4) * 8 + (lane & 7), row / 8 + (lane >> 3 & 1));
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4_transposed(o.a[kk], from + 16 * kk * DO_ROW);
}

__device__ __forceinline__ const void* image_of(u64 array, long long at, u32 bytes) {
  return reinterpret_cast<const void*>(array + at * bytes);
}
// The block's rows of u, given the place of the chunk's operands.
__device__ __forceinline__ const void* u_of(const ChunkBackwardParams& p, const Task& task, long long at) {
  if constexpr (NARROW) at = value_place(p, task, at);
  return image_of(p.u + task.part * U_BYTES, at, TILE_BYTES);
}
