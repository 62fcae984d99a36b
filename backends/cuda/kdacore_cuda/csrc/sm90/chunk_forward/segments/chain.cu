// chunk_kda in segments on Hopper, third launch: the state at the start of every segment, S' = S A
// + B, one segment after another.
//
// S and A are split in two bfloat16 parts each and multiplied in three products, about 16 bits, as
// every later segment builds on this.
// Grid: 128 / ROWS blocks a sequence and value head, with 16 or 32 value rows each: a row of S'
// needs all channels of its row of S, but no other row. Warps: eight (or four each) share the
// channels of 16 rows.
// Synchronisation: A of the next two segments is loaded ahead by bulk copies that a barrier a stage
// counts; a barrier of the block separates writing S from reading it, and one segment from the
// next.
//
// Macros from the host: ROWS, SHARED_BYTES.
#include "sm90/chunk_forward/segments/chain_step.cuh"

KDA_KERNEL(THREADS, 1) chain(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int item = block_index() / BLOCKS_V, part = block_index() % BLOCKS_V, n = item / p.HV;
  const int segments = segments_in(p, find_read_sequence(p, n).chunks);
  if (segments < 2) return;
  const int warp = uniform(thread_index() >> 5), lane = thread_index() & 31;
  const int strip = warp / GROUPS, group = warp % GROUPS;
  const Lane l = {lane, strip, group, ROWS * part + 16 * strip + (lane >> 2),
                  CHANNELS * group + 2 * (lane & 3)};
  const u64 first = (u64)first_segment(p, n) * p.HV + (item - n * p.HV);
  const auto map_of = [&](int j) { return p.maps + (first + (u64)j * p.HV) * MAP_BYTES; };
  // A of segment j, of which there is none for the first and the last.
  const auto stage_of = [](int j) { return (j - 1) % STAGES; };
  const auto fetch = [&](int j) {
    if (thread_index() || j >= segments - 1) return;
    const u32 bar = shared + OFFSET(SharedMemory, barriers) + 8 * stage_of(j);
    barrier_expect(bar, RIGHT_BYTES);
    copy_in(shared + OFFSET(SharedMemory, right) + stage_of(j) * RIGHT_BYTES,
            reinterpret_cast<const void*>(map_of(j) + OFFSET(SegmentMap, a_high)), RIGHT_BYTES, bar);
  };
  if (thread_index() < STAGES) barrier_init(shared + OFFSET(SharedMemory, barriers) + 8 * thread_index(), 1);
  fence_async_proxy();
  sync_block();
  fetch(1);
  fetch(2);
  Sums sums, next, after_next;  // B of the next segment is loaded ahead too
  read_pairs(sums.x, l.row, l.channel, map_of(0) + OFFSET(SegmentMap, b));
  if (segments > 2) read_pairs(after_next.x, l.row, l.channel, map_of(1) + OFFSET(SegmentMap, b));
#pragma unroll 1
  for (int j = 1;; ++j) {
    write_pairs(sums.x, l.row, l.channel, p.starts + (first + (u64)j * p.HV) * FULL_STATE_BYTES);
    if (j == segments - 1) break;
    next = after_next;
    if (j + 1 < segments - 1)
      read_pairs(after_next.x, l.row, l.channel, map_of(j + 1) + OFFSET(SegmentMap, b));
    const u32 left = shared + OFFSET(SharedMemory, left) + (j & 1) * 2 * PART_BYTES;
    store_left(sums, left, l);
    sync_block();  // and all have used A of the previous segment
    fetch(j + 2);
    barrier_wait(shared + OFFSET(SharedMemory, barriers) + 8 * stage_of(j), (j - 1) / STAGES & 1);
    multiply(next, left, shared + OFFSET(SharedMemory, right) + stage_of(j) * RIGHT_BYTES, l);
    sums = next;
  }
}
