// Where a sequence starts: rows of the pool, of records and of windows; and what its tokens leave of the
// convolution's windows.
#pragma once

#include "common/decode/tokens_memory.cuh"

// Numbers that say where a sequence starts, not yet converted. All are asked for at once.
struct SequenceNumbers {
  Number row, record, replayed, accepted, begin, end;
  Number written;  // row that is written: the thread's, one for each token where that many are named
  u32 has_initial;
};
// Of 64 bits in two loads: one of 8 bytes or one of 4 to the same registers would wait for each other.
__device__ __forceinline__ Number load_halves(u64 base, long long index, bool wide) {
  const u64 at = base + index * (wide ? 8 : 4);
  Number r = {};
  r.low = load_global4(at);
  if (wide) r.high = load_global4(at + 4);
  return r;
}
// `thread`: its number among those that call.
__device__ __forceinline__ SequenceNumbers load_numbers(const DecodeRecordsParams& p, const Item& it,
                                                        int thread = thread_index()) {
  const int n = it.n + it.zero;
  SequenceNumbers r = {};
  r.row = load_halves(p.indices, n * p.indices_row, p.flags & FLAG_INDEX64);
  if (p.accepted) r.accepted = load_halves(p.accepted, n, p.flags & FLAG_ACCEPTED64);
  if (p.record_indices) {
    r.record = load_halves(p.record_indices, n, p.wide_records);
    if (p.num_replayed) r.replayed = load_halves(p.num_replayed, n, p.wide_counts);
  }
  r.has_initial = p.has_initial ? load_global1(p.has_initial + n) : 1;
  if (p.cu_seqlens) {
    r.begin = load_halves(p.cu_seqlens, n, p.flags & FLAG_CU64);
    r.end = load_halves(p.cu_seqlens, n + 1, p.flags & FLAG_CU64);
  }
  if (thread < MOST_TOKENS && thread < p.writes_row)
    r.written = load_halves(p.writes, n * p.writes_row + thread, p.flags & FLAG_WRITES64);
  return r;
}

// Length and places of a sequence's tokens, for a value head.
__device__ __forceinline__ TokenPlaces locate_tokens(const DecodeRecordsParams& p, Item& it,
                                                     const SequenceNumbers& numbers) {
  Offset batch = it.n, first = 0;
  it.length = (int)p.T;
  if (p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    first = number_of(numbers.begin, wide);
    it.length = number_of(numbers.end, wide) - (int)first;
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

// A sequence continues from records that precede it, from the state behind one of an earlier call's candidates, or from
// its row.
__device__ __forceinline__ SequenceStart find_start(const DecodeRecordsParams& p, const Item& it,
                                                    const SequenceNumbers& numbers) {
  const bool wide = p.flags & FLAG_INDEX64;
  SequenceStart r = {number_of(numbers.row, wide)};
  r.row = r.from;
  if (p.accepted) {
    r.accepted = number_of(numbers.accepted, p.flags & FLAG_ACCEPTED64);
    const long long named = (it.n + it.zero) * p.indices_row + r.accepted - 1;
    r.from = r.accepted > 0 ? number_of(load_halves(p.indices, named, wide), wide) : -1;
  }
  const bool zeros = p.accepted && r.accepted <= 0;
  r.padding = !zeros && !is_slot(p, r.from);
  r.reads = !zeros && !r.padding && numbers.has_initial;
  return r;
}
__device__ __forceinline__ Sequence find_sequence(const DecodeRecordsParams& p, const Item& it,
                                                  const SequenceNumbers& numbers, const SequenceStart& start) {
  int preceding = start.accepted;
  Sequence r = {};
  r.candidates = it.n;
  if (p.record_indices) {
    const int named = number_of(numbers.record, p.wide_records);
    r.candidates = is_slot(p, named) ? named : -1;
    r.records.exist = p.record_update && !start.padding && is_slot(p, named);
    if (r.records.exist) {
      r.records.replayed = replayed_of(p, number_of(numbers.replayed, p.wide_counts));
      find_records(p, it, named, r.records);
    }
    if (p.record_update) preceding = r.records.replayed;
  }
  r.keeps = r.records.exist || p.keeps_candidates;
  if (start.padding || !is_slot(p, start.row)) return r;
  const Window state = state_window(p, start.row);
  if (p.writes_conv) r.state = state;
  if (!start.reads) return r;
  r.before = state;
  if (preceding > 0 && p.conv_windows) {
    r.before = candidate_window(p, r.candidates, preceding - 1);
  } else if (preceding > 0) {
    r.before.base = window_element(p, state, 0, preceding - 1);
  }
  return r;
}

// To shared memory what KeptSequence has, and from there what is needed of windows. `stays`: the state is in the row
// that is written, and no record changes it. `more`: flags besides those of `q`.
__device__ __forceinline__ void keep_sequence(const DecodeRecordsParams& p, const Item& it, const SequenceStart& start,
                                              const Sequence& q, const TokenPlaces& at, const Number& written,
                                              u32 memory, int more = 0, int thread = thread_index()) {
  const u32 kept = memory + OFFSET(TokensMemory, kept);
  int row = thread < p.writes_row ? number_of(written, p.flags & FLAG_WRITES64) : -1;
  if (!is_slot(p, row)) row = -1;
  const bool unchanged = q.records.exist && !q.records.replayed && start.reads,
             stays = thread == 0 && unchanged && p.h0 == p.ht && start.from == row;
  if (thread < MOST_TOKENS) store_shared(kept + OFFSET(KeptSequence, rows) + 4 * thread, (u32)(stays ? -1 : row));
  if (thread != 0) return;
  const u64 addresses[] = {q.records.update,
                           q.records.key,
                           q.records.decay,
                           p.ht + STATE_BYTES * ((u64)it.hv * (K * V)),
                           q.before.base,
                           q.state.base};
#pragma unroll
  for (int i = 0; i < 6; i += 2)
    store_shared(kept + 8 * i, (u32)addresses[i], (u32)(addresses[i] >> 32), (u32)addresses[i + 1],
                 (u32)(addresses[i + 1] >> 32));
  store_shared(kept + OFFSET(KeptSequence, before_token), (u32)q.before.token, (u32)q.before.channel, at.x, at.o);
  const int flags = (q.records.exist ? KEPT_RECORDS : 0) | (q.keeps ? KEPT_WINDOWS : 0);
  store_shared(kept + OFFSET(KeptSequence, flags), more | flags, q.records.replayed, it.length, q.candidates);
}
__device__ __forceinline__ Sequence kept_windows(const DecodeRecordsParams& p, u32 memory) {
  Sequence q = {};
  q.records.exist = KEPT(memory, flags) & KEPT_RECORDS;
  q.keeps = KEPT(memory, flags) & KEPT_WINDOWS;
  q.candidates = KEPT(memory, candidates);
  q.before = {KEPT_ADDRESS(memory, before), (Offset)KEPT(memory, before_token), (Offset)KEPT(memory, before_channel)};
  q.state = {KEPT_ADDRESS(memory, state), (Offset)p.conv_sl, (Offset)p.conv_sc};
  return q;
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
