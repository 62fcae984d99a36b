// chunk_kda in segments on Hopper, third launch: the state at the start of every segment, S' = S A
// + B, one segment after another.
//
// S and A are split in two bfloat16 parts each and multiplied in three products, about 16 bits, as
// every later segment builds on this.
// Grid: 128 / ROWS blocks a sequence and value head, with 16 or 32 value rows each: a row of S'
// needs all channels of its row of S, but no other row. Warps and synchronisation: compose.cuh.
//
// Macros from the host: ROWS.
#include "sm90/chunk_forward/segments/compose.cuh"

KDA_KERNEL(THREADS, 1) chain(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int item = block_index() / BLOCKS_V, part = block_index() % BLOCKS_V, n = opaque(item / p.HV);
  wait_for_inputs();  // before anything is read, but after a division, which takes a while
  if (p.flags & FLAG_EARLY_OUTPUT) launch_dependents();
  const int segments = segments_in(p, find_read_sequence(p, n).chunks);
  if (segments < 2) return;
  const Lane l = make_lane(part);
  const int hv = item - n * p.HV;
  const SegmentPlaces at = segment_places(p, n, hv);
  Sums sums = {};
  const auto keep = [&](int j) { write_pairs(sums.x, l.row, l.channel, at.state(p.starts, j)); };
  const u64 h0 = initial_state_at(p, n, hv, K * V);
  const int known = !h0;  // a first segment that begins with zeros ends with its B
  // ONE_SUM: output finds the same states where segments are few (compose_start.cuh).
  compose<false, true>(
      sums, segments - 1 - known, shared, l, [&](int i) { return at.map(p.maps, i + known); },
      [&](int i) { return at.state(p.addends, i + known); }, [&](int i) { keep(i + known); },
      [&] {
        if (h0) return read_elements(sums.x, l.row, l.channel, h0, p.flags);
        if (keeps_initial_state(p)) keep(0);
        read_pairs(sums.x, l.row, l.channel, at.state(p.addends, 0));
      });
  keep(segments - 1);
}
