// Loads of inputs to shared memory; beta and the norms of each row.
#pragma once

#include "common/l2norm.cuh"
#include "sm90/chunk_backward/inputs.cuh"
#include "sm90/chunk_backward/prepare_shared_memory.cuh"

__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }

// 64 rows of 128 bfloat16 by `threads` threads, this the `i`-th; zeros past the end, and from element `size` of a row
// on.
template <int COUNT>
__device__ __forceinline__ void fetch_tile(u32 to, const Rows& from, int rows, int i, int size) {
  const int piece = i & 15;
  const bool real = has_piece(PIECE * piece, size);
#pragma unroll
  for (int n = 0; n < 1024 / COUNT; ++n) {
    const int row = (i >> 4) + COUNT / 16 * n;
    const u32 place = (piece >> 3) * SQUARE_BYTES + tile_offset(row, piece & 7);
    copy_async16(to + place, row_at(from, minimum(row, rows - 1)) + (real ? 16 * piece : 0), real && row < rows);
  }
}

// Gates in float32: 64 rows of 512 bytes, pieces swizzled so that rows 8 apart do not share a bank.
__device__ __forceinline__ u32 gate_offset(int row, int piece) {
  return row * 512 + ((piece ^ (row >> 2 & 6)) << 4);
}
__device__ __forceinline__ void fetch_floats(u32 to, const Rows& from, int rows, int i, int size) {
  const int piece = i & 31;
  const bool real = has_piece(4 * piece, size);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int row = (i >> 5) + 8 * n;
    copy_async16(to + gate_offset(row, piece), row_at(from, minimum(row, rows - 1)) + (real ? 16 * piece : 0),
                 real && row < rows);
  }
}

// Prefetches v, which is loaded later, to L2: the first 128 values of a row, or `size`.
__device__ __forceinline__ void prefetch_tile(const Rows& from, int rows, int i, int size) {
  if (i < 2 * rows && has_piece((i & 1) * 64, size)) prefetch_l2(row_at(from, i >> 1) + (i & 1) * IMAGE_ROW);
}

// Reciprocal norms of 16 rows of q (even warps) or k (odd ones), and factors made of them. Sums of
// squares are the diagonal of the rows' products with themselves.
__device__ __forceinline__ void store_norms(const ChunkBackwardParams& p, u32 shared, int rows, int warp,
                                            int lane) {
  const int first = 16 * (warp >> 1);
  const bool keys = warp & 1;
  float square[2] = {};
  if (p.flags & FLAG_L2NORM) {
    const u32 at = shared + (keys ? OFFSET(SharedMemory, k) : OFFSET(SharedMemory, q)) +
                   tile_offset(first + (lane & 15), lane >> 4);
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
    const u32 row = 4 * token;
    const float factor = keys ? load_shared1(shared + OFFSET(SharedMemory, beta) + row) : p.scale;
    store_shared(shared + (keys ? OFFSET(SharedMemory, k_norm) : OFFSET(SharedMemory, q_norm)) + row,
                 __float_as_uint(r));
    store_shared(shared + (keys ? OFFSET(SharedMemory, kb_factor) : OFFSET(SharedMemory, q_factor)) + row,
                 __float_as_uint(r * factor));
  }
}

// beta of each row by the first 64 threads, the gate's bias of each channel by the last 128; first
// what is in device memory, then what it stands for. `beta`: element of row 0.
__device__ __forceinline__ u32 load_parameter(const ChunkBackwardParams& p, long long beta, int rows, int hv,
                                              int i) {
  if (i >= THREADS - K) return load_bias_bits(p, hv, i - (THREADS - K));
  return i < rows && i < C ? load_bits(p.beta + (beta + i * p.beta_st) * type_size(p.beta_type), p.beta_type)
                           : 0;
}
__device__ __forceinline__ void store_beta(const ChunkBackwardParams& p, u32 bits, int rows, u32 shared,
                                           int i) {
  if (i >= C) return;
  const float beta = i < rows ? activate_beta(p, from_bits(bits, p.beta_type)) : 0.0f;
  store_shared(shared + OFFSET(SharedMemory, beta) + 4 * i, __float_as_uint(beta));
}
__device__ __forceinline__ void store_bias(const ChunkBackwardParams& p, u32 bits, u32 shared,
                                           const Gate& gate, int i) {
  if (i < THREADS - K) return;
  float bias = held_bias(from_bits(bits, p.bias_type));
  if (!BOUNDED && gate.kind == GATE_SOFTPLUS) {
    bias += gate.shift;
    bias = softplus_bias(gate.rare || warp_any(is_large_bias(bias)), bias);
  }
  store_shared(shared + OFFSET(SharedMemory, bias) + 4 * (i - (THREADS - K)), __float_as_uint(bias));
}
