// Products q_i . (k_j 2^(G_i - G_j)) and k_i . (k_j 2^(G_i - G_j)) of one chunk. Used by intra.cu.
//
// G has no lower bound, so pairs (i, j) are split by the smallest dyadic block holding both; its
// right half's first token is the anchor and both factors, 2^(G_i - G_anchor) and 2^(G_anchor -
// G_j), are at most 1. A warp takes 16 tokens: pairs inside them (halves of 1, 2, 4, 8 tokens) go
// straight from registers to the matrix unit, the operands of the halves of 16 and 32 tokens go to
// shared memory as lane images and are multiplied after a barrier.
//
// Lane (g, t) = (lane / 4, lane % 4) holds tokens 2g and 2g + 1 of its warp and 8 channels (8t ..)
// of each slice of 32. Those are its elements of mma fragments under a permutation of channels,
// which does not change sums.
#pragma once

#include "common/stages/chunk.cuh"

constexpr int SLICES = K / 32;
constexpr int LEVELS = 4;
constexpr u32 IMAGE_BYTES = 16 * K * 2;
// Images by number: right operands of the halves of 16 tokens (k of block 1, q of 1, k of 3, q of
// 3), of the halves of 32 (k of 2, q of 2, k of 3, q of 3), then left ones (k of block 0, k of 2; k
// of 0, k of 1).
constexpr int NEAR_RIGHT = 0, FAR_RIGHT = 4, NEAR_LEFT = 8, FAR_LEFT = 10, IMAGES = 12;

struct Raw {
  uint4 k[2], q[2], g[2][2];
};
struct Lane {
  int lane, g, t, block;
};
// Sums over channels: inside the warp's 16 tokens by level (rows k then q), and the diagonal of q
// k.
struct Inside {
  float level[LEVELS][4], diagonal[2];
};

// This lane's channels of one slice of the rows it holds.
struct Source {
  const unsigned char *q, *k, *g;
  int q_step, k_step, left;  // bytes between tokens; tokens of the lane that are real: left, up to 2
  int g_step;
};

__device__ __forceinline__ void load_rows(Raw& raw, const Source& from, int slice) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool real = i < from.left;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      load_sixteen(raw.g[i][j], from.g + (long long)i * from.g_step + 128 * slice + 16 * j, real);
    load_sixteen(raw.k[i], from.k + (long long)i * from.k_step + 64 * slice, real);
    load_sixteen(raw.q[i], from.q + (long long)i * from.q_step + 64 * slice, real);
  }
}

__device__ __forceinline__ void pair_products(const Raw& raw, Inside& sums) {
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = 2 * (w + j) + e;
        const float k0 = half_of(raw.k[0], c);
        sums.diagonal[0] += half_of(raw.q[0], c) * k0;
        sums.diagonal[1] += half_of(raw.q[1], c) * half_of(raw.k[1], c);
        x[e] = k0 * exp2_fast(-fabsf(float_of(raw.g[1], c) - float_of(raw.g[0], c)));
      }
      b[j] = pack_half(x[0], x[1]);
    }
    const u32 a[4] = {word_of(raw.k[1], w), word_of(raw.q[1], w), word_of(raw.k[1], w + 1),
                      word_of(raw.q[1], w + 1)};
    mma_half(sums.level[0], a, b[0], b[1]);
  }
}

// Halves of 2^level tokens. A lane of a right and one of a left half exchange tokens so that each
// has one of both.
__device__ __forceinline__ void level_products(const Raw& raw, const Lane& l, int level, Inside& sums) {
  const int half = 1 << (level - 1), bit = 4 * half;
  const int anchor = 4 * ((l.g & ~(2 * half - 1)) | half) + l.t;
  const bool right = l.g & half;
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 a[4], b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float k[2][2], q[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = 2 * (w + j) + e;
        const float from = shuffle(float_of(raw.g[0], c), anchor);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float factor = exp2_fast(-fabsf(float_of(raw.g[i], c) - from));
          k[i][e] = half_of(raw.k[i], c) * factor;
          q[i][e] = half_of(raw.q[i], c) * factor;
        }
      }
      const u32 k0 = pack_half(k[0][0], k[0][1]), k1 = pack_half(k[1][0], k[1][1]);
      const u32 q0 = pack_half(q[0][0], q[0][1]), q1 = pack_half(q[1][0], q[1][1]);
      const u32 k_other = shuffle_xor(right ? k0 : k1, bit), q_other = shuffle_xor(q0, bit);
      a[2 * j] = right ? k1 : k_other;
      a[2 * j + 1] = right ? q1 : q_other;
      b[j] = right ? k_other : k0;
    }
    mma_half(sums.level[level], a, b[0], b[1]);
  }
}

