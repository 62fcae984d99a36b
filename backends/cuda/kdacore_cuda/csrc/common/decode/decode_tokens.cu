// The fused decode step of decode_head.cu for any number of tokens of each sequence, candidates among them, which leave
// records or a state each.
//
// A block of four warps, as there: a thread owns a channel of q, of k and of v. The state of a whole head comes to
// shared memory by one bulk copy a warp. Meanwhile up to four tokens are convolved: what the recurrence needs of them
// is in shared memory before it starts. Then the state moves to registers, 128 of each thread, where all records and
// tokens read and write it. Its place in shared memory is for sums from then on, so that three blocks fit on a
// multiprocessor: while one computes, the loads of the other two are on their way. With few heads a head is shared by
// SLICES blocks of a cluster, with COLUMNS columns each.
//
// With records a sequence first applies those that precede the call, writes that state, and leaves of each token what
// it does to the state. Sums have the order of decode_head.cu with the same SLICES, so that states have its bits.
//
// Grid: a cluster of CLUSTER blocks takes a sequence and key head, with all its value heads. They all read the windows
// of q and k and the keys of records, which the first block writes; those of a value head all read its decays, which
// the first of them writes. Barriers say that all have read.
#include "common/clear_rows.cuh"
#include "common/decode/cluster_exchange.cuh"
#include "common/decode/tokens_staging.cuh"
#include "sm90/bulk_copies.cuh"
#if V_FIRST
#include "common/decode/tokens_v_first.cuh"
#else
#include "common/decode/tokens_k_first.cuh"
#endif

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
// Issues the loads of the state in row `from`. Zeros in its place each lane writes that reads them.
__device__ __forceinline__ void request_state(const DecodeRecordsParams& p, const Sequence& sequence, Pieces& pieces,
                                              const LanePosition& lane, int hv, u32 memory) {
  const u64 head = p.h0 + STATE_BYTES * (sequence.from * p.h0_row + (long long)hv * (K * V));
  if constexpr (!IN_SHARED) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      pieces.bits[i] = sequence.reads ? load_global16(head + STATE_BYTES * (first_element(lane) + piece_offset(i)))
                                      : zero_bits();
  } else if (!sequence.reads) {
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) store_shared(shared_piece(lane, memory, i), 0, 0, 0, 0);
  } else if (thread_index() % 32 == 0) {
    barrier_expect(come_barrier(memory), PART_BYTES);
    copy_in(area_of(memory, warp_index()), reinterpret_cast<const void*>(head + PART_BYTES * warp_index()), PART_BYTES,
            come_barrier(memory));
  }
}
__device__ __forceinline__ void receive_state(float (&s)[ROWS][VECTOR], const Sequence& sequence, const Pieces& pieces,
                                              const LanePosition& lane, u32 memory) {
  if (IN_SHARED && sequence.reads) barrier_wait(come_barrier(memory), 0);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if constexpr (IN_SHARED) {
      unpack_state(s[i], load_shared_u4(shared_piece(lane, memory, i)));
    } else {
      unpack_state(s[i], pieces.bits[i]);
    }
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

// Applies the records that precede the call, and leaves that state. `target`: of this lane's part in the first row.
__device__ __forceinline__ void replay_and_store(const DecodeRecordsParams& p, const Item& it,
                                                 const Sequence& sequence, float (&s)[ROWS][VECTOR],
                                                 const LanePosition& lane, u64 target) {
  replay_records(p, s, sequence.records, lane);
  round_state(s);
  const int to = number_of(load_row_written(p, it), p.flags & FLAG_WRITES64);
  const bool stays = !sequence.records.replayed && sequence.reads && p.h0 == p.ht && sequence.from == to;
  if (is_slot(p, to) && !stays) store_state(s, target + STATE_BYTES * (to * p.ht_row), true);
}
// Stores the state behind token t, where a row is named for it.
__device__ __forceinline__ void store_candidate(const DecodeRecordsParams& p, const Item& it,
                                                const float (&s)[ROWS][VECTOR], u64 target, int t) {
  if (t >= p.writes_row) return;
  const int row = load_number(p.writes, it.n * p.writes_row + t, p.flags & FLAG_WRITES64);
  if (is_slot(p, row)) store_state(s, target + STATE_BYTES * (row * p.ht_row), true);
}

// Keys and decays of staged tokens, to their records from `to` on.
__device__ __forceinline__ void record_tokens(const DecodeRecordsParams& p, RecordPlaces& to, const Part& part,
                                              int first, int count) {
  if (count > (int)p.records - first) count = (int)p.records - first;
  const bool keys = part.rank == 0, decays = part.slice == 0 && (!scalar_gate(p) || thread_index() == 0);
  u32 own = part.memory + OFFSET(TokensMemory, tokens) + 4 * thread_index();
#pragma unroll 1
  for (; count > 0; --count, own += sizeof(StagedToken)) {
    if (keys) *reinterpret_cast<float*>(to.key) = load_shared1(own + OFFSET(StagedToken, k));
    if (decays) *reinterpret_cast<float*>(to.decay) = load_shared1(own + OFFSET(StagedToken, decay));
    to.key += 4 * p.key_st, to.decay += 4 * p.decay_st;
  }
}

// What a pass of tokens has besides what is staged: this lane's factors of the norm of its warp's output, and in lane i
// of each group of PASS_TOKENS lanes the factors of token i.
struct Pass {
  int first, count;
  float4 norm;
  TokenFactors factors;
};

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
__device__ __forceinline__ void store_outputs(const DecodeRecordsParams& p, const Part& part, const TokenPlaces& at,
                                              const Pass& pass) {
  if (SLICES > 1 && p.norm_weight && thread_index() == 0)
    barrier_expect(part.memory + OFFSET(TokensMemory, received) + 8 * (pass.first / PASS_TOKENS),
                   4 * SLICES * pass.count);
  const int slot = warp_index(), t = pass.first + slot;
  if (slot >= pass.count) return;
  float4 o = output_of(part.memory, slot, norm_column(), factors_from(pass.factors, slot));
  if (p.norm_weight) {
    float sum = sum_of_squares<NORM_LANES>(o);
    if (SLICES > 1) send_sum(part, t, sum), sum = receive_sum(part, t);
    o = normed(p, o, sum, load_shared4(own_factors(part.memory)));
  }
  if (thread_index() % 32 < NORM_LANES)
    store_four(p.o, (long long)(at.o + (Offset)t * p.HV * V + part.column() + norm_column()), TYPE_BFLOAT16, o);
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

__device__ __forceinline__ int tokens_from(const Item& it, int first) {
  return it.length - first < PASS_TOKENS ? it.length - first : PASS_TOKENS;
}
__device__ __forceinline__ void finish_factors(const DecodeRecordsParams& p, Pass& pass, const Bits<1>& beta,
                                               u32 memory) {
  if (pass.count > 0)
    pass.factors = token_factors(p, staged_token(memory, thread_index() % PASS_TOKENS), finish_beta(p, beta));
}
__device__ __forceinline__ void keep_norm(const Pass& pass, u32 memory) {
  store_shared(own_factors(memory), __float_as_uint(pass.norm.x), __float_as_uint(pass.norm.y),
               __float_as_uint(pass.norm.z), __float_as_uint(pass.norm.w));
}
// The next tokens of a long sequence. All is looked up again: what is only needed here takes no registers before.
__device__ __forceinline__ void prepare_later(const DecodeRecordsParams& p, const Item& known, const Part& part,
                                              Pass& pass, float (&s)[ROWS][VECTOR]) {
  Item it = known;
  it.n = opaque(it.n), it.hv = opaque(it.hv);
  sync_block();  // the tokens before and their sums are done with
  put_state(s, part.memory);
  const Sequence sequence = load_sequence(p, it);
  const TokenPlaces at = locate_tokens(p, it);
  pass.first += PASS_TOKENS;
  pass.count = tokens_from(it, pass.first);
  Channels channels = load_channels(p, it, part);
  find_windows(p, sequence, channels, at.x, pass.first);
  const Bits<1> beta = load_beta(p, it, at, pass.first, pass.count);
  pass.norm = load_norm(p, it, part, at, pass.first, pass.count);
  stage_tokens(p, it, sequence, channels, at, part.memory, pass.first, pass.count);
  get_state(s, part.memory);
  sync_warp();  // its place is free
  keep_norm(pass, part.memory);
  sync_block();
  finish_factors(p, pass, beta, part.memory);
}

// The recurrence of a pass, its records and outputs. `record`: of its first token. Where records are left, nobody needs
// the state behind the last token.
__device__ __forceinline__ void take_pass(const DecodeRecordsParams& p, const Item& it, const Sequence& sequence,
                                          const Part& part, const LanePosition& lane, const TokenPlaces& at,
                                          const Pass& pass, float (&s)[ROWS][VECTOR], RecordPlaces& record,
                                          u64 target) {
  const bool recorded = sequence.records.exist, updates = update_position(lane).writes;
#pragma unroll 1
  for (int i = 0; i < pass.count; ++i) {
    const int t = pass.first + i;
    float update[OUT];
    take_token(s, lane, part.memory, i, factors_from(pass.factors, i), !recorded || t + 1 < it.length, update);
    if (recorded) {
      if (updates && t < p.records) store_update(record.update, update);
      record.update += 4 * p.update_st;
    }
    if (p.flags & FLAG_SCATTER_TOKENS) store_candidate(p, it, s, target, t);
  }
  finish_tokens();
  if (pass.first == 0) {
    if (pass.count == 0) sync_block();
    tell_read(part), wait_read(part);
  }
  if (recorded) record_tokens(p, record, part, pass.first, pass.count);
  store_outputs(p, part, at, pass);
}

// A sequence and value head.
__device__ __forceinline__ void decode_value_head(const DecodeRecordsParams& p, Item& it, const Part& part,
                                                  const LanePosition& lane) {
  const u32 memory = part.memory;
  // 1. Issue the loads of the state as soon as its row is known.
  const Sequence sequence = load_sequence(p, it);
  sync_warp();  // else the compiler loads rows' numbers after weights
  const TokenPlaces at = locate_tokens(p, it);
  if (sequence.padding) {
    if (CLUSTER > 1 && SLICES == 1) wait_cluster();
    return leave_padding(p, it, at, part);
  }
  Pieces pieces;
  request_state(p, sequence, pieces, lane, it.hv, memory);
  Channels channels = load_channels(p, it, part);
  find_windows(p, sequence, channels, at.x, 0);
  prefetch_late(p, it, part, sequence, channels, at);

  // 2. Gate and convolution of the first tokens, while the state is on its way.
  const bool recorded = sequence.records.exist, scatters = p.flags & FLAG_SCATTER_TOKENS;
  Pass pass = {0, tokens_from(it, 0)};
  Bits<1> beta = {};
  if (pass.count > 0) beta = load_beta(p, it, at, 0, pass.count);
  pass.norm = load_norm(p, it, part, at, 0, pass.count);
  stage_tokens(p, it, sequence, channels, at, memory, 0, pass.count);
  if (CLUSTER > 1 && SLICES == 1) wait_cluster();  // all blocks have begun
  sync_block();  // tokens are staged, and this block's loads of the windows have come
  finish_factors(p, pass, beta, memory);

  // 3. The state, and the records that precede the tokens.
  float s[ROWS][VECTOR];
  receive_state(s, sequence, pieces, lane, memory);
  keep_norm(pass, memory);
  const u64 target = p.ht + STATE_BYTES * ((long long)it.hv * (K * V) + first_element(lane));  // in the first row
  if (recorded) replay_and_store(p, it, sequence, s, lane, target);

  // 4. The tokens.
  RecordPlaces record = record_places(p, sequence.records, update_position(lane).v, thread_index());
#pragma unroll 1
  for (;;) {
    take_pass(p, it, sequence, part, lane, at, pass, s, record, target);
    if (pass.first + PASS_TOKENS >= it.length) break;
    prepare_later(p, it, part, pass, s);
  }

  // 5. What the tokens leave.
  if (!recorded && !scatters) {
    const int to = number_of(load_row_written(p, it), p.flags & FLAG_WRITES64);
    if (is_slot(p, to)) store_state(s, target + STATE_BYTES * (to * p.ht_row), true);
  }
  if (CLUSTER > 1 && part.rank == 0) {
    write_windows(p, sequence, channels.q.index, at.x, it.length);
    write_windows(p, sequence, channels.k.index, at.x, it.length);
  }
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
  const u32 block = block_index(), rank = block % CLUSTER, task = block / CLUSTER;
  const Part part = {(int)rank, (int)rank % SLICES, shared_address(memory)};
  begin_block(part);
  Item it;
  it.n = (int)((u64)task * p.task_factor >> p.task_shift);  // task / tasks of a sequence
  it.zero = (int)((u64)thread_index() >> p.task_shift);      // the shift is 31 or more
  it.hv = (task - it.n * (int)p.tasks) * HEADS + rank / SLICES;
  const LanePosition lane = position_of(part.column(), part.memory);
  if (p.fills_device) launch_dependents();
  if constexpr (SLICES > 1) wait_cluster();  // with few heads the previous launch has not ended yet
  wait_for_inputs();
  if (!p.fills_device) launch_dependents();
  decode_value_head(p, it, part, lane);
  clear_tail(p, 2ll * p.HV * V, {block * THREADS + thread_index(), (u32)grid_blocks() * THREADS});
}
