// The fused decode step of decode.cu for one token of each sequence, on GPUs with clusters of blocks.
//
// A block of four warps: a thread owns a channel of q, of k and of v and the gate of that channel, so that what every
// warp does for itself is done half as often as by eight. A block that has all of a head keeps its state in shared
// memory. In registers it would leave room for two blocks on a multiprocessor, and while one of them computes, only the
// other one's loads are on their way; in shared memory there is room for three, five of 16 bits. One bulk copy a warp,
// issued as soon as the pool's row is known, takes the place of the loads of all threads; the state is read twice, for
// the sums over K, and to be updated and stored. With few heads a head is shared by SLICES blocks of a cluster, with
// COLUMNS columns each, in registers.
//
// Grid: a cluster of CLUSTER blocks takes a sequence and key head, with all its value heads. They all read the windows
// of q and k, which the first block writes after a barrier that says that all have read them. The first warp of a block
// has the norm of the output; the sum over V of a shared head comes from all its blocks.
#include "common/decode/cluster_exchange.cuh"
#include "common/decode/token_places.cuh"
#include "sm90/bulk_copies.cuh"
#if V_FIRST
#include "common/decode/head_v_first.cuh"
#else
#include "common/decode/head_k_first.cuh"
#endif

__device__ __forceinline__ bool first_warp() { return thread_index() < 32; }
__device__ __forceinline__ bool has_norm(const DecodeParams& p) { return p.norm_weight && first_warp(); }
__device__ __forceinline__ int norm_column() { return thread_index() % NORM_LANES * 4; }
__device__ __forceinline__ bool owns_column() { return COLUMNS == THREADS || thread_index() < COLUMNS; }

// A block's part: columns of a value head.
struct Part {
  int rank, slice;  // in the cluster; of the head's columns
  u32 memory;
  int column() const { return slice * COLUMNS; }
};

// The row of the pool that a sequence starts from, not yet converted, and whether it starts from what the row holds.
struct HeadStart {
  Number row;
  u32 reads;
};
// Where the row's number is, known before inputs may be read.
__device__ __forceinline__ u32 start_offset(const DecodeParams& p, const Item& it) {
  return (u32)opaque((it.n + it.zero) << (p.flags & FLAG_INDEX64 ? 3 : 2));
}
__device__ __forceinline__ HeadStart load_start(const DecodeParams& p, const Item& it, u32 at) {
  HeadStart s = {{load_global4(p.indices + at), 0}, 1};  // first: everything else is wanted later
  if (p.flags & FLAG_INDEX64) s.row.high = load_global4(p.indices + at + 4);
  if (p.has_initial) s.reads = load_global1(p.has_initial + it.n + it.zero);
  return s;
}

// A thread's inputs, not yet converted.
struct HeadInputs {
  Channel q, k, v;
  Bits<1> g, beta;
  RawGate<1> gate;
};
__device__ __forceinline__ void load_channel(const DecodeParams& p, Channel& c, int index, Offset x_at) {
  c.index = index + thread_index();
  c.x = load_elements<1>(p.x, x_at + c.index, x_type(p));
  c.weight = load_four(p.conv_weight, (Offset)c.index * TAPS, p.conv_weight_type);
}
__device__ __forceinline__ void load_bias(const DecodeParams& p, Channel& c) {
  c.bias = load_elements<1>(p.conv_bias, (Offset)c.index, p.conv_bias_type);
}
// What does not depend on the row of the pool.
__device__ __forceinline__ HeadInputs load_inputs(const DecodeParams& p, const Item& it, int h, const Part& part,
                                                  const TokenPlaces& at) {
  HeadInputs in;
  load_channel(p, in.q, h * K, at.x);
  load_channel(p, in.k, (p.H + h) * K, at.x);
  in.v.index = 0;
  if (owns_column()) load_channel(p, in.v, 2 * p.H * K + it.hv * V + part.column(), at.x);
  in.g = load_elements<1>(p.g, at.g + (scalar_gate(p) ? it.zero : thread_index()), g_type(p));
  in.beta = load_elements<1>(p.beta, at.beta + it.zero, beta_type(p));
  in.gate = load_gate<1>(p, it, thread_index());
  if (p.conv_bias) {
    load_bias(p, in.q), load_bias(p, in.k);
    if (owns_column()) load_bias(p, in.v);
  }
  return in;
}
// What is needed late, and so loaded behind the state: of the norm, and the row of the final state.
struct LateInputs {
  Bits<4> weight, z;
  Number to;
};
__device__ __forceinline__ LateInputs load_late(const DecodeParams& p, const Item& it, const Part& part,
                                                const TokenPlaces& at) {
  LateInputs in = {};
  if (p.flags & FLAG_INDEXED_OUT) in.to = load_row_written(p, it);
  if (!has_norm(p)) return in;
  in.weight = load_norm_weight(p, it.hv, part.column() + norm_column());
  if (p.z) in.z = load_z(p, at.z, part.column() + norm_column());
  return in;
}

