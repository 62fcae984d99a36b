// chunk_kda, inference: one launch, nothing but inputs and outputs in device memory.
//
// A cluster of CLUSTER blocks takes one sequence and value head; a block carries V / CLUSTER columns of the state. Eight
// prepare warps a block run ahead, each turning every eighth chunk (of this block's share) into an image in a ring of
// shared memory stages, copied to the other blocks of the cluster; scan warps consume the images in order. A block
// waits only for its own cluster, so any number of clusters may be in flight.
#include "common/prepare.cuh"
#include "common/scan.cuh"

constexpr int SORT_LIMIT = 256;
#if SCAN_REGISTERS
// The compiler's register limit comes from a block size; a scan held to few keeps its accumulators in place.
constexpr int START_REGISTERS = (SCAN_REGISTERS * SCAN_WARPS + PREPARE_REGISTERS * PREPARE_WARPS) / (SCAN_WARPS + PREPARE_WARPS);
constexpr int BOUND_THREADS = START_REGISTERS > 128 ? 384 : 512;
static_assert(START_REGISTERS == (BOUND_THREADS == 384 ? 168 : 128), "registers do not add up");
#else
constexpr int BOUND_THREADS = THREADS;
#endif

// Which sequence this cluster takes: longest first, so that no long one starts last. Ties keep their order.
__device__ __forceinline__ int pick_sequence(const PrefillParams& p, int place, unsigned char* shared) {
  if (!p.cu_seqlens || p.N == 1 || p.N > SORT_LIMIT) return place;
  int* lengths = reinterpret_cast<int*>(shared + VALUES_AT);
  int* picked = reinterpret_cast<int*>(shared + PICK_AT);
  const int n = thread_index();
  const bool wide = p.flags & FLAG_CU64;
  int mine = 0;
  if (n < p.N) lengths[n] = mine = (int)(load_index(p.cu_seqlens, n + 1, wide) - load_index(p.cu_seqlens, n, wide));
  sync_block();
  if (n < p.N) {
    int before = 0;
    for (int m = 0; m < p.N; ++m) before += lengths[m] > mine || (lengths[m] == mine && m < n);
    if (before == place) *picked = n;
  }
  sync_block();
  return *picked;
}

__device__ __forceinline__ Work make_work(const PrefillParams& p, int item, unsigned char* shared) {
  Work w;
  w.hv = item % p.HV;
  w.h = w.hv / (p.HV / p.H);
  w.n = pick_sequence(p, item / p.HV, shared);
  if (p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    w.batch = 0;
    w.first = load_index(p.cu_seqlens, w.n, wide);
    w.length = (int)(load_index(p.cu_seqlens, w.n + 1, wide) - w.first);
  } else {
    w.batch = w.n;
    w.first = 0;
    w.length = (int)p.T;
  }
  w.chunks = (w.length + C - 1) / C;
  return w;
}

#if CLUSTER > 1
#define TOGETHER KDA_CLUSTER(CLUSTER)
#else
#define TOGETHER
#endif

KDA_KERNEL(BOUND_THREADS, 1) TOGETHER prefill(KDA_PARAM PrefillParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int warp = thread_index() >> 5, rank = block_index() % CLUSTER;
  if (thread_index() < STAGES) {
    barrier_init(shared + FULL_AT + 8 * thread_index(), 1);
    barrier_init(shared + EMPTY_AT + 8 * thread_index(), CLUSTER * SCAN_WARPS);
#if CLUSTER > 1
    fence_barrier_init();
#endif
  }
  const Work work = make_work(p, block_index() / CLUSTER, memory);
  store_bias(p, work.hv, reinterpret_cast<float*>(memory + BIAS_AT));
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
    scan_warp(p, work, shared, warp, rank);
  } else {
#if SCAN_REGISTERS
    set_registers<PREPARE_REGISTERS, START_REGISTERS>();
#endif
    prepare_warp(p, work, shared, warp - SCAN_WARPS, rank);
  }
#if CLUSTER > 1
  sync_cluster();  // no block may leave while another still writes to it
#endif
}
