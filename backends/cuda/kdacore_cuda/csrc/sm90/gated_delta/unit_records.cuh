// The records of chunks and key heads (record.cuh), one such unit after another, by 256 threads. v is not read.
//
// Two teams of four warps, a warpgroup each, make the records of every other value head. A team computes the
// products of the chunk's tokens, k k^T and q k^T, anew for each of these, from tiles that stay in shared memory: they
// come to the registers that need them. Teams meet where tiles come, and where both have read them for the last time:
// the next unit's tiles then come while the last records are completed. A warp has 16 rows of the triangular
// system, whose diagonal block it inverts, the same rows of a, and a block column of the inverse. A team's first warp,
// left of whose block there is none, makes decays and betas of the next record, its last one, which has no block column,
// the factors of tokens. Records leave as bulk copies.
//
// Template parameter `Threads`, of the 256 threads that a kernel gives to units:
//
//   thread                  this thread's number among them
//   next()                  the next unit that has tokens, without rows behind the last; by all threads for the first
//                           one, by all lanes of one warp from then on
//   sync(), sync_team(i)    barriers of all of them, and of those of half i
//   leaves(record)          its copy to device memory has been requested; by all threads of a half
//   end_record_before()     a good place to wait for the copy of the record that left last; by all lanes of warps
#pragma once

#include "common/l2norm.cuh"
#include "sm90/chunk_backward/state.cuh"
#include "sm90/gated_delta/gates.cuh"
#include "sm90/gated_delta/inverse.cuh"
#include "sm90/gated_delta/key_unit.cuh"
#include "sm90/gated_delta/tile_places.cuh"
#include "sm90/warp.cuh"

constexpr int UNIT_THREADS = 256;

constexpr int TEAMS = 2, TEAM_WARPS = 4,
              FACTOR_WARP = TEAM_WARPS - 1;  // of a team: makes factors and copies records out

struct TeamMemory {
  ChunkRecord record;
  TriangularSystem system;
};
static_assert(sizeof(TeamMemory) % 1024 == 0, "images lie on 1024 bytes");
struct UnitMemory {
  TileImage k, q;
  TeamMemory teams[TEAMS];
  // Of the records in the making. Those in the records themselves are written once the ones before have left.
  KeyScalars norms[TEAMS];
  HeadScalars gates[TEAMS][2];  // of a record and of the next one, by turns
  KeyUnit units[4];             // this one, the next one and that behind it, by turns
};
static_assert(OFFSET(UnitMemory, gates) % sizeof(HeadScalars[2]) == 0,
              "one's address is the other's with one bit changed");
// A warp's place in a unit: its team's memory, its rows.
struct TeamWarp {
  u32 memory, norms;
  int team, row_block, lane;
  __device__ __forceinline__ u32 images() const { return memory + OFFSET(TeamMemory, record.images); }
  __device__ __forceinline__ u32 factors() const { return memory + OFFSET(TeamMemory, record.factors); }
  __device__ __forceinline__ u32 head() const { return memory + OFFSET(TeamMemory, record.head); }
  __device__ __forceinline__ u32 key() const { return memory + OFFSET(TeamMemory, record.key); }
  __device__ __forceinline__ u32 system() const { return memory + OFFSET(TeamMemory, system); }
  __device__ __forceinline__ bool makes_factors() const { return row_block == FACTOR_WARP; }
  __device__ __forceinline__ bool copies_out() const { return makes_factors() && lane == 0; }
  // Of the rows with the fewest weights.
  __device__ __forceinline__ bool makes_gates() const { return row_block == 0; }
  // A warp of the team that has fewer records, which has nothing to merge.
  __device__ __forceinline__ bool finds_units() const { return team == TEAMS - 1 && makes_factors(); }
};
__device__ __forceinline__ TeamWarp team_warp(u32 shared, int thread) {
  const int warp = uniform(thread >> 5), team = warp / TEAM_WARPS;
  return {shared + OFFSET(UnitMemory, teams) + team * (u32)sizeof(TeamMemory),
          shared + OFFSET(UnitMemory, norms) + team * (u32)sizeof(KeyScalars), team, warp % TEAM_WARPS,
          thread & 31};
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

// Sums of squares of a warp's rows lane / 4 and that + 8, in the lanes that have them: products of the rows with
// themselves.
__device__ __forceinline__ bool has_squares(int lane) { return (lane & 3) == lane >> 3; }
__device__ __forceinline__ void take_squares(float (&square)[2], const float (&x)[2][4], int lane) {
  const bool odd = lane >> 2 & 1;
  square[0] = odd ? x[0][1] : x[0][0];
  square[1] = odd ? x[1][3] : x[1][2];
}
// `tile`: of 64 rows. A left operand's registers are those of a right one of the same rows.
__device__ __forceinline__ void square_rows(float (&square)[2], u32 tile, const TeamWarp& w) {
  float x[2][4] = {};
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    u32 rows[4];
    load_matrix4(rows, tiles_by_column(tile + (kk >> 2) * SQUARE_BYTES, w.row_block, kk & 3, w.lane));
    mma_half(x[0], rows, rows[0], rows[2]);
    mma_half(x[1], rows, rows[1], rows[3]);
  }
  take_squares(square, x, w.lane);
}
__device__ __forceinline__ void store_norms(const GatedDeltaParams& p, u32 to, const float (&square)[2],
                                            float scale, const TeamWarp& w) {
  if (!has_squares(w.lane)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float norm = p.flags & FLAG_L2NORM ? inverse_norm(square[i]) : 1.0f;
    store_shared(to + 4 * (16 * w.row_block + (w.lane >> 2) + 8 * i), __float_as_uint(scale * norm));
  }
}

