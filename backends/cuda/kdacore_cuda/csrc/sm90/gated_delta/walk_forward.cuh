// The forward walk: every sequence and value head from its start, chunk after chunk; record.cuh has the formulas. S is
// carried transposed in float32 accumulators, its bfloat16 copy is the left operand of the products with k and q, and
// k, as it lies, the right operand of three products. In the order of the matrix unit:
//
//   S k^T,  S q^T,  y t^T (added to y),  (to_end u) k,  u a^T (added to output S q^T)
//
// A warp's loads from shared memory, its stores there and its looks at barriers wait until the products that it has
// requested before have begun, arithmetic does not. So values, factors and what the warp stores are loaded ahead of
// products, and arithmetic lies beside them. o is stored one chunk later, through a part of shared memory of the warp's own.
//
// A walk that KEEPS: u and the state at its start, both as the products have them, are stored for each chunk
// (backward_workspace.cuh).
#pragma once

#include "common/clear_rows.cuh"
#include "sm90/gated_delta/walk_arrays.cuh"
#include "sm90/gated_delta/walk_checkpoints.cuh"
#include "sm90/gated_delta/walk_factors.cuh"
#include "sm90/gated_delta/walk_loads.cuh"
#include "sm90/gated_delta/walk_stores.cuh"
#include "sm90/ring.cuh"

constexpr int MOST_STAGES = 3;
constexpr bool HAS_ROOM = WARPGROUPS == 1;  // a thread has registers for factors that are loaded ahead of their use
struct alignas(1024) Stage {
  WalkRecord record;
  RingBarriers<MOST_STAGES> barriers;  // of all stages in the first one, where alignment leaves room
  alignas(1024) TileImage k;
  TileImage q;
  SquareImage values[WARPGROUPS];  // rows of tokens
};
// Of a warp, for o and all else that it stores.
template <bool KEEPS>
constexpr u32 STAGING_BYTES = KEEPS ? sizeof(WarpStaging) : sizeof(u16[C][16]);
template <bool KEEPS, int STAGES = MOST_STAGES>
struct ForwardMemory {
  Stage stages[STAGES];
  unsigned char staging[STATE_WARPS][STAGING_BYTES<KEEPS>];
};
template <int STAGES = MOST_STAGES>
using StageRing = Ring<STAGES, 0, sizeof(Stage), OFFSET(Stage, barriers), 8 * MOST_STAGES>;

__device__ __forceinline__ Item find_item(const GatedDeltaParams& p) {
  return find_item(p, opaque(block_index()));  // each role finds it anew
}

// Records that have all been written before this launch. Of others, wait() waits for the next one of an item, and next()
// leaves it to another thread.
struct WrittenRecords {
  static constexpr bool COME_LATE = false;
  __device__ __forceinline__ void begin(const Item&) {}
  __device__ __forceinline__ void wait() {}
  __device__ __forceinline__ void next() {}
};

// Loads an item's chunks into the next stages of the ring. Returns the ring behind them, as carry_state does.
template <class Records, class Stages>
__device__ __forceinline__ Stages load_forward(const GatedDeltaParams& p, Records records, const Item& x,
                                               Stages ring, int thread) {
  const int h = divide(x.hv, p.group_factor, p.group_shift);
  auto k = key_source(p, x, h, thread), q = query_source(p, x, h, thread);
  auto v = value_source(p, x, thread);
  u64 record = record_at(p, x.s.slot, x.hv);
  int left = x.s.length;
  // The thread that waits for the record: of one warp after another, as it takes half of a chunk's time.
  int turn = 0;
  records.begin(x);
  const auto load_record = [&](const Stages& ring) {
    const u32 to = ring.stage() + OFFSET(Stage, record);
    if constexpr (Records::COME_LATE) {
      if (thread == turn) {
        records.wait();
        fetch_record(to, record, ring.full(), 0, COLUMNS);
      }
      turn = (turn + 32) % (32 * LOAD_WARPS);
    } else {
      fetch_record(to, record, ring.full(), thread);
    }
    records.next();
    record += (u64)p.HV * RECORD_BYTES;
  };
  const auto load = [&](const Stages& ring) {
    const u32 stage = ring.stage();
    k.fetch(stage + OFFSET(Stage, k), left, thread);
    q.fetch(stage + OFFSET(Stage, q), left, thread);
    v.fetch(stage + OFFSET(Stage, values), left, thread);
    left -= C;
    if constexpr (!Records::COME_LATE) load_record(ring);  // behind the rows: a thread takes long to request it
  };
  return load_chunks(ring, x.s.chunks, thread, load, [&](const Stages& ring) {
    if constexpr (Records::COME_LATE) load_record(ring);
  });
}

