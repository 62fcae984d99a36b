// Backward of chunk_kda in segments on Hopper, third launch: the state at the start of every segment
// and its gradient at the end of every segment, one segment after another (segments.cuh):
//
//   S_(j+1) = S_j A_j + B_j,   dS_(j-1) = dS_j A_j^T + B'_j
//
// B and B' lie where the results belong.
// Grid: for each sequence, value head and direction 128 / ROWS blocks, which have ROWS value rows
// each: a row needs all channels of its own row, but no other row. Warps: chain_step.cuh.
// Synchronisation: A of the next two segments is loaded ahead by bulk copies that a barrier a stage
// counts; a barrier of the block separates writing a state from reading it, and one segment from
// the next.
//
// Macros from the host: ROWS, SHARED_BYTES.
#include "sm90/chunk_backward/segments.cuh"
#include "sm90/chunk_forward/segments/chain_step.cuh"

// `first`: place of the sequence's first segment. Step i of a direction, from 1 on, is at segment i
// of the sequence, or at the i-th before the last one.
template <bool REVERSE>
__device__ __forceinline__ void chain(const ChunkBackwardParams& p, long long first, int segments, u32 shared,
                                      const Lane& l) {
  const auto place = [&](int i) { return first + (long long)(REVERSE ? segments - 1 - i : i) * p.HV; };
  const auto state_of = [&](int i) { return (REVERSE ? p.ends : p.starts) + place(i) * FULL_STATE_BYTES; };
  const auto stage_of = [](int i) { return (i - 1) % STAGES; };
  const auto fetch = [&](int i) {
    if (thread_index() || i >= segments - 1) return;
    const u32 bar = shared + OFFSET(SharedMemory, barriers) + 8 * stage_of(i);
    barrier_expect(bar, RIGHT_BYTES);
    copy_in(shared + OFFSET(SharedMemory, right) + stage_of(i) * RIGHT_BYTES,
            reinterpret_cast<const void*>(p.maps + place(i) * MAP_IMAGES_BYTES), RIGHT_BYTES, bar);
  };
  fetch(1);
  fetch(2);
  Sums sums, next, after_next;  // B of the next segment is loaded ahead too
  read_pairs(sums.x, l.row, l.channel, state_of(1));
  if (segments > 2) read_pairs(after_next.x, l.row, l.channel, state_of(2));
#pragma unroll 1
  for (int i = 1; i < segments - 1; ++i) {
    next = after_next;
    if (i + 2 < segments) read_pairs(after_next.x, l.row, l.channel, state_of(i + 2));
    const u32 left = shared + OFFSET(SharedMemory, left) + (i & 1) * 2 * PART_BYTES;
    store_left(sums, left, l);
    sync_block();  // and all have used A of the previous segment
    fetch(i + 2);
    barrier_wait(shared + OFFSET(SharedMemory, barriers) + 8 * stage_of(i), (i - 1) / STAGES & 1);
    multiply<REVERSE>(next, left, shared + OFFSET(SharedMemory, right) + stage_of(i) * RIGHT_BYTES, l);
    sums = next;
    write_pairs(sums.x, l.row, l.channel, state_of(i + 1));
  }
}

KDA_KERNEL(THREADS, 1) segment_chain(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int each = grid_blocks() >> 1;
  const bool reverse = block_index() < each;
  const int index = reverse ? block_index() : block_index() - each;
  const int item = index / BLOCKS_V, part = index % BLOCKS_V, n = item / p.HV;
  const int segments = segments_in(p, find_sequence(p, n).chunks);
  if (segments < 3) return;  // B and B' are the results already
  const int warp = uniform(thread_index() >> 5), lane = thread_index() & 31;
  const int strip = warp / GROUPS, group = warp % GROUPS;
  const Lane l = {lane, strip, group, ROWS * part + 16 * strip + (lane >> 2),
                  CHANNELS * group + 2 * (lane & 3)};
  if (thread_index() < STAGES) barrier_init(shared + OFFSET(SharedMemory, barriers) + 8 * thread_index(), 1);
  fence_async_proxy();
  sync_block();
  const long long first = (long long)first_segment(p, n) * p.HV + (item - n * p.HV);
  if (reverse)
    chain<true>(p, first, segments, shared, l);
  else
    chain<false>(p, first, segments, shared, l);
}
