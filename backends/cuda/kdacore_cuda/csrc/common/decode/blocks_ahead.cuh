// What a block asks the L2 for on behalf of a later one. Of more blocks than run at once, those on a multiprocessor
// begin together and compute together, and the device memory waits meanwhile. So a block whose own loads have come asks
// for the state of the block that starts as many blocks later as run at once. Nothing waits for it.
//
// Macros from the host: AHEAD, what is asked for: 0, nothing; 1, states. STATE_LAST: a block asks for its own state
// behind everything that the convolution waits for, so that this does not queue behind the states of all blocks.
#pragma once

#include "common/recurrent/token.cuh"
#include "sm90/bulk_copies.cuh"

// The block that starts about when this one ends; itself if there is none.
template <class Params>
__device__ __forceinline__ u32 block_ahead(const Params& p) {
  const u32 block = block_index(), later = block + (u32)p.at_once;
  return p.at_once && later < (u32)grid_blocks() ? later : block;
}
