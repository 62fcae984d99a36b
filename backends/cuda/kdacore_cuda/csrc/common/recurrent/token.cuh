// Where a sequence starts, and the preparation of one token.
#pragma once

#include "common/gate.cuh"
#include "common/l2norm.cuh"
#include "common/recurrent/memory.cuh"
#include "generated/recurrent_params.cuh"

constexpr int K = K_DIM;
constexpr int V = K_DIM;

__device__ __forceinline__ int qkv_type(const RecurrentParams& p) {
  return PLAIN ? TYPE_BFLOAT16 : p.qkv_type;
}
__device__ __forceinline__ int g_type(const RecurrentParams& p) {
  return ONE && !HEAD ? TYPE_BFLOAT16 : p.g_type;
}
__device__ __forceinline__ int beta_type(const RecurrentParams& p) {
  return ONE && !HEAD ? TYPE_BFLOAT16 : p.beta_type;
}
__device__ __forceinline__ int bias_type(const RecurrentParams& p) {
  return ONE && !HEAD ? TYPE_FLOAT32 : p.bias_type;
}
__device__ __forceinline__ bool scalar_gate(const RecurrentParams& p) {
  return HEAD || (!PLAIN && p.flags & FLAG_SCALAR_GATE);
}

// An element of an integer array of 32 or 64 bits.
struct Number {
  u32 low, high;  // high: of 64 bits only
};
__device__ __forceinline__ Number load_number_bits(u64 base, long long index, bool wide) {
  Number r;
  const u64 at = base + index * (wide ? 8 : 4);
  if (wide) {
    const uint2 x = load_global8(at);
    r = {x.x, x.y};
  } else {
    r.low = load_global4(at);
  }
  return r;
}
// Negative numbers stay negative.
__device__ __forceinline__ int number_of(const Number& x, bool wide) {
  return wide && (int)x.high < 0 ? -1 : (int)x.low;
}
__device__ __forceinline__ int load_number(u64 base, long long index, bool wide) {
  return number_of(load_number_bits(base, index, wide), wide);
}

template <bool SMALL>
struct OffsetOf {
  using type = u64;
};
template <>
struct OffsetOf<true> {
  using type = u32;
};
using Offset = OffsetOf<PLAIN>::type;  // in elements

// One sequence and value head, and where its next token is.
struct Item {
  int n, hv;
  // Zero, which the compiler does not know. It would move values loaded from an address common to
  // all threads to uniform registers, and each such move waits for its load.
  int zero;
  int length;  // tokens
  Offset q, v, beta, o;
  Offset k, g;  // unless PLAIN, where they equal q and v
};
__device__ __forceinline__ Offset k_of(const Item& it) { return PLAIN ? it.q : it.k; }
__device__ __forceinline__ Offset g_of(const Item& it) { return PLAIN ? it.v : it.g; }

// Fills all but n and zero.
__device__ __forceinline__ void locate(const RecurrentParams& p, u32 index, Item& it) {
  it.hv = (int)index - it.n * p.HV;
  const u32 qk_index = (u32)((u64)index * p.group_factor >> p.group_shift);  // index / (HV / H)
  it.length = ONE ? 1 : (int)p.T;
  if constexpr (ONE) {
    it.q = qk_index * K;
    it.v = it.o = index * K;
    it.beta = index;
  } else {
    const int h = (int)qk_index - it.n * p.H;
    long long batch = it.n, first = 0;
    if (!PLAIN && p.cu_seqlens) {
      const bool wide = p.flags & FLAG_CU64;
      first = load_number(p.cu_seqlens, it.n + it.zero, wide);
      it.length = load_number(p.cu_seqlens, it.n + 1 + it.zero, wide) - (int)first;
      batch = 0;
    }
    it.q = (Offset)(batch * p.q_sb + first * p.q_st + (long long)h * p.q_sh);
    it.k = (Offset)(batch * p.k_sb + first * p.k_st + (long long)h * p.k_sh);
    it.v = (Offset)(batch * p.v_sb + first * p.v_st + (long long)it.hv * p.v_sh);
    it.g = (Offset)(batch * p.g_sb + first * p.g_st + (long long)it.hv * p.g_sh);
    it.beta = (Offset)(batch * p.beta_sb + first * p.beta_st + (long long)it.hv * p.beta_sh);
    it.o = (Offset)(((batch * p.T + first) * p.HV + it.hv) * V);
  }
}

__device__ __forceinline__ void next_token(const RecurrentParams& p, Item& it) {
  it.q += p.q_st;
  it.k += p.k_st;
  it.v += p.v_st;
  it.g += p.g_st;
  it.beta += p.beta_st;
}

// Whether a pool row that an index names exists.
__device__ __forceinline__ bool is_slot(const RecurrentParams& p, int row) {
  return row >= 0 && row != p.null_index;
}

// The pool row a sequence starts from: loaded but not yet converted, or known. `has_initial` is 0
// if it starts from zeros whatever the row holds.
struct Start {
  Number bits;
  int row;
  u32 has_initial;
  bool known;
};

