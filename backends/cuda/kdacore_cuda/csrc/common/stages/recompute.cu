// kda_recompute_w_u: of every chunk of 64 tokens, with G the cumulative log2 gate,
//
//   w = Akk (beta k 2^G), u = Akk (beta v), kg = k 2^(G_last - G) and, with q, qg = q 2^G
//
// Grid: a block a chunk and value head. Bound by memory: all loads of a block are issued before
// anything is computed. A warp multiplies its own columns of both products, in place; barriers of
// the block stand before and after.
//
// Macros from the host: K_DIM, V_DIM, HALF_F16, THREADS, MIN_BLOCKS.
#include "common/stages/chunk.cuh"
#include "common/swizzle.cuh"

constexpr int V = V_DIM;
struct SharedMemory {
  u16 values[C][V];  // v, then u; rows of 16-byte pieces, as the other two
  u16 keys[C][K];    // beta k 2^G, then w
  // The rounding errors of beta k 2^G: the rows of w are differences of nearly equal ones when keys
  // are nearly collinear.
  u16 rest[C][K];
  u16 inverse[C][C];  // Akk, with beta right of its diagonal
};
KDA_SHARED_BYTES(sizeof(SharedMemory));
constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 8;  // rows of a thread loaded at once

// Piece `piece` (16 bytes) of row `row` of a matrix with WIDTH columns; eight neighbouring rows
// never share a bank.
template <int WIDTH>
__device__ __forceinline__ u32 piece_at(u32 base, int row, int piece) {
  return base + row * (2 * WIDTH) + swizzled_piece(row, piece);
}

template <int WIDTH>
__device__ __forceinline__ void copy_rows(u32 to, const Rows& from, int rows) {
  constexpr int PIECES = WIDTH / 8;
#pragma unroll
  for (int i = 0; i < C * PIECES / THREADS; ++i) {
    const int row = (i * THREADS + thread_index()) / PIECES, piece = thread_index() % PIECES;
    copy_async16(piece_at<WIDTH>(to, row, piece), row_at(from, row < rows ? row : 0) + 16 * piece,
                 row < rows);
  }
}

// beta of row `row`: 16 each in the right halves of Akk's first four rows, which nothing else is
// written to.
__device__ __forceinline__ u32 beta_at(u32 inverse, int row) {
  return inverse + (row >> 4) * 128 + 64 + (row & 15) * 4;
}

// Akk's lower triangle by 16 x 16 blocks, 16-byte pieces, zeros above the diagonal; the blocks
// above are never read.
__device__ __forceinline__ void copy_inverse(u32 to, const Rows& from, int rows) {
#pragma unroll
  for (int i = 0; i < C * 8 / THREADS; ++i) {
    const int row = (i * THREADS + thread_index()) >> 3, piece = thread_index() & 7;
    const bool real = row < rows && 8 * piece <= row;
    if (piece >> 1 > row >> 4) continue;
    copy_async16(piece_at<C>(to, row, piece), row_at(from, real ? row : 0) + 16 * (real ? piece : 0), real);
  }
}

// Four channels of one row.
struct Raw {
  u32 k[2], q[2];
  uint4 g;
};

__device__ __forceinline__ float channel(const uint4& x, int e) { return __uint_as_float(word_of(x, e)); }

// beta k 2^G to shared memory, kg and qg to device memory. A thread keeps its 4 channels: for K =
// 128 a warp has a whole row, so every access takes whole lines.
__device__ __forceinline__ void scale_keys(const RecomputeParams& p, const Chunk& c, u32 keys, u32 rest,
                                           u32 inverse) {
  constexpr int PARTS = K / 4, STEP = THREADS / PARTS;
  static_assert(C % (STEP * BATCH) == 0, "rows past the chunk");
  const int part = thread_index() % PARTS, row0 = thread_index() / PARTS;
  const Rows k = make_rows(p.k, p.k_sb, p.k_st, p.k_sh, 2, c, c.h),
             g = make_rows(p.g, p.g_sb, p.g_st, p.g_sh, 4, c, c.hv);
  const Rows q = make_rows(p.q, p.q_sb, p.q_st, p.q_sh, 2, c, c.h);
  uint4 last = {};
  load_sixteen(last, row_at(g, c.rows - 1) + 16 * part, true);
#pragma unroll 1
  for (int r = row0; r < C; r += STEP * BATCH) {
    Raw raw[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int row = r + i * STEP;
      const bool real = row < c.rows;
      load_sixteen(raw[i].g, row_at(g, row) + 16 * part, real);
      load_eight(raw[i].k, row_at(k, row) + 8 * part, real);
      if (p.q) load_eight(raw[i].q, row_at(q, row) + 8 * part, real);
    }
    if (r == row0) sync_block();  // for beta
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int row = r + i * STEP;
      float down[4], to_end[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = channel(raw[i].g, e);
        down[e] = exp2_fast(sum);
        to_end[e] = exp2_fast(channel(last, e) - sum);
      }
      if (row < c.rows) {
        const long long at = 2 * (output_at(p, c, row, K) + 4 * part);
        store_global8(p.kg + at, scaled(raw[i].k[0], to_end[0], to_end[1]),
                    scaled(raw[i].k[1], to_end[2], to_end[3]));
        if (p.q)
          store_global8(p.qg + at, scaled(raw[i].q[0], down[0], down[1]),
                      scaled(raw[i].q[1], down[2], down[3]));
      }
      const float beta = load_shared1(beta_at(inverse, row));
      float high[2], low[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const u32 x = raw[i].k[w];
        const float y0 = half_low(x) * down[2 * w] * beta, y1 = half_high(x) * down[2 * w + 1] * beta;
        const u32 rounded = pack_half(y0, y1);
        high[w] = __uint_as_float(rounded);
        low[w] = __uint_as_float(pack_half(y0 - half_low(rounded), y1 - half_high(rounded)));
      }
      const u32 at = piece_at<K>(0, row, part >> 1) + 8 * (part & 1);
      store_shared(keys + at, high[0], high[1]);
      store_shared(rest + at, low[0], low[1]);
    }
  }
}

