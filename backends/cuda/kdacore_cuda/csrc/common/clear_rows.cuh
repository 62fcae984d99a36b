// Zeros for rows of `o` that no sequence writes, shared out over the threads of a whole grid.
#pragma once

#include "common/loads.cuh"

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
