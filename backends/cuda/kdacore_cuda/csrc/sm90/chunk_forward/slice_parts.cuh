// What slice warps load, and what they leave in shared memory for solver warps and scan warps. How they
// get from one to the other depends on the gates: slices_bounded.cuh, slices_unbounded.cuh.
#pragma once

#include "common/chunk_forward/bounded_triangles.cuh"
#include "common/chunk_forward/dyadic_triangles.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/own_heads.cuh"
#include "sm90/chunk_forward/schedule.cuh"

// How many channels a head has from this lane's first one on; positive: all of the lane's.
template <bool LESS_THAN_TILES>
struct ChannelsLeft {
  __device__ __forceinline__ void set_channels(int) {}
  __device__ __forceinline__ void move_channels(int) {}
  __device__ __forceinline__ bool has_channels() const { return true; }
};
template <>
struct ChannelsLeft<true> {
  int channels_left;
  __device__ __forceinline__ void set_channels(int left) { channels_left = left; }
  __device__ __forceinline__ void move_channels(int by) { channels_left -= by; }
  __device__ __forceinline__ bool has_channels() const { return channels_left > 0; }
};

// Addresses of this lane's channels of token 2p of the next chunk to load; byte strides between
// tokens.
struct Source : ChannelsLeft<NARROW> {
  const unsigned char *k, *q, *g;
  int k_token, q_token, g_token;
};

// Steps from one chunk of a group to its next.
constexpr int STRIDE = GROUPS * PREPARERS;

__device__ __forceinline__ void advance(Source& s) {
  s.k += (long long)STRIDE * C * s.k_token;
  s.q += (long long)STRIDE * C * s.q_token;
  s.g += (long long)STRIDE * C * s.g_token;
}

// By so many tokens, heads and value heads.
__device__ __forceinline__ void advance(Source& s, const ChunkForwardParams& p, int tokens, int heads,
                                        int value_heads) {
  s.k += (long long)tokens * s.k_token + 2 * heads * p.k_sh;
  s.q += (long long)tokens * s.q_token + 2 * heads * p.q_sh;
  s.g += (long long)tokens * s.g_token + (G_FLOAT ? 4 : 2) * value_heads * p.g_sh;
}

// The next load, into the same registers as soon as they have been used: the chunk at `from`, of
// which this lane has `left` tokens. Registers of tokens past the end keep their values.
struct NextLoad {
  const Source& from;
  int left;
};

constexpr u32 GATE_PITCH = 32 * 16;
template <bool ALONE = SEPARATE>
__device__ __forceinline__ void load_gate(Raw& raw, const NextLoad& r, u32 buffer) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < G_VECTORS; ++j) {
      const unsigned char* from = r.from.g + i * r.from.g_token + 16 * j;
      if constexpr (NARROW && ALONE) {
        if (i < r.left)
          copy_async16(buffer + GATE_PITCH * (G_VECTORS * i + j), r.from.has_channels() ? from : r.from.k,
                       r.from.has_channels());
      } else if constexpr (ALONE) {
        if (i < r.left) copy_async16(buffer + GATE_PITCH * (G_VECTORS * i + j), from, true);
      } else if constexpr (NARROW) {  // stays 0 elsewhere
        load_sixteen(raw.g[i][j], from, i < r.left && r.from.has_channels());
      } else {
        load_sixteen(raw.g[i][j], from, i < r.left);
      }
    }
  }
  if constexpr (ALONE) copy_async_commit();
}

// Waits until the gate has arrived. Blocks that only prepare load it with cp.async into shared memory (`buffer`: 16
// bytes a lane). All loads to registers in the loop share one scoreboard, and the gate is used first in a step, so
// it would also wait for the keys and queries, whose loads are issued last.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ void receive_gate(Raw& raw, u32 buffer) {
  if constexpr (ALONE) {
    copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < G_VECTORS; ++j)
        raw.g[i][j] = load_shared_u4(buffer + GATE_PITCH * (G_VECTORS * i + j));
    }
  }
}

__device__ __forceinline__ void load_rows(Raw& raw, const NextLoad& r) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (NARROW) {
      const bool real = r.from.has_channels();
      if (SEPARATE && !real) raw.k[i] = raw.q[i] = make_uint4(0, 0, 0, 0);  // they had another slice's
      load_sixteen(raw.k[i], r.from.k + i * r.from.k_token, real && i < r.left);
      load_sixteen(raw.q[i], r.from.q + i * r.from.q_token, real && i < r.left);
      continue;
    }
    load_sixteen(raw.k[i], r.from.k + i * r.from.k_token, i < r.left);
    load_sixteen(raw.q[i], r.from.q + i * r.from.q_token, i < r.left);
  }
}

