// Operands made of q, k and the gate. With q and k normalised and up = 2^(decay from the first
// token of its anchor + centre):
//
//   zq = q up    zb = beta k up    yk = k / up    sk = k 2^(decay to the end of the anchor's tokens)
//
// rounded to bfloat16 once.
#pragma once

#include "sm90/chunk_backward/grads_shared_memory.cuh"

struct Operands {
  Operand zq, zb, yk;
};

// A lane's decays while pairs are multiplied: in registers, or (DECAYS_IN_STATES) in the first
// halves of the images of dh and h, which have been read.
struct Decays {
  float up[DECAYS_IN_STATES ? 1 : 4][4];
};
__device__ __forceinline__ u32 saved_decays_address(u32 shared, int j, const Lane& l) {
  return shared + (j < 2 ? OFFSET(SharedMemory, dh) : OFFSET(SharedMemory, h)) + (j & 1) * (STATE_BYTES / 2) +
         16 * l.thread;
}
__device__ __forceinline__ void save_decays(Decays& to, const float (&up)[4][4], u32 shared, const Lane& l) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (DECAYS_IN_STATES) {
      store_shared(saved_decays_address(shared, j, l), __float_as_uint(up[j][0]), __float_as_uint(up[j][1]),
                   __float_as_uint(up[j][2]), __float_as_uint(up[j][3]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to.up[j][e] = up[j][e];
    }
  }
}
__device__ __forceinline__ void load_decays(float (&up)[4], const Decays& from, int j, u32 shared,
                                            const Lane& l) {
  if (DECAYS_IN_STATES) {
    const float4 x = load_shared4(saved_decays_address(shared, j, l));
    up[0] = x.x, up[1] = x.y, up[2] = x.z, up[3] = x.w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) up[e] = from.up[j][e];
  }
}

__device__ __forceinline__ u32 operand_at(u32 area, int part) { return area + part * OPERAND_BYTES; }

// sk of both halves of tokens, and zq and zb of the later half, also go to shared memory.
__device__ __forceinline__ void make_operands(Operands& o, const Decays& saved,
                                              const float (&end)[2][ANCHORS], u32 shared, u32 scalars,
                                              const Lane& l) {
  const u32 tokens = scalars + 4 * (HALF * l.token_half + 2 * l.t),
            own = shared + 16 * (l.thread & 127) + operand_at(0, l.channel_half);
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    u32 x[4];
    float up[2][4];
    load_decays(up[0], saved, 2 * i, shared, l);
    load_decays(up[1], saved, 2 * i + 1, shared, l);
    load_matrix4_transposed(x, shared + OFFSET(SharedMemory, q) + l.own + 16 * IMAGE_ROW * i);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int j = 2 * i + (w >> 1), e = 2 * (w & 1);
      const float* u = up[w >> 1];
      const float2 rq = load_shared2(tokens + OFFSET(RowScalars, q_norm) + 32 * j);
      o.zq[i][w] = pack_bf16(bf16_low(x[w]) * rq.x * u[e], bf16_high(x[w]) * rq.y * u[e + 1]);
    }
    load_matrix4_transposed(x, shared + OFFSET(SharedMemory, k) + l.own + 16 * IMAGE_ROW * i);
    u32 sk[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * i + half;
      const float2 beta = load_shared2(tokens + 32 * j),
                   rk = load_shared2(tokens + OFFSET(RowScalars, k_norm) + 32 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int w = 2 * half + r;
        const float u0 = up[half][2 * r], u1 = up[half][2 * r + 1];
        const float k0 = bf16_low(x[w]) * rk.x, k1 = bf16_high(x[w]) * rk.y;
        const float y0 = k0 * reciprocal(u0), y1 = k1 * reciprocal(u1);
        o.yk[i][w] = pack_bf16(y0, y1);
        sk[w] = pack_bf16(y0 * end[r][anchor_of(j)], y1 * end[r][anchor_of(j)]);
        o.zb[i][w] = pack_bf16(k0 * u0 * beta.x, k1 * u1 * beta.y);
      }
    }
    store_shared(own + OFFSET(SharedMemory, sk) + 2 * OPERAND_BYTES * l.token_half + 16 * 128 * i, sk[0],
                 sk[1], sk[2], sk[3]);
    if (l.token_half) {
      store_shared(own + OFFSET(SharedMemory, zq) + 16 * 128 * i, o.zq[i][0], o.zq[i][1], o.zq[i][2],
                   o.zq[i][3]);
      store_shared(own + OFFSET(SharedMemory, zb) + 16 * 128 * i, o.zb[i][0], o.zb[i][1], o.zb[i][2],
                   o.zb[i][3]);
    }
  }
}

// The 16 tokens of `part`.
__device__ __forceinline__ void load_operand_part(u32 (&r)[4], u32 from, int part, const Lane& l) {
  const uint4 x = load_shared_u4(from + 16 * (l.thread & 127) + 16 * 128 * part);
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
__device__ __forceinline__ void load_operand(Operand& r, u32 from, const Lane& l) {
#pragma unroll
  for (int i = 0; i < 2; ++i) load_operand_part(r[i], from, i, l);
}

// Where up at the end of an anchor's tokens is stored until it is needed again: in the upper
// triangle of the image of dA.
__device__ __forceinline__ u32 anchor_end_address(u32 shared, int anchor, int channel) {
  return shared + OFFSET(SharedMemory, dA) + swizzled(channel >> 2, 4 + anchor) + 4 * (channel & 3);
}
__device__ __forceinline__ void store_anchor_ends(const float (&end)[2][ANCHORS], u32 shared, const Lane& l) {
  if (l.t) return;
#pragma unroll
  for (int i = 0; i < 2 * ANCHORS; ++i) {
    const u32 to =
        anchor_end_address(shared, ANCHORS * l.token_half + i % ANCHORS, l.channel + 8 * (i / ANCHORS));
    store_shared(to, __float_as_uint(end[i / ANCHORS][i % ANCHORS]));
  }
}
template <int TOKEN_HALF>
__device__ __forceinline__ void load_anchor_ends(float (&end)[2][ANCHORS], u32 shared, const Lane& l) {
#pragma unroll
  for (int i = 0; i < 2 * ANCHORS; ++i) {
    end[i / ANCHORS][i % ANCHORS] = load_shared1(
        anchor_end_address(shared, ANCHORS * TOKEN_HALF + i % ANCHORS, l.channel + 8 * (i / ANCHORS)));
  }
}
