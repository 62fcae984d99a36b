// Shared memory of a block of decode.cu, and what a block computes.
#pragma once

#include "common/decode/cluster_exchange.cuh"
#include "common/decode/convolution.cuh"
#include "common/decode/token_places.cuh"
#include "common/recurrent/states.cuh"

#define KDA_CLUSTER_8 __cluster_dims__(8, 1, 1)

// Macros from the host besides those of states.cuh: CLUSTER, the blocks that take a sequence and key head.
constexpr int THREADS = WARPS * 32;
constexpr int SLICES = V / COLUMNS;               // blocks of a value head
constexpr int HEADS_AT_ONCE = CLUSTER / SLICES;  // value heads that a cluster computes side by side
static_assert(THREADS == 2 * K, "a thread for each channel of q and k");
static_assert(HEADS_AT_ONCE * SLICES == CLUSTER, "whole heads");
static_assert(SLICES == 1 || PLAIN, "blocks that share heads take no other ones after them");

// A convolved token: q, k, the decay of each channel, the block's columns of v.
struct StagedToken {
  float q[K], k[K], decay[K], v[COLUMNS];
};
// What a thread needs of its channel from token to token, as Channel has it. Of one token it stays in registers.
struct KeptChannel {
  u32 weight[TAPS], bias, window[HISTORY];
};
struct DecodeMemory {
  StagedToken tokens[2];  // even and odd ones
  float factors[MOST_TOKENS][COLUMNS];  // of the norm: weight act(z)
  float outputs[MOST_TOKENS][COLUMNS];
  KeptChannel channels[ONE ? 1 : 2 * K + COLUMNS];
  float squares[MOST_TOKENS][SLICES];  // sums over the columns of each of the head's blocks
  u64 received;                        // barriers: these have come;
  u64 read;  // in the first block of the cluster: all blocks have read the windows of q and k
};
// Behind it is what a step needs (states.cuh).
KDA_SHARED_BYTES(sizeof(DecodeMemory) + STEP_BYTES);