// Where the windows of a thread's channels are, in bytes: at first in any row, then in that of the sequence.
struct HeadWindows {
  u64 q, k, v;
  u64 step;  // from token to token
};
// opaque(): computed before the row is known, which the compiler would not do by itself. A row has fewer than 2^31
// elements.
__device__ __forceinline__ u64 window_offset(const DecodeParams& p, int channel) {
  return (u32)opaque((int)(2 * (u32)channel * (u32)p.conv_sc));
}
__device__ __forceinline__ HeadWindows windows_of(const DecodeParams& p, const HeadInputs& in) {
  return {window_offset(p, in.q.index), window_offset(p, in.k.index), window_offset(p, in.v.index),
          2 * (u64)(u32)p.conv_sl};
}
__device__ __forceinline__ void find_row(const DecodeParams& p, HeadWindows& w, int row) {
  const u64 base = state_window(p, row).base;
  w.q += base, w.k += base, w.v += base;
}
__device__ __forceinline__ void load_window(Channel& c, u64 at, u64 step) {
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) c.window[i].w[0] = load_global2(at + i * step);
}
__device__ __forceinline__ void store_window(const Channel& c, u64 at, u64 step) {
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) store_global2(at + i * step, c.window[i].w[0]);
}
__device__ __forceinline__ void clear_window(Channel& c) {
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) c.window[i] = {};
}
// The windows before the token, zeros of a sequence that starts from zeros.
__device__ __forceinline__ void load_windows(HeadInputs& in, const HeadWindows& w, bool reads) {
  if (reads) {
    load_window(in.q, w.q, w.step), load_window(in.k, w.k, w.step);
    if (owns_column()) load_window(in.v, w.v, w.step);
  } else {
    clear_window(in.q), clear_window(in.k), clear_window(in.v);
  }
}

// The convolved token to shared memory, with the sums over each warp's channels that norms need.
__device__ __forceinline__ void stage_token(const DecodeParams& p, HeadInputs& in, u32 memory) {
  const u32 own = memory + 4 * thread_index();
  float decay[1] = {to_float(in.g, g_type(p))};
  decays(p, decay, finish_gate(p, in.gate));
  const float q = convolve(p, in.q), k = convolve(p, in.k);
  store_shared(own + OFFSET(HeadMemory, decayed_q), __float_as_uint(q * decay[0]));
  store_shared(own + OFFSET(HeadMemory, decayed_k), __float_as_uint(k * decay[0]));
  store_shared(own + OFFSET(HeadMemory, k), __float_as_uint(k));
  store_shared(own + OFFSET(HeadMemory, decay), __float_as_uint(decay[0]));
  if (owns_column()) store_shared(own + OFFSET(HeadMemory, v), __float_as_uint(convolve(p, in.v)));
  const float qq = sum_lanes<32>(q * q), kk = sum_lanes<32>(k * k), qk = sum_lanes<32>(q * k);
  if (thread_index() % 32 == 0)
    store_shared(memory + OFFSET(HeadMemory, norms) + thread_index() / 2, __float_as_uint(qq), __float_as_uint(kk),
                 __float_as_uint(qk), 0);
}
__device__ __forceinline__ float finish_beta(const DecodeParams& p, const Bits<1>& raw) {
  float beta = to_float(raw, beta_type(p));
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  return beta;
}

