// Runs a launch, one cluster of blocks after the other: one that waits for another that has not begun is a deadlock.
#ifndef KDACORE_EMULATE_SCHEDULE_H
#define KDACORE_EMULATE_SCHEDULE_H

#include "emulate_fibers.h"

namespace emu {

// In which order clusters begin; CUDA promises none.
enum Dispatch { FORWARDS, BACKWARDS, SHUFFLED };
inline int dispatch = FORWARDS;
inline int starved = -1;  // this warp of each cluster runs only while no other can
// Null, or what was wrong.
const char* run(std::function<void()> kernel, int grid, int cluster_size, int threads, int shared, u32 seed);
void meet_block(int id, u32 count);  // at a named barrier; 0 is the block's
void meet_cluster();
void arrive_begun();
void wait_cluster();

}  // namespace emu

inline void sync_warp() {
  emu::together([] {});
  ++emu::me->syncs;
}
inline void sync_block() { emu::meet_block(0, emu::block_threads); }
inline void sync_threads(int id, int count) { emu::meet_block(id, count); }
inline void sync_pair(int barrier) { sync_threads(barrier, 64); }
inline void sync_cluster() { emu::meet_cluster(); }
inline void arrive_cluster() {}  // all of a cluster's blocks begin at once
inline void arrive_cluster_begun() { emu::arrive_begun(); }  // who waits then hears of nothing else
inline void wait_cluster() { emu::wait_cluster(); }

template <int N, int START>
inline void set_registers() {
  if (N % 8 || N < 24 || N > 256) emu::fail("number of registers", N);
  if (START != 65536 / emu::block_threads / 8 * 8) emu::fail("not what the block begins with", START);
  emu::me->registers = N;
}

#endif
