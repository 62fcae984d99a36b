// chunk_kda in segments on Hopper, first launch if gates are bounded: the operands of every chunk, a
// record each (chunk_operands.cuh).
//
// For a unit (64 tokens of one sequence and value head), with gc the log2 decay summed from the
// chunk's start, q and k normalised, beta activated:
//
//   kg = k 2^(gc_last - gc), qg = scale q 2^gc, last = 2^gc_last
//   aqk_ij = scale (q_i 2^(gc_i - gc_j)) . k_j for j <= i
//   inv = (I + tril(beta_i (k_i 2^(gc_i - gc_j)) . k_j, -1))^-1
//   w = inv beta k 2^gc, u = inv beta v
//
// The backward's prepare (chunk_backward/prepare.cu) computes the same with products of a warp's size,
// from images of its own; here all large products are a warpgroup's, which read images and need no
// registers for operands. Decays are taken relative to an exponent anchor that serves half a chunk;
// see prepare_shared_memory.cuh for the operands that follow from this, and for which region holds
// what when.
//
// Grid: a block of eight warps a unit, three blocks a multiprocessor, so that some load while others
// compute. Warps: in steps 1 to 3 each has a strip of 32 tokens and 32 channels; from step 4 on 16
// rows, the first four warps of aqk and w, the others of the triangular system and u. Step 5: the
// latter invert the system while the former load v. Barriers of the block separate the steps.
//
// Macros from the host: G_FLOAT, SHARED_BYTES.
#include "common/half_types.cuh"
#include "sm90/chunk_forward/segments/prepare_apply.cuh"
#include "sm90/chunk_forward/segments/prepare_inverse.cuh"
#include "sm90/chunk_forward/segments/prepare_strips.cuh"