// Row of the first checkpoint of sequence n; all lanes.
__device__ __forceinline__ long long first_checkpoint(const GatedDeltaParams& p, int n) {
  if (!p.cu_seqlens) return n * ((p.T + p.ckpt_every - 1) / p.ckpt_every);
  long long rows = 0;
  for (int m = 0; m < n; ++m) rows += (find_sequence(p, m).length + p.ckpt_every - 1) / p.ckpt_every;
  return rows;
}

// Where a walk begins and ends, of a whole sequence; segment_item.cuh has the same of a segment.
template <class Params>
__device__ __forceinline__ void begin_state(State& state, const Params& p, const Item& item, int row,
                                            const Lane& l) {
  read_initial_state(state, p, item, row, l);
}
// Checkpoints before those that the walk writes, `every` chunks apart; chunks until its first one.
struct CheckpointsBefore {
  int rows, wait;
};
__device__ __forceinline__ CheckpointsBefore checkpoints_before(const Item&, int) { return {0, 0}; }
// `checkpoint`: where the state belongs if the chunk behind the walk's last begins with one, else 0.
template <class Params>
__device__ __forceinline__ void end_state(State& state, const Params& p, const Item& item, u64, int row,
                                          const Lane& l) {
  if (const u64 final = final_state_at(p, item.n, item.hv, state_elements(p)))
    write_own_state(state, p, row, l.t, final);
}

// What is kept of a chunk: where a lane's part of u goes, and the state's image.
struct KeptPlaces {
  OutputPlace u;
  u64 state;
};
__device__ __forceinline__ KeptPlaces kept_places(const GatedDeltaBackwardParams& p, const Item& x,
                                                  const Lane& l) {
  const long long unit = (long long)x.s.slot * p.HV + x.hv;
  return {u_place(u_at(p, unit), l), state_image_at(p.states, unit)};
}
__device__ __forceinline__ void next_chunk(KeptPlaces& kept, int HV) {
  kept.u.at += (long long)HV * TILE_BYTES;
  kept.state += (u64)HV * STATE_BYTES;
}

