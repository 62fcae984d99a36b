// The gated delta rule in two launches on Hopper, second launch: every sequence and value head from its start, chunk
// after chunk; record.cuh has the formulas. S is carried transposed in float32 accumulators, its bfloat16 copy is the
// left operand of the products with k and q, and k, as it lies, the right operand of three products. In the order of
// the matrix unit:
//
//   S k^T,  S q^T,  y t^T (added to y),  (to_end u) k,  u a^T (added to output S q^T)
//
// A warp cannot go on before its products with left operands in registers have begun, so little of its other work lies
// beside them: it is the other warpgroup's products that do. o is stored one chunk later, through a part of shared
// memory of the warp's own.
//
// Grid: a block a sequence and value head (WARPGROUPS 2), or two with half of the value rows each (1). Warps: four a
// warpgroup carry 64 value rows of the state; four more load, each a quarter of a chunk's rows.
// Synchronisation: a stage's barriers count the bytes of the record and the warps whose rows have arrived (full), and
// the warps that have read it (empty).
//
// Macros from the host: WARPGROUPS.
#include "common/clear_rows.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"
#include "sm90/gated_delta/record.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

constexpr int STATE_WARPS = 4 * WARPGROUPS, LOAD_WARPS = 4, THREADS = 32 * (STATE_WARPS + LOAD_WARPS);
constexpr int PARTS = 2 / WARPGROUPS, BLOCK_VALUES = 64 * WARPGROUPS;
// Moved between warpgroups if two have the state.
constexpr int START_REGISTERS = 168, STATE_REGISTERS = 232, LOAD_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + LOAD_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");
template <int REGISTERS>
__device__ __forceinline__ void set_role_registers() {
  if constexpr (WARPGROUPS == 2) set_registers<REGISTERS, START_REGISTERS>();
}

struct alignas(1024) Stage {
  ChunkRecord record;
  alignas(1024) TileImage k;
  TileImage q;
  SquareImage values[WARPGROUPS];  // rows of tokens
};
constexpr int STAGES = 3;
struct SharedMemory {
  Stage stages[STAGES];
  u16 outputs[STATE_WARPS][C][16];
  u64 full[STAGES], empty[STAGES];  // barriers
};
KDA_SHARED_BYTES(sizeof(SharedMemory));
using StageRing = Ring<STAGES, 0, sizeof(Stage), OFFSET(SharedMemory, full), 8 * STAGES>;

// A block's sequence and value head, and which part of the value rows it has.
struct Item {
  Sequence s;
  int n, hv, part;
};
__device__ __forceinline__ Item find_item(const GatedDeltaParams& p) {
  const int block = opaque(block_index()), item = block / PARTS, n = item / p.HV;  // each role finds it anew
  return {find_read_sequence(p, n), n, item - n * p.HV, block % PARTS};
}

