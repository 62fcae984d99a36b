// Backward of chunk_kda on Hopper, first launch: what the scan and the gradients need of each chunk. A block a unit, three blocks
// a multiprocessor (two without a bound of the gates), so that the loads of one are on their way while others compute. See
// chunk.cuh for what is written and prepare_layout.cuh for who uses which shared memory when.
//
// Macros from the host: G_FLOAT, BOUNDED (gates are bounded), SHARED_BYTES; FOR_SEGMENTS: for inference, see segments/record.cuh.
#include "common/half_types.cuh"
#include "sm90/chunk_backward/prepare_apply_inverse.cuh"
#include "sm90/chunk_backward/prepare_inverse.cuh"
#include "sm90/chunk_backward/prepare_operands.cuh"

static_assert(THREADS == C + ROWS_BYTES / 4, "a thread a row value");

KDA_KERNEL(THREADS, BLOCKS) prepare(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Unit u = find_unit(p, block_index());
  if (!u.rows) return;
  const int thread = thread_index(), lane = thread & 31, warp = uniform(thread >> 5);

  // 1. Raw rows, and what the gate takes.
  const Rows g = make_rows(u, p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2);
  const Rows v = make_rows(u, p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2);
#if G_FLOAT
  fetch_floats(shared + OFFSET(SharedMemory, raw_g), g, u.rows, thread);
#else
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, raw_g), g, u.rows, thread);
#endif
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, k), make_rows(u, p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2), u.rows, thread);
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, q), make_rows(u, p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2), u.rows, thread);
  copy_async_commit();
  prefetch_tile(v, u.rows, thread);
  if (thread == 0) {
    const u64 at = reinterpret_cast<u64>(v.at);
    store_shared(shared + OFFSET(SharedMemory, value_rows), (u32)at, (u32)(at >> 32), (u32)u.rows, 0);
  }
  const Strip s = make_strip(warp, lane);
  const Gate gate = make_gate(p, u.hv);
  store_parameters(p, u, shared, gate, thread);
  copy_async_wait<0>();
  sync_block();

  // 2. Norms, and decays from the gates.
  store_norms(p, shared, u.rows, warp, lane);
  {
    float x[4][8];
    load_steps(x, shared, s, gate, u.rows);
    sum_strip(x, shared, s, p.centre);
    sync_block();

    // 3. Operands; kg, qg, last and rows leave.
    if (thread < K) write_decays(p, shared, thread);
    if (!FOR_SEGMENTS && thread >= C) {
      const int i = thread - C;
      reinterpret_cast<float*>(place_of(p.rows, ROWS_BYTES))[i] = load_shared1(shared + OFFSET(SharedMemory, beta) + 4 * i);
    }
    const u32 strip = shared + OFFSET(SharedMemory, strips) + warp * STRIP_BYTES;
    if (s.half) make_operands<1>(p, shared, s, strip, x);
    else make_operands<0>(p, shared, s, strip, x);
  }
  sync_block();

  // 4. Pairs: even warps of queries and keys, odd ones of keys alone; rows such that each scheduler has as many.
  const int own_warp = uniform(opaque(thread_index()) >> 5);  // the warp made anew, for want of registers
  const bool system = own_warp & 1;
  const int row_block = own_warp >> 1 ^ (own_warp >> 2);
  const float unit = exp2_fast(-p.centre);
  Pairs pairs;
  if (row_block == 0) make_pairs<0>(pairs, shared, system, lane, unit);
  if (row_block == 1) make_pairs<1>(pairs, shared, system, lane, unit);
  if (row_block == 2) make_pairs<2>(pairs, shared, system, lane, unit);
  if (row_block == 3) make_pairs<3>(pairs, shared, system, lane, unit);
  fence_async_proxy();  // aqk leaves
  sync_block();         // the system takes zq's place

  // 5. The inverse, while v comes and aqk leaves.
  if (system) {
    if (row_block == 0) store_system<0>(pairs, shared, lane);
    if (row_block == 1) store_system<1>(pairs, shared, lane);
    if (row_block == 2) store_system<2>(pairs, shared, lane);
    if (row_block == 3) store_system<3>(pairs, shared, lane);
    sync_warp();
    invert_diagonal(shared, row_block, lane);
    sync_threads(1, THREADS / 2);
    merge_column(shared, row_block, lane);
    fence_async_proxy();
  } else {
    const uint4 from = load_shared_u4(shared + OFFSET(SharedMemory, value_rows));
    const Rows values = {reinterpret_cast<const unsigned char*>((u64)from.y << 32 | from.x), 2 * (int)p.v_st};
    fetch_tile<THREADS / 2>(shared + OFFSET(SharedMemory, v), values, (int)from.z, 32 * (warp >> 1) + lane);
    copy_async_commit();
    if (thread == 0) {
      copy_out(place_of(p.aqk, SQUARE_BYTES), shared + OFFSET(SharedMemory, aqk), SQUARE_BYTES);
      copy_out_commit();
      copy_out_wait_read<0>();
    }
    copy_async_wait<0>();
  }
  sync_block();

  // 6. w and u.
  if (!FOR_SEGMENTS && thread == 0) {
    copy_out(place_of(p.inv, SQUARE_BYTES), shared + OFFSET(SharedMemory, inverse), SQUARE_BYTES);
    copy_out_commit();
  }
  apply_inverse(shared, warp, lane, unit);
  fence_async_proxy();
  sync_block();
  if (thread == 0) {
    copy_out(place_of(p.w, TILE_BYTES), shared + OFFSET(SharedMemory, w), TILE_BYTES);
    // In halves, as the scan may fetch them: initcheck takes what a copy of 16 KB wrote for half written.
    copy_out(place_of(p.u, TILE_BYTES), shared + OFFSET(SharedMemory, u), SQUARE_BYTES);
    copy_out(place_of(p.u, TILE_BYTES) + SQUARE_BYTES, shared + OFFSET(SharedMemory, u) + SQUARE_BYTES, SQUARE_BYTES);
    copy_out_commit();
    copy_out_wait_read<0>();
  }
}
