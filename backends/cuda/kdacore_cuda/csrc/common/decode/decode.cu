// fused_decode_kda and fused_decode_gated_delta_rule: the step that servers decode with, in one launch. For each
// token: convolution of q, k and v with SiLU, the recurrence of recurrent.cu, the gated norm of its output.
//
// Grid: a cluster of CLUSTER blocks takes a sequence and HEADS_AT_ONCE value heads, each by SLICES blocks that have
// COLUMNS columns of V. These are all value heads of a key head: so what several of them read, the windows of q and k, is
// written by one block, after a barrier that says that all have read it. Where a key head has more value heads than a
// cluster takes, those windows are left to decode_windows.cu. The sum over V, which the norm needs, is that of one block,
// or is exchanged in the cluster's shared memory.
//
// As in recurrent.cu the time depends on how soon the loads of the state are issued: they follow those of the windows
// as soon as the pool's row is known. Convolution, gate and norms are computed meanwhile, a channel a thread.
//
// With RECORDS a sequence that has a row of records first applies those that precede the call, as recurrent.cu does, and
// writes that state before it goes on with the tokens. A block has all columns of a value head, so it reads the head's
// updates and decays alone and replaces them; and the keys, where the key head has no other value heads. Else those are
// left to decode_windows.cu.
#include "common/clear_rows.cuh"
#include "common/decode/decode_records.cuh"
#include "common/decode/gated_norm.cuh"
#include "common/recurrent/records.cuh"

static_assert(!RECORDS || CLUSTER == 1, "a block writes the records of its value head");

// What a thread loads of a token: the channel of q or k that it owns, the column of v, the gate of a channel.
struct Inputs {
  Channel qk, v;
  Bits<1> g, beta;
};
__device__ __forceinline__ bool owns_column() { return thread_index() < COLUMNS; }
__device__ __forceinline__ bool owns_gate() { return thread_index() >= K; }  // of the channel of k

__device__ __forceinline__ void load_token_inputs(const DecodeParams& p, Inputs& in, const TokenPlaces& at,
                                                  const Item& it) {
  in.qk.x = load_elements<1>(p.x, at.x + in.qk.index, x_type(p));
  if (owns_column()) in.v.x = load_elements<1>(p.x, at.x + in.v.index, x_type(p));
  const int channel = thread_index() - K;
  if (owns_gate()) in.g = load_elements<1>(p.g, at.g + (scalar_gate(p) ? it.zero : channel), g_type(p));
  in.beta = load_elements<1>(p.beta, at.beta + it.zero, beta_type(p));
}
__device__ __forceinline__ void next_token(const DecodeParams& p, TokenPlaces& at) {
  at.x += (Offset)p.x_st, at.g += (Offset)p.g_st, at.beta += (Offset)p.beta_st;
}

// Of several tokens a thread leaves its channels in shared memory between them: q's or k's at `place` thread, v's behind.
__device__ __forceinline__ void keep_window(const Channel& c, u32 to) {
  store_shared(to + OFFSET(KeptChannel, bias), c.bias.w[0], c.window[0].w[0], c.window[1].w[0], c.window[2].w[0]);
}
__device__ __forceinline__ void keep_channel(const Channel& c, u32 to) {
  store_shared(to, c.weight.w[0], c.weight.w[1], c.weight.w[2], c.weight.w[3]);
  keep_window(c, to);
}
__device__ __forceinline__ void fetch_channel(Channel& c, u32 from) {
  const uint4 x = load_shared_u4(from), y = load_shared_u4(from + OFFSET(KeptChannel, bias));
  c.weight = {x.x, x.y, x.z, x.w};
  c.bias = {y.x};
  c.window[0] = {y.y}, c.window[1] = {y.z}, c.window[2] = {y.w};
}
__device__ __forceinline__ u32 place_of(u32 memory, int channel) {
  return memory + OFFSET(DecodeMemory, channels) + (u32)sizeof(KeptChannel) * channel;
}

