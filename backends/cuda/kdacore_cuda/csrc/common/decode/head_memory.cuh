// Shared memory of a block of decode_head.cu, and what its threads read there.
#pragma once

#include "common/decode/norm_inputs.cuh"
#include "common/recurrent/states.cuh"

// Macros from the host besides those of states.cuh: CLUSTER, the blocks that take a sequence and key head, a value head
// each.
constexpr int THREADS = WARPS * 32;
static_assert(THREADS == K && COLUMNS == V, "a thread for each channel, all columns");
static_assert(ONE, "a token a sequence");
// A warp's part of the state lies together: its channels of K, or its rows of V.
constexpr u32 PART_BYTES = K * V * STATE_BYTES / WARPS;

// Sums over K. State [K, V]: those of each warp's channels. State [V, K]: a warp has all channels, so only outputs.
struct HeadSums {
#if V_FIRST
  float o[V];
#else
  float k[WARPS][V], q[WARPS][V];
#endif
};
struct HeadMemory {
  unsigned char state[K * V * STATE_BYTES];       // as in device memory
  float decayed_q[K], decayed_k[K], k[K], decay[K];  // k and q times the decay multiply the state before the token
  float v[V];
  float norms[WARPS][4];  // sums of q q, k k and q k over each warp's channels
  HeadSums sums;
  u64 come[WARPS];  // barriers: each warp's part of the state has come;
  u64 read;         // in the first block of the cluster: all blocks have read the windows of q and k
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
  const Factors f = factors_of(p, sums[0], sums[1]);
  return {f.q, f.k, f.k * beta, sums[2]};
}

template <int N>
__device__ __forceinline__ void read_floats(float (&x)[N], u32 from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = load_shared4(from + 4 * i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}
// Piece i of this lane's state.
__device__ __forceinline__ void read_piece(float (&s)[VECTOR], u32 from, int i) {
  unpack_state(s, load_shared_u4(from + STATE_BYTES * piece_offset(i)));
}
__device__ __forceinline__ u32 first_piece(const LanePosition& at, u32 memory) {
  return memory + STATE_BYTES * first_element(at);
}
