// chunk_kda in two launches on Hopper that run side by side, second launch: every sequence and value
// head from its start, chunk after chunk, as prepare_units writes them. With S the state (V by K) and
// for each chunk its matrices of segments/chunk_operands.cuh,
//
//   r = v - S kd^T;   o = S qg^T + r aqt^T;   S' = S diag(last) + r kt
//
// in this order on the matrix unit: S kd^T, S qg^T, r kt, r aqt^T, so that r is made while S qg^T is
// multiplied, and the next left operand while r aqt^T is. o is handed to another warpgroup one chunk
// later.
//
// This launch begins when every block of prepare_units is resident or has ended, and each of those has
// waited for all earlier launches. Its blocks wait only for flags that prepare_units raises, whose blocks
// are then all running or done, so there is no deadlock. It ends after prepare_units, so a later launch
// that waits for this one has waited for both.
//
// Grid: two blocks a sequence and value head, with 64 value rows each. Warps: four carry the state, four
// store outputs, each of the same 16 rows as one of the former; three load operands and values, each into a
// stage of its own, so that waiting for one flag holds up no other chunk.
// Synchronisation: a stage's barriers count the bytes and values that arrive (full) and the warps that have
// read it (empty). For each pair of warps and of two places, barriers say that o has been handed on (full)
// or stored (empty).
#include "common/warp_arrivals.cuh"
#include "generated/walk_params.cuh"
#include "sm90/chunk_forward/dataflow/flags.cuh"
#include "sm90/chunk_forward/segments/chunk_operands.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

constexpr int ROLE_WARPS = 4, THREADS = 384, START_REGISTERS = 168;
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");

// A block's sequence and value head, and which half of the value rows it has.
struct Item {
  int n, hv, part;
};
__device__ __forceinline__ Item find_item(const WalkParams& p) {
  const int block = opaque(block_index()), item = block / 2, n = item / p.HV;  // each role finds it anew
  return {n, item - n * p.HV, block % 2};
}

// Bytes of a state as the caller has it, and where one of an array is; 0 without an array.
__device__ __forceinline__ u32 state_bytes(int flags) { return K * V * (flags & FLAG_STATE_BF16 ? 2 : 4); }
__device__ __forceinline__ u64 state_at(u64 states, const WalkParams& p, long long row, int hv) {
  return states ? states + (row * p.HV + hv) * state_bytes(p.flags) : 0;
}

// A chunk's operands and half of its values. The lead places images on 1024 bytes, as products want them.
constexpr u32 STAGE_LEAD = 1024 - OFFSET(ChunkOperands, kt);
struct alignas(1024) Stage {
  unsigned char lead[STAGE_LEAD];
  ChunkOperands operands;
  SquareImage values;  // rows of tokens
};
constexpr u32 VALUES = sizeof(ChunkOperands);
constexpr int STAGES = 3;
// o of a chunk as a warp that carries 16 rows hands it on, as left operands are laid out; it is staged
// there on its way to device memory.
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
using OperandRing = Ring<STAGES, STAGE_LEAD, sizeof(Stage), OFFSET(SharedMemory, full), 8 * STAGES>;

__device__ __forceinline__ void make_barriers(u32 shared) {
  const int i = thread_index();
  if (i < 2 * STAGES) {
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * i,
                 i < STAGES ? 1 + 32 : ROLE_WARPS * WARP_ARRIVALS);
  } else if (i < 2 * STAGES + 4 * ROLE_WARPS) {
    barrier_init(shared + OFFSET(SharedMemory, pairs) + 8 * (i - 2 * STAGES), WARP_ARRIVALS);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// One warp loads every third chunk. Values, zero past the end, come before its flag is waited for.
__device__ __forceinline__ void produce(const WalkParams& p, const Item& x, u32 shared, int own) {
  constexpr int PIECES = sizeof(u16[64]) / 16, ROWS_AT_ONCE = 32 / PIECES;
  OperandRing ring = {shared, (u32)own};
  const int lane = thread_index() & 31, piece = lane % PIECES, row = lane / PIECES;
  const long long step = 2 * p.v_st;
  const unsigned char* values = reinterpret_cast<const unsigned char*>(p.v) +
                                2 * (x.n * p.v_sb + x.hv * p.v_sh) + (own * C + row) * step + 128 * x.part +
                                16 * piece;
  for (int c = own; c < p.NT; c += STAGES) {
    ring.wait_empty();
    const int left = (int)p.T - c * C - row;
#pragma unroll
    for (int n = 0; n < C; n += ROWS_AT_ONCE) {
      copy_async16(ring.stage() + VALUES + swizzled(row + n, piece), values, n < left);
      values += ROWS_AT_ONCE * step;
    }
    values += (STAGES - 1) * C * step;
    copy_async_arrive(ring.full());
    if (lane == 0) {
      const u64 unit = (u64)(x.n * p.NT + c) * p.HV + x.hv;
      wait_and_clear_flag(p.ready + unit * UNIT_FLAGS_BYTES + 8 * x.part, p.launch);
      fence_async_proxy_global();
      barrier_expect(ring.full(), sizeof(ChunkOperands));
      copy_in(ring.stage(), reinterpret_cast<const void*>(p.chunk_operands + unit * sizeof(ChunkOperands)),
              sizeof(ChunkOperands), ring.full());
    }
    ring.parity ^= 1;
  }
}

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

// The chunk's decay of this lane's channels. Loaded before products are requested: beside them, these
// loads take as long as all of them.
struct Decays {
  float2 x[2 * K_TILES];
};
__device__ __forceinline__ void load_decays(Decays& d, int t, u32 last) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) d.x[j] = load_shared2(last + 4 * (8 * j + 2 * t));
}
__device__ __forceinline__ void decay_state(State& state, const Decays& d) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
    float (&x)[4] = state.s[j];
    x[0] *= d.x[j].x, x[1] *= d.x[j].y, x[2] *= d.x[j].x, x[3] *= d.x[j].y;
  }
  fence_registers(state.s);
}

