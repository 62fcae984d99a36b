// The order in which prepare computes units: the first chunks of all sequences, then their second
// ones, and so on, so that whoever walks the chunks of a sequence waits for few. Units are dealt out
// in turns to the places of the grid where one is computed; a sequence's last chunks fill no more
// places than there are.
#pragma once

#include "generated/chunk_backward_params.cuh"
#include "sm90/chunk_forward/segments/flags.cuh"

// Position in that order. In a pack `chunk` is the chunk of the position before, and `before` the
// number of units with an earlier chunk.
struct Position {
  int at, chunk, before;
};

// One unit, and who reads it.
struct OrderedUnit {
  Unit u;
  u32 readers;
};

// Calls f(n, is there chunk `chunk` in sequence n?) for every lane's sequences, 32 at a time.
template <class F>
__device__ __forceinline__ void each_sequence(const ChunkBackwardParams& p, int N, int chunk, F f) {
#pragma unroll 1
  for (int first = 0; first < N; first += 32) {
    const int n = first + (thread_index() & 31);
    f(n, n < N && find_sequence(p, n < N ? n : 0).chunks > chunk);
  }
}

// Sequence and value head of a position in a pack, which it moves to its chunk. False past the end.
__device__ __forceinline__ bool find_in_pack(const ChunkBackwardParams& p, int N, int HV, Position& x, int& n,
                                             int& hv) {
#pragma unroll 1
  for (;; ++x.chunk) {
    int active = 0;
    each_sequence(p, N, x.chunk, [&](int, bool yes) { active += count_bits(warp_ballot(yes)); });
    if (!active) return false;
    if (x.at - x.before < active * HV) break;
    x.before += active * HV;
  }
  const int rank = (x.at - x.before) / HV;
  hv = x.at - x.before - rank * HV;
  n = 0;
  int earlier = 0;
  each_sequence(p, N, x.chunk, [&](int own, bool yes) {
    const u32 bits = warp_ballot(yes), below = (1u << (thread_index() & 31)) - 1;
    const bool found = yes && earlier + count_bits(bits & below) == rank;
    n = (int)warp_max(found ? (u32)own : (u32)n);
    earlier += count_bits(bits);
  });
  return true;
}

// The unit at a position, with 0 rows past the end. All lanes of a warp call it.
__device__ __forceinline__ OrderedUnit find_ordered_unit(const ChunkBackwardParams& p, Position& x) {
  OrderedUnit found = {};
  // What does not change between units is computed anew: there are no registers to keep it.
  const int HV = opaque(p.HV), N = opaque(p.N);
  int n, hv;
  if (p.cu_seqlens) {
    if (!find_in_pack(p, N, HV, x, n, hv)) return found;
  } else {
    const u32 items = (u32)(N * HV);
    x.chunk = (int)((u32)x.at / items);
    if (x.chunk >= p.NT) return found;
    const int item = x.at - x.chunk * (int)items;
    n = (int)((u32)item / (u32)HV);
    hv = item - n * HV;
  }
  const Sequence s = find_sequence(p, n);
  const int left = s.length - x.chunk * C;
  Unit& u = found.u;
  u.n = n;
  u.hv = hv;
  u.h = p.H == HV ? hv : (int)((u32)hv / ((u32)HV / (u32)p.H));
  u.rows = left < C ? left : C;
  u.batch = s.batch;
  u.first = s.first + x.chunk * C;
  u.at = (long long)(s.slot + x.chunk) * HV + hv;
  found.readers = readers_of(x.chunk, s.chunks, opaque(p.segment), p.output_blocks);
  return found;
}
