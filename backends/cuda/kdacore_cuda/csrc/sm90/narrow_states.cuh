// States of heads that are narrower than the tiles in which kernels hold them. A warp's 16 rows of V lie in accumulators:
// tile j has channels 8j + 2t and 8j + 2t + 1 of rows g and g + 8; g = lane / 4, t = lane % 4.
#pragma once

#include "common/ptx.cuh"
#include "generated/constants.cuh"

// The channels and values that the caller's state has of what a kernel computes with, and values from one channel to the
// next in memory, of a state whose channels are rows.
struct StateDims {
  int channels, values, pitch;
};
// Calls f(element, its offset) for this lane's elements that the caller's state has, and g(element) for the others. Its
// first row and channel are `row` and `channel`.
template <int TILES, class S, class F, class G>
__device__ __forceinline__ void each_real_element(S& s, const StateDims& dims, int row, int channel, int flags, F f,
                                                  G g) {
  const bool v_first = flags & FLAG_V_FIRST;
  const int k_step = opaque(v_first ? 1 : dims.pitch), v_step = opaque(v_first ? dims.channels : 1);
  int at = channel * k_step + row * v_step, left = dims.channels - channel;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = e & 1, v = 8 * (e >> 1);
      if (k < left && row + v < dims.values)
        f(s[j][e], at + k * k_step + v * v_step);
      else
        g(s[j][e]);
    }
    // Of one tile after the other, so that offsets of all tiles do not need registers at once.
    at = opaque(at + 8 * k_step);
    left = opaque(left - 8);
  }
}
// From a matrix at `base`; zero beyond its channels and values.
template <int TILES>
__device__ __forceinline__ void read_real_elements(float (&s)[TILES][4], const StateDims& dims, int row, int channel,
                                                   u64 base, int flags) {
  const auto clear = [](float& x) { x = 0.0f; };
  if (flags & FLAG_STATE_BF16)
    each_real_element<TILES>(
        s, dims, row, channel, flags,
        [&](float& x, int at) { x = bf16_low(reinterpret_cast<const u16*>(base)[at]); }, clear);
  else
    each_real_element<TILES>(
        s, dims, row, channel, flags,
        [&](float& x, int at) { x = reinterpret_cast<const float*>(base)[at]; }, clear);
}
template <int TILES>
__device__ __forceinline__ void write_real_elements(const float (&s)[TILES][4], const StateDims& dims, int row,
                                                    int channel, u64 base, int flags) {
  const auto leave = [](const float&) {};
  if (flags & FLAG_STATE_BF16)
    each_real_element<TILES>(
        s, dims, row, channel, flags,
        [&](const float& x, int at) { reinterpret_cast<u16*>(base)[at] = (u16)pack_bf16(x, 0.0f); }, leave);
  else
    each_real_element<TILES>(
        s, dims, row, channel, flags,
        [&](const float& x, int at) { reinterpret_cast<float*>(base)[at] = x; }, leave);
}
