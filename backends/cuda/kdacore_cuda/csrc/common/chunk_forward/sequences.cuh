// A sequence and value head, and which sequence a cluster of blocks takes.
#pragma once

#include "common/state_rows.cuh"
#include "generated/chunk_forward_params.cuh"

constexpr int SORT_LIMIT = 256;  // packs of more sequences are processed in order

// One sequence and value head.
struct SequenceHead {
  int n, hv, h;
  long long batch, first;  // batch row, first token
  int length, chunks;
};

// Tokens of sequence n.
__device__ __forceinline__ int tokens_of(const ChunkForwardParams& p, int n) {
  if (p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    return (int)(load_index(p.cu_seqlens, n + 1, wide) - load_index(p.cu_seqlens, n, wide));
  }
  return (int)p.T;
}
// Those that are read: none of padding.
__device__ __forceinline__ int length_of(const ChunkForwardParams& p, int n) {
  return is_padding(p, n) ? 0 : tokens_of(p, n);
}

// The sequence that is number `place` in descending order of length, so that no long one starts
// last. Ties keep their order. All threads call this; `lengths` is shared memory for SORT_LIMIT
// integers, `picked` for one.
__device__ __forceinline__ int sequence_by_length(const ChunkForwardParams& p, int place, int* lengths,
                                                  int* picked) {
  if (!p.cu_seqlens || p.N == 1 || p.N > SORT_LIMIT) return place;
  const int n = thread_index();
  int own_length = 0;
  if (n < p.N) lengths[n] = own_length = length_of(p, n);
  sync_block();
  if (n < p.N) {
    int before = 0;
    for (int m = 0; m < p.N; ++m) before += lengths[m] > own_length || (lengths[m] == own_length && m < n);
    if (before == place) *picked = n;
  }
  sync_block();
  return *picked;
}

// The head of q and k of value head hv. Without groups nothing is divided.
__device__ __forceinline__ int key_head(const ChunkForwardParams& p, int hv) {
  return p.H != p.HV ? hv / (opaque(p.HV) / p.H) : hv;
}

// Sequence n and value head hv, in chunks of `chunk` tokens.
__device__ __forceinline__ SequenceHead make_sequence_head(const ChunkForwardParams& p, int n, int hv,
                                                           int chunk) {
  SequenceHead w;
  w.n = n;
  w.hv = hv;
  w.h = key_head(p, hv);
  w.batch = n;
  w.first = 0;
  if (p.cu_seqlens) {
    w.batch = 0;
    w.first = load_index(p.cu_seqlens, n, p.flags & FLAG_CU64);
  }
  w.length = opaque(length_of(p, n));
  w.chunks = (w.length + chunk - 1) / chunk;
  return w;
}

// Row of the first checkpoint of sequence n of a pack.
__device__ __forceinline__ long long first_checkpoint(const ChunkForwardParams& p,
                                                      const SequenceHead& sequence, int lane) {
  if (!p.cu_seqlens) return sequence.n * ((p.T + p.ckpt_every - 1) / p.ckpt_every);
  int rows = 0;
  for (int m = lane; m < sequence.n; m += 32)
    rows += (int)((tokens_of(p, m) + p.ckpt_every - 1ll) / p.ckpt_every);
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) rows += shuffle_xor(rows, mask);
  return rows;
}
