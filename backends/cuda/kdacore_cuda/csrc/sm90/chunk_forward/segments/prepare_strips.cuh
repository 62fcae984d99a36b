// Decays from the gate, and operands from the decays. A warp has a strip: 32 tokens, a half, and 32
// channels. A lane (g, t) = (lane / 4, lane % 4) of it has channels 8i + g, i = 0..3, and eight
// tokens in a row from 8t on, so that running sums stay in a lane and its quad.
//
// Matrix m of a load or store has tokens 8t + 2 (m ^ t), + 1 for t = 0..3, whose pieces lie in
// different banks; so pair m of a lane's tokens is pair m ^ t in time.
#pragma once

#include "sm90/chunk_forward/segments/prepare_inputs.cuh"
#include "sm90/scaled_pieces.cuh"
#include "sm90/warp.cuh"

struct Strip {
  int half, slice, lane, g, t;
  u32 at;  // in an image, of the row that this lane names, first of the strip's four pieces; piece i: ^ 16 i
};

__device__ __forceinline__ Strip make_strip(int warp, int lane) {
  const int t = lane >> 1 & 3, row = HALF * (warp >> 2) + 8 * t + 2 * (lane >> 3 ^ t) + (lane & 1);
  return {warp >> 2, warp & 3, lane, lane >> 2, lane & 3, swizzled(row, 4 * (warp & 1))};
}

// This lane's gates of channel 8i + g of the strip.
__device__ __forceinline__ void load_gates(float (&x)[8], u32 shared, const Strip& s, int i) {
#if G_FLOAT
  const u32 at = shared + RAW_G + 4 * (s.g & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    x[j] = load_shared1(at + gate_offset(HALF * s.half + 8 * s.t + 2 * (j >> 1 ^ s.t) + (j & 1),
                                         8 * s.slice + 2 * i + (s.g >> 2)));
#else
  u32 raw[4];
  load_matrix4_transposed(raw, (shared + RAW_G + (s.slice >> 1) * KEYS_BYTES + s.at) ^ (i << 4));
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    x[2 * m] = bf16_low(raw[m]);
    x[2 * m + 1] = bf16_high(raw[m]);
  }
#endif
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
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float bias =
          load_shared1(shared + OFFSET(SharedMemory, totals) + 4 * (K * s.half + 32 * s.slice + 8 * i + s.g));
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] += bias;
    }
    if (gate.slope == 0.0f) scale_by_zero(x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = sigmoid_step(gate, x[i][j]);
    }
  }
  if (rows == C) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      x[i][j] = HALF * s.half + 8 * s.t + 2 * (j >> 1 ^ s.t) + (j & 1) < rows ? x[i][j] : 0.0f;
  }
}

// Replaces steps by their sums from the half's first row, plus the centre; the halves' sums go to
// shared memory. A sum never depends on a later row.
__device__ __forceinline__ void sum_strip(float (&x)[4][8], u32 shared, const Strip& s, float centre) {
  const bool odd = s.t & 1, upper = s.t & 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float pair[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) pair[m] = x[i][2 * m] + x[i][2 * m + 1];
    const float low = pair[0] + pair[1], high = pair[2] + pair[3], sum = low + high;
    const float one = shuffle_xor(sum, 1);
    float total = sum + one, before = odd ? one : 0.0f;
    const float other = shuffle_xor(total, 2);
    total += other;
    before += upper ? other : 0.0f;
    before += centre;
    if (s.t == 0) {
      store_shared(shared + OFFSET(SharedMemory, totals) + 4 * (K * s.half + 32 * s.slice + 8 * i + s.g),
                   __float_as_uint(total));
    }
    // Before pairs 0 and 1, and before pairs 2 and 3, whichever come first in time.
    const float before_low = upper ? before + high : before, before_high = upper ? before : before + low;
    x[i][0] += odd ? before_low + pair[1] : before_low;
    x[i][2] += odd ? before_low : before_low + pair[0];
    x[i][4] += odd ? before_high + pair[3] : before_high;
    x[i][6] += odd ? before_high : before_high + pair[2];
#pragma unroll
    for (int m = 0; m < 4; ++m) x[i][2 * m + 1] += x[i][2 * m];
  }
}

// Where a lane finds its first 16 bytes of the 32 rows of 64 bytes that are this strip's in an image; the
// n-th: ^ n (IMAGE_ROW + 16), rows 1, 2 and 3 further, of the same channels. In this order lanes use
// different banks.
__device__ __forceinline__ u32 first_piece(const Strip& s, int lane) {
  return (s.slice >> 1) * SQUARE_BYTES +
         swizzled(HALF * s.half + (lane & 4) + 8 * (lane >> 3), 4 * (s.slice & 1) + (lane & 3));
}

// The strip from an image to a tile in device memory.
__device__ __forceinline__ void flush_image(u32 image, const Strip& s, unsigned char* tile) {
  sync_warp();
  const u32 first = first_piece(s, opaque(s.lane));
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const u32 at = first ^ n * (IMAGE_ROW + 16);
    store_global(tile + at, load_shared_u4(image + at));
  }
}

