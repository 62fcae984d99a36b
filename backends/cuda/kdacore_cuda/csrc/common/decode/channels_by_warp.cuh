// The convolution and the gate of decode_sequences.cu, by kinds: of a token the first warp has q, the second k, the
// third v, the fourth the gate, four neighbouring channels a lane. Loads and stores are of 8 bytes where these lie
// together, and each input is converted once. Behind a barrier each warp completes one token.
#pragma once

#include "common/decode/sequences_memory.cuh"

constexpr int CHANNELS = 4;  // of a lane
constexpr int GATE_WARP = 3;
static_assert(WARPS == 4 && THREADS * CHANNELS == 4 * K, "a warp for each of q, k, v and the gate");

// This lane's first channel among a head's.
__device__ __forceinline__ int lane_channel() { return CHANNELS * (opaque(thread_index()) % 32); }
// The same among all channels of x, of a warp with a convolution.
__device__ __forceinline__ int x_channel(const DecodeRecordsParams& p, int hv) {
  return (warp_index() * p.H + hv) * K + lane_channel();  // as many value heads as key heads
}

// --- weights ------------------------------------------------------------------------------------------------------

// Once for all sequences of the block.
__device__ __forceinline__ void keep_weights(const DecodeRecordsParams& p, const Item& it, u32 memory) {
  const int thread = thread_index();
  const u32 own = memory + OFFSET(SequencesMemory, weights) + 16 * thread,
            biases = own + OFFSET(ChannelWeights, biases);
  if (warp_index() == GATE_WARP) {
    RawGate<CHANNELS> raw = {};
    if (p.A_log) raw.A_log = load_global4(p.A_log + 4 * (u64)(u32)(it.hv + it.zero));
    if (p.dt_bias) raw.bias = load_elements<CHANNELS>(p.dt_bias, (u32)it.hv * K + lane_channel(), bias_type(p));
    const ChannelGates<CHANNELS> gate = finish_gate(p, raw);
    store_shared(own, __float_as_uint(gate.factor));
    store_shared(biases, __float_as_uint(gate.bias[0]), __float_as_uint(gate.bias[1]), __float_as_uint(gate.bias[2]),
                 __float_as_uint(gate.bias[3]));
  } else {
    const int channel = x_channel(p, it.hv);
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      float w[TAPS];
      to_floats(w, load_four(p.conv_weight, (Offset)(channel + c) * TAPS, p.conv_weight_type), p.conv_weight_type);
      store_shared(own + 16 * THREADS * c, __float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]),
                   __float_as_uint(w[3]));
      Bits<1> bias = {};
      if (p.conv_bias) bias = load_elements<1>(p.conv_bias, (Offset)(channel + c), p.conv_bias_type);
      store_shared(biases + 4 * c, __float_as_uint(to_float(bias, p.conv_bias_type)));
    }
  }
  if (p.norm_weight && thread < V) {
    const Bits<1> weight = load_elements<1>(p.norm_weight, it.hv * (Offset)p.norm_sh + thread, p.norm_type);
    store_shared(memory + OFFSET(SequencesMemory, norm) + 4 * thread, __float_as_uint(to_float(weight, p.norm_type)));
  }
}

// --- loads --------------------------------------------------------------------------------------------------------

// Four channels of a token, as loaded.
struct Four {
  u32 w[2];
};
__device__ __forceinline__ Four load_together(u64 at) {
  const uint2 x = load_global8(at);
  return {x.x, x.y};
}
__device__ __forceinline__ Four load_apart(u64 at, u64 step) {
  u32 x[CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) x[c] = load_global2(at + c * step);
  return {x[0] | x[1] << 16, x[2] | x[3] << 16};
}
__device__ __forceinline__ void store_four_channels(u64 at, u64 step, bool together, const Four& x) {
  if (together) return store_global8(at, x.w[0], x.w[1]);
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) store_global2(at + c * step, x.w[c / 2] >> 16 * (c & 1));
}
__device__ __forceinline__ void to_floats(float (&y)[CHANNELS], const Four& x) {
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) y[c] = c & 1 ? bf16_high(x.w[c / 2]) : bf16_low(x.w[c / 2]);
}

