// kda_recompute_w_u on Hopper, K = V = 128: w = Akk (beta k 2^G), u = Akk (beta v), kg = k 2^(G_last - G) and, with q, qg = q 2^G of
// every chunk of 64 tokens; a block a chunk and value head, or half of its channels and values. The arithmetic is that of
// common/recompute.cu, bit for bit.
//
// Bound by memory: a block asks for all it needs before it does anything, in two groups, and u is made and leaves while k and gc are
// still on their way; other blocks of the multiprocessor read meanwhile. A warp has strips of 16 channels, or values, of all tokens.
// What it multiplies goes from the rows as they came to registers and is scaled there, in the layout of the matrix unit's right operand.
#include "sm90/recompute/memory.cuh"

constexpr int STRIPS = WIDTH / 16 / WARPS;  // of a warp

struct Lane {
  int lane, t;
};

// Where lane 8i + r finds row r of matrix i in 16 rows and columns; columns from piece `piece` on.
template <u32 BYTES>
__device__ __forceinline__ u32 matrix_at(int piece, const Lane& l) {
  return (l.lane & 15) * BYTES + exchanged(l.lane, piece + (l.lane >> 4));
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
__device__ __forceinline__ void load_inverse(u32 (&a)[4][4], u32 shared, int m, const Lane& l) {
#pragma unroll
  for (int i = m; i < 4; ++i) load_matrix4(a[i], shared + INVERSE_AT + 16 * i * INVERSE_ROW + matrix_at<INVERSE_ROW>(2 * m, l));
  a[m][2] = 0;  // right of the diagonal
}

// Of a lane's tokens 2t, 2t + 1 and 8 later.
struct Betas {
  float2 x[2];
};
__device__ __forceinline__ Betas load_betas(u32 shared, int m, const Lane& l) {
  const u32 at = shared + BETA_AT + 8 * l.t + 64 * m;
  return {{load_shared2(at), load_shared2(at + 32)}};
}

// Decays of a strip. A lane's are those of its tokens in channel g and in channel g + 8.
struct Gates {
  u32 at[2][2];  // of token 2t or 2t + 1, channel g or g + 8
  float last[2];
};
__device__ __forceinline__ u32 gate_at(u32 shared, int token, int strip, int half, const Lane& l) {
  const int g = l.lane >> 2;
  return shared + G_AT + token * FLOAT_ROW + exchanged(token, 4 * strip + 2 * half + (g >> 2)) + 4 * (g & 3);
}
__device__ __forceinline__ Gates make_gates(u32 shared, int rows, int strip, const Lane& l) {
  Gates r;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    r.at[0][half] = gate_at(shared, 2 * l.t, strip, half, l);
    r.at[1][half] = gate_at(shared, 2 * l.t + 1, strip, half, l);
    r.last[half] = load_shared1(gate_at(shared, rows - 1, strip, half, l));
  }
  return r;
}
// Word x of an operand has tokens 8 (x & 1), channel 8 (x >> 1) on.
struct Decays {
  float x[4][2];
};
__device__ __forceinline__ Decays load_decays(const Gates& g, int m) {
  Decays r;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) r.x[x][i] = load_shared1(g.at[i][x >> 1] + (16 * m + 8 * (x & 1)) * FLOAT_ROW);
  }
  return r;
}

// u's strip, in place of v's.
__device__ __forceinline__ void make_u(u32 shared, int strip, const Lane& l) {
  const u32 values = shared + V_AT + matrix_at<HALF_ROW>(2 * strip, l);
  Strip u = {};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 v[4], a[4][4];
    load_matrix4_transposed(v, values + 16 * m * HALF_ROW);
    const Betas beta = load_betas(shared, m, l);
    load_inverse(a, shared, m, l);
#pragma unroll
    for (int x = 0; x < 4; ++x) v[x] = scaled(v[x], beta.x[x & 1].x, beta.x[x & 1].y);
#pragma unroll
    for (int i = m; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_half(u[i][n], a[i], v[2 * n], v[2 * n + 1]);
    }
  }
  sync_warp();  // in the place of values that other lanes have read
  store_strip(u, values, HALF_ROW);
}

