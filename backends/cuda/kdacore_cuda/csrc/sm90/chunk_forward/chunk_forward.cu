// chunk_kda without gradients on Hopper, K = V = 128: one launch, nothing but inputs, outputs and what
// helpers prepare in device memory.
//
// A chunk is 32 tokens, two halves of 16. shared_memory.cuh has the formulas and what a prepared
// chunk looks like.
//
// Grid: clusters of CLUSTER blocks. A cluster takes a sequence and value head at a time, all of it
// or a part (schedule.cuh). Each of the first SCANNERS blocks carries V / SCANNERS columns of the
// state. All blocks prepare chunks in turn, or in clusters of four the others alone (stage_copies.cuh). Blocks of
// further clusters may help (helpers.cuh).
// Warps of a block, in this order:
//   scan warps (SCAN_WARPS)     state and output: scan.cuh; a warpgroup carries 64 columns of V
//   slice warps (SLICE_WARPS)   gate, operands and partial sums of the triangles: slices.cuh; each
//                               has 32 channels of half a chunk
//   solver warps (SOLVER_SLOTS) triangles and their inverse: triangles.cuh; two warps a chunk
// Registers are moved from the preparing warps to the scan warps.
//
// Synchronisation: prepared chunks go through a ring of stages in shared memory, and as bulk copies
// to the other scanning block. A stage is full when its solver has published it and empty when the
// scan warps of all scanning blocks have read it. Slices hand their partial sums to a solver
// through parts_ready and get their room back through parts_read. The ring runs on from one
// sequence to the next. A cluster waits for another only where a sequence was cut, or for helpers; then
// the call has a workspace, and clusters draw tickets, so that the other one has begun (tickets.cuh).
//
// Macros from the host, besides sizes: MANY_SHORT, the way of many short sequences of equal length
// (short_sequences.cuh), which the host chooses. The same bits.
#include "sm90/chunk_forward/helper_block.cuh"
#include "sm90/chunk_forward/scan.cuh"
#include "sm90/chunk_forward/short_sequences.cuh"
#include "sm90/chunk_forward/spaced_steps.cuh"
#include "sm90/chunk_forward/tickets.cuh"
#include "sm90/chunk_forward/triangles.cuh"

// Where SCAN_REGISTERS is not 0, registers are moved by warpgroups.
static_assert(!SCAN_REGISTERS || (SCAN_WARPS % 4 == 0 && SLICE_WARPS % 4 == 0), "registers are moved by warpgroups");
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int REGISTERS = START_REGISTERS * (THREADS / 32);
// Of the warps that can have scan's registers, and of those that can have the slices', in one block.
constexpr int OTHERS = SLICE_WARPS + SOLVER_SLOTS,
              SLICING = SEPARATE ? SCAN_WARPS + SLICE_WARPS : SLICE_WARPS;
static_assert(!SCAN_REGISTERS ||
                  SCAN_REGISTERS * SCAN_WARPS +
                          (SEPARATE ? SOLVE_REGISTERS * OTHERS
                                    : SLICE_REGISTERS * SLICE_WARPS + SOLVE_REGISTERS * SOLVER_SLOTS) <=
                      REGISTERS,
              "more registers than there are");
static_assert(!SCAN_REGISTERS ||
                  SLICE_REGISTERS * SLICING + SOLVE_REGISTERS * SOLVER_SLOTS <= REGISTERS,
              "more registers than there are");
// Those of the twelve slice warps of a helper of clusters of two.
constexpr int HELPER_SLICE_REGISTERS =
    (REGISTERS - SOLVE_REGISTERS * SOLVER_SLOTS) / (SCAN_WARPS + SLICE_WARPS) / 8 * 8;

__device__ __forceinline__ void init_barriers(u32 shared, int rank) {
  if (thread_index() < STAGES) {
    const bool own = !SEPARATE && !SPACED && thread_index() % CLUSTER == rank;  // prepared in this block
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(),
                 WARP_ARRIVALS * (EVERY_LANE && own ? 2 : 1));
    if constexpr (SEPARATE) {
      init_copy_barriers(shared, thread_index(), rank);
    } else {
      barrier_init(shared + OFFSET(SharedMemory, empty) + 8 * thread_index(),
                   WARP_ARRIVALS * SCANNERS * SCAN_WARPS);
      if constexpr (SPACED) barrier_init(room_at(shared, thread_index()), WARP_ARRIVALS);
    }
    if (thread_index() < SOLVERS)
      barrier_init(shared + OFFSET(SharedMemory, parts_ready) + 8 * thread_index(),
                   WARP_ARRIVALS * 2 * SLICES);
    if (thread_index() < MOST_READS) {
      barrier_init(shared + OFFSET(SharedMemory, parts_read) + 8 * thread_index(), WARP_ARRIVALS * 2);
      if constexpr (!BOUNDED) barrier_init(shared + tiles_read() + 8 * thread_index(), WARP_ARRIVALS * 2);
    }
    if constexpr (CLUSTER > 1) fence_barrier_init();
  }
}

// Moves registers between warpgroups; 0 leaves them as they are.
template <int REGISTERS>
__device__ __forceinline__ void set_role_registers() {
  if constexpr (SCAN_REGISTERS) set_registers<REGISTERS, START_REGISTERS>();
}

// All threads, of all blocks of a cluster if there is more than one.
__device__ __forceinline__ void sync_group() {
  sync_block();
  if constexpr (CLUSTER > 1) sync_cluster();
}

