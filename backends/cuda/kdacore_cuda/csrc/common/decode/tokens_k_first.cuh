// Several tokens and a state [K, V] in registers: the sums of decode_head.cu in the same order. Each warp sums over its
// channels of K; the sums of all meet in shared memory.
#pragma once

#include "common/decode/tokens_memory.cuh"

// The lane's columns whose update it has.
__device__ __forceinline__ const LanePosition& update_position(const LanePosition& at) { return at; }
// This lane's first column among the block's.
__device__ __forceinline__ int own_column(const LanePosition& at) { return at.v % COLUMNS; }

// Factors of four channels, of a lane's rows i to i + 3, from an array with an element for each channel.
__device__ __forceinline__ void read_rows(float (&x)[4], u32 from, int i) {
  if (i < ROWS) read_floats(x, from + 4 * row_channel(i));
}
// From two arrays. They are loaded while the rows before are computed.
struct RowFactors {
  float first[4], second[4];
};
__device__ __forceinline__ void read_rows(RowFactors& x, u32 first, u32 second, int i) {
  read_rows(x.first, first, i), read_rows(x.second, second, i);
}
// Rows i to i + 3 behind an update: decayed, then with the key's part.
__device__ __forceinline__ void decay_rows(float (&s)[ROWS][VECTOR], int i, const float (&decay)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[i + j][c] = decay[j] * s[i + j][c];
  }
}
__device__ __forceinline__ void update_rows(float (&s)[ROWS][VECTOR], int i, const float (&k)[4],
                                            const float (&u)[OUT]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[i + j][c] = multiply_add(k[j], u[c], s[i + j][c]);
  }
}

// Sums over a lane's channels: k S' and q S', with S' the decayed state.
struct LaneSums {
  float k[VECTOR], q[VECTOR];
};
__device__ __forceinline__ void add_rows(float (&sum)[VECTOR], const float (&s)[ROWS][VECTOR], int i,
                                         const float (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) sum[c] = multiply_add(x[j], s[i + j][c], sum[c]);
  }
}
// Those over this warp's channels, to shared memory.
__device__ __forceinline__ void share_sums(LaneSums& x, const LanePosition& at, u32 memory, int slot) {
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
#pragma unroll
    for (int mask = 16; mask >= LANES; mask >>= 1) {
      x.k[c] += shuffle_xor(x.k[c], mask);
      x.q[c] += shuffle_xor(x.q[c], mask);
    }
  }
  const u32 sums = sums_of(memory, warp_index()) + 4 * (COLUMNS * slot + own_column(at));
  if (at.lane < LANES) {
    store_vector(sums, x.k);
    store_vector(sums + OFFSET(WarpSums, q), x.q);
  }
}

// The state behind an update, from this lane's first decay and key on.
__device__ __forceinline__ void move_by(float (&s)[ROWS][VECTOR], u32 decays, u32 keys, const float (&u)[OUT]) {
  RowFactors x, next;
  read_rows(x, decays, keys, 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    read_rows(next, decays, keys, i + 4);
    decay_rows(s, i, x.first), update_rows(s, i, x.second, u);
    x = next;
  }
}
// A record that precedes the call.
__device__ __forceinline__ void apply_record(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int record) {
  float u[OUT];
  read_floats(u, record_place(memory, record, own_column(at), OFFSET(WarpRecord, update)));
  move_by(s, record_place(memory, record, at.first, OFFSET(WarpRecord, decay)),
          record_place(memory, record, at.first, OFFSET(WarpRecord, key)), u);
}
// The state behind a token.
__device__ __forceinline__ void move_state(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int slot,
                                           const float (&u)[OUT]) {
  const u32 staged = staged_token(memory, slot) + 4 * at.first;
  move_by(s, staged + OFFSET(StagedToken, decay), staged + OFFSET(StagedToken, k), u);
}