__device__ __forceinline__ u32 come_barrier(u32 memory) {
  return memory + OFFSET(HeadMemory, come) + 8 * (thread_index() / 32);
}
// This warp's part of the head's state in row `from`, counted by its barrier.
__device__ __forceinline__ void request_part(const DecodeParams& p, int from, int hv, u32 memory) {
  if (thread_index() % 32 != 0) return;
  const u32 part = thread_index() / 32 * PART_BYTES;
  const u64 source = p.h0 + STATE_BYTES * (from * p.h0_row) + (u64)hv * (K * V * STATE_BYTES) + part;
  barrier_expect(come_barrier(memory), PART_BYTES);
  copy_in(memory + OFFSET(HeadMemory, state) + part, reinterpret_cast<const void*>(source), PART_BYTES,
          come_barrier(memory));
}
// This lane's part, or zeros, which in shared memory every thread writes that reads them.
__device__ __forceinline__ void load_pieces(const DecodeParams& p, Pieces& pieces, const LanePosition& lane, int from,
                                            int hv, u32 memory, bool reads) {
  pieces.from = memory + STATE_BYTES * first_element(lane);
  if constexpr (IN_SHARED) {
    if (reads) return request_part(p, from, hv, memory);
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) store_shared(pieces.from + STATE_BYTES * piece_offset(i), 0, 0, 0, 0);
    return;
  }
  const u64 source = p.h0 + STATE_BYTES * (from * p.h0_row + (long long)hv * (K * V) + first_element(lane));
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    pieces.bits[i] = reads ? load_global16(source + STATE_BYTES * piece_offset(i)) : zero_bits();
}