// Which part of the work this block's cluster has, and what this block is in it: to shared memory. All threads. The
// answers of device memory come while the work is measured.
__device__ __forceinline__ void find_own_work(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  const bool draws = p.workspace && rank == 0 && thread_index() == 0;
  const u64 drawn = draws ? cluster_tickets(p).draw() : 0;
  const Work work = warp == 0 ? measure_work(p) : Work{};
  if (p.workspace) {
    wait_cluster();
    if (draws) share_ticket(shared + OWN_CLUSTER, cluster_tickets(p).finish(drawn, grid_blocks() / CLUSTER));
  }
  sync_group();
  if (warp == 0) {
    int cluster = p.workspace ? load_own(shared + OWN_CLUSTER) : block_index() / CLUSTER;
    bool helps = false;
    if constexpr (HELPERS) {
      helps = cluster < helper_clusters(p);  // a helper's cluster is the one that it helps, if any
      cluster = helps ? CLUSTER * cluster + rank : cluster - helper_clusters(p);
    }
    const Interval found = find_interval(p, work, cluster);
    sync_warp();  // all lanes have read the ticket
    if (thread_index() == 0)
      store_interval(shared + OFFSET(SharedMemory, interval), found, cluster, helps);
  }
  sync_block();
}

// What the warps of a block do. One of the forms has:

// blocks that either scan or prepare, a cluster of four of them, which a helper may prepare for;
__device__ __forceinline__ void run_separate_block(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  if (rank < SCANNERS) {
    if (warp < SCAN_WARPS) {
      set_role_registers<SCAN_REGISTERS>();
      scan_warp(p, shared, warp, rank);
    } else {
      set_role_registers<SOLVE_REGISTERS>();
      if (warp == SCAN_WARPS) acknowledge_stages(p, shared);
      if (HELPERS && warp == SCAN_WARPS + 1) fetch_stages(p, shared, rank);
    }
  } else if (warp < 2 * PAIRS) {
    set_role_registers<SLICE_REGISTERS>();
    preparing_slice_warp(p, shared, warp, preparer_of(rank));
  } else {
    set_role_registers<SOLVE_REGISTERS>();
    solver_warp(p, shared, warp - SCAN_WARPS - SLICE_WARPS, rank);
  }
  if (warp >= SCAN_WARPS + SLICE_WARPS) clear_rows(p, warp - SCAN_WARPS - SLICE_WARPS);
}

// blocks that scan and prepare;
__device__ __forceinline__ void run_block(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  if (warp < SCAN_WARPS) {
    set_role_registers<SCAN_REGISTERS>();
    scan_warp(p, shared, warp, rank);
  } else if (warp < SCAN_WARPS + SLICE_WARPS) {
    set_role_registers<SLICE_REGISTERS>();
    slice_warp(p, shared, warp - SCAN_WARPS, rank);
  } else {
    set_role_registers<SOLVE_REGISTERS>();
    solver_warp(p, shared, warp - SCAN_WARPS - SLICE_WARPS, rank);
    clear_rows(p, warp - SCAN_WARPS - SLICE_WARPS);
  }
}

// the same with helpers, of which this block may be one;
__device__ __forceinline__ void run_spaced_block(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  const int solver = warp - SCAN_WARPS - SLICE_WARPS;
  if (rank < HELPER) {
    if (warp < SCAN_WARPS) {
      set_role_registers<SCAN_REGISTERS>();
      scan_warp(p, shared, warp, rank);
    } else if (solver < 0) {
      set_role_registers<SLICE_REGISTERS>();
      spaced_slice_warp(p, shared, warp - SCAN_WARPS, rank);
    } else {
      set_role_registers<SOLVE_REGISTERS>();
      spaced_solver_warp(p, shared, solver, rank);
    }
  } else if (solver < 0) {
    set_role_registers<HELPER_SLICE_REGISTERS>();
    helper_slice_warp(p, shared, warp);
  } else {
    set_role_registers<SOLVE_REGISTERS>();
    helper_solver_warp(p, shared, solver);
  }
  if (solver >= 0) clear_rows(p, solver);
}

// the same for many short sequences, where all follows from the number of the cluster.
__device__ __forceinline__ void run_short_block(const ChunkForwardParams& p, u32 shared, int warp, int rank,
                                                int cluster) {
  if (warp < SCAN_WARPS) {
    set_role_registers<SCAN_REGISTERS>();
    short_scan_warp(p, shared, warp, rank, cluster);
  } else if (warp < SCAN_WARPS + SLICE_WARPS) {
    set_role_registers<SLICE_REGISTERS>();
    short_slice_warp(p, shared, warp - SCAN_WARPS, rank, cluster);
  } else {
    set_role_registers<SOLVE_REGISTERS>();
    short_solver_warp(p, shared, warp - SCAN_WARPS - SLICE_WARPS, rank, cluster);
  }
}

KDA_KERNEL(THREADS, 1) KDA_CLUSTER(CLUSTER) chunk_forward(KDA_PARAM ChunkForwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int warp = uniform(thread_index() >> 5);
  int rank = block_index() % CLUSTER;
  init_barriers(shared, rank);
  if (!MANY_SHORT && p.workspace) arrive_cluster();  // this block has begun
  wait_for_inputs();
  if (p.marks) launch_dependents();  // of checkpoint_tail.cu, whose blocks follow as these end
  if constexpr (MANY_SHORT) {
    const int cluster = block_index() / CLUSTER;
    sync_group();
    run_short_block(p, shared, warp, rank, cluster);
  } else {
    find_own_work(p, shared, warp, rank);
    if (HELPERS && load_own(shared + OWN_HELPS)) rank = HELPER;
    if constexpr (SEPARATE)
      run_separate_block(p, shared, warp, rank);
    else if constexpr (SPACED)
      run_spaced_block(p, shared, warp, rank);
    else
      run_block(p, shared, warp, rank);
  }
  if constexpr (CLUSTER > 1) sync_cluster();  // no block may exit while another still writes to its shared memory
}
