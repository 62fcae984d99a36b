// The fused decode step of decode_head.cu for any number of tokens of each sequence, candidates among them, which leave
// records or a state each.
//
// A block of four warps, as there: a thread owns a channel of q, of k and of v. The state of a whole head comes to
// shared memory by one bulk copy a warp. Meanwhile up to four tokens are convolved: what the recurrence needs of them
// is in shared memory before it starts. Then the state moves to registers, 128 of each thread, where all records and
// tokens read and write it. Its place in shared memory is for records and sums from then on, so that three blocks fit
// on a multiprocessor: while one computes, the loads of the other two are on their way. The 40 registers that are left
// hold what the loops need and nothing else: what is the same for all threads waits in shared memory, addresses are
// computed where they are used. With few heads a head is shared by SLICES blocks of a cluster, with COLUMNS columns
// each.
//
// With records a sequence first applies those that precede the call, writes that state, and leaves of each token what
// it does to the state. Sums have the order of decode_head.cu with the same SLICES, so that states have its bits.
//
// Grid: a cluster of CLUSTER blocks takes a sequence and key head, with all its value heads. They all read the windows
// of q and k and the keys of records, which the first block writes; those of a value head all read its decays, which
// the first of them writes. Barriers say that all have read.
#include "common/clear_rows.cuh"
#include "common/decode/cluster_exchange.cuh"
#include "common/decode/tokens_pass.cuh"
#include "sm90/bulk_copies.cuh"

KDA_SHARED_BYTES(sizeof(TokensMemory));

__device__ __forceinline__ u32 come_barrier(u32 memory) {
  return memory + OFFSET(TokensMemory, come) + 8 * warp_index();
}
// This lane's part of the state where a block has a part of a head: loaded to registers.
struct Pieces {
  uint4 bits[IN_SHARED ? 1 : ROWS];
};
__device__ __forceinline__ u32 shared_piece(const LanePosition& lane, u32 memory, int i) {
  return area_of(memory, warp_index()) - PART_BYTES * warp_index() +
         STATE_BYTES * (first_element(lane) + piece_offset(i));
}
// Issues the loads of the state. Zeros in its place each lane writes that reads them.
__device__ __forceinline__ void request_state(const DecodeRecordsParams& p, const SequenceStart& start, Pieces& pieces,
                                              const LanePosition& lane, int hv, u32 memory) {
  const u64 head = p.h0 + STATE_BYTES * (start.from * p.h0_row + (long long)hv * (K * V));
  if constexpr (!IN_SHARED) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      pieces.bits[i] = start.reads ? load_global16(head + STATE_BYTES * (first_element(lane) + piece_offset(i)))
                                   : zero_bits();
  } else if (!start.reads) {
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) store_shared(shared_piece(lane, memory, i), 0, 0, 0, 0);
  } else if (thread_index() % 32 == 0) {
    barrier_expect(come_barrier(memory), PART_BYTES);
    copy_in(area_of(memory, warp_index()), reinterpret_cast<const void*>(head + PART_BYTES * warp_index()), PART_BYTES,
            come_barrier(memory));
  }
}
__device__ __forceinline__ void receive_state(float (&s)[ROWS][VECTOR], bool reads, const Pieces& pieces,
                                              const LanePosition& lane, u32 memory) {
  if (IN_SHARED && reads) barrier_wait(come_barrier(memory), 0);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if constexpr (IN_SHARED) {
      unpack_state(s[i], load_shared_u4(shared_piece(lane, memory, i)));
    } else {
      unpack_state(s[i], pieces.bits[i]);
    }
    // Unpacked here: the compiler would keep the bits, for each of the places that read the state.
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[i][c] = HALF_STATE ? opaque_float(s[i][c]) : s[i][c];
  }
  sync_warp();  // its place is free
}

