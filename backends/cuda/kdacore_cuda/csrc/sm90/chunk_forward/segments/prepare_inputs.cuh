// Loads of a unit's inputs to shared memory; beta, and the norms of each row.
#pragma once

#include "common/l2norm.cuh"
#include "sm90/chunk_backward/inputs.cuh"
#include "sm90/chunk_forward/segments/prepare_shared_memory.cuh"
#include "sm90/evict_first_copies.cuh"

// 64 rows of 128 bfloat16 by `COUNT` threads, this the `i`-th, to images `DISTANCE` apart; zeros
// past the end.
template <int COUNT, u32 DISTANCE>
__device__ __forceinline__ void fetch_tile(u32 to, u64 from, int step, int rows, int i) {
  const int piece = i & 15, row = i >> 4;
  constexpr int ROWS = COUNT / 16;  // at a time; a multiple of 8
  const u32 place = to + (piece >> 3) * DISTANCE + swizzled(row, piece & 7);
  const unsigned char* at = reinterpret_cast<const unsigned char*>(from) + (long long)row * step + 16 * piece;
#pragma unroll
  for (int n = 0; n < C / ROWS; ++n) {
    copy_async16_evict_first(place + n * ROWS * IMAGE_ROW, at, row + n * ROWS < rows);
    at += (long long)ROWS * step;
  }
}

// Gates in float32: 64 rows of 512 bytes, pieces swizzled so that rows 8 apart do not share a bank.
__device__ __forceinline__ u32 gate_offset(int row, int piece) {
  return row * 512 + ((piece ^ (row >> 2 & 6)) << 4);
}

// A warp's strip of g, which no other warp reads.
__device__ __forceinline__ void fetch_strip(u32 shared, const unsigned char* g, int step, int rows, int warp,
                                            int lane) {
  const int half = warp >> 2, slice = warp & 3;
#if G_FLOAT
  const int row = HALF * half + (lane >> 3), piece = 8 * slice + (lane & 7);
  const unsigned char* at = g + (long long)row * step + 16 * piece;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    copy_async16_evict_first(shared + RAW_G + gate_offset(row + 4 * n, piece), at, row + 4 * n < rows);
    at += 4ll * step;
  }
#else
  const int row = HALF * half + (lane >> 2), piece = 4 * (slice & 1) + (lane & 3);
  const u32 place = shared + RAW_G + (slice >> 1) * KEYS_BYTES + swizzled(row, piece);
  const unsigned char* at = g + (long long)row * step + 64 * slice + 16 * (lane & 3);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    copy_async16_evict_first(place + 8 * n * IMAGE_ROW, at, row + 8 * n < rows);
    at += 8ll * step;
  }
#endif
}

// What a thread asks for of the block's parameters: a channel's bias of the gate, which its warp's lanes need for
// their strip, beta of a token by the first 64 threads, A_log by all. `beta`: element of row 0.
struct Parameter {
  float A_log;
  u32 beta, bias;
};
__device__ __forceinline__ Parameter load_parameter(const ChunkBackwardParams& p, long long beta, int rows,
                                                    int hv, int i) {
  const float A_log = load_A_log(p, hv);
  return {A_log,
          i < rows && i < C ? load_bits(p.beta + (beta + i * p.beta_st) * type_size(p.beta_type), p.beta_type)
                            : 0,
          load_bias_bits(p, hv, i & K - 1)};
}

// beta of token i, and what makes its rounding good again: see prepare_inverse.cuh.
__device__ __forceinline__ void store_beta(const ChunkBackwardParams& p, const Parameter& x, int rows,
                                           u32 shared, int i) {
  if (i >= C) return;
  const float beta = i < rows ? activate_beta(p, from_bits(x.beta, p.beta_type)) : 0.0f;
  const float rounded = bf16_low(pack_bf16(beta, 0.0f));
  store_shared(shared + OFFSET(SharedMemory, beta) + 4 * i, __float_as_uint(beta));
  store_shared(shared + OFFSET(SharedMemory, rounded_beta) + 4 * i, __float_as_uint(rounded));
  store_shared(shared + OFFSET(SharedMemory, ratio) + 4 * i,
               __float_as_uint(fabsf(rounded) < 1e-30f ? 1.0f : beta * reciprocal(rounded)));
}
__device__ __forceinline__ void store_bias(const ChunkBackwardParams& p, const Parameter& x, u32 shared,
                                           int i) {
  const float bias = held_bias(from_bits(x.bias, p.bias_type));
  store_shared(shared + OFFSET(SharedMemory, totals) + 4 * i, __float_as_uint(bias));
}

// Reciprocal norms of 16 rows of q (even warps) or k (odd ones). Sums of squares are the diagonal of
// the rows' products with themselves.
__device__ __forceinline__ void store_norms(const ChunkBackwardParams& p, u32 shared, int rows, int warp,
                                            int lane) {
  const int first = 16 * (warp >> 1);
  const bool keys = warp & 1;
  float square[2] = {};
  if (p.flags & FLAG_L2NORM) {
    const u32 at = shared + (keys ? OFFSET(SharedMemory, k) : OFFSET(SharedMemory, q)) +
                   swizzled(first + (lane & 15), lane >> 4);
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      u32 x[4];
      load_matrix4(x, (at ^ ((i & 3) << 5)) + (i >> 2) * SQUARE_BYTES);
      mma_bf16(d[0], x, x[0], x[2]);
      mma_bf16(d[1], x, x[1], x[3]);
    }
    const bool odd = lane & 4;
    square[0] = odd ? d[0][1] : d[0][0];
    square[1] = odd ? d[1][3] : d[1][2];
  }
  if ((lane & 3) != lane >> 3) return;  // not on the diagonal
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first + (lane >> 2) + 8 * i;
    const float r = p.flags & FLAG_L2NORM && token < rows ? inverse_norm(square[i]) : 1.0f;
    store_shared(shared + (keys ? OFFSET(SharedMemory, k_norm) : OFFSET(SharedMemory, q_factor)) + 4 * token,
                 __float_as_uint(keys ? r : r * p.scale));
  }
}
