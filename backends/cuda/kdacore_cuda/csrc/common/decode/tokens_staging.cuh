// Tokens on their way to the recurrence: a thread's channels of q, k and v, convolved, and the decay of its channel,
// for up to PASS_TOKENS tokens at once.
#pragma once

#include "common/decode/tokens_records.cuh"
#include "common/decode/tokens_start.cuh"

__device__ __forceinline__ int norm_column() { return opaque(thread_index()) % NORM_LANES * 4; }
__device__ __forceinline__ bool owns_column() { return COLUMNS == THREADS || thread_index() < COLUMNS; }

// A block's part: columns of a value head.
struct Part {
  int rank, slice;  // in the cluster; of the head's columns
  u32 memory;
  int column() const { return slice * COLUMNS; }
  int first() const { return rank - slice; }  // rank of the head's first block
};

// A token as it is loaded: of a thread's channels.
struct ChannelInputs {
  Bits<1> q, k, v, g;
};
// What a thread needs of its channels for all tokens.
struct Channels {
  Channel q, k, v;
  RawGate<1> gate;
};
// Where the windows of these channels are written that no other block reads.
struct ChannelWindows {
  WindowPlaces q, k, v;
};
// Zeros where nothing is loaded, here and in the functions below. The compiler turns a load that depends on a condition
// into one that keeps what was in its registers. If that is undefined, they are taken on the whole way around the loop
// over passes, and the recurrence has none left to load factors ahead.
__device__ __forceinline__ RawGate<1> load_gate_or_zeros(const DecodeRecordsParams& p, const Item& it) {
  RawGate<1> raw = {};
  const u32 hv = it.hv + it.zero;
  if (p.A_log) raw.A_log = load_global4(p.A_log + 4 * (u64)hv);
  if (!p.dt_bias) return raw;
  if (scalar_gate(p)) {
    raw.scalar_bias = load_elements<1>(p.dt_bias, hv, bias_type(p));
  } else {
    raw.bias = load_elements<1>(p.dt_bias, (u32)it.hv * K + thread_index(), bias_type(p));
  }
  return raw;
}
__device__ __forceinline__ void load_channel(const DecodeRecordsParams& p, Channel& c, int index) {
  c.index = index + thread_index();
  c.weight = {}, c.bias = {};
  load_four(c.weight, p.conv_weight, (Offset)c.index * TAPS, p.conv_weight_type);
  if (p.conv_bias) c.bias = load_elements<1>(p.conv_bias, (Offset)c.index, p.conv_bias_type);
}
__device__ __forceinline__ Channels load_channels(const DecodeRecordsParams& p, const Item& it, const Part& part) {
  const int h = (int)((u64)it.hv * p.group_factor >> p.group_shift);  // hv / (HV / H)
  Channels c;
  load_channel(p, c.q, h * K);
  load_channel(p, c.k, (p.H + h) * K);
  c.v.index = 0;
  if (owns_column()) load_channel(p, c.v, 2 * p.H * K + it.hv * V + part.column());
  c.gate = load_gate_or_zeros(p, it);
  return c;
}
__device__ __forceinline__ int gate_channel(const DecodeRecordsParams& p, const Item& it) {
  return scalar_gate(p) ? it.zero : thread_index();
}
// Of all tokens of a pass, so that they come in one trip.
struct PassInputs {
  ChannelInputs tokens[PASS_TOKENS];
};
__device__ __forceinline__ PassInputs load_inputs(const DecodeRecordsParams& p, const Item& it, const Channels& c,
                                                  const TokenPlaces& at, int first, int count) {
  PassInputs x = {};
  Offset x_at = at.x + first * (Offset)p.x_st, g_at = at.g + first * (Offset)p.g_st + gate_channel(p, it);
#pragma unroll
  for (int i = 0; i < PASS_TOKENS; ++i) {
    if (i < count) {
      x.tokens[i].q = load_elements<1>(p.x, x_at + c.q.index, TYPE_BFLOAT16);
      x.tokens[i].k = load_elements<1>(p.x, x_at + c.k.index, TYPE_BFLOAT16);
      if (owns_column()) x.tokens[i].v = load_elements<1>(p.x, x_at + c.v.index, TYPE_BFLOAT16);
      x.tokens[i].g = load_elements<1>(p.g, g_at, g_type(p));
    }
    x_at += (Offset)p.x_st, g_at += (Offset)p.g_st;
  }
  return x;
}
// The window before token `first` of a channel.
__device__ __forceinline__ void find_window(const DecodeRecordsParams& p, const Sequence& sequence, Channel& c,
                                            Offset x_at, int first) {
  if (first == 0) return load_window(p, sequence.before, c);
#pragma unroll
  for (int i = 0; i < HISTORY; ++i)
    c.window[i] = load_elements<1>(p.x, x_at + (first - HISTORY + i) * (Offset)p.x_st + c.index, TYPE_BFLOAT16);
}

