// Gradients of the matrices of token pairs: dA = scale do v'^T and dL = -dr v'^T, [tokens i, tokens
// j].
//
// A warpgroup has one of them and half of the columns. Operands of the channels' products reach
// 2^(+-centre): beside them neither large nor small gradients would fit in bfloat16, so a power of
// two (shrink) brings the largest product to about 1, and another (grow) takes it back from float32
// results. Only pairs on the causal side count: later tokens must have no influence.
#pragma once

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

// Zero where token i does not see token j (in dL: nor itself). Returns the largest that is left.
__device__ __forceinline__ float mask_pairs(float (&d)[4][4], const Lane& l) {
  float largest = 0.0f;
  each([&](int j, int e) {
    const int row = 16 * l.warp + l.g + 8 * (e >> 1),
              column = HALF * l.channel_half + 8 * j + 2 * l.t + (e & 1);
    d[j][e] = row >= column + l.token_half ? d[j][e] : 0.0f;
    largest = fmaxf(largest, fabsf(d[j][e]));
  });
  return __uint_as_float(
      warp_max(__float_as_uint(largest)));  // bits of non-negative floats order as the floats do
}

__device__ __forceinline__ Scaling make_scaling(u32 shared, float centre) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 x = load_shared4(shared + OFFSET(SharedMemory, largest) + 16 * i);
    largest = fmaxf(largest, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
  }
  int shift = (int)(__float_as_uint(largest) >> 23 & 255) - 127;
  shift = shift < -100 ? -100 : shift > 100 ? 100 : shift;
  return {power_of_two(-shift), power_of_two(shift), power_of_two(-(int)centre)};
}

// To bfloat16 images. Between tokens of different anchors 2^centre is too much.
__device__ __forceinline__ void store_pairs(const float (&d)[4][4], u32 shared, float scale,
                                            const Scaling& by, const Lane& l) {
  const bool later = l.warp >= 2;
  if (!later && l.channel_half) return;  // no pair is there
  const float factor = l.token_half == 0 ? scale * by.shrink : -by.shrink;
  const u32 image = shared + (l.token_half == 0 ? OFFSET(SharedMemory, dA) : OFFSET(SharedMemory, dL));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 r[4];
    const float unit =
        (BOUNDED ? later && !l.channel_half : l.warp != 2 * l.channel_half + i) ? by.unit : 1.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float* x = &d[2 * i + (w >> 1)][2 * (w & 1)];
      r[w] = pack_bf16(x[0] * factor * unit, x[1] * factor * unit);
    }
    store_matrix4(image + swizzled(16 * l.warp + (l.lane & 15), 4 * l.channel_half + 2 * i + (l.lane >> 4)),
                  r);
  }
}
