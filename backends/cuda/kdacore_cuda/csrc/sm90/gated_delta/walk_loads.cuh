// How the loading warps fill a ring of stages: the record's parts as bulk copies, rows of tokens as ordinary ones.
//
// A stage's barrier for full counts the bytes of bulk copies and the warps whose rows have arrived.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/gated_delta/walk_block.cuh"

// A loading thread's 16 bytes of every ROWS_AT_ONCE-th row.
template <int PIECES>
struct RowSource {
  static constexpr int ROWS_AT_ONCE = 32 * LOAD_WARPS / PIECES;
  const unsigned char* at;
  long long step;  // bytes from one of the thread's rows to the next
  bool real;       // the head has these elements, else they are zeros
  __device__ __forceinline__ static int piece(int thread) { return thread % PIECES; }
  __device__ __forceinline__ static int row(int thread) { return thread / PIECES; }
  // A chunk's rows, zeros past the end. `to`: images of 64 columns. Moves on to the next chunk.
  __device__ __forceinline__ void fetch(u32 to, int rows, int thread) {
    const u32 image = to + piece(thread) / 8 * SQUARE_BYTES;
    int left = real ? rows - row(thread) : 0;
#pragma unroll
    for (int n = 0; n < C; n += ROWS_AT_ONCE) {
      copy_async16(image + swizzled(row(thread) + n, piece(thread) % 8), at, left > 0);
      at += step;
      left -= ROWS_AT_ONCE;
    }
  }
  __device__ __forceinline__ void move(int chunks) { at += chunks * (C / ROWS_AT_ONCE) * step; }
};
// `offset`: of the first row, in elements, as `row`, from one row to the next; `size`: elements of a row from `offset`
// on that the head has.
template <int PIECES>
__device__ __forceinline__ RowSource<PIECES> row_source(u64 base, long long offset, long long row,
                                                        int size, int thread) {
  using Source = RowSource<PIECES>;
  return {reinterpret_cast<const unsigned char*>(base) + 2 * (offset + Source::row(thread) * row) +
              16 * Source::piece(thread),
          2 * row * Source::ROWS_AT_ONCE, has_piece(PIECE * Source::piece(thread), size)};
}
// Of q and k; and of the block's values in v, or in arrays [B, T, HV, V].
__device__ __forceinline__ RowSource<K / 8> query_source(const GatedDeltaParams& p, const Item& x, int h,
                                                      int thread) {
  return row_source<K / 8>(p.q, x.s.batch * p.q_sb + x.s.first * p.q_st + h * p.q_sh, p.q_st,
                        channels_of(p), thread);
}
__device__ __forceinline__ RowSource<K / 8> key_source(const GatedDeltaParams& p, const Item& x, int h,
                                                    int thread) {
  return row_source<K / 8>(p.k, x.s.batch * p.k_sb + x.s.first * p.k_st + h * p.k_sh, p.k_st,
                        channels_of(p), thread);
}
using ValueSource = RowSource<BLOCK_VALUES / 8>;
__device__ __forceinline__ ValueSource value_source(const GatedDeltaParams& p, const Item& x, int thread) {
  return row_source<BLOCK_VALUES / 8>(
      p.v, x.s.batch * p.v_sb + x.s.first * p.v_st + x.hv * p.v_sh + BLOCK_VALUES * x.part, p.v_st,
      values_of(p) - BLOCK_VALUES * x.part, thread);
}
__device__ __forceinline__ ValueSource packed_value_source(const GatedDeltaParams& p, u64 base, const Item& x,
                                                           int thread) {
  const int values = values_of(p);
  const long long token = p.HV * values;
  return row_source<BLOCK_VALUES / 8>(
      base, (x.s.batch * p.T + x.s.first) * token + x.hv * values + BLOCK_VALUES * x.part, token,
      values - BLOCK_VALUES * x.part, thread);
}

// The part of a record that walks read, to the stage whose barrier `full` is: columns `first` up to `beyond`, with the
// first one the factors and what the barrier expects in all. One thread.
__device__ __forceinline__ void fetch_record(u32 to, u64 record, u32 full, int first, int beyond) {
  if (first == 0) {
    barrier_expect(full, WALK_BYTES);
    copy_in(to + OFFSET(WalkRecord, factors),
            reinterpret_cast<const void*>(record + OFFSET(ChunkRecord, factors)), sizeof(RecordFactors), full);
  }
#pragma unroll
  for (int c = first; c < beyond; ++c) {
    fetch_column(to + OFFSET(WalkRecord, t), record + OFFSET(ChunkRecord, images.t), c, full);
    fetch_column(to + OFFSET(WalkRecord, a), record + OFFSET(ChunkRecord, images.a), c, full);
  }
}
// The same, and what of it changes a state alone, to `t` and `factors`, by all loading warps, a column each, since a
// thread takes long to request a copy.
static_assert(LOAD_WARPS == COLUMNS, "a column a warp");
__device__ __forceinline__ void fetch_record(u32 to, u64 record, u32 full, int thread) {
  const int column = uniform(thread >> 5);
  if (!(thread & 31)) fetch_record(to, record, full, column, column + 1);
}
__device__ __forceinline__ void fetch_system(u32 t, u32 factors, u64 record, u32 full, int thread) {
  const int column = uniform(thread >> 5);
  if (thread & 31) return;
  if (column == 0) {
    barrier_expect(full, sizeof(LowerColumns) + sizeof(RecordFactors));
    copy_in(factors, reinterpret_cast<const void*>(record + OFFSET(ChunkRecord, factors)), sizeof(RecordFactors),
            full);
  }
  fetch_column(t, record + OFFSET(ChunkRecord, images.t), column, full);
}

// Calls load(ring) for the stage of each of `chunks` chunks; it requests the copies of what belongs to it. Calls
// load_late(ring) for the rest, once the rows of the chunk before have been told of: it may wait. Returns the ring behind
// the last one.
template <class Ring, class F, class G>
__device__ __forceinline__ Ring load_chunks(Ring ring, int chunks, int thread, F load, G load_late) {
  Ring arrived = ring;
  const auto tell = [&] {
    fence_async_proxy();  // products read what has come by ordinary copies
    warp_arrive(arrived.full(), thread & 31);
    arrived.next();
  };
  for (int c = 0; c < chunks; ++c) {
    ring.wait_empty();
    load(ring);
    copy_async_commit();
    if (c) {
      copy_async_wait<1>();
      tell();
    }
    load_late(ring);
    ring.next();
  }
  copy_async_wait<0>();
  if (chunks) tell();
  return ring;
}
template <class Ring, class F>
__device__ __forceinline__ void load_chunks(Ring ring, int chunks, int thread, F load) {
  load_chunks(ring, chunks, thread, load, [](const Ring&) {});
}