// An item from its start to its end. `own`: the warp's staging memory.
template <bool KEEPS, class Params, class Walked, class Stages>
__device__ __forceinline__ Stages carry_state(const Params& p, const Walked& item, Stages ring, u32 own,
                                              const Lane& l) {
  const int row = l.row + l.g;
  State state;
  begin_state(state, p, item, row, l);
  const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between checkpoints
  const CheckpointsBefore before = checkpoints_before(item, block);
  int wait = p.ckpt_every ? before.wait : 1 << 30;  // until the next one
  const u64 head_bytes = (u64)state_elements(p) * state_size(p);
  u64 checkpoint =
      p.ckpt_every ? p.ckpt + ((first_checkpoint(p, item.n) + before.rows) * p.HV + item.hv) * head_bytes : 0;
  // Of the chunk before, whose output is stored beside this one's products.
  ValuePlace to = value_place(p, p.o, item.s.batch * p.T + item.s.first - C, item.hv, l);
  const PackedRows staging = {own};
  int left = item.s.length, out_tokens = 0;
  Operand s;
  pack_state(s, state);
  TokenOperand out = {};  // of the chunk before
  int marked = 0;  // the next chunk in which checkpoints lie
  if constexpr (MARKS) marked = next_mark<C>(p, item.s.first, item.s.length, 0);
  KeptPlaces kept;
  if constexpr (KEEPS) kept = kept_places(p, item, l);
#pragma unroll 1
  for (int c = 0; c < item.s.chunks; ++c) {
    if (wait == 0) {
      write_own_state(state, p, row, l.t, checkpoint);
      checkpoint += (u64)p.HV * head_bytes;
      wait = block;
    }
    --wait;
    if constexpr (MARKS) {
      if (c == marked) {
        write_pairs(state.s, row, 2 * l.t, marked_state_at(p, item.s, c, item.hv));
        marked = next_mark<C>(p, item.s.first, item.s.length, c + 1);
      }
    }
    const u32 stage = ring.stage(), record = stage + OFFSET(Stage, record),
              factors = record + OFFSET(WalkRecord, factors);
    const u64 k = operand_descriptor(stage + OFFSET(Stage, k), 16, 1024),
              over_k = operand_descriptor(stage + OFFSET(Stage, k), SQUARE_BYTES, 1024);
    const u64 q = step(k, OFFSET(Stage, q) - OFFSET(Stage, k)),
              t = columns_operand(record + OFFSET(WalkRecord, t));
    const u64 a = step(t, OFFSET(WalkRecord, a) - OFFSET(WalkRecord, t));
    ring.wait_full();
    TokenOperand v, y;
    load_values(v, l, value_rows(stage + OFFSET(Stage, values), l.row % BLOCK_VALUES));
    const ColumnFactors of_state = load_factors(factors + OFFSET(RecordFactors, state), l);
    const float last = load_shared1(factors + OFFSET(RecordFactors, last));
    stage_output(out, staging, l);
    const auto rows = read_output(staging, l);
    if constexpr (KEEPS) store_state_rows(s, own, kept.state, l);
    Products u = {}, o = {};
    fence_registers(u);
    fence_registers(o);
    warpgroup_fence();
    multiply_channels(u, s, k);
    warpgroup_commit();
    multiply_channels(o, s, q);
    warpgroup_commit();
    end_basic_block(ring);
    store_output(rows, to.place, to.tokens(out_tokens), l);
    next_chunk(to.place);
    warpgroup_wait<1>();
    fence_registers(u);
    subtract_from(u, v, of_state);
    pack_rows(y, u);
    ColumnFactors to_end, of_output;
    const auto load_to_end = [&] { to_end = load_factors(factors + OFFSET(RecordFactors, to_end), l); };
    const auto load_of_output = [&] { of_output = load_factors(factors + OFFSET(RecordFactors, output), l); };
    if constexpr (HAS_ROOM) load_to_end();
    end_basic_block(ring);
    request_inverse(u, y, t);
    end_basic_block(ring);
    if constexpr (!HAS_ROOM) load_of_output();
    scale_state(state, last);
    if constexpr (!HAS_ROOM) {
      warpgroup_wait<1>();
      fence_registers(o);
      multiply_columns(o, of_output);
      load_to_end();
    }
    warpgroup_wait<0>();
    fence_registers(u);
    fence_registers(o);
    if constexpr (HAS_ROOM) load_of_output();
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
    if constexpr (HAS_ROOM) {  // beside the products for the state
      end_basic_block(ring);
      multiply_columns(o, of_output);
      fence_registers(o);
      warpgroup_fence();
    }
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(o, y.a[kk], along_columns(a, kk), 1);
    warpgroup_commit();
    if constexpr (KEEPS) {
      end_basic_block(ring);
      store_tokens(y, own, kept.u, C, l);
      next_chunk(kept, p.HV);
    }
    warpgroup_wait<1>();
    fence_registers(state.s);
    pack_state(s, state);
    fence_registers(s.a);
    end_basic_block(ring);  // else two warpgroups spill 532 bytes, and one rounds the state behind o's products
    warpgroup_wait<0>();
    fence_registers(o);
    warp_arrive(ring.empty(), l.lane);
    ring.next();
    pack_rows(out, o);
    out_tokens = left < C ? left : C;
    left -= C;
  }
  stage_output(out, staging, l);
  store_output(read_output(staging, l), to.place, to.tokens(out_tokens), l);
  end_state(state, p, item, wait ? 0 : checkpoint, row, l);
  return ring;
}

// A warp's memory for what it stores.
template <bool KEEPS>
__device__ __forceinline__ u32 staging_at(u32 shared, int warp) {
  return shared + OFFSET(ForwardMemory<KEEPS>, staging) + warp * STAGING_BYTES<KEEPS>;
}
__device__ __forceinline__ void make_forward_barriers(u32 shared) {
  make_record_barriers<Stage, MOST_STAGES>(shared);
}
template <bool KEEPS, class Params, class Records = WrittenRecords>
__device__ __forceinline__ void walk_forward(const Params& p, u32 shared, Records records = {}) {
  const int warp = uniform(thread_index() >> 5);
  StageRing<> ring = {shared};
  if (warp < STATE_WARPS) {
    set_role_registers<STATE_REGISTERS>();
    const Item x = find_item(p);
    carry_state<KEEPS>(p, x, ring, staging_at<KEEPS>(shared, warp), make_lane(warp, x.part));
  } else {
    set_role_registers<LOAD_REGISTERS>();
    const int thread = thread_index() - 32 * STATE_WARPS;
    load_forward(p, records, find_item(p), ring, thread);
    clear_unused_rows(
        p, value_row_bytes(p),
        {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
  }
}
