// The loading warps of unit_grads: rows of q, k, d_o and dv by asynchronous copies of 16 bytes, images of the
// workspace by bulk copies.
#pragma once

#include "common/clear_rows.cuh"
#include "sm90/gated_delta/grads_shared_memory.cuh"

// 64 rows of `size` bfloat16; zeros from row `rows` on, and up to 128. A thread has the same piece of every eighth row, and the swizzle
// repeats after eight rows: offsets are constants.
__device__ __forceinline__ void fetch_rows(u32 tile, u64 base, long long row_bytes, int rows, int size,
                                           int thread) {
  constexpr int AT_ONCE = 8;
  const int piece = thread & 15, first = thread >> 4;
  const u32 to = tile + (piece >> 3) * SQUARE_BYTES;
  if (!has_piece(PIECE * piece, size)) rows = 0;
#pragma unroll
  for (int part = 0; part < AT_ONCE; part += 2 * LOAD_WARPS) {
    const int row = first + part;
    const u32 at = to + swizzled(row, piece & 7);
    u64 from = base + row * row_bytes + 16 * piece;
#pragma unroll 2
    for (int n = 0; n < C; n += AT_ONCE) {
      copy_async16(at + n * IMAGE_ROW, reinterpret_cast<const void*>(from), n < rows - row);
      from += AT_ONCE * row_bytes;
    }
  }
}

// One thread.
__device__ __forceinline__ void fetch_bulk(u32 to, u64 from, u32 bytes, u32 bar) {
  copy_in(to, reinterpret_cast<const void*>(from), bytes, bar);
}

// The tiles of a value head; of its key head too if it is the unit's first.
__device__ __forceinline__ void load_head(const GatedDeltaBackwardParams& p, const KeyUnit& x, int hv,
                                          bool is_first, Position& at, int thread) {
  at.heads().wait_empty();
  if (is_first) at.keys().wait_empty();
  const long long unit = x.slot * p.HV + hv;
  const u32 stage = at.heads().stage();
  if (thread == 0) {
    const u64 record = record_at(p, x.slot, hv);
    if (is_first) store_unit(at.shared, (at.unit & 1), x);
    barrier_expect(at.heads().full(), TILE_BYTES + sizeof(HeadScalars) + (is_first ? sizeof(KeyScalars) : 0));
    fetch_bulk(stage + OFFSET(HeadStage, u), u_at(p, unit), TILE_BYTES, at.heads().full());
    fetch_bulk(at.shared + OFFSET(SharedMemory, head) + (at.head & 1) * (u32)sizeof(HeadScalars),
               record + OFFSET(ChunkRecord, head), sizeof(HeadScalars), at.heads().full());
    if (is_first)
      fetch_bulk(at.shared + OFFSET(SharedMemory, key) + (at.unit & 1) * (u32)sizeof(KeyScalars),
                 record + OFFSET(ChunkRecord, key), sizeof(KeyScalars), at.heads().full());
  }
  const int channels = channels_of(p), values = values_of(p);
  const long long token_bytes = value_row_bytes(p),
                  from = (x.batch * p.T + x.first) * token_bytes + 2ll * values * hv;
  fetch_rows(stage + OFFSET(HeadStage, own[QUERIES]), p.d_o + from, token_bytes, x.rows, values, thread);
  fetch_rows(stage + OFFSET(HeadStage, own[KEYS]), p.dv + from, token_bytes, x.rows, values, thread);
  if (is_first) {
    const u32 tiles = at.keys().stage();
    fetch_rows(tiles + OFFSET(KeyTiles, own[QUERIES]),
               p.q + 2 * (x.batch * p.q_sb + x.first * p.q_st + x.h * p.q_sh), 2 * p.q_st, x.rows, channels,
               thread);
    fetch_rows(tiles + OFFSET(KeyTiles, own[KEYS]),
               p.k + 2 * (x.batch * p.k_sb + x.first * p.k_st + x.h * p.k_sh), 2 * p.k_st, x.rows, channels,
               thread);
  }
  copy_async_commit();
  copy_async_wait<0>();  // two stages: the next one is not empty before this one is in use
  fence_async_proxy();   // products read what has come by ordinary copies
  warp_arrive(at.heads().full(), thread & 31);
  if (thread == 0) {
    at.states().wait_empty();
    barrier_expect(at.states().full(), STATE_BYTES);
    fetch_bulk(at.states().stage(), state_image_at(p.states, unit), STATE_BYTES, at.states().full());
    at.state_grads().wait_empty();
    barrier_expect(at.state_grads().full(), STATE_BYTES);
    fetch_bulk(at.state_grads().stage(), state_image_at(p.state_grads, unit), STATE_BYTES,
               at.state_grads().full());
  }
  sync_warp();
}

__device__ __forceinline__ void load_units(const GatedDeltaBackwardParams& p, u32 shared, int thread) {
  Position at = {shared};
  const int group = divide(p.HV, p.h_factor, p.h_shift), lane = thread & 31;
#pragma unroll 1
  for (long long index = block_index(); index < p.units; index += grid_blocks()) {
    const KeyUnit x = find_key_unit(p, (int)index);
    if (!x.rows) continue;
#pragma unroll 1
    for (int i = 0; i < group; ++i) {
      load_head(p, x, x.h * group + i, i == 0, at, thread);
      ++at.head;
    }
    ++at.unit;
  }
  // No unit is left.
  at.heads().wait_empty();
  at.keys().wait_empty();
  if (thread == 0) {
    store_unit(shared, (at.unit & 1), {});
    barrier_arrive(at.heads().full());
  }
  warp_arrive(at.heads().full(), lane);
}

// Zeros for gradients of rows beyond a pack's last offset.
__device__ __forceinline__ void clear_gradients(const GatedDeltaBackwardParams& p, const Share& own) {
  if (!(p.flags & FLAG_CLEAR_TAIL)) return;
  const long long end = load_index(p.cu_seqlens, p.N, p.flags & FLAG_CU64);
  const auto clear = [&](u64 array, long long row_bytes) {
    clear_bytes(array + end * row_bytes, array + p.T * row_bytes, own);
  };
  clear(p.dq, key_row_bytes(p));
  clear(p.dk, key_row_bytes(p));
  clear(p.dv, value_row_bytes(p));
#pragma unroll 1
  for (long long i = end * p.HV + own.thread; i < p.T * p.HV; i += own.threads) {
    store_scalar(p.dg, i, p.g_type, 0.0f);
    store_scalar(p.dbeta, i, p.beta_type, 0.0f);
  }
}
