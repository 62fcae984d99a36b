// The operands of a chunk and value head that the forward in segments keeps between launches, one
// record each, contiguous, so that one bulk copy loads a chunk (or the part that maps need) and a chunk
// lies in one page. Images as in chunk_backward/workspace.cuh.
//
// With gc the log2 decay summed from the chunk's start, q and k normalised, beta activated:
//
//   kd = k 2^gc, kg = k 2^(gc_last - gc), qg = scale q 2^gc, last = 2^gc_last
//   aqk_ij = scale (q_i 2^(gc_i - gc_j)) . k_j for j <= i
//   T = (I + tril(beta_i (k_i 2^(gc_i - gc_j)) . k_j, -1))^-1 diag(beta)
//
// a chunk takes the state S (V by K) and its values v (64 by V) to
//
//   r = v^T - S kd^T;   o^T = S qg^T + r (aqk T)^T;   S' = S diag(last) + r (T^T kg)
//
// This is the usual w = T kd, u = T v, S' = S diag(last) + (u^T - S w^T) kg with T moved to the other
// side, which leaves v as the caller has it: a record has neither u nor w beside kg, and the launch that
// makes records does not read v.
#pragma once

#include "sm90/chunk_backward/workspace.cuh"

struct ChunkOperands {
  float last[K];
  TileImage kt;  // T^T kg
  TileImage kd, qg;
  SquareImage aqt;  // aqk T
};
