// Shared memory of a block of decode_sequences.cu: that of decode_tokens.cu, and what lasts from sequence to sequence.
#pragma once

#include "common/decode/tokens_pass.cuh"

static_assert(IN_TURN && CLUSTER == 1 && !HEAD, "a block has whole heads, and a gate for each channel");

// What a lane needs of its four channels, as float32: their weights, then their biases, by thread.
struct ChannelWeights {
  float taps[4][THREADS][4], biases[THREADS][4];
};
// Where a sequence is: what KeptSequence has, and what is asked for ahead.
struct alignas(16) FoundSequence {
  KeptSequence kept;
  Offset g, beta, z, unused;  // the first token
  u64 start, unused_too;      // the value head's state in the row that is read; 0: none is
};
struct SequencesMemory {
  TokensMemory tokens;  // all but its `kept`: `found` has that here
  FoundSequence found[2];
  alignas(128) unsigned char states[WARPS][PART_BYTES];  // as in device memory, of the next sequence
  ChannelWeights weights;
  float norm[V];  // its weight
};
KDA_SHARED_BYTES(sizeof(SequencesMemory));

// What KEPT() takes for the memory of a sequence: `odd` ones and even ones have places of their own.
__device__ __forceinline__ u32 kept_of(u32 memory, int odd) {
  return memory + OFFSET(SequencesMemory, found) - OFFSET(TokensMemory, kept) + (u32)sizeof(FoundSequence) * odd;
}
// Where FoundSequence is, from there.
__device__ __forceinline__ u32 found_at(u32 kept) { return kept + OFFSET(TokensMemory, kept); }
