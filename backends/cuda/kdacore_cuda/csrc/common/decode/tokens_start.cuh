// Where a sequence starts: rows of the pool, of records and of windows; and what its tokens leave of the
// convolution's windows.
#pragma once

#include "common/decode/tokens_memory.cuh"

// Elements from the start of an array to a sequence's first token.
struct TokenPlaces {
  Offset x, g, beta, z, o;
};
// Length and places of a sequence's tokens, for a value head.
__device__ __forceinline__ TokenPlaces locate_tokens(const DecodeRecordsParams& p, Item& it) {
  Offset batch = it.n, first = 0;
  it.length = (int)p.T;
  if (p.cu_seqlens) {
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
          ((batch * (Offset)p.T + first) * p.HV + hv) * V};
}

struct Sequence {
  int from;       // row of the state
  bool padding;   // no slot
  bool reads;     // starts from what the row holds
  Records records;
  bool keeps;      // windows of candidates
  int candidates;  // row of `conv_windows`; negative: none
  Window before, state;  // the window before the first token; where the state's window is written
};
// A sequence continues from records that precede it, from the state behind one of an earlier call's candidates, or from
// its row.
__device__ __forceinline__ Sequence load_sequence(const DecodeRecordsParams& p, const Item& it) {
  const int n = it.n + it.zero;
  const bool wide = p.flags & FLAG_INDEX64;
  const Number first = load_number_bits(p.indices, n * p.indices_row, wide);
  RecordRow record = {};
  if (p.record_indices) record = load_record_row(p, it);
  const u32 has_initial = p.has_initial ? load_global1(p.has_initial + n) : 1;
  int preceding = 0, from = number_of(first, wide);
  const int row = from;
  Sequence r = {};
  if (p.accepted) {
    preceding = load_number(p.accepted, n, p.flags & FLAG_ACCEPTED64);
    from = preceding > 0 ? load_number(p.indices, n * p.indices_row + preceding - 1, wide) : -1;
  }
  const bool zeros = p.accepted && preceding <= 0;
  r.padding = !zeros && !is_slot(p, from);
  r.from = from;
  r.reads = !zeros && !r.padding && has_initial;
  r.candidates = it.n;
  if (p.record_indices) {
    const int named = number_of(record.row, p.wide_records);
    r.candidates = is_slot(p, named) ? named : -1;
    r.records.exist = p.record_update && !r.padding && is_slot(p, named);
    if (r.records.exist) {
      r.records.replayed = replayed_of(p, number_of(record.replayed, p.wide_counts));
      find_records(p, it, named, r.records);
    }
    if (p.record_update) preceding = r.records.replayed;
  }
  r.keeps = r.records.exist || p.keeps_candidates;
  if (r.padding || !is_slot(p, row)) return r;
  const Window state = state_window(p, row);
  if (p.writes_conv) r.state = state;
  if (!r.reads) return r;
  r.before = state;
  if (preceding > 0 && p.conv_windows) {
    r.before = candidate_window(p, r.candidates, preceding - 1);
  } else if (preceding > 0) {
    r.before.base = window_element(p, state, 0, preceding - 1);
  }
  return r;
}

// Where a channel's windows behind its candidates are written: of the next one, in bytes. In a row of `conv_state` each
// begins a column behind the one before, so that only its last column is new.
struct WindowPlaces {
  u64 next;
  u64 token, column;  // steps
  bool whole;         // each has columns of its own
};
__device__ __forceinline__ WindowPlaces window_places(const DecodeRecordsParams& p, const Sequence& q, int channel) {
  const bool whole = p.conv_windows;
  const Window to = whole ? candidate_window(p, q.candidates, 0) : q.state;
  WindowPlaces r = {0, 2 * (u64)(u32)to.token, 2 * (u64)(u32)to.token, whole};
  if (q.keeps && to.base) r.next = window_element(p, to, channel, 0);
  if (whole) r.token = 2 * (u64)p.window_st;
  return r;
}
// Before the tokens. Only this thread touches the channel, and it has read the window before the tokens: windows may
// share memory.
__device__ __forceinline__ void store_first_window(const DecodeRecordsParams& p, const Sequence& q, const Channel& c) {
  // With records the state before the candidates is left, and so is its window.
  if (q.records.exist && p.conv_windows && q.state.base) store_window(p, q.state, c);
}
// Behind a token, by which the window has moved on. `first`: it is that of the sequence.
__device__ __forceinline__ void store_next_window(WindowPlaces& to, const Channel& c, bool first) {
  if (!to.next) return;
  if (to.whole || first) {
#pragma unroll
    for (int i = 0; i + 1 < HISTORY; ++i) store_global2(to.next + i * to.column, c.window[i].w[0]);
  }
  store_global2(to.next + (HISTORY - 1) * to.column, c.window[HISTORY - 1].w[0]);
  to.next += to.token;
}
__device__ __forceinline__ void store_last_window(const DecodeRecordsParams& p, const Sequence& q, const Channel& c,
                                                  int length) {
  if (q.state.base && (!q.keeps || (!p.conv_windows && length == 0))) store_window(p, q.state, c);
}
// All of them, of a channel that other blocks read too.
__device__ __forceinline__ void write_windows(const DecodeRecordsParams& p, const Sequence& q, int channel, Offset x_at,
                                              int length) {
  Channel c;
  c.index = channel;
  load_window(p, q.before, c);
  store_first_window(p, q, c);
  WindowPlaces to = window_places(p, q, channel);
#pragma unroll 1
  for (int t = 0; t < length; ++t) {
    c.x = load_elements<1>(p.x, x_at + t * (Offset)p.x_st + channel, TYPE_BFLOAT16);
    move_window(c);
    store_next_window(to, c, t == 0);
  }
  store_last_window(p, q, c, length);
}