__device__ __forceinline__ void find_windows(const DecodeRecordsParams& p, const Sequence& sequence, Channels& c,
                                             Offset x_at, int first) {
  find_window(p, sequence, c.q, x_at, first), find_window(p, sequence, c.k, x_at, first);
  if (owns_column()) find_window(p, sequence, c.v, x_at, first);
}

// What the recurrence needs of `count` tokens from `first` on, to shared memory; and windows that no other block reads.
__device__ __forceinline__ void stage_tokens(const DecodeRecordsParams& p, const Item& it, const Sequence& sequence,
                                             Channels& c, PassInputs& inputs, u32 memory, int first, int count) {
  const ChannelGates<1> gate = finish_gate(p, c.gate);
  if (first == 0) {
    if (owns_column()) store_first_window(p, sequence, c.v);
    if (CLUSTER == 1) store_first_window(p, sequence, c.q), store_first_window(p, sequence, c.k);
  }
  ChannelWindows to = {window_places(p, sequence, c.q.index), window_places(p, sequence, c.k.index),
                       window_places(p, sequence, c.v.index)};
  if (first > 0) {
    const u64 before = first * to.v.token;
    to.q.next += to.q.next ? before : 0, to.k.next += to.k.next ? before : 0, to.v.next += to.v.next ? before : 0;
  }
  u32 staged = memory + OFFSET(TokensMemory, tokens);
#pragma unroll 1
  for (int left = count; left > 0; --left, staged += sizeof(StagedToken)) {
    const ChannelInputs x = inputs.tokens[0];
#pragma unroll
    for (int i = 0; i + 1 < PASS_TOKENS; ++i) inputs.tokens[i] = inputs.tokens[i + 1];
    const bool is_first = first == 0 && left == count;
    const u32 own = staged + 4 * thread_index();
    float decay[1] = {to_float(x.g, g_type(p))};
    decays(p, decay, gate);
    c.q.x = x.q, c.k.x = x.k, c.v.x = x.v;
    const float q = convolve(p, c.q), k = convolve(p, c.k);
    store_shared(own + OFFSET(StagedToken, decayed_q), __float_as_uint(q * decay[0]));
    store_shared(own + OFFSET(StagedToken, decayed_k), __float_as_uint(k * decay[0]));
    store_shared(own + OFFSET(StagedToken, k), __float_as_uint(k));
    store_shared(own + OFFSET(StagedToken, decay), __float_as_uint(decay[0]));
    if (owns_column()) {
      store_shared(own + OFFSET(StagedToken, v), __float_as_uint(convolve(p, c.v)));
      store_next_window(to.v, c.v, is_first);
    }
    if (CLUSTER == 1) store_next_window(to.q, c.q, is_first), store_next_window(to.k, c.k, is_first);
    const float qq = sum_lanes<32>(q * q), kk = sum_lanes<32>(k * k), qk = sum_lanes<32>(q * k);
    if (thread_index() % 32 == 0)
      store_shared(staged + OFFSET(StagedToken, norms) + 16 * warp_index(), __float_as_uint(qq), __float_as_uint(kk),
                   __float_as_uint(qk), 0);
  }
  if (first + count < it.length) return;
  if (owns_column()) store_last_window(p, sequence, c.v, it.length);
  if (CLUSTER == 1)
    store_last_window(p, sequence, c.q, it.length), store_last_window(p, sequence, c.k, it.length);
}

// This lane's token of a pass: its factors, in registers of the lane whose number modulo the tokens it has.
__device__ __forceinline__ Bits<1> load_beta(const DecodeRecordsParams& p, const Item& it, const TokenPlaces& at,
                                             int first, int count) {
  const int slot = thread_index() % PASS_TOKENS;
  return load_elements<1>(p.beta, at.beta + (first + (slot < count ? slot : 0)) * (Offset)p.beta_st + it.zero,
                          beta_type(p));
}
__device__ __forceinline__ float finish_beta(const DecodeRecordsParams& p, const Bits<1>& raw) {
  float beta = to_float(raw, beta_type(p));
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  return beta;
}
// What this lane's columns of its warp's output are multiplied with, as loaded.
struct NormInputs {
  Bits<4> weight, z;
};
__device__ __forceinline__ bool has_norm(const DecodeRecordsParams& p, int count) {
  return p.norm_weight && warp_index() < count;
}
__device__ __forceinline__ NormInputs load_norm(const DecodeRecordsParams& p, const Item& it, const Part& part,
                                                const TokenPlaces& at, int first, int count) {
  NormInputs in = {};
  if (!has_norm(p, count)) return in;
  const int column = part.column() + norm_column();
  load_four(in.weight, p.norm_weight, it.hv * (Offset)p.norm_sh + column, p.norm_type);
  if (p.z) in.z = load_z(p, at.z + (first + warp_index()) * (Offset)p.z_st, column);
  return in;
}
__device__ __forceinline__ float4 finish_norm(const DecodeRecordsParams& p, const NormInputs& in, int count) {
  return has_norm(p, count) ? norm_factors(p, in.weight, in.z) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}
