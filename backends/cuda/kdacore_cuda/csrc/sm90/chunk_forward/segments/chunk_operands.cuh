// What inference keeps of a chunk and value head between launches: the matrices of backward/chunk.cuh that it needs, in one
// record, so that one bulk copy brings a chunk, or what of it the maps need, and a chunk touches one page of memory.
#pragma once

#include "sm90/chunk_backward/workspace.cuh"

namespace chunk_operands {

constexpr u32 LAST_BYTES = 4 * K;  // 2^(all steps of the chunk)
constexpr u32 LAST = 0;
constexpr u32 KG = LAST + LAST_BYTES;
constexpr u32 W = KG + TILE_BYTES;
constexpr u32 U = W + TILE_BYTES;
constexpr u32 QG = U + TILE_BYTES;
constexpr u32 AQK = QG + TILE_BYTES;
constexpr u32 BYTES = AQK + SQUARE_BYTES;

}  // namespace record
