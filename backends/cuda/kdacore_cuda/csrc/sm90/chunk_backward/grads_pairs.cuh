// Gradients of the matrices of token pairs: dA = scale do v'^T and dL = -dr v'^T, [tokens i, tokens
// j].
//
// A warpgroup has one of them and half of the columns. Operands of the channels' products reach
// 2^(+-centre): beside them neither large nor small gradients would fit in bfloat16, so a power of
// two (shrink) brings the largest product to about 1, and another (grow) takes it back from float32
// results. Only pairs on the causal side count: later tokens must have no influence.
#pragma once

#include "sm90/bf16_pairs.cuh"
#include "sm90/chunk_backward/grads_shared_memory.cuh"

struct Scaling {
  float shrink, grow;
  float unit;  // 2^-centre
};

// Left operand `kk` of 16 values: the warp's 16 tokens of d_o (rows), or of dr (its image has
// values as rows).
__device__ __forceinline__ void pairs_operand(u32 (&a)[4], u32 shared, bool of_outputs, int kk,
                                              const Lane& l) {
  if (of_outputs) {
    const int row = 16 * l.warp + (l.lane & 15), piece = l.lane >> 4;
    load_matrix4(a, shared + OFFSET(SharedMemory, d_o) + (kk >> 2) * SQUARE_BYTES +
                        (swizzled(row, piece) ^ (kk & 3) << 5));
  } else {
    load_matrix4_transposed(a, shared + OFFSET(SharedMemory, dr) + kk * 16 * IMAGE_ROW + l.tile);
  }
}

// Starts the products; `a` must not change before they are complete. NARROW: added to what is in d.
__device__ __forceinline__ void start_pairs(float (&d)[4][4], u32 (&a)[8][4], u32 shared, const Lane& l) {
  const u64 values = columns_operand(shared + OFFSET(SharedMemory, u) + 64 * l.channel_half);
#pragma unroll
  for (int kk = 0; kk < 8; ++kk) pairs_operand(a[kk], shared, l.token_half == 0, kk, l);
  fence_registers(d);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < 8; ++kk)
    warpgroup_mma<1>(d, a[kk], values + descriptor_step(kk * 16 * IMAGE_ROW), NARROW || kk > 0);
  warpgroup_commit();
}

// Of the warp's 16 rows and the warpgroup's 32 columns, two neighbouring columns a word: [j][i] is row g + 8i, columns
// 8j + 2t and the next.
struct PackedPairs {
  u32 x[4][2];
};
// dA (times the scale) or dL in bfloat16: zero where token i does not see token j (in dL: nor itself).
__device__ __forceinline__ PackedPairs mask_pairs(const float (&d)[4][4], float scale, const Lane& l) {
  const float factor = l.token_half == 0 ? scale : -1.0f;
  // Of the tiles of 8 x 8 pairs those below the diagonal count, and of those on it the same triangle.
  const int first = 2 * l.t + l.token_half;
  const u32 triangle = (l.g >= first ? 0xffffu : 0u) | (l.g > first ? 0xffff0000u : 0u);
  const int below = 2 * l.warp - 4 * l.channel_half;
  PackedPairs r;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tiles = below + i - j;
      const u32 seen = tiles > 0 ? 0xffffffffu : tiles == 0 ? triangle : 0u;
      r.x[j][i] = pack_bf16(d[j][2 * i] * factor, d[j][2 * i + 1] * factor) & seen;
    }
  }
  return r;
}
// Bits of the warp's largest pair: those of non-negative numbers order as the numbers do.
__device__ __forceinline__ u32 largest_pair(const PackedPairs& d) {
  u32 r = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) r = max_bf16(r, max_bf16(d.x[j][0] & 0x7fff7fffu, d.x[j][1] & 0x7fff7fffu));
  const u32 low = r & 0xffffu, high = r >> 16;
  return warp_max(low > high ? low : high);
}

__device__ __forceinline__ Scaling make_scaling(u32 shared, float centre, const Lane& l) {
  const u32 of_warp = shared + OFFSET(SharedMemory, largest) + 4 * (l.lane & 15);
  int shift = (int)(warp_max(__float_as_uint(load_shared1(of_warp))) >> 7) - 127;
  shift = shift < -100 ? -100 : shift > 100 ? 100 : shift;
  return {power_of_two(-shift), power_of_two(shift), power_of_two(-(int)centre)};
}

// To bfloat16 images. Between tokens of different anchors 2^centre is too much.
__device__ __forceinline__ void store_pairs(const PackedPairs& d, u32 shared, const Scaling& by, const Lane& l) {
  const bool later = l.warp >= 2;
  if (!later && l.channel_half) return;  // no pair is there
  const u32 image = shared + (l.token_half == 0 ? OFFSET(SharedMemory, dA) : OFFSET(SharedMemory, dL));
  const u32 shrink = pack_bf16(by.shrink, by.shrink), unit = pack_bf16(by.unit, by.unit);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 r[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) r[w] = multiply_bf16(d.x[2 * i + (w >> 1)][w & 1], shrink);
    if (BOUNDED ? later && !l.channel_half : l.warp != 2 * l.channel_half + i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) r[w] = multiply_bf16(r[w], unit);
    }
    store_matrix4(image + swizzled(16 * l.warp + (l.lane & 15), 4 * l.channel_half + 2 * i + (l.lane >> 4)),
                  r);
  }
}
