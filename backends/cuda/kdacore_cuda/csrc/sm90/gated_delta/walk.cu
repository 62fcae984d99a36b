// The gated delta rule in two launches on Hopper, second launch: every sequence and value head from its start, chunk
// after chunk; record.cuh has the formulas. S is carried transposed in float32 accumulators, its bfloat16 copy is the
// left operand of the products with k and q. In the order of
// the matrix unit:
//
//   S k^T,  S q^T,  y to_state,  y to_output^T (added to output S q^T)
//
// so that y is made while S q^T is multiplied, and the next left operand while y to_output^T is. o is handed to another
// warpgroup one chunk later.
//
// Grid: two blocks a sequence and value head, with 64 value rows each. Warps: four carry the state, four store outputs,
// each of the same 16 rows as one of the former; four load, each a quarter of a chunk's rows.
// Synchronisation: a stage's barriers count the bytes and rows that arrive (full) and the warps that have read it
// (empty). For each pair of warps and of two places, barriers say that o has been handed on (full) or stored (empty).
#include "common/clear_rows.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"
#include "sm90/gated_delta/record.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

constexpr int ROLE_WARPS = 4, THREADS = 384, START_REGISTERS = 168;
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");

struct alignas(1024) Stage {
  ChunkRecord record;
  alignas(1024) TileImage k;
  TileImage q;
  SquareImage values;  // half of v's columns
};
constexpr int STAGES = 3;
// o of a chunk as a warp that carries 16 rows hands it on, as left operands are laid out; it is staged there on its way
// to device memory.
struct Outputs {
  uint4 o[C_TILES][32];
};
struct Pair {
  u64 full[2], empty[2];  // barriers
};
struct SharedMemory {
  Stage stages[STAGES];
  Outputs outputs[ROLE_WARPS][2];
  u64 full[STAGES], empty[STAGES];
  Pair pairs[ROLE_WARPS];
};
KDA_SHARED_BYTES(sizeof(SharedMemory));
using StageRing = Ring<STAGES, 0, sizeof(Stage), OFFSET(SharedMemory, full), 8 * STAGES>;

// A block's sequence and value head, and which half of the value rows it has.
struct Item {
  Sequence s;
  int n, hv, part;
};
__device__ __forceinline__ Item find_item(const GatedDeltaParams& p) {
  const int block = opaque(block_index()), item = block / 2, n = item / p.HV;  // each role finds it anew
  return {find_read_sequence(p, n), n, item - n * p.HV, block % 2};
}