// Words 2 s and 2 s + 1 of both tokens, scaled: this lane's 16 bytes of a right operand's fragment,
// or of the two of a left one.
__device__ __forceinline__ void store_image(const uint4 (&x)[2], const float (&factor)[2][4], int s,
                                            bool right, u32 at) {
  u32 w[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      w[i][j] = scaled(word_of(x[i], 2 * s + j), factor[i][2 * j], factor[i][2 * j + 1]);
  }
  store_shared(at + 512 * s, w[0][0], right ? w[1][0] : w[0][1], right ? w[0][1] : w[1][0], w[1][1]);
}

// Both tokens scaled by their distance from `anchor`, as image `k_at` and, in a right half, `q_at`.
__device__ __forceinline__ void store_images(const Raw& raw, const uint4 (&anchor)[2], bool right, u32 k_at,
                                             u32 q_at) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    float factor[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        factor[i][e] = exp2_fast(-fabsf(float_of(raw.g[i], 4 * s + e) - float_of(anchor, 4 * s + e)));
      }
    }
    store_image(raw.k, factor, s, right, k_at);
    if (right) store_image(raw.q, factor, s, true, q_at);
  }
}

// Products inside 16 tokens, and operand images for those across. `head_g`: this lane's channels of
// the chunk's first token.
__device__ __forceinline__ void inside_products(const Source& from, const unsigned char* head_g, int rows,
                                                const Lane& l, u32 images, Inside& sums) {
  const bool near_right = l.block & 1, far_right = l.block & 2;
  const int near_row = 32 * (l.block >> 1) + 16;
  const u32 at = images + 16 * l.lane;
  const u32 near_k =
      at + IMAGE_BYTES * (near_right ? NEAR_RIGHT + (l.block & 2) : NEAR_LEFT + (l.block >> 1));
  const u32 far_k = at + IMAGE_BYTES * (far_right ? FAR_RIGHT + 2 * (l.block & 1) : FAR_LEFT + l.block);
  // Slices are loaded one at a time to save registers; the whole rows are prefetched to L2
  // meanwhile.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i >= from.left) continue;
    if (128 * l.t < 4 * K) prefetch_l2(from.g + (long long)i * from.g_step + 96 * l.t);
    if (128 * l.t < 2 * K) {
      prefetch_l2(from.k + (long long)i * from.k_step + 112 * l.t);
      prefetch_l2(from.q + (long long)i * from.q_step + 112 * l.t);
    }
  }
#pragma unroll 1
  for (int slice = 0; slice < SLICES; ++slice) {
    Raw raw = {};
    load_rows(raw, from, slice);
    uint4 near_anchor[2] = {}, far_anchor[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int offset = 128 * slice + 16 * j;
      load_sixteen(near_anchor[j], head_g + (long long)near_row * from.g_step + offset, near_row < rows);
      load_sixteen(far_anchor[j], head_g + 32LL * from.g_step + offset, 32 < rows);
    }
    pair_products(raw, sums);
#pragma unroll
    for (int level = 1; level < LEVELS; ++level) level_products(raw, l, level, sums);
    store_images(raw, near_anchor, near_right, near_k + 1024 * slice, near_k + IMAGE_BYTES + 1024 * slice);
    store_images(raw, far_anchor, far_right, far_k + 1024 * slice, far_k + IMAGE_BYTES + 1024 * slice);
  }
}

// Sums over channels outside the 16-token blocks: warp w takes right operand w of each distance
// (even: k, odd: q). [left block][even or odd tokens of it][fragment]
struct Outside {
  float far[2][2][4], near[2][4];
};

__device__ __forceinline__ void load_right(u32 (&a)[2][4], u32 at) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint4 x = load_shared_u4(at + 512 * s);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[s][i] = word_of(x, i);
  }
}
__device__ __forceinline__ void add_left(float (&d)[2][4], const u32 (&a)[2][4], u32 at) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint4 x = load_shared_u4(at + 512 * s);
    mma_half(d[0], a[s], x.x, x.y);
    mma_half(d[1], a[s], x.z, x.w);
  }
}

__device__ __forceinline__ void outside_products(u32 images, const Lane& l, Outside& sums) {
  const u32 at = images + 16 * l.lane;
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) {
    u32 a[2][4];
    load_right(a, at + IMAGE_BYTES * (FAR_RIGHT + l.block) + 1024 * slice);
    add_left(sums.far[0], a, at + IMAGE_BYTES * FAR_LEFT + 1024 * slice);
    add_left(sums.far[1], a, at + IMAGE_BYTES * (FAR_LEFT + 1) + 1024 * slice);
    load_right(a, at + IMAGE_BYTES * (NEAR_RIGHT + l.block) + 1024 * slice);
    add_left(sums.near, a, at + IMAGE_BYTES * (NEAR_LEFT + (l.block >> 1)) + 1024 * slice);
  }
}