__device__ __forceinline__ void make_barriers(u32 shared) {
  const int i = thread_index();
  if (i < STAGES) {
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * i, 1 + LOAD_WARPS * WARP_ARRIVALS);
    barrier_init(shared + OFFSET(SharedMemory, empty) + 8 * i, STATE_WARPS * WARP_ARRIVALS);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// --- loads -------------------------------------------------------------------------------------------

// A loading thread's 16 bytes of every ROWS_AT_ONCE-th row.
template <int PIECES>
struct RowSource {
  static constexpr int ROWS_AT_ONCE = 32 * LOAD_WARPS / PIECES;
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

__device__ __forceinline__ void load_chunks(const GatedDeltaParams& p, const Item& x, u32 shared,
                                            int thread) {
  StageRing ring = {shared}, arrived = {shared};
  const int h = divide(x.hv, p.group_factor, p.group_shift);
  auto k = row_source<16>(p.k, x.s.batch * p.k_sb + x.s.first * p.k_st + h * p.k_sh, p.k_st, thread);
  auto q = row_source<16>(p.q, x.s.batch * p.q_sb + x.s.first * p.q_st + h * p.q_sh, p.q_st, thread);
  auto v = row_source<BLOCK_VALUES / 8>(
      p.v, x.s.batch * p.v_sb + x.s.first * p.v_st + x.hv * p.v_sh + BLOCK_VALUES * x.part, p.v_st, thread);
  u64 record = record_at(p, x.s.slot, x.hv);
  int left = x.s.length;
  const auto tell = [&] {
    fence_async_proxy();  // products read what has come by ordinary copies
    warp_arrive(arrived.full(), thread & 31);
    arrived.next();
  };
  for (int c = 0; c < x.s.chunks; ++c) {
    ring.wait_empty();
    if (thread == 0) {
      barrier_expect(ring.full(), WALK_BYTES);
      copy_in(ring.stage() + OFFSET(Stage, record), reinterpret_cast<const void*>(record), WALK_BYTES,
              ring.full());
    }
    k.fetch(ring.stage() + OFFSET(Stage, k), left, thread);
    q.fetch(ring.stage() + OFFSET(Stage, q), left, thread);
    v.fetch(ring.stage() + OFFSET(Stage, values), left, thread);
    copy_async_commit();
    if (c) {
      copy_async_wait<1>();
      tell();
    }
    ring.next();
    left -= C;
    record += (u64)p.HV * RECORD_BYTES;
  }
  copy_async_wait<0>();
  if (x.s.chunks) tell();
}

// --- the state ---------------------------------------------------------------------------------------

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
__device__ __forceinline__ void pack_scaled(TokenOperand& to, const Products& x, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      to.a[j >> 1][2 * (j & 1) + i] = pack_bf16(x[j][2 * i] * f.x[j].x, x[j][2 * i + 1] * f.x[j].y);
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

// A wait for what has come already. It ends a basic block: the assembler would move loads of shared memory, and what
// needs them, between products that are requested one after another.
__device__ __forceinline__ void end_basic_block(const StageRing& ring) { ring.wait_full(); }

__device__ __forceinline__ void carry_state(const GatedDeltaParams& p, const Item& item, u32 shared, int warp,
                                            const Lane& l) {
  const int row = l.row + l.g;
  State state;
  read_state(state, row, l.t, initial_state_at(p, item.n, item.hv, K * V), p.flags);
  const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between checkpoints
  int wait = p.ckpt_every ? 0 : 1 << 30;                        // until the next one
  const u64 head_bytes = (u64)K * V * state_size(p);
  u64 checkpoint = p.ckpt_every ? p.ckpt + (first_checkpoint(p, item.n) * p.HV + item.hv) * head_bytes : 0;
  const long long token_bytes = 2ll * p.HV * V;
  // Of the chunk before, whose output is stored beside this one's products.
  OutputPlace to = output_place<PackedRows>(reinterpret_cast<unsigned char*>(p.o) +
                                                (item.s.batch * p.T + item.s.first - C) * token_bytes +
                                                2 * (item.hv * V + l.row),
                                            (int)token_bytes, l);
  const PackedRows staging = {shared + OFFSET(SharedMemory, outputs) + warp * (u32)sizeof(u16[C][16])};
  int left = item.s.length, out_tokens = 0;
  Operand s;
  pack_state(s, state);
  TokenOperand out = {};  // of the chunk before
  StageRing ring = {shared};
#pragma unroll 1
  for (int c = 0; c < item.s.chunks; ++c) {
    if (wait == 0) {
      write_state(state, row, l.t, checkpoint, p.flags);
      checkpoint += (u64)p.HV * head_bytes;
      wait = block;
    }
    --wait;
    const u32 stage = ring.stage(), record = stage + OFFSET(Stage, record),
              factors = record + OFFSET(ChunkRecord, factors);
    const u64 k = operand_descriptor(stage + OFFSET(Stage, k), 16, 1024),
              over_k = operand_descriptor(stage + OFFSET(Stage, k), SQUARE_BYTES, 1024);
    const u64 q = step(k, OFFSET(Stage, q) - OFFSET(Stage, k)),
              t = operand_descriptor(record + OFFSET(RecordImages, t), 16, 1024);
    const u64 a = step(t, OFFSET(RecordImages, a) - OFFSET(RecordImages, t));
    ring.wait_full();
    Products u = {}, o = {};
    fence_registers(u);
    fence_registers(o);
    warpgroup_fence();
    multiply_channels(u, s, k);
    warpgroup_commit();
    multiply_channels(o, s, q);
    warpgroup_commit();
    end_basic_block(ring);
    TokenOperand v, y;
    load_values(v, l, value_rows(stage + OFFSET(Stage, values), l.row % BLOCK_VALUES));
    const ColumnFactors of_state = load_factors(factors + OFFSET(RecordFactors, state), l);
    const float last = load_shared1(factors + OFFSET(RecordFactors, last));
    stage_output(out, staging, l);
    scale_state(state, last);
    store_output(read_output(staging, l), to, out_tokens, l);
    next_chunk(to);
    warpgroup_wait<1>();
    fence_registers(u);
    subtract_from(u, v, of_state);
    pack_rows(y, u);
    fence_registers(y.a);
    fence_registers(u);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(u, y.a[kk], step(t, kk * 32), 1);
    warpgroup_commit();
    end_basic_block(ring);
    const ColumnFactors of_output = load_factors(factors + OFFSET(RecordFactors, output), l);
    warpgroup_wait<1>();
    fence_registers(o);
    multiply_columns(o, of_output);
    const ColumnFactors to_end = load_factors(factors + OFFSET(RecordFactors, to_end), l);
    warpgroup_wait<0>();
    fence_registers(u);
    TokenOperand ends;
    pack_scaled(ends, u, to_end);
    pack_rows(y, u);
    fence_registers(ends.a);
    fence_registers(y.a);
    fence_registers(o);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, ends.a[kk], over_tokens(over_k, kk), 1);
    warpgroup_commit();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(o, y.a[kk], step(a, kk * 32), 1);
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
    out_tokens = left < C ? left : C;
    left -= C;
  }
  stage_output(out, staging, l);
  store_output(read_output(staging, l), to, out_tokens, l);
  if (const u64 final = final_state_at(p, item.n, item.hv, K * V))
    write_state(state, row, l.t, final, p.flags);
}

KDA_KERNEL(THREADS, 1) walk_records(KDA_PARAM GatedDeltaParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  if (warp < STATE_WARPS) {
    set_role_registers<STATE_REGISTERS>();
    const Item x = find_item(p);
    carry_state(p, x, shared, warp, make_lane(warp, x.part));
  } else {
    set_role_registers<LOAD_REGISTERS>();
    const int thread = thread_index() - 32 * STATE_WARPS;
    load_chunks(p, find_item(p), shared, thread);
    clear_unused_rows(
        p, 2ll * p.HV * V,
        {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
  }
}
