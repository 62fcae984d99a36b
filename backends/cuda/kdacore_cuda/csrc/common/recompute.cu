// kda_recompute_w_u: w = Akk (beta k 2^G), u = Akk (beta v), kg = k 2^(G_last - G) and, with q, qg = q 2^G of every chunk of 64
// tokens, one block a chunk and value head. Bound by memory: what a block reads is asked for before anything is computed.
#include "common/stage.cuh"

// Shared memory: v and beta k 2^G as rows of 16-byte pieces, later u and w in their place; Akk; beta.
constexpr int V = V_DIM;
constexpr u32 VALUES_AT = 0;
constexpr u32 KEYS_AT = VALUES_AT + C * V * 2;
constexpr u32 INVERSE_AT = KEYS_AT + C * K * 2;
constexpr u32 BETA_AT = INVERSE_AT + C * C * 2;
static_assert(BETA_AT + 4 * C <= SHARED_LIMIT, "the host's shared memory size is too small");
constexpr int WARPS = THREADS / 32;

// Piece `piece` (16 bytes) of row `row` of a matrix with WIDTH columns; rows of eight neighbours never share a bank.
template <int WIDTH>
__device__ __forceinline__ u32 piece_at(u32 base, int row, int piece) {
  return base + row * (2 * WIDTH) + ((piece ^ (row & 7)) << 4);
}

template <int WIDTH>
__device__ __forceinline__ void copy_rows(u32 to, const Rows& from, int rows) {
  constexpr int PIECES = WIDTH / 8;
#pragma unroll
  for (int i = 0; i < C * PIECES / THREADS; ++i) {
    const int row = (i * THREADS + thread_index()) / PIECES, piece = thread_index() % PIECES;
    copy_async16(piece_at<WIDTH>(to, row, piece), row_at(from, row < rows ? row : 0) + 16 * piece, row < rows);
  }
}

// Akk's lower triangle, 16-byte pieces; what is above it is never read.
__device__ __forceinline__ void copy_inverse(u32 to, const Rows& from, int rows) {
#pragma unroll
  for (int i = 0; i < C * 8 / THREADS; ++i) {
    const int row = (i * THREADS + thread_index()) >> 3, piece = thread_index() & 7;
    const bool real = row < rows && 8 * piece <= row;
    copy_async16(piece_at<C>(to, row, piece), row_at(from, real ? row : 0) + 16 * (real ? piece : 0), real);
  }
}

struct Raw {
  uint4 k, q, g[2];
  u32 beta;
};

__device__ __forceinline__ u32 beta_bits(const RecomputeParams& p, const Chunk& c, int row) {
  return load_bits(p.beta + (p.beta_type == TYPE_FLOAT32 ? 4 : 2) *
                                (c.batch * p.beta_sb + (c.first + row) * p.beta_st + c.hv * p.beta_sh),
                   p.beta_type);
}

__device__ __forceinline__ u32 scaled(u32 x, float a, float b) { return pack_half(half_low(x) * a, half_high(x) * b); }
__device__ __forceinline__ uint4 scaled(const uint4& x, const float (&f)[8]) {
  return make_uint4(scaled(x.x, f[0], f[1]), scaled(x.y, f[2], f[3]), scaled(x.z, f[4], f[5]), scaled(x.w, f[6], f[7]));
}

// beta k 2^G to shared memory, kg and qg to device memory; a thread keeps its 8 channels.
__device__ __forceinline__ void scale_keys(const RecomputeParams& p, const Chunk& c, u32 keys) {
  constexpr int PIECES = K / 8, STEP = THREADS / PIECES, BATCH = 4;
  const int piece = thread_index() % PIECES, row0 = thread_index() / PIECES;
  const Rows k = make_rows(p.k, p.k_sb, p.k_st, p.k_sh, 2, c, c.h), g = make_rows(p.g, p.g_sb, p.g_st, p.g_sh, 4, c, c.hv);
  const Rows q = make_rows(p.q, p.q_sb, p.q_st, p.q_sh, 2, c, c.h);
  uint4 last[2] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) load_cached(last[j], row_at(g, c.rows - 1) + 32 * piece + 16 * j, true);
