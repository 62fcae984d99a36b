// Zeros for rows of `o` that no sequence writes, shared out over the threads of a whole grid.
#pragma once

#include "common/state_rows.cuh"

// This thread's number among those of a grid that clear, and how many they are.
struct Share {
  u32 thread, threads;
};

// Zeros to `from` up to `to`, both multiples of 16 bytes.
__device__ __forceinline__ void clear_bytes(u64 from, u64 to, const Share& own) {
#pragma unroll 1
  for (u64 at = from + 16ull * own.thread; at < to; at += 16ull * own.threads)
    store_global(reinterpret_cast<void*>(at), make_uint4(0, 0, 0, 0));
}

// Rows of `o` beyond a pack's last offset, if they are to be zero; `row_bytes` of all its heads.
template <class Params>
__device__ __forceinline__ void clear_tail(const Params& p, long long row_bytes, const Share& own) {
  if (!(p.flags & FLAG_CLEAR_TAIL)) return;
  const long long end = load_index(p.cu_seqlens, p.N, p.flags & FLAG_CU64);
  clear_bytes(p.o + end * row_bytes, p.o + p.T * row_bytes, own);
}

// Those, and all rows of sequences without a slot. All lanes of a warp together.
template <class Params>
__device__ __forceinline__ void clear_unused_rows(const Params& p, long long row_bytes, const Share& own) {
  clear_tail(p, row_bytes, own);
  if (!p.reads) return;
  const bool wide = p.flags & FLAG_CU64;
#pragma unroll 1
  for (int first = 0; first < p.N; first += 32) {
    const int n = first + (thread_index() & 31), own_padding = n < p.N && is_padding(p, n);
    int any = own_padding;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) any += shuffle_xor(any, mask);
#pragma unroll 1
    for (int i = 0; any && i < 32; ++i) {
      if (!shuffle(own_padding, i)) continue;
      --any;
      const int m = first + i;
      const long long from = p.cu_seqlens ? load_index(p.cu_seqlens, m, wide) : m * p.T;
      const long long to = p.cu_seqlens ? load_index(p.cu_seqlens, m + 1, wide) : from + p.T;
      clear_bytes(p.o + from * row_bytes, p.o + to * row_bytes, own);
    }
  }
}
