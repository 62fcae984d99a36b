// Swizzle: the order of a row's 16-byte pieces in shared memory.
#pragma once

#include "common/ptx.cuh"

// Byte offset of piece `piece` from the start of row `row`. The same piece of eight neighbouring
// rows lies in different banks. Both halves of 32 bytes stay neighbours: an asynchronous copy that
// separates them reads L2 twice.
__device__ __forceinline__ u32 swizzled_piece(int row, int piece) { return (piece ^ (row & 7)) << 4; }
// The same from the start of an array of 128-byte rows; this is the 128-byte swizzle of wgmma.
__device__ __forceinline__ u32 swizzled(int row, int piece) { return row * 128 + swizzled_piece(row, piece); }
