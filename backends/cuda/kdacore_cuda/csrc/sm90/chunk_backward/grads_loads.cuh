// Loads of a unit's arrays to shared memory, and stores of its rows.
#pragma once

#include "sm90/chunk_backward/grads_shared_memory.cuh"

// Token `token`, or the last one there is: a readable address. If there is no unit, `from` is the
// start of an array.
__device__ __forceinline__ const void* row_of(u64 from, int token, int rows, u32 stride) {
  return reinterpret_cast<const void*>(from + (u64)(u32)(token < rows ? token
                                                         : rows > 0   ? rows - 1
                                                                      : 0) *
                                                  stride);
}

// Of the next unit: number of rows (0: there is none) and the address of its first row in each
// array that a warp loads for itself.
struct NextUnit {
  int rows;
  u64 q, k, v, g;
};
__device__ __forceinline__ NextUnit next_unit(u32 unit) {
  return {unit_int(unit, OFFSET(SharedUnit, rows)), unit_long(unit, OFFSET(SharedUnit, q)),
          unit_long(unit, OFFSET(SharedUnit, k)), unit_long(unit, OFFSET(SharedUnit, v)),
          unit_long(unit, OFFSET(SharedUnit, g))};
}

// The first of the eight channels of which this lane loads and stores rows.
__device__ __forceinline__ int own_piece(const Lane& l) {
  return 64 * l.channel_half + 16 * l.warp + PIECE * (l.lane & 1);
}

// The warp's own 32 tokens of 16 channels of a bfloat16 rows array, zeros past the unit's rows and beyond its `size`
// channels. `from`: the unit's first token; a token's stride in elements.
__device__ __forceinline__ void fetch_own(u32 image, u64 from, long long stride, int rows, int size, const Lane& l) {
  const bool real = has_piece(own_piece(l), size);
  if (real) from += 2 * own_piece(l);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = l.token + 16 * i;
    copy_async16_of_line(image + l.piece + 16 * IMAGE_ROW * i, row_of(from, token, rows, 2 * (u32)stride),
                         real && token < rows);
  }
}

// Offset of 16-byte piece `piece` (0..31) of token `row` of a float32 gate.
__device__ __forceinline__ u32 gate_piece(int row, int piece) {
  return row * GATE_ROW + swizzled_piece(row, piece);
}

__device__ __forceinline__ void fetch_gate(const ChunkBackwardParams& p, u32 shared, const NextUnit& next,
                                           const Lane& l) {
  const int rows = next.rows;
  if constexpr (G_FLOAT) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = HALF * l.token_half + l.g + 8 * i, piece = 16 * l.channel_half + 4 * l.warp + l.t;
      const bool real = has_piece(4 * piece, channels_of(p));
      copy_async16_of_line(shared + OFFSET(SharedMemory, g) + gate_piece(token, piece),
                           row_of(next.g + (real ? 16 * piece : 0), token, rows, 4 * (u32)p.g_st),
                           real && token < rows);
    }
  } else {
    fetch_own(shared + OFFSET(SharedMemory, g), next.g, p.g_st, rows, channels_of(p), l);
  }
}

// All threads: a block of d_o, which every warp reads.
__device__ __forceinline__ void fetch_outputs(const ChunkBackwardParams& p, u32 shared, u32 unit, int block,
                                              const Lane& l) {
  const int rows = unit_int(unit, OFFSET(SharedUnit, rows)), piece = l.thread & 15, token = l.thread >> 4;
  const u32 to =
      shared + OFFSET(SharedMemory, d_o) + (piece >> 3) * SQUARE_BYTES + swizzled(token, piece & 7);
  const bool real = has_piece(PIECE * piece, values_of_block(p, block));
  const u64 from = p.d_o + 2 * values_of(p) * unit_long(unit, OFFSET(SharedUnit, row)) + 2 * V * block +
                   (real ? 16 * piece : 0);
  const u32 stride = 2 * values_of(p) * (u32)p.HV;
  copy_async16(to, row_of(from, token, rows, stride), real && token < rows);
  copy_async16(to + 32 * IMAGE_ROW, row_of(from, token + 32, rows, stride), real && token + 32 < rows);
}

