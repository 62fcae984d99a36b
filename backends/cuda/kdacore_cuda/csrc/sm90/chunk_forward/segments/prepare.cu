// chunk_kda in segments on Hopper, first launch if gates are bounded: the operands of every chunk, a
// record each (chunk_operands.cuh).
//
// All large products are a warpgroup's, which read images and need no registers for operands. Decays are
// taken relative to an exponent anchor that serves half a chunk; see prepare_shared_memory.cuh for the
// operands that follow from this, and for which region holds what when.
//
// Grid: a block of eight warps a unit, three blocks a multiprocessor, so that some load while others
// compute. Warps: in steps 1 to 3 each has a strip of 32 tokens and 32 channels; from step 4 on 16
// rows, the first four warps of aqk and aqt, the others of the triangular system and kt. Barriers of the
// block separate the steps.
//
// Macros from the host: G_FLOAT; LEAVING_ONLY, of a pack the operands of the sequence that
// goes on behind the slice, the one that ends at T.
#include "sm90/chunk_forward/segments/prepare_block.cuh"

KDA_KERNEL(THREADS, BLOCKS) prepare(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const Unit u = find_unit(p, block_index());
  if (!u.rows) return;
  if (LEAVING_ONLY && load_index(p.cu_seqlens, u.n + 1, p.flags & FLAG_CU64) != p.T) return;
  make_only_unit(p, u, shared);
}
