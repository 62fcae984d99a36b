// The matrix A of a segment, which takes the state before it to the state after it without the
// segment's values: where the walk that computes A begins, and how A is stored.
#pragma once

#include "sm90/chunk_backward/state.cuh"
#include "sm90/warp.cuh"

// The unit matrix, for a lane whose first row is `row`.
__device__ __forceinline__ void unit_state(State& state, int row, int t) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      state.s[j][e] = row + 8 * (e >> 1) == 8 * j + 2 * t + (e & 1) ? 1.0f : 0.0f;
  }
}

// Stores a warp's 16 rows of A, from `row` on, to the two images at `images`, of its upper and lower
// bfloat16 parts. They are staged at `staging`, which must no longer be in use; `piece`: Lane.
__device__ __forceinline__ void store_map_rows(const State& state, u64 images, int row, u32 staging,
                                               u32 piece, int lane) {
  constexpr u32 ROWS = 16 * IMAGE_ROW;
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const Split s = split_tiles(state.s[2 * kk], state.s[2 * kk + 1]);
    const u32 to = staging + (kk >> 2) * ROWS + (piece ^ (kk & 3) << 5);
    store_matrix4(to, s.high);
    store_matrix4(to + 2 * ROWS, s.low);
  }
  fence_async_proxy();
  sync_warp();
  if (lane) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    copy_out(reinterpret_cast<void*>(images + i * (STATE_BYTES / 2) + row * IMAGE_ROW), staging + i * ROWS,
             ROWS);
  }
  copy_out_commit();
  copy_out_wait_read<0>();
}
