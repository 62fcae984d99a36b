// The gated delta rule in two launches on Hopper that run side by side, first launch: the record of every chunk and value
// head, as unit_records.cuh makes them. Blocks live as long as the launch and leave multiprocessors to the second launch
// (walk_records_beside.cu), which reads records while others are still made.
//
// No block of this launch waits for another block, and the second launch begins when each of them is resident or has
// ended: what that one waits for comes.
//
// Grid: one block for each multiprocessor that the second launch leaves free, or fewer. Eight warps for each of two
// places make one unit after another, in the order of unit_order.cuh; the places do not wait for each other.
// Synchronisation: barriers of a place's threads. A record's flags are raised once it has arrived in device memory: the
// warp that stored it waits for that while the next record is begun.
#include "sm90/gated_delta/place_threads.cuh"

constexpr int PLACES = 2, THREADS = PLACES * UNIT_THREADS;
// On 1024 bytes, as images are.
constexpr u32 PLACE_PITCH = (sizeof(UnitMemory) + 1023) / 1024 * 1024;
constexpr u32 ORDER_AT = PLACES * PLACE_PITCH;
KDA_SHARED_BYTES(ORDER_AT + sizeof(OrderTable));

KDA_KERNEL(THREADS, 1) chunk_records_beside(KDA_PARAM GatedDeltaBesideParams p) {
  KDA_SHARED(memory);
  wait_for_inputs();
  launch_dependents();
  const u32 table = shared_address(memory) + ORDER_AT;
  if (p.cu_seqlens) {
    if (thread_index() < 32) make_order(p, table, p.N, thread_index());
    sync_block();
  }
  const int place = uniform(thread_index() / UNIT_THREADS);
  PlaceThreads<PLACES> threads = {p, thread_index() % UNIT_THREADS, place, table,
                                  block_index() + place * grid_blocks()};
  make_records(p, shared_address(memory) + place * PLACE_PITCH, threads);
}
