// What a unit of prepare is made of, where a block computes one unit after another.
#pragma once

#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/head_dims.cuh"

// As the dispatcher of chunk_forward/dataflow/prepare_units.cu hands it out.
struct alignas(16) UnitInputs {
  u64 q, k, g;     // addresses of row 0
  long long beta;  // element of row 0
  int hv, rows;
  u32 at;  // place in the workspace
};
