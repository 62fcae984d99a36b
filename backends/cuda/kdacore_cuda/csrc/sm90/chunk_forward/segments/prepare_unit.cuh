// What the threads of a unit do, in steps that sync_unit() separates. Which warps do what: prepare.cu.
#pragma once

#include "sm90/chunk_forward/segments/prepare_apply.cuh"
#include "sm90/chunk_forward/segments/prepare_inverse.cuh"
#include "sm90/chunk_forward/segments/prepare_strips.cuh"

static_assert(THREADS == 2 * K, "a thread a bias of each half");

// 1. Asks for inputs: first k, and g in bfloat16, then (the block's parameters are asked for in between)
// the others, and v in L2; g is there before q. v's address and number of rows, and the unit's place, go
// to shared memory.
__device__ __forceinline__ void fetch_gates(const ChunkBackwardParams& p, u64 g, int rows, u32 shared,
                                            int thread) {
  fetch_strip(shared, reinterpret_cast<const unsigned char*>(g), (int)p.g_st * (G_FLOAT ? 4 : 2), rows,
              thread >> 5, thread & 31);
}
__device__ __forceinline__ void fetch_first_inputs(const ChunkBackwardParams& p, u64 k, u64 g, int rows,
                                                   u32 shared, int thread) {
  if (!G_FLOAT) {
    fetch_gates(p, g, rows, shared, thread);
    copy_async_commit();
  }
  fetch_tile<THREADS, SQUARE_BYTES>(shared + OFFSET(SharedMemory, k), k, 2 * (int)p.k_st, rows, thread);
}
__device__ __forceinline__ void fetch_other_inputs(const ChunkBackwardParams& p, u64 q, u64 g, u64 v,
                                                   int rows, u32 at, u32 shared, int thread) {
  if (G_FLOAT) {
    fetch_gates(p, g, rows, shared, thread);
    copy_async_commit();
  }
  fetch_tile<THREADS, SQUARE_BYTES>(shared + OFFSET(SharedMemory, q), q, 2 * (int)p.q_st, rows, thread);
  copy_async_commit();
  if (thread < 2 * rows)
    prefetch_l2(reinterpret_cast<const unsigned char*>(v) + (long long)(thread >> 1) * (2 * (int)p.v_st) +
                (thread & 1) * IMAGE_ROW);
  if (thread == 0)
    store_shared(shared + OFFSET(SharedMemory, value_rows), (u32)v, (u32)(v >> 32), (u32)rows, at);
}

// v to shared memory by half of the threads; thread: of that half.
__device__ __forceinline__ void fetch_values(const ChunkBackwardParams& p, u32 shared, int thread) {
  const uint4 from = load_shared_u4(shared + OFFSET(SharedMemory, value_rows));
  fetch_tile<THREADS / 2, KEYS_BYTES>(shared + keys_offset(0), (u64)from.y << 32 | from.x, 2 * (int)p.v_st,
                                      (int)from.z, thread);
  copy_async_commit();
}

// Steps 2 to 6, once inputs have been asked for and parameters stored: w and u are left in shared
// memory.
__device__ __forceinline__ void make_unit(const ChunkBackwardParams& p, int rows, const Gate& gate,
                                          u32 shared) {
  const int thread = unit_thread(), lane = thread & 31, warp = uniform(thread >> 5);
  const float unit = exp2_fast(-p.centre);
  {
    // 2. Decays from the gate, as soon as the warp's own part of it is there; norms of q and k.
    const Strip s = make_strip(warp, lane);
    float x[4][8];
    copy_async_wait<1>();
    sync_warp();
    load_steps(x, shared, s, gate, rows);
    copy_async_wait<0>();
    sync_unit();
    store_norms(p, shared, rows, warp, lane);
    sum_strip(x, shared, s, p.centre);
    sync_unit();

    // 3. Operands; kg, qg and last go to the record.
    unsigned char* const record = record_of(p);
    if (thread < K) write_decays(shared, thread, record);
    if (s.half)
      make_operands<1>(p.centre, shared, s, x, record);
    else
      make_operands<0>(p.centre, shared, s, x, record);
  }
  fence_async_proxy();
  sync_unit();

  // 4. Products of token pairs.
  const int own_warp = uniform(opaque(unit_thread()) >> 5);  // recomputed to save registers
  const bool system = own_warp >> 2, first = unit_thread() == 0;
  const int row_block = own_warp & 3;
  if (first) {
    copy_out(record_of(p) + OFFSET(ChunkOperands, kg), shared + OFFSET(SharedMemory, kg), TILE_BYTES);
    copy_out_commit();
  }
  float pairs[PAIR_TILES][4];
  multiply_pairs(pairs, shared, system);
  if (first) copy_out_wait_read<0>();
  sync_unit();  // aqk takes the place of kg, the system that of zq, v that of yk

  // 5. aqk and the diagonal of the system. Then the inverse, its diagonal blocks by the first warps
  // while the others store the rest of the system and load v.
  if (system) {
    store_diagonal(row_block, pairs, shared, lane, unit);
  } else {
    store_aqk(row_block, pairs, shared, lane, unit);
    fence_async_proxy();
  }
  sync_unit();
  if (system) {
    fetch_values(p, shared, unit_thread() & THREADS / 2 - 1);
    store_earlier(row_block, pairs, shared, lane);
  } else {
    if (first) {
      copy_out(record_of(p) + OFFSET(ChunkOperands, aqk), shared + OFFSET(SharedMemory, aqk), SQUARE_BYTES);
      copy_out_commit();
    }
    invert_diagonal(shared, row_block, lane);
  }
  sync_unit();
  if (system) {
    merge_column(shared, row_block, lane);
    copy_async_wait<0>();
  } else if (first) {
    copy_out_wait_read<0>();
  }
  fence_async_proxy();
  sync_unit();

  // 6. w and u.
  if (system)
    make_u(shared, row_block, lane);
  else
    make_w(shared, row_block, lane, unit);
  fence_async_proxy();
  sync_unit();
}

// One thread: w and u to the record.
__device__ __forceinline__ void store_values(const ChunkBackwardParams& p, u32 shared) {
  unsigned char* const record = record_of(p);
  unsigned char* const u = record + OFFSET(ChunkOperands, u);
  copy_out(record + OFFSET(ChunkOperands, w), shared + OFFSET(SharedMemory, w), TILE_BYTES);
  copy_out(u, shared + OFFSET(SharedMemory, aqk), SQUARE_BYTES);
  copy_out(u + SQUARE_BYTES, shared + keys_offset(0) + SQUARE_BYTES, HALF_SQUARE);
  copy_out(u + SQUARE_BYTES + HALF_SQUARE, shared + keys_offset(1) + SQUARE_BYTES, HALF_SQUARE);
  copy_out_commit();
}