// This warp's columns of `inverse` times `right`, in place of `right`. No other warp touches them.
// KEYS: `rest_at` has the rounding errors of `right`; otherwise its rows are scaled by beta.
template <int WIDTH, bool KEYS>
__device__ __forceinline__ void multiply(u32 inverse, u32 right, u32 rest_at) {
  constexpr int COLUMNS = WIDTH / WARPS;
  const int lane = thread_index() & 31, column0 = thread_index() / 32 * COLUMNS;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < COLUMNS / 16; ++half) {
    const int piece = (column0 + 16 * half) / 8;
    float d[4][2][4] = {};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int row = 16 * m + (lane & 15), column = piece + (lane >> 4);
      u32 b[4], rest[4];
      load_matrix4_transposed(b, piece_at<WIDTH>(right, row, column));
      if constexpr (KEYS) {
        load_matrix4_transposed(rest, piece_at<WIDTH>(rest_at, row, column));
      } else {
        const float2 low = load_shared2(beta_at(inverse, 16 * m + 2 * t)),
                     high = load_shared2(beta_at(inverse, 16 * m + 2 * t + 8));
        b[0] = scaled(b[0], low.x, low.y);
        b[1] = scaled(b[1], high.x, high.y);
        b[2] = scaled(b[2], low.x, low.y);
        b[3] = scaled(b[3], high.x, high.y);
      }
#pragma unroll
      for (int i = m; i < 4; ++i) {
        u32 a[4];
        load_matrix4(a, piece_at<C>(inverse, 16 * i + (lane & 15), 2 * m + (lane >> 4)));
        if constexpr (KEYS) {
          mma_half(d[i][0], a, rest[0], rest[1]);
          mma_half(d[i][1], a, rest[2], rest[3]);
        }
        mma_half(d[i][0], a, b[0], b[1]);
        mma_half(d[i][1], a, b[2], b[3]);
      }
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 at = piece_at<WIDTH>(right, 16 * i + 8 * h + g, piece + n) + 4 * t;
          store_shared(at, pack_half(d[i][n][2 * h], d[i][n][2 * h + 1]));
        }
      }
    }
  }
}

template <int WIDTH>
__device__ __forceinline__ void store_rows(const RecomputeParams& p, const Chunk& c, u32 from, u64 out) {
  constexpr int PIECES = WIDTH / 8;
#pragma unroll
  for (int i = 0; i < C * PIECES / THREADS; ++i) {
    const int row = (i * THREADS + thread_index()) / PIECES, piece = thread_index() % PIECES;
    const uint4 x = load_shared_u4(piece_at<WIDTH>(from, row, piece));
    if (row < c.rows)
      store_global(reinterpret_cast<void*>(out + 2 * (output_at(p, c, row, WIDTH) + 8 * piece)), x);
  }
}

KDA_KERNEL(THREADS, MIN_BLOCKS) recompute(KDA_PARAM RecomputeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Chunk c = make_chunk(p, block_index());
  if (!c.rows) return;
  // 1. Akk, v and beta to shared memory; k 2^G, kg and qg.
  copy_inverse(shared + OFFSET(SharedMemory, inverse),
               make_rows(p.Akk, p.Akk_sb, p.Akk_st, p.Akk_sh, 2, c, c.hv), c.rows);
  copy_rows<V>(shared + OFFSET(SharedMemory, values), make_rows(p.v, p.v_sb, p.v_st, p.v_sh, 2, c, c.hv),
               c.rows);
  copy_async_commit();
  if (thread_index() < C) {
    const long long at = c.batch * p.beta_sb + (c.first + thread_index()) * p.beta_st + c.hv * p.beta_sh;
    const float beta = thread_index() < c.rows ? load_scalar(p.beta, at, p.beta_type) : 0.0f;
    store_shared(beta_at(shared + OFFSET(SharedMemory, inverse), thread_index()), __float_as_uint(beta));
  }
  scale_keys(p, c, shared + OFFSET(SharedMemory, keys), shared + OFFSET(SharedMemory, rest),
             shared + OFFSET(SharedMemory, inverse));
  copy_async_wait<0>();
  sync_block();
  // 2. w and u.
  multiply<K, true>(shared + OFFSET(SharedMemory, inverse), shared + OFFSET(SharedMemory, keys),
                    shared + OFFSET(SharedMemory, rest));
  multiply<V, false>(shared + OFFSET(SharedMemory, inverse), shared + OFFSET(SharedMemory, values), 0);
  sync_block();
  store_rows<K>(p, c, shared + OFFSET(SharedMemory, keys), p.w);
  store_rows<V>(p, c, shared + OFFSET(SharedMemory, values), p.u);
}
