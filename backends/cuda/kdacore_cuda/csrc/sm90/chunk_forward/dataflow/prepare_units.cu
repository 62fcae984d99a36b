// chunk_kda in two launches on Hopper that run side by side, first launch: the operands of every
// chunk, as one ChunkOperands a unit (segments/chunk_operands.cuh). A unit's threads do what those of a
// block of chunk_backward/prepare.cu do; here a block lives as long as the launch, computes three units
// (two if gates are unbounded) side by side, which do not wait for each other, and leaves
// multiprocessors to the second launch (walk.cu), which reads finished units while others are still
// computed. No block of this launch waits for another block.
//
// Grid: one block for each multiprocessor that the second launch leaves free, or fewer. Warps: eight for each of
// the places where a unit is computed, and one, the dispatcher, that hands the block's units out in
// turns and raises a unit's flags once it has arrived in device memory. So no unit waits for that, nor
// computes addresses. First come the first chunks of all sequences and heads, then their second ones,
// and so on, so that none of their walks waits long.
// Synchronisation: barriers of a unit's threads. Barriers in shared memory, each with one arrival:
// given (the inputs of a place's next unit are known; one for each of two), written (all of a unit is in
// device memory).
//
// Macros from the host: G_FLOAT, BOUNDED (gates are bounded), FOR_SEGMENTS and SIDE_BY_SIDE (both 1).
#include "sm90/chunk_backward/prepare_unit.cuh"
#include "sm90/chunk_forward/dataflow/flags.cuh"

constexpr u32 GIVEN = OFFSET(SharedMemory, given), WRITTEN = OFFSET(SharedMemory, written);
constexpr int UNIT_THREADS = BLOCKS * THREADS;
// Registers are moved by warpgroups, so the dispatcher's has three idle warps.
constexpr int ALL_THREADS = UNIT_THREADS + 128, START_REGISTERS = 65536 / ALL_THREADS / 8 * 8;
constexpr int UNIT_REGISTERS = BOUNDED ? 80 : 112, DISPATCHER_REGISTERS = 24;
static_assert(2 * BLOCKS * UNIT_REGISTERS + DISPATCHER_REGISTERS <= (2 * BLOCKS + 1) * START_REGISTERS,
              "more registers than the block has");

// One unit after another, by the threads of a place. Its inputs come while the unit before leaves.
__device__ __forceinline__ void make_units(const ChunkBackwardParams& p) {
#pragma unroll 1
  for (u32 turn = 0;; ++turn) {
    const u32 shared = unit_memory();
    const int thread = unit_thread();
    if (turn && thread == 0) store_products(p, shared);
    barrier_wait(shared + GIVEN + 8 * (turn & 1), turn >> 1 & 1);
    const u32 from = shared + OFFSET(SharedMemory, inputs) + (turn & 1) * sizeof(UnitInputs);
    const uint4 qk = load_shared_u4(from), gb = load_shared_u4(from + 16), more = load_shared_u4(from + 32);
    const auto wide = [](u32 low, u32 high) { return (u64)high << 32 | low; };
    const int hv = (int)more.x, rows = (int)more.y;
    const Gate gate = make_gate(p, hv);
    const u32 parameter = rows ? load_parameter(p, (long long)wide(gb.z, gb.w), rows, hv, thread) : 0;
    const u64 g = wide(gb.x, gb.y);
    if (rows) fetch_first_inputs(p, wide(qk.z, qk.w), g, rows, shared, thread);
    if (turn) {
      if (thread == 0) copy_out_wait_read<0>();
      sync_unit();  // the places of kt and aqt are free
    }
    if (rows) {
      fetch_other_inputs(p, wide(qk.x, qk.y), g, 0, rows, more.z, shared, thread);
      store_beta(p, parameter, rows, shared, thread);
      store_bias(p, parameter, shared, gate, thread);
    }
    const auto end_unit_before = [&] {  // it should have arrived in device memory by now
      if (turn && unit_thread() == 0) {
        copy_out_wait();
        barrier_arrive(unit_memory() + WRITTEN);
      }
    };
    if (!rows) return end_unit_before();
    make_unit(p, rows, gate, unit_memory(), end_unit_before);
  }
}

