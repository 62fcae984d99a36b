// The gated delta rule's backward with few heads on Hopper, second of five launches. Sequences are cut into segments
// (segment_item.cuh), and walks leave what walk_backward.cu's do. Here each sequence's first segment is walked forward, its
// last one in reverse, and of those between maps are made: how each changes the state, and its gradient. The next
// launch, chunk_backward/segment_chain.cu, finds the states at segments' starts and their gradients at segments' ends.
//
// Grid: two blocks for each of four walks. Of a sequence and value head: in reverse over the last segment; forward over
// the first. Of a segment with maps and value head: in reverse from a gradient of zero; from its last chunk to its first
// for the map of the state. Warps: walk_block.cuh.
//
// Macros from the host: WARPGROUPS, 1; OF_SLICE, for a slice of a row that several ranks share: no segment is walked in
// reverse; with FLAG_KEPT_MAPS, where the forward kept maps and states at segments' starts, there are third walks alone.
#include "sm90/gated_delta/walk_backward_segment.cuh"
#include "sm90/gated_delta/walk_map.cuh"

static_assert(WARPGROUPS == 1, "a map has 64 rows a block");
constexpr u32 larger(u32 x, u32 y) { return x > y ? x : y; }
KDA_SHARED_BYTES(larger(larger(sizeof(ReverseMemory), sizeof(StatesMemory)), sizeof(MapMemory)));

enum Role { LAST, FIRST, GRAD_MAP, MAP };
struct Work {
  Role role;
  SegmentItem x;
};
__device__ __forceinline__ Work find_work(const GatedDeltaBackwardSegmentParams& p) {
  const bool kept = OF_SLICE && p.flags & FLAG_KEPT_MAPS;
  const int walks = kept ? 0 : PARTS * p.N * p.HV, last = OF_SLICE ? 0 : walks,
            mapped = grid_blocks() - walks - last, each = kept ? mapped : mapped / 2;
  int block = opaque(block_index());
  Work work;
  if (block < last + walks) {
    work.role = block < last ? LAST : FIRST;
    block -= block < last ? 0 : last;
    const int item = block / PARTS, n = item / p.HV;
    const int segments = work.role == LAST ? segments_in(p, find_read_sequence(p, n).chunks) : 1;
    work.x = segment_item(p, n, segments ? segments - 1 : 0, item - n * p.HV, block % PARTS);
    return work;
  }
  block -= last + walks;
  work.role = block < each ? GRAD_MAP : MAP;
  work.x = find_later(p, block < each ? block : block - each, !OF_SLICE);
  const SegmentItem& x = work.x;
  if (OF_SLICE ? !x.index && x.s.first > 0 : !x.index || x.last) work.x.s.chunks = 0;  // it has no maps
  return work;
}
// Where the part of a segment's map belongs that is added to the state: the start of the segment behind. A first segment
// is walked from the state that it starts from, and the end of a last one is the slice's.
__device__ __forceinline__ u64 addend_at(const GatedDeltaBackwardSegmentParams& p, const SegmentItem& x) {
  return OF_SLICE && (!x.index || x.last) ? 0 : full_state_at(p.starts, x.place + p.HV);
}

__device__ __forceinline__ void make_barriers(Role role, u32 shared) {
  if (role == MAP)
    make_map_barriers(shared);
  else if (role == FIRST)
    make_states_barriers(shared);
  else
    make_reverse_barriers(shared);
}

KDA_KERNEL(THREADS, 1) walk_outer_segments(KDA_PARAM GatedDeltaBackwardSegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  launch_dependents();  // the next launch waits for all of this one, and first loads what is older
  const int warp = uniform(thread_index() >> 5);
  const Work work = find_work(p);
  const SegmentItem& x = work.x;
  if (work.role >= GRAD_MAP && !x.s.chunks) return;
  make_barriers(work.role, shared);
  if (warp < STATE_WARPS) {
    const Lane l = make_lane(warp, x.part);
    if (!OF_SLICE && work.role == LAST)
      carry_state_grad(p, x, shared, warp, l);
    else if (work.role == FIRST)
      carry_state_alone(p, x, shared, warp, l);
    else if (work.role == GRAD_MAP)
      carry_state_grad<false>(p, GradMap{x}, shared, warp, l);
    else
      carry_map(x, p.maps + x.place * MAP_BYTES, addend_at(p, x), shared, l);
  } else {
    const int thread = thread_index() - 32 * STATE_WARPS;
    if (work.role == MAP)
      load_map(p, x, shared, thread);
    else if (work.role == FIRST)
      load_states(p, x, shared, thread);
    else
      load_reverse(p, x, shared, thread);
  }
}