#pragma unroll 1
  for (int r = row0; r < C; r += STEP * BATCH) {
    Raw raw[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int row = r + i * STEP;
      const bool real = row < c.rows;
#pragma unroll
      for (int j = 0; j < 2; ++j) load_cached(raw[i].g[j], row_at(g, row) + 32 * piece + 16 * j, real);
      load_cached(raw[i].k, row_at(k, row) + 16 * piece, real);
      if (p.q) load_cached(raw[i].q, row_at(q, row) + 16 * piece, real);
      if (real) raw[i].beta = beta_bits(p, c, row);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int row = r + i * STEP;
      float down[8], to_end[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float sum = float_of(raw[i].g, e);
        down[e] = exp2_fast(sum);
        to_end[e] = exp2_fast(float_of(last, e) - sum);
      }
      if (row < c.rows) {
        const long long at = output_at(p, c, row, K) + 8 * piece;
        store_global(reinterpret_cast<void*>(p.kg + 2 * at), scaled(raw[i].k, to_end));
        if (p.q) store_global(reinterpret_cast<void*>(p.qg + 2 * at), scaled(raw[i].q, down));
      }
      const float b = from_bits(raw[i].beta, p.beta_type);
#pragma unroll
      for (int e = 0; e < 8; ++e) down[e] *= b;
      const uint4 x = scaled(raw[i].k, down);
      store_shared(piece_at<K>(keys, row, piece), x.x, x.y, x.z, x.w);
    }
  }
}

// This warp's columns of `inverse` times `right`, in place of `right` and from there to `out`. No other warp touches them.
// With BETA the rows of `right` are scaled by it first.
template <int WIDTH, bool BETA>
__device__ __forceinline__ void multiply(const RecomputeParams& p, const Chunk& c, u32 inverse, u32 right, u32 beta, u64 out) {
  constexpr int COLUMNS = WIDTH / WARPS;
  const int lane = thread_index() & 31, column0 = thread_index() / 32 * COLUMNS;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < COLUMNS / 16; ++half) {
    const int piece = (column0 + 16 * half) / 8;
    float d[4][2][4] = {};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      u32 b[4];
      load_matrix4_transposed(b, piece_at<WIDTH>(right, 16 * m + (lane & 15), piece + (lane >> 4)));
      if constexpr (BETA) {
        const float2 low = load_shared2(beta + 4 * (16 * m + 2 * t)), high = load_shared2(beta + 4 * (16 * m + 2 * t + 8));
        b[0] = scaled(b[0], low.x, low.y);
        b[1] = scaled(b[1], high.x, high.y);
        b[2] = scaled(b[2], low.x, low.y);
        b[3] = scaled(b[3], high.x, high.y);
      }
#pragma unroll
      for (int i = m; i < 4; ++i) {
        u32 a[4];
        load_matrix4(a, piece_at<C>(inverse, 16 * i + (lane & 15), 2 * m + (lane >> 4)));
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
  sync_warp();
  constexpr int PIECES = COLUMNS / 8, STEP = 32 / PIECES;
#pragma unroll
  for (int i = 0; i < C / STEP; ++i) {
    const int row = i * STEP + lane / PIECES, piece = column0 / 8 + lane % PIECES;
    const uint4 x = load_shared_u4(piece_at<WIDTH>(right, row, piece));
    if (row < c.rows) store_global(reinterpret_cast<void*>(out + 2 * (output_at(p, c, row, WIDTH) + 8 * piece)), x);
  }
}

KDA_KERNEL(THREADS, MIN_BLOCKS) recompute(KDA_PARAM RecomputeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const Chunk c = make_chunk(p);
  if (!c.rows) return;
  copy_inverse(shared + INVERSE_AT, make_rows(p.Akk, p.Akk_sb, p.Akk_st, p.Akk_sh, 2, c, c.hv), c.rows);
  copy_rows<V>(shared + VALUES_AT, make_rows(p.v, p.v_sb, p.v_st, p.v_sh, 2, c, c.hv), c.rows);
  copy_async_commit();
  if (thread_index() < C) {
    const bool real = thread_index() < c.rows;
    const float beta = real ? from_bits(beta_bits(p, c, thread_index()), p.beta_type) : 0.0f;
    store_shared(shared + BETA_AT + 4 * thread_index(), __float_as_uint(beta));
  }
  scale_keys(p, c, shared + KEYS_AT);
  copy_async_wait<0>();
  sync_block();
  multiply<K, false>(p, c, shared + INVERSE_AT, shared + KEYS_AT, shared + BETA_AT, p.w);
  multiply<V, true>(p, c, shared + INVERSE_AT, shared + VALUES_AT, shared + BETA_AT, p.u);
}
