// Shared memory of the gradients kernel, and which part of a unit a thread has.
//
// Four warpgroups: channels 0..63 or 64..127 (part) of tokens 0..31 or 32..63 (side). Tiles are [channels, tokens]: a warp
// has 16 channels and 32 tokens of everything, a lane two channels (g and g + 8) and eight tokens (8j + 2t, 8j + 2t + 1),
// laid out as the accumulators of a warpgroup product and, in pairs of tokens, as its left operand.
#pragma once

#include "common/gate.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/warp.cuh"

// Macros from the host: G_FLOAT, GROUPED, BOUNDED, SHARED_LIMIT.
constexpr int THREADS = 512;
constexpr int ANCHORS = BOUNDED ? 1 : 2;  // anchors of a half
constexpr u32 GATE_BYTES = (G_FLOAT ? 2 : 1) * TILE_BYTES;
constexpr u32 GATE_ROW = 4 * K;  // of a float32 gate

// Rows of tokens, two images of 64 channels each. A warp reads, and later writes, its own 16 channels of its own tokens
// alone in q, k, v and g, and so fetches them itself.
constexpr u32 Q_AT = 0;
constexpr u32 K_AT = Q_AT + TILE_BYTES;
constexpr u32 V_AT = K_AT + TILE_BYTES;
constexpr u32 G_AT = V_AT + TILE_BYTES;
constexpr u32 DO_AT = G_AT + GATE_BYTES;
// Images from the workspace.
constexpr u32 U_AT = DO_AT + TILE_BYTES;
constexpr u32 DR_AT = U_AT + TILE_BYTES;
constexpr u32 H_AT = DR_AT + TILE_BYTES;
constexpr u32 DH_AT = H_AT + STATE_BYTES;
// Pairs of tokens: rows i, columns j.
constexpr u32 DA_AT = DH_AT + STATE_BYTES;
constexpr u32 DL_AT = DA_AT + SQUARE_BYTES;
// Operands that another warpgroup needs, or its own again: sk of both sides; zq and zb of the later side where v was.
constexpr u32 OPERAND_BYTES = 2 * 16 * 128;  // of one warpgroup, 16 bytes a thread twice
constexpr bool SK_IN_U = G_FLOAT;  // there is no other place beside a float32 gate
// Whether decays wait there while pairs are multiplied. Without a bound there are no registers for them (300 bytes of spills:
// 1.06 ms instead of 0.84); with one, few spills cost less than 48 KB of the next unit that come later (0.77 instead of 0.87).
constexpr bool DECAYS_IN_STATES = !BOUNDED;
constexpr u32 SK_AT = SK_IN_U ? U_AT : DL_AT + SQUARE_BYTES;
constexpr u32 ZQ_AT = V_AT;
constexpr u32 ZB_AT = V_AT + 2 * OPERAND_BYTES;
// Small things. Scalars and decays of two units, as the next unit's come early.
constexpr u32 ROWS_AT = SK_IN_U ? DL_AT + SQUARE_BYTES : SK_AT + 4 * OPERAND_BYTES;
constexpr u32 LAST_AT = ROWS_AT + 2 * ROWS_BYTES;
constexpr u32 SUMS_AT = LAST_AT + 2 * LAST_BYTES;   // float [3][8 warps of channels][64 tokens]
constexpr u32 STATES_AT = SUMS_AT + 4 * 3 * 8 * C;  // float [2][128]: of h dh, each side's half of V; of two units
constexpr u32 STATES_PITCH = 4 * 2 * K;
constexpr u32 ACROSS_AT = STATES_AT + 2 * STATES_PITCH;    // float [128]: what the later side adds to the other's sums over tokens
constexpr u32 BIAS_AT = ACROSS_AT + 4 * K;          // float [2][128]: dbias of each side
constexpr u32 RATE_AT = BIAS_AT + 4 * 2 * K;        // float [16]: what each warp adds to dA_log
constexpr u32 LARGEST_AT = RATE_AT + 64;            // float [16]
constexpr u32 SUFFIX_SUMS_AT = LARGEST_AT + 64;            // float [2][128]: sum over the side's tokens of sk cs
constexpr u32 GATE_AT = SUFFIX_SUMS_AT + 4 * 2 * K;        // dt_bias [128], exp(A_log); of two units
constexpr u32 GATE_PITCH = 4 * (K + 4);
constexpr u32 VALUES_AT = GATE_AT + 2 * GATE_PITCH;  // float a thread: what v gives to dbeta
constexpr u32 SCALING_AT = VALUES_AT + 4 * THREADS;  // shrink, grow
constexpr u32 STEP_AT = SCALING_AT + 8;             // of the grid: slots, heads
constexpr u32 UNIT_AT = SCALING_AT + 16;            // four units, by turns
constexpr u32 UNIT_BYTES = 64;
constexpr u32 FULL_PAIRS_AT = UNIT_AT + 4 * UNIT_BYTES;  // u, dr, rows, last
constexpr u32 FULL_STATES_AT = FULL_PAIRS_AT + 8;        // h, dh
constexpr u32 SHARED_BYTES = FULL_STATES_AT + 8;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "the host's shared memory size is too small");

