// The part of a state that a block holds in registers: how it is read from the row of a pool and written.
#pragma once

#include "common/recurrent/token.cuh"

// Macros from the host: K_DIM, WARPS, ROWS, PARTS, MIN_BLOCKS, COLUMNS, V_FIRST, STATE_BF16, MODE
// (memory.cuh).
#if V_FIRST
#include "common/recurrent/state_v_first.cuh"
#else
#include "common/recurrent/state_k_first.cuh"
#endif

// Whether all rows of an array of states start on 16 bytes. The host sends others to the kernel
// with MODE 0.
__device__ __forceinline__ bool whole_rows(u64 base, long long row) {
  return MODE > 0 || ((base | STATE_BYTES * row) & 15) == 0;
}

__device__ __forceinline__ void load_state(uint4 (&bits)[ROWS], u64 from, bool whole) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const u64 piece = from + STATE_BYTES * piece_offset(i);
    bits[i] = whole ? load_global16(piece) : load_state_elements(piece);
  }
}

__device__ __forceinline__ void store_state(const float (&s)[ROWS][VECTOR], u64 to, bool whole) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const u64 at = to + STATE_BYTES * piece_offset(i);
    if (whole) {
      store_state_bits(at, pack_state(s[i]));
    } else {
      store_state_elements(at, pack_state(s[i]));
    }
  }
}

// The row of a sequence's final state, not yet converted.
__device__ __forceinline__ Number load_row_written(const RecurrentParams& p, const Item& it) {
  return load_number_bits(p.writes, (it.n + it.zero) * p.writes_row, p.flags & FLAG_WRITES64);
}
