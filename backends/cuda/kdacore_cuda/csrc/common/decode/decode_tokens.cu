// The fused decode step of decode_head.cu for the candidates of each sequence, with records or with a state behind each.
//
// A block of four warps, as there: a thread owns a channel of q, of k and of v. The state of a whole head comes to shared
// memory by one bulk copy a warp. Meanwhile all tokens are convolved, four at a time at most: what the recurrence needs of
// them is in shared memory before it starts. Then the state moves to registers, 128 of each thread, and is read and
// written there by all records and tokens. Its place in shared memory is for sums from then on, so that three blocks
// fit on a multiprocessor: while one computes, the loads of the other two are on their way. With few heads a head is
// shared by SLICES blocks of a cluster, with COLUMNS columns each.
//
// With records a sequence first applies those that precede the call, writes that state, and leaves of each token what it
// does to the state. Sums have the order of decode_head.cu with the same SLICES, so that states have its bits.
//
// Grid: a cluster of CLUSTER blocks takes a sequence and key head, with all its value heads. They all read the windows of
// q and k and the keys of records, which the first block writes; those of a value head all read its decays, which the
// first of them writes. Barriers say that all have read.
#include "common/clear_rows.cuh"
#include "common/decode/tokens_records.cuh"
#include "common/decode/tokens_start.cuh"
#include "common/decode/cluster_exchange.cuh"
#include "sm90/bulk_copies.cuh"
#if V_FIRST
#include "common/decode/tokens_v_first.cuh"
#else
#include "common/decode/tokens_k_first.cuh"
#endif

