// Where the tokens of a sequence and value head are.
#pragma once

#include "common/recurrent/token.cuh"
#include "generated/decode_params.cuh"

constexpr int MOST_TOKENS = 16;  // of a sequence

// Elements from the start of an array to a sequence's first token.
struct TokenPlaces {
  Offset x, g, beta, z, o;
};

// Length and places of a sequence's tokens, for a value head.
__device__ __forceinline__ TokenPlaces locate_tokens(const DecodeParams& p, Item& it) {
  Offset batch = it.n, first = 0;
  it.length = ONE ? 1 : (int)p.T;
  if (!PLAIN && p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    first = load_number(p.cu_seqlens, it.n + it.zero, wide);
    it.length = load_number(p.cu_seqlens, it.n + 1 + it.zero, wide) - (int)first;
    batch = 0;
  }
  if (it.length > MOST_TOKENS) it.length = MOST_TOKENS;  // a call may have no more
  const Offset hv = it.hv;
  return {batch * (Offset)p.x_sb + first * (Offset)p.x_st,
          batch * (Offset)p.g_sb + first * (Offset)p.g_st + hv * (Offset)p.g_sh,
          batch * (Offset)p.beta_sb + first * (Offset)p.beta_st + hv * (Offset)p.beta_sh,
          batch * (Offset)p.z_sb + first * (Offset)p.z_st + hv * (Offset)p.z_sh,
          ((batch * (Offset)(ONE ? 1 : p.T) + first) * p.HV + hv) * V};
}
