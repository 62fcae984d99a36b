// How a segment changes the state (V by K), S' = S A + B: from its last chunk to its first. With record.cuh's names and
// A the product of the maps of all chunks behind,
//
//   P = A^T k^T to_end;   W = P + P t;   B^T += W v;   A^T = last A^T - (W state) k
//
// from A = 1 and B = 0. Rows of A^T and B^T, which are channels of S', need no other row: a warp has 16 of them, a
// block 64. In the order of the matrix unit:
//
//   A^T k^T,  W v of the chunk before,  P t (added to P),  (W state) k (subtracted from last A^T)
//
// The one for B, which no other waits for, lies beside the factors of P.
#pragma once

#include "sm90/chunk_forward/segments/transposed_map.cuh"
#include "sm90/gated_delta/segment_item.cuh"
#include "sm90/gated_delta/walk_factors.cuh"
#include "sm90/gated_delta/walk_loads.cuh"
#include "sm90/ring.cuh"

constexpr int MAP_STAGES = 4;
struct alignas(1024) MapStage {
  WholeColumns t;
  RecordFactors factors;
  RingBarriers<MAP_STAGES> barriers;  // of all stages in the first one
  alignas(1024) TileImage k;
  TileImage v;  // all values, whatever part of the channels the block has
};
struct MapMemory {
  MapStage stages[MAP_STAGES];
};
using MapRing = Ring<MAP_STAGES, 0, sizeof(MapStage), OFFSET(MapStage, barriers), 8 * MAP_STAGES>;

__device__ __forceinline__ void make_map_barriers(u32 shared) {
  clear_above_diagonal(shared + OFFSET(MapStage, t), sizeof(MapStage), MAP_STAGES, THREADS);
  make_ring_barriers<MAP_STAGES>(shared + OFFSET(MapStage, barriers));
}

__device__ __forceinline__ void load_map(const GatedDeltaParams& p, const SegmentItem& x, u32 shared,
                                         int thread) {
  const int last = x.s.chunks - 1;
  auto k = key_source(p, x, divide(x.hv, p.group_factor, p.group_shift), thread);
  auto v = row_source<V / 8>(p.v, x.s.batch * p.v_sb + x.s.first * p.v_st + x.hv * p.v_sh, p.v_st, values_of(p),
                          thread);
  k.move(last), v.move(last);
  u64 record = record_at(p, x.s.slot + last, x.hv);
  int left = x.s.length - last * C;
  load_chunks(MapRing{shared}, x.s.chunks, thread, [&](const MapRing& ring) {
    const u32 stage = ring.stage();
    fetch_system(stage + OFFSET(MapStage, t), stage + OFFSET(MapStage, factors), record, ring.full(), thread);
    k.fetch(stage + OFFSET(MapStage, k), left, thread);
    v.fetch(stage + OFFSET(MapStage, v), left, thread);
    k.move(-2), v.move(-2);
    left = C;
    record -= (u64)p.HV * RECORD_BYTES;
  });
}

// Requests W v of the chunk in a stage.
__device__ __forceinline__ void add_values(State& b, const TokenOperand& w, u32 stage) {
  const u64 v = operand_descriptor(stage + OFFSET(MapStage, v), SQUARE_BYTES, 1024);
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(b.s, w.a[kk], over_tokens(v, kk), 1);
  warpgroup_commit();
}

// A belongs at `map`, B at `addend`, or nowhere if that is 0.
__device__ __forceinline__ void carry_map(const SegmentItem& item, u64 map, u64 addend, u32 shared,
                                          const Lane& l) {
  State a, b = {};  // rows of A^T and B^T
  unit_state(a, l.row + l.g, l.t);
  make_opaque(a);
  Operand left;
  pack_state(left, a);
  TokenOperand values = {};  // W of the chunk before
  MapRing ring = {shared}, before = ring;
#pragma unroll 1
  for (int c = 0; c < item.s.chunks; ++c) {
    const u32 stage = ring.stage(), factors = stage + OFFSET(MapStage, factors);
    const u64 k = operand_descriptor(stage + OFFSET(MapStage, k), 16, 1024),
              over_k = operand_descriptor(stage + OFFSET(MapStage, k), SQUARE_BYTES, 1024),
              t = over_rows_operand(stage + OFFSET(MapStage, t));
    ring.wait_full();
    const ColumnFactors to_end = load_factors(factors + OFFSET(RecordFactors, to_end), l);
    const float last = load_shared1(factors + OFFSET(RecordFactors, last));
    Products w = {};
    fence_registers(w);
    fence_registers(b.s);
    fence_registers(left.a);
    fence_registers(values.a);
    warpgroup_fence();
    multiply_channels(w, left, k);
    warpgroup_commit();
    add_values(b, values, before.stage());  // of the first chunk: zeros times its own values
    end_basic_block(ring);
    scale_state(a, last);
    warpgroup_wait<1>();
    fence_registers(w);
    multiply_columns(w, to_end);
    TokenOperand rounded;
    pack_rows(rounded, w);
    fence_registers(rounded.a);
    fence_registers(w);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(w, rounded.a[kk], over_rows(t, kk), 1);
    warpgroup_commit();
    end_basic_block(ring);
    const ColumnFactors of_state = load_factors(factors + OFFSET(RecordFactors, state), l);
    warpgroup_wait<0>();
    fence_registers(w);
    fence_registers(b.s);
    if (c) warp_arrive(before.empty(), l.lane);
    TokenOperand predicted;
    pack_scaled(predicted, w, of_state);
    pack_rows(values, w);
    fence_registers(predicted.a);
    fence_registers(a.s);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_subtract(a.s, predicted.a[kk], over_tokens(over_k, kk));
    warpgroup_commit();
    before = ring;
    ring.next();
    warpgroup_wait<0>();
    fence_registers(a.s);
    pack_state(left, a);
  }
  fence_registers(b.s);
  fence_registers(values.a);
  warpgroup_fence();
  add_values(b, values, before.stage());
  warpgroup_wait<0>();
  fence_registers(b.s);
  // No stage is in use any more.
  store_transposed_map(a, map, item.part, shared + OFFSET(MapStage, k), l);
  if (addend) write_transposed_pairs(b.s, l, addend);
  if (thread_index() == 0) copy_out_wait_read<0>();
}
