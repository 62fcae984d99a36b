// The records of a chunk and key head (record.cuh), by 256 threads. v is not read.
//
// The products of the chunk's tokens, k k^T by four warps and q k^T by the others, serve all value heads of the key
// head. A warp each makes the factors of up to four value heads; then each half of the warps takes every other of these
// heads: a warp has 16 rows of the triangular system, whose diagonal block it inverts, the same rows of a, and a block
// column of the inverse. Records leave as bulk copies.
//
// Template parameter `Threads`, of the 256 threads that a kernel gives to a unit:
//
//   thread                  this thread's number among them
//   unit()                  the unit
//   sync(), sync_team(i)    barriers of all of them, and of those of half i
//   leaves(record)          its copies to device memory have been requested; by all threads of a half
//   end_record_before()     a good place to wait for the copies of the record that left last; by all lanes of warps
#pragma once

#include "common/l2norm.cuh"
#include "sm90/gated_delta/gates.cuh"
#include "sm90/gated_delta/inverse.cuh"
#include "sm90/gated_delta/key_unit.cuh"
#include "sm90/warp.cuh"

constexpr int UNIT_THREADS = 256;

constexpr int HEADS = 4, TEAMS = 2, TEAM_WARPS = 4;  // value heads whose factors are made at a time

// Products of 16 rows with 16, where the accumulators' lanes put them: elements 8n + 2t, + 1 of rows g and g + 8.
struct PairBlock {
  float4 x[2][32];
};
struct HeadFactors {
  float own[C];  // beta / |k|
  RecordFactors record;
  float unused[12];
  HeadScalars scalars;
};
static_assert(OFFSET(HeadFactors, scalars) - OFFSET(HeadFactors, record) ==
                  OFFSET(ChunkRecord, head) - OFFSET(ChunkRecord, factors),
              "one copy to the record");
struct TeamMemory {
  RecordImages record;  // before the image t comes, the system's high parts are in its place
  LowerBlocks low;
};
struct UnitMemory {
  union {
    struct {
      TileImage k, q;
    };
    struct {
      PairBlock pairs[2][10];  // k k^T and q k^T on and below the diagonal, by rows of blocks
      HeadFactors heads[HEADS];
    };
  };
  TeamMemory teams[TEAMS];
  KeyScalars key;
};

__device__ __forceinline__ u32 pair_block(u32 pairs, int row_block, int j) {
  return pairs + (row_block * (row_block + 1) / 2 + j) * (u32)sizeof(PairBlock);
}

// A unit's keys and queries in device memory.
__device__ __forceinline__ u64 key_tile(const GatedDeltaParams& p, const KeyUnit& u) {
  return p.k + 2 * (u.batch * p.k_sb + u.first * p.k_st + u.h * p.k_sh);
}
__device__ __forceinline__ u64 query_tile(const GatedDeltaParams& p, const KeyUnit& u) {
  return p.q + 2 * (u.batch * p.q_sb + u.first * p.q_st + u.h * p.q_sh);
}

// 64 rows of `channels` numbers; zeros past the end, and up to K.
__device__ __forceinline__ void fetch_tile(u32 to, u64 base, long long row_bytes, int rows, int thread,
                                           int channels = K) {
  constexpr int PIECES = K / PIECE, AT_ONCE = UNIT_THREADS / PIECES;
  const int piece = thread & (PIECES - 1), first = (u32)thread / PIECES;
  if (!has_piece(PIECE * piece, channels)) rows = 0;
#pragma unroll
  for (int n = 0; n < C / AT_ONCE; ++n) {
    const int row = first + AT_ONCE * n;
    const u64 from = base + (row < rows ? row : 0) * row_bytes + 16 * piece;
    copy_async16(to + (piece >> 3) * SQUARE_BYTES + swizzled(row, piece & 7),
                 reinterpret_cast<const void*>(from), row < rows);
  }
}

