// A warp's 16 columns of a state from and to device memory, four neighbouring elements a lane at a
// time.
//
// Accumulators hold the state transposed: of tile j, lane (g, t) = (lane / 4, lane % 4) has
//
//   x[0], x[1]: channels 8j + 2t, 8j + 2t + 1 of column g      x[2], x[3]: the same of column g + 8
//
// Neighbours in memory lie in several lanes, so lanes swap elements first. Then x[0] to x[3] are
//
//   state [K, V]: channel 8j + 2t + g % 2, columns 4 (g / 4) + 8 (g / 2 % 2) and on
//   state [V, K]: column g + 8 (t % 2), channels 8j + 4 (t / 2) and on
//
// and a warp writes 64 or 32 bytes in one piece. The same swaps in the opposite order undo it.
#pragma once

#include "common/ptx.cuh"
#include "generated/constants.cuh"

// Where a lane's four elements of tile 0 are, in elements of a K by V state (in either layout) from its
// column `column` on, and how far it is to the next tile's.
struct StatePlace {
  int first, step;
};
template <int K, int V>
__device__ __forceinline__ StatePlace state_place(int lane, int column, int flags) {
  const int g = lane >> 2, t = lane & 3;
  if (flags & FLAG_V_FIRST) return {(column + g + 8 * (t & 1)) * K + 4 * (t >> 1), 8};
  return {(2 * t + (g & 1)) * V + column + (g & 4) + 4 * (g & 2), 8 * V};
}

// The lane with bit `mask` clear gives `high` to the one that has it set, for its `low`.
__device__ __forceinline__ void swap_between_lanes(float& low, float& high, int lane, int mask) {
  const bool upper = lane & mask;
  const float received = shuffle_xor(upper ? low : high, mask);
  low = upper ? received : low;
  high = upper ? high : received;
}
template <int TILES>
__device__ __forceinline__ void swap_channels(float (&s)[TILES][4], int lane) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    swap_between_lanes(s[j][0], s[j][1], lane, 4);
    swap_between_lanes(s[j][2], s[j][3], lane, 4);
  }
}
template <int TILES>
__device__ __forceinline__ void swap_columns(float (&s)[TILES][4], int lane, int flags) {
  const int mask = flags & FLAG_V_FIRST ? 1 : 8;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    swap_between_lanes(s[j][0], s[j][2], lane, mask);
    swap_between_lanes(s[j][1], s[j][3], lane, mask);
  }
}

// Neighbours to one lane, and back.
template <int TILES>
__device__ __forceinline__ void gather_neighbours(float (&s)[TILES][4], int lane, int flags) {
  if (!(flags & FLAG_V_FIRST)) swap_channels(s, lane);
  swap_columns(s, lane, flags);
}
template <int TILES>
__device__ __forceinline__ void spread_neighbours(float (&s)[TILES][4], int lane, int flags) {
  swap_columns(s, lane, flags);
  if (!(flags & FLAG_V_FIRST)) swap_channels(s, lane);
}

// Calls f(tile, address of this lane's four elements of it) for all tiles of the state at `base`, whose
// elements have SIZE bytes.
template <int K, int V, int SIZE, class F>
__device__ __forceinline__ void each_piece(u64 base, int lane, int column, int flags, F f) {
  const StatePlace place = state_place<K, V>(lane, column, flags);
  u64 at = base + SIZE * place.first;
  const int step = SIZE * place.step;
#pragma unroll
  for (int j = 0; j < K / 8; ++j, at += step) f(j, at);
}

// Columns `column` to `column` + 15 of the state at `base` to accumulators. Pools may begin anywhere.
template <int K, int V>
__device__ __forceinline__ void read_state_tiles(float (&s)[K / 8][4], int lane, int column, u64 base,
                                                 int flags) {
  if (flags & FLAG_STATE_BF16) {
    if (base & 7) {
      each_piece<K, V, 2>(base, lane, column, flags, [&](int j, u64 at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = bf16_low(reinterpret_cast<const u16*>(at)[i]);
      });
    } else {
      each_piece<K, V, 2>(base, lane, column, flags, [&](int j, u64 at) {
        const uint2 x = *reinterpret_cast<const uint2*>(at);
        s[j][0] = bf16_low(x.x), s[j][1] = bf16_high(x.x);
        s[j][2] = bf16_low(x.y), s[j][3] = bf16_high(x.y);
      });
    }
  } else if (base & 15) {
    each_piece<K, V, 4>(base, lane, column, flags, [&](int j, u64 at) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = reinterpret_cast<const float*>(at)[i];
    });
  } else {
    each_piece<K, V, 4>(base, lane, column, flags, [&](int j, u64 at) {
      const uint4 x = load_written(at);
      s[j][0] = __uint_as_float(x.x), s[j][1] = __uint_as_float(x.y);
      s[j][2] = __uint_as_float(x.z), s[j][3] = __uint_as_float(x.w);
    });
  }
  spread_neighbours(s, lane, flags);
}

// And back. The accumulators are left with neighbours gathered.
template <int K, int V>
__device__ __forceinline__ void write_state_tiles(float (&s)[K / 8][4], int lane, int column, u64 base,
                                                  int flags) {
  gather_neighbours(s, lane, flags);
  if (flags & FLAG_STATE_BF16) {
    if (base & 7) {
      each_piece<K, V, 2>(base, lane, column, flags, [&](int j, u64 at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) reinterpret_cast<u16*>(at)[i] = (u16)pack_bf16(s[j][i], 0.0f);
      });
    } else {
      each_piece<K, V, 2>(base, lane, column, flags, [&](int j, u64 at) {
        *reinterpret_cast<uint2*>(at) = {pack_bf16(s[j][0], s[j][1]), pack_bf16(s[j][2], s[j][3])};
      });
    }
  } else if (base & 15) {
    each_piece<K, V, 4>(base, lane, column, flags, [&](int j, u64 at) {
#pragma unroll
      for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(at)[i] = s[j][i];
    });
  } else {
    each_piece<K, V, 4>(base, lane, column, flags, [&](int j, u64 at) {
      store_global(reinterpret_cast<void*>(at),
                   make_uint4(__float_as_uint(s[j][0]), __float_as_uint(s[j][1]), __float_as_uint(s[j][2]),
                              __float_as_uint(s[j][3])));
    });
  }
}
