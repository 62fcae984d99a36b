// Slice warps turn 32 channels of one half of a chunk's q, k and g into their part of the image,
// and give the sums over those channels to a solver warp (triangles.cuh). The warps of the two
// halves of a slice exchange their decays, and the second gets the first's keys for the products
// across the halves.
#pragma once

#include "common/chunk_forward/bounded_triangles.cuh"
#include "common/chunk_forward/dyadic_triangles.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/schedule.cuh"

// Addresses of this lane's channels of token 2p of the next chunk to load; byte strides between
// tokens.
struct Source {
  const unsigned char *k, *q, *g;
  int k_token, q_token, g_token;
};

// Steps from one chunk of a group to its next.
constexpr int STRIDE = GROUPS * PREPARERS;

__device__ __forceinline__ void advance(Source& s) {
  s.k += (long long)STRIDE * C * s.k_token;
  s.q += (long long)STRIDE * C * s.q_token;
  s.g += (long long)STRIDE * C * s.g_token;
}

// By so many tokens, heads and value heads.
__device__ __forceinline__ void advance(Source& s, const ChunkForwardParams& p, int tokens, int heads,
                                        int value_heads) {
  s.k += (long long)tokens * s.k_token + 2 * heads * p.k_sh;
  s.q += (long long)tokens * s.q_token + 2 * heads * p.q_sh;
  s.g += (long long)tokens * s.g_token + (G_FLOAT ? 4 : 2) * value_heads * p.g_sh;
}

// The next load, into the same registers as soon as they have been used: the chunk at `from`, of
// which this lane has `left` tokens. Registers of tokens past the end keep their values.
struct NextLoad {
  const Source& from;
  int left;
};

constexpr u32 GATE_PITCH = 32 * 16;
__device__ __forceinline__ void load_gate(Raw& raw, const NextLoad& r, u32 buffer) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < G_VECTORS; ++j) {
      const unsigned char* from = r.from.g + i * r.from.g_token + 16 * j;
#if SEPARATE_BLOCKS
      if (i < r.left) copy_async16(buffer + GATE_PITCH * (G_VECTORS * i + j), from, true);
#else
      load_sixteen(raw.g[i][j], from, i < r.left);
#endif
    }
  }
#if SEPARATE_BLOCKS
  copy_async_commit();
#endif
}

// Waits until the gate has arrived. Blocks that only prepare load it with cp.async into shared memory (`buffer`: 16
// bytes a lane). All loads to registers in the loop share one scoreboard, and the gate is used first in a step, so
// it would also wait for the keys and queries, whose loads are issued last.
__device__ __forceinline__ void receive_gate(Raw& raw, u32 buffer) {
#if SEPARATE_BLOCKS
  copy_async_wait<0>();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < G_VECTORS; ++j)
      raw.g[i][j] = load_shared_u4(buffer + GATE_PITCH * (G_VECTORS * i + j));
  }
#endif
}

__device__ __forceinline__ void load_rows(Raw& raw, const NextLoad& r) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_sixteen(raw.k[i], r.from.k + i * r.from.k_token, i < r.left);
    load_sixteen(raw.q[i], r.from.q + i * r.from.q_token, i < r.left);
  }
}

// What a slice warp works on.
struct Place {
  int slice, odd, half;  // odd: slice & 1, which stays the same while a pair alternates between two slices
  u32 stage, exchange;   // exchange: this lane's 16 bytes of the pair's
  int pair;              // the pair's barrier
};

// Sums over channels.
struct Products {
  float tile[4]
            [4];  // bounded gates: k k and q k against even and odd tokens; else k k and q k by dyadic level
  float square[2][2];  // of k and q, by token
#if !BOUNDED
  float diagonal[2];
#endif
};

// k 2^G and q 2^G from the half's start, of the lane's two tokens.
struct Operands {
  u32 k[2][4], q[2][4];
};

// Of the second half against the first: k k and q k, against even and odd tokens.
struct Across {
  float tile[4][4];
};

// Where this lane's 8 channels of its slice go in 64 channels of an operand, for token i of its
// half.
__device__ __forceinline__ u32 piece_offset(const Lane& l, int i, const Place& at) {
  const u32 even = swizzled(HALF * at.half + 2 * l.p, at.odd * 4 + l.t);
  return i ? (opaque(even) ^ 16) + 128 : even;  // derived from the other to save registers
}

