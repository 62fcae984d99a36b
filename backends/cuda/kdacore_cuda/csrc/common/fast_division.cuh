// Divisions by numbers that are the same for the whole launch. The host computes a factor and a shift for
// each (division() of request_encoding.py). A division of integers takes about 20 instructions and 100 cycles.
#pragma once

#include "common/ptx.cuh"

// n / divisor for 0 <= n < 2^31.
__device__ __forceinline__ int divide(int n, long long factor, int shift) {
  return (int)((u64)(u32)n * (u32)factor >> shift);
}
