// Context parallelism on Hopper: the state at the start of every segment but a sequence's first,
// S' = S A + B, from the states that sequences have at the start of this rank's slice, `h0`, float
// [K][V] each.
//
// Grid: 128 / ROWS blocks a sequence and value head, which have ROWS value rows each. Warps and
// synchronisation: compose.cuh.
//
// Macros from the host: ROWS, SHARED_BYTES.
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
  const u64 first = (u64)first_segment(p, n) * p.HV + (item - n * p.HV);
  const auto map_of = [&](int j) { return p.maps + (first + (u64)j * p.HV) * MAP_BYTES; };
  const auto keep = [&](Sums& sums, int j) {
    write_pairs(sums.x, l.row, l.channel, p.starts + (first + (u64)j * p.HV) * FULL_STATE_BYTES);
  };
  Sums sums;
  read_key_first(sums, l, p.h0 + (u64)item * FULL_STATE_BYTES);
  compose<false>(
      sums, segments - 1, shared, l, [&](int j) { return map_of(j) + OFFSET(SegmentMap, a_high); },
      [&](int j) { return map_of(j) + OFFSET(SegmentMap, b); },
      [&](int j) {
        if (j) keep(sums, j);
      });
  keep(sums, segments - 1);
}
