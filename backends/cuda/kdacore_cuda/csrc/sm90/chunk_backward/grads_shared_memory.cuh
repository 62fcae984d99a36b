// Shared memory of the gradients kernel, and the part of a unit that each thread has.
//
// Four warpgroups: channels 0..63 or 64..127 (channel_half) of tokens 0..31 or 32..63 (token_half).
// Tiles are [channels, tokens]: a warp has 16 channels and 32 tokens of everything, a lane two
// channels (g and g + 8) and eight tokens (8j + 2t, 8j + 2t + 1), laid out as the accumulators of a
// warpgroup product and, in pairs of tokens, as its left operand.
#pragma once

#include "common/gate.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/head_dims.cuh"
#include "sm90/warp.cuh"

// Macros from the host: G_FLOAT, GROUPED, BOUNDED.
constexpr int THREADS = 512;
constexpr int ANCHORS = BOUNDED ? 1 : 2;  // anchors of a half
constexpr u32 GATE_ROW = 4 * K;           // bytes, of a float32 gate
// Without a float32 gate sk has room of its own; beside one it takes the place of u.
constexpr bool SK_IN_U = G_FLOAT;
// Whether decays are saved in the place of the states while pairs are multiplied. Without a bound
// there are no registers for them (300 bytes of spills: 1.06 ms instead of 0.84); with one, few
// spills cost less than loading 48 KB of the next unit later (0.77 instead of 0.87).
constexpr bool DECAYS_IN_STATES = !BOUNDED;

// A left operand of one warpgroup, stored for another one or for later: 16 bytes a thread twice.
struct WarpgroupOperand {
  uint4 x[2][128];
};
constexpr u32 OPERAND_BYTES = sizeof(WarpgroupOperand);
struct GateParameters {
  float bias[K];  // dt_bias
  float rate;     // exp(A_log), of the softplus what is left of it
  float shift;    // of the softplus
  float padding[2];
};
constexpr u32 GATE_PITCH = sizeof(GateParameters), STATES_PITCH = sizeof(float[2][K]);

// A unit as the block's threads find it in shared memory. `rows` is 0 if there is no further unit.
struct SharedUnit {
  int rows, hv;
  u64 place;       // in the workspace
  u64 row;         // in the gradients' [B, T, HV] rows
  u64 q, k, v, g;  // addresses of its first token
  int n, chunk;
};
constexpr u32 UNIT_BYTES = sizeof(SharedUnit);

// A warp reads, and later writes, its own 16 channels of its own tokens alone in q, k, v and g, and
// so loads them itself. What there is two of belongs to even and odd units: the next unit's is
// loaded early.
struct SharedMemory {
  TileImage q, k;
  union {
    TileImage v;
    struct {
      WarpgroupOperand zq[2], zb[2];  // of the later half of tokens, by half of the channels
    };
  };
#if G_FLOAT
  float g[C][K];
#else
  TileImage g;
#endif
  TileImage d_o;
  union {
    TileImage u;  // from the workspace, as dr, h and dh
#if G_FLOAT
    WarpgroupOperand sk[2][2];  // by half of the tokens and half of the channels
#endif
  };
  TileImage dr;
  StateImage h, dh;
  SquareImage dA, dL;  // pairs of tokens: rows i, columns j
#if !G_FLOAT
  WarpgroupOperand sk[2][2];
#endif
  RowScalars rows[2];
  ChunkDecays last[2];
  // Of 8 warps, for the norm of q, that of k, dbeta; places of tokens: grads_channel_sums.cuh.
  float channel_sums[3][8][C];
  float states[2][2][K];        // sum_v h dh of each half of V
  float later_sums[K];          // sum over the later half's tokens of dgc
  float bias[2][K];             // dbias of each half of tokens
  float rate[16];               // what each warp adds to dA_log
  u32 largest[16];              // of each warp's pairs, bits of a bfloat16
  float suffix_sums[2][K];      // sum over a half's tokens of sk cs
  GateParameters gate[2];
  float values[16][HALF];  // what v gives to dbeta, of each warp's values
  float of_values[C];      // the same of all values
  float scaling[2];       // shrink, grow
  u32 step[2];            // of the grid: slots, heads
  SharedUnit units[4];    // this one, the next ones and the one before, by number modulo 4
  u64 pairs_full;         // barrier: u, dr, rows, last are there
  u64 states_full;        // barrier: h, dh
  u64 norms_full[2];      // barriers: what the norms of the half's rows make of their gradients
};
KDA_SHARED_BYTES(sizeof(SharedMemory));

// Threads and warps that do something for the whole block: each in another warp, as all others wait
// at the next barrier.
constexpr int WORKSPACE_THREAD = 5 * 32, UNIT_THREAD = 7 * 32;
constexpr int BETA_WARP = 3, VALUES_WARP = 2;  // of the first half of channels
constexpr int NORM_WARPS = 2;                 // of the second half: one for q, one for k

struct Lane {
  int thread, lane, g, t;
  int warp, token_half, channel_half;
  // Transposed 16x16 tile of an image: this lane's row of a matrix load or store, from the tile's
  // first row.
  u32 tile;
  u32 own;    // the same in the warp's own rows of tokens
  u32 piece;  // this lane's 16 bytes of the warp's own rows: token `token`, and again 16 tokens on
  int token;
  int channel;  // of element 0; element 2 is 8 further
};

