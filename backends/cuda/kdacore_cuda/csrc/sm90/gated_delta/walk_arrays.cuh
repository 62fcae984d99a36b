// The caller's states and rows of values, where a lane of a walk has elements of them.
#pragma once

#include "common/state_rows.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"
#include "sm90/gated_delta/walk_block.cuh"

// From a state of the caller's size at `base`; zero without one, and beyond its channels and values.
__device__ __forceinline__ void read_own_state(State& state, const GatedDeltaParams& p, int row, int t,
                                               u64 base) {
  if constexpr (!NARROW) {
    read_state(state, row, t, base, p.flags);
    if constexpr (HALF_F16) make_opaque(state);
  } else {
    read_narrow_state(state, {p.K, p.V, p.V}, row, t, base, p.flags);
  }
}
__device__ __forceinline__ void write_own_state(State& state, const GatedDeltaParams& p, int row, int t,
                                                u64 base) {
  if constexpr (!NARROW) {
    write_state(state, row, t, base, p.flags);
  } else {
    write_narrow_state(state, {p.K, p.V, p.V}, row, t, base, p.flags);
  }
}

// That of a sequence and value head.
__device__ __forceinline__ void read_initial_state(State& state, const GatedDeltaParams& p, const Item& item,
                                                   int row, const Lane& l) {
  read_own_state(state, p, row, l.t, initial_state_at(p, item.n, item.hv, state_elements(p)));
}

// Where a lane's parts of o or dv go, which store_output stores.
struct ValuePlace {
  OutputPlace place;
  bool real;  // the head has these values
  __device__ __forceinline__ int tokens(int count) const { return real ? count : 0; }
};
// In an array [B, T, HV, V], from a row of all heads on: the warp's values of head hv.
__device__ __forceinline__ ValuePlace value_place(const GatedDeltaParams& p, u64 array, long long row, int hv,
                                                  const Lane& l) {
  const long long row_bytes = value_row_bytes(p);
  return {output_place<PackedRows>(reinterpret_cast<unsigned char*>(array) + row * row_bytes +
                                       2 * (hv * values_of(p) + l.row),
                                   (int)row_bytes, l),
          has_piece(l.row + PIECE * (l.lane & 1), values_of(p))};
}