// Who does what one thread or warp does for all: each another warp, as all others wait at the next barrier.
constexpr int WORKSPACE_THREAD = 5 * 32, UNIT_THREAD = 7 * 32;
constexpr int BETA_WARP = 3;  // of part 0 of a side

struct Lane {
  int thread, lane, g, t;
  int warp, token_half, channel_half;
  u32 tile;    // transposed 16x16 tile of an image: this lane's row of a matrix load or store, from the tile's first row
  u32 own;     // the same in the warp's own rows of tokens
  u32 piece;   // this lane's 16 bytes of the warp's own rows: token `token`, and again 16 tokens on
  int token;
  int channel;  // of element 0; element 2 is 8 further
};

// Made anew for each stage: there are no registers to keep all of it.
__device__ __forceinline__ Lane make_lane(int warp) {
  Lane l;
  l.thread = opaque(thread_index());
  l.lane = l.thread & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.warp = warp & 3;
  l.channel_half = warp >> 2 & 1;
  l.token_half = warp >> 3;
  const int row = (l.lane & 7) + 8 * (l.lane >> 4);
  l.tile = swizzled(row, 2 * l.warp + (l.lane >> 3 & 1));
  l.own = l.channel_half * SQUARE_BYTES + HALF * IMAGE_ROW * l.token_half + l.tile;
  // Eight lanes have every other row: the swizzle puts two pieces of neighbouring rows in the same banks.
  l.token = HALF * l.token_half + (l.lane & 6) + (l.lane >> 3 & 1) + (l.lane >> 1 & 8);
  l.piece = l.channel_half * SQUARE_BYTES + swizzled(l.token, 2 * l.warp + (l.lane & 1));
  l.channel = 64 * l.channel_half + 16 * l.warp + l.g;
  return l;
}

// A unit as the block's threads find it in shared memory: addresses of its first token in each rows array, of its place in the
// gradients' [B, T, HV] rows and in the workspace. No rows: there is no further unit.
constexpr u32 UNIT_ROWS = 0, UNIT_HV = 4, UNIT_PLACE = 8, UNIT_ROW = 16, UNIT_Q = 24, UNIT_K = 32, UNIT_V = 40, UNIT_G = 48, UNIT_N = 56,
              UNIT_CHUNK = 60;

__device__ __forceinline__ u32 unit_at(u32 shared, int n) { return shared + UNIT_AT + UNIT_BYTES * (n & 3); }
__device__ __forceinline__ int unit_int(u32 unit, u32 field) { return (int)__float_as_uint(load_shared1(unit + field)); }
__device__ __forceinline__ u64 unit_long(u32 unit, u32 field) {
  const float2 x = load_shared2(unit + field);
  return (u64)__float_as_uint(x.y) << 32 | __float_as_uint(x.x);
}

