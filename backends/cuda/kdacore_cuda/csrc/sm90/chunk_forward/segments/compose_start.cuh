// A block of output finds the start state of its segment itself: S = B_0, then S = S A_i + B_i for every
// segment between. A sequence begins with zeros, so its first segment's A is not needed. The maps go
// through the ring of stages, one a stage, before the segment's chunks.
//
// S and A are split in two bfloat16 parts each and multiplied in three products, about 16 bits, in the
// chain's order (chain_step.cuh): the same bits, so the host may choose by the number of segments. Used by
// output.cu.
#pragma once

#include "sm90/chunk_forward/segments/segment_scan.cuh"

// A map lies where a chunk's records from kt on and its values would be.
constexpr u32 MAP_AT = OFFSET(ChunkOperands, kt);
static_assert(!COMPOSES || sizeof(Stage) - STAGE_LEAD - MAP_AT >= MAP_BYTES, "a map is larger than a stage");

// Segments whose maps come before segment `index`, behind the first one.
__device__ __forceinline__ int maps_before(int index) { return index > 1 ? index - 1 : 0; }

// Producers: maps of segments 1 to index - 1.
__device__ __forceinline__ void produce_maps(const SegmentParams& p, const Segment& x, OperandRing& ring) {
  const SegmentPlaces at = segment_places(p, x.n, x.hv);
  for (int i = 1; i <= maps_before(x.index); ++i) {
    ring.wait_empty();
    if (producer_thread() == 0) {
      barrier_expect(ring.full(), MAP_BYTES);
      copy_shared_part<false>(ring.stage() + MAP_AT, at.map(p.maps, i), MAP_BYTES, ring.full());
    }
    copy_async_arrive(ring.full());
    ring.next();
  }
}

// sums = state A, with A in the ring's stage. `meanwhile()` is called once the state is not needed any more.
// The low parts are taken while the first products run. The products with the low parts of A come last, so that
// the high parts of the state are in use until then: otherwise the compiler would reuse their registers earlier,
// and wait for the first products before it does.
template <class Meanwhile>
__device__ __forceinline__ void multiply_map(State& sums, State& state, OperandRing& ring, const Lane& l,
                                             Meanwhile meanwhile) {
  Operand high, low;
  pack_state(high, state);
  ring.wait_full();
  const u32 image = ring.stage() + MAP_AT;
  const u64 map = operand_descriptor(image, STATE_BYTES / 2, 8 * IMAGE_ROW),
            map_low = operand_descriptor(image + STATE_BYTES, STATE_BYTES / 2, 8 * IMAGE_ROW);
  fence_registers(sums.s);
  fence_registers(high.a);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<1>(sums.s, high.a[kk], over_tokens(map, kk), kk);
  warpgroup_commit();
  end_basic_block(ring);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const Split s = split_tiles(state.s[2 * kk], state.s[2 * kk + 1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) low.a[kk][e] = s.low[e];
  }
  fence_registers(low.a);
  meanwhile();
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    warpgroup_mma<1>(sums.s, low.a[kk], over_tokens(map, kk), 1);
    warpgroup_mma<1>(sums.s, high.a[kk], over_tokens(map_low, kk), 1);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(sums.s);
  release(l, ring);
  ring.next();
}

// Warps with the state.
__device__ __forceinline__ void compose_start(const SegmentParams& p, const Segment& x, State& state,
                                              OperandRing& ring, const Lane& l) {
  u64 addend = segment_places(p, x.n, x.hv).state(p.addends, 0);
  const auto read_addend = [&] { read_pairs(state.s, l.row + l.g, 2 * l.t, addend); };
  read_addend();
  // uniform: if lanes may leave the loop at different times, the compiler serializes the products.
#pragma unroll 1
  for (int left = uniform(maps_before(x.index)); left; --left) {
    State sums = {};
    multiply_map(sums, state, ring, l, [&] {
      addend += (u64)p.HV * FULL_STATE_BYTES;
      read_addend();
    });
#pragma unroll
    for (int i = 0; i < K / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.s[i][e] += sums.s[i][e];
    }
  }
}
