// A warp's 16 rows of a state (V by K) in float32 accumulators, their bf16 copy as left operands,
// and descriptors of the right operands.
#pragma once

#include "common/mma_operands.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/narrow_states.cuh"

constexpr int K_TILES = K / 16;  // channels of the state that one product takes
constexpr int C_TILES = C / 16;

// Tile j: channels 8j + 2t and 8j + 2t + 1 of value rows g and g + 8; g = lane / 4, t = lane % 4.
struct State {
  float s[2 * K_TILES][4];
};
// The same in bf16, as left operands: [kk] is channels 16 kk and on.
struct Operand {
  u32 a[K_TILES][4];
};
// 64 tokens instead of channels.
struct TokenOperand {
  u32 a[C_TILES][4];
};

// Calls f(element, its offset) for every element of a lane whose first row is `row` and whose first channel
// is `channel`; offsets count elements of a [K, V] or [V, K] matrix.
template <int TILES, class F>
__device__ __forceinline__ void each_element(float (&x)[TILES][4], int row, int channel, int flags, F f) {
  const int k_step = opaque(flags & FLAG_V_FIRST ? 1 : V), v_step = opaque(flags & FLAG_V_FIRST ? K : 1);
  const int first = channel * k_step + row * v_step;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(x[j][e], first + (8 * j + (e & 1)) * k_step + 8 * (e >> 1) * v_step);
  }
}

// From the matrix at `base`, zero without one.
template <int TILES>
__device__ __forceinline__ void read_elements(float (&x)[TILES][4], int row, int channel, u64 base,
                                              int flags) {
  if (!base) {
    each_element(x, row, channel, flags, [&](float& y, int) { y = 0.0f; });
  } else if (flags & FLAG_STATE_BF16) {
    each_element(x, row, channel, flags,
                 [&](float& y, int at) { y = bf16_low(reinterpret_cast<const u16*>(base)[at]); });
  } else {
    each_element(x, row, channel, flags,
                 [&](float& y, int at) { y = reinterpret_cast<const float*>(base)[at]; });
  }
}
__device__ __forceinline__ void read_state(State& state, int row, int t, u64 base, int flags) {
  read_elements(state.s, row, 2 * t, base, flags);
}

__device__ __forceinline__ void write_state(State& state, int row, int t, u64 base, int flags) {
  if (flags & FLAG_STATE_BF16) {
    each_element(state.s, row, 2 * t, flags,
                 [&](float& x, int at) { reinterpret_cast<u16*>(base)[at] = (u16)pack_bf16(x, 0.0f); });
  } else {
    each_element(state.s, row, 2 * t, flags,
                 [&](float& x, int at) { reinterpret_cast<float*>(base)[at] = x; });
  }
}

// For a state that a loop over chunks begins with. Unless it is made of bits, the assembler lets the loop wait for all
// products before the state is scaled.
__device__ __forceinline__ void make_opaque(State& state) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      state.s[j][e] = __uint_as_float((u32)opaque((int)__float_as_uint(state.s[j][e])));
  }
}

// The caller's state of a narrow head at `base`; zero without one, and beyond its channels and values.
__device__ __forceinline__ void read_narrow_state(State& state, const StateDims& dims, int row, int t, u64 base,
                                                  int flags) {
  if (base)
    read_real_elements(state.s, dims, row, 2 * t, base, flags);
  else
    state = {};
  make_opaque(state);
}
__device__ __forceinline__ void write_narrow_state(const State& state, const StateDims& dims, int row, int t,
                                                   u64 base, int flags) {
  write_real_elements(state.s, dims, row, 2 * t, base, flags);
}

__device__ __forceinline__ void pack_state(Operand& to, const State& state) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) pack_tiles(state.s[2 * kk], state.s[2 * kk + 1], to.a[kk]);
}

// Sums over 64 tokens, rounded.
__device__ __forceinline__ void pack_rows(TokenOperand& to, const float (&x)[2 * C_TILES][4]) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) pack_tiles(x[2 * kk], x[2 * kk + 1], to.a[kk]);
}

// Multiplies by the chunk's decay of each channel; computed here, not after the next wait.
__device__ __forceinline__ void decay_state(State& state, int t, u32 last) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
    const float2 d = load_shared2(last + 4 * (8 * j + 2 * t));
    float (&x)[4] = state.s[j];
    x[0] *= d.x, x[1] *= d.y, x[2] *= d.x, x[3] *= d.y;
  }
  fence_registers(state.s);
}

// Advances a descriptor; the address never overflows its field, so an addition is enough.
__device__ __forceinline__ u64 step(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Right operand of 64 tokens by 16 channels, of the k-tile kk.
__device__ __forceinline__ u64 along_channels(u64 image, int kk) {
  return step(image, (kk >> 2) * SQUARE_BYTES + (kk & 3) * 32);
}
// Right operand of 16 tokens, those of k-tile kk, by 64 tokens or 128 channels.
__device__ __forceinline__ u64 over_tokens(u64 image, int kk) { return step(image, kk * 16 * IMAGE_ROW); }
