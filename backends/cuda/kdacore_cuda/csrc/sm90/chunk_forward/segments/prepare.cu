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
// Macros from the host: G_FLOAT, SHARED_BYTES; LEAVING_ONLY, of a pack the operands of the sequence that
// goes on behind the slice, the one that ends at T.
#include "common/half_types.cuh"
#include "sm90/chunk_forward/segments/prepare_unit.cuh"

KDA_KERNEL(THREADS, BLOCKS) prepare(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Unit u = find_unit(p, block_index());
  if (!u.rows) return;
#if LEAVING_ONLY
  if (load_index(p.cu_seqlens, u.n + 1, p.flags & FLAG_CU64) != p.T) return;
#endif
  const int thread = thread_index();
  const auto address = [&](u64 base, long long sb, long long st, long long sh, int head, int size) {
    return base + ((u64)(u32)u.batch * (u64)sb + (u64)(u32)u.first * (u64)st + (u64)(u32)head * (u64)sh) * size;
  };
  const u64 g = address(p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2);
  fetch_first_inputs(p, address(p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2), g, u.rows, shared, thread);
  const Parameter parameter =
      load_parameter(p, (long long)address(0, p.beta_sb, p.beta_st, p.beta_sh, u.hv, 1), u.rows, u.hv, thread);
  fetch_other_inputs(p, address(p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2), g,
                     address(p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2), u.rows, (u32)u.at, shared, thread);
  const Gate gate = make_gate(p, u.hv);
  store_parameter(p, parameter, u.rows, shared, gate, thread);
  make_unit(p, u.rows, gate, shared, [] {});
  if (thread == 0) {
    store_values(p, shared);
    copy_out_wait_read<0>();
  }
}