// One thread: `bytes` from `offset` on of unit n's image (of `size` bytes) in a workspace array;
// `bar` counts them.
__device__ __forceinline__ void fetch_image(u32 to, u64 array, u64 place, u32 size, u32 bar, u32 offset,
                                            u32 bytes) {
  copy_in(to + offset, reinterpret_cast<const void*>(array + place * size + offset), bytes, bar);
}
// One thread: of 64 channels of h, the first (0) or second 64 values.
__device__ __forceinline__ void fetch_values_of_h(const ChunkBackwardParams& p, u32 shared, u64 place,
                                                  int half) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const u32 offset = part * (STATE_BYTES / 2) + half * (STATE_BYTES / 4);
    fetch_image(shared + OFFSET(SharedMemory, h), p.h, place, STATE_BYTES,
                shared + OFFSET(SharedMemory, states_full), offset, STATE_BYTES / 4);
  }
}
// The place of a block's values in the workspace, given that of the unit's operands.
__device__ __forceinline__ u64 value_place(const ChunkBackwardParams& p, u64 place, int block) {
  return NARROW ? place * p.value_blocks + block : place;
}
// One thread: the part of the workspace of a block of values of the thread block's unit n, with the first block what the
// unit's tokens and channels have.
__device__ __forceinline__ void fetch_workspace(const ChunkBackwardParams& p, u32 shared, int n, int block) {
  const u64 own_place = unit_long(unit_at(shared, n), OFFSET(SharedUnit, place)),
            place = value_place(p, own_place, block);
  const auto fetch = [&](u32 to, u64 array, u64 at, u32 bytes) {
    fetch_image(shared + to, array, at, bytes, shared + OFFSET(SharedMemory, pairs_full), 0, bytes);
  };
  const bool first = !NARROW || block == 0;
  barrier_expect(shared + OFFSET(SharedMemory, pairs_full), 2 * TILE_BYTES + (first ? ROWS_BYTES + LAST_BYTES : 0));
  fetch(OFFSET(SharedMemory, dr), p.dr, place, TILE_BYTES);
  if (!SK_IN_U) fetch(OFFSET(SharedMemory, u), p.u, place, TILE_BYTES);
  if (first) {
    fetch(OFFSET(SharedMemory, rows) + (n & 1) * ROWS_BYTES, p.rows, own_place, ROWS_BYTES);
    fetch(OFFSET(SharedMemory, last) + (n & 1) * LAST_BYTES, p.last, own_place, LAST_BYTES);
  }
  barrier_expect(shared + OFFSET(SharedMemory, states_full), 2 * STATE_BYTES);
  if (DECAYS_IN_STATES) {
    fetch_values_of_h(p, shared, place, 1);
  } else {
    fetch_image(shared + OFFSET(SharedMemory, h), p.h, place, STATE_BYTES,
                shared + OFFSET(SharedMemory, states_full), 0, STATE_BYTES);
    fetch_image(shared + OFFSET(SharedMemory, dh), p.dh, place, STATE_BYTES,
                shared + OFFSET(SharedMemory, states_full), 0, STATE_BYTES);
  }
}
// The images whose place is occupied until all pairs are summed: by saved decays, and by sk if
// SK_IN_U. The barriers expect their bytes already.
__device__ __forceinline__ void fetch_workspace_after_pairs(const ChunkBackwardParams& p, u32 shared, int n,
                                                            int block) {
  const u64 place = value_place(p, unit_long(unit_at(shared, n), OFFSET(SharedUnit, place)), block);
  if (SK_IN_U)
    fetch_image(shared + OFFSET(SharedMemory, u), p.u, place, TILE_BYTES,
                shared + OFFSET(SharedMemory, pairs_full), 0, TILE_BYTES);
  if (DECAYS_IN_STATES) {
    fetch_values_of_h(p, shared, place, 0);
    fetch_image(shared + OFFSET(SharedMemory, dh), p.dh, place, STATE_BYTES,
                shared + OFFSET(SharedMemory, states_full), 0, STATE_BYTES);
  }
}

// Where a lane's 16 bytes of the unit's bfloat16 rows go: rows left from its token on, and bytes
// into an array.
struct OutputRows {
  int left;
  u64 at;
};
// Of an array whose heads have `size` elements: from element `first` on, of which there are `count`.
__device__ __forceinline__ OutputRows output_rows(const ChunkBackwardParams& p, u32 unit, int size, int first,
                                                  int count, const Lane& l) {
  const u64 at = 2 * size * unit_long(unit, OFFSET(SharedUnit, row)) + 2 * first + 2 * own_piece(l);
  const int left = unit_int(unit, OFFSET(SharedUnit, rows)) - l.token;
  return {has_piece(own_piece(l), count) ? left : 0, at + (u64)(u32)l.token * (2 * size * (u32)p.HV)};
}
__device__ __forceinline__ OutputRows channel_rows(const ChunkBackwardParams& p, u32 unit, const Lane& l) {
  return output_rows(p, unit, channels_of(p), 0, channels_of(p), l);
}
// A bfloat16 tile to rows of [B, T, HV, `size`] through the warp's own rows of `image`, which are no
// longer needed.
__device__ __forceinline__ void store_own(u32 image, const Operand& r, const ChunkBackwardParams& p,
                                          u64 array, int size, const OutputRows& to, const Lane& l) {
  sync_warp();
#pragma unroll
  for (int i = 0; i < 2; ++i) store_matrix4_transposed(image + l.own + 16 * IMAGE_ROW * i, r[i]);
  sync_warp();
  array += to.at;
  const uint4 x = load_shared_u4(image + l.piece), y = load_shared_u4(image + l.piece + 16 * IMAGE_ROW);
  if (to.left > 0) store_global(reinterpret_cast<void*>(array), x);
  if (to.left > 16) store_global(reinterpret_cast<void*>(array + (u64)(u32)p.HV * (2 * size * 16)), y);
  sync_warp();  // before the next unit's rows are loaded here
}

// A float32 tile to such rows of `size` elements, straight from registers: eight channels of a token are the 32
// bytes of a sector. A warp's 16 channels are all there, or none is.
template <class F>
__device__ __forceinline__ void store_floats(F f, const ChunkBackwardParams& p, u64 array, u32 unit, int size,
                                             const Lane& l) {
  const int token = HALF * l.token_half + 2 * l.t, left = unit_int(unit, OFFSET(SharedUnit, rows)) - token;
  const u32 stride = size * (u32)p.HV;
  const int real = has_piece(64 * l.channel_half + 16 * l.warp, size) ? left : 0;
  float* to = reinterpret_cast<float*>(array) + size * unit_long(unit, OFFSET(SharedUnit, row)) + l.channel +
              (u64)(u32)token * stride;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * j + e < real) to[0] = f(j, e), to[8] = f(j, e + 2);
      to += e ? 7 * (u64)stride : stride;
    }
  }
  sync_warp();
}
