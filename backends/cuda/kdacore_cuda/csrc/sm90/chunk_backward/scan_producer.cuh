// The producer warps: every chunk's operands into the rings, as soon as all state warps have read a
// stage.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"

__device__ __forceinline__ void produce_forward(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  ForwardRing ring = {shared};
  for (int c = task.begin; c < task.end; ++c) {
    const long long at = task.at + (long long)c * p.HV;
    const u32 stage = ring.stage(), full = ring.full();
    ring.wait_empty();
    barrier_expect(full, 2 * TILE_BYTES + U_BYTES + DECAY_BYTES);
    copy_in(stage + OFFSET(ForwardStage, w), image_of(p.w, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(ForwardStage, u), u_of(p, task, at), U_BYTES, full);
    copy_in(stage + OFFSET(ForwardStage, decay), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    copy_in(stage + OFFSET(ForwardStage, kg), image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    ring.next();
  }
}

__device__ __forceinline__ void produce_reverse(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  ValueGradRing value_grad = {shared};
  StateGradRing state_grad = {shared};
  for (int c = task.end - 1; c >= task.begin; --c) {
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
