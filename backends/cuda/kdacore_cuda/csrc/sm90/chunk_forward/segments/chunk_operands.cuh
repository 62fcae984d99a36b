// What inference keeps of a chunk and value head between launches: the matrices of backward/chunk.cuh that it needs, in one
// record, so that one bulk copy brings a chunk, or what of it the maps need, and a chunk touches one page of memory.
#pragma once

#include "sm90/chunk_backward/workspace.cuh"

struct ChunkOperands {
  float last[K];  // 2^(all steps of the chunk)
  TileImage kg, w, u, qg;
  SquareImage aqk;
};
