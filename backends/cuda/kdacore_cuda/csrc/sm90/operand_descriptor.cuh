// How warpgroup products find an operand in shared memory.
#pragma once

#include "common/ptx.cuh"

// A right operand in 128-byte rows, 16-byte pieces swizzled by row. Rows are tokens and the sum
// runs along them (not transposed: `group` is the distance of 8 rows), or the sum runs over rows
// (transposed: `column` is the distance of 64 columns, `group` that of 8 rows).
__device__ __forceinline__ u64 operand_descriptor(u32 address, u32 column, u32 group) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(column >> 4) << 16 | (u64)(group >> 4) << 32 | 1ull << 62;
}
// One in 32-byte rows, both pieces of which are exchanged in four rows of eight; `column` is the distance of 16 columns.
__device__ __forceinline__ u64 narrow_operand_descriptor(u32 address, u32 column, u32 group) {
  return operand_descriptor(address, column, group) | 3ull << 62;
}
