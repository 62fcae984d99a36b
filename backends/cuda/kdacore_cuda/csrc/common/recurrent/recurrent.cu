// fused_recurrent_kda: the recurrence token by token, the state in registers, read and written
// once. For each token:
//
//   S = diag(2^g) S;   u = beta r_k (v - r_k k S);   S = S + k u^T;   o = scale r_q q S
//
// with r_q, r_k the inverse norms of q and k (1 without l2norm). kdacore/contract/state_rows.py says
// which pool rows are read and written. A sequence without a slot is padding: its output is zero.
//
// Grid: a block takes one sequence and value head and COLUMNS columns of V. How lanes hold the
// state follows its layout in memory, so that a warp always reads whole 128-byte lines:
// state_v_first.cuh, where warps share nothing, and state_k_first.cuh, where warps add their sums
// through shared memory with one barrier a token.
//
// The time depends on how soon every block has issued all its loads, so these come in this order:
// the pool index, what does not depend on it while that is loaded, the state as soon as the index
// is there. Gates and norms are computed while the state is loaded.
//
// With RECORDS (records.cuh) a sequence that has a row of records first applies those that precede the
// call, and leaves that state; its tokens write their updates into the row. Their keys and decays, which
// other blocks may still read, are left to record_tokens.cu.
#include "common/clear_rows.cuh"
#include "common/recurrent/records.cuh"

using Raw = RawToken<TOKEN_CHANNELS>;
KDA_SHARED_BYTES(STEP_BYTES);

// Zeros for the output of all tokens of a sequence.
__device__ __forceinline__ void store_zeros(const RecurrentParams& p, Item it, const LanePosition& at) {
  const float zeros[OUT] = {};
#pragma unroll 1
  for (int t = 0; t < it.length; ++t, it.o += p.HV * V) {
    if (at.writes) store_elements(p.o, (long long)(it.o + at.v), qkv_type(p), zeros);
  }
}

// The rows of a pack that belong to no sequence, by all blocks together.
__device__ __forceinline__ void clear_rows_beyond(const RecurrentParams& p) {
  if (PLAIN) return;
  const long long row_bytes = (long long)p.HV * V * type_size(qkv_type(p));
  const u32 threads = WARPS * 32;
  clear_tail(p, row_bytes, {block_index() * threads + thread_index(), grid_blocks() * threads});
}

