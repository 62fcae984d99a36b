// Backward of chunk_kda in segments on Hopper, second launch: how each segment changes the state and
// its gradient, S_end = S_start A + B and dS_start = dS_end A^T + B' (segments.cuh). With the
// chunk's matrices of workspace.cuh and o its rows of d_o:
//
//   B    from S = 0 or the initial state          v = u - S w^T;  S' = S diag(last) + v kg
//   A    from the unit matrix                     the same without u
//   B'   from dS = 0 or the final state's gradient, in reverse
//                              dv = dS kg^T + o^T aqk;  dS' = dS diag(last) + o^T qg - dv w
//
// kg's rounding error, which the scan adds to dv, matters for dr alone and is left out here.
// Grid: for each segment and value head three walks, of one block each (WARPGROUPS 2) or two that
// have 64 rows each. Those of B' come first, as they take longest; those of A and B read the same
// kg and w and lie side by side.
// Warps, registers: scan_block.cuh. Synchronisation: a ring of stages, each with a barrier that
// counts what arrives and one that counts the state warps that have read it.
//
// Macros from the host: WARPGROUPS; OF_SLICE, for a slice of a row that several ranks
// share. The gradient at a sequence's end is then not known: B' of last segments is from zero. First
// segments have an A and a B', too, where the state at the slice's start is another rank's, which is
// so for the sequence that the slice's first token belongs to. B' lies at its own segment's place.
//
// With FLAG_KEPT_MAPS the grid has the walks of B' alone: the forward kept A and the states.
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_backward/scan_block.cuh"
#include "sm90/chunk_backward/segment_map.cuh"
#include "sm90/ring.cuh"

struct ForwardStage {
  TileImage kg, w;
  u16 u[BLOCK_V][64];  // this block's rows
  float decay[K];      // of the whole chunk
};
struct ReverseStage {
  TileImage kg, w, qg;
  SquareImage aqk;
  OutputGradStage d_o;
  float decay[K];
};
constexpr int FORWARD_STAGES = 4, REVERSE_STAGES = 3, MAX_STAGES = 4;
struct SharedMemory {
  union {
    Aligned<ForwardStage> forward[FORWARD_STAGES];
    Aligned<ReverseStage> reverse[REVERSE_STAGES];
  };
  u64 full[MAX_STAGES], empty[MAX_STAGES];  // barriers
};
// Without the padding that the alignment of stages adds.
KDA_SHARED_BYTES(OFFSET(SharedMemory, empty) + sizeof(u64[MAX_STAGES]));
template <int STAGES, class T>
using MapsRing = Ring<STAGES, 0, sizeof(Aligned<T>), OFFSET(SharedMemory, full), 8 * MAX_STAGES>;
using ForwardRing = MapsRing<FORWARD_STAGES, ForwardStage>;
using ReverseRing = MapsRing<REVERSE_STAGES, ReverseStage>;

struct Walk {
  Task task;
  bool from_identity;
  u64 to;  // where the result belongs
};

// Segments with a later one, and a sequence's first none, have B and A; all but the first have B'.
__device__ __forceinline__ Walk find_walk(const ChunkBackwardParams& p, int block) {
  const int each = p.flags & FLAG_KEPT_MAPS ? grid_blocks() : grid_blocks() / 3, part = block % BLOCKS_V;
  Walk walk;
  const bool reverse = block < each;
  int m;  // segment slot and value head
  if (reverse) {
    m = block / BLOCKS_V;
    walk.from_identity = false;
  } else {
    const int pair = (block - each) / BLOCKS_V;
    m = pair >> 1;
    walk.from_identity = pair & 1;
  }
  const int slot = m / p.HV, hv = m - slot * p.HV;
  const Segment x = find_slot_segment(p, slot, [&](int n, int j) {
    // Of dense sequences the grid leaves out the segments that have no B, or no B'.
    return find_segment(p, n, !OF_SLICE && reverse && !p.cu_seqlens ? j + 1 : j, hv);
  });
  Task& task = walk.task;
  task = segment_task(p, x, reverse, part);
  const bool first = x.index == 0, last = x.last();
  if constexpr (OF_SLICE) {
    const bool begun = first && x.s.first > 0;  // on this rank
    task.idle = x.begin >= x.s.chunks || (reverse || walk.from_identity ? begun : last);
  } else {
    task.idle = task.idle || (reverse ? first : last) || (walk.from_identity && first);
  }
  // Only a sequence's outermost segments begin with what the caller gave.
  task.nh = (reverse ? last : first) ? task.nh : -1;
  walk.to = walk.from_identity ? p.maps + x.place * MAP_BYTES
            : reverse          ? p.ends + (x.place - (OF_SLICE ? 0 : p.HV)) * FULL_STATE_BYTES
                               : p.starts + (x.place + p.HV) * FULL_STATE_BYTES;
  return walk;
}

