// What the threads of a unit do, in steps that sync_unit() separates. Which warps do what: prepare.cu.
#pragma once

#include "sm90/chunk_backward/prepare_apply_inverse.cuh"
#include "sm90/chunk_backward/prepare_for_segments.cuh"
#include "sm90/chunk_backward/prepare_inverse.cuh"
#include "sm90/chunk_backward/prepare_operands.cuh"

static_assert(THREADS == C + ROWS_BYTES / 4, "a thread a row value");

// 1. Asks for inputs: first those whose place in shared memory the unit before leaves free early (k,
// and g in bfloat16), then the others, and v in L2. v's address and number of rows go to shared memory;
// FOR_SEGMENTS, which does not need v, the unit's place.
__device__ __forceinline__ void fetch_gates(const ChunkBackwardParams& p, u64 g, int rows, u32 shared,
                                            int thread) {
  const Rows from = {reinterpret_cast<const unsigned char*>(g), (int)p.g_st * (G_FLOAT ? 4 : 2)};
  if constexpr (G_FLOAT)
    fetch_floats(shared + raw_gates(), from, rows, thread, channels_of(p));
  else
    fetch_tile<THREADS>(shared + raw_gates(), from, rows, thread, channels_of(p));
}
__device__ __forceinline__ Rows half_rows(u64 at, long long step) {
  return {reinterpret_cast<const unsigned char*>(at), (int)step * 2};
}
__device__ __forceinline__ void fetch_first_inputs(const ChunkBackwardParams& p, u64 k, u64 g, int rows,
                                                   u32 shared, int thread) {
  if (!G_FLOAT) fetch_gates(p, g, rows, shared, thread);
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, k), half_rows(k, p.k_st), rows, thread, channels_of(p));
}
__device__ __forceinline__ void fetch_other_inputs(const ChunkBackwardParams& p, u64 q, u64 g, u64 v,
                                                   int rows, u32 at, u32 shared, int thread) {
  if (G_FLOAT) fetch_gates(p, g, rows, shared, thread);
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, q), half_rows(q, p.q_st), rows, thread, channels_of(p));
  copy_async_commit();
  const u32 to = shared + OFFSET(SharedMemory, unit);
  if constexpr (FOR_SEGMENTS) {
    if (thread == 0) store_shared(to, at);
  } else {
    prefetch_tile(half_rows(v, p.v_st), rows, thread, values_of(p));
    if (thread == 0) store_shared(to, (u32)v, (u32)(v >> 32), (u32)rows, at);
  }
}

// A block of v, whose first row begins at the address in shared memory, by COUNT threads, this the `i`-th.
template <int COUNT>
__device__ __forceinline__ void fetch_value_block(const ChunkBackwardParams& p, u32 shared, int block, int i) {
  const uint4 from = load_shared_u4(shared + OFFSET(SharedMemory, unit));
  const Rows values = {reinterpret_cast<const unsigned char*>((u64)from.y << 32 | from.x) + 2 * BLOCK_VALUES * block,
                       2 * (int)p.v_st};
  fetch_tile<COUNT>(shared + OFFSET(Matrices<false>, v), values, (int)from.z, i, values_of_block(p, block));
  copy_async_commit();
}

// The first block of v to shared memory and aqk from it to the workspace, by half of the threads.
__device__ __forceinline__ void fetch_values(const ChunkBackwardParams& p, u32 shared, int thread, int warp,
                                             int lane) {
  fetch_value_block<THREADS / 2>(p, shared, 0, 32 * (warp >> 1) + lane);
  if (thread == 0) {
    copy_out(place_of(p.aqk, SQUARE_BYTES), shared + OFFSET(SharedMemory, aqk), SQUARE_BYTES);
    copy_out_commit();
    copy_out_wait_read<0>();
  }
  copy_async_wait<0>();
}

