// Context parallelism on Hopper: the state at the start of every segment but a sequence's first,
// S' = S A + B, from the states that sequences have at the start of this rank's slice, `h0`, float
// [K][V] each.
//
// Grid: 128 / ROWS blocks a sequence and value head, which have ROWS value rows each. Warps and
// synchronisation: compose.cuh.
//
// Macros from the host: ROWS.
#include "sm90/chunk_forward/segments/compose.cuh"

KDA_KERNEL(THREADS, 1) slice_starts(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int item = block_index() / BLOCKS_V, part = block_index() % BLOCKS_V, n = item / p.HV;
  const int segments = segments_in(p, find_sequence(p, n).chunks);
  if (segments < 2) return;
  const Lane l = make_lane(part);
  make_barriers(shared);
  const SegmentPlaces at = segment_places(p, n, item - n * p.HV);
  const auto keep = [&](Sums& sums, int j) { write_pairs(sums.x, l.row, l.channel, at.state(p.starts, j)); };
  Sums sums;
  read_key_first(sums, l, p.h0 + (u64)item * FULL_STATE_BYTES);
  compose<false>(
      sums, segments - 1, shared, l, [&](int j) { return at.map(p.maps, j); },
      [&](int j) { return at.state(p.addends, j); },
      [&](int j) {
        if (j) keep(sums, j);
      });
  keep(sums, segments - 1);
}