// The strip's part of zq, zb, yk, sk and kg to shared memory, of qg to the record. `x`: from sum_strip.
// Both halves run the same instructions, to keep the code small: the blocks that share a multiprocessor are at
// different places in it, and together they need more than the instruction cache holds.
__device__ __forceinline__ void make_operands(float centre, u32 shared, const Strip& s,
                                              const float (&x)[4][8], unsigned char* record) {
  const u32 pairs = shared + OFFSET(SharedMemory, q_factor) + 4 * HALF * s.half + 40 * s.t;  // pair m: ^ 8 m
  constexpr u32 NORM = OFFSET(SharedMemory, k_norm) - OFFSET(SharedMemory, q_factor);
  const u32 tile = shared + (s.slice >> 1) * SQUARE_BYTES, keys = shared + (s.slice >> 1) * KEYS_BYTES;
  const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * (32 * s.slice + s.g);
  const u32 own_total = totals + 4 * K * s.half, other_total = totals + 4 * K * (1 - s.half);
  const float unit = exp2_fast(-centre);
  u32 kept[4][4];  // kg
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = exp2_fast(load_shared1(other_total + 32 * i)),
                end = exp2_fast(load_shared1(own_total + 32 * i) + centre);
    // The second half's q decays over the first half, the first half's k over the second.
    const float more_q = s.half ? unit * other : unit, more_k = s.half ? 1.0f : other;
    const u32 at = s.at ^ i << 4;
    u32 q[4], k[4], y[4], sk[4], qg[4];
    load_matrix4_transposed(q, tile + at + OFFSET(SharedMemory, q));
    load_matrix4_transposed(k, tile + at + OFFSET(SharedMemory, k));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const u32 pair = pairs ^ (m << 3);
      const float2 rq = load_shared2(pair), rk = load_shared2(pair + NORM);
      const float x0 = x[i][2 * m], x1 = x[i][2 * m + 1], up0 = exp2_fast(x0), up1 = exp2_fast(x1);
      const float z0 = bf16_low(q[m]) * rq.x * up0, z1 = bf16_high(q[m]) * rq.y * up1;
      q[m] = pack_bf16(z0, z1);
      qg[m] = pack_bf16(z0 * more_q, z1 * more_q);
      const float k0 = bf16_low(k[m]) * rk.x, k1 = bf16_high(k[m]) * rk.y;
      const float y0 = k0 * exp2_fast(-x0), y1 = k1 * exp2_fast(-x1);
      const float s0 = y0 * end, s1 = y1 * end;
      k[m] = pack_bf16(k0 * up0, k1 * up1);
      y[m] = pack_bf16(y0, y1);
      sk[m] = pack_bf16(s0, s1);
      kept[i][m] = pack_bf16(s0 * more_k, s1 * more_k);
    }
    store_matrix4_transposed(tile + at + OFFSET(SharedMemory, q), q);
    store_matrix4_transposed(tile + at + OFFSET(SharedMemory, k), k);
    store_matrix4_transposed(keys + at + keys_offset(0), y);
    if (!s.half) store_matrix4_transposed(keys + at + keys_offset(0) + SQUARE_BYTES, sk);
    store_matrix4_transposed(tile + at + OFFSET(SharedMemory, kg), qg);
  }
  // qg has taken kg's place on its way.
  flush_image(shared + OFFSET(SharedMemory, kg), s, record + OFFSET(ChunkOperands, qg));
  sync_warp();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_matrix4_transposed(tile + (s.at ^ i << 4) + OFFSET(SharedMemory, kg), kept[i]);
}

// A quarter of kd to the record, from zb: a half of the tokens, an image of the channels. Without its anchor, the
// second half decayed over the first.
__device__ __forceinline__ void flush_keys(u32 shared, int half, int image, int lane, unsigned char* record,
                                           float centre) {
  const int piece = lane & 7;
  const u32 first = image * SQUARE_BYTES + swizzled(HALF * half + (lane >> 3), piece);
  const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * (64 * image + 8 * piece);
  float decay[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) decay[j] = exp2_fast((half ? load_shared1(totals + 4 * j) : 0.0f) - centre);
#pragma unroll 2  // not fully, to keep the code small
  for (int n = 0; n < HALF / 4; ++n) {
    const u32 at = (first ^ (n & 1) << 6) + n * 4 * IMAGE_ROW;  // n times 4 rows on
    store_global(record + OFFSET(ChunkOperands, kd) + at,
                 scaled_piece(load_shared_u4(shared + OFFSET(SharedMemory, k) + at), decay));
  }
}

// The chunk's decay to the record.
__device__ __forceinline__ void write_decays(u32 shared, int channel, unsigned char* record) {
  const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * channel;
  reinterpret_cast<float*>(record + OFFSET(ChunkOperands, last))[channel] =
      exp2_fast(load_shared1(totals) + load_shared1(totals + 4 * K));
}