// The sums of a token before the state has moved on. `visit(i)`: what else is done with rows i to i + 3.
template <class Visit>
__device__ __forceinline__ void multiply(const float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int slot,
                                         Visit visit) {
  const u32 staged = staged_token(memory, slot) + 4 * at.first, qs = staged + OFFSET(StagedToken, decayed_q),
            ks = staged + OFFSET(StagedToken, decayed_k);
  LaneSums sums = {};
  RowFactors x, next;
  read_rows(x, qs, ks, 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    read_rows(next, qs, ks, i + 4);
    visit(i);
    add_rows(sums.k, s, i, x.second), add_rows(sums.q, s, i, x.first);
    x = next;
  }
  share_sums(sums, at, memory, slot);
}
// Both at once: the state behind a token, and the sums of the next one. Of the four arrays each is loaded for the next
// rows as soon as it has been used: two sets of factors would leave no registers.
__device__ __forceinline__ void move_and_multiply(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory,
                                                  int slot, const float (&u)[OUT]) {
  const u32 staged = staged_token(memory, slot) + 4 * at.first, after = staged + (u32)sizeof(StagedToken);
  const u32 decays = staged + OFFSET(StagedToken, decay), keys = staged + OFFSET(StagedToken, k),
            next_ks = after + OFFSET(StagedToken, decayed_k), next_qs = after + OFFSET(StagedToken, decayed_q);
  LaneSums sums = {};
  float decay[4], k[4], next_k[4], next_q[4];
  read_rows(decay, decays, 0), read_rows(k, keys, 0), read_rows(next_k, next_ks, 0), read_rows(next_q, next_qs, 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    decay_rows(s, i, decay), read_rows(decay, decays, i + 4);
    update_rows(s, i, k, u), read_rows(k, keys, i + 4);
    add_rows(sums.k, s, i, next_k), read_rows(next_k, next_ks, i + 4);
    add_rows(sums.q, s, i, next_q), read_rows(next_q, next_qs, i + 4);
  }
  share_sums(sums, at, memory, slot + 1);
}

// The sums of N columns over all of K, and the update there.
template <int N>
__device__ __forceinline__ void add_sums(float (&x)[N], u32 from) {
  float y[WARPS][N];  // all are loaded before the first is added
#pragma unroll
  for (int w = 0; w < WARPS; ++w) read_floats(y[w], from + AREA_BYTES * w);
#pragma unroll
  for (int c = 0; c < N; ++c) {
    x[c] = y[0][c];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) x[c] += y[w][c];
  }
}
template <int N>
__device__ __forceinline__ void update_columns(float (&u)[N], const float (&v)[N], u32 memory, int slot, int column,
                                               const TokenFactors& f) {
  float ks[N];
  add_sums(ks, sums_of(memory, 0) + 4 * (COLUMNS * slot + column));
#pragma unroll
  for (int c = 0; c < N; ++c) u[c] = f.update * multiply_add(-f.k, ks[c], v[c]);
}
template <int N>
__device__ __forceinline__ void read_values(float (&v)[N], u32 memory, int slot, int column) {
  read_floats(v, staged_token(memory, slot) + OFFSET(StagedToken, v) + 4 * column);
}

// What comes before the first token of a pass: its sums, in a walk over all rows.
constexpr bool BEGINS_WITH_ROWS = true;
template <class Visit>
__device__ __forceinline__ void begin_tokens(const float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory,
                                             Visit visit) {
  multiply(s, at, memory, 0, visit);
}
__device__ __forceinline__ void begin_tokens(const float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory) {
  multiply(s, at, memory, 0, [](int) {});
}
// A token's update, when all warps have multiplied it.
__device__ __forceinline__ void update_of(float (&u)[OUT], const float (&)[ROWS][VECTOR], const LanePosition& at,
                                          u32 memory, int slot) {
  const TokenFactors f = kept_factors(memory, slot);
  float v[OUT];
  read_values(v, memory, slot, own_column(at));
  sync_block();
  update_columns(u, v, memory, slot, own_column(at), f);
}
// The state moves on to the next token of the pass, whose sums are taken; or, if it `moves`, behind the last one.
__device__ __forceinline__ void end_token(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int slot,
                                          const float (&u)[OUT], bool more, bool moves) {
  if (more) {
    move_and_multiply(s, at, memory, slot, u);
  } else if (moves) {
    move_state(s, at, memory, slot, u);
  }
}
// What comes before outputs and records: the last token's barrier says that every warp has replayed its records and
// multiplied all tokens.
__device__ __forceinline__ void finish_tokens() {}

// Four columns of a token's output.
__device__ __forceinline__ float4 output_of(u32 memory, int slot, int column, const TokenFactors& f) {
  float u[4], v[4], qs[4];
  read_values(v, memory, slot, column);
  update_columns(u, v, memory, slot, column, f);
  add_sums(qs, sums_of(memory, 0) + OFFSET(WarpSums, q) + 4 * (COLUMNS * slot + column));
#pragma unroll
  for (int c = 0; c < 4; ++c) qs[c] = f.q * multiply_add(f.qk, u[c], qs[c]);
  return make_float4(qs[0], qs[1], qs[2], qs[3]);
}