// Between passes: to shared memory and back.
__device__ __forceinline__ u32 waiting_piece(u32 memory, int i) {
  return area_of(memory, warp_index()) + 16 * (32 * i + thread_index() % 32);
}
__device__ __forceinline__ void put_state(const float (&s)[ROWS][VECTOR], u32 memory) {
#pragma unroll
  for (int i = 0; i < ROWS * VECTOR / 4; ++i) {
    const float* x = &s[i * 4 / VECTOR][i * 4 % VECTOR];
    store_shared(waiting_piece(memory, i), __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                 __float_as_uint(x[3]));
  }
}
__device__ __forceinline__ void get_state(float (&s)[ROWS][VECTOR], u32 memory) {
#pragma unroll
  for (int i = 0; i < ROWS * VECTOR / 4; ++i) {
    const float4 y = load_shared4(waiting_piece(memory, i));
    float* x = &s[i * 4 / VECTOR][i * 4 % VECTOR];
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
}

// The same of the state before the tokens, which takes no part of a warp's time: what lies behind WarpMemory goes by a
// bulk copy from the end of the warp's area.
constexpr u32 STATE_AT = AREA_BYTES - PART_BYTES;
constexpr int FIRST_COPIED = !IN_SHARED || STATE_AT >= sizeof(WarpMemory)
                                 ? 0
                                 : (int)((sizeof(WarpMemory) - STATE_AT + PART_BYTES / ROWS - 1) / (PART_BYTES / ROWS));
static_assert(!IN_SHARED || FIRST_COPIED == 0 || GROUPS == 1, "pieces that are copied lie together");
__device__ __forceinline__ void store_ahead(const DecodeRecordsParams& p, const float (&s)[ROWS][VECTOR],
                                            const LanePosition& lane, u32 memory) {
  if constexpr (!IN_SHARED) return store_named(p, s, lane, memory, 0);
  const int row = load_kept(memory, OFFSET(KeptSequence, rows));
  if (row < 0) return;
#pragma unroll
  for (int i = FIRST_COPIED; i < ROWS; ++i) {
    const uint4 x = pack_state(s[i]);
    store_shared(shared_piece(lane, memory, i) + STATE_AT, x.x, x.y, x.z, x.w);
  }
  fence_async_proxy();
  sync_warp();
  constexpr u32 first = FIRST_COPIED * (PART_BYTES / ROWS);
  if (thread_index() % 32 == 0) {
    const u64 part = KEPT_ADDRESS(memory, target) + STATE_BYTES * (row * p.ht_row) + PART_BYTES * warp_index();
    copy_out(reinterpret_cast<void*>(part + first), area_of(memory, warp_index()) + STATE_AT + first,
             PART_BYTES - first);
    copy_out_commit();
  }
  const u64 place = state_place(p, lane, memory, row);
#pragma unroll
  for (int i = 0; i < FIRST_COPIED; ++i) store_state_bits(place + STATE_BYTES * piece_offset(i), pack_state(s[i]));
}
// Shared memory that is copied is still there.
__device__ __forceinline__ void wait_copied() {
  if (IN_SHARED && thread_index() % 32 == 0) copy_out_wait_read<0>();
}

// Applies the records that precede the call, and leaves that state. `ahead`: the first ones.
__device__ __forceinline__ void replay_and_store(const DecodeRecordsParams& p, const Part& part,
                                                 const ThreadRecords& ahead, float (&s)[ROWS][VECTOR],
                                                 const LanePosition& lane) {
  const u32 memory = part.memory;
  const int replayed = KEPT(memory, replayed);
  if (replayed > 0) share_records(ahead, memory);
#pragma unroll 1
  for (int first = 0; first < replayed; first += PASS_RECORDS) {
    const int count = replayed - first < PASS_RECORDS ? replayed - first : PASS_RECORDS;
    if (first > 0) {
      const Records r = {true, 0, KEPT_ADDRESS(memory, update), KEPT_ADDRESS(memory, key), KEPT_ADDRESS(memory, decay)};
      const ThreadRecords later = load_records(p, r, own_update(part), first, count);
      sync_block();  // those before are applied
      share_records(later, memory);
    }
    sync_block();
#pragma unroll 1
    for (int i = 0; i < count; ++i) apply_record(s, lane, memory, i);
  }
  round_state(s);
  store_ahead(p, s, lane, memory);
}

// Keys and decays of staged tokens, to their records.
__device__ __forceinline__ void record_tokens(const DecodeRecordsParams& p, const Part& part, int first, int count) {
  if (count > (int)p.records - first) count = (int)p.records - first;
  const int thread = thread_index();
  const bool keys = part.rank == 0, decays = part.slice == 0 && (!scalar_gate(p) || thread == 0);
  u32 own = part.memory + OFFSET(TokensMemory, tokens) + 4 * thread;
  u64 key = KEPT_ADDRESS(part.memory, key) + 4 * (first * p.key_st + thread),
      decay = KEPT_ADDRESS(part.memory, decay) + 4 * (first * p.decay_st + thread);
#pragma unroll 1
  for (; count > 0; --count, own += sizeof(StagedToken)) {
    if (keys) store_global4(key, __float_as_uint(load_shared1(own + OFFSET(StagedToken, k))));
    if (decays) store_global4(decay, __float_as_uint(load_shared1(own + OFFSET(StagedToken, decay))));
    key += 4 * p.key_st, decay += 4 * p.decay_st;
  }
}

// The sum of squares of a token's columns to all blocks of the head; and that of all columns, in the warp of the token.
__device__ __forceinline__ void send_sum(const Part& part, int t, float sum) {
  const u32 bar = part.memory + OFFSET(TokensMemory, received) + 8 * (t / PASS_TOKENS);
  const u32 to = part.memory + OFFSET(TokensMemory, squares) + 4 * (SLICES * t + part.slice);
  const int lane = thread_index() % 32;
  if (lane < SLICES)
    store_async(cluster_address(to, part.first() + lane), __float_as_uint(sum),
                cluster_address(bar, part.first() + lane));
}
__device__ __forceinline__ float receive_sum(const Part& part, int t) {
  barrier_wait(part.memory + OFFSET(TokensMemory, received) + 8 * (t / PASS_TOKENS), 0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < SLICES; ++i)
    sum += load_shared1(part.memory + OFFSET(TokensMemory, squares) + 4 * (SLICES * t + i));
  return sum;
}
// The outputs of a pass, one a warp.
__device__ __forceinline__ void store_outputs(const DecodeRecordsParams& p, const Part& part, const Pass& pass) {
  if (SLICES > 1 && p.norm_weight && thread_index() == 0)
    barrier_expect(part.memory + OFFSET(TokensMemory, received) + 8 * (pass.first / PASS_TOKENS),
                   4 * SLICES * pass.count);
  const int slot = warp_index(), t = pass.first + slot;
  if (slot >= pass.count) return;
  float4 o = output_of(part.memory, slot, norm_column(), kept_factors(part.memory, slot));
  if (p.norm_weight) {
    float sum = sum_of_squares<NORM_LANES>(o);
    if (SLICES > 1) send_sum(part, t, sum), sum = receive_sum(part, t);
    o = normed(p, o, sum, load_shared4(own_factors(part.memory)));
  }
  if (thread_index() % 32 < NORM_LANES)
    store_four(p.o,
               (long long)((Offset)KEPT(part.memory, o) + (Offset)t * p.HV * V + part.column() + norm_column()),
               TYPE_BFLOAT16, o);
}
// Zeros for the outputs of a sequence without a slot.
__device__ __forceinline__ void leave_padding(const DecodeRecordsParams& p, const Item& it, const TokenPlaces& at,
                                              const Part& part) {
  if (thread_index() >= NORM_LANES) return;
#pragma unroll 1
  for (int t = 0; t < it.length; ++t)
    store_four(p.o, (long long)(at.o + (Offset)t * p.HV * V + part.column() + norm_column()), TYPE_BFLOAT16,
               make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

// Says that this block has read the windows of q and k and all records, to the blocks that write them.
__device__ __forceinline__ void tell_read(const Part& part) {
  if (CLUSTER == 1 || thread_index() != 0) return;
  const u32 read = part.memory + OFFSET(TokensMemory, read);
  barrier_arrive_remote(cluster_address(read, 0));
  if (part.first() != 0) barrier_arrive_remote(cluster_address(read, part.first()));
}
__device__ __forceinline__ void wait_read(const Part& part) {
  if (CLUSTER > 1 && part.slice == 0) barrier_wait(part.memory + OFFSET(TokensMemory, read), 0);
}

__device__ __forceinline__ void keep_norm(const float4& norm, u32 memory) {
  store_shared(own_factors(memory), __float_as_uint(norm.x), __float_as_uint(norm.y), __float_as_uint(norm.z),
               __float_as_uint(norm.w));
}
// The next tokens of a long sequence. All is looked up again: what is only needed here takes no registers before.
__device__ __forceinline__ void prepare_later(const DecodeRecordsParams& p, const Part& part, Pass& pass,
                                              float (&s)[ROWS][VECTOR]) {
  wait_copied();
  sync_block();  // the tokens before and their sums are done with
  put_state(s, part.memory);
  Item it = item_of(p, (u32)opaque(block_index()));
  const SequenceNumbers numbers = load_numbers(p, it);
  const Sequence sequence = find_sequence(p, it, numbers, find_start(p, it, numbers));
  const TokenPlaces at = locate_tokens(p, it, numbers);
  pass.first += PASS_TOKENS;
  pass.count = tokens_from(it, pass.first);
  Channels channels = load_channels(p, it, part);
  find_windows(p, sequence, channels, at.x, pass.first);
  PassInputs inputs = load_inputs(p, it, channels, at, pass.first, pass.count);
  const Bits<1> beta = load_beta(p, it, at, pass.first, pass.count);
  const NormInputs norm = load_norm(p, it, part, at, pass.first, pass.count);
  stage_tokens(p, it, sequence, channels, inputs, part.memory, pass.first, pass.count);
  const float4 factors = finish_norm(p, norm, pass.count);
  get_state(s, part.memory);
  sync_warp();  // its place is free
  keep_norm(factors, part.memory);
  sync_block();
  keep_factors(p, part.memory, finish_beta(p, beta));
}

// The recurrence of a pass, its records and outputs. Where records are left, nobody needs the state behind the last
// token.
__device__ __forceinline__ void take_pass(const DecodeRecordsParams& p, const Part& part, const Pass& pass,
                                          float (&s)[ROWS][VECTOR]) {
  if (pass.count > 0) begin_tokens(s, position_now(part), part.memory);
#pragma unroll 1
  for (int i = 0; i < pass.count; ++i) {
    const u32 memory = (u32)opaque((int)part.memory);
    const LanePosition lane = position_now(part);
    const int t = pass.first + i;
    const bool recorded = has_records(memory), moves = !recorded || t + 1 < KEPT(memory, length);
    const u64 record = KEPT_ADDRESS(memory, update) + 4 * (t * p.update_st + update_position(lane).v);
    float update[OUT];
    update_of(update, s, lane, memory, i);
    if (recorded && t < p.records && update_position(lane).writes) store_part(record, update);
    end_token(s, lane, memory, i, update, i + 1 < pass.count, moves);
    if (p.flags & FLAG_SCATTER_TOKENS) store_named(p, s, lane, memory, t);
  }
  finish_tokens();
  if (pass.first == 0) {
    if (pass.count == 0) sync_block();
    tell_read(part), wait_read(part);
  }
  if (has_records(part.memory)) record_tokens(p, part, pass.first, pass.count);
  store_outputs(p, part, pass);
}

// A sequence and value head.
__device__ __forceinline__ void decode_value_head(const DecodeRecordsParams& p, Item& it, const Part& part,
                                                  const LanePosition& lane) {
  const u32 memory = part.memory;
  // 1. Issue all loads, the state last: what the convolution needs would queue behind the states of all blocks.
  const SequenceNumbers numbers = load_numbers(p, it);
  sync_warp();  // else the compiler loads rows' numbers after weights
  Channels channels = load_channels(p, it, part);
  const SequenceStart start = find_start(p, it, numbers);
  const TokenPlaces at = locate_tokens(p, it, numbers);
  if (start.padding) {
    if (CLUSTER > 1 && SLICES == 1) wait_cluster();
    return leave_padding(p, it, at, part);
  }
  const Sequence sequence = find_sequence(p, it, numbers, start);
  Pass pass = {0, tokens_from(it, 0)};
  find_windows(p, sequence, channels, at.x, 0);
  PassInputs inputs = load_inputs(p, it, channels, at, 0, pass.count);
  Bits<1> beta = {};
  if (pass.count > 0) beta = load_beta(p, it, at, 0, pass.count);
  Pieces pieces;
  if (!IN_SHARED) request_state(p, start, pieces, lane, it.hv, memory);
  const NormInputs norm = load_norm(p, it, part, at, 0, pass.count);
  ThreadRecords records;
  if (IN_SHARED) {
    records = load_records(p, sequence.records, own_update(part), 0, sequence.records.replayed);
    request_state(p, start, pieces, lane, it.hv, memory);
  }
  keep_sequence(p, it, start, sequence, at, numbers.written, memory);

  // 2. Gate and convolution of the first tokens, while the state is on its way.
  stage_tokens(p, it, sequence, channels, inputs, memory, 0, pass.count);
  const float4 factors = finish_norm(p, norm, pass.count);
  // A part of a state is in registers already.
  if (!IN_SHARED) records = load_records(p, sequence.records, own_update(part), 0, sequence.records.replayed);
  if (CLUSTER > 1 && SLICES == 1) wait_cluster();  // all blocks have begun
  sync_block();  // tokens are staged, and this block's loads of the windows have come
  if (pass.count > 0) keep_factors(p, memory, finish_beta(p, beta));

  // 3. The state, and the records that precede the tokens.
  float s[ROWS][VECTOR];
  receive_state(s, start.reads, pieces, lane, memory);
  keep_norm(factors, memory);
  if (has_records(memory)) replay_and_store(p, part, records, s, lane);

  // 4. The tokens.
#pragma unroll 1
  for (;;) {
    take_pass(p, part, pass, s);
    if (pass.first + PASS_TOKENS >= KEPT(memory, length)) break;
    prepare_later(p, part, pass, s);
  }

  // 5. What the tokens leave.
  if (!has_records(memory) && !(p.flags & FLAG_SCATTER_TOKENS)) store_named(p, s, lane, memory, 0);
  if (CLUSTER > 1 && part.rank == 0) {
    const Sequence windows = kept_windows(p, memory);
    const Offset x = (Offset)KEPT(memory, x);
    const int length = KEPT(memory, length);
    write_windows(p, windows, channels.q.index, x, length);
    write_windows(p, windows, channels.k.index, x, length);
  }
  wait_copied();
}

__device__ __forceinline__ void begin_block(const Part& part) {
  if (thread_index() % 32 == 0) {
    if (IN_SHARED) barrier_init(come_barrier(part.memory), 1);
    if (CLUSTER > 1 && thread_index() == 0) {
#pragma unroll
      for (int i = 0; i < PASSES; ++i) barrier_init(part.memory + OFFSET(TokensMemory, received) + 8 * i, 1);
      barrier_init(part.memory + OFFSET(TokensMemory, read), part.rank ? SLICES : CLUSTER);
    }
    fence_barrier_init();
  }
  if constexpr (CLUSTER > 1) arrive_cluster_begun();
}

KDA_KERNEL(THREADS, MIN_BLOCKS) KDA_CLUSTER(CLUSTER) decode_tokens(KDA_PARAM DecodeRecordsParams p) {
  KDA_SHARED(memory);
  const u32 block = block_index(), rank = block % CLUSTER;
  // shuffle(): else the address is computed from the block's number in the cluster wherever it is used.
  const Part part = {(int)rank, (int)rank % SLICES, (u32)shuffle((int)shared_address(memory), 0)};
  begin_block(part);
  Item it = item_of(p, block);
  const LanePosition lane = make_position(part.column(), 0);
  if (p.fills_device) launch_dependents();
  if constexpr (SLICES > 1) wait_cluster();  // with few heads the previous launch has not ended yet
  wait_for_inputs();
  if (!p.fills_device) launch_dependents();
  decode_value_head(p, it, part, lane);
  clear_tail(p, 2ll * p.HV * V, {block * THREADS + thread_index(), (u32)grid_blocks() * THREADS});
}
