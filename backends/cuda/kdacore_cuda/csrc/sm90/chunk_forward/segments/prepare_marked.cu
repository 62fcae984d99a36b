// chunk_kda in segments on Hopper, first launch of calls with checkpoints at chosen tokens: what
// prepare.cu (chunk_backward/prepare.cu if gates are unbounded) does for every chunk, and for each mark
// inside a chunk one more record, of the chunk cut off at the mark. output.cu takes a step with it, and
// the state after that step is the checkpoint (inner_marks.cuh).
//
// Grid: first a block for each mark and value head (these start first because they begin with more loads
// that depend on each other), then a block for each unit. Records come in the same order: that of mark i
// and head hv at place i * HV + hv, then the units'.
//
// Macros from the host: BOUNDED (gates are bounded), and those of that kernel.
#include "common/chunk_forward/marks.cuh"
#include "generated/prepare_marked_params.cuh"
#if BOUNDED
#include "sm90/chunk_forward/segments/prepare_block.cuh"
#else
#include "sm90/chunk_backward/prepare_block.cuh"
#endif

// The last sequence that begins at or before a position of the pack: the one that has it, if any.
__device__ __forceinline__ int sequence_at(const PrepareMarkedParams& p, int position) {
  int n = 0, beyond = p.cu_seqlens ? p.N : 1;
  while (beyond - n > 1) {
    const int middle = (n + beyond) >> 1;
    if (load_index(p.cu_seqlens, middle, p.flags & FLAG_CU64) <= position)
      n = middle;
    else
      beyond = middle;
  }
  return n;
}

// The tokens of a mark's chunk before it; no rows where there are none.
__device__ __forceinline__ Unit find_marked_unit(const PrepareMarkedParams& p, int index) {
  Unit u = {};
  const int mark = divide(index, p.hv_factor, p.hv_shift);
  u.hv = index - mark * p.HV;
  u.h = u.hv / (p.HV / p.H);
  u.at = index;
  const int position = mark_token(p, mark, 0);
  if (position < 0) return u;
  u.n = sequence_at(p, position);
  const Sequence s = find_sequence(p, u.n);
  const int token = position - (int)s.first;
  if (token >= s.length) return u;
  u.rows = token % C;
  u.first = position - u.rows;
  return u;
}

KDA_KERNEL(THREADS, BLOCKS) prepare_marked(KDA_PARAM PrepareMarkedParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int unit = block_index() - (int)p.marks * p.HV;
  const Unit u = unit < 0 ? find_marked_unit(p, block_index()) : find_unit(p, unit);
  if (u.rows) make_only_unit(p, u, shared);
}
