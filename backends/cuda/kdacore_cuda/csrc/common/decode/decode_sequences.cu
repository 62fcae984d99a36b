// As decode_tokens.cu, for calls with more heads than can be resident at once: a block processes one value head of
// several sequences, one sequence after the other.
//
// While a block computes, the loads of its next sequence are on their way. Shared memory is free for the next state as
// soon as this one is in registers, the other inputs wait in registers, and numbers are asked for a sequence ahead of
// these. So two blocks fit on a multiprocessor instead of three, but each always has a state on its way. What depends
// on the head alone is prepared once.
//
// Operations and the order of sums are those of decode_tokens.cu for whole heads.
//
// Grid: a multiple of the heads. Block b has head b % HV of sequences b / HV, that plus grid / HV, and so on.
#include "common/clear_rows.cuh"
#include "common/decode/channels_by_warp.cuh"
#include "sm90/bulk_copies.cuh"

// STORE_AHEAD, from the host, is how the state before the tokens is left: at once; by bulk copies from the place of the
// next one, which is then asked for later; or, of states [K, V], a few rows at a time in the walk that takes the first
// token's sums.
constexpr int STORE_BY_COPY = 1, STORE_IN_WALK = 2;
constexpr bool BY_COPY = STORE_AHEAD == STORE_BY_COPY, IN_WALK = STORE_AHEAD == STORE_IN_WALK && BEGINS_WITH_ROWS;

__device__ __forceinline__ u32 come_barrier(u32 memory) {
  return memory + OFFSET(TokensMemory, come) + 8 * warp_index();
}
__device__ __forceinline__ u32 own_state(u32 memory) {
  return memory + OFFSET(SequencesMemory, states) + PART_BYTES * warp_index();
}
__device__ __forceinline__ u32 shared_piece(const LanePosition& lane, u32 memory, int i) {
  return memory + OFFSET(SequencesMemory, states) + STATE_BYTES * (first_element(lane) + piece_offset(i));
}
// Issues the copy of this warp's part of the next state. Its place is free.
__device__ __forceinline__ void request_state(u32 memory, u32 kept) {
  if (thread_index() % 32 != 0) return;
  const float2 start = load_shared2(found_at(kept) + OFFSET(FoundSequence, start));
  const u64 head = (u64)__float_as_uint(start.y) << 32 | __float_as_uint(start.x);
  if (!head) return;
  barrier_expect(come_barrier(memory), PART_BYTES);
  copy_in(own_state(memory), reinterpret_cast<const void*>(head + PART_BYTES * warp_index()), PART_BYTES,
          come_barrier(memory));
}
__device__ __forceinline__ void receive_state(float (&s)[ROWS][VECTOR], bool reads, const LanePosition& lane,
                                              u32 memory, int phase) {
  if (reads) {
    barrier_wait(come_barrier(memory), phase);
    const u32 from = (u32)opaque((int)shared_piece(lane, memory, 0));
#pragma unroll
    for (int i = 0; i < ROWS; ++i) unpack_state(s[i], load_shared_u4(from + STATE_BYTES * piece_offset(i)));
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) unpack_state(s[i], zero_bits());
  }
  sync_warp();  // its place is free
}
// The state before the tokens, to the row that is named for it.
__device__ __forceinline__ void store_ahead(const DecodeRecordsParams& p, const float (&s)[ROWS][VECTOR],
                                            const LanePosition& lane, u32 memory, u32 kept) {
  if constexpr (!BY_COPY) return store_named(p, s, lane, kept, 0);
  const int row = load_kept(kept, OFFSET(KeptSequence, rows));
  if (row < 0) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const uint4 x = pack_state(s[i]);
    store_shared(shared_piece(lane, memory, i), x.x, x.y, x.z, x.w);
  }
  fence_async_proxy();
  sync_warp();
  if (thread_index() % 32 != 0) return;
  copy_out(reinterpret_cast<void*>(KEPT_ADDRESS(kept, target) + STATE_BYTES * (row * p.ht_row) +
                                   PART_BYTES * warp_index()),
           own_state(memory), PART_BYTES);
  copy_out_commit();
}

