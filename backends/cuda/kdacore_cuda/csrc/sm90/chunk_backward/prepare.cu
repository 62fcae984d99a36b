// Backward of chunk_kda on Hopper, first launch: the operands of every chunk. With FOR_SEGMENTS it makes
// the records of the forward in segments (chunk_forward/segments/chunk_operands.cuh) if gates are
// unbounded; steps 3, 5 and 6 then differ (prepare_for_segments.cuh), and v is not read. Bounded gates
// have chunk_forward/segments/prepare.cu there.
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
// Macros from the host: G_FLOAT, BOUNDED (gates are bounded); LEAVING_ONLY, of a pack the
// operands of the sequence that goes on behind the slice, the one that ends at T.
#include "sm90/chunk_backward/prepare_block.cuh"

KDA_KERNEL(THREADS, BLOCKS) prepare(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Unit u = find_unit(p, block_index());
  if (!u.rows) return;
  if (LEAVING_ONLY && load_index(p.cu_seqlens, u.n + 1, p.flags & FLAG_CU64) != p.T) return;
  make_only_unit(p, u, shared);
}
