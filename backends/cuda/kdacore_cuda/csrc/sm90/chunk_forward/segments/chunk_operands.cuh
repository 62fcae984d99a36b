// The operands of a chunk and value head that the forward in segments keeps between launches: those
// of chunk_backward/workspace.cuh that it needs, contiguous, so that one bulk copy loads a chunk
// (or the part that maps need) and a chunk lies in one page.
#pragma once

#include "sm90/chunk_backward/workspace.cuh"

struct ChunkOperands {
  float last[K];  // 2^(all steps of the chunk)
  TileImage kg, w, u, qg;
  SquareImage aqk;
};
