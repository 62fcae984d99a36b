// Common to the three backward kernels: units of 64 tokens, and the layout of the workspace.
//
// A unit is one chunk of one sequence and value head. Its place in every workspace array is slot *
// HV + hv; the slots of sequence n begin at first_slot(n), so that the scan finds them without
// looking at other sequences. A slot that no sequence fills is never read or written.
//
// Matrices in the workspace are byte images of what shared memory holds: bfloat16, rows of 128
// bytes, 16-byte pieces swizzled by row, so that a bulk copy loads an operand of a warpgroup
// product. Rows of 128 channels (or of a state) are two images one after the other, 64 columns
// each.
//
//   kg, qg, w   [64 tokens, 128 channels]   two images of 8 KB
//   kg_low      the same                    the rounding error of kg. Where keys are nearly equal, dr
//                                           consists of differences between neighbouring tokens'
//                                           kg dS, and rounding kg alone would cost 1.5e-2 of dv
//   u, dr       [128 values, 64 tokens]     one image of 16 KB, transposed; the first half of V is
//                                           its first 8 KB
//   aqk, inv    [64 tokens i, 64 tokens j]  one image of 8 KB
//   h, dh       [128 values, 128 channels]  two images of 16 KB: the transposed state at the chunk's
//                                           start, the transposed gradient of the state at its end
//   last        float [3][128]              decays 2^(sum of steps) of the chunk, of its first half,
//                                           of its second half
//   rows        float [3][64]               beta as the recurrence uses it (0 past the end), 1 / |q|,
//                                           1 / |k| (1 without l2norm)
#pragma once

#include "common/fast_division.cuh"
#include "common/loads.cuh"
#include "common/swizzle.cuh"
#include "generated/chunk_backward_params.cuh"

// Macro from the host: SIZE, 64 for kernels of the gated delta rule whose heads have no more channels and values; none:
// 128.
#ifndef SIZE
#define SIZE 128
#endif
constexpr int K = SIZE;
constexpr int V = SIZE;
constexpr int C = 64;
constexpr int HALF = 32;  // tokens under one exponent anchor

constexpr u32 IMAGE_ROW = 128;  // `swizzled`

// Images: bfloat16 rows of 128 bytes, 16-byte pieces swizzled by row.
struct SquareImage {  // 64 x 64
  u16 x[C][64];
};
struct TileImage {  // 64 tokens by K channels, or V values by 64 tokens
  SquareImage half[K / 64];
};
struct StateImage {  // V values by K channels
  u16 half[K / 64][V][64];
};
struct ChunkDecays {
  float chunk[K], first_half[K], second_half[K];
};
struct RowScalars {
  float beta[C], q_norm[C], k_norm[C];
};
constexpr u32 SQUARE_BYTES = sizeof(SquareImage), TILE_BYTES = sizeof(TileImage),
              STATE_BYTES = sizeof(StateImage);
constexpr u32 LAST_BYTES = sizeof(ChunkDecays), ROWS_BYTES = sizeof(RowScalars);

// One sequence.
struct Sequence {
  long long batch, first;  // batch row, first token in it
  int length, chunks;
  int slot;  // of its first chunk
};

template <class Params>
__device__ __forceinline__ Sequence find_sequence(const Params& p, int n) {
  Sequence s;
  if (!p.cu_seqlens) {
    s.batch = n;
    s.first = 0;
    s.length = (int)p.T;
    s.chunks = p.NT;
    s.slot = n * p.NT;
    return s;
  }
  const bool wide = p.flags & FLAG_CU64;
  s.batch = 0;
  s.first = load_index(p.cu_seqlens, n, wide);
  s.length = (int)(load_index(p.cu_seqlens, n + 1, wide) - s.first);
  s.chunks = (s.length + C - 1) / C;
  s.slot = (int)(s.first / C) + n;
  return s;
}

// The last of a pack's sequences n to beyond - 1 whose slots begin at or before this one.
template <class Params>
__device__ __forceinline__ int sequence_of_slot(const Params& p, int slot, int n, int beyond) {
  const bool wide = p.flags & FLAG_CU64;
  while (beyond - n > 1) {
    const int middle = (n + beyond) >> 1;
    if (load_index(p.cu_seqlens, middle, wide) / C + middle <= slot)
      n = middle;
    else
      beyond = middle;
  }
  return n;
}

// One chunk of one sequence and value head. `rows` is 0 where no sequence fills the slot.
struct Unit {
  int n, hv, h, rows;
  long long batch, first;  // batch row, first token in it
  long long at;            // place in the workspace
};

// Unit `index` = slot * HV + hv, of a sequence from n to beyond - 1. Every thread may call it; no
// data is exchanged.
__device__ __forceinline__ Unit find_unit(const ChunkBackwardParams& p, long long index, int n, int beyond) {
  Unit u;
  u.at = index;
  const int slot = divide((int)index, p.hv_factor, p.hv_shift);  // as many as a grid has blocks: 31 bits
  u.hv = (int)index - slot * p.HV;
  u.h = p.H == p.HV ? u.hv : (int)((u32)u.hv / ((u32)p.HV / (u32)p.H));
  n = p.cu_seqlens ? sequence_of_slot(p, slot, n, beyond) : divide(slot, p.chunks_factor, p.chunks_shift);
  u.n = n;
  const Sequence s = find_sequence(p, n);
  const int begin = (slot - s.slot) * C, left = s.length - begin;
  u.batch = s.batch;
  u.first = s.first + begin;
  u.rows = left <= 0 ? 0 : left < C ? left : C;
  return u;
}
__device__ __forceinline__ Unit find_unit(const ChunkBackwardParams& p, long long index) {
  return find_unit(p, index, 0, p.N);
}