// Where a lane's row of a transposed tile is in the warp's own rows, and 65,536 times where its 16 bytes are: kept, as
// both take more instructions than other constants.
__device__ __forceinline__ u32 lane_places(int warp) {
  const int lane = thread_index() & 31, channel_half = warp >> 2 & 1, token_half = warp >> 3, piece = 2 * (warp & 3);
  const int row = (lane & 7) + 8 * (lane >> 4);
  // Eight lanes have every other row: the swizzle puts two pieces of neighbouring rows in the same
  // banks.
  const int token = HALF * token_half + (lane & 6) + (lane >> 3 & 1) + (lane >> 1 & 8);
  const u32 rows = channel_half * SQUARE_BYTES;
  return (rows + HALF * IMAGE_ROW * token_half + swizzled(row, piece + (lane >> 3 & 1))) |
         (rows + swizzled(token, piece + (lane & 1))) << 16;
}
// Recomputed in each step: there are no registers to keep all of it.
__device__ __forceinline__ Lane make_lane(int warp, u32 places) {
  Lane l;
  l.thread = opaque(thread_index());
  l.lane = l.thread & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.warp = warp & 3;
  l.channel_half = warp >> 2 & 1;
  l.token_half = warp >> 3;
  places = (u32)opaque((int)places);
  l.own = places & 0xffffu;
  l.piece = places >> 16;
  l.tile = l.own - (l.channel_half * SQUARE_BYTES + HALF * IMAGE_ROW * l.token_half);
  l.token = HALF * l.token_half + (l.lane & 6) + (l.lane >> 3 & 1) + (l.lane >> 1 & 8);
  l.channel = 64 * l.channel_half + 16 * l.warp + l.g;
  return l;
}

__device__ __forceinline__ u32 unit_at(u32 shared, int n) {
  return shared + OFFSET(SharedMemory, units) + UNIT_BYTES * (n & 3);
}
__device__ __forceinline__ int unit_int(u32 unit, u32 field) {
  return (int)__float_as_uint(load_shared1(unit + field));
}
__device__ __forceinline__ u64 unit_long(u32 unit, u32 field) {
  const float2 x = load_shared2(unit + field);
  return (u64)__float_as_uint(x.y) << 32 | __float_as_uint(x.x);
}

// One thread. All other warps wait for this and the functions below, so they avoid divisions and
// keep a token's stride in 32 bits.
__device__ __forceinline__ void write_unit_fields(const ChunkBackwardParams& p, u32 unit, const Unit& u,
                                                  int chunk) {
  const auto store_pair = [&](u32 field, u64 a, u64 b) {
    store_shared(unit + field, (u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
  };
  const auto first = [&](u64 array, long long sb, long long st, long long sh, int head, int size) {
    return array + size * (u64)(u.batch * sb + (u64)(u32)u.first * (u32)st + head * sh);
  };
  store_pair(OFFSET(SharedUnit, rows), (u64)u.hv << 32 | (u32)u.rows, u.at);
  store_pair(OFFSET(SharedUnit, row), (u64)(u.batch * p.T + u.first) * (u32)p.HV + u.hv,
             first(p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2));
  store_pair(OFFSET(SharedUnit, k), first(p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2),
             first(p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2));
  store_pair(OFFSET(SharedUnit, g), first(p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2),
             (u64)chunk << 32 | (u32)u.n);
}

// The block's next unit is the first one from `index` on, in steps of the grid, that has rows; it
// belongs to sequence n or a later one. A sequence has a slot at least, so from one step to the
// next few need to be inspected.
__device__ __forceinline__ void write_unit(const ChunkBackwardParams& p, u32 unit, long long index, int n,
                                           int beyond) {
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
  store_shared(shared + OFFSET(SharedMemory, step), slots);
  store_shared(shared + OFFSET(SharedMemory, step[1]), (u32)grid_blocks() - slots * (u32)p.HV);
}
// The unit after the one at `before`, if there is one.
__device__ __forceinline__ void write_next_unit(const ChunkBackwardParams& p, u32 shared, u32 unit,
                                                u32 before) {
  if (!unit_int(before, OFFSET(SharedUnit, rows))) return;
  Unit u = {};
  u.at = unit_long(before, OFFSET(SharedUnit, place)) + grid_blocks();
  u.n = unit_int(before, OFFSET(SharedUnit, n));
  if (p.cu_seqlens) {
    const int beyond = u.n + grid_blocks() / p.HV + 2;
    write_unit(p, unit, u.at, u.n, beyond < p.N ? beyond : p.N);
    return;
  }
  int chunk = unit_int(before, OFFSET(SharedUnit, chunk)) + unit_int(shared + OFFSET(SharedMemory, step), 0);
  u.hv = unit_int(before, OFFSET(SharedUnit, hv)) + unit_int(shared + OFFSET(SharedMemory, step), 4);
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
__device__ __forceinline__ u64 columns_operand(u32 address) {
  return operand_descriptor(address, SQUARE_BYTES, 1024);
}
// Descriptors differ only in their addresses, which never overflow their field.
constexpr u64 descriptor_step(u32 bytes) { return bytes >> 4; }

// A tile in pairs of tokens: word 2 (j & 1) + (e >> 1) of r[j >> 1] is elements e, e + 1 of d[j].
typedef u32 Operand[2][4];

__device__ __forceinline__ float element(const u32 (&part)[4], int j, int e) {  // of the 16 tokens that have tile j
  const u32 word = part[2 * (j & 1) + (e >> 1)];
  return e & 1 ? bf16_high(word) : bf16_low(word);
}
__device__ __forceinline__ float element(const Operand& r, int j, int e) { return element(r[j >> 1], j, e); }
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

// Sum over a channel's 32 tokens, the lane's eight added already: the same number in all four
// lanes.
__device__ __forceinline__ float sum_quad(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float((u32)(127 + n) << 23); }
