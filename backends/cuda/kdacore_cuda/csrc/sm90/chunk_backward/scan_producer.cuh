// The producer warps: every chunk's operands into the rings, as soon as all state warps have read a
// stage.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"

__device__ __forceinline__ const void* image_of(u64 array, long long at, u32 bytes) {
  return reinterpret_cast<const void*>(array + at * bytes);
}

__device__ __forceinline__ void produce_forward(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  ForwardRing ring = {shared};
  for (int c = 0; c < task.s.chunks; ++c) {
    const long long at = task.at + (long long)c * p.HV;
    const u32 stage = ring.stage(), full = ring.full();
    ring.wait_empty();
    barrier_expect(full, 2 * TILE_BYTES + U_BYTES + DECAY_BYTES);
    copy_in(stage + OFFSET(ForwardStage, w), image_of(p.w, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(ForwardStage, u), image_of(p.u + task.part * U_BYTES, at, TILE_BYTES), U_BYTES,
            full);
    copy_in(stage + OFFSET(ForwardStage, decay), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    copy_in(stage + OFFSET(ForwardStage, kg), image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    ring.next();
  }
}

// Warp `part` of OUTPUT_WARPS: its part of a chunk's rows of d_o; zeros from row `rows` on. `from`:
// this lane's 16 bytes of the part's first row. Not bulk copies: a warp issues those of single rows
// one after another.
constexpr int ROW_LANES = DO_ROW / 16, ROWS_AT_ONCE = 32 / ROW_LANES, PART_ROWS = C / OUTPUT_WARPS;

__device__ __forceinline__ void fetch_rows(u32 to, const unsigned char* from, long long token, int lane,
                                           int rows) {
#pragma unroll 8
  for (int row = lane / ROW_LANES; row < PART_ROWS; row += ROWS_AT_ONCE) {
    copy_async16(to + output_piece(row, lane % ROW_LANES), from, row < rows);
    from += ROWS_AT_ONCE * token;
  }
}
// These warps have a ring of their own: issuing so many copies takes long, and waiting for a stage
// delays no other copies.
__device__ __forceinline__ void produce_output_gradients(const ChunkBackwardParams& p, const Task& task,
                                                         u32 shared, int part) {
  const int lane = thread_index() & 31;
  OutputGradRing output_grads = {shared};
  const long long token = 2ll * p.HV * V;  // bytes from one to the next
  const u64 first = p.d_o +
                    (task.s.batch * p.T + task.s.first + part * PART_ROWS + lane / ROW_LANES) * token +
                    2 * (task.hv * V + task.part * BLOCK_V) + lane % ROW_LANES * 16;
  for (int c = task.s.chunks - 1; c >= 0; --c) {
    const u32 to = output_grads.stage() + part * PART_ROWS * DO_ROW;
    output_grads.wait_empty();
    sync_warp();
    fetch_rows(to, reinterpret_cast<const unsigned char*>(first + c * C * token), token, lane,
               task.s.length - c * C - part * PART_ROWS);
    copy_async_arrive(output_grads.full());
    output_grads.next();
  }
}

__device__ __forceinline__ void produce_reverse(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  ValueGradRing value_grad = {shared};
  StateGradRing state_grad = {shared};
  for (int c = task.s.chunks - 1; c >= 0; --c) {
    const long long at = task.at + (long long)c * p.HV;
    const u32 stage = value_grad.stage(), full = value_grad.full();
    value_grad.wait_empty();
    barrier_expect(full, VALUE_GRAD_BYTES + DECAY_BYTES);
    copy_in(stage + OFFSET(ValueGradStage, aqk), image_of(p.aqk, at, SQUARE_BYTES), SQUARE_BYTES, full);
    copy_in(stage + OFFSET(ValueGradStage, kg), image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(ValueGradStage, kg_low), image_of(p.kg_low, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(decays_of(value_grad), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    value_grad.next();
    const u32 to = state_grad.stage(), bar = state_grad.full();
    state_grad.wait_empty();
    barrier_expect(bar, STATE_GRAD_BYTES);
    copy_in(to + OFFSET(StateGradStage, qg), image_of(p.qg, at, TILE_BYTES), TILE_BYTES, bar);
    copy_in(to + OFFSET(StateGradStage, w), image_of(p.w, at, TILE_BYTES), TILE_BYTES, bar);
    copy_in(to + OFFSET(StateGradStage, inverse), image_of(p.inv, at, SQUARE_BYTES), SQUARE_BYTES, bar);
    state_grad.next();
  }
}
