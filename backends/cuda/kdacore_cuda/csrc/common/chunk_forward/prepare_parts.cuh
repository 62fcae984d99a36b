// What a prepare warp loads, and what it leaves in shared memory. How it gets from one to the other
// depends on the gates: prepare_bounded.cuh, prepare_unbounded.cuh.
#pragma once

#include "common/chunk_forward/sequences.cuh"
#include "common/chunk_forward/shared_memory.cuh"
#include "common/chunk_forward/tokens.cuh"

// Chooses functions for bounded gates or for others.
template <bool BOUNDED_GATES>
struct Form {};

constexpr int SLICES = K / 32;
constexpr int UNROLL = SLICE_UNROLL;

// Addresses of this lane's channels of token 2p of the next chunk to load; byte strides between
// tokens.
struct Source {
  const unsigned char *k, *q, *g;
  u64 beta;
  int k_token, q_token, g_token, beta_token;
};

// To this warp's next chunk.
__device__ __forceinline__ void advance(Source& s) {
  constexpr long long STEP = PREPARE_WARPS * CLUSTER * C;
  s.k += STEP * s.k_token;
  s.q += STEP * s.q_token;
  s.g += STEP * s.g_token;
  s.beta += STEP * s.beta_token;
}

// The next load, into the same registers as soon as they have been used: slice `slice` of the chunk
// at `from`, of which this lane has `left` tokens. Registers of tokens past the end keep their
// values.
struct NextLoad {
  const Source& from;
  int slice, left;
};

__device__ __forceinline__ void load_gate(Raw& raw, const NextLoad& r) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < G_VECTORS; ++j) {
      load_sixteen(raw.g[i][j], r.from.g + i * r.from.g_token + 64 * G_VECTORS * r.slice + 16 * j,
                   i < r.left);
    }
  }
}

__device__ __forceinline__ void load_rows(Raw& raw, const NextLoad& r) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_sixteen(raw.k[i], r.from.k + i * r.from.k_token + 64 * r.slice, i < r.left);
    load_sixteen(raw.q[i], r.from.q + i * r.from.q_token + 64 * r.slice, i < r.left);
  }
}

// Sums over channels: both triangles, the diagonal and squares.
struct Products {
  float tile[4][4];  // bounded gates: keys against even and odd tokens, then queries; else by dyadic level
  float diagonal[2];  // unbounded gates: q k, by token
  float k_square[2], q_square[2];
};

// Where this lane's 8 channels of `slice` go in an operand half, for token i.
__device__ __forceinline__ u32 piece_offset(const Lane& l, int i, int slice) {
  return swizzled(2 * l.p + i, (slice & 1) * 4 + l.t);
}

// Decay of the whole chunk, in the order scan lanes read it: 4 floats (channels 2t, 2t+1, 2t+8,
// 2t+9) a lane and 16 channels.
__device__ __forceinline__ void store_decay(u32 stage, const Lane& l, int slice, const float (&decay)[8]) {
  if (l.g) return;
  const u32 to = stage + OFFSET(ChunkImage, decay) + 4 * (32 * slice + 16 * (l.t >> 1) + 2 * (l.t & 1));
#pragma unroll
  for (int e = 0; e < 8; e += 2) store_shared(to + 8 * e, decay[e], decay[e + 1]);
}
