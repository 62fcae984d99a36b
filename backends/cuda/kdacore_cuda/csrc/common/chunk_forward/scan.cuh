// A scan warp carries 16 * ROW_TILES columns of the state through the sequence. The state lies
// transposed (V by K) in float32 accumulators, so that its bf16 copy is the next product's left
// operand as it is; tokens are the product's short dimension.
#pragma once

#include "common/chunk_forward/marks.cuh"
#include "common/chunk_forward/sequences.cuh"
#include "common/chunk_forward/shared_memory.cuh"
#include "common/chunk_forward/solve.cuh"
#include "common/warp_arrivals.cuh"
#if WARPGROUP
#include "sm90/wgmma.cuh"
#endif

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

#include "common/chunk_forward/state_decay.cuh"
#include "common/chunk_forward/state_io.cuh"

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

#if WARPGROUP
#include "common/chunk_forward/scan_warpgroup.cuh"
#else
#include "common/chunk_forward/scan_warp.cuh"
#endif

__device__ __forceinline__ ScanLane make_scan_lane(u32 shared, int warp, int rank) {
  ScanLane l;
  l.lane = thread_index() & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.v0 = rank * BLOCK_V + warp * WARP_V;
  l.values = shared + OFFSET(SharedMemory, values) + warp * V_DEPTH * ROW_TILES * TILE_BYTES;
  l.out = shared + OFFSET(SharedMemory, out) + warp * ROW_TILES * TILE_BYTES;
#if WARPGROUP
  l.kq = operand_descriptor(shared + OFFSET(SharedMemory, stages) + OFFSET(ChunkImage, kq), 16, 1024);
  l.kg = operand_descriptor(shared + OFFSET(SharedMemory, stages) + OFFSET(ChunkImage, kg), ROWS_BYTES, 1024);
#endif
  return l;
}

// All chunks of a sequence and value head, this warp's columns of V.
__device__ __forceinline__ void scan_warp(const ChunkForwardParams& p, const SequenceHead& sequence,
                                          u32 shared, int warp, int rank) {
  const ScanLane l = make_scan_lane(shared, warp, rank);
  // This lane's 16 bytes of a chunk's V and o.
  const int token = l.lane >> 1, at_v = l.v0 + 8 * (l.lane & 1);
  const long long v_chunk = 2ll * C * p.v_st, o_chunk = 2ll * C * p.HV * V;
  const unsigned char* v = reinterpret_cast<const unsigned char*>(
      p.v + 2 * (sequence.batch * p.v_sb + (sequence.first + token) * p.v_st + sequence.hv * p.v_sh + at_v));
  unsigned char* o = reinterpret_cast<unsigned char*>(
      p.o + 2 * (((sequence.batch * p.T + sequence.first + token) * p.HV + sequence.hv) * V + at_v));
  const unsigned char* none = reinterpret_cast<const unsigned char*>(p.v);  // a valid address, not read
  int left = sequence.length - token;                                       // real if positive
#pragma unroll
  for (int c = 0; c < V_DEPTH - 1; ++c) {
    fetch_values(l, left > c * C ? v : none, c, left > c * C);
    copy_async_commit();
    v += v_chunk;
  }
  const long long matrix = (long long)K * V * state_size(p);
  ScanState state = {};
  if (const u64 from = initial_state_at(p, sequence.n, sequence.hv, K * V))
    read_state(state, l, from, p.flags);
  u64 ckpt = 0;
  if (p.ckpt_every) ckpt = p.ckpt + (first_checkpoint(p, sequence, l.lane) * p.HV + sequence.hv) * matrix;
  u32 slot = 0, parity = 0;
  int ring = 0, c = 0;
  const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between states written
  const auto mark_from = [&](int step) {
    return p.marks ? next_mark<C>(p, sequence.first, sequence.length, step) : 1 << 30;
  };
  int next = 0, mark = mark_from(0);  // chunks where a state is written
  while (true) {
    u64 to = 0;
    if (c == sequence.chunks) {
      to = final_state_at(p, sequence.n, sequence.hv, K * V);
    } else if (c == next) {
      to = ckpt;
      ckpt += p.ckpt_every ? p.HV * matrix : 0;
      next += block;
    }
    if (to) write_state(state, l, to, p.flags);
    if (c == sequence.chunks) break;
    if (c == mark) {
      each_mark<C>(p, sequence.first, sequence.length, c, sequence.hv, K * V,
                   [&](u64 at, int flags) { write_state(state, l, at, flags); });
      mark = mark_from(c + 1);
    }
    const int stop = next < mark ? next : mark, end = sequence.chunks < stop ? sequence.chunks : stop;
#pragma unroll 1
    for (; c < end; ++c) {
      copy_async_wait<V_DEPTH - 2>();
      sync_warp();
      const u32 stage = shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH;
      Tokens tok = {};
      scan_chunk(state, tok, l,
                 {slot, stage, shared + OFFSET(SharedMemory, full) + 8 * slot, parity,
                  l.values + ring * ROW_TILES * TILE_BYTES});
      const bool ahead = left > (V_DEPTH - 1) * C;
      fetch_values(l, ahead ? v : none, (ring + V_DEPTH - 1) % V_DEPTH, ahead);
      copy_async_commit();
      v += v_chunk;
      store_output(tok, l, columns(stage, OFFSET(TokenScalars, q_factor), l.t), o, left > 0);
      finish_chunk(state);
#if CLUSTER > 1
      warp_arrive_remote(cluster_address(shared + OFFSET(SharedMemory, empty) + 8 * slot, slot % CLUSTER),
                         l.lane);
#else
      warp_arrive(shared + OFFSET(SharedMemory, empty) + 8 * slot, l.lane);
#endif
      o += o_chunk;
      left -= C;
      ring = (ring + 1) % V_DEPTH;
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
  copy_async_wait<0>();
}
