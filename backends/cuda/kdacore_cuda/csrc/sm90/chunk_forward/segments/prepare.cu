// chunk_kda in segments on Hopper, first launch: the operands of every chunk, as one ChunkOperands a
// unit (chunk_operands.cuh). A unit's threads do what those of a block of chunk_backward/prepare.cu
// do; here a block lives as long as the launch, computes three units (two if gates are unbounded) side
// by side, which do not wait for each other, and leaves multiprocessors for the launches that read
// its units while it goes on.
//
// Grid: at most as many blocks as the host wants to give multiprocessors to. Order of units:
// unit_order.cuh. Synchronisation: barriers of a unit's threads; a unit's flags are raised once all
// its copies have arrived in device memory, while the next unit's inputs come.
//
// Macros from the host: G_FLOAT, BOUNDED (gates are bounded), SHARED_BYTES, FOR_SEGMENTS.
#include "common/half_types.cuh"
#include "sm90/chunk_backward/prepare_unit.cuh"
#include "sm90/chunk_forward/segments/unit_order.cuh"

constexpr u32 READERS_SHIFT = 8;  // in value_rows, behind the number of rows

__device__ __forceinline__ Position load_position(u32 shared) {
  const uint4 x = load_shared_u4(shared + OFFSET(SharedMemory, position));
  return {(int)x.x, (int)x.y, (int)x.z};
}
__device__ __forceinline__ void store_position(u32 shared, const Position& x) {
  store_shared(shared + OFFSET(SharedMemory, position), (u32)x.at, (u32)x.chunk, (u32)x.before, 0);
}

KDA_KERNEL(BLOCKS * THREADS, 1) prepare(KDA_PARAM ChunkBackwardParams p) {
  wait_for_inputs();
  launch_dependents();
  Position x = {unit_in_block() * grid_blocks() + block_index(), 0, 0};
  OrderedUnit next = find_ordered_unit(p, x);
  if (!next.u.rows) return;
  {
    const u32 shared = unit_memory();
    const int thread = unit_thread();
    if (thread == 0) store_position(shared, x);
    fetch_first_inputs(p, next.u, shared, thread);
    fetch_other_inputs(p, next.u, shared, thread, next.readers << READERS_SHIFT);
  }
#pragma unroll 1
  for (;;) {
    make_unit(p, next.u, unit_memory());
    const u32 shared = unit_memory();
    const int thread = unit_thread();
    const uint4 done = load_shared_u4(shared + OFFSET(SharedMemory, value_rows));
    x = load_position(shared);
    x.at += BLOCKS * grid_blocks();
    next = find_ordered_unit(p, x);
    if (next.u.rows) fetch_first_inputs(p, next.u, shared, thread);
    if (thread == 0) copy_out_wait_read<0>();
    sync_unit();  // and all have read what was written of this unit
    if (next.u.rows) {
      fetch_other_inputs(p, next.u, shared, thread, next.readers << READERS_SHIFT);
      if (thread == 0) store_position(shared, x);
    }
    if (thread < 32) {
      if (thread == 0) copy_out_wait();
      raise_flags(p.ready + (u64)done.w * UNIT_FLAGS_BYTES, done.z >> READERS_SHIFT, p.launch);
    }
    if (!next.u.rows) return;
  }
}