struct Lane {
  int lane, g, t;
  int row;    // this warp's first row among the block's
  int above;  // and the block's in the state
  // In a 16-row tile: where lane 8i + r finds row r of matrix i of four that make the first 16
  // columns.
  u32 piece;
};
__device__ __forceinline__ Lane make_lane(int warp, int part) {
  const int lane = thread_index() & 31;
  return {lane, lane >> 2, lane & 3, 16 * warp, BLOCK_V * part, swizzled(lane & 15, lane >> 4)};
}

__device__ __forceinline__ void begin_walk(State& state, const ChunkBackwardParams& p, const Walk& walk,
                                           const Lane& l) {
  const int row = l.above + l.row + l.g;
  if (!walk.from_identity) {
    const u64 given = walk.task.reverse ? p.d_ht : p.h0;
    const u64 from = walk.task.nh < 0 ? 0 : matrix_at(given, walk.task.nh, p.flags);
    return read_state(state, row, l.t, from, p.flags);
  }
  unit_state(state, row, l.t);
}

// The stages of the ring, which are no longer in use, hold A on its way.
__device__ __forceinline__ void store_map(const State& state, u64 map, u32 shared, const Lane& l) {
  sync_threads(1, 32 * STATE_WARPS);
  store_map_rows(state, map, l.above + l.row, shared + l.row * 4 * IMAGE_ROW, l.piece, l.lane);
}

__device__ __forceinline__ void end_walk(State& state, const Walk& walk, u32 shared, const Lane& l) {
  if (walk.from_identity)
    store_map(state, walk.to, shared, l);
  else
    write_pairs(state.s, l.above + l.row + l.g, 2 * l.t, walk.to);
}

__device__ __forceinline__ void walk_forward(State& state, const Walk& walk, u32 shared, const Lane& l) {
  Operand s;
  pack_state(s, state);
  const u32 rows = OFFSET(ForwardStage, u) + l.row * IMAGE_ROW;
  if (walk.from_identity) {
    // Without u: these rows of the stages stay zero.
#pragma unroll
    for (int i = 0; i < FORWARD_STAGES; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n)
        store_shared(shared + i * sizeof(Aligned<ForwardStage>) + rows + 512 * n + 16 * l.lane, 0, 0, 0, 0);
    }
    sync_warp();
  }
  ForwardRing ring = {shared};
#pragma unroll 1
  for (int c = walk.task.begin; c < walk.task.end; ++c) {
    const u32 stage = ring.stage();
    const u64 w = operand_descriptor(stage + OFFSET(ForwardStage, w), 16, 1024),
              kg = operand_descriptor(stage + OFFSET(ForwardStage, kg), SQUARE_BYTES, 1024);
    ring.wait_full();
    float prediction[2 * C_TILES][4] = {};  // S w^T
    fence_registers(prediction);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(prediction, s.a[kk], along_channels(w, kk), kk > 0);
    warpgroup_commit();
    TokenOperand u, v;
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) load_matrix4(u.a[kk], (stage + rows + l.piece) ^ kk << 5);
    decay_state(state, l.t, stage + OFFSET(ForwardStage, decay));
    warpgroup_wait<0>();
    fence_registers(prediction);
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &prediction[2 * kk + (i >> 1)][2 * (i & 1)];
        v.a[kk][i] = pack_bf16(bf16_low(u.a[kk][i]) - x[0], bf16_high(u.a[kk][i]) - x[1]);
      }
    }
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, v.a[kk], over_tokens(kg, kk), 1);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(state.s);
    pack_state(s, state);
    warp_arrive(ring.empty(), l.lane);
    ring.next();
  }
}

