// A warp's 16 columns of a state from and to device memory, from and to accumulators. Those hold the state
// transposed: of tile j, lane (g, t) = (lane / 4, lane % 4) has
//
//   x[0], x[1]: channels 8j + 2t, 8j + 2t + 1 of column g      x[2], x[3]: the same of column g + 8
//
// A layout has code of its own, in which all offsets but one are constants: a short sequence's state takes
// as many instructions as its tokens, and those have to fit into the instruction cache. Swapping elements
// between lanes first, to move 16 bytes at a time, takes five times as many.
#pragma once

#include "common/ptx.cuh"
#include "generated/constants.cuh"

// Calls f(two elements, address of the first, bytes from it to the second) for a lane's part of columns
// `column` to `column` + 15 of the state at `base`, whose elements have SIZE bytes.
template <int K, int V, bool V_FIRST, int SIZE, class S, class F>
__device__ __forceinline__ void each_pair(S& s, int lane, int column, u64 base, F f) {
  constexpr int K_STEP = V_FIRST ? SIZE : SIZE * V, V_STEP = V_FIRST ? SIZE * K : SIZE;
  const u64 at = base + 2 * (lane & 3) * K_STEP + (column + (lane >> 2)) * V_STEP;
#pragma unroll
  for (int j = 0; j < K / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f(s[j][2 * i], s[j][2 * i + 1], at + (8 * j * K_STEP + 8 * i * V_STEP), K_STEP);
  }
}

template <int K, int V, bool V_FIRST>
__device__ __forceinline__ void read_state_layout(float (&s)[K / 8][4], int lane, int column, u64 base,
                                                  bool bf16) {
  if (bf16) {
    if (V_FIRST && base % 4 == 0) {  // two in one access; pools may begin anywhere
      each_pair<K, V, V_FIRST, 2>(s, lane, column, base, [](float& x, float& y, u64 at, int) {
        const u32 pair = load_global4(at);
        x = bf16_low(pair), y = bf16_high(pair);
      });
    } else {
      each_pair<K, V, V_FIRST, 2>(s, lane, column, base, [](float& x, float& y, u64 at, int step) {
        x = bf16_low(load_global2(at)), y = bf16_low(load_global2(at + step));
      });
    }
  } else if (V_FIRST && base % 8 == 0) {
    each_pair<K, V, V_FIRST, 4>(s, lane, column, base, [](float& x, float& y, u64 at, int) {
      const uint2 pair = load_global8(at);
      x = __uint_as_float(pair.x), y = __uint_as_float(pair.y);
    });
  } else {
    each_pair<K, V, V_FIRST, 4>(s, lane, column, base, [](float& x, float& y, u64 at, int step) {
      x = __uint_as_float(load_global4(at)), y = __uint_as_float(load_global4(at + step));
    });
  }
}

template <int K, int V, bool V_FIRST>
__device__ __forceinline__ void write_state_layout(const float (&s)[K / 8][4], int lane, int column, u64 base,
                                                   bool bf16) {
  if (bf16) {
    if (V_FIRST && base % 4 == 0) {  // two in one access; pools may begin anywhere
      each_pair<K, V, V_FIRST, 2>(s, lane, column, base, [](float x, float y, u64 at, int) {
        store_global4(at, pack_bf16(x, y));
      });
    } else {
      each_pair<K, V, V_FIRST, 2>(s, lane, column, base, [](float x, float y, u64 at, int step) {
        const u32 pair = pack_bf16(x, y);
        store_global2(at, pair), store_global2(at + step, pair >> 16);
      });
    }
  } else if (V_FIRST && base % 8 == 0) {
    each_pair<K, V, V_FIRST, 4>(s, lane, column, base, [](float x, float y, u64 at, int) {
      store_global8(at, __float_as_uint(x), __float_as_uint(y));
    });
  } else {
    each_pair<K, V, V_FIRST, 4>(s, lane, column, base, [](float x, float y, u64 at, int step) {
      store_global4(at, __float_as_uint(x)), store_global4(at + step, __float_as_uint(y));
    });
  }
}

// `flags` have the state's layout and dtype.
template <int K, int V>
__device__ __forceinline__ void read_state_tiles(float (&s)[K / 8][4], int lane, int column, u64 base,
                                                 int flags) {
  if (flags & FLAG_V_FIRST) {
    read_state_layout<K, V, true>(s, lane, column, base, flags & FLAG_STATE_BF16);
  } else {
    read_state_layout<K, V, false>(s, lane, column, base, flags & FLAG_STATE_BF16);
  }
}
template <int K, int V>
__device__ __forceinline__ void write_state_tiles(const float (&s)[K / 8][4], int lane, int column, u64 base,
                                                  int flags) {
  if (flags & FLAG_V_FIRST) {
    write_state_layout<K, V, true>(s, lane, column, base, flags & FLAG_STATE_BF16);
  } else {
    write_state_layout<K, V, false>(s, lane, column, base, flags & FLAG_STATE_BF16);
  }
}

// Asks L2 for columns `column` to `column` + 15 of the state at `base`.
template <int K, int V>
__device__ __forceinline__ void prefetch_state_tiles(int lane, int column, u64 base, int flags) {
  const int size = flags & FLAG_STATE_BF16 ? 2 : 4;
  if (flags & FLAG_V_FIRST) {
    const u64 at = base + size * (column * K) + 128 * lane;
    prefetch_l2(reinterpret_cast<const void*>(at));
    if (size == 4) prefetch_l2(reinterpret_cast<const void*>(at + 128 * 32));
  } else {
    const u64 at = base + size * (opaque(lane) * V + column);  // not kept from one state to the next
#pragma unroll
    for (int i = 0; i < K / 32; ++i) prefetch_l2(reinterpret_cast<const void*>(at + i * size * 32 * V));
  }
}
