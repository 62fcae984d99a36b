// What a scan warp has in registers, and what it loads and stores of a chunk.
#pragma once

#include "common/chunk_forward/marks.cuh"
#include "common/chunk_forward/sequences.cuh"
#include "common/chunk_forward/shared_memory.cuh"
#include "common/chunk_forward/solve.cuh"
#include "common/chunk_forward/state_decay.cuh"
#include "common/mma_operands.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/operand_descriptor.cuh"

constexpr int K_TILES = K / 16;

struct ScanState {
  float s[ROW_TILES][2 * K_TILES][4];
};

struct ScanLane {
  int lane, g, t;
  int v0;           // first column of V of this warp
  u32 values, out;  // this warp's rings in shared memory
  u64 kq, kg;       // descriptors of stage 0's operands
};

constexpr int WARP_V = 16 * ROW_TILES;  // columns of V of a warp

// Calls f(element, its offset) for every state element; offsets count elements of a [K, V] or [V,
// K] matrix.
template <class F>
__device__ __forceinline__ void each_element(ScanState& state, const ScanLane& l, int flags, F f) {
  const int k_step = opaque(flags & FLAG_V_FIRST ? 1 : V), v_step = opaque(flags & FLAG_V_FIRST ? K : 1);
  const int first = 2 * l.t * k_step + (l.v0 + l.g) * v_step;
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
    for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        f(state.s[m][j][e], first + (8 * j + (e & 1)) * k_step + (16 * m + 8 * (e >> 1)) * v_step);
      }
    }
  }
}

// Reads and writes the scanned state.
__device__ __forceinline__ void read_state(ScanState& state, const ScanLane& l, u64 base, int flags) {
  if (flags & FLAG_STATE_BF16) {
    each_element(state, l, flags,
                 [&](float& x, int at) { x = bf16_low(reinterpret_cast<const u16*>(base)[at]); });
  } else {
    each_element(state, l, flags, [&](float& x, int at) { x = reinterpret_cast<const float*>(base)[at]; });
  }
}

__device__ __forceinline__ void write_state(ScanState& state, const ScanLane& l, u64 base, int flags) {
  if (flags & FLAG_STATE_BF16) {
    each_element(state, l, flags,
                 [&](float& x, int at) { reinterpret_cast<u16*>(base)[at] = (u16)pack_bf16(x, 0.0f); });
  } else {
    each_element(state, l, flags, [&](float& x, int at) { reinterpret_cast<float*>(base)[at] = x; });
  }
}

// Left operand (16 columns of V by 16 channels) of k-tile kk.
__device__ __forceinline__ void state_operand(const ScanState& state, int m, int kk, u32 (&a)[4]) {
  pack_tiles(state.s[m][2 * kk], state.s[m][2 * kk + 1], a);
}

__device__ __forceinline__ void decay_state(ScanState& state, int m, int kk, const float4& d) {
  decay_tiles(state.s[m][2 * kk], state.s[m][2 * kk + 1], d);
}

// Where a chunk's image is. `full` is its barrier, waited for at `parity`; `values` the chunk's V.
struct StageRef {
  u32 slot, base, full, parity, values;
};

// Transposed products of one tile: [0], [1] are x = (k 2^G) S for tokens 0-7 and 8-15, [2], [3] are
// o = (q 2^G) S.
struct Tokens {
  float xo[ROW_TILES][4][4];
};

// Of row `row` of a chunk's token scalars the four that this lane's columns need: tokens 2t, 2t+1
// and 8+2t, 8+2t+1.
__device__ __forceinline__ Columns columns(u32 stage, u32 row, int t) {
  const float2 a = load_shared2(stage + OFFSET(ChunkImage, scalars) + row + 8 * t);
  const float2 b = load_shared2(stage + OFFSET(ChunkImage, scalars) + row + 8 * t + 32);
  return {{{a.x, a.y}, {b.x, b.y}}};
}

// What solving a chunk needs besides x, loaded before x is complete.
struct SolveOperands {
  Columns beta, beta_r, r;
  u32 inverse[4], qk[4], v[ROW_TILES][4];
};

// Offset, for this lane, of the 16 x 16 tiles T and Aqk as right operands.
__device__ __forceinline__ u32 triangle_row(const ScanLane& l) {
  return (l.lane >> 4) * 128 + (l.lane & 7) * 16 + (l.lane >> 3 & 1) * 256;
}

__device__ __forceinline__ void load_solve_operands(SolveOperands& s, const ScanLane& l, u32 stage,
                                                    u32 values) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    load_matrix4_transposed(
        s.v[m], values + m * TILE_BYTES + tile_offset((l.lane >> 4) * 8 + (l.lane & 7), l.lane >> 3 & 1));
  }
  s.beta = columns(stage, OFFSET(TokenScalars, beta), l.t);
  s.beta_r = columns(stage, OFFSET(TokenScalars, beta_k_norm), l.t);
  s.r = columns(stage, OFFSET(TokenScalars, k_norm), l.t);
  load_matrix4(s.inverse, stage + OFFSET(ChunkImage, inverse) + triangle_row(l));
  load_matrix4(s.qk, stage + OFFSET(ChunkImage, qk) + triangle_row(l));
}

// From x to w = r T beta (v - r x), as the left operand (16 columns of V by 16 tokens) of what
// follows; o += Aqk w.
__device__ __forceinline__ void solve(Tokens& tok, int m, const SolveOperands& s, u32 (&w)[4]) {
  float residual[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 pair = s.v[m][2 * i + (e >> 1)];
      const float value = e & 1 ? bf16_high(pair) : bf16_low(pair);
      residual[i][e] = s.beta.c[i][e & 1] * value - s.beta_r.c[i][e & 1] * tok.xo[m][i][e];
    }
  }
  multiply_inverse(residual, s.r, s.inverse, w);
  mma_bf16(tok.xo[m][2], w, s.qk[0], s.qk[1]);
  mma_bf16(tok.xo[m][3], w, s.qk[2], s.qk[3]);
}

// o times its factor to global memory, through shared memory so that rows of 32 bytes are stored
// whole: lane l stores half l % 2 of the row of token l / 2, at `to`, if that token is real.
__device__ __forceinline__ void store_output(const Tokens& tok, const ScanLane& l, const Columns& factor,
                                             unsigned char* to, bool real) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &tok.xo[m][2 + (i >> 1)][2 * (i & 1)];
      packed[i] = pack_bf16(x[0] * factor.c[i >> 1][0], x[1] * factor.c[i >> 1][1]);
    }
    store_matrix4_transposed(
        l.out + m * TILE_BYTES + tile_offset((l.lane >> 4) * 8 + (l.lane & 7), l.lane >> 3 & 1), packed);
  }
  sync_warp();
  if (real) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      store_global(to + 32 * m,
                   load_shared_u4(l.out + m * TILE_BYTES + tile_offset(l.lane >> 1, l.lane & 1)));
    }
  }
}

// One lane's 16 bytes of V (each tile) of the chunk's token l / 2 into ring slot `slot`; zeros past
// the end.
__device__ __forceinline__ void fetch_values(const ScanLane& l, const unsigned char* from, int slot,
                                             bool real) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    const u32 to = l.values + (slot * ROW_TILES + m) * TILE_BYTES + tile_offset(l.lane >> 1, l.lane & 1);
    copy_async16(to, from + 32 * m, real);
  }
}

// Chooses functions that multiply by warpgroup instructions, or by those of a warp on its own.
template <bool BY_WARPGROUPS>
struct ProductsBy {};