// Products of 16 rows of `left` with the keys of blocks 0 .. row_block, and the sums of squares of two of those rows, in
// the lane that has them (has_squares): products of the rows with themselves.
__device__ __forceinline__ void multiply_pairs(BlockRow& out, float (&square)[2], u32 left, u32 keys,
                                               int row_block, int lane) {
  out = {};
  float own[2][4] = {};
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    const u32 wide = (i >> 2) * SQUARE_BYTES;
    u32 a[4];
    load_matrix4(a, tiles_by_column(left + wide, row_block, i & 3, lane));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > row_block) break;
      u32 b[4];
      load_matrix4(b, tiles_by_row(keys + wide, j, i & 3, lane));
      mma_half(out.block[j][0], a, b[0], b[1]);
      mma_half(out.block[j][1], a, b[2], b[3]);
    }
    if (left == keys) continue;
    u32 b[4];
    load_matrix4(b, tiles_by_row(left + wide, row_block, i & 3, lane));
    mma_half(own[0], a, b[0], b[1]);
    mma_half(own[1], a, b[2], b[3]);
  }
  if (left == keys) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j != row_block) continue;
      own[0][0] = out.block[j][0][0], own[0][1] = out.block[j][0][1];
      own[1][2] = out.block[j][1][2], own[1][3] = out.block[j][1][3];
    }
  }
  const bool odd = lane >> 2 & 1;
  square[0] = odd ? own[0][1] : own[0][0];
  square[1] = odd ? own[1][3] : own[1][2];
}
// Whether a lane has products of rows lane / 4 and that + 8 with themselves.
__device__ __forceinline__ bool has_squares(int lane) { return (lane & 3) == lane >> 3; }

// What a value head's tokens say of decays and beta: two tokens a lane. Loaded ahead, as it takes long.
struct TokenInputs {
  float A_log, bias;
  u32 g[2], beta[2];
};
__device__ __forceinline__ TokenInputs load_inputs(const GatedDeltaParams& p, const KeyUnit& u, int hv,
                                                   int lane) {
  TokenInputs x = {};
  if (p.A_log) x.A_log = __uint_as_float(load_global4(p.A_log + 4ll * hv));
  if (p.dt_bias) x.bias = load_scalar(p.dt_bias, hv, p.bias_type);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const long long token = u.first + 2 * lane + i;
    if (2 * lane + i >= u.rows) break;
    x.g[i] =
        load_bits(p.g + type_size(p.g_type) * (u.batch * p.g_sb + token * p.g_st + hv * p.g_sh), p.g_type);
    x.beta[i] = load_bits(
        p.beta + type_size(p.beta_type) * (u.batch * p.beta_sb + token * p.beta_st + hv * p.beta_sh),
        p.beta_type);
  }
  return x;
}

// Of a lane's tokens; zeros past the end.
struct TokenGates {
  float sum[2], beta[2];
};
__device__ __forceinline__ TokenGates sum_gates(const GatedDeltaParams& p, const KeyUnit& u,
                                                const TokenInputs& x, int lane) {
  const HeadGate gate = make_gate(p, x.A_log, x.bias);
  TokenGates y;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool real = 2 * lane + i < u.rows;
    y.sum[i] = real ? log2_decay(p, gate, from_bits(x.g[i], p.g_type)) : 0.0f;
    y.beta[i] = real ? activate_beta(p, from_bits(x.beta[i], p.beta_type)) : 0.0f;
  }
  sum_decays(y.sum, lane);
  return y;
}

