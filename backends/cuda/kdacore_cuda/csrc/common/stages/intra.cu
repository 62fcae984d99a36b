// kda_chunk_intra: of every chunk of 64 tokens, with G the cumulative log2 gate,
//
//   Aqk_ij = scale (q_i 2^(G_i - G_j)) . k_j for j <= i
//   Akk = (I + tril(beta_i (k_i 2^(G_i - G_j)) . k_j, -1))^-1
//
// Grid: a block of four warps a chunk and value head; a warp has 16 tokens, a block row of both
// matrices. Products inside 16 tokens go straight from registers to the matrix unit, those across
// 16 tokens through operand images in shared memory (intra_products.cuh); the inverse is made by
// block columns (intra_inverse.cuh). Barriers of the block separate the steps.
#include "common/stages/intra_inverse.cuh"
#include "common/stages/intra_products.cuh"

// The operand images and, in their place once they have been multiplied, the system and both
// results.
struct SharedMemory {
  union {
    unsigned char images[IMAGES][IMAGE_BYTES];
    struct {
      float system[C][SYSTEM_PITCH];
      unsigned char aqk[C][TILE_PITCH], akk[C][TILE_PITCH];
    };
  };
  float beta[C];
};
KDA_SHARED_BYTES(sizeof(SharedMemory));

__device__ __forceinline__ float beta_of(u32 shared, int row) {
  return load_shared1(shared + OFFSET(SharedMemory, beta) + 4 * row);
}

// Row i of a 16 x 16 block outside the diagonal, this lane's 4 columns: into the system or, for q,
// into the tile.
__device__ __forceinline__ void store_four(u32 shared, bool is_q, float scale, int row, int column,
                                           const float (&x)[4]) {
  if (is_q) {
    store_shared(shared + OFFSET(SharedMemory, aqk) + TILE_PITCH * row + 2 * column,
                 __uint_as_float(pack_half(x[0] * scale, x[1] * scale)),
                 __uint_as_float(pack_half(x[2] * scale, x[3] * scale)));
    return;
  }
  const float beta = beta_of(shared, row);
  store_shared(system_at(shared + OFFSET(SharedMemory, system), row, column), __float_as_uint(x[0] * beta),
               __float_as_uint(x[1] * beta), __float_as_uint(x[2] * beta), __float_as_uint(x[3] * beta));
}

__device__ __forceinline__ void store_block(u32 shared, const Lane& l, float scale, int right, int left,
                                            const float (&d)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float x[4] = {d[0][2 * h], d[1][2 * h], d[0][2 * h + 1], d[1][2 * h + 1]};
    store_four(shared, l.block & 1, scale, 16 * right + 2 * l.g + h, 16 * left + 4 * l.t, x);
  }
}

__device__ __forceinline__ void store_pair(u32 shared, float scale, int row, int column, float kk, float qk) {
  store_shared(system_at(shared + OFFSET(SharedMemory, system), row, column),
               __float_as_uint(kk * beta_of(shared, row)));
  store_shared16(shared + OFFSET(SharedMemory, aqk) + TILE_PITCH * row + 2 * column,
                 pack_half(qk * scale, 0.0f));
}

