// Heads that are smaller than what kernels compute with: which 16 bytes of one there are.
//
// Macro from the host: NARROW, 1: such heads; 0, or none: no instruction asks.
#pragma once

#ifndef NARROW
#define NARROW 0
#endif

constexpr int PIECE = 8;  // 16-bit elements of 16 bytes

// Whether a head of `size` elements has those from element `first` on.
__device__ __forceinline__ bool has_piece(int first, int size) { return !NARROW || first < size; }