__device__ __forceinline__ void make_barriers(u32 shared) {
  const int i = thread_index();
  if (i < 2 * STAGES) {
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * i,
                 (i < STAGES ? 1 : 0) + ROLE_WARPS * WARP_ARRIVALS);
  } else if (i < 2 * STAGES + 4 * ROLE_WARPS) {
    barrier_init(shared + OFFSET(SharedMemory, pairs) + 8 * (i - 2 * STAGES), WARP_ARRIVALS);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// --- loads -------------------------------------------------------------------------------------------

// This thread's 16 bytes of every ROWS_AT_ONCE-th row.
template <int PIECES>
struct RowSource {
  static constexpr int ROWS_AT_ONCE = 32 * ROLE_WARPS / PIECES;
  const unsigned char* at;
  long long step;  // bytes from one of the thread's rows to the next
  __device__ __forceinline__ static int piece(int thread) { return thread % PIECES; }
  __device__ __forceinline__ static int row(int thread) { return thread / PIECES; }
  // `to`: images of 64 columns.
  __device__ __forceinline__ void fetch(u32 to, int rows, int thread) {
    const u32 image = to + piece(thread) / 8 * SQUARE_BYTES;
    int left = rows - row(thread);
#pragma unroll
    for (int n = 0; n < C; n += ROWS_AT_ONCE) {
      copy_async16(image + swizzled(row(thread) + n, piece(thread) % 8), at, left > 0);
      at += step;
      left -= ROWS_AT_ONCE;
    }
  }
};
template <int PIECES>
__device__ __forceinline__ RowSource<PIECES> row_source(u64 base, long long offset, long long row,
                                                        int thread) {
  using Source = RowSource<PIECES>;
  return {reinterpret_cast<const unsigned char*>(base) + 2 * (offset + Source::row(thread) * row) +
              16 * Source::piece(thread),
          2 * row * Source::ROWS_AT_ONCE};
}

__device__ __forceinline__ void produce(const GatedDeltaParams& p, const Item& x, u32 shared, int thread) {
  StageRing ring = {shared};
  const int h = divide(x.hv, p.group_factor, p.group_shift);
  auto k = row_source<16>(p.k, x.s.batch * p.k_sb + x.s.first * p.k_st + h * p.k_sh, p.k_st, thread);
  auto q = row_source<16>(p.q, x.s.batch * p.q_sb + x.s.first * p.q_st + h * p.q_sh, p.q_st, thread);
  auto v = row_source<8>(p.v, x.s.batch * p.v_sb + x.s.first * p.v_st + x.hv * p.v_sh + 64 * x.part, p.v_st,
                         thread);
  u64 record = record_at(p, x.s.slot, x.hv);
  int left = x.s.length;
  const auto tell = [&](StageRing& arrived) {  // products read what has come by ordinary copies
    fence_async_proxy();
    warp_arrive(arrived.full(), thread & 31);
    arrived.next();
  };
  StageRing arrived = {shared};
  for (int c = 0; c < x.s.chunks; ++c) {
    ring.wait_empty();
    if (thread == 0) {
      barrier_expect(ring.full(), RECORD_BYTES);
      copy_in(ring.stage() + OFFSET(Stage, record), reinterpret_cast<const void*>(record), RECORD_BYTES,
              ring.full());
    }
    k.fetch(ring.stage() + OFFSET(Stage, k), left, thread);
    q.fetch(ring.stage() + OFFSET(Stage, q), left, thread);
    v.fetch(ring.stage() + OFFSET(Stage, values), left, thread);
    copy_async_commit();
    if (c) {
      copy_async_wait<1>();
      tell(arrived);
    }
    ring.next();
    left -= C;
    record += (u64)p.HV * RECORD_BYTES;
  }
  copy_async_wait<0>();
  if (x.s.chunks) tell(arrived);
}

// --- the state ---------------------------------------------------------------------------------------

// Double buffer in which a state warp hands o to the store warp of the same rows.
struct Exchange {
  u32 outputs, barriers, turn = 0;
  __device__ __forceinline__ u32 place() const { return outputs + (turn & 1) * (u32)sizeof(Outputs); }
  __device__ __forceinline__ u32 full() const { return barriers + OFFSET(Pair, full) + 8 * (turn & 1); }
  __device__ __forceinline__ u32 empty() const { return barriers + OFFSET(Pair, empty) + 8 * (turn & 1); }
  __device__ __forceinline__ u32 parity() const { return turn >> 1 & 1; }
};
__device__ __forceinline__ Exchange find_exchange(u32 shared, int own) {
  return {shared + OFFSET(SharedMemory, outputs) + own * 2 * (u32)sizeof(Outputs),
          shared + OFFSET(SharedMemory, pairs) + own * (u32)sizeof(Pair)};
}
__device__ __forceinline__ void hand_on(const TokenOperand& o, Exchange& x, int lane) {
  barrier_wait(x.empty(), x.parity() ^ 1);
#pragma unroll
  for (int i = 0; i < C_TILES; ++i)
    store_shared(x.place() + 512 * i + 16 * lane, o.a[i][0], o.a[i][1], o.a[i][2], o.a[i][3]);
  warp_arrive(x.full(), lane);
  ++x.turn;
}

// A factor of each token, for this lane's columns of products over 64 tokens.
struct ColumnFactors {
  float2 x[2 * C_TILES];
};
__device__ __forceinline__ ColumnFactors load_factors(u32 from, const Lane& l) {
  ColumnFactors f;
#pragma unroll
  for (int j = 0; j < C_TILES; ++j) {
    const float4 x = load_shared4(from + factor_offset(l.t) + 16 * j);
    f.x[2 * j] = {x.x, x.y}, f.x[2 * j + 1] = {x.z, x.w};
  }
  return f;
}
using Products = float[2 * C_TILES][4];
__device__ __forceinline__ void multiply_columns(Products& x, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j)
    x[j][0] *= f.x[j].x, x[j][1] *= f.x[j].y, x[j][2] *= f.x[j].x, x[j][3] *= f.x[j].y;
}
// y = v - state S k.
__device__ __forceinline__ void subtract_from(Products& x, const TokenOperand& v, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 pair = v.a[j >> 1][2 * (j & 1) + i];
      x[j][2 * i] = bf16_low(pair) - f.x[j].x * x[j][2 * i];
      x[j][2 * i + 1] = bf16_high(pair) - f.x[j].y * x[j][2 * i + 1];
    }
  }
}
__device__ __forceinline__ void scale_state(State& state, float by) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) state.s[j][e] *= by;
  }
  fence_registers(state.s);
}

// Row of the first checkpoint of sequence n; all lanes.
__device__ __forceinline__ long long first_checkpoint(const GatedDeltaParams& p, int n) {
  if (!p.cu_seqlens) return n * ((p.T + p.ckpt_every - 1) / p.ckpt_every);
  long long rows = 0;
  for (int m = 0; m < n; ++m) rows += (find_sequence(p, m).length + p.ckpt_every - 1) / p.ckpt_every;
  return rows;
}

