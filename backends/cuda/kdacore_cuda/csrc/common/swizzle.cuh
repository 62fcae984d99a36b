// The order of a row's 16-byte pieces in shared memory.
#pragma once

#include "common/ptx.cuh"

// Bytes from the begin of row `row` to its piece `piece`: such that eight rows' lie in different banks. Both halves of 32 bytes stay side
// by side, for an asynchronous copy that parts them is read from L2 twice.
__device__ __forceinline__ u32 swizzled_piece(int row, int piece) { return (piece ^ (row & 7)) << 4; }
// The same from the begin of an array of rows of 128 bytes: as the matrix unit reads them.
__device__ __forceinline__ u32 swizzled(int row, int piece) { return row * 128 + swizzled_piece(row, piece); }
