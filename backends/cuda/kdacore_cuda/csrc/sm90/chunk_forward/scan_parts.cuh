// What a scan warp has in registers, and what it loads and stores of a chunk.
#pragma once

#include "common/chunk_forward/marks.cuh"
#include "common/chunk_forward/solve.cuh"
#include "common/chunk_forward/state_decay.cuh"
#include "common/warp_arrivals.cuh"
#include "common/mma_operands.cuh"
#include "sm90/chunk_forward/own_heads.cuh"
#include "sm90/chunk_forward/schedule.cuh"
#include "sm90/narrow_states.cuh"
#include "sm90/state_tiles.cuh"
#include "sm90/wgmma.cuh"

constexpr int K_TILES = K / 16;

struct ScanState {
  float s[2 * K_TILES][4];
};

struct ScanLane {
  int lane, g, t;
  int v0;           // first column of V of this warp
  u32 values, out;  // this warp's rings in shared memory
  // Offsets of what this lane reads or writes: its row and its 16-byte piece of a tile of V or o,
  // its row of a triangle.
  u32 tile, piece, triangle;
  u64 kq, kg;  // descriptors of stage 0's operands
};

constexpr int WARP_V = 16;  // columns of V of a warp

__device__ __forceinline__ StateDims own_dims(const ChunkForwardParams& p, int hv) {
  return {p.K, values_of_block(p, block_in_head(p, hv, gate_head(p, hv))), p.V};
}
__device__ __forceinline__ void read_state(ScanState& state, const ScanLane& l, u64 base, int flags) {
  read_state_tiles<K, V>(state.s, l.lane, l.v0, base, flags);
}
// Asks L2 for a state that is read soon.
__device__ __forceinline__ void prefetch_state(const ScanLane& l, u64 base, int flags) {
  prefetch_state_tiles<K, V>(l.lane, l.v0, base, flags);
}
__device__ __forceinline__ void write_state(const ScanState& state, const ScanLane& l, u64 base, int flags) {
  write_state_tiles<K, V>(state.s, l.lane, l.v0, base, flags);
}

// Left operand (16 columns of V by 16 channels) of k-tile kk.
__device__ __forceinline__ void state_operand(const ScanState& state, int kk, u32 (&a)[4]) {
  pack_tiles(state.s[2 * kk], state.s[2 * kk + 1], a);
}

__device__ __forceinline__ void decay_state(ScanState& state, int kk, const float4& d) {
  decay_tiles(state.s[2 * kk], state.s[2 * kk + 1], d);
}

// Where a chunk's image is. `full` is its barrier, waited for at `parity`.
struct StageRef {
  u32 slot, base, full, parity;
};

// Transposed products: [i] is x of tokens 8i to 8i + 7, [4 + i] their o.
struct Tokens {
  float xo[8][4];
};

// Of row `row` of a chunk's token scalars the four that this lane's columns of a half need: tokens
// 2t, 2t+1 and 8+2t, 8+2t+1.
__device__ __forceinline__ Columns columns(u32 stage, u32 row, int half, int t) {
  const u32 at = stage + OFFSET(ChunkImage, scalars) + row + 4 * HALF * half + 8 * t;
  const float2 a = load_shared2(at), b = load_shared2(at + 32);
  return {{{a.x, a.y}, {b.x, b.y}}};
}

// What solving a half needs besides x, loaded before x is complete.
struct SolveOperands {
  Columns beta, r;
  u32 inverse[4], v[4];
};

__device__ __forceinline__ void load_values(SolveOperands& s, const ScanLane& l, int half, u32 values) {
  load_matrix4_transposed(s.v, values + half * TILE_BYTES + l.tile);
}
__device__ __forceinline__ void load_solve_operands(SolveOperands& s, const ScanLane& l, u32 stage,
                                                    int half) {
  s.beta = columns(stage, OFFSET(TokenScalars, beta), half, l.t);
  s.r = columns(stage, OFFSET(TokenScalars, k_norm), half, l.t);
  load_matrix4(s.inverse, stage + OFFSET(ChunkImage, inverse) + half * TRIANGLE_BYTES + l.triangle);
}

// A half's 16 x 16 triangle (or the one across) times w, added to tiles x and y.
__device__ __forceinline__ void add_triangle(float (&x)[4], float (&y)[4], const u32 (&w)[4],
                                             const u32 (&b)[4]) {
  mma_bf16(x, w, b[0], b[1]);
  mma_bf16(y, w, b[2], b[3]);
}

// From x of a half (`x` has its tiles) to w = r T beta (v - r x), as the left operand (16 columns of V by 16 tokens)
// of what follows.
__device__ __forceinline__ void solve(const float (&x0)[4], const float (&x1)[4], const SolveOperands& s,
                                      u32 (&w)[4]) {
  float residual[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 pair = s.v[2 * i + (e >> 1)];
      const float value = e & 1 ? bf16_high(pair) : bf16_low(pair);
      residual[i][e] = s.beta.c[i][e & 1] * (value - s.r.c[i][e & 1] * (i ? x1 : x0)[e]);
    }
  }
  multiply_inverse(residual, s.r, s.inverse, w);
}

// o of a chunk times its factor, packed for storing.
struct Output {
  u32 o[2][4];
};

// `o`: tiles of 8 tokens.
__device__ __forceinline__ void pack_output(Output& out, const float (*o)[4], const Columns (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &o[2 * half + (i >> 1)][2 * (i & 1)];
      out.o[half][i] = pack_bf16(x[0] * factor[half].c[i >> 1][0], x[1] * factor[half].c[i >> 1][1]);
    }
  }
}

// To global memory, through shared memory so that rows of 32 bytes are stored whole: lane l stores
// half l % 2 of the rows of tokens l / 2 and 16 + l / 2, of which `left` tells how many are real,
// at `to`. Three functions, so that other work goes between.
__device__ __forceinline__ void write_output(const Output& out, const ScanLane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    store_matrix4_transposed(l.out + half * TILE_BYTES + l.tile, out.o[half]);
}
__device__ __forceinline__ void read_output(uint4 (&rows)[2], const ScanLane& l) {
  sync_warp();
#pragma unroll
  for (int half = 0; half < 2; ++half) rows[half] = load_shared_u4(l.out + half * TILE_BYTES + l.piece);
}
__device__ __forceinline__ void store_output(const uint4 (&rows)[2], unsigned char* to, long long half_step,
                                             int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (left > HALF * half) store_global(to + half * half_step, rows[half]);
  }
}

// One lane's 16 bytes of V of the chunk's tokens l / 2 and 16 + l / 2 into ring slot `slot`; zeros
// past the end.
__device__ __forceinline__ void fetch_values(const ScanLane& l, const unsigned char* from,
                                             long long half_step, const unsigned char* unread_address,
                                             int slot, int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool real = left > HALF * half;
    copy_async16(l.values + (2 * slot + half) * TILE_BYTES + l.piece,
                 real ? from + half * half_step : unread_address, real);
  }
}
