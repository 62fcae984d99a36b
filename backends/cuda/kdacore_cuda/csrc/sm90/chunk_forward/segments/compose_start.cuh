// A block of output finds the start state of its segment itself: S = B_0, then S = S A_i + B_i for every
// segment between. A sequence begins with zeros, so its first segment's A is not needed. The maps go
// through the ring of stages, one a stage, before the segment's chunks. Products: map_products.cuh. Used by output.cu.
#pragma once

#include "sm90/chunk_forward/segments/map_products.cuh"
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
    const u32 image = ring.stage() + MAP_AT;
    multiply_map(
        sums, state, image, image + STATE_BYTES, ring, [&] { ring.wait_full(); },
        [&] {
          addend += (u64)p.HV * FULL_STATE_BYTES;
          read_addend();
        });
    release(l, ring);
    ring.next();
    add(state, sums);
  }
}
