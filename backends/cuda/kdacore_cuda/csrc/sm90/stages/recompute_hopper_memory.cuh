// kda_recompute_w_u on Hopper: shared memory of a block, its loads and stores.
//
// Macros from the host: K_DIM (128), HALF_F16, WITH_Q.
#pragma once

#include "common/stages/chunk.cuh"
#include "common/swizzle.cuh"
#include "sm90/bulk_copies.cuh"

static_assert(K == 128, "rows of 128 channels and values");
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr u32 INVERSE_ROW = 2 * C;

// Shared memory of a block that has one of PARTS parts of a chunk and value head: rows as loaded,
// their 16-byte pieces swizzled. Results take the places of their operands: kg that of k, u that of
// v, w that of g. q is loaded where u was, and qg takes its place.
template <int PARTS>
struct BlockLayout {
  static constexpr int WIDTH = K / PARTS;  // channels and values of a block
  // g is half of what a block loads. It is requested when the rest has arrived, as memory is a
  // little faster with fewer open requests. Blocks with half a chunk run when there is little to do
  // and request all at once.
  static constexpr bool DECAYS_AFTER_REST = PARTS == 1;
  static constexpr int START_DELAY =
      PARTS == 1 ? 24 : 14;  // cycles in which memory delivers about what it loads
  static constexpr u32 HALF_ROW = 2 * WIDTH, FLOAT_ROW = 4 * WIDTH;
  struct Memory {
    u16 k[C][WIDTH];    // then kg
    u16 v[C][WIDTH];    // then u, q and qg
    float g[C][WIDTH];  // then w
    u16 inverse[C][C];
    float beta[C];
  };
  static constexpr u32 K_AT = OFFSET(Memory, k), V_AT = OFFSET(Memory, v), G_AT = OFFSET(Memory, g);
  static constexpr u32 INVERSE_AT = OFFSET(Memory, inverse), BETA_AT = OFFSET(Memory, beta);
  // Rows of a result that a thread stores; a warp stores whole rows.
  static constexpr int ROW_LANES = 2 * WIDTH / 16, ROWS_AT_ONCE = THREADS / ROW_LANES,
                       THREAD_ROWS = C / ROWS_AT_ONCE;
  static_assert(ROWS_AT_ONCE % 8 == 0, "all its rows have their pieces in the same order");
};
KDA_SHARED_BYTES(sizeof(BlockLayout<1>::Memory), sizeof(BlockLayout<2>::Memory));

// Rows past a chunk's end are zeros: so is their beta, they add nothing, and their results are not
// stored.
template <u32 BYTES>
__device__ __forceinline__ void fetch_rows(u32 to, const Rows& from, int rows) {
  constexpr int PIECES = BYTES / 16, ROWS_AT_ONCE = THREADS / PIECES, TIMES = C / ROWS_AT_ONCE;
  const int piece = thread_index() % PIECES, first = thread_index() / PIECES;
  const unsigned char* at = row_at(from, first) + 16 * piece;
  const long long step = (long long)ROWS_AT_ONCE * from.step;
#pragma unroll
  for (int n = 0; n < TIMES; ++n) {
    const int row = first + n * ROWS_AT_ONCE;
    copy_async16(to + row * BYTES + swizzled_piece(row, piece), at, row < rows);
    at += step;
  }
}

// Akk by blocks of 16 x 16, those on and below the diagonal.
__device__ __forceinline__ void fetch_inverse(u32 to, const Rows& from, int rows) {
  constexpr int ROWS_AT_ONCE = THREADS / 8;
  const int piece = thread_index() & 7, first = thread_index() >> 3;
#pragma unroll
  for (int n = 0; n < C / ROWS_AT_ONCE; ++n) {
    const int row = first + n * ROWS_AT_ONCE;
    if (piece >> 1 > row >> 4) continue;
    copy_async16(to + row * INVERSE_ROW + swizzled_piece(row, piece), row_at(from, row) + 16 * piece,
                 row < rows);
  }
}