KDA_KERNEL(THREADS, BLOCKS) prepare(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int thread = thread_index(), lane = thread & 31, warp = uniform(thread >> 5);
  const Strip s = make_strip(warp, lane);
  const float unit = exp2_fast(-p.centre);
  float x[4][8];
  {
    const Unit u = find_unit(p, block_index());
    if (!u.rows) return;

    // 1. Inputs to shared memory, g first; v to L2.
    const int g_size = G_FLOAT ? 4 : 2;
    fetch_gates(shared, first_row(u, p.g, p.g_sb, p.g_st, p.g_sh, u.hv, g_size), (int)p.g_st * g_size, u.rows,
                warp, lane);
    copy_async_commit();
    u32 bias_bits[4];
    load_biases(p, bias_bits, u.hv * K + 32 * s.slice + s.g);
    u32 beta_bits = 0;
    if (thread < u.rows) {
      const int size = type_size(p.beta_type);
      beta_bits = load_bits(reinterpret_cast<u64>(first_row(u, p.beta, p.beta_sb, p.beta_st, p.beta_sh, u.hv, size)) +
                                (u64)(u32)thread * (u64)p.beta_st * size,
                            p.beta_type);
    }
    fetch_tile<THREADS, SQUARE_BYTES>(shared + OFFSET(SharedMemory, k),
                                      first_row(u, p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2), (int)p.k_st * 2,
                                      u.rows, thread);
    fetch_tile<THREADS, SQUARE_BYTES>(shared + OFFSET(SharedMemory, q),
                                      first_row(u, p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2), (int)p.q_st * 2,
                                      u.rows, thread);
    copy_async_commit();
    const unsigned char* const v = first_row(u, p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2);
    if (thread < 2 * u.rows)
      prefetch_l2(v + (long long)(thread >> 1) * ((int)p.v_st * 2) + (thread & 1) * IMAGE_ROW);
    if (thread == 0)
      store_shared(shared + OFFSET(SharedMemory, value_rows), (u32) reinterpret_cast<u64>(v),
                   (u32)(reinterpret_cast<u64>(v) >> 32), (u32)u.rows, 0);
    const Gate gate = make_gate(p, u.hv);
    float bias[4];
    convert_biases(p, bias, bias_bits, gate);
    if (thread < C)
      store_beta(shared, thread < u.rows ? activate_beta(p, from_bits(beta_bits, p.beta_type)) : 0.0f, thread);

    // 2. Decays from the gate, norms of q and k.
    copy_async_wait<1>();
    sync_warp();
    load_steps(x, shared, s, gate, bias, u.rows);
    copy_async_wait<0>();
    sync_block();
    store_norms(p, shared, u.rows, warp, lane);
    sum_strip(x, shared, s, p.centre);
    sync_block();
  }

  // 3. Operands; kg, qg and last go to the record.
  unsigned char* const record =
      reinterpret_cast<unsigned char*>(p.last) + (u64)(u32)block_index() * sizeof(ChunkOperands);
#if KEEP_MASK
  const u64 policy = (u32)block_index() / (u32)p.HV & KEEP_MASK ? read_once_policy() : write_policy(true);
#else
  const u64 policy = write_policy(false);
#endif
  if (thread < K) write_decays(shared, thread, record);
  if (s.half)
    make_operands<1>(p.centre, shared, s, x, record, policy);
  else
    make_operands<0>(p.centre, shared, s, x, record, policy);
  fence_async_proxy();
  sync_block();

  // 4. Products of token pairs.
  if (thread == 0) {
    copy_out(record + OFFSET(ChunkOperands, kg), shared + OFFSET(SharedMemory, kg), TILE_BYTES, policy);
    copy_out_commit();
  }
  const bool system = warp >> 2;
  const int row_block = warp & 3;
  float pairs[PAIR_TILES][4];
  multiply_pairs(pairs, shared, system);
  if (thread == 0) copy_out_wait_read<0>();
  sync_block();  // aqk takes the place of kg, the system that of zq, v that of yk

  // 5. The inverse; meanwhile v is loaded and aqk stored.
  if (system) {
    store_system(row_block, pairs, shared, lane, unit);
    sync_warp();
    invert_diagonal(shared, row_block, lane);
    sync_threads(1, THREADS / 2);
    merge_column(shared, row_block, lane);
  } else {
    const uint4 from = load_shared_u4(shared + OFFSET(SharedMemory, value_rows));
    fetch_tile<THREADS / 2, KEYS_BYTES>(shared + keys_offset(0),
                                        reinterpret_cast<const unsigned char*>((u64)from.y << 32 | from.x),
                                        2 * (int)p.v_st, (int)from.z, thread);
    copy_async_commit();
    store_aqk(row_block, pairs, shared, lane, unit);
    fence_async_proxy();
    sync_threads(2, THREADS / 2);
    if (thread == 0) {
      copy_out(record + OFFSET(ChunkOperands, aqk), shared + OFFSET(SharedMemory, aqk), SQUARE_BYTES, policy);
      copy_out_commit();
      copy_out_wait_read<0>();
    }
    copy_async_wait<0>();
  }
  fence_async_proxy();
  sync_block();

  // 6. w and u.
  if (system)
    make_u(shared, row_block, lane);
  else
    make_w(shared, row_block, lane, unit);
  fence_async_proxy();
  sync_threads(1 + system, THREADS / 2);
  if ((thread & (THREADS / 2 - 1)) == 0) {
    if (system) {
      unsigned char* const u = record + OFFSET(ChunkOperands, u);
      copy_out(u, shared + OFFSET(SharedMemory, aqk), SQUARE_BYTES, policy);
      copy_out(u + SQUARE_BYTES, shared + keys_offset(0) + SQUARE_BYTES, HALF_SQUARE, policy);
      copy_out(u + SQUARE_BYTES + HALF_SQUARE, shared + keys_offset(1) + SQUARE_BYTES, HALF_SQUARE, policy);
    } else {
      copy_out(record + OFFSET(ChunkOperands, w), shared + OFFSET(SharedMemory, w), TILE_BYTES, policy);
    }
    copy_out_commit();
    copy_out_wait_read<0>();
  }
}
