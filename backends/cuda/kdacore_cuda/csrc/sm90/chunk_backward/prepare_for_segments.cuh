// What differs where the operands are those of the forward in segments (FOR_SEGMENTS): one record a unit
// (chunk_forward/segments/chunk_operands.cuh), which products of the inverse with keys and pairs make.
#pragma once

#include "sm90/chunk_backward/prepare_pairs.cuh"
#include "sm90/chunk_backward/prepare_strips.cuh"
#include "sm90/scaled_pieces.cuh"

// 32 rows of 64 bytes from this strip's place in a tile of shared memory to a tile of the record, times a
// factor for each of a lane's eight channels.
__device__ __forceinline__ void flush_decayed(u32 from, const Strip& s, unsigned char* tile,
                                              const float (&decay)[8]) {
  const int lane = opaque(s.lane);
  const int piece = 4 * (s.slice & 1) + (lane & 3);
  const u32 image = (s.slice >> 1) * SQUARE_BYTES;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int row =
        HALF * s.half + n + (lane & 4) + 8 * (lane >> 3);  // in this order they use different banks
    const uint4 x = load_shared_u4(from + image + tile_offset(row, piece));
    store_global(tile + image + swizzled(row, piece), scaled_piece(x, decay));
  }
}

// qg and kd to the record: zq and zb without their anchor, decayed from the chunk's start to their part.
__device__ __forceinline__ void store_decayed(const ChunkBackwardParams& p, u32 shared, const Strip& s) {
  sync_warp();
  const int lane = opaque(s.lane), part = BOUNDED ? s.half : 2 * s.half + (lane >> 4);
  float decay[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) decay[i] = -p.centre;
#pragma unroll
  for (int n = 0; n < PARTS - 1; ++n) {
    const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * (K * n + 32 * s.slice + 8 * (lane & 3));
    const float4 low = load_shared4(totals), high = load_shared4(totals + 16);
    const float total[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) decay[i] += n < part ? total[i] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) decay[i] = exp2_fast(decay[i]);
  unsigned char* const record = record_of(p);
  flush_decayed(shared + OFFSET(SharedMemory, q), s, record + OFFSET(ChunkOperands, qg), decay);
  flush_decayed(shared + OFFSET(SharedMemory, k), s, record + OFFSET(ChunkOperands, kd), decay);
}

// kt = T^T kg with T = inv diag(beta): 16 channels a warp.
__device__ __forceinline__ void make_kt(u32 shared, int warp, int lane) {
  const int image = warp >> 2, piece = 2 * (warp & 3);
  u32 kg[4][4];
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    // Tokens 0-7, then 8-15, of channels 0-7, then 8-15.
    load_matrix4_transposed(kg[m], shared + OFFSET(Matrices<true>, kg) + image * SQUARE_BYTES +
                                       tile_offset(16 * m + (lane & 15), piece + (lane >> 4)));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float x[2][4] = {};
#pragma unroll
    for (int m = j; m < 4; ++m) {
      u32 inverse[4];  // of block (m, j), transposed
      load_matrix4_transposed(inverse,
                              shared + OFFSET(SharedMemory, inverse) +
                                  swizzled(16 * m + (lane & 7) + (lane >> 1 & 8), 2 * j + (lane >> 3 & 1)));
      mma_bf16(x[0], inverse, kg[m][0], kg[m][1]);
      mma_bf16(x[1], inverse, kg[m][2], kg[m][3]);
    }
    const u32 betas = shared + OFFSET(SharedMemory, beta) + 4 * (16 * j + (lane >> 2));
    const float beta[2] = {load_shared1(betas), load_shared1(betas + 32)};
    u32 out[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        out[2 * n + h] = pack_bf16(x[n][2 * h] * beta[h], x[n][2 * h + 1] * beta[h]);
    }
    store_matrix4(block_at(shared + OFFSET(Matrices<true>, kt) + image * SQUARE_BYTES, j, warp & 3, lane), out);
  }
}

// aqt = aqk T: a warp has every second block of a row of blocks.
__device__ __forceinline__ void make_aqt(u32 shared, int warp, int lane) {
  const int i = warp >> 1;
#pragma unroll 1
  for (int j = warp & 1; j < 4; j += 2) {
    float x[2][4] = {};
#pragma unroll 1
    for (int m = j; m <= i; ++m) {
      u32 aqk[4], inverse[4];
      load_matrix4(aqk, block_at(shared + OFFSET(SharedMemory, aqk), i, m, lane));
      load_matrix4_transposed(inverse, block_at(shared + OFFSET(SharedMemory, inverse), m, j, lane));
      mma_bf16(x[0], aqk, inverse[0], inverse[1]);
      mma_bf16(x[1], aqk, inverse[2], inverse[3]);
    }
    const u32 betas = shared + OFFSET(SharedMemory, beta) + 4 * (16 * j + 2 * (lane & 3));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 beta = load_shared2(betas + 32 * n);
      x[n][0] *= beta.x, x[n][1] *= beta.y, x[n][2] *= beta.x, x[n][3] *= beta.y;
    }
    u32 out[4];
    pack_tiles(x[0], x[1], out);
    store_matrix4(block_at(shared + OFFSET(Matrices<true>, aqt), i, j, lane), out);
  }
}

// One thread: kt and aqt to the record.
__device__ __forceinline__ void store_record(const ChunkBackwardParams& p, u32 shared) {
  unsigned char* const record = record_of(p);
  copy_out(record + OFFSET(ChunkOperands, kt), shared + OFFSET(Matrices<true>, kt), TILE_BYTES);
  copy_out(record + OFFSET(ChunkOperands, aqt), shared + OFFSET(Matrices<true>, aqt), SQUARE_BYTES);
  copy_out_commit();
}