// One warp. `head`: its HeadFactors.
__device__ __forceinline__ void make_factors(const TokenGates& gates, u32 shared, u32 head, int lane) {
  const float(&sum)[2] = gates.sum, (&beta)[2] = gates.beta;
  const float last = shuffle(sum[1], 31);
  const float2 k_norm = load_shared2(shared + OFFSET(UnitMemory, key.k_norm) + 8 * lane),
               q_factor = load_shared2(shared + OFFSET(UnitMemory, key.q_factor) + 8 * lane);
  const float decay[2] = {exp2_fast(sum[0]), exp2_fast(sum[1])},
              own[2] = {beta[0] * k_norm.x, beta[1] * k_norm.y};
  const u32 record = head + OFFSET(HeadFactors, record), factors = record + factor_offset(lane),
            row = head + 8 * lane;
  store_shared(factors + OFFSET(RecordFactors, state), decay[0] * k_norm.x, decay[1] * k_norm.y);
  store_shared(factors + OFFSET(RecordFactors, output), decay[0] * q_factor.x, decay[1] * q_factor.y);
  store_shared(factors + OFFSET(RecordFactors, to_end), own[0] * exp2_fast(last - sum[0]),
               own[1] * exp2_fast(last - sum[1]));
  if (lane < 4)
    store_shared(record + OFFSET(RecordFactors, last) + 4 * lane, __float_as_uint(exp2_fast(last)));
  store_shared(row + OFFSET(HeadFactors, own), own[0], own[1]);
  store_shared(row + OFFSET(HeadFactors, scalars.sum), sum[0], sum[1]);
  store_shared(row + OFFSET(HeadFactors, scalars.beta), beta[0], beta[1]);
}

__device__ __forceinline__ void load_row_pair(float (&x)[2], u32 from, int row_block, int lane) {
  x[0] = load_shared1(from + 4 * (16 * row_block + (lane >> 2)));
  x[1] = load_shared1(from + 4 * (16 * row_block + (lane >> 2) + 8));
}

// The rows of a warp in the triangular system, and in the image `a`: 2^(sum_i - sum_j) own_j times the pair's product and
// a factor of the row, zero above the diagonal and, in the system, on it.
//
// Left of the diagonal block the decay is a row's factor times a column's, both from the row block's first token on:
// neither is larger than 1, and no row reads what is later.
__device__ __forceinline__ void make_rows(u32 shared, u32 head, const TriangularSystem& system, u32 a,
                                          int row_block, int lane) {
  const u32 own = head + OFFSET(HeadFactors, own), sums = head + OFFSET(HeadFactors, scalars.sum),
            pairs = shared + OFFSET(UnitMemory, pairs);
  const int g = lane >> 2, t = lane & 3;
  float sum[2], of_key[2], of_query[2];
  load_row_pair(sum, sums, row_block, lane);
  load_row_pair(of_key, shared + OFFSET(UnitMemory, key.k_norm), row_block, lane);
  load_row_pair(of_query, shared + OFFSET(UnitMemory, key.q_factor), row_block, lane);
  // Of two columns of block j, and their products with the rows.
  struct Columns {
    float sum[2], own[2], keys[4], queries[4];
  };
  const auto load = [&](int j, int n) {
    const u32 at = 4 * (16 * j + 8 * n + 2 * t),
              pair = pair_block(pairs, row_block, j) + 512 * n + 16 * lane;
    const float4 keys = load_shared4(pair), queries = load_shared4(pair + 10 * (u32)sizeof(PairBlock));
    const float2 y = load_shared2(sums + at), x = load_shared2(own + at);
    return Columns{{y.x, y.y}, {x.x, x.y}, {keys.x, keys.y, keys.z, keys.w},
                   {queries.x, queries.y, queries.z, queries.w}};
  };
  const auto store_a = [&](int j, const float (&x)[2][4]) {
    u32 rounded[4];
    pack_tiles(x[0], x[1], rounded);
    store_matrix4(tiles_by_column(a, row_block, j, lane), rounded);
  };
  float of_system[2][4], of_a[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Columns x = load(row_block, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float decay = x.own[e & 1] * exp2_fast(sum[e >> 1] - x.sum[e & 1]);
      const int above = 8 * n + 2 * t + (e & 1) - (g + 8 * (e >> 1));
      of_system[n][e] = above < 0 ? x.keys[e] * of_key[e >> 1] * decay : 0.0f;
      of_a[n][e] = above <= 0 ? x.queries[e] * of_query[e >> 1] * decay : 0.0f;
    }
  }
  store_diagonal(system, row_block, of_system, lane);
  store_a(row_block, of_a);
  const float first = load_shared1(sums + 64 * row_block);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float decay = exp2_fast(sum[i] - first);
    of_key[i] *= decay, of_query[i] *= decay;
  }
