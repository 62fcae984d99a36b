// Shared memory of a block of decode_head.cu, and what its threads read there.
#pragma once

#include "common/decode/norm_inputs.cuh"
#include "common/recurrent/states.cuh"

#define KDA_CLUSTER_8 __cluster_dims__(8, 1, 1)

// Macros from the host besides those of states.cuh: CLUSTER, the blocks that take a sequence and key head.
constexpr int THREADS = WARPS * 32;
constexpr int SLICES = V / COLUMNS;        // blocks of a value head
constexpr int HEADS = CLUSTER / SLICES;    // value heads of a cluster
constexpr int NORM_LANES = COLUMNS / 4;    // of the first warp, four columns each; the other lanes repeat them
constexpr bool IN_SHARED = SLICES == 1;    // where a block keeps its state
static_assert(THREADS == K && ONE && PARTS == 1, "a thread for each channel, one token");
static_assert(HEADS * SLICES == CLUSTER, "whole heads");
// A warp's part of the state of a whole head lies together: its channels of K, or its rows of V.
constexpr u32 PART_BYTES = K * V * STATE_BYTES / WARPS;

// Sums over K. State [K, V]: those of each warp's channels. State [V, K]: a warp has all channels, so only outputs.
struct HeadSums {
#if V_FIRST
  float o[COLUMNS];
#else
  float k[WARPS][COLUMNS], q[WARPS][COLUMNS];
#endif
};
struct HeadMemory {
  unsigned char state[IN_SHARED ? K * V * STATE_BYTES : 16];  // as in device memory
  float decayed_q[K], decayed_k[K], k[K], decay[K];  // k and q times the decay multiply the state before the token
  float v[COLUMNS];
  float norms[WARPS][4];  // sums of q q, k k and q k over each warp's channels
  HeadSums sums;
  float squares[SLICES];  // of the output, over the columns of each of the head's blocks
  u64 come[WARPS];        // barriers: each warp's part of the state has come;
  u64 received;           // all squares have;
  u64 read;               // in the first block of the cluster: all blocks have read the windows of q and k
};
KDA_SHARED_BYTES(sizeof(HeadMemory));

// Factors of a token: of its output, of k, of k's update, and k . q.
struct HeadFactors {
  float q, k, update, qk;
};
__device__ __forceinline__ HeadFactors head_factors(const DecodeParams& p, u32 memory, float beta) {
  float sums[3] = {};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float4 x = load_shared4(memory + OFFSET(HeadMemory, norms) + 16 * w);
    sums[0] += x.x, sums[1] += x.y, sums[2] += x.z;
  }
  // As factors_of() of the recurrent kernels, but without a branch, so that this is done beside the products.
  const bool normalised = p.flags & FLAG_L2NORM;
  const float norm_q = inverse_norm(sums[0]), norm_k = inverse_norm(sums[1]);
  const float k = normalised ? norm_k : 1.0f;
  return {normalised ? p.scale * norm_q : p.scale, k, k * beta, sums[2]};
}

template <int N>
__device__ __forceinline__ void read_floats(float (&x)[N], u32 from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = load_shared4(from + 4 * i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}
// This lane's part of the state: where it is in shared memory, or the bits themselves.
constexpr int PIECES = IN_SHARED ? 1 : ROWS;
struct Pieces {
  u32 from;
  uint4 bits[PIECES];
};
__device__ __forceinline__ void read_piece(float (&s)[VECTOR], const Pieces& x, int i) {
  if constexpr (IN_SHARED) {
    unpack_state(s, load_shared_u4(x.from + STATE_BYTES * piece_offset(i)));
  } else {
    unpack_state(s, x.bits[i]);
  }
}
// This lane's column among the block's.
__device__ __forceinline__ int own_column(const LanePosition& at) { return at.v % COLUMNS; }