// What a lane loads for a pass: its channels of tokens and of the window before them; of the token that is its warp's,
// beta and z; and of the record with that number.
struct LaneInputs {
  Four x[PASS_TOKENS], window[HISTORY];
  Bits<1> beta;
  Bits<4> z;
  uint4 update, key, decay;
};
// The tokens' part, from token `first` on. `before`: the window before the sequence.
__device__ __forceinline__ void load_tokens(const DecodeRecordsParams& p, LaneInputs& in, const Item& it,
                                            const Window& before, const TokenPlaces& at, int first, int count) {
  const bool gates = warp_index() == GATE_WARP;
  const int channel = x_channel(p, it.hv);
  const u64 step = 2 * (gates ? (u64)p.g_st : (u64)p.x_st);
  const u64 token = (gates ? p.g + 2 * (u64)(at.g + lane_channel()) : p.x + 2 * (u64)(at.x + channel)) + first * step;
  // The window's token `i`, then those of x.
  u64 window = window_element(p, before, channel, 0), window_step = 2 * (u64)before.token,
      apart = 2 * (u64)before.channel;
  bool exists = before.base && !gates;
  if (first > 0) window = token - HISTORY * step, window_step = step, apart = 2, exists = !gates;
  const bool together = ((token | step) & 7) == 0 && (!exists || (apart == 2 && ((window | window_step) & 7) == 0));
#pragma unroll
  for (int i = 0; i < PASS_TOKENS; ++i) in.x[i] = {};
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) in.window[i] = {};
  if (together) {
#pragma unroll
    for (int i = 0; i < HISTORY; ++i) {
      if (exists) in.window[i] = load_together(window + i * window_step);
    }
#pragma unroll
    for (int i = 0; i < PASS_TOKENS; ++i) {
      if (i < count) in.x[i] = load_together(token + i * step);
    }
  } else {
#pragma unroll
    for (int i = 0; i < HISTORY; ++i) {
      if (exists) in.window[i] = load_apart(window + i * window_step, apart);
    }
#pragma unroll
    for (int i = 0; i < PASS_TOKENS; ++i) {
      if (i < count) in.x[i] = load_apart(token + i * step, 2);
    }
  }
  const int slot = warp_index();
  in.beta = {}, in.z = {};
  if (slot >= count) return;
  in.beta = load_elements<1>(p.beta, at.beta + (first + slot) * (Offset)p.beta_st + it.zero, beta_type(p));
  if (p.norm_weight && p.z) in.z = load_z(p, at.z + (first + slot) * (Offset)p.z_st, lane_channel());
}
// The record with this warp's number.
__device__ __forceinline__ void load_record(const DecodeRecordsParams& p, LaneInputs& in, const Records& r) {
  const int record = warp_index();
  const u64 at = 4 * (u64)lane_channel();
  in.update = in.key = in.decay = make_uint4(0, 0, 0, 0);
  if (record >= r.replayed) return;
  in.update = load_global16(r.update + 4 * (record * p.update_st) + at);
  in.key = load_global16(r.key + 4 * (record * p.key_st) + at);
  in.decay = load_global16(r.decay + 4 * (record * p.decay_st) + at);
}
__device__ __forceinline__ void store_bits(u32 at, const uint4& x) { store_shared(at, x.x, x.y, x.z, x.w); }
__device__ __forceinline__ void share_record(const LaneInputs& in, u32 memory) {
  const int record = warp_index(), channel = lane_channel();
  store_bits(record_place(memory, record, channel, OFFSET(WarpRecord, update)), in.update);
  store_bits(record_place(memory, record, channel, OFFSET(WarpRecord, key)), in.key);
  store_bits(record_place(memory, record, channel, OFFSET(WarpRecord, decay)), in.decay);
}

// --- the convolution ----------------------------------------------------------------------------------------------

