// What the threads of a unit do, in steps that sync_block() separates. Which warps do what: prepare.cu.
#pragma once

#include "sm90/chunk_forward/segments/prepare_apply.cuh"
#include "sm90/chunk_forward/segments/prepare_inverse.cuh"
#include "sm90/chunk_forward/segments/prepare_strips.cuh"

static_assert(THREADS == 2 * K, "a thread a bias of each half");

// 1. Asks for rows: g, of which a warp needs its own strip alone, then k and q.
__device__ __forceinline__ void fetch_inputs(const ChunkBackwardParams& p, u64 q, u64 k, u64 g, int rows,
                                             u32 shared, int thread) {
  fetch_strip(shared, reinterpret_cast<const unsigned char*>(g), (int)p.g_st * (G_FLOAT ? 4 : 2), rows,
              thread >> 5, thread & 31);
  copy_async_commit();
  fetch_tile<THREADS, SQUARE_BYTES>(shared + OFFSET(SharedMemory, k), k, 2 * (int)p.k_st, rows, thread);
  fetch_tile<THREADS, SQUARE_BYTES>(shared + OFFSET(SharedMemory, q), q, 2 * (int)p.q_st, rows, thread);
  copy_async_commit();
}

// Steps 2 to 6, once inputs have been requested and parameters stored: kt and aqt are left in shared
// memory.
__device__ __forceinline__ void make_unit(const ChunkBackwardParams& p, int rows, const Gate& gate,
                                          u32 shared) {
  const int thread = thread_index(), lane = thread & 31, warp = uniform(thread >> 5);
  const float unit = exp2_fast(-p.centre);
  {
    // 2. Decays from the gate, as soon as the warp's own part of it is there; norms of q and k.
    const Strip s = make_strip(warp, lane);
    float x[4][8];
    copy_async_wait<1>();
    sync_warp();
    load_steps(x, shared, s, gate, p.floor, rows);
    copy_async_wait<0>();
    sync_block();
    store_norms(p, shared, rows, warp, lane);
    sum_strip(x, shared, s, p.centre);
    sync_block();

    // 3. Operands; qg and last go to the record.
    unsigned char* const record = record_of(p);
    if (thread < K) write_decays(shared, thread, record);
    make_operands(p.centre, shared, s, x, record);
  }
  fence_async_proxy();
  sync_block();

  // 4. Products of token pairs.
  const int own_warp = uniform(opaque(thread_index()) >> 5);  // recomputed to save registers
  const bool system = own_warp >> 2;
  const int row_block = own_warp & 3;
  float pairs[PAIR_TILES][4];
  multiply_pairs(pairs, shared, system);
  sync_block();  // T takes the place of yk, the system that of zq

  // 5. aqk and the diagonal of the system. Then the inverse, its diagonal blocks by the first warps
  // while the others store the rest of the system, the others by the other warps while the first ones store kd.
  if (system)
    store_diagonal(row_block, pairs, shared, lane, unit);
  else
    store_aqk(row_block, pairs, shared, lane, unit);
  sync_block();
  if (system)
    store_earlier(row_block, pairs, shared, lane);
  else
    invert_diagonal(shared, row_block, lane);
  sync_block();
  if (system)
    merge_column(shared, row_block, lane);
  else
    flush_keys(shared, row_block >> 1, row_block & 1, lane, record_of(p), p.centre);
  fence_async_proxy();
  sync_block();

  // 6. Products with T.
  if (system)
    make_kt(shared, row_block, lane);
  else
    make_aqt(shared, row_block, lane);
  fence_async_proxy();
  sync_block();
}

// One thread: kt and aqt to the record.
__device__ __forceinline__ void store_products(const ChunkBackwardParams& p, u32 shared) {
  unsigned char* const record = record_of(p);
  copy_out(record + OFFSET(ChunkOperands, kt), shared + OFFSET(SharedMemory, kt), TILE_BYTES);
  copy_out(record + OFFSET(ChunkOperands, aqt), shared + OFFSET(SharedMemory, aqt), SQUARE_BYTES);
  copy_out_commit();
}