KDA_KERNEL(WARPS * 32, MIN_BLOCKS) recurrent(KDA_PARAM RecurrentOf<RECORDS> p) {
  KDA_SHARED(memory);
  constexpr u32 slices = V / COLUMNS;
  const u32 block = block_index(), slice = block % slices;
  if (p.fills_device) launch_dependents();
  wait_for_inputs();
  if (!p.fills_device) launch_dependents();
  Item it;
  it.n = (int)((u64)(block / slices) * p.hv_factor >> p.hv_shift);  // (block / slices) / HV
  it.zero = (int)((u64)thread_index() >> p.hv_shift);               // the shift is 31 or more
  const Start start = start_of(p, it);
  locate(p, block / slices, it);
  const LanePosition at = make_position(slice * COLUMNS, shared_address(memory));
  const long long own = (long long)it.hv * (K * V) + first_element(at);  // of a pool row

  // 1. Issue all loads: the first token, the gate's parameters, the state.
  Raw raw;
  Bits<OUT> raw_v;
  if (it.length > 0) {
    raw = load_token<TOKEN_CHANNELS>(p, it, at.channel);
    raw_v = load_elements<OUT>(p.v, it.v + at.v, qkv_type(p));
  }
  const RawGate<TOKEN_CHANNELS> raw_gate = load_gate<TOKEN_CHANNELS>(p, it, at.channel);

  const int from = row_of(p, start);
  // Padding goes the way of all sequences, with zeros for the state. Of one token the result is not
  // used; a loop over tokens is not entered.
  const bool padding = !start.known && !is_slot(p, from);
  bool writes = at.writes;
  if (!ONE && padding) {
    store_zeros(p, it, at);
    writes = false;
  }
  uint4 bits[ROWS];
  if (from >= 0 && !padding && start.has_initial) {
    load_state(bits, p.h0 + STATE_BYTES * ((long long)from * p.h0_row + own), whole_rows(p.h0, p.h0_row));
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) bits[i] = zero_bits();
  }
  Records records = {};
  if constexpr (RECORDS) {
    if (!padding) records = records_of(p, it);
  }

  // 2. Gate and norms of the first token, while the state is loaded.
  const ChannelGates<TOKEN_CHANNELS> gate = finish_gate(p, raw_gate);
  Tokens tokens;
  stage_token(tokens, at, finish_token(p, raw, gate), 0);
  // The row of the final state. Of one token it is loaded ahead; in a loop it would take registers.
  const bool indexed = p.flags & FLAG_INDEXED_OUT;
  Number to_bits;
  if (ONE && indexed) to_bits = load_row_written(p, it);
  float s[ROWS][VECTOR];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) unpack_state(s[i], bits[i]);

  const u64 target = p.ht + STATE_BYTES * own;
  const bool whole = whole_rows(p.ht, p.ht_row), scatter = !ONE && !padding && p.flags & FLAG_SCATTER_TOKENS;

  // The state before the tokens is what a sequence with records leaves.
  if constexpr (RECORDS) {
    if (records.exist) {
      replay(p, s, records, at);
      round_state(s);
      const int to = number_of(load_row_written(p, it), p.flags & FLAG_WRITES64);
      const bool stays = !records.replayed && start.has_initial && p.h0 == p.ht && from == to;
      if (is_slot(p, to) && !stays) store_state(s, target + STATE_BYTES * (to * p.ht_row), whole);
    }
  }

  // 3. The recurrence; each token's inputs are loaded while the one before it is processed.
#pragma unroll 1
  for (int t = 0; t < it.length; ++t) {
    float v[OUT], o[OUT], update[OUT];
    to_floats(v, raw_v, qkv_type(p));
    const bool more = !ONE && t + 1 < it.length;
    if (more) {
      next_token(p, it);
      raw = load_token<TOKEN_CHANNELS>(p, it, at.channel);
      raw_v = load_elements<OUT>(p.v, it.v + at.v, qkv_type(p));
    }
    step(p, s, at, tokens, v, o, update, t & 1, [&] {
      if (more) stage_token(tokens, at, finish_token(p, raw, gate), ~t & 1);
    });
    if (ONE && padding) {
#pragma unroll
      for (int i = 0; i < OUT; ++i) o[i] = 0.0f;
    }
    if (writes) store_elements(p.o, (long long)(it.o + at.v), qkv_type(p), o);
    if (!ONE) it.o += p.HV * V;
    if constexpr (RECORDS) {
      if (records.exist && writes) store_update(p, records, at, t, update);
    }
    if (scatter && t < p.writes_row) {
      const int row = load_number(p.writes, it.n * p.writes_row + t, p.flags & FLAG_WRITES64);
      if (is_slot(p, row)) store_state(s, target + STATE_BYTES * (row * p.ht_row), whole);
    }
  }

  // 4. The final state, and what no sequence writes.
  if constexpr (RECORDS) {
    if (records.exist) return clear_rows_beyond(p);
  }
  if (p.ht && (ONE || !(p.flags & FLAG_SCATTER_TOKENS))) {
    if (!ONE && indexed) to_bits = load_row_written(p, it);
    const int to = indexed ? number_of(to_bits, p.flags & FLAG_WRITES64) : it.n;
    if (padding) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) unpack_state(s[i], zero_bits());
    }
    if (!indexed || (is_slot(p, to) && !padding))
      store_state(s, target + STATE_BYTES * (to * p.ht_row), whole);
  }
  clear_rows_beyond(p);
}
