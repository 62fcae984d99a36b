// Decays from the gate, and what operands are stored with. A warp has a strip: 32 tokens, a half, and 32
// channels. A lane (g, t) = (lane / 4, lane % 4) of it has channels 8i + g, i = 0..3, and eight
// tokens in a row, 8t + j, so that running sums stay in a lane and its quad. The rows of one matrix
// load or store are 8t + 2m, 8t + 2m + 1 for t = 0..3, so that lane t gets its tokens.
#pragma once

#include "sm90/chunk_backward/prepare_inputs.cuh"
#include "sm90/warp.cuh"

struct Strip {
  int half, slice, lane, g, t;
  u32 at;  // in a tile, of the row that this lane names, first of the strip's four pieces; piece i: ^ 16 i
};

__device__ __forceinline__ Strip make_strip(int warp, int lane) {
  Strip s;
  s.half = warp >> 2;
  s.slice = warp & 3;
  s.lane = lane;
  s.g = lane >> 2;
  s.t = lane & 3;
  const int row = HALF * s.half + 8 * (lane >> 1 & 3) + 2 * (lane >> 3) + (lane & 1);
  s.at = (s.slice >> 1) * SQUARE_BYTES + tile_offset(row, 4 * (s.slice & 1));
  return s;
}

// This lane's gates of channel 8i + g of the strip.
__device__ __forceinline__ void load_gates(float (&x)[8], u32 shared, const Strip& s, int i) {
  if constexpr (G_FLOAT) {
    const u32 at = shared + raw_gates() +
                   gate_offset(HALF * s.half + 8 * s.t, 8 * s.slice + 2 * i + (s.g >> 2)) + 4 * (s.g & 3);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load_shared1(at + 512 * j);
  } else {
    u32 raw[4];
    load_matrix4_transposed(raw, (shared + raw_gates() + s.at) ^ (i << 4));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      x[2 * m] = bf16_low(raw[m]);
      x[2 * m + 1] = bf16_high(raw[m]);
    }
  }
}

// This lane's steps; 0 past the end.
__device__ __forceinline__ void load_steps(float (&x)[4][8], u32 shared, const Strip& s, const Gate& gate,
                                           float floor, int rows) {
#pragma unroll
  for (int i = 0; i < 4; ++i) load_gates(x[i], shared, s, i);
  if (gate.kind == GATE_LOG) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = max_or_nan(x[i][j] * LOG2E, floor);
    }
  } else {
    const u32 biases = shared + OFFSET(SharedMemory, bias) + 4 * (32 * s.slice + s.g);
    const auto add_biases = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float bias = load_shared1(biases + 32 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += bias;
      }
      if (gate.slope == 0.0f) scale_by_zero(x);
    };
    if (!BOUNDED && gate.kind == GATE_SOFTPLUS) {
      const bool rare = is_rare_bias(shared + OFFSET(SharedMemory, bias) + 4 * (32 * s.slice));
      if (rare) add_biases();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float bias = rare ? 0.0f : load_shared1(biases + 32 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          x[i][j] = max_or_nan(softplus_step(gate.unit, LOG2E * x[i][j] + bias), floor);
      }
    } else {
      add_biases();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x[i][j] = sigmoid_step(gate, x[i][j]);
          if (!BOUNDED) x[i][j] = max_or_nan(x[i][j], floor);
        }
      }
    }
  }
  if (rows == C) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i][j] = HALF * s.half + 8 * s.t + j < rows ? x[i][j] : 0.0f;
  }
}

// Replaces steps by their sums from the part's first row, plus the centre; the parts' sums go to
// shared memory. A sum never depends on a later row.
__device__ __forceinline__ void sum_strip(float (&x)[4][8], u32 shared, const Strip& s, float centre) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 1; j < 8; ++j) x[i][j] += x[i][j - 1];
    const float one = shuffle_xor(x[i][7], 1);
    float total = x[i][7] + one, before = s.t & 1 ? one : 0.0f;
    if (BOUNDED) {
      const float other = shuffle_xor(total, 2);
      total += other;
      before += s.t & 2 ? other : 0.0f;
    }
    before += centre;
    const int part = BOUNDED ? s.half : 2 * s.half + (s.t >> 1);
    if ((BOUNDED ? s.t : s.t & 1) == 0) {
      store_shared(shared + OFFSET(SharedMemory, totals) + 4 * (K * part + 32 * s.slice + 8 * i + s.g),
                   __float_as_uint(total));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i][j] += before;
  }
}

