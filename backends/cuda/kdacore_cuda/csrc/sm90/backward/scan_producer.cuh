// The producer warp: every chunk's operands into the ring, as soon as all carriers have left a stage.
#ifndef KDACORE_BACKWARD_SCAN_PRODUCER_CUH
#define KDACORE_BACKWARD_SCAN_PRODUCER_CUH

#include "sm90/backward/scan_layout.cuh"

__device__ __forceinline__ const void* image_of(u64 array, long long at, u32 bytes) {
  return reinterpret_cast<const void*>(array + at * bytes);
}

__device__ __forceinline__ void feed_forward(const BackwardParams& p, const Job& job, u32 shared) {
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

// A chunk's rows of d_o, of which a sequence has `rows`, zeros behind them. `from`: this lane's 16 bytes of its first row.
// Not bulk copies: those of single rows take the warp one after the other.
constexpr int ROW_LANES = DO_ROW / 16, ROWS_AT_ONCE = 32 / ROW_LANES;

__device__ __forceinline__ void fetch_rows(u32 to, const unsigned char* from, long long token, int lane, int rows) {
  const int first = lane / ROW_LANES;
  to += first * DO_PITCH + lane % ROW_LANES * 16;
#pragma unroll 8
  for (int row = 0; row < C; row += ROWS_AT_ONCE) {
    copy_async16(to + row * DO_PITCH, from, first + row < rows);
    from += ROWS_AT_ONCE * token;
  }
}

// With stages for it d_o is a chunk ahead of the rest, so that no wait for its place holds up the others'.
constexpr int OUTPUTS_AHEAD = DO_STAGES > 2;

__device__ __forceinline__ void feed_reverse(const BackwardParams& p, const Job& job, u32 shared) {
  const int lane = thread_index() & 31;
  EarlyRing early = {shared};
  LateRing late = {shared};
  OutputRing outputs = {shared};
  const long long token = 2ll * p.HV * V;  // bytes from one to the next
  const u64 first = p.d_o + (job.s.batch * p.T + job.s.first + lane / ROW_LANES) * token + 2 * (job.hv * V + job.part * BLOCK_V) +
                    lane % ROW_LANES * 16;
  const auto fetch_outputs = [&](int c) {
    if (c < 0) return;
    const int left = job.s.length - c * C, rows = left < C ? left : C;
    outputs.wait_empty();
    sync_warp();
    fetch_rows(outputs.stage(), reinterpret_cast<const unsigned char*>(first + c * C * token), token, lane, rows);
    copy_async_arrive(outputs.full());
    outputs.next();
  };
  if (OUTPUTS_AHEAD) fetch_outputs(job.s.chunks - 1);
  for (int c = job.s.chunks - 1; c >= 0; --c) {
    const long long at = job.at + (long long)c * p.HV;
    const u32 stage = early.stage(), full = early.full();
    early.wait_empty();
    if (lane == 0) {
      barrier_expect(full, EARLY_BYTES + DECAY_BYTES);
      copy_in(stage + EARLY_AQK_AT, image_of(p.aqk, at, SQUARE_BYTES), SQUARE_BYTES, full);
      copy_in(stage + EARLY_KG_AT, image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
      copy_in(stage + EARLY_LOW_AT, image_of(p.kg_low, at, TILE_BYTES), TILE_BYTES, full);
      copy_in(decays_of(early), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    }
    early.next();
    fetch_outputs(c - OUTPUTS_AHEAD);
    late.wait_empty();
    if (lane == 0) {
      const u32 to = late.stage(), bar = late.full();
      barrier_expect(bar, LATE_BYTES);
      copy_in(to + LATE_QG_AT, image_of(p.qg, at, TILE_BYTES), TILE_BYTES, bar);
      copy_in(to + LATE_W_AT, image_of(p.w, at, TILE_BYTES), TILE_BYTES, bar);
      copy_in(to + LATE_INV_AT, image_of(p.inv, at, SQUARE_BYTES), SQUARE_BYTES, bar);
    }
    late.next();
  }
}

#endif