// What a slice warp works on.
struct Place {
  int slice, odd, half;  // odd: slice & 1, which stays the same while a pair alternates between two slices
  u32 stage, exchange;   // exchange: this lane's 16 bytes of the pair's
  int pair;              // the pair's barrier
};

// Sums over channels.
struct Products {
  float tile[4]
            [4];  // bounded gates: k k and q k against even and odd tokens; else k k and q k by dyadic level
  float square[2][2];  // of k and q, by token
  float diagonal[2];   // unbounded gates: q k, by token
};

// k 2^G and q 2^G from the half's start, of the lane's two tokens.
struct Operands {
  u32 k[2][4], q[2][4];
};

// The decays of a lane's tokens and channels, for bounded gates or not.
template <bool BOUNDED_GATES>
struct Decays;

// Of the second half against the first: k k and q k, against even and odd tokens.
struct Across {
  float tile[4][4];
};

// Where this lane's 8 channels of its slice go in 64 channels of an operand, for token i of its
// half.
__device__ __forceinline__ u32 piece_offset(const Lane& l, int i, const Place& at) {
  const u32 even = swizzled(HALF * at.half + 2 * l.p, at.odd * 4 + l.t);
  return i ? (opaque(even) ^ 16) + 128 : even;  // derived from the other to save registers
}

// Shared memory holds the total decay of a half: the decay itself, or its log2 if gates are unbounded.
__device__ __forceinline__ float decay_of(float total) { return BOUNDED ? total : exp2_fast(total); }

// Where the decay of the lane's first channel goes: the image has 4 floats (channels 2t, 2t+1, 2t+8, 2t+9) a
// lane and 16 channels, the order in which scan lanes read them. A lane's channels are pairs 4 floats apart.
__device__ __forceinline__ u32 decay_place(const Place& at, int t) {
  return at.stage + OFFSET(ChunkImage, decay) + 4 * (32 * at.slice + 16 * (t >> 1) + 2 * (t & 1));
}

// This lane's channels of token i.
__device__ __forceinline__ void store_rows(const Place& at, const Lane& l, int i, const u32 (&k)[4],
                                           const u32 (&q)[4], const u32 (&kg)[4]) {
  const u32 to = piece_offset(l, i, at), wide = at.slice >> 1;
  const u32 kq = at.stage + OFFSET(ChunkImage, kq) + wide * 2 * ROWS_BYTES + to;
  store_shared(kq, k[0], k[1], k[2], k[3]);
  store_shared(kq + ROWS_BYTES, q[0], q[1], q[2], q[3]);
  store_shared(at.stage + OFFSET(ChunkImage, kg) + wide * ROWS_BYTES + to, kg[0], kg[1], kg[2], kg[3]);
}

// The first half's k 2^(G_last - G), each lane to the second half's same lane.
__device__ __forceinline__ void send_keys(const Place& at, int i, const u32 (&kg)[4]) {
  store_shared(at.exchange + 512 * i, kg[0], kg[1], kg[2], kg[3]);
}

// Sums across the halves: rows k and q of the second, columns the first's tokens.
__device__ __forceinline__ Across across_products(const Place& at, const Operands& operands) {
  const u32(&k)[2][4] = operands.k, (&q)[2][4] = operands.q;
  Across sums = {};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint4 kg = load_shared_u4(at.exchange + 512 * tile);
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      const u32 a[4] = {k[0][w], k[1][w], k[0][w + 1], k[1][w + 1]};
      const u32 b[4] = {q[0][w], q[1][w], q[0][w + 1], q[1][w + 1]};
      mma_bf16(sums.tile[tile], a, word(kg, w), word(kg, w + 1));
      mma_bf16(sums.tile[2 + tile], b, word(kg, w), word(kg, w + 1));
    }
  }
  return sums;
}

__device__ __forceinline__ void store_tile(u32 to, const float (&x)[4]) {
  store_shared(to, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
               __float_as_uint(x[3]));
}
__device__ __forceinline__ void store_tiles(u32 to, const float (&tile)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) store_tile(to + i * PART_BYTES, tile[i]);
}