// Shared memory holds the total decay of a half: the decay itself, or its log2 if gates are unbounded.
__device__ __forceinline__ float decay_of(float total) { return BOUNDED ? total : exp2_fast(total); }

// Where the decay of the lane's first channel goes: the image has 4 floats (channels 2t, 2t+1, 2t+8, 2t+9) a
// lane and 16 channels, the order in which scan lanes read them. A lane's channels are pairs 4 floats apart.
__device__ __forceinline__ u32 decay_place(const Place& at, int t) {
  return at.stage + OFFSET(ChunkImage, decay) + 4 * (32 * at.slice + 16 * (t >> 1) + 2 * (t & 1));
}

// This lane's channels of token i.
__device__ __forceinline__ void store_rows(const Place& at, const Lane& l, int i, const u32 (&k)[4],
                                           const u32 (&q)[4], const u32 (&kg)[4]) {
  const u32 to = piece_offset(l, i, at), wide = at.slice >> 1;
  const u32 kq = at.stage + OFFSET(ChunkImage, kq) + wide * 2 * ROWS_BYTES + to;
  store_shared(kq, k[0], k[1], k[2], k[3]);
  store_shared(kq + ROWS_BYTES, q[0], q[1], q[2], q[3]);
  store_shared(at.stage + OFFSET(ChunkImage, kg) + wide * ROWS_BYTES + to, kg[0], kg[1], kg[2], kg[3]);
}

// The first half's k 2^(G_last - G), each lane to the second half's same lane.
__device__ __forceinline__ void send_keys(const Place& at, int i, const u32 (&kg)[4]) {
  store_shared(at.exchange + 512 * i, kg[0], kg[1], kg[2], kg[3]);
}

// Sums across the halves: rows k and q of the second, columns the first's tokens.
__device__ __forceinline__ Across across_products(const Place& at, const Operands& operands) {
  const u32(&k)[2][4] = operands.k, (&q)[2][4] = operands.q;
  Across sums = {};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint4 kg = load_shared_u4(at.exchange + 512 * tile);
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      const u32 a[4] = {k[0][w], k[1][w], k[0][w + 1], k[1][w + 1]};
      const u32 b[4] = {q[0][w], q[1][w], q[0][w + 1], q[1][w + 1]};
      mma_bf16(sums.tile[tile], a, word(kg, w), word(kg, w + 1));
      mma_bf16(sums.tile[2 + tile], b, word(kg, w), word(kg, w + 1));
    }
  }
  return sums;
}

__device__ __forceinline__ void store_tile(u32 to, const float (&x)[4]) {
  store_shared(to, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
               __float_as_uint(x[3]));
}
__device__ __forceinline__ void store_tiles(u32 to, const float (&tile)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) store_tile(to + i * PART_BYTES, tile[i]);
}

#if BOUNDED
#include "sm90/chunk_forward/slices_bounded.cuh"
#else
#include "sm90/chunk_forward/slices_unbounded.cuh"
#endif

__device__ __forceinline__ Source make_source(const ChunkForwardParams& p, const SequenceHead& w,
                                              const Lane& l, int slice, int token) {
  const long long g_size = G_FLOAT ? 4 : 2;
  const long long at = w.first + token;
  const int channel = 32 * slice + 8 * l.t;
  Source s;
  s.k_token = (int)(2 * p.k_st);
  s.q_token = (int)(2 * p.q_st);
  s.g_token = (int)(g_size * p.g_st);
  s.k = reinterpret_cast<const unsigned char*>(p.k + 2 * (w.batch * p.k_sb + w.h * p.k_sh) + at * s.k_token +
                                               2 * channel);
  s.q = reinterpret_cast<const unsigned char*>(p.q + 2 * (w.batch * p.q_sb + w.h * p.q_sh) + at * s.q_token +
                                               2 * channel);
  s.g = reinterpret_cast<const unsigned char*>(p.g + g_size * (w.batch * p.g_sb + w.hv * p.g_sh) +
                                               at * s.g_token + g_size * channel);
  return s;
}

