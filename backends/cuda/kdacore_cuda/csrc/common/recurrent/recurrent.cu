// fused_recurrent_kda: the recurrence token by token, the state in registers, read and written
// once. For each token:
//
//   S = diag(2^g) S;   u = beta r_k (v - r_k k S);   S = S + k u^T;   o = scale r_q q S
//
// with r_q, r_k the inverse norms of q and k (1 without l2norm). kdacore/contract/state_rows.py says
// which pool rows are read and written. A sequence without a slot is padding: its output is zero.
//
// Grid: a block takes one sequence and value head and COLUMNS columns of V. How lanes hold the
// state follows its layout in memory, so that a warp always reads whole 128-byte lines:
// state_v_first.cuh, where warps share nothing, and state_k_first.cuh, where warps add their sums
// through shared memory with one barrier a token.
//
// The time depends on how soon every block has issued all its loads, so these come in this order:
// the pool index, what does not depend on it while that is loaded, the state as soon as the index
// is there. Gates and norms are computed while the state is loaded.
#include "common/recurrent/decode.cuh"

KDA_KERNEL(WARPS * 32, MIN_BLOCKS) recurrent(KDA_PARAM RecurrentParams p) {
  KDA_SHARED(memory);
  decode(p, shared_address(memory));
}
