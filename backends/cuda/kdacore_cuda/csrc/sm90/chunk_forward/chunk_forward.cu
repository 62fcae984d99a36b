// chunk_kda, inference, on Hopper: one launch, nothing but inputs and outputs in device memory.
//
// A cluster of CLUSTER blocks takes sequences and value heads (jobs.cuh); a scanning block carries V / SCANNERS columns of the
// state. Slice warps and solver warps of every block run ahead, turning its share of the chunks into images in a ring of shared
// memory stages, copied to the other scanning blocks; scan warps consume the images in order. The ring runs on from one job to
// the next. A cluster waits for another only where a job was cut, and then for one that started before it.
#include "sm90/chunk_forward/scan.cuh"
#include "sm90/chunk_forward/triangles.cuh"

#if SCAN_REGISTERS
static_assert(SCAN_WARPS % 4 == 0 && SLICE_WARPS % 4 == 0, "registers are traded by warpgroups");
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(SCAN_REGISTERS * SCAN_WARPS + SLICE_REGISTERS * SLICE_WARPS + SOLVE_REGISTERS * SOLVER_SLOTS <=
                  START_REGISTERS * (THREADS / 32),
              "more registers than there are");
#endif

#if CLUSTER > 1
#define CLUSTER_ATTRIBUTE KDA_CLUSTER(CLUSTER)
#else
#define CLUSTER_ATTRIBUTE
#endif

KDA_KERNEL(THREADS, 1) CLUSTER_ATTRIBUTE chunk_forward(KDA_PARAM ChunkForwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int warp = uniform(thread_index() >> 5), rank = block_index() % CLUSTER, cluster = block_index() / CLUSTER;
  if (thread_index() < STAGES) {
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(), WARP_ARRIVALS);
    barrier_init(shared + OFFSET(SharedMemory, empty) + 8 * thread_index(), WARP_ARRIVALS * SCANNERS * SCAN_WARPS);
    if (thread_index() < SOLVERS) barrier_init(shared + OFFSET(SharedMemory, parts_ready) + 8 * thread_index(), WARP_ARRIVALS * 2 * SLICES);
    if (thread_index() < GROUPS) barrier_init(shared + OFFSET(SharedMemory, parts_read) + 8 * thread_index(), WARP_ARRIVALS * 2);
#if CLUSTER > 1
    fence_barrier_init();
#endif
  }
  wait_for_inputs();
  if (warp == 0) {
    const Interval found = find_interval(p, cluster);
    if (thread_index() == 0) store_interval(shared + OFFSET(SharedMemory, interval), found);
  }
#if CLUSTER > 1
  sync_block();
  sync_cluster();
#else
  sync_block();
#endif
  if (warp < SCAN_WARPS) {
#if SCAN_REGISTERS
    set_registers<SCAN_REGISTERS, START_REGISTERS>();
#endif
    if (rank < SCANNERS) scan_warp(p, shared, warp, rank, cluster);
  } else if (warp < SCAN_WARPS + SLICE_WARPS) {
#if SCAN_REGISTERS
    set_registers<SLICE_REGISTERS, START_REGISTERS>();
#endif
    slice_warp(p, shared, warp - SCAN_WARPS, rank);
  } else {
#if SCAN_REGISTERS
    set_registers<SOLVE_REGISTERS, START_REGISTERS>();
#endif
    solver_warp(p, shared, warp - SCAN_WARPS - SLICE_WARPS, rank);
  }
#if CLUSTER > 1
  sync_cluster();  // no block may leave while another still writes to it
#endif
}