// One thread. What this and all of the below cost one warp all others wait for: no division that can be avoided, a token's stride
// in 32 bits.
__device__ __forceinline__ void write_unit_fields(const ChunkBackwardParams& p, u32 unit, const Unit& u, int chunk) {
  const auto store_pair = [&](u32 field, u64 a, u64 b) {
    store_shared(unit + field, (u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
  };
  const auto first = [&](u64 array, long long sb, long long st, long long sh, int head, int size) {
    return array + size * (u64)(u.batch * sb + (u64)(u32)u.first * (u32)st + head * sh);
  };
  store_pair(UNIT_ROWS, (u64)u.hv << 32 | (u32)u.rows, u.at);
  store_pair(UNIT_ROW, (u64)(u.batch * p.T + u.first) * (u32)p.HV + u.hv, first(p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2));
  store_pair(UNIT_K, first(p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2), first(p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2));
  store_pair(UNIT_G, first(p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2), (u64)chunk << 32 | (u32)u.n);
}

// The block's next unit is the first one from `index` on, in steps of the grid, that has rows; it belongs to sequence n or a later
// one. A sequence has a slot at least, so from one step to the next few need to be looked at.
__device__ __forceinline__ void write_unit(const ChunkBackwardParams& p, u32 unit, long long index, int n, int beyond) {
  Unit u = {};
  for (; index < p.units; index += grid_blocks()) {
    u = find_unit(p, index, n, beyond);
    if (u.rows || !p.cu_seqlens) break;
    n = u.n;
    beyond = n + grid_blocks() / p.HV + 2;
    beyond = beyond < p.N ? beyond : p.N;
  }
  write_unit_fields(p, unit, u, (int)((u32)u.first / C));
}

// How far a step of the grid goes, in slots and then in heads.
__device__ __forceinline__ void write_grid_step(const ChunkBackwardParams& p, u32 shared) {
  const u32 slots = (u32)grid_blocks() / (u32)p.HV;
  store_shared(shared + STEP_AT, slots);
  store_shared(shared + STEP_AT + 4, (u32)grid_blocks() - slots * (u32)p.HV);
}
// The unit after the one at `before`, if there is one.
__device__ __forceinline__ void write_next_unit(const ChunkBackwardParams& p, u32 shared, u32 unit, u32 before) {
  if (!unit_int(before, UNIT_ROWS)) return;
  Unit u = {};
  u.at = unit_long(before, UNIT_PLACE) + grid_blocks();
  u.n = unit_int(before, UNIT_N);
  if (p.cu_seqlens) {
    const int beyond = u.n + grid_blocks() / p.HV + 2;
    write_unit(p, unit, u.at, u.n, beyond < p.N ? beyond : p.N);
    return;
  }
  int chunk = unit_int(before, UNIT_CHUNK) + unit_int(shared + STEP_AT, 0);
  u.hv = unit_int(before, UNIT_HV) + unit_int(shared + STEP_AT, 4);
  if (u.hv >= p.HV) {
    u.hv -= p.HV;
    ++chunk;
  }
  if (chunk >= p.NT) {
    const u32 sequences = (u32)chunk / (u32)p.NT;
    u.n += sequences;
    chunk -= sequences * p.NT;
  }
  u.h = p.H == p.HV ? u.hv : (int)((u32)u.hv / ((u32)p.HV / (u32)p.H));
  u.batch = u.n;
  u.first = chunk * C;
  const int left = (int)p.T - chunk * C;
  u.rows = left < C ? left : C;
  if (u.at >= p.units) u = {};
  write_unit_fields(p, unit, u, chunk);
}

// Right operands: rows along the sum (K-major), and rows as the sum.
__device__ __forceinline__ u64 rows_operand(u32 address) { return operand_descriptor(address, 16, 1024); }
__device__ __forceinline__ u64 columns_operand(u32 address) { return operand_descriptor(address, SQUARE_BYTES, 1024); }
// Descriptors differ by their addresses alone, and those never carry out of their field.
constexpr u64 descriptor_step(u32 bytes) { return bytes >> 4; }

// A tile in pairs of tokens: word 2 (j & 1) + (e >> 1) of r[j >> 1] is elements e, e + 1 of d[j].
typedef u32 Operand[2][4];

__device__ __forceinline__ float element(const Operand& r, int j, int e) {
  const u32 word = r[j >> 1][2 * (j & 1) + (e >> 1)];
  return e & 1 ? bf16_high(word) : bf16_low(word);
}
// The anchor that an element of the tile belongs to.
__device__ __forceinline__ constexpr int anchor_of(int j) { return BOUNDED ? 0 : j >> 1; }

// f(j, e) of every element.
template <class F>
__device__ __forceinline__ void make_operand(Operand& r, F f) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) r[j >> 1][2 * (j & 1) + (e >> 1)] = pack_bf16(f(j, e), f(j, e + 1));
  }
}
template <class F>
__device__ __forceinline__ void each(F f) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(j, e);
  }
}
// The warp's own tile of a rows array.
__device__ __forceinline__ void load_own(Operand& r, u32 image, const Lane& l) {
  load_matrix4_transposed(r[0], image + l.own);
  load_matrix4_transposed(r[1], image + l.own + 16 * IMAGE_ROW);
}
// One float a token, of this lane's eight: [j][e & 1].
struct OfTokens {
  float x[4][2];
};
__device__ __forceinline__ OfTokens load_tokens(u32 at, const Lane& l) {
  OfTokens r;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 x = load_shared2(at + 4 * (HALF * l.token_half + 8 * j + 2 * l.t));
    r.x[j][0] = x.x, r.x[j][1] = x.y;
  }
  return r;
}

// Sum over the warp's 16 channels of a value that each lane has one of a token (its own two channels already added): in
// the end every lane has one token's, token_of(lane). Halving: each step a lane keeps half of what it has.
__device__ __forceinline__ float sum_channels(const OfTokens& a, const Lane& l) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = a.x[i >> 1][i & 1];
#pragma unroll
  for (int half = 4; half; half >>= 1) {
    const bool upper = l.g & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? x[i + half] : x[i], send = upper ? x[i] : x[i + half];
      x[i] = keep + shuffle_xor(send, 4 * half);
    }
  }
  return x[0];
}
__device__ __forceinline__ int token_of(const Lane& l) { return 8 * (l.g >> 1) + 2 * l.t + (l.g & 1); }

// Sum over a channel's 32 tokens, the lane's eight added already: the same number in all four lanes.
__device__ __forceinline__ float sum_quad(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// The same, and the sum of the lanes before this one, or of those after it; lanes on the other side do not show in its last bits.
struct QuadSums {
  float aside, all;
};
template <bool AFTER>
__device__ __forceinline__ QuadSums scan_quad(float x, const Lane& l) {
  const float one = shuffle_xor(x, 1), pair = x + one, two = shuffle_xor(pair, 2);
  const float near = (l.t & 1) == !AFTER ? one : 0.0f, far = (l.t >> 1) == !AFTER ? two : 0.0f;
  return {near + far, pair + two};
}

__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float((u32)(127 + n) << 23); }