// Steps 2 to 6, once inputs have been requested and parameters stored: w and u (FOR_SEGMENTS: kt and aqt)
// are left in shared memory. Calls f() after step 2.
template <class F>
__device__ __forceinline__ void make_unit(const ChunkBackwardParams& p, int rows, const Gate& gate,
                                          u32 shared, F f) {
  const int thread = unit_thread(), lane = thread & 31, warp = uniform(thread >> 5);
  const Strip s = make_strip(warp, lane);
  copy_async_wait<0>();
  sync_unit();

  // 2. Norms of q and k, and decays from the gate.
  store_norms(p, shared, rows, warp, lane);
  {
    float x[4][8];
    load_steps(x, shared, s, gate, p.floor, rows);
    sum_strip(x, shared, s, p.centre);
    sync_unit();
    f();

    // 3. Operands; kg, qg, last and rows (FOR_SEGMENTS: kd, qg and last) go to the workspace.
    if (thread < K) write_decays(p, shared, thread);
    if (!FOR_SEGMENTS && thread >= C) {
      const int i = thread - C;
      reinterpret_cast<float*>(place_of(p.rows, ROWS_BYTES))[i] =
          load_shared1(shared + OFFSET(SharedMemory, beta) + 4 * i);
    }
    if constexpr (BOUNDED)
      make_bounded_operands(p, shared, s, x);
    else
      make_unbounded_operands(p, shared, s, x);
    if constexpr (FOR_SEGMENTS) store_decayed(p, shared, s);
  }
  sync_unit();

  // 4. Products of token pairs: aqk by even warps, the triangular system by odd ones; rows so that
  // all schedulers have as many.
  const int own_warp = uniform(opaque(unit_thread()) >> 5);  // recomputed to save registers
  const bool system = own_warp & 1;
  const int row_block = own_warp >> 1 ^ (own_warp >> 2);
  const float unit = exp2_fast(-p.centre);
  Pairs pairs;
  make_pairs(row_block, pairs, shared, system, lane, unit);
  fence_async_proxy();  // a bulk copy will read aqk
  sync_unit();          // the system takes the place of zq

  // 5. The inverse; meanwhile v is loaded and aqk stored (FOR_SEGMENTS: put in the place of yk).
  if (system) {
    store_system(row_block, pairs, shared, lane);
    sync_warp();
    invert_diagonal(shared, row_block, lane);
    sync_half_unit();
    merge_column(shared, row_block, lane);
    fence_async_proxy();
  } else if constexpr (FOR_SEGMENTS) {
    store_image(row_block, pairs, shared + OFFSET(SharedMemory, aqk), shared + OFFSET(SharedMemory, inverse),
                lane);
  } else {
    fetch_values(p, shared, thread, warp, lane);
  }
  sync_unit();

  // 6. w and u; or kt and aqt.
  if constexpr (FOR_SEGMENTS) {
    make_kt(shared, own_warp, lane);
    make_aqt(shared, own_warp, lane);
  } else {
    if (thread == 0) {
      copy_out(place_of(p.inv, SQUARE_BYTES), shared + OFFSET(SharedMemory, inverse), SQUARE_BYTES);
      copy_out_commit();
    }
    apply_inverse<true>(shared, warp, lane, unit);
  }
  fence_async_proxy();
  sync_unit();
}

// u of the other blocks of a value head, with the inverse that make_unit left in shared memory. All threads; one has
// asked for copies of w and of the first block's u.
__device__ __forceinline__ void make_further_values(const ChunkBackwardParams& p, u32 shared) {
  const int thread = unit_thread(), lane = thread & 31, warp = uniform(thread >> 5);
#pragma unroll 1
  for (int block = 1; block < value_blocks(p); ++block) {
    fetch_value_block<THREADS>(p, shared, block, thread);
    copy_async_wait<0>();
    if (thread == 0) copy_out_wait_read<0>();
    sync_unit();
    apply_inverse<false>(shared, warp, lane, 0.0f);
    fence_async_proxy();
    sync_unit();
    if (thread == 0) {
      store_values(p, shared, block);
      copy_out_commit();
    }
  }
}

// One thread: what make_unit left in shared memory to device memory.
__device__ __forceinline__ void store_products(const ChunkBackwardParams& p, u32 shared) {
  if constexpr (FOR_SEGMENTS)
    store_record(p, shared);
  else
    store_w_and_u(p, shared);
}