// Products of a warp's rows with the chunk's keys: columns 8j + 2t, + 1 of rows g and g + 8. Those above the diagonal
// are not used.
using RowProducts = float[C / 8][4];

// The blocks on the diagonal.
__device__ __forceinline__ void take_diagonal(float (&to)[2][4], const RowProducts& x, int row_block) {
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
    if (j != row_block) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[n][e] = x[2 * j + n][e];
    }
  }
}

// Asks for the products of a tile's rows.
__device__ __forceinline__ void ask_products(RowProducts& x, u32 tile, u32 shared) {
  const u64 rows = operand_descriptor(tile, 16, 1024),
            keys = operand_descriptor(shared + OFFSET(UnitMemory, k), 16, 1024);
  fence_registers(x);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    warpgroup_mma_shared<0>(x, along_channels(rows, kk), along_channels(keys, kk), kk > 0);
  warpgroup_commit();
}
__device__ __forceinline__ void await_products(RowProducts& x) {
  warpgroup_wait<0>();
  fence_registers(x);
}

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
__device__ __forceinline__ TokenGates sum_gates(const GatedDeltaParams& p, int rows, const TokenInputs& x,
                                                int lane) {
  const HeadGate gate = make_gate(p, x.A_log, x.bias);
  TokenGates y;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool real = 2 * lane + i < rows;
    y.sum[i] = real ? log2_decay(p, gate, from_bits(x.g[i], p.g_type)) : 0.0f;
    y.beta[i] = real ? activate_beta(p, from_bits(x.beta[i], p.beta_type)) : 0.0f;
  }
  sum_decays(y.sum, lane);
  return y;
}

// `to`: HeadScalars.
__device__ __forceinline__ void store_gates(u32 to, const TokenGates& gates, const TeamWarp& w) {
  const u32 row = to + 8 * w.lane;
  store_shared(row + OFFSET(HeadScalars, sum), gates.sum[0], gates.sum[1]);
  store_shared(row + OFFSET(HeadScalars, beta), gates.beta[0], gates.beta[1]);
}
// One warp. Also what the backward needs of the tokens.
__device__ __forceinline__ void make_factors(u32 gates, const TeamWarp& w) {
  const u32 tokens = 8 * w.lane, factors = w.factors() + factor_offset(w.lane);
  const float2 sum = load_shared2(gates + OFFSET(HeadScalars, sum) + tokens),
               beta = load_shared2(gates + OFFSET(HeadScalars, beta) + tokens),
               k_norm = load_shared2(w.norms + OFFSET(KeyScalars, k_norm) + tokens),
               q_factor = load_shared2(w.norms + OFFSET(KeyScalars, q_factor) + tokens);
  const float last = shuffle(sum.y, 31), decay[2] = {exp2_fast(sum.x), exp2_fast(sum.y)};
  store_shared(factors + OFFSET(RecordFactors, state), decay[0] * k_norm.x, decay[1] * k_norm.y);
  store_shared(factors + OFFSET(RecordFactors, output), decay[0] * q_factor.x, decay[1] * q_factor.y);
  store_shared(factors + OFFSET(RecordFactors, to_end), beta.x * k_norm.x * exp2_fast(last - sum.x),
               beta.y * k_norm.y * exp2_fast(last - sum.y));
  store_shared(w.head() + OFFSET(HeadScalars, sum) + tokens, sum.x, sum.y);
  store_shared(w.head() + OFFSET(HeadScalars, beta) + tokens, beta.x, beta.y);
  store_shared(w.key() + OFFSET(KeyScalars, k_norm) + tokens, k_norm.x, k_norm.y);
  store_shared(w.key() + OFFSET(KeyScalars, q_factor) + tokens, q_factor.x, q_factor.y);
  if (w.lane < 4)
    store_shared(w.factors() + OFFSET(RecordFactors, last) + 4 * w.lane, __float_as_uint(exp2_fast(last)));
}

