// Context parallelism on Hopper: what the tokens of a slice do to the state of the sequence that its
// last token belongs to, S_out = M S_start + C (K by V), from the maps of the sequence's segments,
// S' = S A + B (V by K): M^T = A A ..., C^T = ((B A + B) A + B) ...
//
// Without offsets each batch row is such a sequence. Where the last token belongs to none, M is the
// unit matrix and C zero.
// Grid: for each result, value head, and M or C, 128 / ROWS blocks, which have ROWS rows of M^T or
// C^T each. Warps and synchronisation: compose.cuh.
//
// Macros from the host: ROWS.
#include "generated/transition_params.cuh"
#include "sm90/chunk_forward/segments/compose.cuh"

KDA_KERNEL(THREADS, 1) transition(KDA_PARAM TransitionParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int block = block_index(), part = block % BLOCKS_V, index = block / BLOCKS_V;
  const bool is_m = index & 1;
  const long long item = index >> 1;
  const int row = (int)(item / p.HV), hv = (int)(item - (long long)row * p.HV);
  const int n = p.cu_seqlens ? sequence_with(p, p.T - 1) : row;
  int segments = 0;
  SegmentPlaces at = {};
  if (n >= 0) {
    segments = segments_in(p, find_sequence(p, n).chunks);
    at = segment_places(p, n, hv);
  }
  const Lane l = make_lane(part);
  make_barriers(shared);
  Sums sums = {};
  if (is_m) set_unit(sums, l);
  compose<false>(
      sums, segments, shared, l, [&](int j) { return at.map(p.maps, j); },
      [&](int j) { return is_m ? 0 : at.state(p.addends, j); }, [](int) {});
  write_key_first(sums, l, (is_m ? p.M : p.C) + item * FULL_STATE_BYTES);
}
