// The short causal convolution of one channel of x: its window of earlier tokens, its weights, what a
// sequence leaves. A thread owns a channel from its first token to its last.
#pragma once

#include "common/recurrent/token.cuh"
#include "generated/decode_params.cuh"

// Kernels with records of candidates (decode_records.cuh), or with rows of their windows, say so.
#ifndef RECORDS
#define RECORDS 0
#endif

// What a kernel assumes besides what memory.cuh says. PLAIN: bfloat16 x and z, four columns of z together, a
// convolution of four taps without windows of candidates; weights start on 16 bytes; every array but pools has fewer
// than 2^31 elements, and so has a row of the convolution's states. ONE: besides that the windows are in the rows of
// the states.
__device__ __forceinline__ int x_type(const DecodeParams& p) { return PLAIN ? TYPE_BFLOAT16 : p.x_type; }
__device__ __forceinline__ bool has_conv(const DecodeParams& p) { return PLAIN || p.conv_weight; }
__device__ __forceinline__ bool has_candidate_windows(const DecodeParams& p) { return !PLAIN && p.conv_windows; }

constexpr int TAPS = 4, HISTORY = TAPS - 1;  // at most: of fewer taps the first ones are zero
__device__ __forceinline__ int missing_taps(const DecodeParams& p) { return PLAIN ? 0 : TAPS - p.taps; }

// A channel's weights, its tokens before the first one (oldest first) and its next token, not yet
// converted.
struct Channel {
  int index;  // among all channels of x
  Bits<TAPS> weight;
  Bits<1> bias, window[HISTORY], x;
};

// Where the windows of a sequence are. An address of 0: they are zero, or are not written.
struct Window {
  u64 base;               // of the first channel's oldest token
  Offset token, channel;  // strides in elements
};

// Four neighbouring elements of a type that is known at run time. A load of 8 bytes and one of 16 to the same registers
// would wait for each other, whichever of them is switched off.
__device__ __forceinline__ void load_four(Bits<4>& r, u64 base, Offset index, int type) {
  const bool wide = type == TYPE_FLOAT32;
  const u64 at = base + (u64)index * (wide ? 4 : 2);
  const uint2 x = load_global8(at);
  r.w[0] = x.x, r.w[1] = x.y;
  if (wide) {
    const uint2 y = load_global8(at + 8);
    r.w[2] = y.x, r.w[3] = y.y;
  }
}
__device__ __forceinline__ Bits<4> load_four(u64 base, Offset index, int type) {
  Bits<4> r;
  load_four(r, base, index, type);
  return r;
}

// N elements that lie apart, or off the bytes that are loaded at once; zeros for those before element `first`.
template <int N>
__device__ __forceinline__ Bits<N> load_apart(u64 base, long long index, long long stride, int type, int first = 0) {
  Bits<N> r = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < first) continue;
    const u32 bits = load_elements<1>(base, index + i * stride, type).w[0];
    if (type == TYPE_FLOAT32) {
      r.w[i] = bits;
    } else {
      r.w[i / 2] |= bits << 16 * (i & 1);
    }
  }
  return r;
}

__device__ __forceinline__ void load_weights(const DecodeParams& p, Channel& c) {
  if (PLAIN || (p.taps == TAPS && (p.conv_weight & 15) == 0)) {
    c.weight = load_elements<TAPS>(p.conv_weight, (Offset)c.index * TAPS, p.conv_weight_type);
  } else {
    const int missing = missing_taps(p);
    c.weight = load_apart<TAPS>(p.conv_weight, (long long)c.index * p.taps - missing, 1, p.conv_weight_type, missing);
  }
  if (p.conv_bias) c.bias = load_elements<1>(p.conv_bias, (Offset)c.index, p.conv_bias_type);
}

// The address of token `from` of a channel's window, or of the tokens behind it.
__device__ __forceinline__ u64 window_element(const DecodeParams& p, const Window& w, int channel, int from) {
  return w.base + (u64)(from * w.token + channel * w.channel) * (u32)type_size(x_type(p));
}

__device__ __forceinline__ void load_window(const DecodeParams& p, const Window& w, Channel& c) {
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) {
    const int token = i - missing_taps(p);
    c.window[i].w[0] = 0;
    if (w.base && token >= 0) c.window[i] = load_elements<1>(window_element(p, w, c.index, token), 0, x_type(p));
  }
}

__device__ __forceinline__ void move_window(Channel& c) {
#pragma unroll
  for (int i = 0; i + 1 < HISTORY; ++i) c.window[i] = c.window[i + 1];
  c.window[HISTORY - 1] = c.x;
}

// The convolved channel; its window moves on by the token.
__device__ __forceinline__ float convolve(const DecodeParams& p, Channel& c) {
  const float x = to_float(c.x, x_type(p));
  if (!has_conv(p)) return x;
  float weight[TAPS], sum = 0.0f;
  to_floats(weight, c.weight, p.conv_weight_type);
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) sum = multiply_add(weight[i], to_float(c.window[i], x_type(p)), sum);
  sum = multiply_add(weight[HISTORY], x, sum);
  if (p.conv_bias) sum += to_float(c.bias, p.conv_bias_type);
  move_window(c);
  return sum * sigmoid(sum);
}

// --- windows of a sequence ------------------------------------------------------------------------

// The row of a sequence's window in `conv_state`, not yet converted, and how many candidates of an earlier call precede
// the first token. With RECORDS: the row of `conv_windows`, negative if there is none, and whether windows of candidates
// are kept.
struct WindowRow {
  Number bits;
  int preceding;
  int candidates;
  bool keeps;
};