#pragma unroll 1
  for (int j = 0; j < row_block; ++j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Columns x = load(j, n);
      const float column[2] = {x.own[0] * exp2_fast(first - x.sum[0]), x.own[1] * exp2_fast(first - x.sum[1])};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        of_system[n][e] = x.keys[e] * of_key[e >> 1] * column[e & 1];
        of_a[n][e] = x.queries[e] * of_query[e >> 1] * column[e & 1];
      }
    }
    store_below(system, row_block, j, of_system, lane);
    store_a(j, of_a);
  }
}

// One value head, by a team of four warps. `record`: its number, slot * HV + value head.
template <class Threads>
__device__ __forceinline__ void make_record(const GatedDeltaParams& p, Threads& threads, u32 shared, u32 head,
                                            u32 team, long long record, int team_index, int row_block,
                                            int lane) {
  const u32 images = team + OFFSET(TeamMemory, record), t = images + OFFSET(RecordImages, t);
  const TriangularSystem system = {t, team + OFFSET(TeamMemory, low)};
  make_rows(shared, head, system, images + OFFSET(RecordImages, a), row_block, lane);
  sync_warp();
  threads.end_record_before();
  const DiagonalColumn diagonal = invert_diagonal(system, row_block, lane);
  threads.sync_team(team_index);
  const BlockColumn below = merge_column(system, row_block, lane);
  threads.sync_team(team_index);  // the system has been read
  store_diagonal_column(diagonal, t, row_block, lane);
  store_block_column(below, t, row_block, lane);
  fence_async_proxy();
  threads.sync_team(team_index);
  if (row_block == 0 && lane == 0) {
    const u64 to = p.records + (u64)record * RECORD_BYTES;
    copy_out(reinterpret_cast<void*>(to), images, sizeof(RecordImages));
    copy_out(reinterpret_cast<void*>(to + OFFSET(ChunkRecord, factors)), head + OFFSET(HeadFactors, record),
             OFFSET(ChunkRecord, key) - OFFSET(ChunkRecord, factors));
    copy_out(reinterpret_cast<void*>(to + OFFSET(ChunkRecord, key)), shared + OFFSET(UnitMemory, key),
             sizeof(KeyScalars));
    copy_out_commit();
    copy_out_wait_read<0>();
  }
  threads.leaves(record);
  threads.sync_team(team_index);
}

// Blocks of t and a above the diagonal are zero, once for all records that the threads make.
__device__ __forceinline__ void clear_images(u32 shared, int thread) {
  const u32 team = shared + OFFSET(UnitMemory, teams) + thread / (32 * TEAM_WARPS) * (u32)sizeof(TeamMemory);
#pragma unroll
  for (int n = 0; n < (int)(sizeof(RecordImages) / 16 / (32 * TEAM_WARPS)); ++n)
    store_shared(team + 16 * (thread % (32 * TEAM_WARPS) + 32 * TEAM_WARPS * n), 0, 0, 0, 0);
}

// The first value head of a unit, and the one behind its last.
struct HeadRange {
  int first, beyond;
};
__device__ __forceinline__ HeadRange value_heads(const GatedDeltaParams& p, const KeyUnit& u) {
  const int group = divide(p.HV, p.h_factor, p.h_shift);
  return {u.h * group, (u.h + 1) * group};
}

