// kda_recompute_w_u on Hopper, K = V = 128: of every chunk of 64 tokens, with G the cumulative log2
// gate,
//
//   w = Akk (beta k 2^G), u = Akk (beta v), kg = k 2^(G_last - G) and, with q, qg = q 2^G
//
// The arithmetic is that of common/stages/recompute.cu, bit for bit.
//
// Grid: a block of four warps a chunk and value head, or half of its channels and values; blocks
// come in clusters of two, so that neighbours in memory are read at the same time. A warp has
// strips of 16 channels, or values, of all tokens: operands go from the rows as they were loaded to
// registers and are scaled there, in the layout of the matrix unit's right operand.
//
// Bound by memory. A block loads what u needs and k first, then the gate, so that u is computed and
// stored while the rest arrives; other blocks of the multiprocessor load meanwhile. The first
// blocks of the grid start one after another, so that from the start some load while others compute
// and store. What the last blocks write stays in L2 for its reader.
#include "sm90/stages/recompute_hopper_memory.cuh"

// Where lane 8i + r finds row r of matrix i in 16 rows and columns; columns from piece `piece` on.
template <u32 BYTES>
__device__ __forceinline__ u32 matrix_at(int piece, int lane) {
  return (lane & 15) * BYTES + swizzled_piece(lane, piece + (lane >> 4));
}

using Strip = float[4][2][4];

__device__ __forceinline__ void store_strip(const Strip& d, u32 to, u32 bytes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 r[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) r[2 * n + h] = pack_half(d[i][n][2 * h], d[i][n][2 * h + 1]);
    }
    store_matrix4(to + 16 * i * bytes, r);
  }
}

// Akk's blocks of columns 16m .. 16m + 15, on and below the diagonal.
__device__ __forceinline__ void load_inverse(u32 (&a)[4][4], u32 at, int m, int lane) {
#pragma unroll
  for (int i = m; i < 4; ++i)
    load_matrix4(a[i], at + 16 * i * INVERSE_ROW + matrix_at<INVERSE_ROW>(2 * m, lane));
  a[m][2] = 0;  // right of the diagonal
}

// Of a lane's tokens 2t, 2t + 1 and of those 8 later.
struct Betas {
  float2 x[2];
};
template <class S>
__device__ __forceinline__ Betas load_betas(u32 shared, int m, int lane) {
  const u32 at = shared + S::BETA_AT + 8 * (lane & 3) + 64 * m;
  return {{load_shared2(at), load_shared2(at + 32)}};
}

// Decays of a strip. A lane's are those of its tokens in channel g and in channel g + 8.
struct Gates {
  u32 at[2][2];  // of token 2t or 2t + 1, channel g or g + 8
  float last[2];
};
template <class S>
__device__ __forceinline__ u32 gate_at(u32 shared, int token, int strip, int half, int lane) {
  const int g = lane >> 2;
  return shared + S::G_AT + token * S::FLOAT_ROW + swizzled_piece(token, 4 * strip + 2 * half + (g >> 2)) +
         4 * (g & 3);
}
template <class S>
__device__ __forceinline__ Gates make_gates(u32 shared, int rows, int strip, int lane) {
  Gates r;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    r.at[0][half] = gate_at<S>(shared, 2 * (lane & 3), strip, half, lane);
    r.at[1][half] = gate_at<S>(shared, 2 * (lane & 3) + 1, strip, half, lane);
    r.last[half] = load_shared1(gate_at<S>(shared, rows - 1, strip, half, lane));
  }
  return r;
}
// Word x of an operand has tokens 8 (x & 1), channel 8 (x >> 1) on.
struct Decays {
  float x[4][2];
};
template <class S>
__device__ __forceinline__ Decays load_decays(const Gates& g, int m) {
  Decays r;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      r.x[x][i] = load_shared1(g.at[i][x >> 1] + (16 * m + 8 * (x & 1)) * S::FLOAT_ROW);
  }
  return r;
}

// u's strip, in place of v's.
template <class S>
__device__ __forceinline__ void make_u(u32 shared, int strip, int lane) {
  const u32 values = shared + S::V_AT + matrix_at<S::HALF_ROW>(2 * strip, lane);
  Strip u = {};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 v[4], a[4][4];
    load_matrix4_transposed(v, values + 16 * m * S::HALF_ROW);
    const Betas beta = load_betas<S>(shared, m, lane);
    load_inverse(a, shared + S::INVERSE_AT, m, lane);
#pragma unroll
    for (int x = 0; x < 4; ++x) v[x] = scaled(v[x], beta.x[x & 1].x, beta.x[x & 1].y);
#pragma unroll
    for (int i = m; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_half(u[i][n], a[i], v[2 * n], v[2 * n + 1]);
    }
  }
  sync_warp();  // other lanes have read the values that this overwrites
  store_strip(u, values, S::HALF_ROW);
}