__device__ __forceinline__ void walk_reverse(State& state, const Walk& walk, u32 shared, const Lane& l) {
  Operand dh;
  pack_state(dh, state);
  ReverseRing ring = {shared};
#pragma unroll 1
  for (int c = walk.task.end - 1; c >= walk.task.begin; --c) {
    const u32 stage = ring.stage();
    const u64 kg = operand_descriptor(stage + OFFSET(ReverseStage, kg), 16, 1024),
              aqk = operand_descriptor(stage + OFFSET(ReverseStage, aqk), 16, 1024),
              w = operand_descriptor(stage + OFFSET(ReverseStage, w), SQUARE_BYTES, 1024);
    const u64 qg = step(w, OFFSET(ReverseStage, qg) - OFFSET(ReverseStage, w));
    ring.wait_full();
    float dv[2 * C_TILES][4] = {};
    fence_registers(dv);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(dv, dh.a[kk], along_channels(kg, kk), kk > 0);
    warpgroup_commit();
    TokenOperand o, v;
    load_output_gradient(o, l.lane, l.row, stage + OFFSET(ReverseStage, d_o));
    fence_registers(o.a);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dv, o.a[kk], over_tokens(aqk, kk), 1);
    warpgroup_commit();
    decay_state(state, l.t, stage + OFFSET(ReverseStage, decay));
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, o.a[kk], over_tokens(qg, kk), 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    fence_registers(dv);
    pack_rows(v, dv);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_subtract(state.s, v.a[kk], over_tokens(w, kk));
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(state.s);
    pack_state(dh, state);
    warp_arrive(ring.empty(), l.lane);
    ring.next();
  }
}

__device__ __forceinline__ void produce_forward(const ChunkBackwardParams& p, const Walk& walk, u32 shared) {
  ForwardRing ring = {shared};
  const Task& task = walk.task;
  for (int c = task.begin; c < task.end; ++c) {
    const long long at = task.at + (long long)c * p.HV;
    const u32 stage = ring.stage(), full = ring.full();
    ring.wait_empty();
    barrier_expect(full, 2 * TILE_BYTES + DECAY_BYTES + (walk.from_identity ? 0 : U_BYTES));
    copy_in(stage + OFFSET(ForwardStage, w), image_of(p.w, at, TILE_BYTES), TILE_BYTES, full);
    if (!walk.from_identity) {
      copy_in(stage + OFFSET(ForwardStage, u), image_of(p.u + task.part * U_BYTES, at, TILE_BYTES), U_BYTES,
              full);
    }
    copy_in(stage + OFFSET(ForwardStage, decay), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    copy_in(stage + OFFSET(ForwardStage, kg), image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    ring.next();
  }
}

__device__ __forceinline__ void produce_reverse(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  ReverseRing ring = {shared};
  for (int c = task.end - 1; c >= task.begin; --c) {
    const long long at = task.at + (long long)c * p.HV;
    const u32 stage = ring.stage(), full = ring.full();
    ring.wait_empty();
    barrier_expect(full, 3 * TILE_BYTES + SQUARE_BYTES + DECAY_BYTES);
    copy_in(stage + OFFSET(ReverseStage, kg), image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(ReverseStage, aqk), image_of(p.aqk, at, SQUARE_BYTES), SQUARE_BYTES, full);
    copy_in(stage + OFFSET(ReverseStage, decay), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    copy_in(stage + OFFSET(ReverseStage, qg), image_of(p.qg, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(ReverseStage, w), image_of(p.w, at, TILE_BYTES), TILE_BYTES, full);
    ring.next();
  }
}

KDA_KERNEL(THREADS, 1) segment_maps(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const Walk walk = find_walk(p, block_index());
  if (walk.task.idle) return;
  if (thread_index() < 2 * MAX_STAGES) {
    const bool empty = thread_index() >= MAX_STAGES;
    // Every lane of the warps that load d_o arrives, with its own pieces.
    const u32 arrivals = walk.task.reverse ? 1 + 32 * OUTPUT_WARPS : 1;
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(),
                 empty ? WARP_ARRIVALS * STATE_WARPS : arrivals);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
  if (warp < STATE_WARPS) {
    set_role_registers<1>();
    const Lane l = make_lane(warp, walk.task.part);
    State state;
    begin_walk(state, p, walk, l);
    if (walk.task.reverse)
      walk_reverse(state, walk, shared, l);
    else
      walk_forward(state, walk, shared, l);
    end_walk(state, walk, shared, l);
  } else {
    set_role_registers<0>();
    const int part = warp - STATE_WARPS - 1;  // of d_o
    if (part < 0) {
      if (thread_index() & 31) return;
      if (walk.task.reverse)
        produce_reverse(p, walk.task, shared);
      else
        produce_forward(p, walk, shared);
    } else if (walk.task.reverse && part < OUTPUT_WARPS) {
      produce_output_gradients(p, walk.task, ReverseRing{shared}, OFFSET(ReverseStage, d_o), part);
    }
  }
}