// This block's channels, or values, of an array's rows; SIZE: bytes of one.
template <class S, int SIZE>
__device__ __forceinline__ Rows part_of(u64 base, long long sb, long long st, long long sh, const Chunk& c,
                                        int head, int part) {
  Rows r = make_rows(base, sb, st, sh, SIZE, c, head);
  r.at += SIZE * S::WIDTH * part;
  return r;
}

template <class S>
__device__ __forceinline__ void fetch_decays(const RecomputeParams& p, const Chunk& c, int part, u32 shared) {
  fetch_rows<S::FLOAT_ROW>(shared + S::G_AT, part_of<S, 4>(p.g, p.g_sb, p.g_st, p.g_sh, c, c.hv, part),
                           c.rows);
  copy_async_commit();
}

// Requests everything but q and, if DECAYS_AFTER_REST, the decays. Otherwise in two groups:
// operands of u, then the rest.
template <class S>
__device__ __forceinline__ void fetch_chunk(const RecomputeParams& p, const Chunk& c, int part, u32 shared) {
  const int i = thread_index();
  // Not converted yet: that would wait for the load before everything else has been requested.
  const long long beta_at = c.batch * p.beta_sb + (c.first + i) * p.beta_st + c.hv * p.beta_sh;
  const u32 beta = i < c.rows ? load_bits(p.beta + type_size(p.beta_type) * beta_at, p.beta_type) : 0;
  fetch_rows<S::HALF_ROW>(shared + S::V_AT, part_of<S, 2>(p.v, p.v_sb, p.v_st, p.v_sh, c, c.hv, part),
                          c.rows);
  fetch_inverse(shared + S::INVERSE_AT, make_rows(p.Akk, p.Akk_sb, p.Akk_st, p.Akk_sh, 2, c, c.hv), c.rows);
  if (!S::DECAYS_AFTER_REST) copy_async_commit();
  fetch_rows<S::HALF_ROW>(shared + S::K_AT, part_of<S, 2>(p.k, p.k_sb, p.k_st, p.k_sh, c, c.h, part), c.rows);
  if (S::DECAYS_AFTER_REST) {
    copy_async_commit();
  } else {
    fetch_decays<S>(p, c, part, shared);
  }
  if (i < C) store_shared(shared + S::BETA_AT + 4 * i, __float_as_uint(from_bits(beta, p.beta_type)));
}

// Strips of w, 16 channels, take two of the four pieces of their decays, chosen so that eight lanes
// that read a row use different banks.
__device__ __forceinline__ int piece_of_w(int strip, int half) {
  return 4 * strip + 2 * (strip >> 1 & 1) + half;
}

// The rows of a result that a thread stores: the first row, its 16 bytes of each, where they go,
// and whether they stay in L2.
struct OutputRows {
  int row, piece;
  long long to, step;
  u64 policy;
};
template <class S>
__device__ __forceinline__ OutputRows make_output_rows(const RecomputeParams& p, const Chunk& c, int part,
                                                       bool kept) {
  OutputRows r;
  r.row = thread_index() / S::ROW_LANES;
  r.piece = thread_index() % S::ROW_LANES;
  r.to = 2 * (output_at(p, c, r.row, K) + S::WIDTH * part) + 16 * r.piece;
  r.step = 2ll * S::ROWS_AT_ONCE * p.HV * K;
  r.policy = write_policy(kept);
  return r;
}

template <class S>
struct Result {
  uint4 x[S::THREAD_ROWS];
};
template <class S>
__device__ __forceinline__ Result<S> load_result(u32 from, u32 bytes) {
  Result<S> r;
#pragma unroll
  for (int n = 0; n < S::THREAD_ROWS; ++n) r.x[n] = load_shared_u4(from + S::ROWS_AT_ONCE * n * bytes);
  return r;
}
template <class S>
__device__ __forceinline__ void store_result(const Result<S>& r, u64 array, const OutputRows& l, int rows) {
  u64 to = array + l.to;
#pragma unroll
  for (int n = 0; n < S::THREAD_ROWS; ++n) {
    if (l.row + S::ROWS_AT_ONCE * n < rows) store_global(reinterpret_cast<void*>(to), r.x[n], l.policy);
    to += l.step;
  }
}