// w's strip; kg's takes the place of k's.
template <class S>
__device__ __forceinline__ void make_w(Strip& w, u32 shared, int strip, const Gates& gates, int lane) {
  const u32 keys = shared + S::K_AT + matrix_at<S::HALF_ROW>(2 * strip, lane);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 k[4], a[4][4], high[4], rest[4];
    load_matrix4_transposed(k, keys + 16 * m * S::HALF_ROW);
    const Betas beta = load_betas<S>(shared, m, lane);
    const Decays sums = load_decays<S>(gates, m);
    load_inverse(a, shared + S::INVERSE_AT, m, lane);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float sum0 = sums.x[x][0], sum1 = sums.x[x][1];
      const float y0 = half_low(k[x]) * exp2_fast(sum0) * beta.x[x & 1].x,
                  y1 = half_high(k[x]) * exp2_fast(sum1) * beta.x[x & 1].y;
      high[x] = pack_half(y0, y1);
      rest[x] = pack_half(y0 - half_low(high[x]), y1 - half_high(high[x]));
      k[x] = scaled(k[x], exp2_fast(gates.last[x >> 1] - sum0), exp2_fast(gates.last[x >> 1] - sum1));
    }
    store_matrix4_transposed(keys + 16 * m * S::HALF_ROW, k);
#pragma unroll
    for (int i = m; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_half(w[i][n], a[i], rest[2 * n], rest[2 * n + 1]);
        mma_half(w[i][n], a[i], high[2 * n], high[2 * n + 1]);
      }
    }
  }
}

// qg's strip, in place of q's.
template <class S>
__device__ __forceinline__ void make_qg(u32 shared, int strip, const Gates& gates, int lane) {
  const u32 queries = shared + S::V_AT + matrix_at<S::HALF_ROW>(2 * strip, lane);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 q[4];
    load_matrix4_transposed(q, queries + 16 * m * S::HALF_ROW);
    const Decays sums = load_decays<S>(gates, m);
#pragma unroll
    for (int x = 0; x < 4; ++x) q[x] = scaled(q[x], exp2_fast(sums.x[x][0]), exp2_fast(sums.x[x][1]));
    store_matrix4_transposed(queries + 16 * m * S::HALF_ROW, q);
  }
}

template <class S>
__device__ __forceinline__ void recompute(const RecomputeParams& p, const Chunk& c, int part, bool kept,
                                          u32 shared) {
  constexpr int STRIPS = S::WIDTH / 16 / WARPS;  // of a warp
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  fetch_chunk<S>(p, c, part, shared);

  const OutputRows output_rows = make_output_rows<S>(p, c, part, kept);
  const u32 halves =
      shared + output_rows.row * S::HALF_ROW + swizzled_piece(output_rows.row, output_rows.piece);
  if (S::DECAYS_AFTER_REST) {
    copy_async_wait<0>();
    fetch_decays<S>(p, c, part, shared);
  } else {
    copy_async_wait<1>();
  }
  sync_block();
#pragma unroll 1
  for (int i = 0; i < STRIPS; ++i) make_u<S>(shared, warp + WARPS * i, lane);
  sync_block();
  const Result<S> u = load_result<S>(halves + S::V_AT, S::HALF_ROW);
  if (WITH_Q) {
    sync_block();
    fetch_rows<S::HALF_ROW>(shared + S::V_AT, part_of<S, 2>(p.q, p.q_sb, p.q_st, p.q_sh, c, c.h, part),
                            c.rows);
    copy_async_commit();
  }
  store_result<S>(u, p.u, output_rows, c.rows);

  copy_async_wait<WITH_Q>();
  sync_block();
#pragma unroll 1
  for (int i = 0; i < STRIPS; ++i) {
    const int strip = warp + WARPS * i;
    Strip w = {};
    const Gates gates = make_gates<S>(shared, c.rows, strip, lane);
    make_w<S>(w, shared, strip, gates, lane);
    if (WITH_Q) {
      if (i == 0) {
        copy_async_wait<0>();
        sync_block();
      }
      make_qg<S>(shared, strip, gates, lane);
    }
    sync_warp();  // other lanes have read the decays that this overwrites
    store_strip(w, shared + S::G_AT + matrix_at<S::FLOAT_ROW>(piece_of_w(strip, 0), lane), S::FLOAT_ROW);
  }
  sync_block();
  store_result<S>(load_result<S>(halves + S::K_AT, S::HALF_ROW), p.kg, output_rows, c.rows);
  if (WITH_Q) store_result<S>(load_result<S>(halves + S::V_AT, S::HALF_ROW), p.qg, output_rows, c.rows);
  const int piece = piece_of_w(output_rows.piece >> 1, output_rows.piece & 1);
  const Result<S> w = load_result<S>(
      shared + S::G_AT + output_rows.row * S::FLOAT_ROW + swizzled_piece(output_rows.row, piece),
      S::FLOAT_ROW);
  store_result<S>(w, p.w, output_rows, c.rows);
}

KDA_KERNEL(THREADS, 4) KDA_CLUSTER(2) recompute_hopper(KDA_PARAM RecomputeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int block = block_index(), past = block - p.whole, item = past < 0 ? block : p.whole + (past >> 1);
  const bool kept = item >= p.kept;
  const Chunk c = make_chunk(p, item);
  if (!c.rows) return;  // a slot of a pack that no chunk fills
  if (block < p.in_turn)
    pause(block * (past < 0 ? BlockLayout<1>::START_DELAY : BlockLayout<2>::START_DELAY));
  if (past < 0) {
    recompute<BlockLayout<1>>(p, c, 0, kept, shared);
  } else {
    recompute<BlockLayout<2>>(p, c, past & 1, kept, shared);
  }
}