__device__ __forceinline__ void carry_state(const GatedDeltaParams& p, const Item& item, u32 shared, int own,
                                            const Lane& l) {
  const int row = l.row + l.g;
  State state;
  read_state(state, row, l.t, initial_state_at(p, item.n, item.hv, K * V), p.flags);
  const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between checkpoints
  int wait = p.ckpt_every ? 0 : 1 << 30;                        // until the next one
  const u64 head_bytes = (u64)K * V * state_size(p);
  u64 checkpoint = p.ckpt_every ? p.ckpt + (first_checkpoint(p, item.n) * p.HV + item.hv) * head_bytes : 0;
  Exchange exchange = find_exchange(shared, own);
  Operand s;
  pack_state(s, state);
  TokenOperand out;  // of the chunk before
  StageRing ring = {shared};
#pragma unroll 1
  for (int c = 0; c < item.s.chunks; ++c) {
    if (wait == 0) {
      write_state(state, row, l.t, checkpoint, p.flags);
      checkpoint += (u64)p.HV * head_bytes;
      wait = block;
    }
    --wait;
    const u32 stage = ring.stage(), record = stage + OFFSET(Stage, record);
    const u64 k = operand_descriptor(stage + OFFSET(Stage, k), 16, 1024),
              to_state = operand_descriptor(record + OFFSET(ChunkRecord, to_state), SQUARE_BYTES, 1024);
    const u64 q = step(k, OFFSET(Stage, q) - OFFSET(Stage, k)),
              to_output = operand_descriptor(record + OFFSET(ChunkRecord, to_output), 16, 1024);
    ring.wait_full();
    TokenOperand v, y;
    load_values(v, l, value_rows(stage + OFFSET(Stage, values), l.row % 64));
    const ColumnFactors of_state = load_factors(record + OFFSET(ChunkRecord, state), l),
                        of_output = load_factors(record + OFFSET(ChunkRecord, output), l);
    const float last = load_shared1(record + OFFSET(ChunkRecord, last));
    Products x = {}, o = {};
    fence_registers(x);
    fence_registers(o);
    warpgroup_fence();
    multiply_channels(x, s, k);
    warpgroup_commit();
    multiply_channels(o, s, q);
    warpgroup_commit();
    if (c) hand_on(out, exchange, l.lane);
    scale_state(state, last);
    warpgroup_wait<1>();
    fence_registers(x);
    subtract_from(x, v, of_state);
    pack_rows(y, x);
    fence_registers(y.a);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, y.a[kk], over_tokens(to_state, kk), 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    fence_registers(o);
    multiply_columns(o, of_output);
    fence_registers(o);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(o, y.a[kk], step(to_output, kk * 32), 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    fence_registers(state.s);
    pack_state(s, state);
    fence_registers(s.a);
    warpgroup_wait<0>();
    fence_registers(o);
    warp_arrive(ring.empty(), l.lane);
    ring.next();
    pack_rows(out, o);
  }
  if (item.s.chunks) hand_on(out, exchange, l.lane);
  if (const u64 final = final_state_at(p, item.n, item.hv, K * V))
    write_state(state, row, l.t, final, p.flags);
}

__device__ __forceinline__ void store_outputs(const GatedDeltaParams& p, const Item& x, u32 shared, int own,
                                              const Lane& l) {
  const long long token_bytes = 2ll * p.HV * V;
  OutputPlace to =
      output_place<PackedRows>(reinterpret_cast<unsigned char*>(p.o) +
                                   (x.s.batch * p.T + x.s.first) * token_bytes + 2 * (x.hv * V + l.row),
                               (int)token_bytes, l);
  int left = x.s.length;  // tokens from this chunk on
  Exchange exchange = find_exchange(shared, own);
#pragma unroll 1
  for (int c = 0; c < x.s.chunks; ++c) {
    const u32 rows = exchange.place();
    barrier_wait(exchange.full(), exchange.parity());
    TokenOperand out;
#pragma unroll
    for (int i = 0; i < C_TILES; ++i) {
      const uint4 o = load_shared_u4(rows + 512 * i + 16 * l.lane);
      out.a[i][0] = o.x, out.a[i][1] = o.y, out.a[i][2] = o.z, out.a[i][3] = o.w;
    }
    sync_warp();  // all lanes have taken theirs
    const PackedRows staging = {rows};
    stage_output(out, staging, l);
    store_output(read_output(staging, l), to, left < C ? left : C, l);
    warp_arrive(exchange.empty(), l.lane);
    ++exchange.turn;
    left -= C;
    next_chunk(to);
  }
}

KDA_KERNEL(THREADS, 1) walk_gated_delta(KDA_PARAM GatedDeltaParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  if (warp < ROLE_WARPS) {
    set_registers<CONSUMER_REGISTERS, START_REGISTERS>();
    const Item x = find_item(p);
    carry_state(p, x, shared, warp, make_lane(warp, x.part));
  } else if (warp < 2 * ROLE_WARPS) {
    set_registers<CONSUMER_REGISTERS, START_REGISTERS>();
    const Item x = find_item(p);
    store_outputs(p, x, shared, warp - ROLE_WARPS, make_lane(warp - ROLE_WARPS, x.part));
  } else {
    set_registers<PRODUCER_REGISTERS, START_REGISTERS>();
    const int thread = thread_index() - 64 * ROLE_WARPS;
    produce(p, find_item(p), shared, thread);
    clear_unused_rows(
        p, 2ll * p.HV * V,
        {(u32)(32 * ROLE_WARPS * block_index() + thread), (u32)(32 * ROLE_WARPS * grid_blocks())});
  }
}
