// The caller's states and rows of values, where a lane of a walk has elements of them.
#pragma once

#include "common/state_rows.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"
#include "sm90/gated_delta/walk_block.cuh"

// Of a narrow state: calls f(element, its offset) for this lane's elements that the caller's state has, and g(element)
// for the others.
template <class F, class G>
__device__ __forceinline__ void each_real_element(State& state, const GatedDeltaParams& p, int row, int channel,
                                                  F f, G g) {
  const bool v_first = p.flags & FLAG_V_FIRST;
  const int k_step = opaque(v_first ? 1 : p.V), v_step = opaque(v_first ? p.K : 1);
  const int first = channel * k_step + row * v_step;
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * j + (e & 1), v = 8 * (e >> 1);
      if (channel + k < p.K && row + v < p.V)
        f(state.s[j][e], first + k * k_step + v * v_step);
      else
        g(state.s[j][e]);
    }
  }
}

// From a state of the caller's size at `base`; zero without one, and beyond its channels and values.
__device__ __forceinline__ void read_own_state(State& state, const GatedDeltaParams& p, int row, int t,
                                               u64 base) {
  if constexpr (!NARROW) {
    read_state(state, row, t, base, p.flags);
    if constexpr (HALF_F16) make_opaque(state);
  } else {
    const auto clear = [](float& x) { x = 0.0f; };
    if (!base)
      state = {};
    else if (p.flags & FLAG_STATE_BF16)
      each_real_element(
          state, p, row, 2 * t,
          [&](float& x, int at) { x = bf16_low(reinterpret_cast<const u16*>(base)[at]); }, clear);
    else
      each_real_element(
          state, p, row, 2 * t,
          [&](float& x, int at) { x = reinterpret_cast<const float*>(base)[at]; }, clear);
    make_opaque(state);
  }
}
__device__ __forceinline__ void write_own_state(State& state, const GatedDeltaParams& p, int row, int t,
                                                u64 base) {
  if constexpr (!NARROW) {
    write_state(state, row, t, base, p.flags);
  } else {
    const auto leave = [](float&) {};
    if (p.flags & FLAG_STATE_BF16)
      each_real_element(
          state, p, row, 2 * t,
          [&](float& x, int at) { reinterpret_cast<u16*>(base)[at] = (u16)pack_bf16(x, 0.0f); }, leave);
    else
      each_real_element(
          state, p, row, 2 * t, [&](float& x, int at) { reinterpret_cast<float*>(base)[at] = x; },
          leave);
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
