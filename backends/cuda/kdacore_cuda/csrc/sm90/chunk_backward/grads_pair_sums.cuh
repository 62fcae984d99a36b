// The sums over pairs of tokens, and with them the gradients of q, k and the decays. For each half
// of tokens:
//
//   dq = up aq       aq = the state's part + sum_j dA_ij yk_j       + across: sum_j dA_ij sk_j
//   x  = up ax       ax = the state's part + sum_j dL_ij yk_j       + across: sum_j dL_ij sk_j
//   dk = beta x + cy / up + out cs,    out = 2^(decay to the half's end),
//                    cy = sum_i (dA_ij zq_i + dL_ij zb_i)
//                    cs = the state's part                          + across: the same sum
//   dgc = zq aq + zb ax - yk cy - sk cs
//
// so that what cancels exactly in dgc cancels in bfloat16 too. Across: from the first half of
// tokens to the second. Everything is scaled by `shrink` until dq and dk are stored.
#pragma once

#include "sm90/chunk_backward/grads_operands.cuh"
#include "sm90/chunk_backward/grads_states.cuh"

// For each of the lane's channels the sum over the half's tokens of f(j, e), to float [128] at
// `to`.
template <class F>
__device__ __forceinline__ void sum_tokens(u32 to, const Lane& l, F f) {
  float sum[2] = {};
  each([&](int j, int e) { sum[e >> 1] += f(j, e); });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = sum_quad(sum[r]);
    if (l.t == 0) store_shared(to + 4 * (l.channel + 8 * r), __float_as_uint(total));
  }
}

// After the products of the half's own pairs were started, those of cs and cy first: then dq in aq,
// x in ax, dk in cy, dgc in cs. Later tokens first, here and in make_operands(): that spills least.
template <int TOKEN_HALF>
__device__ __forceinline__ void finish_pairs(Accumulators& d, float (&cy)[4][4], const Operands& o,
                                             const Decays& saved, u32 shared, u32 scalars, const Lane& l) {
  warpgroup_wait<1>();
  fence_registers(d.cs);
  fence_registers(cy);
  float end[2][ANCHORS];
  load_anchor_ends<TOKEN_HALF>(end, shared, l);
  {
    const u32 own = shared + operand_at(OFFSET(SharedMemory, sk), 2 * TOKEN_HALF + l.channel_half);
    u32 sk[4];
#pragma unroll
    for (int j = 3; j >= 0; --j) {
      if (j % 2) load_operand_part(sk, own, j / 2, l);
      float up[4];
      load_decays(up, saved, j, shared, l);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float down = -reciprocal(-up[e]), c = d.cs[j][e], y = cy[j][e];
        cy[j][e] = down * y + end[e >> 1][anchor_of(j)] * down * c;
        d.cs[j][e] = -element(sk, j, e) * c - element(o.yk, j, e) * y;
      }
    }
  }
  warpgroup_wait<0>();
  fence_registers(d.aq);
  fence_registers(d.ax);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 beta = load_shared2(scalars + 4 * (HALF * TOKEN_HALF + 8 * j + 2 * l.t));
    float up[4];
    load_decays(up, saved, j, shared, l);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d.cs[j][e] += element(o.zq, j, e) * d.aq[j][e];
      d.aq[j][e] *= up[e];
      d.cs[j][e] += element(o.zb, j, e) * d.ax[j][e];
      d.ax[j][e] *= up[e];
      cy[j][e] += (e & 1 ? beta.y : beta.x) * d.ax[j][e];
    }
  }
}