__device__ __forceinline__ void load_row_pair(float (&x)[2], u32 from, const TeamWarp& w) {
  x[0] = load_shared1(from + 4 * (16 * w.row_block + (w.lane >> 2)));
  x[1] = load_shared1(from + 4 * (16 * w.row_block + (w.lane >> 2) + 8));
}

// What products of a warp's rows are multiplied by, besides the rows' norms: 2^(sum_i - sum_j) r_j beta_j.
//
// Left of the diagonal block the decay is a row's factor times a column's, both from the row block's first token on:
// neither is larger than 1, and no row reads what is later.
struct RowWeights {
  float diagonal[2][4], column[C / 16 - 1][2][2], row[2];
};
__device__ __forceinline__ void make_weights(RowWeights& to, u32 gates, const TeamWarp& w) {
  const u32 sums = gates + OFFSET(HeadScalars, sum);
  const float first = load_shared1(sums + 64 * w.row_block);
  float sum[2];
  load_row_pair(sum, sums, w);
#pragma unroll
  for (int i = 0; i < 2; ++i) to.row[i] = exp2_fast(sum[i] - first);
  // Of two columns.
  struct Columns {
    float sum[2], own[2];
  };
  const auto load = [&](int j, int n) {
    const u32 at = 4 * (16 * j + 8 * n + 2 * (w.lane & 3));
    const float2 y = load_shared2(sums + at), beta = load_shared2(gates + OFFSET(HeadScalars, beta) + at),
                 norm = load_shared2(w.norms + OFFSET(KeyScalars, k_norm) + at);
    return Columns{{y.x, y.y}, {beta.x * norm.x, beta.y * norm.y}};
  };
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Columns x = load(w.row_block, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) to.diagonal[n][e] = x.own[e & 1] * exp2_fast(sum[e >> 1] - x.sum[e & 1]);
  }
#pragma unroll
  for (int j = 0; j < C / 16 - 1; ++j) {
    if (j >= w.row_block) break;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Columns x = load(j, n);
#pragma unroll
      for (int i = 0; i < 2; ++i) to.column[j][n][i] = x.own[i] * exp2_fast(first - x.sum[i]);
    }
  }
}
// A block of products times weights and factors of the rows: on the diagonal, zero from `from` columns right of it
// on; left of it, with the rows' decays in the factors.
__device__ __forceinline__ void weigh_diagonal(float (&x)[2][4], const RowWeights& weights,
                                               const float (&row)[2], int from, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int right = 8 * n + 2 * (lane & 3) + (e & 1) - ((lane >> 2) + 8 * (e >> 1));
      x[n][e] = right < from ? x[n][e] * row[e >> 1] * weights.diagonal[n][e] : 0.0f;
    }
  }
}
__device__ __forceinline__ void weigh_left(float (&to)[2][4], const RowProducts& x, int j,
                                           const RowWeights& weights, const float (&row)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[n][e] = x[2 * j + n][e] * row[e >> 1] * weights.column[j][n][e & 1];
  }
}

