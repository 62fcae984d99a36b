// Backward of chunk_kda on Hopper, second kernel: what runs through the chunks of a sequence. With S the state (V by K), and
// for a chunk the matrices of chunk.cuh, o the chunk's rows of d_o:
//
//   forward   h = S;   v = u - S w^T (in u's place);      S' = S diag(last) + v kg
//   reverse   dh = dS; dv = dS kg^T + o^T aqk;            dS' = dS diag(last) + o^T qg - dv w;   dr = dv inv
//
// Neither needs the other, so each has its own blocks. A block carries WARPGROUPS * 64 rows of a state, 64 a warpgroup, in float32
// accumulators whose bf16 copy is at once the left operand of the products and what is stored as h or dh. More warps
// copy the chunks' operands into rings of stages ahead of them; what leaves goes through shared memory as bulk copies, so
// that no product waits for it. Both halves of V in one block (WARPGROUPS 2) read kg, qg and w once; with few heads each half
// has a block (WARPGROUPS 1), so that the warpgroups do not share a matrix unit.
#include "sm90/chunk_backward/scan_forward.cuh"
#include "sm90/chunk_backward/scan_producer.cuh"
#include "sm90/chunk_backward/scan_reverse.cuh"

KDA_KERNEL(THREADS, 1) scan(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const Task task = find_task(p, block_index());
  if (thread_index() < 2 * RINGS * MAX_STAGES) {
    const bool empty = thread_index() / MAX_STAGES & 1, output_grads = thread_index() / MAX_STAGES == 2 * DO_RING;
    // The producers' lanes arrive one by one with their pieces of d_o.
    barrier_init(shared + OFFSET(SharedMemory, barriers) + 8 * thread_index(), empty ? WARP_ARRIVALS * STATE_WARPS : output_grads ? 32 * OUTPUT_WARPS : 1);
  }
  fence_async_proxy();  // bulk copies will count on them
  sync_block();
  if (warp < STATE_WARPS) {
#if WARPGROUPS == 2
    set_registers<STATE_REGISTERS, START_REGISTERS>();
#endif
    if (task.reverse) scan_reverse(p, task, make_lane(shared, warp));
    else scan_forward(p, task, make_lane(shared, warp));
  } else {
#if WARPGROUPS == 2
    set_registers<PRODUCER_REGISTERS, START_REGISTERS>();
#endif
    const int part = warp - STATE_WARPS - 1;  // of d_o
    if (part >= 0) {
      if (task.reverse && part < OUTPUT_WARPS) produce_output_gradients(p, task, shared, part);
    } else if (task.reverse) produce_reverse(p, task, shared);
    else produce_forward(p, task, shared);
  }
}