// The first token's sums; with IN_WALK the state before it is left, too.
__device__ __forceinline__ void begin_first_tokens(const DecodeRecordsParams& p, const float (&s)[ROWS][VECTOR],
                                                   const LanePosition& lane, u32 memory, u32 kept) {
  if constexpr (IN_WALK) {
    const int row = has_records(kept) ? load_kept(kept, OFFSET(KeptSequence, rows)) : -1;
    const u64 to = state_place(p, lane, kept, row);
    return begin_tokens(s, lane, memory, [&](int first) {
      if (row < 0) return;
#pragma unroll
      for (int i = first; i < first + 4; ++i) store_state_bits(to + STATE_BYTES * piece_offset(i), pack_state(s[i]));
    });
  }
  begin_tokens(s, lane, memory);
}

// A sequence that comes later: its numbers, and the row of its state where that depends on them. The warp that has the
// gate, whose part of the convolution is the least, finds where a sequence is for all of them.
struct Upcoming {
  SequenceNumbers numbers;
  Number from;
};
__device__ __forceinline__ bool finds_sequences() { return warp_index() == GATE_WARP; }
__device__ __forceinline__ void load_upcoming(const DecodeRecordsParams& p, Item it, int n, Upcoming& next) {
  it.n = n;
  if (n < (int)p.N) next.numbers = load_numbers(p, it, thread_index() % 32);
}
__device__ __forceinline__ void load_from(const DecodeRecordsParams& p, const Item& it, int n, Upcoming& next) {
  next.from = {};
  if (!p.accepted || n >= (int)p.N) return;
  const int accepted = number_of(next.numbers.accepted, p.flags & FLAG_ACCEPTED64);
  if (accepted > 0)
    next.from = load_halves(p.indices, (n + it.zero) * p.indices_row + accepted - 1, p.flags & FLAG_INDEX64);
}
// As find_start().
__device__ __forceinline__ SequenceStart start_of(const DecodeRecordsParams& p, const Upcoming& next) {
  const bool wide = p.flags & FLAG_INDEX64;
  SequenceStart r = {number_of(next.numbers.row, wide)};
  r.row = r.from;
  if (p.accepted) {
    r.accepted = number_of(next.numbers.accepted, p.flags & FLAG_ACCEPTED64);
    r.from = r.accepted > 0 ? number_of(next.from, wide) : -1;
  }
  const bool zeros = p.accepted && r.accepted <= 0;
  r.padding = !zeros && !is_slot(p, r.from);
  r.reads = !zeros && !r.padding && next.numbers.has_initial;
  return r;
}
// Finds sequence n.
__device__ __forceinline__ void find_upcoming(const DecodeRecordsParams& p, Item it, int n, const Upcoming& next,
                                              u32 kept) {
  it.n = n;
  const SequenceStart start = start_of(p, next);
  const TokenPlaces at = locate_tokens(p, it, next.numbers);
  const Sequence sequence = find_sequence(p, it, next.numbers, start);
  keep_sequence(p, it, start, sequence, at, next.numbers.written, kept,
                (start.padding ? KEPT_PADDING : 0) | (start.reads ? KEPT_READS : 0), thread_index() % 32);
  if (thread_index() % 32 != 0) return;
  const u64 state = start.reads ? p.h0 + STATE_BYTES * (start.from * p.h0_row + (long long)it.hv * (K * V)) : 0;
  store_shared(found_at(kept) + OFFSET(FoundSequence, g), at.g, at.beta, at.z, 0);
  store_shared(found_at(kept) + OFFSET(FoundSequence, start), (u32)state, (u32)(state >> 32), 0, 0);
}
// Loads all that a sequence needs but its state.
__device__ __forceinline__ void load_sequence(const DecodeRecordsParams& p, const Item& it, LaneInputs& in, u32 kept) {
  const uint4 x = load_shared_u4(found_at(kept) + OFFSET(KeptSequence, before_token)),
              numbers = load_shared_u4(found_at(kept) + OFFSET(KeptSequence, flags)),
              g = load_shared_u4(found_at(kept) + OFFSET(FoundSequence, g));
  const int length = (int)numbers.z;
  const bool padding = numbers.x & KEPT_PADDING;
  const int count = padding ? 0 : length < PASS_TOKENS ? length : PASS_TOKENS;
  load_tokens(p, in, it, {KEPT_ADDRESS(kept, before), x.x, x.y}, {x.z, g.x, g.y, g.z, x.w}, 0, count);
  const Records records = {true, (int)numbers.y, KEPT_ADDRESS(kept, update), KEPT_ADDRESS(kept, key),
                           KEPT_ADDRESS(kept, decay)};
  load_record(p, in, records);
}
// The later tokens of a long sequence. All is looked up again.
__device__ __forceinline__ void load_later(const DecodeRecordsParams& p, Item it, LaneInputs& in, const Pass& pass) {
  const SequenceNumbers numbers = load_numbers(p, it);
  const TokenPlaces at = locate_tokens(p, it, numbers);
  load_tokens(p, in, it, {}, at, pass.first, pass.count);
}

