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
// Blocks of decode_sequences.cu, two on a multiprocessor instead of three: sequences one after another.
constexpr bool IN_TURN = IN_SHARED && MIN_BLOCKS == 2;
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
// What a record has for the channels and columns of a warp's threads.
struct WarpRecord {
  float key[32], decay[32], update[32];
};
constexpr int PASS_RECORDS = 4;  // that are in shared memory together
// A warp's memory once its part of the state is in registers.
struct WarpMemory {
  float factors[32][4];  // of the norm of the warp's output: weight act(z)
  WarpRecord records[PASS_RECORDS];
  WarpSums sums;
};
// A warp's part of the state of a whole head lies together: its channels of K, or its rows of V.
constexpr u32 PART_BYTES = K * V * STATE_BYTES / WARPS;
// Between the passes of a long sequence a block's part is there again, in float32, while the next tokens are staged.
constexpr u32 WAITING_BYTES = K * COLUMNS * 4 / WARPS;
// In turn, the next state comes while the warp's memory is in use, and no state waits between passes.
constexpr u32 AREA_BYTES = !IN_TURN && WAITING_BYTES > sizeof(WarpMemory) ? WAITING_BYTES : sizeof(WarpMemory);
static_assert(!IN_SHARED || IN_TURN || PART_BYTES <= AREA_BYTES, "room for the state");

// A convolved token. k and q times the decay multiply the state before the token.
struct StagedToken {
  float decayed_q[K], decayed_k[K], k[K], decay[K];
  float v[COLUMNS];
  float norms[WARPS][4];  // sums of q q, k k and q k over each warp's channels
};
// Elements from the start of an array to a sequence's first token.
struct TokenPlaces {
  Offset x, g, beta, z, o;
};
struct SequenceStart {
  int from;      // row of the state that is read
  int row;       // that the sequence names, first or alone
  int accepted;  // candidates of an earlier call that precede
  bool padding;  // no slot
  bool reads;    // starts from what the row holds
};
struct Sequence {
  Records records;
  bool keeps;      // windows of candidates
  int candidates;  // row of `conv_windows`; negative: none
  Window before, state;  // the window before the first token; where the state's window is written
};
// What all threads need of the sequence behind the first convolution. The state leaves no registers for it, and with
// three blocks on a multiprocessor most of what is spilled comes back from the L2.
// Flags: records exist, windows of candidates are kept, the sequence has no slot, it starts from what its row holds.
constexpr int KEPT_RECORDS = 1, KEPT_WINDOWS = 2, KEPT_PADDING = 4, KEPT_READS = 8;
struct KeptSequence {
  u64 update, key, decay;  // the first record
  u64 target;              // the value head's state in the first row that is written
  u64 before, state;       // windows
  Offset before_token, before_channel;
  Offset x, o;  // the first token
  int flags, replayed, length, candidates;
  int rows[MOST_TOKENS];  // that are written
};
struct TokensMemory {
  unsigned char areas[WARPS][AREA_BYTES];  // of each warp: its part of the state as in device memory, then WarpMemory
  StagedToken tokens[PASS_TOKENS];
  KeptSequence kept;
  float factors[WARPS][PASS_TOKENS][4];  // of tokens (TokenFactors), for each warp
  float squares[MOST_TOKENS][SLICES];  // of outputs, over the columns of each of the head's blocks
  u64 come[WARPS];       // barriers: each warp's part of the state has come;
  u64 received[PASSES];  // all squares of a pass have;
  u64 read;              // in blocks that write for others: these have read records, and the windows of q and k
};

// opaque(): addresses of threads are computed where they are used, else the compiler has them in local memory.
__device__ __forceinline__ int warp_index() { return opaque(thread_index()) / 32; }
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

// A number that is the same for the block.
__device__ __forceinline__ int load_kept(u32 memory, u32 field) {
  return (int)__float_as_uint(load_shared1(memory + OFFSET(TokensMemory, kept) + field));
}
__device__ __forceinline__ u64 load_kept_address(u32 memory, u32 field) {
  const float2 x = load_shared2(memory + OFFSET(TokensMemory, kept) + field);
  return (u64)__float_as_uint(x.y) << 32 | __float_as_uint(x.x);
}
#define KEPT(memory, field) load_kept(memory, OFFSET(KeptSequence, field))
#define KEPT_ADDRESS(memory, field) load_kept_address(memory, OFFSET(KeptSequence, field))

// Factors of a token: of its output, of k, of k's update, and k . q. The same arithmetic as in decode_head.cu.
struct TokenFactors {
  float q, k, update, qk;
};
__device__ __forceinline__ u32 factors_of_token(u32 memory, int slot) {
  return memory + OFFSET(TokensMemory, factors) + 16 * (PASS_TOKENS * warp_index() + slot);
}
// By the lane whose number modulo the tokens of a pass is the token's.
__device__ __forceinline__ void keep_factors(const DecodeRecordsParams& p, u32 memory, float beta) {
  const int slot = thread_index() % PASS_TOKENS;
  float sums[3] = {};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float4 x = load_shared4(staged_token(memory, slot) + OFFSET(StagedToken, norms) + 16 * w);
    sums[0] += x.x, sums[1] += x.y, sums[2] += x.z;
  }
  const Factors f = factors_of(p, sums[0], sums[1]);
  if (thread_index() % 32 < PASS_TOKENS)
    store_shared(factors_of_token(memory, slot), __float_as_uint(f.q), __float_as_uint(f.k),
                 __float_as_uint(f.k * beta), __float_as_uint(sums[2]));
  sync_warp();
}
__device__ __forceinline__ TokenFactors kept_factors(u32 memory, int slot) {
  const float4 x = load_shared4(factors_of_token(memory, slot));
  return {x.x, x.y, x.z, x.w};
}

// Where a record has what the thread with that index owns: its channel or column.
__device__ __forceinline__ u32 record_place(u32 memory, int record, int thread, u32 part) {
  return area_of(memory, thread / 32) + OFFSET(WarpMemory, records) + (u32)sizeof(WarpRecord) * record + part +
         4 * (thread % 32);
}