// Where four channels' windows behind candidates go: see WindowPlaces.
struct FourWindows {
  u64 next, token, column, apart;
  bool whole, together;
};
__device__ __forceinline__ FourWindows four_windows(const DecodeRecordsParams& p, const Sequence& q, int channel,
                                                    int first) {
  const WindowPlaces to = window_places(p, q, channel);
  const u64 apart = 2 * (u64)(to.whole ? (Offset)p.window_sc : (Offset)p.conv_sc);
  const u64 next = to.next ? to.next + first * to.token : 0;
  return {next, to.token, to.column, apart, to.whole, apart == 2 && ((next | to.token | to.column) & 7) == 0};
}
__device__ __forceinline__ void store_window(const DecodeRecordsParams& p, const Window& to, int channel,
                                             const Four (&x)[PASS_TOKENS + HISTORY], int from) {
  const u64 at = window_element(p, to, channel, 0), apart = 2 * (u64)to.channel, step = 2 * (u64)to.token;
  const bool together = apart == 2 && ((at | step) & 7) == 0;
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) {
    // From a place that only the run knows: by choices, as registers have no index.
    Four y = x[i];
#pragma unroll
    for (int j = 1; j <= PASS_TOKENS; ++j) y = from == j ? x[i + j] : y;
    store_four_channels(at + i * step, apart, together, y);
  }
}
// Four tokens of candidates whose windows lie behind one another in a row of `conv_state`, channels together: what is
// usual, in few instructions. Returns whether that is so.
__device__ __forceinline__ bool store_usual_windows(const DecodeRecordsParams& p, const Sequence& q, int channel,
                                                    const Four (&x)[PASS_TOKENS + HISTORY], int first, int count) {
  const u64 to = q.state.base + 2 * (u64)(u32)channel, step = 2 * (u64)(u32)p.conv_sl;
  const bool usual = q.keeps && q.state.base && !p.conv_windows && first == 0 && count == PASS_TOKENS &&
                     p.conv_sc == 1 && (((u32)to | (u32)step) & 7) == 0;
  if (!usual) return false;
#pragma unroll
  for (int i = 0; i + 1 < PASS_TOKENS + HISTORY; ++i) store_global8(to + i * step, x[i + 1].w[0], x[i + 1].w[1]);
  return true;
}
// The windows that a pass leaves.
__device__ __forceinline__ void store_windows(const DecodeRecordsParams& p, const Sequence& q, int channel,
                                              const Four (&x)[PASS_TOKENS + HISTORY], int first, int count,
                                              int length) {
  // With records the state before the candidates is left, and so is its window.
  if (first == 0 && q.records.exist && p.conv_windows && q.state.base) store_window(p, q.state, channel, x, 0);
  const FourWindows to = four_windows(p, q, channel, first);
  if (to.next) {
#pragma unroll
    for (int t = 0; t < PASS_TOKENS; ++t) {
      if (t >= count) break;
      const u64 at = to.next + t * to.token;
      if (to.whole || (t == 0 && first == 0)) {
        store_four_channels(at, to.apart, to.together, x[t + 1]);
        store_four_channels(at + to.column, to.apart, to.together, x[t + 2]);
      }
      store_four_channels(at + 2 * to.column, to.apart, to.together, x[t + 3]);
    }
  }
  if (first + count >= length && q.state.base && (!q.keeps || (!p.conv_windows && length == 0)))
    store_window(p, q.state, channel, x, count);
}

__device__ __forceinline__ void store_floats(u32 to, const float (&x)[CHANNELS]) {
  store_shared(to, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
// q, k, v or the decays of `count` tokens to shared memory: q to where it is once it has been multiplied with the
// decay.
__device__ __forceinline__ void stage_channels(const DecodeRecordsParams& p, const Item& it, const LaneInputs& in,
                                               u32 memory, u32 kept, int first, int count) {
  const u32 weights = memory + OFFSET(SequencesMemory, weights) + 16 * opaque(thread_index());
  u32 to = memory + OFFSET(TokensMemory, tokens) + 4 * lane_channel();
  float bias[CHANNELS];
  read_floats(bias, weights + OFFSET(ChannelWeights, biases));
  if (warp_index() == GATE_WARP) {
    ChannelGates<CHANNELS> gate;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) gate.bias[c] = bias[c];
    gate.factor = load_shared1(weights);
    to += OFFSET(StagedToken, decay);
#pragma unroll
    for (int t = 0; t < PASS_TOKENS; ++t) {
      float x[CHANNELS];
      to_floats(x, in.x[t]);
      decays(p, x, gate);
      store_floats(to + (u32)sizeof(StagedToken) * t, x);
    }
    return;
  }
  const int kind = warp_index();
  to += kind == 0 ? OFFSET(StagedToken, decayed_q) : kind == 1 ? OFFSET(StagedToken, k) : OFFSET(StagedToken, v);
  Four raw[PASS_TOKENS + HISTORY];
  float x[PASS_TOKENS + HISTORY][CHANNELS], w[CHANNELS][TAPS];
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) read_floats(w[c], weights + 16 * THREADS * c);
#pragma unroll
  for (int i = 0; i < HISTORY + PASS_TOKENS; ++i) {
    raw[i] = i < HISTORY ? in.window[i] : in.x[i - HISTORY];
    to_floats(x[i], raw[i]);
  }
  const Sequence windows = kept_windows(p, kept);
  if (!store_usual_windows(p, windows, x_channel(p, it.hv), raw, first, count))
    store_windows(p, windows, x_channel(p, it.hv), raw, first, count, KEPT(kept, length));
#pragma unroll
  for (int t = 0; t < PASS_TOKENS; ++t) {
    float y[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < TAPS; ++i) sum = multiply_add(w[c][i], x[t + i][c], sum);
      if (p.conv_bias) sum += bias[c];
      y[c] = sum * sigmoid(sum);
    }
    store_floats(to + (u32)sizeof(StagedToken) * t, y);
  }
}
// What the norm multiplies with besides, of the warp's token.
__device__ __forceinline__ void keep_norm_factors(const DecodeRecordsParams& p, const LaneInputs& in, u32 memory) {
  if (!p.norm_weight) return;
  float y[CHANNELS], z[CHANNELS];
  read_floats(y, memory + OFFSET(SequencesMemory, norm) + 4 * lane_channel());
  if (p.z) {
    to_floats(z, in.z, z_type(p));
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) y[i] *= p.silu ? z[i] * sigmoid(z[i]) : sigmoid(z[i]);
  }
  store_floats(own_factors(memory), y);
}

