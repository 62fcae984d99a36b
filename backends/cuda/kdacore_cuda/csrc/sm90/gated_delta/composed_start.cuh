// A block of a later segment finds the state that its segment starts from itself, its 64 value rows of it: the state at
// the first segment's end, then S = S A + B for each segment between. As chain.cu does, with the same bits
// (map_products.cuh), without that launch.
//
// The two images of a map take the places of k and q in stages 0 and 1, and every other one those of stage 2 and a place
// of its own, so that one comes while another is multiplied. The last one lies in the latter: a block with one map loads
// its first two chunks before there are any. What lies ahead of k in a stage stays as it is.
#pragma once

#include "sm90/chunk_forward/segments/map_products.cuh"
#include "sm90/gated_delta/walk_segment.cuh"

constexpr int MAP_PLACES = 2;
struct ComposingMemory {
  ForwardMemory<false> walk;
  alignas(1024) StateImage image;
  u64 full[MAP_PLACES], empty[MAP_PLACES];  // a map has come; all warps with the state have read it
};
static_assert(OFFSET(Stage, q) == OFFSET(Stage, k) + TILE_BYTES && sizeof(StateImage) == 2 * TILE_BYTES,
              "an image takes the place of k and q");

__device__ __forceinline__ void make_composing_barriers(u32 shared) {
  const int i = thread_index();
  if (i < MAP_PLACES) {
    barrier_init(shared + OFFSET(ComposingMemory, full) + 8 * i, 1 + LOAD_WARPS * WARP_ARRIVALS);
    barrier_init(shared + OFFSET(ComposingMemory, empty) + 8 * i, STATE_WARPS * WARP_ARRIVALS);
  }
  make_forward_barriers(shared);  // which all threads wait for
}

// The place of map `i` of `maps`, which is its i / 2-th one.
struct MapPlace {
  u32 shared;
  int place, use;
  __device__ __forceinline__ MapPlace(u32 shared, int maps, int i)
      : shared(shared), place((maps + i) & 1), use(i >> 1) {}
  __device__ __forceinline__ u32 image_of_stage(int stage) const {
    return shared + stage * (u32)sizeof(Stage) + OFFSET(Stage, k);
  }
  __device__ __forceinline__ u32 high() const { return image_of_stage(2 * place); }
  __device__ __forceinline__ u32 low() const {
    return place ? shared + OFFSET(ComposingMemory, image) : image_of_stage(1);
  }
  __device__ __forceinline__ u32 full() const { return shared + OFFSET(ComposingMemory, full) + 8 * place; }
  __device__ __forceinline__ u32 empty() const { return shared + OFFSET(ComposingMemory, empty) + 8 * place; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), use & 1); }
  __device__ __forceinline__ void wait_read() const { barrier_wait(empty(), use & 1); }
};

// A later segment; `maps`: those of the segments between the first and this one.
struct ComposedItem : SegmentItem {
  u32 shared;
  __device__ __forceinline__ int maps() const { return index > 1 ? index - 1 : 0; }
  // Of the sequence's segment j.
  __device__ __forceinline__ long long place_of(int j, int HV) const { return place + (long long)(j - index) * HV; }
};

// What a loading thread does besides, as records that have all been written. With several maps it loads all of them
// first; one map behind the first two chunks, which were there before the launch ahead.
struct MapsAhead {
  static constexpr bool COME_LATE = false;
  const GatedDeltaSegmentParams& p;
  ComposedItem x;
  int thread, ahead;  // chunks until the one map is loaded
  __device__ __forceinline__ MapsAhead(const GatedDeltaSegmentParams& p, const ComposedItem& x, int thread)
      : p(p), x(x), thread(thread), ahead(x.maps() == 1 ? (x.s.chunks < 2 ? 1 : 2) : 0) {}
  __device__ __forceinline__ void load_maps() const {
    wait_for_inputs();
    const int maps = x.maps();
    u64 from = p.maps + (u64)x.place_of(1, p.HV) * MAP_BYTES;
#pragma unroll 1
    for (int i = 0; i < maps; ++i, from += (u64)p.HV * MAP_BYTES) {
      const MapPlace place = {x.shared, maps, i};
      if (i >= MAP_PLACES) MapPlace{x.shared, maps, i - MAP_PLACES}.wait_read();
      if (thread == 0) {
        barrier_expect(place.full(), MAP_BYTES);
        copy_in(place.high(), reinterpret_cast<const void*>(from), STATE_BYTES, place.full());
        copy_in(place.low(), reinterpret_cast<const void*>(from + STATE_BYTES), STATE_BYTES, place.full());
      }
      warp_arrive(place.full(), thread & 31);  // all warps: none may fall a round behind, where it would wait for ever
    }
  }
  __device__ __forceinline__ void begin(const Item&) const {
    if (x.maps() > 1) load_maps();
  }
  __device__ __forceinline__ void next() {
    if (ahead && --ahead == 0) load_maps();
  }
};
// The ring of a loading thread. A stage is empty once the map in it has been read, too.
struct StagesBehindMaps : StageRing<> {
  int maps, chunk = 0;
  __device__ __forceinline__ StagesBehindMaps(u32 shared, int maps) : StageRing<>{shared}, maps(maps) {}
  __device__ __forceinline__ void wait_empty() const {
    StageRing<>::wait_empty();
    if (chunk == 0 && maps > 1) MapPlace{shared, maps, maps - 2}.wait_read();
    if (chunk == 2 && maps) MapPlace{shared, maps, maps - 1}.wait_read();
  }
  __device__ __forceinline__ void next() {
    StageRing<>::next();
    ++chunk;
  }
};

__device__ __forceinline__ void begin_state(State& state, const GatedDeltaSegmentParams& p,
                                            const ComposedItem& item, int row, const Lane& l) {
  const int maps = uniform(item.maps());
  u64 addend = full_state_at(p.addends, item.place_of(0, p.HV));
  const auto read_addend = [&] { read_pairs(state.s, row, 2 * l.t, addend); };
  read_addend();
#pragma unroll 1
  for (int i = 0; i < maps; ++i) {
    const MapPlace place = {item.shared, maps, i};
    State sums = {};
    multiply_map(
        sums, state, place.high(), place.low(), StageRing<>{item.shared}, [&] { place.wait_full(); },
        [&] {
          addend += (u64)p.HV * FULL_STATE_BYTES;
          read_addend();
        });
    warp_arrive(place.empty(), l.lane);
    add(state, sums);
  }
  make_opaque(state);
}
