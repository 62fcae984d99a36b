// Backward of chunk_kda on Hopper, second launch: the recurrences over the chunks of a sequence.
// With S the state (V by K), dS its gradient, the chunk's matrices of workspace.cuh, and o the
// chunk's rows of d_o:
//
//   forward   h = S;   v = u - S w^T (stored in place of u);   S' = S diag(last) + v kg
//   reverse   dh = dS; dv = dS kg^T + o^T aqk;   dS' = dS diag(last) + o^T qg - dv w;   dr = dv inv
//
// Neither needs the other, so each has blocks of its own.
//
// Grid: for each sequence (IN_SEGMENTS: for each segment, segments.cuh), value head and direction
// one block (WARPGROUPS 2) or two that have 64 rows of V each (WARPGROUPS 1). One block reads kg,
// qg and w once for all of V; two are for few heads, so that warpgroups do not share a matrix unit.
// Warps: state warps hold 16 rows of the state each in float32 accumulators, four warps a
// warpgroup. The bfloat16 copy of these is both the left operand of the next products and what is
// stored as h or dh. One producer warp copies the chunks' operands into rings of stages ahead of
// them, two more load d_o.
// Synchronisation: each stage has a barrier that counts what arrives (full) and one that counts the
// state warps that are done with it (empty). Results go through shared memory as bulk copies, so
// that no product waits for a store.
// Shared memory: scan_shared_memory.cuh.
#include "sm90/chunk_backward/scan_forward.cuh"
#include "sm90/chunk_backward/scan_producer.cuh"
#include "sm90/chunk_backward/scan_reverse.cuh"

KDA_SHARED_BYTES(OFFSET(SharedMemory, barriers) + RINGS * RING_BARRIERS);

__device__ __forceinline__ void init_barriers(u32 shared) {
  if (thread_index() < 2 * RINGS * MAX_STAGES) {
    const bool empty = thread_index() / MAX_STAGES & 1,
               output_grads = thread_index() / MAX_STAGES == 2 * DO_RING;
    // Every lane of the warps that load d_o arrives, with its own pieces.
    const u32 full_count = output_grads ? 32 * OUTPUT_WARPS : 1;
    barrier_init(shared + OFFSET(SharedMemory, barriers) + 8 * thread_index(),
                 empty ? WARP_ARRIVALS * STATE_WARPS : full_count);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

KDA_KERNEL(THREADS, 1) scan(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const Task task = find_task(p, block_index());
  if (IN_SEGMENTS && task.idle) return;
  init_barriers(shared);
  if (warp < STATE_WARPS) {
    set_role_registers<1>();
    if (task.reverse)
      scan_reverse(p, task, make_lane(shared, warp));
    else
      scan_forward(p, task, make_lane(shared, warp));
  } else {
    set_role_registers<0>();
    const int part = warp - STATE_WARPS - 1;  // of d_o
    if (part >= 0) {
      if (task.reverse && part < OUTPUT_WARPS)
        produce_output_gradients(p, task, OutputGradRing{shared}, 0, part);
    } else if (task.reverse)
      produce_reverse(p, task, shared);
    else
      produce_forward(p, task, shared);
  }
}