// --- a warp's token -----------------------------------------------------------------------------------------------

// Sums of three products over all channels, in the order of sum_lanes<32>() of a thread for each channel and then of
// four warps: channels that are 16, 8 and 4 apart lie in other lanes, those 2 and 1 apart in this one until each lane
// has one of the four.
__device__ __forceinline__ float exchange(float x, float y, int mask) {
  const bool second = thread_index() & mask;
  return (second ? y : x) + shuffle_xor(second ? x : y, mask);
}
__device__ __forceinline__ void sum_channels(float (&sums)[3], const float (&x)[3][CHANNELS]) {
  const int lane = thread_index() % 32;
  float own = 0.0f, all = 0.0f;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    float y = exchange(exchange(x[i][0], x[i][2], 4), exchange(x[i][1], x[i][3], 4), 2);
    y += shuffle_xor(y, 1);
    y += shuffle_xor(y, 4), y += shuffle_xor(y, 2);
    own = i == 0 || lane % 8 == i ? y : own;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) all += shuffle(own, 8 * i + lane % 8);
#pragma unroll
  for (int i = 0; i < 3; ++i) sums[i] = shuffle(all, i);
}
// The products of two rows; no product becomes a part of a sum.
__device__ __forceinline__ void products(float (&xy)[CHANNELS], const float (&x)[CHANNELS],
                                         const float (&y)[CHANNELS]) {
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) xy[c] = opaque_float(x[c] * y[c]);
}
// Token `slot` of a pass, when all warps have staged it: q and k times the decay, factors, and its key and decay to its
// record.
__device__ __forceinline__ void finish_staging(const DecodeRecordsParams& p, const LaneInputs& in, u32 memory, u32 kept,
                                               int first) {
  const int slot = warp_index(), t = first + slot;
  const u32 own = staged_token(memory, slot) + 4 * lane_channel();
  float q[CHANNELS], k[CHANNELS], d[CHANNELS], x[CHANNELS];
  read_floats(q, own + OFFSET(StagedToken, decayed_q));
  read_floats(k, own + OFFSET(StagedToken, k));
  read_floats(d, own + OFFSET(StagedToken, decay));
  if (KEPT(kept, flags) & KEPT_RECORDS && t < KEPT(kept, length) && t < p.records) {
    const u64 at = 4 * (u64)lane_channel();
    store_part(KEPT_ADDRESS(kept, key) + 4 * (t * p.key_st) + at, k);
    store_part(KEPT_ADDRESS(kept, decay) + 4 * (t * p.decay_st) + at, d);
  }
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) x[c] = q[c] * d[c];
  store_floats(own + OFFSET(StagedToken, decayed_q), x);
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) x[c] = k[c] * d[c];
  store_floats(own + OFFSET(StagedToken, decayed_k), x);
  float parts[3][CHANNELS], sums[3];
  products(parts[0], q, q), products(parts[1], k, k), products(parts[2], q, k);
  sum_channels(sums, parts);
  float beta = to_float(in.beta, beta_type(p));
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  const Factors f = factors_of(p, sums[0], sums[1]);
  const int lane = thread_index() % 32;
  if (lane < WARPS)  // for each warp
    store_shared(memory + OFFSET(TokensMemory, factors) + 16 * (PASS_TOKENS * lane + slot), __float_as_uint(f.q),
                 __float_as_uint(f.k), __float_as_uint(f.k * beta), __float_as_uint(sums[2]));
}