// Applies the records that precede the call; the first ones are in shared memory.
__device__ __forceinline__ void replay(const DecodeRecordsParams& p, float (&s)[ROWS][VECTOR], const LanePosition& lane,
                                       u32 memory, u32 kept) {
  const int replayed = KEPT(kept, replayed);
#pragma unroll 1
  for (int first = 0; first < replayed; first += PASS_RECORDS) {
    const int count = replayed - first < PASS_RECORDS ? replayed - first : PASS_RECORDS;
    if (first > 0) {
      const Records r = {true, 0, KEPT_ADDRESS(kept, update), KEPT_ADDRESS(kept, key), KEPT_ADDRESS(kept, decay)};
      const ThreadRecords later = load_records(p, r, opaque(thread_index()), first, count);
      sync_block();  // those before are applied
      share_records(later, memory);
      sync_block();
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) apply_record(s, lane, memory, i);
  }
}

__device__ __forceinline__ void take_tokens(const DecodeRecordsParams& p, const Part& part, float (&s)[ROWS][VECTOR],
                                            u32 kept_now, const Pass& pass) {
#pragma unroll 1
  for (int i = 0; i < pass.count; ++i) {
    const u32 memory = (u32)opaque((int)part.memory), kept = (u32)opaque((int)kept_now);
    const LanePosition lane = position_now(part);
    const int t = pass.first + i;
    const bool recorded = has_records(kept), moves = !recorded || t + 1 < KEPT(kept, length);
    const u64 record = KEPT_ADDRESS(kept, update) + 4 * (t * p.update_st + update_position(lane).v);
    float update[OUT];
    update_of(update, s, lane, memory, i);
    if (recorded && t < p.records && update_position(lane).writes) store_part(record, update);
    end_token(s, lane, memory, i, update, i + 1 < pass.count, moves);
    if (p.flags & FLAG_SCATTER_TOKENS) store_named(p, s, lane, kept, t);
  }
  finish_tokens();
}
// The outputs of a pass, one a warp.
__device__ __forceinline__ void leave_outputs(const DecodeRecordsParams& p, u32 memory, u32 kept, const Pass& pass) {
  const int slot = warp_index();
  if (slot >= pass.count) return;
  float4 o = output_of(memory, slot, norm_column(), kept_factors(memory, slot));
  if (p.norm_weight) o = normed(p, o, sum_of_squares<NORM_LANES>(o), load_shared4(own_factors(memory)));
  store_four(p.o, (long long)((Offset)KEPT(kept, o) + (Offset)(pass.first + slot) * p.HV * V + norm_column()),
             TYPE_BFLOAT16, o);
}
// Zeros for the outputs of a sequence without a slot.
__device__ __forceinline__ void leave_zeros(const DecodeRecordsParams& p, u32 kept) {
  const int length = KEPT(kept, length);
#pragma unroll 1
  for (int t = warp_index(); t < length; t += WARPS)
    store_four(p.o, (long long)((Offset)KEPT(kept, o) + (Offset)t * p.HV * V + norm_column()), TYPE_BFLOAT16,
               make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

// Inputs of a pass to shared memory, up to the barrier behind which all warps have theirs there.
__device__ __forceinline__ void stage_inputs(const DecodeRecordsParams& p, const Item& it, const LaneInputs& in,
                                             u32 memory, u32 kept, const Pass& pass) {
  stage_channels(p, it, in, memory, kept, pass.first, pass.count);
  keep_norm_factors(p, in, memory);
  if (pass.first == 0) share_record(in, memory);
}

__device__ __forceinline__ void decode_in_turn(const DecodeRecordsParams& p, Item it, const Part& part, int step) {
  const u32 memory = part.memory;
  Upcoming next = {};
  if (finds_sequences()) load_upcoming(p, it, it.n, next);
  sync_warp();  // else the compiler loads rows' numbers after weights
  keep_weights(p, it, memory);
  if (finds_sequences()) {
    load_from(p, it, it.n, next);
    find_upcoming(p, it, it.n, next, kept_of(memory, 0));
    load_upcoming(p, it, it.n + step, next);
    load_from(p, it, it.n + step, next);
  }
  sync_block();
  LaneInputs in;
  load_sequence(p, it, in, kept_of(memory, 0));
  request_state(memory, kept_of(memory, 0));
  int phase = 0, odd = 0;
#pragma unroll 1
  for (;;) {
    const u32 kept = kept_of(memory, odd);
    const bool exists = !(KEPT(kept, flags) & KEPT_PADDING), reads = KEPT(kept, flags) & KEPT_READS;
    const int length = KEPT(kept, length);
    it.length = length;
    Pass pass = {0, tokens_from(it, 0)};
    float s[ROWS][VECTOR];

    // 1. Tokens and records that have come, to shared memory, and where the next sequence is; then the state, to
    // registers.
    const int later = it.n + step;
    const bool more = later < (int)p.N;
    const u32 kept_later = kept_of(memory, odd ^= 1);
    if (exists) stage_inputs(p, it, in, memory, kept, pass);
    if (more && finds_sequences()) {
      find_upcoming(p, it, later, next, kept_later);
      load_upcoming(p, it, later + step, next);
    }
    sync_block();
    if (exists) {
      finish_staging(p, in, memory, kept, 0);
      receive_state(s, reads, position_now(part), memory, phase);
      phase ^= reads;
    }

    // 2. The next sequence: what comes by registers, then its state.
    if (more) {
      load_sequence(p, it, in, kept_later);
      if (!BY_COPY) request_state(memory, kept_later);
    }

    // 3. Records and tokens.
    if (exists) {
      if (has_records(kept)) {
        replay(p, s, position_now(part), memory, kept);
        round_state(s);
        if (!IN_WALK || pass.count == 0) store_ahead(p, s, position_now(part), memory, kept);
      }
      sync_block();  // warps' tokens are finished
    }
    if (exists && pass.count > 0) begin_first_tokens(p, s, position_now(part), memory, kept);
    if (BY_COPY && more) {
      if (thread_index() % 32 == 0) copy_out_wait_read<0>();
      request_state(memory, kept_later);
    }
    if (exists) {
#pragma unroll 1
      for (;;) {
        take_tokens(p, part, s, kept, pass);
        leave_outputs(p, memory, kept, pass);
        if (pass.first + PASS_TOKENS >= length) break;
        sync_block();  // these tokens and their sums are done with
        pass.first += PASS_TOKENS;
        pass.count = tokens_from(it, pass.first);
        LaneInputs inputs;
        load_later(p, it, inputs, pass);
        stage_inputs(p, it, inputs, memory, kept, pass);
        sync_block();
        finish_staging(p, inputs, memory, kept, pass.first);
        sync_block();
        begin_tokens(s, position_now(part), memory);
      }
      if (!has_records(kept) && !(p.flags & FLAG_SCATTER_TOKENS))
        store_named(p, s, position_now(part), kept, 0);
    } else {
      leave_zeros(p, kept);
    }
    if (!more) break;
    it.n = later;
    if (finds_sequences()) load_from(p, it, later + step, next);
    sync_block();  // shared memory is free
  }
  if (BY_COPY && thread_index() % 32 == 0) copy_out_wait_read<0>();
}

KDA_KERNEL(THREADS, MIN_BLOCKS) decode_sequences(KDA_PARAM DecodeRecordsParams p) {
  KDA_SHARED(memory);
  const u32 block = block_index();
  const Part part = {0, 0, (u32)shuffle((int)shared_address(memory), 0)};
  if (thread_index() % 32 == 0) {
    barrier_init(come_barrier(part.memory), 1);
    fence_barrier_init();
  }
  sync_warp();
  const Item it = item_of(p, block);
  const int step = (int)((u64)(u32)grid_blocks() * p.task_factor >> p.task_shift);  // grid / heads
  if (p.fills_device) launch_dependents();
  wait_for_inputs();
  if (!p.fills_device) launch_dependents();
  decode_in_turn(p, it, part, step);
  clear_tail(p, 2ll * p.HV * V, {block * THREADS + thread_index(), (u32)grid_blocks() * THREADS});
}