// kg of two numbers, and its rounding error.
__device__ __forceinline__ void split_kg(float x, float y, u32& kg, u32& low) {
  kg = pack_bf16(x, y);
  low = pack_bf16(x - bf16_low(kg), y - bf16_high(kg));
}

// Where a warp's strip is staged.
__device__ __forceinline__ u32 strip_of(u32 shared, const Strip& s) {
  return shared + OFFSET(Matrices<false>, strips) + (4 * s.half + s.slice) * STRIP_BYTES;
}

// Address in a strip's staging of row r of tile m at place i: pieces of 16 bytes. The pieces of one
// token at all four places use different banks.
__device__ __forceinline__ u32 staging_address(u32 strip, int i, int m, int r) {
  return strip + i * 512 + m * 128 + ((r ^ 2 * i) << 4);
}

// 32 rows of 64 bytes from staging to a tile in device memory.
__device__ __forceinline__ void flush_strip(u32 strip, const Strip& s, unsigned char* tile) {
  sync_warp();
  const int lane = opaque(s.lane);
  const int i = lane & 3, r = lane >> 2, piece = 4 * (s.slice & 1) + i;
  unsigned char* to =
      tile + (s.slice >> 1) * SQUARE_BYTES + (HALF * s.half + 8 * (r >> 1) + (r & 1)) * IMAGE_ROW;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    store_global(to + 2 * IMAGE_ROW * m + ((piece ^ (2 * m + (r & 1))) << 4),
                 load_shared_u4(staging_address(strip, i, m, r)));
  }
  sync_warp();
}

// Stores kg of pieces i - 1 and i, staged in places 0 and 1, and its rounding error, in 2 and 3: 32
// rows of 32 bytes each.
__device__ __forceinline__ void flush_kg(const ChunkBackwardParams& p, u32 strip, const Strip& s, int i) {
  sync_warp();
  const int lane = opaque(s.lane);  // addresses are recomputed to save registers
  const int place = lane & 3, r = lane >> 2, piece = 4 * (s.slice & 1) + i - 1 + (place & 1);
  unsigned char* to = place_of(place & 2 ? p.kg_low : p.kg, TILE_BYTES) + (s.slice >> 1) * SQUARE_BYTES +
                      (HALF * s.half + 8 * (r >> 1) + (r & 1)) * IMAGE_ROW;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    store_global(to + 2 * IMAGE_ROW * m + ((piece ^ (2 * m + (r & 1))) << 4),
                 load_shared_u4(staging_address(strip, place, m, r)));
  }
  sync_warp();
}

// Stores kg of piece i and its rounding error, two pieces at a time; FOR_SEGMENTS, kg in its image.
__device__ __forceinline__ void store_kg(const ChunkBackwardParams& p, u32 shared, const Strip& s, int i,
                                         const u32 (&kg)[4], const u32 (&low)[4]) {
  if constexpr (FOR_SEGMENTS) {
    store_matrix4_transposed((shared + s.at + OFFSET(Matrices<true>, kg)) ^ (i << 4), kg);
  } else {
    const u32 strip = strip_of(shared, s);
    store_matrix4_transposed(staging_address(strip, i & 1, s.lane >> 3, s.lane & 7), kg);
    store_matrix4_transposed(staging_address(strip, 2 + (i & 1), s.lane >> 3, s.lane & 7), low);
    if (i & 1) flush_kg(p, strip, s, i);
  }
}

// The factor that makes zb of k.
constexpr u32 ZB_FACTOR = FOR_SEGMENTS ? OFFSET(SharedMemory, k_norm) : OFFSET(SharedMemory, kb_factor);
