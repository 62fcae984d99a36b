// The order of a row's 16-byte pieces in shared memory.
#ifndef KDACORE_EXCHANGED_CUH
#define KDACORE_EXCHANGED_CUH

#include "common/ptx.cuh"

// Bytes from the begin of row `row` to its piece `piece`: such that eight rows' lie in different banks. Both halves of 32 bytes stay side
// by side, for an asynchronous copy that parts them is read from L2 twice.
__device__ __forceinline__ u32 exchanged(int row, int piece) { return (piece ^ (row & 7)) << 4; }

#endif
