// The producer warps: every chunk's operands into the rings, as soon as all carriers have left a stage.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"

__device__ __forceinline__ const void* image_of(u64 array, long long at, u32 bytes) {
  return reinterpret_cast<const void*>(array + at * bytes);
}

__device__ __forceinline__ void feed_forward(const ChunkBackwardParams& p, const Job& job, u32 shared) {
  if (thread_index() & 31) return;
  ForwardRing ring = {shared};
  for (int c = 0; c < job.s.chunks; ++c) {
    const long long at = job.at + (long long)c * p.HV;
    const u32 stage = ring.stage(), full = ring.full();
    ring.wait_empty();
    barrier_expect(full, 2 * TILE_BYTES + U_BYTES + DECAY_BYTES);
    copy_in(stage + W_AT, image_of(p.w, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + U_AT, image_of(p.u + job.part * U_BYTES, at, TILE_BYTES), U_BYTES, full);
    copy_in(stage + LAST_AT, image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    copy_in(stage + KG_AT, image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    ring.next();
  }
}

// Warp `part` of OUTPUT_WARPS: its share of a chunk's rows of d_o, of which a sequence has `rows`, zeros behind them. `from`: this
// lane's 16 bytes of the share's first row. Not bulk copies: those of single rows take the warp one after the other.
constexpr int ROW_LANES = DO_ROW / 16, ROWS_AT_ONCE = 32 / ROW_LANES, SHARE = C / OUTPUT_WARPS;

__device__ __forceinline__ void fetch_rows(u32 to, const unsigned char* from, long long token, int lane, int rows) {
#pragma unroll 8
  for (int row = lane / ROW_LANES; row < SHARE; row += ROWS_AT_ONCE) {
    copy_async16(to + output_piece(row, lane % ROW_LANES), from, row < rows);
    from += ROWS_AT_ONCE * token;
  }
}
// These warps have a ring to themselves: issuing so many copies takes long, and waiting for a place of theirs holds up no others'.
__device__ __forceinline__ void feed_outputs(const ChunkBackwardParams& p, const Job& job, u32 shared, int part) {
  const int lane = thread_index() & 31;
  OutputRing outputs = {shared};
  const long long token = 2ll * p.HV * V;  // bytes from one to the next
  const u64 first = p.d_o + (job.s.batch * p.T + job.s.first + part * SHARE + lane / ROW_LANES) * token +
                    2 * (job.hv * V + job.part * BLOCK_V) + lane % ROW_LANES * 16;
  for (int c = job.s.chunks - 1; c >= 0; --c) {
    const u32 to = outputs.stage() + part * SHARE * DO_ROW;
    outputs.wait_empty();
    sync_warp();
    fetch_rows(to, reinterpret_cast<const unsigned char*>(first + c * C * token), token, lane, job.s.length - c * C - part * SHARE);
    copy_async_arrive(outputs.full());
    outputs.next();
  }
}

__device__ __forceinline__ void feed_reverse(const ChunkBackwardParams& p, const Job& job, u32 shared) {
  if (thread_index() & 31) return;
  EarlyRing early = {shared};
  LateRing late = {shared};
  for (int c = job.s.chunks - 1; c >= 0; --c) {
    const long long at = job.at + (long long)c * p.HV;
    const u32 stage = early.stage(), full = early.full();
    early.wait_empty();
    barrier_expect(full, EARLY_BYTES + DECAY_BYTES);
    copy_in(stage + EARLY_AQK_AT, image_of(p.aqk, at, SQUARE_BYTES), SQUARE_BYTES, full);
    copy_in(stage + EARLY_KG_AT, image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + EARLY_LOW_AT, image_of(p.kg_low, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(decays_of(early), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    early.next();
    const u32 to = late.stage(), bar = late.full();
    late.wait_empty();
    barrier_expect(bar, LATE_BYTES);
    copy_in(to + LATE_QG_AT, image_of(p.qg, at, TILE_BYTES), TILE_BYTES, bar);
    copy_in(to + LATE_W_AT, image_of(p.w, at, TILE_BYTES), TILE_BYTES, bar);
    copy_in(to + LATE_INV_AT, image_of(p.inv, at, SQUARE_BYTES), SQUARE_BYTES, bar);
    late.next();
  }
}
