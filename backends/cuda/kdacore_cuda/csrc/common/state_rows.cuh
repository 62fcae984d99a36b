// Where the states of a sequence are read and written, as kdacore/contract/state_rows.py says, and
// which sequences are padding. For the parameters of any kernel that has
//
//   h0, ht           states that are read and written; 0 for none
//   h0_row, ht_row   elements from a row of them to the next
//   reads, writes    the rows of each sequence; 0 where sequence n has row n
//   has_initial      a byte a sequence, 0 where it starts from zeros; 0 if none does
//   null_index       a row number that names no slot, as all negative ones
//
// A few loads, once a sequence and value head.
#pragma once

#include "common/loads.cuh"

// Whether a row number names no slot. Rows are fewer than 2^31, so the lower half of 64 bits has the
// number; that needs fewer registers.
template <class Params>
__device__ __forceinline__ bool is_null(const Params& p, u64 rows, int index, bool wide) {
  const int* at = reinterpret_cast<const int*>(rows) + (wide ? 2 * index : index);
  const int low = at[0], high = wide ? at[1] : low;
  return high < 0 || low == p.null_index;
}

// Whether sequence n has no slot: its tokens are not read, its output and final state are zero.
template <class Params>
__device__ __forceinline__ bool is_padding(const Params& p, int n) {
  return p.reads && is_null(p, p.reads, n, p.flags & FLAG_INDEX64);
}

// A row number, negative if it names no slot.
template <class Params>
__device__ __forceinline__ int slot_at(const Params& p, u64 rows, int index, bool wide) {
  return is_null(p, rows, index, wide) ? -1 : (int)load_index(rows, index, wide);
}

// Bytes of an element of a state.
template <class Params>
__device__ __forceinline__ int state_size(const Params& p) {
  return p.flags & FLAG_STATE_BF16 ? 2 : 4;
}

// Address of the state of head hv in a row of `states`; `matrix` elements a state.
template <class Params>
__device__ __forceinline__ u64 state_at(const Params& p, u64 states, int row, long long row_elements,
                                        int hv, int matrix) {
  return states + state_size(p) * (row * row_elements + (long long)hv * matrix);
}

// The state that a sequence and head start from; 0 for zeros.
template <class Params>
__device__ __forceinline__ u64 initial_state_at(const Params& p, int n, int hv, int matrix) {
  if (!p.h0) return 0;
  int row = n;
  if (p.reads) row = slot_at(p, p.reads, n, p.flags & FLAG_INDEX64);
  if (p.has_initial && !reinterpret_cast<const unsigned char*>(p.has_initial)[n]) row = -1;
  return row < 0 ? 0 : state_at(p, p.h0, row, p.h0_row, hv, matrix);
}

// Where their final state goes; 0 for nowhere.
template <class Params>
__device__ __forceinline__ u64 final_state_at(const Params& p, int n, int hv, int matrix) {
  if (!p.ht) return 0;
  int row = n;
  if (p.writes) row = is_padding(p, n) ? -1 : slot_at(p, p.writes, n, p.flags & FLAG_WRITES64);
  return row < 0 ? 0 : state_at(p, p.ht, row, p.ht_row, hv, matrix);
}