__device__ __forceinline__ Start start_of(const RecurrentParams& p, const Item& it) {
  Start s;
  s.has_initial = 1;
  s.known = !ONE && (!p.h0 || !p.indices);
  s.row = p.h0 ? it.n : -1;
  if (!s.known) {
    const bool wide = p.flags & FLAG_INDEX64;
    long long at = (it.n + it.zero) * p.indices_row;
    if (!ONE && p.accepted) {
      const int accepted = load_number(p.accepted, it.n + it.zero, p.flags & FLAG_ACCEPTED64);
      s.known = accepted <= 0;
      s.row = -1;
      at += accepted - 1;
    }
    if (!s.known) s.bits = load_number_bits(p.indices, at, wide);
  }
  if (p.has_initial) s.has_initial = load_global1(p.has_initial + it.n + it.zero);
  return s;
}
// The row. No slot: the sequence is padding, except that a negative row that is known stands for
// zeros.
__device__ __forceinline__ int row_of(const RecurrentParams& p, const Start& s) {
  return s.known ? s.row : number_of(s.bits, p.flags & FLAG_INDEX64);
}

// N neighbouring channels of one token, not yet converted.
template <int N>
struct RawToken {
  Bits<N> q, k, g;
  Bits<1> beta, scalar_g;
};

template <int N>
__device__ __forceinline__ RawToken<N> load_token(const RecurrentParams& p, const Item& it, int channel) {
  RawToken<N> raw;
  raw.q = load_elements<N>(p.q, it.q + channel, qkv_type(p));
  raw.k = load_elements<N>(p.k, k_of(it) + channel, qkv_type(p));
  if (scalar_gate(p)) {
    raw.scalar_g = load_elements<1>(p.g, (HEAD ? it.beta : it.g) + it.zero, g_type(p));
  } else {
    raw.g = load_elements<N>(p.g, g_of(it) + channel, g_type(p));
  }
  raw.beta = load_elements<1>(p.beta, it.beta + it.zero, beta_type(p));
  return raw;
}

// A head's gate parameters.
template <int N>
struct RawGate {
  Bits<N> bias;
  Bits<1> scalar_bias;
  u32 A_log;
};

template <int N>
__device__ __forceinline__ RawGate<N> load_gate(const RecurrentParams& p, const Item& it, int channel) {
  RawGate<N> raw;
  const u32 hv = it.hv + it.zero;
  if (p.A_log) raw.A_log = load_global4(p.A_log + 4 * (u64)hv);
  if (!p.dt_bias) return raw;
  if (scalar_gate(p)) {
    raw.scalar_bias = load_elements<1>(p.dt_bias, hv, bias_type(p));
  } else {
    raw.bias = load_elements<N>(p.dt_bias, (u32)it.hv * K + channel, bias_type(p));
  }
  return raw;
}

template <int N>
__device__ __forceinline__ ChannelGates<N> finish_gate(const RecurrentParams& p, const RawGate<N>& raw) {
  ChannelGates<N> gate;
#pragma unroll
  for (int i = 0; i < N; ++i) gate.bias[i] = 0.0f;
  if (p.dt_bias && scalar_gate(p)) {
    const float bias = held_bias(to_float(raw.scalar_bias, bias_type(p)));
#pragma unroll
    for (int i = 0; i < N; ++i) gate.bias[i] = bias;
  } else if (p.dt_bias) {
    to_floats(gate.bias, raw.bias, bias_type(p));
#pragma unroll
    for (int i = 0; i < N; ++i) gate.bias[i] = held_bias(gate.bias[i]);
  }
  const float A_log = p.A_log ? __uint_as_float(raw.A_log) : 0.0f;
  finish_gates(gate, p.gate, A_log);
  return gate;
}

// A prepared token. q and k are not scaled: scale and norms are linear and applied to the sums.
template <int N>
struct Token {
  float q[N], k[N], d[N];
  float beta;
  float qq, kk, qk;  // sums over these channels
};

template <int N>
__device__ __forceinline__ Token<N> finish_token(const RecurrentParams& p, const RawToken<N>& raw,
                                                 const ChannelGates<N>& gate) {
  Token<N> x;
  to_floats(x.q, raw.q, qkv_type(p));
  to_floats(x.k, raw.k, qkv_type(p));
  x.qq = x.kk = x.qk = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x.qq = multiply_add(x.q[i], x.q[i], x.qq);
    x.kk = multiply_add(x.k[i], x.k[i], x.kk);
    x.qk = multiply_add(x.q[i], x.k[i], x.qk);
  }
  if (scalar_gate(p)) {
    const float g = to_float(raw.scalar_g, g_type(p));
#pragma unroll
    for (int i = 0; i < N; ++i) x.d[i] = g;
  } else {
    to_floats(x.d, raw.g, g_type(p));
  }
  decays(p, x.d, gate);
  x.beta = to_float(raw.beta, beta_type(p));
  if (p.flags & FLAG_BETA_SIGMOID) x.beta = sigmoid(x.beta);
  if (p.flags & FLAG_NEG_EIGVAL) x.beta *= 2.0f;
  return x;
}

// Sum over groups of LANES neighbouring lanes.
template <int LANES>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int mask = LANES / 2; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}

// Factors of q and k, from the sums over all of K.
struct Factors {
  float q, k;
};
__device__ __forceinline__ Factors factors_of(const RecurrentParams& p, float qq, float kk) {
  if (!(p.flags & FLAG_L2NORM)) return {p.scale, 1.0f};
  return {p.scale * inverse_norm(qq), inverse_norm(kk)};
}

// What a token does to a state: N channels and M columns of it. See records.cuh.
template <int N, int M>
struct RecordOf {
  float key[N], decay[N], update[M];
};