// The unit at a position of the order in which units are computed, with 0 rows past the end.
__device__ __forceinline__ Unit find_ordered_unit(const ChunkBackwardParams& p, int position) {
  const u32 items = (u32)(p.N * p.HV);
  const int chunk = (int)((u32)position / items), item = position - chunk * (int)items;
  if (chunk >= p.NT) return {};
  const int n = (int)((u32)item / (u32)p.HV);
  return find_unit(p, (long long)(n * p.NT + chunk) * p.HV + (item - n * p.HV));
}

// Hands the next unit to a place, or none, with 0 rows. Returns whether there is one.
__device__ __forceinline__ bool give(const ChunkBackwardParams& p, int& position, u32 shared, u32 turn) {
  const Unit u = find_ordered_unit(p, position);
  position += grid_blocks();
  if ((thread_index() & 31) == 0) {
    const u32 to = shared + OFFSET(SharedMemory, inputs) + (turn & 1) * sizeof(UnitInputs);
    const auto store = [&](u32 at, u64 x, u64 y) {
      store_shared(to + at, (u32)x, (u32)(x >> 32), (u32)y, (u32)(y >> 32));
    };
    const auto address = [&](u64 base, long long sb, long long st, long long sh, int head, int size) {
      return reinterpret_cast<u64>(make_rows(u, base, sb, st, sh, head, size).at);
    };
    store(OFFSET(UnitInputs, q), address(p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2),
          address(p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2));
    store(OFFSET(UnitInputs, g), address(p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2),
          u.batch * p.beta_sb + u.first * p.beta_st + u.hv * p.beta_sh);
    store_shared(to + OFFSET(UnitInputs, hv), (u32)u.hv, (u32)u.rows, (u32)u.at, 0);
    barrier_arrive(shared + GIVEN + 8 * (turn & 1));
  }
  sync_warp();
  return u.rows > 0;
}

// The last warp of the block.
__device__ __forceinline__ void dispatch(const ChunkBackwardParams& p, u32 shared) {
  int position = block_index();
  int open = 0;  // units handed out and not published
  u32 odd = 0;   // places of which an odd number has been published, by bits
#pragma unroll 1
  for (u32 turn = 0; turn < 2; ++turn) {
#pragma unroll 1
    for (int i = 0; i < BLOCKS; ++i) open += give(p, position, shared + i * UNIT_PITCH, turn);
  }
#pragma unroll 1
  while (open) {
#pragma unroll 1
    for (int i = 0; i < BLOCKS; ++i) {
      const u32 place = shared + i * UNIT_PITCH, turn = odd >> i & 1;
      if (!shuffle((int)barrier_test(place + WRITTEN, turn), 0)) continue;
      const u32 written = __float_as_uint(load_shared1(
          place + OFFSET(SharedMemory, inputs) + turn * (u32)sizeof(UnitInputs) + OFFSET(UnitInputs, at)));
      sync_warp();
      odd ^= 1 << i;
      open += give(p, position, place, turn) - 1;
      raise_flags(p.ready + (u64)written * UNIT_FLAGS_BYTES, p.launch);
    }
    sleep_briefly();
  }
}

KDA_KERNEL(ALL_THREADS, 1) prepare_units(KDA_PARAM ChunkBackwardParams p) {
  wait_for_inputs();
  launch_dependents();
  if (thread_index() < 3 * BLOCKS)
    barrier_init(place_memory(thread_index() / 3) + GIVEN + 8 * (thread_index() % 3), 1);
  fence_async_proxy();
  sync_block();
  if (thread_index() < UNIT_THREADS) {
    set_registers<UNIT_REGISTERS, START_REGISTERS>();
    make_units(p);
  } else {
    set_registers<DISPATCHER_REGISTERS, START_REGISTERS>();
    if (thread_index() < UNIT_THREADS + 32) dispatch(p, place_memory(0));
  }
}