// Zeros for the output of a sequence without a slot, and for its final state where that is no row of a pool.
__device__ __forceinline__ void leave_padding(const DecodeParams& p, const Item& it, const TokenPlaces& at,
                                              const Part& part, const LanePosition& lane, u64 target) {
  if (thread_index() < NORM_LANES)
    store_four(p.o, (long long)(at.o + part.column() + norm_column()), x_type(p), make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  if (!p.ht || p.flags & FLAG_INDEXED_OUT) return;
#pragma unroll 1
  for (int i = 0; i < ROWS; ++i)
    store_state_bits(target + STATE_BYTES * (it.n * p.ht_row + piece_offset(i)), zero_bits());
}

// The sum of squares of the block's columns, to all blocks of the head; and that of all columns, in the first warp.
__device__ __forceinline__ void send_sum(const Part& part, float sum) {
  const u32 bar = part.memory + OFFSET(HeadMemory, received);
  const u32 to = part.memory + OFFSET(HeadMemory, squares) + 4 * part.slice;
  const int lane = thread_index(), first = part.rank - part.slice;
  if (lane == 0) barrier_expect(bar, 4 * SLICES);
  if (lane < SLICES)
    store_async(cluster_address(to, first + lane), __float_as_uint(sum), cluster_address(bar, first + lane));
}
__device__ __forceinline__ float receive_sum(const Part& part) {
  barrier_wait(part.memory + OFFSET(HeadMemory, received), 0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < SLICES; ++i) sum += load_shared1(part.memory + OFFSET(HeadMemory, squares) + 4 * i);
  return sum;
}

// A sequence and value head; `h`: the key head.
__device__ __forceinline__ void decode_value_head(const DecodeParams& p, const Item& it, int h, const Part& part,
                                                  const TokenPlaces& at, const LanePosition& lane,
                                                  const HeadStart& start) {
  const u32 memory = part.memory;
  // 1. Issue all loads: windows and state as soon as the row is known.
  HeadInputs in = load_inputs(p, it, h, part, at);
  HeadWindows windows = windows_of(p, in);
  const u64 target = p.ht + STATE_BYTES * ((long long)it.hv * (K * V) + first_element(lane));
  const int from = number_of(start.row, p.flags & FLAG_INDEX64);
  if (!is_slot(p, from)) {
    if (CLUSTER > 1 && SLICES == 1) wait_cluster();
    return leave_padding(p, it, at, part, lane, target);
  }
  const bool reads = start.reads;
  find_row(p, windows, from);
  Pieces pieces;
  // Windows first: they are needed first, and would queue behind the states of all blocks.
  load_windows(in, windows, reads);
  load_pieces(p, pieces, lane, from, it.hv, memory, reads);
  const LateInputs late = load_late(p, it, part, at);

  // 2. Gate and convolution, while the state is on its way.
  stage_token(p, in, memory);
  if (CLUSTER > 1 && SLICES == 1) wait_cluster();  // all blocks have begun
  sync_block();  // the token is staged, and this block's loads of the windows have come
  const bool writes = p.writes_conv;
  const u32 read = memory + OFFSET(HeadMemory, read);
  if (CLUSTER > 1 && writes && thread_index() == 0) barrier_arrive_remote(cluster_address(read, 0));
  float4 factors;
  // Only a whole state leaves time for this here.
  if (IN_SHARED && writes) {
    store_window(in.v, windows.v, windows.step);
    if (CLUSTER == 1) store_window(in.q, windows.q, windows.step), store_window(in.k, windows.k, windows.step);
  }
  if (IN_SHARED && has_norm(p)) factors = norm_factors(p, late.weight, late.z);

  // 3. The recurrence.
  const HeadFactors f = head_factors(p, memory, finish_beta(p, in.beta));
  if (IN_SHARED && reads) barrier_wait(come_barrier(memory), 0);
  const HeadUpdate update = multiply(lane, pieces, memory, f);
  sync_block();
  float4 o;
  if (first_warp()) {
    o = output_of(memory, norm_column(), f);
    if (SLICES > 1 && p.norm_weight) send_sum(part, sum_of_squares<NORM_LANES>(o));
  }
  const bool indexed = p.flags & FLAG_INDEXED_OUT;
  const int to = indexed ? number_of(late.to, p.flags & FLAG_WRITES64) : it.n;
  if (p.ht && (!indexed || is_slot(p, to)))
    store_updated(lane, pieces, memory, f, update, target + STATE_BYTES * (to * p.ht_row));

  // 4. The output, and windows that other blocks read too.
  if (!IN_SHARED && has_norm(p)) factors = norm_factors(p, late.weight, late.z);
  if (first_warp()) {
    if (p.norm_weight)
      o = normed(p, o, SLICES > 1 ? receive_sum(part) : sum_of_squares<NORM_LANES>(o), factors);
    if (thread_index() < NORM_LANES)
      store_four(p.o, (long long)(at.o + part.column() + norm_column()), x_type(p), o);
  }
  if (!IN_SHARED && writes && owns_column()) store_window(in.v, windows.v, windows.step);
  if (CLUSTER > 1 && writes && part.rank == 0) {
    barrier_wait(read, 0);
    store_window(in.q, windows.q, windows.step);
    store_window(in.k, windows.k, windows.step);
  }
}

__device__ __forceinline__ void begin_block(u32 memory) {
  if (thread_index() % 32 == 0) {
    if (IN_SHARED) barrier_init(come_barrier(memory), 1);
    if (CLUSTER > 1 && thread_index() == 0) {
      barrier_init(memory + OFFSET(HeadMemory, received), 1);
      barrier_init(memory + OFFSET(HeadMemory, read), CLUSTER);
    }
    fence_barrier_init();
  }
  if constexpr (CLUSTER > 1) arrive_cluster_begun();
}

KDA_KERNEL(THREADS, MIN_BLOCKS) KDA_CLUSTER(CLUSTER) decode_head(KDA_PARAM DecodeParams p) {
  KDA_SHARED(memory);
  const u32 block = block_index(), rank = block % CLUSTER, task = block / CLUSTER;
  const Part part = {(int)rank, (int)rank % SLICES, shared_address(memory)};
  begin_block(part.memory);
  Item it;
  it.n = (int)((u64)task * p.task_factor >> p.task_shift);  // task / tasks of a sequence
  it.zero = (int)((u64)thread_index() >> p.task_shift);      // the shift is 31 or more
  const int h = task - it.n * (int)p.tasks;
  it.hv = h * HEADS + rank / SLICES;
  const TokenPlaces at = locate_tokens(p, it);
  const LanePosition lane = make_position(part.column(), 0);
  const u32 first_index = start_offset(p, it);
  if (p.fills_device) launch_dependents();
  if constexpr (SLICES > 1) wait_cluster();  // with few heads the previous launch has not ended yet
  wait_for_inputs();
  const HeadStart start = load_start(p, it, first_index);
  sync_warp();  // else the compiler loads the row's number after weights and tokens
  if (!p.fills_device) launch_dependents();
  decode_value_head(p, it, h, part, at, lane, start);
}