__device__ __forceinline__ WindowRow load_window_row(const DecodeParams& p, const Item& it) {
  WindowRow r = {};
  if (ONE || !has_conv(p)) return r;
  const int n = it.n + it.zero;
  r.bits.low = it.n;
  if (p.conv_indices) {
    r.bits = load_number_bits(p.conv_indices, n, p.wide_conv);
  } else if (p.indices) {
    r.bits = load_number_bits(p.indices, n * p.indices_row, p.flags & FLAG_INDEX64);
  }
  if (p.accepted) r.preceding = load_number(p.accepted, n, p.flags & FLAG_ACCEPTED64);
  return r;
}
__device__ __forceinline__ int row_of(const DecodeParams& p, const WindowRow& r) {
  return number_of(r.bits, p.conv_indices ? p.wide_conv : p.indices && p.flags & FLAG_INDEX64);
}

// Where a sequence's windows are: the row of `conv_state`, negative if none is read, the same of what is written; the
// rest as in WindowRow.
struct WindowPlace {
  int from, to, preceding;
  int candidates;
  bool keeps;
};
// Without RECORDS these are known.
__device__ __forceinline__ int candidates_row(const Item& it, const WindowPlace& at) {
  return RECORDS ? at.candidates : it.n;
}
__device__ __forceinline__ bool keeps_candidates(const DecodeParams& p, const WindowPlace& at) {
  return RECORDS ? at.keeps : p.keeps_candidates;
}

// The window in the first columns of a row of `conv_state`.
__device__ __forceinline__ Window state_window(const DecodeParams& p, int row) {
  Window w = {0, (Offset)p.conv_sl, (Offset)p.conv_sc};
  if (row >= 0) w.base = p.conv_state + (u64)(row * p.conv_sr) * (u32)type_size(x_type(p));
  return w;
}
// The window behind candidate t of a sequence, in its row of `conv_windows`.
__device__ __forceinline__ Window candidate_window(const DecodeParams& p, int row, int t) {
  if (RECORDS && row < 0) return {};
  return {p.conv_windows + (u64)(row * p.window_sr + t * p.window_st) * (u32)type_size(x_type(p)),
          (Offset)p.window_sl, (Offset)p.window_sc};
}
// The window that the first token reads.
__device__ __forceinline__ Window window_before(const DecodeParams& p, const Item& it, const WindowPlace& at) {
  const Window w = state_window(p, at.from);
  if (ONE || !w.base || at.preceding <= 0) return w;
  if (has_candidate_windows(p)) return candidate_window(p, candidates_row(it, at), at.preceding - 1);
  return {window_element(p, w, 0, at.preceding - 1), w.token, w.channel};
}

__device__ __forceinline__ void store_bits(const DecodeParams& p, u64 at, const Bits<1>& x) {
  if (x_type(p) == TYPE_FLOAT32) {
    store_global4(at, x.w[0]);
  } else {
    store_global2(at, x.w[0]);
  }
}
// The channel's window, to another one.
__device__ __forceinline__ void store_window(const DecodeParams& p, const Window& to, const Channel& c) {
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) {
    const int token = i - missing_taps(p);
    if (token >= 0) store_bits(p, window_element(p, to, c.index, token), c.window[i]);
  }
}

// What `count` tokens of a sequence, from element `x_at` of x on, leave of a channel: the last window; of candidates a
// window behind each, in `conv_windows` or, with the tokens behind one another, in the row of `conv_state`. Only this
// thread touches the channel now, and it has read the window before the tokens when it writes: windows may share memory.
__device__ __forceinline__ void write_windows(const DecodeParams& p, const Item& it, const WindowPlace& at, Channel& c,
                                              Offset x_at, int count) {
  const Window state = state_window(p, at.to);
  load_window(p, window_before(p, it, at), c);
  // With records the state before the candidates is left, and so is its window.
  if (RECORDS && keeps_candidates(p, at) && !p.keeps_candidates && has_candidate_windows(p) && state.base) store_window(p, state, c);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    c.x = load_elements<1>(p.x, x_at + t * (Offset)p.x_st + c.index, x_type(p));
    move_window(c);
    if (!keeps_candidates(p, at)) continue;
    if (has_candidate_windows(p)) {
      const Window window = candidate_window(p, candidates_row(it, at), t);
      if (!RECORDS || window.base) store_window(p, window, c);
    } else if (state.base && t > 0) {
      store_bits(p, window_element(p, state, c.index, HISTORY - missing_taps(p) - 1 + t), c.x);
    } else if (state.base) {
      store_window(p, state, c);
    }
  }
  if (state.base && (!keeps_candidates(p, at) || (!has_candidate_windows(p) && count == 0))) store_window(p, state, c);
}
// The same by a thread that has the last window.
__device__ __forceinline__ void leave_windows(const DecodeParams& p, const Item& it, const WindowPlace& at, Channel& c,
                                              Offset x_at, int count) {
  if (!ONE && keeps_candidates(p, at)) return write_windows(p, it, at, c, x_at, count);
  const Window state = state_window(p, at.to);
  if (state.base) store_window(p, state, c);
}

// Where a sequence starts, for its convolution. `from`: the row of its state.
__device__ __forceinline__ WindowPlace window_place(const DecodeParams& p, const WindowRow& r, int from, bool padding,
                                                    bool reads) {
  const int row = ONE ? from : row_of(p, r);
  const int to = is_slot(p, row) && !padding ? row : -1;
  return {reads ? to : -1, to, r.preceding, r.candidates, r.keeps};
}