// A channel of a token. `kept`: it is in shared memory.
__device__ __forceinline__ float convolve_kept(const DecodeParams& p, Channel& c, u32 place, bool kept) {
  if (ONE || !has_conv(p)) return convolve(p, c);
  if (kept) fetch_channel(c, place);
  const float y = convolve(p, c);
  if (kept) {
    keep_window(c, place);
  } else {
    keep_channel(c, place);
  }
  return y;
}
// The convolved token, to shared memory.
__device__ __forceinline__ void stage_inputs(const DecodeParams& p, Inputs& in, const ChannelGates<1>& gate, u32 memory,
                                             int odd, bool kept) {
  const int thread = thread_index();
  const u32 own = memory + odd * (u32)sizeof(StagedToken) + 4 * thread;  // q, and behind it k
  store_shared(own, __float_as_uint(convolve_kept(p, in.qk, place_of(memory, thread), kept)));
  if (owns_gate()) {
    float decay[1] = {to_float(in.g, g_type(p))};
    decays(p, decay, gate);
    store_shared(own + OFFSET(StagedToken, decay) - 4 * K, __float_as_uint(decay[0]));
  }
  if (owns_column())
    store_shared(own + OFFSET(StagedToken, v),
                 __float_as_uint(convolve_kept(p, in.v, place_of(memory, 2 * K + thread), kept)));
}

