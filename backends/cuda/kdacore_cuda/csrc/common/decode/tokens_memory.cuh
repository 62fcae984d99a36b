// Shared memory of a block of decode_tokens.cu, and what its threads read there.
#pragma once

#include "common/decode/decode_records.cuh"
#include "common/decode/norm_inputs.cuh"
#include "common/recurrent/records.cuh"

#define KDA_CLUSTER_8 __cluster_dims__(8, 1, 1)

// Macros from the host besides those of states.cuh: CLUSTER, the blocks that take a sequence and key head.
constexpr int THREADS = WARPS * 32;
constexpr int SLICES = V / COLUMNS;        // blocks of a value head
constexpr int HEADS = CLUSTER / SLICES;    // value heads of a cluster
constexpr int NORM_LANES = COLUMNS / 4;    // of a warp, four columns each; the other lanes repeat them
constexpr bool IN_SHARED = SLICES == 1;    // where the state is until all of it has come
static_assert(RECORDS && THREADS == K && ONE && PARTS == 1, "a thread for each channel");
static_assert(HEADS * SLICES == CLUSTER, "whole heads");

constexpr int MOST_TOKENS = 16;           // of a sequence
constexpr int PASS_TOKENS = WARPS;        // that are staged together: each warp has the output of one
constexpr int PASSES = MOST_TOKENS / PASS_TOKENS;

// What the warps tell each other of a pass's tokens. State [K, V]: sums over K of each warp's channels. State [V, K]: a
// warp has all channels of its rows of V, so only their outputs.
struct WarpSums {
#if V_FIRST
  float o[PASS_TOKENS][COLUMNS / WARPS];
#else
  float k[PASS_TOKENS][COLUMNS], q[PASS_TOKENS][COLUMNS];
#endif
};
// A warp's memory once its part of the state is in registers: what a record needs first, then the sums.
struct WarpMemory {
  float factors[32][4];  // of the norm of the warp's output: weight act(z)
  union {
    WarpSums sums;
    unsigned char record[K * 12];
  };
};
// A warp's part of the state of a whole head lies together: its channels of K, or its rows of V.
constexpr u32 PART_BYTES = K * V * STATE_BYTES / WARPS;
// Between the passes of a long sequence a block's part is there again, in float32, while the next tokens are staged.
constexpr u32 WAITING_BYTES = K * COLUMNS * 4 / WARPS;
constexpr u32 AREA_BYTES = WAITING_BYTES > sizeof(WarpMemory) ? WAITING_BYTES : sizeof(WarpMemory);
static_assert(!IN_SHARED || PART_BYTES <= AREA_BYTES, "room for the state");

// A convolved token. k and q times the decay multiply the state before the token.
struct StagedToken {
  float decayed_q[K], decayed_k[K], k[K], decay[K];
  float v[COLUMNS];
  float norms[WARPS][4];  // sums of q q, k k and q k over each warp's channels
};
struct TokensMemory {
  unsigned char areas[WARPS][AREA_BYTES];  // of each warp: its part of the state as in device memory, then WarpMemory
  StagedToken tokens[PASS_TOKENS];
  float squares[MOST_TOKENS][SLICES];  // of outputs, over the columns of each of the head's blocks
  u64 come[WARPS];       // barriers: each warp's part of the state has come;
  u64 received[PASSES];  // all squares of a pass have;
  u64 read;              // in blocks that write for others: these have read records, and the windows of q and k
};
KDA_SHARED_BYTES(sizeof(TokensMemory));

__device__ __forceinline__ int warp_index() { return thread_index() / 32; }
__device__ __forceinline__ u32 area_of(u32 memory, int warp) {
  return memory + OFFSET(TokensMemory, areas) + AREA_BYTES * warp;
}
__device__ __forceinline__ u32 sums_of(u32 memory, int warp) {
  return area_of(memory, warp) + OFFSET(WarpMemory, sums);
}
// Where this lane has the factors of the norm.
__device__ __forceinline__ u32 own_factors(u32 memory) {
  return area_of(memory, warp_index()) + 16 * (thread_index() % 32);
}
__device__ __forceinline__ u32 staged_token(u32 memory, int slot) {
  return memory + OFFSET(TokensMemory, tokens) + (u32)sizeof(StagedToken) * slot;
}

template <int N>
__device__ __forceinline__ void read_floats(float (&x)[N], u32 from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = load_shared4(from + 4 * i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// Factors of a token: of its output, of k, of k's update, and k . q. The same arithmetic as in decode_head.cu.
struct TokenFactors {
  float q, k, update, qk;
};
__device__ __forceinline__ TokenFactors token_factors(const DecodeRecordsParams& p, u32 staged, float beta) {
  float sums[3] = {};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float4 x = load_shared4(staged + OFFSET(StagedToken, norms) + 16 * w);
    sums[0] += x.x, sums[1] += x.y, sums[2] += x.z;
  }
  const Factors f = factors_of(p, sums[0], sums[1]);
  return {f.q, f.k, f.k * beta, sums[2]};
}
// Those of the token that a lane has computed.
__device__ __forceinline__ TokenFactors factors_from(const TokenFactors& f, int lane) {
  return {shuffle(f.q, lane), shuffle(f.k, lane), shuffle(f.update, lane), shuffle(f.qk, lane)};
}