// This lane's sums, 16 bytes a part, where the solver's same lane reads them. If gates are unbounded, products of
// pairs are there already.
__device__ __forceinline__ void store_parts(u32 to, const Products& sums) {
#if BOUNDED
  store_tiles(to, sums.tile);
#endif
  const float (&s)[2][2] = sums.square;
  store_shared(to + 4 * PART_BYTES, __float_as_uint(s[0][0]), __float_as_uint(s[0][1]),
               __float_as_uint(s[1][0]), __float_as_uint(s[1][1]));
#if !BOUNDED
  store_shared(to + 5 * PART_BYTES, __float_as_uint(sums.diagonal[0]), __float_as_uint(sums.diagonal[1]), 0u,
               0u);
#endif
}

// The other half's decay of this lane's channels. `own_totals`: where those of its own half are in shared memory.
__device__ __forceinline__ void exchange_totals(const Place& at, u32 own_totals, float (&across)[8]) {
  sync_pair(at.pair);
  const u32 other = opaque(own_totals) + (at.half ? -128 : 128);  // recomputed to save registers
#pragma unroll
  for (int e = 0; e < 8; e += 4) {
    const float4 x = load_shared4(other + 4 * e);
    across[e] = decay_of(x.x);
    across[e + 1] = decay_of(x.y);
    across[e + 2] = decay_of(x.z);
    across[e + 3] = decay_of(x.w);
  }
}

// What a slice warp keeps for as long as it runs.
struct SliceWarp {
  Lane l;
  Place at;
  int group, pair;
  u32 bias, own_totals, parts, gate;  // in shared memory, of this lane
};
__device__ __forceinline__ SliceWarp make_slice_warp(u32 shared, int warp) {
  SliceWarp w;
  w.l = make_lane();
  w.group = warp / (2 * SLICES);
  w.at.half = warp / SLICES % 2;
  w.at.slice = warp % SLICES;
  w.at.odd = w.at.slice & 1;
  w.pair = w.group * SLICES + w.at.slice;
  w.at.pair = 1 + w.pair;
  w.at.exchange = shared + OFFSET(SharedMemory, keys) + w.pair * EXCHANGE_BYTES + 16 * w.l.lane;
  w.bias = shared + OFFSET(SharedMemory, bias) + 4 * (32 * w.at.slice + 8 * w.l.t);
  w.own_totals = shared + OFFSET(SharedMemory, totals) + w.pair * 256 + w.at.half * 128 + 32 * w.l.t;
  w.parts = shared + OFFSET(SharedMemory, parts) + w.pair * SLICE_PARTS + w.at.half * PARTS * PART_BYTES +
            16 * w.l.lane;
  w.gate = 0;
  return w;
}

// Both warps of a pair process the same task and share a bias.
__device__ __forceinline__ void store_bias(const SliceWarp& w, u32 shared, Gate& gate, float own_bias) {
  const u32 first = shared + OFFSET(SharedMemory, bias) + 4 * (32 * w.at.slice);
  const bool softplus = !BOUNDED && gate.kind == GATE_SOFTPLUS;
  if (softplus) {
    own_bias += gate.shift;
    own_bias = softplus_bias(gate.rare || warp_any(is_large_bias(own_bias)), own_bias);
  }
  sync_pair(w.at.pair);
  if (!w.at.half) store_shared(first + 4 * w.l.lane, __float_as_uint(own_bias));
  sync_pair(w.at.pair);
  if (softplus) gate.rare = is_rare_bias(first);
}

// Waits until a step's stage may be written.
__device__ __forceinline__ void wait_for_stage(u32 shared, int c) {
  barrier_wait(shared + OFFSET(SharedMemory, empty) + 8 * own_stage(c), (u32)(own_use(c) & 1) ^ 1);
}

// Waits until a solver has read the sums that those of step c replace. `barriers`: parts_read or tiles_read.
__device__ __forceinline__ void wait_for_solver(const SliceWarp& w, u32 shared, int c, u32 barriers) {
  const u32 i = (u32)c / PREPARERS;  // of the block's steps
  barrier_wait(shared + barriers + 8 * (SUMS * w.group + i % SUMS), (u32)(i / (GROUPS * SUMS) & 1) ^ 1);
}

// Where this lane's sums of step c go.
__device__ __forceinline__ u32 parts_of(const SliceWarp& w, int c) {
  return w.parts + sums_offset((u32)c / PREPARERS);
}