template <int N>
__device__ __forceinline__ void read_floats(float (&x)[N], u32 from) {
  if constexpr (N == 1) x[0] = load_shared1(from);
#pragma unroll
  for (int i = 0; i + 3 < N; i += 4) {
    const float4 y = load_shared4(from + 4 * i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// This lane's channels of a staged token.
__device__ __forceinline__ Token<TOKEN_CHANNELS> read_token(const DecodeParams& p, u32 from, const LanePosition& at,
                                                            const Bits<1>& raw_beta) {
  Token<TOKEN_CHANNELS> x;
  const u32 own = from + 4 * at.channel;
  read_floats(x.q, own);
  read_floats(x.k, own + OFFSET(StagedToken, k));
  read_floats(x.d, own + OFFSET(StagedToken, decay));
  x.qq = x.kk = x.qk = 0.0f;
#pragma unroll
  for (int i = 0; i < TOKEN_CHANNELS; ++i) {
    x.qq = multiply_add(x.q[i], x.q[i], x.qq);
    x.kk = multiply_add(x.k[i], x.k[i], x.kk);
    x.qk = multiply_add(x.q[i], x.k[i], x.qk);
  }
  x.beta = to_float(raw_beta, beta_type(p));
  if (p.flags & FLAG_BETA_SIGMOID) x.beta = sigmoid(x.beta);
  if (p.flags & FLAG_NEG_EIGVAL) x.beta *= 2.0f;
  return x;
}

__device__ __forceinline__ void write_floats(u32 to, const float (&x)[OUT]) {
  if constexpr (OUT == 1) {
    store_shared(to, __float_as_uint(x[0]));
  } else {
#pragma unroll
    for (int i = 0; i < OUT; i += 4)
      store_shared(to + 4 * i, __float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                   __float_as_uint(x[i + 3]));
  }
}

__device__ __forceinline__ void store_factors(const Unit& unit, const float4& y) {
  store_shared(unit.factors, __float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z), __float_as_uint(y.w));
}

// One block's part: columns of a value head of a sequence.
struct Part {
  int slice, first;  // of the head's columns; the rank of the first block that has columns of the head
  u32 memory;
};
__device__ __forceinline__ Unit unit_of(int pass, const Part& part) { return unit_of(pass, part.slice, part.memory); }

// Zeros for the outputs of a sequence without a slot.
__device__ __forceinline__ void store_zeros(const DecodeParams& p, const Item& it, const TokenPlaces& at,
                                            const Part& part) {
#pragma unroll 1
  for (int pass = 0; pass * PASS_TOKENS < it.length; ++pass) {
    const Unit unit = unit_of(pass, part);
    if (unit.token < it.length)
      store_four(p.o, (long long)(at.o + (Offset)unit.token * p.HV * V + unit.column), x_type(p),
                 make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
}

constexpr int PASSES = (MOST_TOKENS + PASS_TOKENS - 1) / PASS_TOKENS;

// What the norm of a unit's token reads, not yet converted.
struct NormInputs {
  Bits<4> weight, z;
};
__device__ __forceinline__ NormInputs load_norm_inputs(const DecodeParams& p, const Item& it, const TokenPlaces& at,
                                                       const Unit& unit) {
  NormInputs r = {};
  if (!p.norm_weight || unit.token >= it.length) return r;
  r.weight = load_norm_weight(p, it.hv, unit.column);
  if (p.z) r.z = load_z(p, at.z + unit.token * (Offset)p.z_st, unit.column);
  return r;
}
// Those of all tokens, ready for the norm; `first`: of the first pass.
__device__ __forceinline__ void stage_norm(const DecodeParams& p, const Item& it, const TokenPlaces& at,
                                           const Part& part, const NormInputs& first) {
  if (!p.norm_weight) return;
  const Unit unit = unit_of(0, part);
  if (unit.token < it.length) store_factors(unit, norm_factors(p, first.weight, first.z));
#pragma unroll 1
  for (int pass = 1; pass < PASSES && pass * PASS_TOKENS < it.length; ++pass) {
    const Unit more = unit_of(pass, part);
    const NormInputs in = load_norm_inputs(p, it, at, more);
    if (more.token < it.length) store_factors(more, norm_factors(p, in.weight, in.z));
  }
}

// Sums of squares of all tokens to the blocks that have columns of the head.
__device__ __forceinline__ void exchange_squares(const Item& it, const Part& part) {
  const u32 bar = part.memory + OFFSET(DecodeMemory, received);
  if (thread_index() == 0)
    barrier_expect_remote(cluster_address(bar, part.first + part.slice), 4 * SLICES * it.length);
#pragma unroll 1
  for (int pass = 0; pass < PASSES && pass * PASS_TOKENS < it.length; ++pass) {
    const Unit unit = unit_of(pass, part);
    const float sum = sum_of_squares<UNITS>(load_shared4(unit.outputs));
    if (unit.token < it.length && thread_index() % UNITS == 0) send_squares(unit, part.slice, part.first, sum, bar);
  }
}

// All outputs, from shared to device memory.
__device__ __forceinline__ void store_outputs(const DecodeParams& p, const Item& it, const TokenPlaces& at,
                                              const Part& part) {
  if (SLICES > 1 && p.norm_weight) barrier_wait(part.memory + OFFSET(DecodeMemory, received), 0);
#pragma unroll 1
  for (int pass = 0; pass < PASSES && pass * PASS_TOKENS < it.length; ++pass) {
    const Unit unit = unit_of(pass, part);
    float4 o = load_shared4(unit.outputs);
    if (p.norm_weight) {
      const float squares = SLICES > 1 ? received_squares(unit) : sum_of_squares<UNITS>(o);
      if (unit.token < it.length) o = normed(p, o, squares, load_shared4(unit.factors));
    }
    if (unit.token < it.length)
      store_four(p.o, (long long)(at.o + (Offset)unit.token * p.HV * V + unit.column), x_type(p), o);
  }
}

// Brings the records that precede the call as far as the L2 while the state is on its way: registers are full of that.
template <class Params>
__device__ __forceinline__ void prefetch_records(const Params& p, const Records& r) {
  const int channel = thread_index() % K;
#pragma unroll 1
  for (int j = 0; j < r.replayed; ++j) {
    if (owns_gate()) {
      prefetch_l2(reinterpret_cast<const float*>(r.key) + j * p.key_st + channel * p.key_sk);
      prefetch_l2(reinterpret_cast<const float*>(r.decay) + j * p.decay_st + channel * p.decay_sk);
    } else {
      prefetch_l2(reinterpret_cast<const float*>(r.update) + j * p.update_st + channel * p.update_sv);
    }
  }
}
// Applies the records that precede the call, and leaves that state.
template <class Params>
__device__ __forceinline__ void replay_and_store(const Params& p, const Item& it, float (&s)[ROWS][VECTOR],
                                                 const Records& records, const LanePosition& lane, const Start& start,
                                                 int from, u64 target) {
  replay(p, s, records, lane);
  round_state(s);
  const int to = number_of(load_row_written(p, it), p.flags & FLAG_WRITES64);
  const bool stays = !records.replayed && start.has_initial && p.h0 == p.ht && from == to;
  if (is_slot(p, to) && !stays) store_state(s, target + STATE_BYTES * (to * p.ht_row), whole_rows(p.ht, p.ht_row));
}
// Key and decay of a staged token, to its record: by the threads that own the channels of k. All have read the records
// that were there.
template <class Params>
__device__ __forceinline__ void record_token(const Params& p, const Records& records, u32 staged, int t) {
  if (t >= p.records || !owns_gate()) return;
  const int channel = thread_index() - K;
  const u32 own = staged + 4 * channel;
  if (p.writes_keys)
    store_float(records.key, t * p.key_st + channel * p.key_sk, load_shared1(own + OFFSET(StagedToken, k)));
  if (!scalar_gate(p) || channel == 0)
    store_float(records.decay, t * p.decay_st + channel * p.decay_sk, load_shared1(own + OFFSET(StagedToken, decay)));
}

// The state after the last token, or zeros for padding where its row is written nevertheless. `to_bits`: of one token,
// the row.
__device__ __forceinline__ void store_final_state(const DecodeParams& p, const Item& it,
                                                  const float (&s)[ROWS][VECTOR], u64 target, Number to_bits,
                                                  bool padding) {
  if (!p.ht || (!ONE && p.flags & FLAG_SCATTER_TOKENS)) return;
  const bool indexed = p.flags & FLAG_INDEXED_OUT;
  if (!ONE && indexed) to_bits = load_row_written(p, it);
  const int to = indexed ? number_of(to_bits, p.flags & FLAG_WRITES64) : it.n;
  if (!indexed || (is_slot(p, to) && !padding))
    store_state(s, target + STATE_BYTES * (to * p.ht_row), whole_rows(p.ht, p.ht_row));
}

// All tokens of a sequence and value head.
__device__ __forceinline__ void decode_head(const DecodeOf<RECORDS>& p, Item& it, int h, const Part& part,
                                            const LanePosition& lane, const Start& start) {
  const int thread = thread_index(), slice = part.slice;
  const long long own = (long long)it.hv * (K * V) + first_element(lane);  // of a pool row

  // 1. Issue all loads: the first token; the window and the state, as soon as their rows are known.
  WindowRow window_row = load_window_row(p, it);
  RecordRow record_row;
  if constexpr (RECORDS) record_row = load_record_row(p, it);
  TokenPlaces at = locate_tokens(p, it);
  Inputs in;
  in.qk.index = (thread < K ? h * K : (p.H + h - 1) * K) + thread;
  in.v.index = 2 * p.H * K + it.hv * V + slice * COLUMNS + thread;
  if (has_conv(p)) {
    load_weights(p, in.qk);
    if (owns_column()) load_weights(p, in.v);
  }
  RawGate<1> raw_gate;
  if (owns_gate()) raw_gate = load_gate<1>(p, it, thread - K);
  NormInputs norm_inputs;
  if (it.length > 0) {
    load_token_inputs(p, in, at, it);
    norm_inputs = load_norm_inputs(p, it, at, unit_of(0, part));
  }
  // The row of the final state. Of one token it is loaded ahead; else it would take registers.
  Number to_bits;
  if (ONE && p.flags & FLAG_INDEXED_OUT) to_bits = load_row_written(p, it);

  const int from = row_of(p, start);
  const bool padding = !start.known && !is_slot(p, from), reads = from >= 0 && !padding && start.has_initial;
  const int length = padding ? 0 : it.length;
  Records records = {};
  if constexpr (RECORDS) {
    if (!padding) records = use_record_row(p, it, record_row, window_row);
  }
  WindowPlace windows = {};
  if (has_conv(p)) {
    windows = window_place(p, window_row, from, padding, reads);
    const Window before = window_before(p, it, windows);
    load_window(p, before, in.qk);
    if (owns_column()) load_window(p, before, in.v);
  }
  uint4 bits[ROWS];
  if (reads) {
    load_state(bits, p.h0 + STATE_BYTES * ((long long)from * p.h0_row + own), whole_rows(p.h0, p.h0_row));
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) bits[i] = zero_bits();
  }
  if constexpr (RECORDS) prefetch_records(p, records);

  // 2. Gate and convolution of the first token, while the state is loaded.
  ChannelGates<1> gate;
  if (owns_gate()) gate = finish_gate(p, raw_gate);
  if (length > 0) {
    stage_inputs(p, in, gate, part.memory, 0, false);
    stage_norm(p, it, at, part, norm_inputs);
  }
  if (CLUSTER > 1 && SLICES == 1) wait_cluster();  // all blocks have begun
  // A window that only this block reads is written as soon as one token has moved it on.
  const bool writes = p.writes_conv && !padding, tells = CLUSTER > 1 && writes && thread == 0;
  const u32 read = part.memory + OFFSET(DecodeMemory, read);
  if (ONE && writes) {
    if (owns_column()) leave_windows(p, it, windows, in.v, at.x, length);
    if (CLUSTER == 1) leave_windows(p, it, windows, in.qk, at.x, length);
  }
  float s[ROWS][VECTOR];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) unpack_state(s[i], bits[i]);

  const u64 target = p.ht + STATE_BYTES * own;
  if constexpr (RECORDS) {
    if (records.exist) replay_and_store(p, it, s, records, lane, start, from, target);
  }

  // 3. The recurrence; each token's inputs are loaded while the one before it is processed.
  const Offset first_x = at.x;
  const bool scatter = !ONE && p.flags & FLAG_SCATTER_TOKENS;
#pragma unroll 1
  for (int t = 0; t < length; ++t) {
    const u32 staged = part.memory + (t & 1) * (u32)sizeof(StagedToken);
    const u32 column = 4 * (lane.v - slice * COLUMNS);
    sync_block();  // the token is staged, and this block's loads of the windows have come
    if (t == 0 && tells) barrier_arrive_remote(cluster_address(read, 0));
    if constexpr (RECORDS) {
      if (records.exist) record_token(p, records, staged, t);
    }
    float v[OUT], o[OUT], update[OUT];
    read_floats(v, staged + OFFSET(StagedToken, v) + column);
    Tokens tokens;
    stage_token(tokens, lane, read_token(p, staged, lane, in.beta), t & 1);
    const bool more = !ONE && t + 1 < length;
    if (more) {
      next_token(p, at);
      load_token_inputs(p, in, at, it);
    }
    step(p, s, lane, tokens, v, o, update, t & 1, [&] {
      if (more) stage_inputs(p, in, gate, part.memory, ~t & 1, true);
    });
    if (lane.writes) write_floats(part.memory + OFFSET(DecodeMemory, outputs) + 4 * COLUMNS * t + column, o);
    if constexpr (RECORDS) {
      if (records.exist && lane.writes) store_update(p, records, lane, t, update);
    }
    if (scatter && t < p.writes_row) {
      const int row = load_number(p.writes, it.n * p.writes_row + t, p.flags & FLAG_WRITES64);
      if (is_slot(p, row))
        store_state(s, target + STATE_BYTES * (row * p.ht_row), whole_rows(p.ht, p.ht_row));
    }
  }

  // 4. What the tokens leave.
  if (!ONE && has_conv(p) && length > 0) {
    fetch_channel(in.qk, place_of(part.memory, thread));
    if (owns_column()) fetch_channel(in.v, place_of(part.memory, 2 * K + thread));
  }
  if (length == 0 && tells) barrier_arrive_remote(cluster_address(read, 0));
  if (length > 0) sync_block();  // all outputs are there
  if (SLICES > 1 && p.norm_weight && length > 0) exchange_squares(it, part);
  if (!RECORDS || !records.exist) store_final_state(p, it, s, target, to_bits, padding);
  if (!ONE && writes && owns_column()) leave_windows(p, it, windows, in.v, first_x, length);
  if (length > 0) store_outputs(p, it, at, part);
  if (padding) store_zeros(p, it, at, part);
  if ((!ONE || CLUSTER > 1) && writes && p.writes_keys && slice == 0 && part.first == 0) {
    if (CLUSTER > 1) barrier_wait(read, 0);
    leave_windows(p, it, windows, in.qk, first_x, length);
  }
}

// Barriers between the blocks of the cluster. The other half is wait_cluster().
__device__ __forceinline__ void begin_cluster(u32 memory) {
  if (thread_index() == 0) {
    barrier_init(memory + OFFSET(DecodeMemory, received), 1);
    barrier_init(memory + OFFSET(DecodeMemory, read), CLUSTER);
    fence_barrier_init();
  }
  arrive_cluster_begun();
}

KDA_KERNEL(THREADS, MIN_BLOCKS) KDA_CLUSTER(CLUSTER) decode(KDA_PARAM DecodeOf<RECORDS> p) {
  KDA_SHARED(memory);
  const u32 block = block_index(), rank = block % CLUSTER, task = block / CLUSTER;
  const Part part = {(int)rank % SLICES, (int)rank / SLICES * SLICES, shared_address(memory)};
  if constexpr (CLUSTER > 1) begin_cluster(part.memory);
  Item it;
  it.n = (int)((u64)task * p.task_factor >> p.task_shift);  // task / tasks of a sequence
  it.zero = (int)((u64)thread_index() >> p.task_shift);      // the shift is 31 or more
  const LanePosition lane = make_position(part.slice * COLUMNS, part.memory + (u32)sizeof(DecodeMemory));
  const int own = task - it.n * (int)p.tasks;
  it.hv = own * HEADS_AT_ONCE + rank / SLICES;
  const int h = PLAIN ? own : (int)((u64)it.hv * p.group_factor >> p.group_shift);  // hv / (HV / H)
  if (p.fills_device) launch_dependents();
  if constexpr (SLICES > 1) wait_cluster();  // with few heads the previous launch has not ended yet
  wait_for_inputs();
  if (!p.fills_device) launch_dependents();
  const Start start = start_of(p, it);
  decode_head(p, it, h, part, lane, start);
  if (PLAIN) return;
  const long long row_bytes = (long long)p.HV * V * type_size(x_type(p));
  clear_tail(p, row_bytes, {block * THREADS + thread_index(), (u32)grid_blocks() * THREADS});
}
