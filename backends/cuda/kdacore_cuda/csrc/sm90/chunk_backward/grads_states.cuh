// What the states at both ends of the chunk give: aq = (do h)^T, ax = (dr h)^T, cs = (v' dh)^T,
// each [channels, tokens] of a warpgroup's channels and tokens, and sum_v h dh of each channel.
#pragma once

#include "sm90/chunk_backward/grads_pairs.cuh"
#include "sm90/small_products.cuh"

struct Accumulators {
  float aq[4][4], ax[4][4], cs[4][4];
};
// Left operands of 64 values.
struct StateOperands {
  u32 h[4][4], dh[4][4];
};

__device__ __forceinline__ void load_states(StateOperands& a, u32 shared, int first, const Lane& l) {
  const u32 tile =
      shared + OFFSET(SharedMemory, h) + l.channel_half * (STATE_BYTES / 2) + first * 16 * IMAGE_ROW + l.tile;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_matrix4_transposed(a.h[i], tile + i * 16 * IMAGE_ROW);
    load_matrix4_transposed(a.dh[i],
                            tile + (OFFSET(SharedMemory, dh) - OFFSET(SharedMemory, h)) + i * 16 * IMAGE_ROW);
  }
}

// Starts the products of 64 values; neither d nor `a` may be touched before they are waited for. NARROW: added to what
// is in d, as others are from the second 64 values on.
__device__ __forceinline__ void start_states(Accumulators& d, const StateOperands& a, u32 shared, int first,
                                             const Lane& l) {
  const u64 outputs = rows_operand(shared + OFFSET(SharedMemory, d_o) + l.token_half * HALF * IMAGE_ROW);
  const u64 dr = columns_operand(shared + OFFSET(SharedMemory, dr) + 2 * HALF * l.token_half),
            values = columns_operand(shared + OFFSET(SharedMemory, u) + 2 * HALF * l.token_half);
  fence_registers(d.aq);
  fence_registers(d.ax);
  fence_registers(d.cs);
  warpgroup_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int kk = first + i;
    warpgroup_mma<0>(d.aq, a.h[i], outputs + descriptor_step((kk >> 2) * SQUARE_BYTES + (kk & 3) * 32),
                     NARROW || kk > 0);
    warpgroup_mma<1>(d.ax, a.h[i], dr + descriptor_step(kk * 16 * IMAGE_ROW), NARROW || kk > 0);
    warpgroup_mma<1>(d.cs, a.dh[i], values + descriptor_step(kk * 16 * IMAGE_ROW), NARROW || kk > 0);
  }
  warpgroup_commit();
}
__device__ __forceinline__ void wait_states(Accumulators& d) {
  warpgroup_wait<0>();
  fence_registers(d.aq);
  fence_registers(d.ax);
  fence_registers(d.cs);
}

// sum_v h dh over these 64 values, the diagonal of a product; each side has its own half of V. Of
// the 16 by 8 tiles of either 8 channels one lane a channel has the diagonal. `more`: added to what is there.
__device__ __forceinline__ void multiply_states(const StateOperands& a, u32 to, bool more, const Lane& l) {
  float low[4] = {}, high[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      mma_bf16_half(low, a.h[i][w], a.h[i][w + 1], a.dh[i][w]);
      mma_bf16_half(high, a.h[i][w], a.h[i][w + 1], a.dh[i][w + 1]);
    }
  }
  if (l.t == l.g >> 1) {
    const u32 at = to + 4 * (K * l.token_half + l.channel);
    if (NARROW && more) {
      const float x = load_shared1(at), y = load_shared1(at + 32);
      low[0] += x, low[1] += x;
      high[2] += y, high[3] += y;
    }
    store_shared(at, __float_as_uint(l.g & 1 ? low[1] : low[0]));
    store_shared(at + 32, __float_as_uint(l.g & 1 ? high[3] : high[2]));
  }
}

// The states' decay to the half they meet (to quarters later), the scale, and one anchor's
// 2^-centre for what meets zq and zb.
__device__ __forceinline__ void scale_states(Accumulators& d, u32 last, float scale, const Scaling& by,
                                             const Lane& l) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float before = by.unit, after = by.shrink;
    if constexpr (BOUNDED) {
      const u32 at = last + 4 * (l.channel + 8 * r);
      if (l.token_half)
        before *= load_shared1(at + OFFSET(ChunkDecays, first_half));
      else
        after *= load_shared1(at + OFFSET(ChunkDecays, second_half));
    }
    const float fq = scale * by.shrink * before, fx = -by.shrink * before;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        d.aq[j][e] *= fq;
        d.ax[j][e] *= fx;
        d.cs[j][e] *= after;
      }
    }
  }
}
