// Backward of chunk_kda on Hopper, first launch, and first launch of the forward in segments: the
// operands of every chunk.
//
// For a unit (64 tokens of one sequence and value head), with gc the log2 decay summed from the
// chunk's start, q and k normalised, beta activated (workspace.cuh lists what is written):
//
//   kg = k 2^(gc_last - gc), qg = scale q 2^gc, last = 2^gc_last
//   aqk_ij = scale (q_i 2^(gc_i - gc_j)) . k_j for j <= i
//   inv = (I + tril(beta_i (k_i 2^(gc_i - gc_j)) . k_j, -1))^-1
//   w = inv beta k 2^gc, u = inv beta v
//
// Decays are taken relative to an exponent anchor that serves half a chunk if gates are bounded,
// else a quarter; see prepare_shared_memory.cuh for the operands zq, zb, yk and sk that follow from
// this, and for which region holds what when.
//
// Grid: a block of eight warps a unit, three blocks a multiprocessor (two if gates are unbounded),
// so that some load while others compute. Warps: in steps 1 to 3 each has a strip of 32 tokens and
// 32 channels; in step 4 each has 16 rows of aqk or of the triangular system; in step 5 the odd
// ones invert the system while the even ones load v; in step 6 each has 16 channels of w and 16
// values of u. Barriers of the block separate the steps; v arrives by asynchronous copies.
//
// Macros from the host: G_FLOAT, BOUNDED (gates are bounded), SHARED_BYTES; FOR_SEGMENTS: only what
// inference needs is written, as one ChunkOperands a unit
// (chunk_forward/segments/chunk_operands.cuh).
#include "common/half_types.cuh"
#include "sm90/chunk_backward/prepare_apply_inverse.cuh"
#include "sm90/chunk_backward/prepare_inverse.cuh"
#include "sm90/chunk_backward/prepare_operands.cuh"

static_assert(THREADS == C + ROWS_BYTES / 4, "a thread a row value");

// Asks for g, k and q, and for v to be brought to L2; v's address and number of rows to shared
// memory.
__device__ __forceinline__ void fetch_inputs(const ChunkBackwardParams& p, const Unit& u, u32 shared,
                                             int thread) {
  const Rows g = make_rows(u, p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2);
  const Rows v = make_rows(u, p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2);
#if G_FLOAT
  fetch_floats(shared + OFFSET(SharedMemory, raw_g), g, u.rows, thread);
#else
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, raw_g), g, u.rows, thread);
#endif
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, k), make_rows(u, p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2),
                      u.rows, thread);
  fetch_tile<THREADS>(shared + OFFSET(SharedMemory, q), make_rows(u, p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2),
                      u.rows, thread);
  copy_async_commit();
  prefetch_tile(v, u.rows, thread);
  if (thread == 0) {
    const u64 at = reinterpret_cast<u64>(v.at);
    store_shared(shared + OFFSET(SharedMemory, value_rows), (u32)at, (u32)(at >> 32), (u32)u.rows, 0);
  }
}

// v to shared memory and aqk from it to the workspace, by half of the threads.
__device__ __forceinline__ void fetch_values(const ChunkBackwardParams& p, u32 shared, int thread, int warp,
                                             int lane) {
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

KDA_KERNEL(THREADS, BLOCKS) prepare(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Unit u = find_unit(p, block_index());
  if (!u.rows) return;
  const int thread = thread_index(), lane = thread & 31, warp = uniform(thread >> 5);

  // 1. Inputs.
  fetch_inputs(p, u, shared, thread);
  const Strip s = make_strip(warp, lane);
  const Gate gate = make_gate(p, u.hv);
  store_parameters(p, u, shared, gate, thread);
  copy_async_wait<0>();
  sync_block();

  // 2. Norms of q and k, and decays from the gate.
  store_norms(p, shared, u.rows, warp, lane);
  {
    float x[4][8];
    load_steps(x, shared, s, gate, u.rows);
    sum_strip(x, shared, s, p.centre);
    sync_block();

    // 3. Operands; kg, qg, last and rows go to the workspace.
    if (thread < K) write_decays(p, shared, thread);
    if (!FOR_SEGMENTS && thread >= C) {
      const int i = thread - C;
      reinterpret_cast<float*>(place_of(p.rows, ROWS_BYTES))[i] =
          load_shared1(shared + OFFSET(SharedMemory, beta) + 4 * i);
    }
    const u32 strip = shared + OFFSET(SharedMemory, strips) + warp * STRIP_BYTES;
    if (s.half)
      make_operands<1>(p, shared, s, strip, x);
    else
      make_operands<0>(p, shared, s, strip, x);
  }
  sync_block();

  // 4. Products of token pairs: aqk by even warps, the triangular system by odd ones; rows so that
  // all schedulers have as many.
  const int own_warp = uniform(opaque(thread_index()) >> 5);  // recomputed to save registers
  const bool system = own_warp & 1;
  const int row_block = own_warp >> 1 ^ (own_warp >> 2);
  const float unit = exp2_fast(-p.centre);
  Pairs pairs;
  make_pairs(row_block, pairs, shared, system, lane, unit);
  fence_async_proxy();  // a bulk copy will read aqk
  sync_block();         // the system takes the place of zq

  // 5. The inverse; meanwhile v is loaded and aqk stored.
  if (system) {
    store_system(row_block, pairs, shared, lane);
    sync_warp();
    invert_diagonal(shared, row_block, lane);
    sync_threads(1, THREADS / 2);
    merge_column(shared, row_block, lane);
    fence_async_proxy();
  } else {
    fetch_values(p, shared, thread, warp, lane);
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
    // In halves, as the scan may load them: initcheck takes what a copy of 16 KB wrote for half
    // written.
    copy_out(place_of(p.u, TILE_BYTES), shared + OFFSET(SharedMemory, u), SQUARE_BYTES);
    copy_out(place_of(p.u, TILE_BYTES) + SQUARE_BYTES, shared + OFFSET(SharedMemory, u) + SQUARE_BYTES,
             SQUARE_BYTES);
    copy_out_commit();
    copy_out_wait_read<0>();
  }
}