// A warp's rows of the system. `diagonal`: their products there.
__device__ __forceinline__ void make_system(const RowProducts& keys, float (&diagonal)[2][4],
                                            const RowWeights& weights, const TeamWarp& w) {
  float row[2];
  load_row_pair(row, w.norms + OFFSET(KeyScalars, k_norm), w);
  weigh_diagonal(diagonal, weights, row, 0, w.lane);
  store_diagonal(w.system(), w.row_block, diagonal, w.lane);
  row[0] *= weights.row[0], row[1] *= weights.row[1];
#pragma unroll
  for (int j = 0; j < C / 16 - 1; ++j) {
    if (j >= w.row_block) break;
    float x[2][4];
    weigh_left(x, keys, j, weights, row);
    store_below(w.system(), w.row_block, j, x, w.lane);
  }
}
// The same rows of `a`.
__device__ __forceinline__ void make_a(const RowProducts& queries, const RowWeights& weights,
                                       const TeamWarp& w) {
  const u32 a = w.images() + OFFSET(RecordImages, a);
  const auto store = [&](int j, const float (&x)[2][4]) {
    u32 rounded[4];
    pack_tiles(x[0], x[1], rounded);
    store_matrix4(lower_tiles_by_column(a, w.row_block, j, w.lane), rounded);
  };
  float row[2], x[2][4];
  load_row_pair(row, w.norms + OFFSET(KeyScalars, q_factor), w);
  take_diagonal(x, queries, w.row_block);
  weigh_diagonal(x, weights, row, 1, w.lane);
  store(w.row_block, x);
  row[0] *= weights.row[0], row[1] *= weights.row[1];
#pragma unroll
  for (int j = 0; j < C / 16 - 1; ++j) {
    if (j >= w.row_block) break;
    weigh_left(x, queries, j, weights, row);
    store(j, x);
  }
}

// The first value head of a unit, and the one behind its last.
struct HeadRange {
  int first, beyond;
};
__device__ __forceinline__ HeadRange value_heads(const GatedDeltaParams& p, int h) {
  const int group = divide(p.HV, p.h_factor, p.h_shift);
  return {h * group, (h + 1) * group};
}

__device__ __forceinline__ void fetch_tiles(const GatedDeltaParams& p, const KeyUnit& u, u32 shared,
                                            int thread) {
  fetch_tile(shared + OFFSET(UnitMemory, k), key_tile(p, u), 2 * p.k_st, u.rows, thread, channels_of(p));
  fetch_tile(shared + OFFSET(UnitMemory, q), query_tile(p, u), 2 * p.q_st, u.rows, thread, channels_of(p));
  copy_async_commit();
}

// A record up to its system, while products of keys come, then products of queries beside the inverses of the system's
// diagonal blocks and the gates of the next record. `first`: of the team's in this unit, norms are not there yet.
// `gates`: of the record; `next`: the unit of the next record, of value head `next_head`, if it has rows.
template <class Threads>
__device__ __forceinline__ void begin_record(const GatedDeltaParams& p, Threads& threads, u32 shared,
                                             RowProducts& products, RowWeights& weights, bool first, u32 gates,
                                             u32 next, int next_head, const TeamWarp& w) {
  const u32 q = shared + OFFSET(UnitMemory, q);
  float diagonal[2][4], k_square[2], q_square[2];
  if (first) square_rows(q_square, q, w);
  await_products(products);
  take_diagonal(diagonal, products, w.row_block);
  if (first) {
    take_squares(k_square, diagonal, w.lane);
    store_norms(p, w.norms + OFFSET(KeyScalars, k_norm), k_square, 1.0f, w);
    store_norms(p, w.norms + OFFSET(KeyScalars, q_factor), q_square, p.scale, w);
  }
  if (w.copies_out()) copy_out_wait_read<0>();  // of the record before
  threads.sync_team(w.team);
  make_weights(weights, gates, w);
  make_system(products, diagonal, weights, w);
  ask_products(products, q, shared);
  sync_warp();
  threads.end_record_before();
  TokenInputs inputs;
  int rows = 0;
  if (w.makes_gates()) {
    const KeyUnit u = load_key_unit(next);
    rows = u.rows;
    if (rows) inputs = load_inputs(p, u, next_head, w.lane);
  }
  invert_diagonal(w.system(), w.images() + OFFSET(RecordImages, t), w.row_block, w.lane);
  if (rows) store_gates(gates ^ (u32)sizeof(HeadScalars), sum_gates(p, rows, inputs, w.lane), w);
  multiply_row(w.system(), w.row_block, w.lane);
  await_products(products);
}
// What remains, besides a, once all warps have come so far. `record`: its number, slot * HV + value head.
template <class Threads>
__device__ __forceinline__ void complete_record(const GatedDeltaParams& p, Threads& threads, long long record,
                                                u32 gates, const TeamWarp& w) {
  if (w.makes_factors()) make_factors(gates, w);
  merge_column(w.system(), w.images() + OFFSET(RecordImages, t), w.row_block, w.lane);
  fence_async_proxy();
  threads.sync_team(w.team);
  if (w.copies_out()) {
    copy_out(reinterpret_cast<void*>(p.records + (u64)record * RECORD_BYTES), w.images(), RECORD_BYTES);
    copy_out_commit();
  }
  threads.leaves(record);
}

