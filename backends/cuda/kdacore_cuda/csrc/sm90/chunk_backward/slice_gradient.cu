// Backward of context parallelism on Hopper: the gradient of the state at the start of a rank's
// slice, of the sequence that its first token belongs to, as far as this rank's outputs and final
// states give it. From that sequence's segments, the last first: dS <- dS A^T + B', from the
// gradient of its final state, d_ht, or zero.
//
// Without offsets each batch row is such a sequence. Where the first token belongs to none the result
// is zero. Results, and d_ht, are float [K][V]; B' of a segment lies at its place in `ends`.
// Grid: for each result and value head 128 / ROWS blocks, which have ROWS value rows each. Warps and
// synchronisation: compose.cuh.
//
// Macros from the host: ROWS.
#include "sm90/chunk_backward/segments.cuh"
#include "sm90/chunk_forward/segments/compose.cuh"

KDA_KERNEL(THREADS, 1) slice_gradient(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int item = block_index() / BLOCKS_V, part = block_index() % BLOCKS_V, row = item / p.HV,
            hv = item - row * p.HV;
  const int n = p.cu_seqlens ? sequence_with(p, 0) : row;
  int segments = 0;
  u64 first = 0;
  if (n >= 0) {
    segments = segments_in(p, find_sequence(p, n).chunks);
    first = (u64)first_segment(p, n) * p.HV + hv;
  }
  const Lane l = make_lane(part);
  make_barriers(shared);
  Sums sums = {};
  if (n >= 0 && p.d_ht) read_key_first(sums, l, p.d_ht + ((u64)n * p.HV + hv) * FULL_STATE_BYTES);
  const auto place = [&](int i) { return first + (u64)(segments - 1 - i) * p.HV; };
  compose<true>(
      sums, segments, shared, l, [&](int i) { return p.maps + place(i) * MAP_BYTES; },
      [&](int i) { return p.ends + place(i) * FULL_STATE_BYTES; }, [](int) {});
  write_key_first(sums, l, p.d_h0 + (u64)item * FULL_STATE_BYTES);
}