__device__ __forceinline__ void carry_state(const WalkParams& p, const Item& x, u32 shared, int own,
                                            const Lane& l) {
  const int row = l.row + l.g + 64 * x.part;
  State state;
  read_state(state, row, l.t, state_at(p.h0, p, x.n, x.hv), p.flags);
  const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between checkpoints
  int wait = p.ckpt_every ? 0 : 1 << 30;                        // until the next one
  u64 checkpoint =
      p.ckpt_every ? state_at(p.ckpt, p, x.n * ((p.T + p.ckpt_every - 1) / p.ckpt_every), x.hv) : 0;
  Exchange exchange = find_exchange(shared, own);
  Operand s;
  pack_state(s, state);
  TokenOperand out;  // of the chunk before
  OperandRing ring = {shared};
#pragma unroll 1
  for (int c = 0; c < p.NT; ++c) {
    if (wait == 0) {
      write_state(state, row, l.t, checkpoint, p.flags);
      checkpoint += (u64)p.HV * state_bytes(p.flags);
      wait = block;
    }
    --wait;
    const u32 stage = ring.stage();
    const u64 kd = operand_descriptor(stage + OFFSET(ChunkOperands, kd), 16, 1024),
              kt = operand_descriptor(stage + OFFSET(ChunkOperands, kt), SQUARE_BYTES, 1024);
    const u64 qg = step(kd, OFFSET(ChunkOperands, qg) - OFFSET(ChunkOperands, kd)),
              aqt = step(kd, OFFSET(ChunkOperands, aqt) - OFFSET(ChunkOperands, kd));
    ring.wait_full();
    TokenOperand v, r;
    Decays decays;
    load_values(v, l, value_rows(stage + VALUES, l.row));
    load_decays(decays, l.t, stage + OFFSET(ChunkOperands, last));
    float prediction[2 * C_TILES][4] = {}, o[2 * C_TILES][4] = {};
    fence_registers(prediction);
    fence_registers(o);
    warpgroup_fence();
    multiply_channels(prediction, s, kd);
    warpgroup_commit();
    multiply_channels(o, s, qg);
    warpgroup_commit();
    if (c) hand_on(out, exchange, l.lane);
    decay_state(state, decays);
    warpgroup_wait<1>();
    fence_registers(prediction);
    subtract(r, v, prediction);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, r.a[kk], over_tokens(kt, kk), 1);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(state.s);
    fence_registers(o);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(o, r.a[kk], step(aqt, kk * 32), 1);
    warpgroup_commit();
    pack_state(s, state);
    fence_registers(s.a);
    warpgroup_wait<0>();
    fence_registers(o);
    warp_arrive(ring.empty(), l.lane);
    ring.next();
    pack_rows(out, o);
  }
  if (p.NT) hand_on(out, exchange, l.lane);
  if (p.ht) write_state(state, row, l.t, state_at(p.ht, p, x.n, x.hv), p.flags);
}

__device__ __forceinline__ void store_outputs(const WalkParams& p, const Item& x, u32 shared, int own,
                                              const Lane& l) {
  const long long token_bytes = 2ll * p.HV * V;
  OutputPlace to = output_place<PackedRows>(
      reinterpret_cast<unsigned char*>(p.o) + x.n * p.T * token_bytes + 2 * (x.hv * V + 64 * x.part + l.row),
      (int)token_bytes, l);
  int left = (int)p.T;  // tokens from this chunk on
  Exchange exchange = find_exchange(shared, own);
#pragma unroll 1
  for (int c = 0; c < p.NT; ++c) {
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

KDA_KERNEL(THREADS, 1) walk(KDA_PARAM WalkParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  if (warp < ROLE_WARPS) {
    set_registers<CONSUMER_REGISTERS, START_REGISTERS>();
    carry_state(p, find_item(p), shared, warp, make_lane(warp));
    // By whole warps that have nothing else to do, as it stops all lanes.
    sync_warp();
    if (block_index() == 0) wait_for_inputs();
  } else if (warp < 2 * ROLE_WARPS) {
    set_registers<CONSUMER_REGISTERS, START_REGISTERS>();
    store_outputs(p, find_item(p), shared, warp - ROLE_WARPS, make_lane(warp - ROLE_WARPS));
  } else {
    set_registers<PRODUCER_REGISTERS, START_REGISTERS>();
    if (warp < 2 * ROLE_WARPS + STAGES) produce(p, find_item(p), shared, warp - 2 * ROLE_WARPS);
  }
}