__device__ __forceinline__ u32 unit_place(u32 shared, u32 turn) {
  return shared + OFFSET(UnitMemory, units) + turn % 4 * (u32)sizeof(KeyUnit);
}

// A unit whose tiles have come, and whose gates of each team's first record are there. Requests the tiles of the next one
// and finds that behind it. Returns whether there is a next one.
template <class Threads>
__device__ __forceinline__ bool make_unit(const GatedDeltaParams& p, u32 turn, u32& gates, u32 shared,
                                          Threads& threads, int thread, const TeamWarp& w) {
  const u32 own = unit_place(shared, turn), next = unit_place(shared, turn + 1);
  const HeadRange heads = value_heads(p, load_key_unit(own).h);
  int head = heads.first + w.team;
#pragma unroll 1
  for (bool first = true;; first = false) {
    const bool has_head = head < heads.beyond, last = head + TEAMS >= heads.beyond;
    RowProducts products;
    RowWeights weights;
    if (has_head) {
      ask_products(products, shared + OFFSET(UnitMemory, k), shared);
      const int next_head = last ? value_heads(p, load_key_unit(next).h).first + w.team : head + TEAMS;
      begin_record(p, threads, shared, products, weights, first, gates, last ? next : own, next_head, w);
    }
    if (last)
      threads.sync();
    else
      threads.sync_team(w.team);
    if (has_head) make_a(products, weights, w);
    const long long record = load_key_unit(own).slot * p.HV + head;
    bool more = true;
    if (last) {
      const KeyUnit u = load_key_unit(next);
      more = u.rows;
      if (more) fetch_tiles(p, u, shared, thread);
      if (w.finds_units()) {
        const KeyUnit behind = threads.next();
        if (w.lane == 0) store_key_unit(unit_place(shared, turn + 2), behind);
      }
    }
    if (has_head) complete_record(p, threads, record, gates, w);
    gates ^= (u32)sizeof(HeadScalars);
    if (last) return more;
    head += TEAMS;
  }
}

// The records of all units that `threads` finds.
template <class Threads>
__device__ __forceinline__ void make_records(const GatedDeltaParams& p, u32 shared, Threads& threads) {
  const TeamWarp w = team_warp(shared, threads.thread);
  const KeyUnit u = threads.next();
  if (!u.rows) return;
  fetch_tiles(p, u, shared, threads.thread);
  u32 gates = shared + OFFSET(UnitMemory, gates) + w.team * (u32)sizeof(HeadScalars[2]);
  const int head = value_heads(p, u.h).first + w.team;
  if (w.makes_gates() && head < value_heads(p, u.h).beyond)
    store_gates(gates, sum_gates(p, u.rows, load_inputs(p, u, head, w.lane), w.lane), w);
  if (w.finds_units()) {
    const KeyUnit next = threads.next();
    if (w.lane == 0) store_key_unit(unit_place(shared, 0), u), store_key_unit(unit_place(shared, 1), next);
  }
  bool more = true;
#pragma unroll 1
  for (u32 turn = 0; more; ++turn) {
    copy_async_wait<0>();
    fence_async_proxy();  // products read what has come by ordinary copies
    threads.sync();
    // Addresses that depend on the thread are computed again: not enough registers keep them all.
    const int thread = threads.thread = opaque(threads.thread);
    more = make_unit(p, turn, gates, shared, threads, thread, team_warp(shared, thread));
  }
  threads.end_record_before();
  if (w.copies_out()) copy_out_wait_read<0>();
}