__device__ __forceinline__ int norm_column() { return thread_index() % NORM_LANES * 4; }
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
__device__ __forceinline__ void load_channel(const DecodeRecordsParams& p, Channel& c, int index) {
  c.index = index + thread_index();
  c.weight = load_elements<TAPS>(p.conv_weight, (Offset)c.index * TAPS, p.conv_weight_type);
  if (p.conv_bias) c.bias = load_elements<1>(p.conv_bias, (Offset)c.index, p.conv_bias_type);
}
__device__ __forceinline__ Channels load_channels(const DecodeRecordsParams& p, const Item& it, const Part& part) {
  const int h = (int)((u64)it.hv * p.group_factor >> p.group_shift);  // hv / (HV / H)
  Channels c;
  load_channel(p, c.q, h * K);
  load_channel(p, c.k, (p.H + h) * K);
  c.v.index = 0;
  if (owns_column()) load_channel(p, c.v, 2 * p.H * K + it.hv * V + part.column());
  c.gate = load_gate<1>(p, it, thread_index());
  return c;
}
__device__ __forceinline__ int gate_channel(const DecodeRecordsParams& p, const Item& it) {
  return scalar_gate(p) ? it.zero : thread_index();
}
__device__ __forceinline__ ChannelInputs load_inputs(const DecodeRecordsParams& p, const Item& it, const Channels& c,
                                                     Offset x_at, Offset g_at) {
  ChannelInputs x;
  x.q = load_elements<1>(p.x, x_at + c.q.index, TYPE_BFLOAT16);
  x.k = load_elements<1>(p.x, x_at + c.k.index, TYPE_BFLOAT16);
  if (owns_column()) x.v = load_elements<1>(p.x, x_at + c.v.index, TYPE_BFLOAT16);
  x.g = load_elements<1>(p.g, g_at + gate_channel(p, it), g_type(p));
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
                                             Channels& c, const TokenPlaces& at, u32 memory, int first, int count) {
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
  Offset x_at = at.x + first * (Offset)p.x_st, g_at = at.g + first * (Offset)p.g_st;
  ChannelInputs next = {};
  if (count > 0) next = load_inputs(p, it, c, x_at, g_at);
  u32 staged = memory + OFFSET(TokensMemory, tokens);
#pragma unroll 1
  for (int left = count; left > 0; --left, staged += sizeof(StagedToken)) {
    const ChannelInputs x = next;
    const bool is_first = first == 0 && left == count;
    if (left > 1) {
      x_at += (Offset)p.x_st, g_at += (Offset)p.g_st;
      next = load_inputs(p, it, c, x_at, g_at);
    }
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
// What this lane's columns of its warp's output are multiplied with.
__device__ __forceinline__ float4 load_norm(const DecodeRecordsParams& p, const Item& it, const Part& part,
                                            const TokenPlaces& at, int first, int count) {
  if (!p.norm_weight || warp_index() >= count) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int column = part.column() + norm_column();
  Bits<4> z = {};
  if (p.z) z = load_z(p, at.z + (first + warp_index()) * (Offset)p.z_st, column);
  return norm_factors(p, load_norm_weight(p, it.hv, column), z);
}

// Brings what is loaded late as far as the L2: records that precede the call, and tokens of a pass behind its second.
__device__ __forceinline__ void prefetch_late(const DecodeRecordsParams& p, const Item& it, const Part& part,
                                              const Sequence& sequence, const Channels& c, const TokenPlaces& at) {
  const int column = owns_column() ? thread_index() : 0;
  RecordPlaces record = record_places(p, sequence.records, part.column() + column, thread_index());
#pragma unroll 1
  for (int left = sequence.records.replayed; left > 0; --left) {
    prefetch_l2(reinterpret_cast<const void*>(record.update));
    prefetch_l2(reinterpret_cast<const void*>(record.key));
    prefetch_l2(reinterpret_cast<const void*>(record.decay));
    next_record(p, record);
  }
  const u16* x = reinterpret_cast<const u16*>(p.x) + at.x;
#pragma unroll
  for (int t = 2; t < PASS_TOKENS; ++t) {
    if (t >= it.length) break;
    const u16* token = x + t * (Offset)p.x_st;
    prefetch_l2(token + c.q.index), prefetch_l2(token + c.k.index), prefetch_l2(token + c.v.index);
    if (!scalar_gate(p)) prefetch_l2(reinterpret_cast<const u16*>(p.g) + at.g + t * (Offset)p.g_st + thread_index());
  }
}

__device__ __forceinline__ u32 come_barrier(u32 memory) {
  return memory + OFFSET(TokensMemory, come) + 8 * warp_index();
}
// This lane's part of the state where a block has a part of a head: loaded to registers.
struct Pieces {
  uint4 bits[IN_SHARED ? 1 : ROWS];
};
// Issues the loads of the state in row `from`.
__device__ __forceinline__ void request_state(const DecodeRecordsParams& p, const Sequence& sequence, Pieces& pieces,
                                              const LanePosition& lane, int hv, u32 memory) {
  const u64 head = p.h0 + STATE_BYTES * (sequence.from * p.h0_row + (long long)hv * (K * V));
  if constexpr (IN_SHARED) {
    if (!sequence.reads || thread_index() % 32 != 0) return;
    barrier_expect(come_barrier(memory), PART_BYTES);
    copy_in(area_of(memory, warp_index()), reinterpret_cast<const void*>(head + PART_BYTES * warp_index()), PART_BYTES,
            come_barrier(memory));
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      pieces.bits[i] = sequence.reads ? load_global16(head + STATE_BYTES * (first_element(lane) + piece_offset(i)))
                                      : zero_bits();
  }
}
__device__ __forceinline__ void receive_state(float (&s)[ROWS][VECTOR], const Sequence& sequence, const Pieces& pieces,
                                              const LanePosition& lane, u32 memory) {
  if constexpr (IN_SHARED) {
    if (sequence.reads) barrier_wait(come_barrier(memory), 0);
    const u32 from = area_of(memory, 0) + STATE_BYTES * first_element(lane);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      unpack_state(s[i], sequence.reads ? load_shared_u4(from + STATE_BYTES * piece_offset(i)) : zero_bits());
    sync_warp();  // its place is free
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) unpack_state(s[i], pieces.bits[i]);
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

// What a pass of tokens has besides what is staged: this lane's factors of the norm of its warp's output, and in lane i of
// each group of PASS_TOKENS lanes the factors of token i.
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
// The next tokens of a long sequence. Everything is looked up again: the registers have the state.
__device__ __forceinline__ void prepare_later(const DecodeRecordsParams& p, const Item& known, const Part& part,
                                              Pass& pass) {
  Item it = known;
  it.n = opaque(it.n), it.hv = opaque(it.hv);
  const Sequence sequence = load_sequence(p, it);
  const TokenPlaces at = locate_tokens(p, it);
  pass.first += PASS_TOKENS;
  pass.count = tokens_from(it, pass.first);
  sync_block();  // the tokens before are done with
  pass.norm = load_norm(p, it, part, at, pass.first, pass.count);
  keep_norm(pass, part.memory);
  Channels channels = load_channels(p, it, part);
  find_windows(p, sequence, channels, at.x, pass.first);
  stage_tokens(p, it, sequence, channels, at, part.memory, pass.first, pass.count);
  const Bits<1> beta = load_beta(p, it, at, pass.first, pass.count);
  sync_block();
  finish_factors(p, pass, beta, part.memory);
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

  // 4. The tokens. Where records are left, nobody needs the state behind the last one.
  const LanePosition updated = update_position(lane);
  RecordPlaces record = record_places(p, sequence.records, updated.v, thread_index());
  for (;;) {
#pragma unroll 1
    for (int i = 0; i < pass.count; ++i) {
      const int t = pass.first + i;
      float update[OUT];
      take_token(s, lane, memory, i, factors_from(pass.factors, i), !recorded || t + 1 < it.length, update);
      if (recorded) {
        if (updated.writes && t < p.records) store_update(record.update, update);
        record.update += 4 * p.update_st;
      }
      if (scatters) store_candidate(p, it, s, target, t);
    }
    finish_tokens();
    if (pass.first == 0) {
      if (pass.count == 0) sync_block();
      tell_read(part), wait_read(part);
    }
    if (recorded) record_tokens(p, record, part, pass.first, pass.count);
    store_outputs(p, part, at, pass);
    if (pass.first + PASS_TOKENS >= it.length) break;
    prepare_later(p, it, part, pass);
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
