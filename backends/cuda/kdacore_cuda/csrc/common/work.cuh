// Which sequence and value head a cluster of prefill blocks works on.
#ifndef KDACORE_WORK_CUH
#define KDACORE_WORK_CUH

#include "common/loads.cuh"
#include "generated/params.cuh"

constexpr int SORT_LIMIT = 256;  // longer packs are taken in their own order

// One sequence and value head.
struct Work {
  int n, hv, h;
  long long batch, first;  // batch row, first token
  int length, chunks;
};

// Which sequence is the one in `place`: longest first, so that no long one starts last. Ties keep their order. All threads
// call this; `lengths` is shared memory for SORT_LIMIT integers, `picked` for one.
__device__ __forceinline__ int pick_sequence(const PrefillParams& p, int place, int* lengths, int* picked) {
  if (!p.cu_seqlens || p.N == 1 || p.N > SORT_LIMIT) return place;
  const int n = thread_index();
  const bool wide = p.flags & FLAG_CU64;
  int mine = 0;
  if (n < p.N) lengths[n] = mine = (int)(load_index(p.cu_seqlens, n + 1, wide) - load_index(p.cu_seqlens, n, wide));
  sync_block();
  if (n < p.N) {
    int before = 0;
    for (int m = 0; m < p.N; ++m) before += lengths[m] > mine || (lengths[m] == mine && m < n);
    if (before == place) *picked = n;
  }
  sync_block();
  return *picked;
}

// The sequence and value head number `item`, in chunks of `chunk` tokens.
__device__ __forceinline__ Work make_work(const PrefillParams& p, int item, int chunk, int* lengths, int* picked) {
  Work w;
  w.hv = item % p.HV;
  w.h = w.hv / (p.HV / p.H);
  w.n = pick_sequence(p, item / p.HV, lengths, picked);
  if (p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    w.batch = 0;
    w.first = load_index(p.cu_seqlens, w.n, wide);
    w.length = (int)(load_index(p.cu_seqlens, w.n + 1, wide) - w.first);
  } else {
    w.batch = w.n;
    w.first = 0;
    w.length = (int)p.T;
  }
  w.chunks = (w.length + chunk - 1) / chunk;
  return w;
}

// Row of the first checkpoint of sequence n of a pack.
__device__ __forceinline__ long long first_checkpoint(const PrefillParams& p, const Work& work, int lane) {
  if (!p.cu_seqlens) return work.n * ((p.T + p.ckpt_every - 1) / p.ckpt_every);
  int rows = 0;
  for (int m = lane; m < work.n; m += 32) {
    const bool wide = p.flags & FLAG_CU64;
    const long long length = load_index(p.cu_seqlens, m + 1, wide) - load_index(p.cu_seqlens, m, wide);
    rows += (int)((length + p.ckpt_every - 1) / p.ckpt_every);
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) rows += shuffle_xor(rows, mask);
  return rows;
}

#endif