// Hands sums to the solver of step c. `across_halves` gives the second half's sums against the first.
template <class F>
__device__ __forceinline__ void hand_over(const SliceWarp& w, u32 shared, int c, const Products& sums,
                                          F across_halves) {
  const u32 i = (u32)c / PREPARERS;
  const u32 parts = parts_of(w, c);
  wait_for_solver(w, shared, c, OFFSET(SharedMemory, parts_read));
  store_parts(parts, sums);
  if (w.at.half) {
    const Across across = across_halves();
    store_tiles(parts + PARTS * PART_BYTES, across.tile);
  }
  warp_arrive(shared + OFFSET(SharedMemory, parts_ready) + 8 * (i % SOLVERS), w.l.lane);
}

// This warp's part of step c, whose inputs are in `raw`. `to_next` moves `from` and `left` to the next load. A second
// half without tokens is computed like any other: both warps of a pair then reach each barrier at the same
// instruction, without which compute-sanitizer's synccheck reports divergent threads.
template <class F>
__device__ __forceinline__ void slice_step(SliceWarp& w, u32 shared, const Gate& gate, Raw& raw, int c,
                                           const Source& from, int& left, F to_next) {
  w.at.stage = shared + OFFSET(SharedMemory, stages) + own_stage(c) * STAGE_PITCH;
  receive_gate(raw, w.gate);
  float steps[2][8], across[8];
  gate_steps(raw, gate, w.bias, left, steps);
  to_next();
  Decays decays;
#if BOUNDED
  load_gate(raw, {from, left}, w.gate);
  make_decays(steps, decays, w.l, w.own_totals);
#else
  wait_for_solver(w, shared, c, OFFSET(SharedMemory, tiles_read));
  make_decays(raw, steps, decays, w.l, w.own_totals, parts_of(w, c));
  load_gate(raw, {from, left}, w.gate);
#endif
  exchange_totals(w.at, w.own_totals, across);
  wait_for_stage(shared, c);
  store_decay(decays, across, w.l, w.at, w.own_totals);
  Products sums = {};
  Operands operands;
  prepare_slice(raw, decays, across, w.l, w.at, sums, operands, {from, left});
  hand_over(w, shared, c, sums, [&] { return across_products(w.at, operands); });
}

__device__ __forceinline__ void slice_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  int c = warp / (2 * SLICES) * PREPARERS + rank;  // of the cluster's steps
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
  if (!advance_to_step(p, shared, task, c)) return;
  SliceWarp w = make_slice_warp(shared, warp);
  int length, shift,
      left;  // of the sequence; from a step to its chunk; this lane's tokens from the next load on
  Source from;
  const auto first_token = [&] { return (c + shift) * C + w.at.half * HALF + 2 * w.l.p; };
  int stopped = 0, heads = 0, value_heads = 0;
  Move move = NEXT_SEQUENCE;
  do {
    int tokens;
    if (move == NEXT_SEQUENCE) {
      const TaskPart part = make_task_part(p, shared, task);
      length = uniform(part.sequence.length);
      shift = part.shift;
      tokens = part.tokens;
      from = make_source(p, part.sequence, w.l, w.at.slice, first_token());
    } else {
      shift = shift_to_end(task, length);
      tokens = length;
      advance(from, p, (c + shift - stopped) * C, heads, value_heads);
    }
    left = tokens - first_token();
    // What comes from the caches is asked for before what comes from memory, as answers come in order.
    Gate gate = make_gate(p, task.hv);
    const float own_bias = w.at.half ? 0.0f : load_bias(p, task.hv, 32 * w.at.slice + w.l.lane);
    Raw raw = {};
    load_gate(raw, {from, left}, w.gate);
    load_rows(raw, {from, left});
    store_bias(w, shared, gate, own_bias);
#pragma unroll 1
    for (; c < task.stop; c += STRIDE)
      slice_step(w, shared, gate, raw, c, from, left, [&] {
        advance(from);
        left -= STRIDE * C;
      });
    stopped = c + shift;
    const int hv = task.hv;
    move = move_to_step(p, shared, task, length, c);
    heads = key_head(p, task.hv) - key_head(p, hv);
    value_heads = task.hv - hv;
  } while (move != NO_STEP);
}