// w's strip; kg's takes the place of k's.
__device__ __forceinline__ void make_w(Strip& w, u32 shared, int strip, const Gates& gates, const Lane& l) {
  const u32 keys = shared + K_AT + matrix_at<HALF_ROW>(2 * strip, l);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 k[4], a[4][4], high[4], rest[4];
    load_matrix4_transposed(k, keys + 16 * m * HALF_ROW);
    const Betas beta = load_betas(shared, m, l);
    const Decays sums = load_decays(gates, m);
    load_inverse(a, shared, m, l);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float sum0 = sums.x[x][0], sum1 = sums.x[x][1];
      const float y0 = half_low(k[x]) * exp2_fast(sum0) * beta.x[x & 1].x, y1 = half_high(k[x]) * exp2_fast(sum1) * beta.x[x & 1].y;
      high[x] = pack_half(y0, y1);
      rest[x] = pack_half(y0 - half_low(high[x]), y1 - half_high(high[x]));
      k[x] = scaled(k[x], exp2_fast(gates.last[x >> 1] - sum0), exp2_fast(gates.last[x >> 1] - sum1));
    }
    store_matrix4_transposed(keys + 16 * m * HALF_ROW, k);
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
__device__ __forceinline__ void make_qg(u32 shared, int strip, const Gates& gates, const Lane& l) {
  const u32 queries = shared + V_AT + matrix_at<HALF_ROW>(2 * strip, l);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 q[4];
    load_matrix4_transposed(q, queries + 16 * m * HALF_ROW);
    const Decays sums = load_decays(gates, m);
#pragma unroll
    for (int x = 0; x < 4; ++x) q[x] = scaled(q[x], exp2_fast(sums.x[x][0]), exp2_fast(sums.x[x][1]));
    store_matrix4_transposed(queries + 16 * m * HALF_ROW, q);
  }
}

// In pairs that begin together, so that neighbours in memory are read at the same time.
KDA_KERNEL(THREADS, MIN_BLOCKS) KDA_CLUSTER(2) recompute_hopper(KDA_PARAM RecomputeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int lane = thread_index() & 31, warp = thread_index() >> 5, part = block_index() % PARTS;
  wait_for_inputs();
  const Chunk c = make_chunk(p, block_index() / PARTS);
  if (!c.rows || c.batch >= p.N) return;  // a slot of a pack that no chunk fills; half of the last pair
  ask_chunk(p, c, part, shared);

  const Lane l = {lane, lane & 3};
  const Leaving leaving = make_leaving(p, c, part);
  const u32 halves = shared + leaving.row * HALF_ROW + exchanged(leaving.row, leaving.piece);
  copy_async_wait<1>();
  sync_block();
#pragma unroll 1
  for (int i = 0; i < STRIPS; ++i) make_u(shared, warp + WARPS * i, l);
  sync_block();
  const Result u = load_result(halves + V_AT, HALF_ROW);
  if (WITH_Q) {
    sync_block();
    ask<HALF_ROW>(shared + V_AT, part_of<2>(p.q, p.q_sb, p.q_st, p.q_sh, c, c.h, part), c.rows);
    copy_async_commit();
  }
  store_result(u, p.u, leaving, c.rows);

  copy_async_wait<WITH_Q>();
  sync_block();
#pragma unroll 1
  for (int i = 0; i < STRIPS; ++i) {
    const int strip = warp + WARPS * i;
    Strip w = {};
    const Gates gates = make_gates(shared, c.rows, strip, l);
    make_w(w, shared, strip, gates, l);
    if (WITH_Q) {
      if (i == 0) {
        copy_async_wait<0>();
        sync_block();
      }
      make_qg(shared, strip, gates, l);
    }
    sync_warp();  // in the place of decays that other lanes have read
    store_strip(w, shared + G_AT + matrix_at<FLOAT_ROW>(piece_of_w(strip, 0), l), FLOAT_ROW);
  }
  sync_block();
  store_result(load_result(halves + K_AT, HALF_ROW), p.kg, leaving, c.rows);
  if (WITH_Q) store_result(load_result(halves + V_AT, HALF_ROW), p.qg, leaving, c.rows);
  const int piece = piece_of_w(leaving.piece >> 1, leaving.piece & 1);
  const Result w = load_result(shared + G_AT + leaving.row * FLOAT_ROW + exchanged(leaving.row, piece), FLOAT_ROW);
  store_result(w, p.w, leaving, c.rows);
}
