// chunk_kda without gradients: one launch, nothing but inputs and outputs in device memory. For
// every architecture and head dim; on Hopper head dims of 128 have a kernel of their own,
// sm90/chunk_forward/chunk_forward.cu.
//
// A chunk is 16 tokens. shared_memory.cuh has the formulas and what a prepared chunk looks like.
//
// Grid: clusters of CLUSTER blocks, one for each sequence and value head; a block carries V /
// CLUSTER columns of the state.
// Warps of a block:
//   scan warps (SCAN_WARPS)        state and output: scan.cuh
//   prepare warps (PREPARE_WARPS)  gate, operands, triangle and its inverse: prepare.cuh; each
//                                  takes a chunk by itself
//
// Synchronisation: prepared chunks go through a ring of stages in shared memory, and as bulk copies
// to the other blocks of the cluster. A stage is full when its prepare warp has published it, empty
// when the scan warps of all blocks have read it. A block waits only for its own cluster, so any
// number of clusters may run.
#include "common/chunk_forward/prepare.cuh"
#include "common/chunk_forward/scan.cuh"

KDA_KERNEL(THREADS, 1) KDA_CLUSTER(CLUSTER) chunk_forward(KDA_PARAM ChunkForwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int warp = thread_index() >> 5, rank = block_index() % CLUSTER;
  if (thread_index() < STAGES) {
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(), WARP_ARRIVALS);
    barrier_init(shared + OFFSET(SharedMemory, empty) + 8 * thread_index(),
                 WARP_ARRIVALS * CLUSTER * SCAN_WARPS);
    if constexpr (CLUSTER > 1) fence_barrier_init();
  }
  wait_for_inputs();
  const int item = block_index() / CLUSTER;
  const int n =
      sequence_by_length(p, item / p.HV, reinterpret_cast<int*>(memory + OFFSET(SharedMemory, values)),
                         reinterpret_cast<int*>(memory + OFFSET(SharedMemory, picked)));
  const SequenceHead sequence = make_sequence_head(p, n, item % p.HV, C);
  Gate gate = make_gate(p, sequence.hv);
  float* bias = reinterpret_cast<float*>(memory + OFFSET(SharedMemory, bias));
  if (gate.kind == GATE_SOFTPLUS) {
    bool large = false;  // every warp looks at all channels, as each prepares all of them
    for (int c = thread_index() & 31; c < K; c += 32) large |= is_large_bias(load_bias(p, sequence.hv, c) + gate.shift);
    gate.rare |= warp_any(large);
  }
  for (int c = thread_index(); c < K; c += THREADS) {
    const float x = load_bias(p, sequence.hv, c) + gate.shift;
    bias[c] = gate.kind == GATE_SOFTPLUS ? softplus_bias(gate.rare, x) : x;
  }
  sync_block();
  if constexpr (CLUSTER > 1) sync_cluster();
  if (warp < SCAN_WARPS) {
    scan_warp(p, sequence, shared, warp, rank);
  } else {
    prepare_warp(p, sequence, gate, shared, warp - SCAN_WARPS, rank);
  }
  if constexpr (CLUSTER > 1) sync_cluster();  // no block may exit while another still writes to its shared memory
}