// Requests a unit's tiles and loads the inputs of its first value heads.
__device__ __forceinline__ TokenInputs fetch_unit(const GatedDeltaParams& p, const KeyUnit& u, u32 shared,
                                                  int thread) {
  fetch_tile(shared + OFFSET(UnitMemory, k), key_tile(p, u), 2 * p.k_st, u.rows, thread, channels_of(p));
  fetch_tile(shared + OFFSET(UnitMemory, q), query_tile(p, u), 2 * p.q_st, u.rows, thread, channels_of(p));
  copy_async_commit();
  const HeadRange heads = value_heads(p, u);
  const int lane = thread & 31, warp = uniform(thread >> 5);
  TokenInputs inputs;
  if (warp < HEADS && heads.first + warp < heads.beyond) inputs = load_inputs(p, u, heads.first + warp, lane);
  return inputs;
}

// Products of the tokens, and their norms, once the tiles have come.
template <class Threads>
__device__ __forceinline__ void make_pairs(const GatedDeltaParams& p, u32 shared, Threads& threads, int warp,
                                           int lane) {
  const bool of_keys = warp < 4;
  const int row_block = of_keys ? warp : 7 - warp;  // each scheduler has as many blocks
  const u32 keys = shared + OFFSET(UnitMemory, k), queries = shared + OFFSET(UnitMemory, q);
  BlockRow products;
  float square[2];
  multiply_pairs(products, square, of_keys ? keys : queries, keys, row_block, lane);
  if (has_squares(lane)) {
    const u32 to = shared + (of_keys ? OFFSET(UnitMemory, key.k_norm) : OFFSET(UnitMemory, key.q_factor));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float norm = p.flags & FLAG_L2NORM ? inverse_norm(square[i]) : 1.0f;
      store_shared(to + 4 * (16 * row_block + (lane >> 2) + 8 * i),
                   __float_as_uint(of_keys ? norm : p.scale * norm));
    }
  }
  fence_async_proxy();  // bulk copies read the factors
  threads.sync();       // tiles have been read
  const u32 pairs = shared + OFFSET(UnitMemory, pairs) + (of_keys ? 0 : 10 * (u32)sizeof(PairBlock));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > row_block) break;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float(&x)[4] = products.block[j][n];
      store_shared(pair_block(pairs, row_block, j) + 512 * n + 16 * lane, __float_as_uint(x[0]),
                   __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
  }
}

// `inputs`: of fetch_unit.
template <class Threads>
__device__ __forceinline__ void make_records(const GatedDeltaParams& p, TokenInputs inputs, u32 shared,
                                             Threads& threads) {
  const int lane = threads.thread & 31, warp = uniform(threads.thread >> 5);
  const int team_index = warp / TEAM_WARPS;
  const u32 team = shared + OFFSET(UnitMemory, teams) + team_index * (u32)sizeof(TeamMemory);
  const HeadRange own = value_heads(p, threads.unit());
  const int begin = own.first, beyond = own.beyond;
  const u32 heads = shared + OFFSET(UnitMemory, heads);
#pragma unroll 1
  for (int first = begin; first < beyond; first += HEADS) {
    const bool makes_factors = warp < HEADS && first + warp < beyond;
    TokenGates gates;
    if (makes_factors) gates = sum_gates(p, threads.unit(), inputs, lane);
    if (first == begin) {
      copy_async_wait<0>();
      threads.sync();
      make_pairs(p, shared, threads, warp, lane);
    } else {
      threads.sync();  // factors have been read
    }
    if (makes_factors) {
      make_factors(gates, shared, heads + warp * (u32)sizeof(HeadFactors), lane);
      fence_async_proxy();
      if (first + HEADS + warp < beyond) inputs = load_inputs(p, threads.unit(), first + HEADS + warp, lane);
    }
    threads.sync();
#pragma unroll 1
    for (int i = team_index; i < HEADS && first + i < beyond; i += TEAMS)
      make_record(p, threads, shared, heads + i * (u32)sizeof(HeadFactors), team, threads.unit().slot * p.HV + first + i,
                  team_index, warp % TEAM_WARPS, opaque(lane));  // no addresses kept while pairs are made
  }
}