// The warp's diagonal blocks, zeros above the diagonal.
__device__ __forceinline__ void store_inside(u32 shared, const Lane& l, float scale, const Inside& sums) {
  const int row0 = 16 * l.block;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    store_shared(system_at(shared + OFFSET(SharedMemory, system), row0 + 8 * i + l.g, row0 + 4 * l.t), 0u, 0u,
                 0u, 0u);
  }
  store_shared(
      shared + OFFSET(SharedMemory, aqk) + TILE_PITCH * (row0 + (l.lane >> 1)) + 2 * row0 + 16 * (l.lane & 1),
      0u, 0u, 0u, 0u);
  sync_warp();
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const int bit = level ? 1 << (level - 1) : 0;
    const int i = level ? 2 * (l.g | bit) + ((l.g & bit) != 0) : 2 * l.g + 1;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = 2 * l.t + e;
      const int j = level ? 2 * (n & ~bit) + ((n & bit) != 0) : 2 * n;
      if (l.g >> level == n >> level) {
        store_pair(shared, scale, row0 + i, row0 + j, sums.level[level][e], sums.level[level][2 + e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x = sums.diagonal[i];
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    const int row = row0 + 2 * l.g + i;
    if (l.t == 0)
      store_shared16(shared + OFFSET(SharedMemory, aqk) + TILE_PITCH * row + 2 * row,
                     pack_half(x * scale, 0.0f));
  }
}

// Real rows of a result, 16 bytes a thread, zeros right of the diagonal's piece.
__device__ __forceinline__ void store_result(u64 base, const IntraParams& p, const Chunk& c, u32 tile) {
#pragma unroll
  for (int i = 0; i < C * 8 / THREADS; ++i) {
    const int row = (i * THREADS + thread_index()) >> 3, piece = thread_index() & 7;
    if (row >= c.rows) continue;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (8 * piece <= row) x = load_shared_u4(tile + TILE_PITCH * row + 16 * piece);
    store_global(reinterpret_cast<void*>(base + 2 * (output_at(p, c, row, C) + 8 * piece)), x);
  }
}

KDA_KERNEL(THREADS, MIN_BLOCKS) intra(KDA_PARAM IntraParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Chunk c = make_chunk(p, block_index());
  if (!c.rows) return;
  Lane l;
  l.lane = thread_index() & 31;
  l.block = thread_index() >> 5;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  if (thread_index() < C) {
    const long long at = c.batch * p.beta_sb + (c.first + thread_index()) * p.beta_st + c.hv * p.beta_sh;
    const float beta = thread_index() < c.rows ? load_scalar(p.beta, at, p.beta_type) : 0.0f;
    store_shared(shared + OFFSET(SharedMemory, beta) + 4 * thread_index(), __float_as_uint(beta));
  }
  const Rows q = make_rows(p.q, p.q_sb, p.q_st, p.q_sh, 2, c, c.h),
             k = make_rows(p.k, p.k_sb, p.k_st, p.k_sh, 2, c, c.h);
  const Rows g = make_rows(p.g, p.g_sb, p.g_st, p.g_sh, 4, c, c.hv);
  const int row = 16 * l.block + 2 * l.g;
  Source from;
  from.q = row_at(q, row) + 16 * l.t;
  from.k = row_at(k, row) + 16 * l.t;
  from.g = row_at(g, row) + 32 * l.t;
  from.q_step = q.step;
  from.k_step = k.step;
  from.g_step = g.step;
  from.left = c.rows - row;
  // 1. Products inside 16 tokens, and the operand images of the others.
  Inside inside = {};
  inside_products(from, g.at + 32 * l.t, c.rows, l, shared + OFFSET(SharedMemory, images), inside);
  sync_block();
  // 2. Products across 16 tokens.
  Outside outside = {};
  outside_products(shared + OFFSET(SharedMemory, images), l, outside);
  sync_block();
  // 3. Aqk and the system to shared memory.
  const int high = l.block >> 1;
  store_block(shared, l, p.scale, 2 + high, 0, outside.far[0]);
  store_block(shared, l, p.scale, 2 + high, 1, outside.far[1]);
  store_block(shared, l, p.scale, 1 + 2 * high, 2 * high, outside.near);
  store_inside(shared, l, p.scale, inside);
  sync_warp();
  // 4. The inverse: diagonal blocks, then block columns.
  invert_diagonal(shared + OFFSET(SharedMemory, system), shared + OFFSET(SharedMemory, akk), l.block, l.lane);
  sync_block();
  store_result(p.Aqk, p, c, shared + OFFSET(SharedMemory, aqk));
  merge_column(shared + OFFSET(SharedMemory, system), shared + OFFSET(SharedMemory, akk), l.block, l.lane);
  sync_block();
  store_result(p.Akk, p, c, shared + OFFSET(SharedMemory, akk));
}
