// Backward of chunk_kda in segments on Hopper, third launch: the state at the start of every segment
// and its gradient at the end of every segment, one segment after another (segments.cuh):
//
//   S_(j+1) = S_j A_j + B_j,   dS_(j-1) = dS_j A_j^T + B'_j
//
// B and B' lie where the results belong.
// Grid: for each sequence, value head and direction 128 / ROWS blocks, which have ROWS value rows
// each: a row needs all channels of its own row, but no other row; with states that the forward kept
// (FLAG_KEPT_MAPS), of the gradients' direction alone. Warps and synchronisation: compose.cuh.
//
// Macros from the host: ROWS.
#include "sm90/chunk_backward/segments.cuh"
#include "sm90/chunk_forward/segments/compose.cuh"

// Place i of a direction is segment i of the sequence, or the i-th before the last one.
template <bool REVERSE>
__device__ __forceinline__ void chain(const ChunkBackwardParams& p, const SegmentPlaces& at, int segments,
                                      u32 shared, const Lane& l) {
  const auto index = [&](int i) { return REVERSE ? segments - 1 - i : i; };
  const auto state_of = [&](int i) { return at.state(REVERSE ? p.ends : p.starts, index(i)); };
  Sums sums;
  const auto keep = [&](int i) { write_pairs(sums.x, l.row, l.channel, state_of(i)); };
  read_pairs(sums.x, l.row, l.channel, state_of(1));
  compose<REVERSE>(
      sums, segments - 2, shared, l, [&](int i) { return at.map(p.maps, index(i + 1)); },
      [&](int i) { return state_of(i + 2); },
      [&](int i) {
        if (i) keep(i + 1);  // the first is there already
      });
  keep(segments - 1);
}

KDA_KERNEL(THREADS, 1) segment_chain(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int each = p.flags & FLAG_KEPT_MAPS ? grid_blocks() : grid_blocks() >> 1;
  const bool reverse = block_index() < each;
  const int index = reverse ? block_index() : block_index() - each;
  const int item = index / BLOCKS_V, part = index % BLOCKS_V, n = item / p.HV;
  const int segments = segments_in(p, find_sequence(p, n).chunks);
  if (segments < 3) return;  // B and B' are the results already
  const Lane l = make_lane(part);
  make_barriers(shared);
  const SegmentPlaces at = segment_places(p, n, item - n * p.HV);
  if (reverse)
    chain<true>(p, at, segments, shared, l);
  else
    chain<false>(p, at, segments, shared, l);
}
