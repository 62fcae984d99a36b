// Backward of context parallelism on Hopper: the state at the start of every segment and its
// gradient at the end of every segment, one segment after another (segments.cuh):
//
//   S_(j+1) = S_j A_j + B_j,   dS_(j-1) = dS_j A_j^T + B'_j
//
// from what `maps` leaves for a slice. B lies where its result belongs, B of the first segment includes
// the state that the sequence has at the slice's start. B' lies at its own segment's place, and the
// gradient at the slice's end, d_ht, float [K][V], is the one of the last segment.
// Grid: for each sequence, value head and direction 128 / ROWS blocks, which have ROWS value rows
// each; with states that the forward kept (FLAG_KEPT_MAPS), of the gradients' direction alone. Warps
// and synchronisation: compose.cuh.
//
// Macros from the host: ROWS.
#include "sm90/chunk_backward/segments.cuh"
#include "sm90/chunk_forward/segments/compose.cuh"

KDA_KERNEL(THREADS, 1) slice_chain(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int each = p.flags & FLAG_KEPT_MAPS ? grid_blocks() : grid_blocks() >> 1;
  const bool reverse = block_index() < each;
  const int index = reverse ? block_index() : block_index() - each;
  const int item = index / BLOCKS_V, part = index % BLOCKS_V, n = item / p.HV;
  const int segments = segments_in(p, find_sequence(p, n).chunks);
  if (!segments || (!reverse && segments < 3)) return;  // the first two starts are there already
  const Lane l = make_lane(part);
  make_barriers(shared);
  const SegmentPlaces at = segment_places(p, n, item - n * p.HV);
  Sums sums = {};
  if (reverse) {
    const int last = segments - 1;
    const auto keep = [&](int j) { write_pairs(sums.x, l.row, l.channel, at.state(p.ends, j)); };
    if (p.d_ht) read_key_first(sums, l, p.d_ht + (u64)item * FULL_STATE_BYTES);
    compose<true>(
        sums, last, shared, l, [&](int i) { return at.map(p.maps, last - i); },
        [&](int i) { return at.state(p.ends, last - i); }, [&](int i) { keep(last - i); });
    keep(0);
  } else {
    const auto keep = [&](int j) { write_pairs(sums.x, l.row, l.channel, at.state(p.starts, j)); };
    read_pairs(sums.x, l.row, l.channel, at.state(p.starts, 1));
    compose<false>(
        sums, segments - 2, shared, l, [&](int i) { return at.map(p.maps, i + 1); },
        [&](int i) { return at.state(p.starts, i + 2); }, [&](int i) { keep(i + 1); });
    keep(segments - 1);
  }
}
