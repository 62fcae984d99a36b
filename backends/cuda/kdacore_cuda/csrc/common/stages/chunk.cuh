// What the training stages share: which 64 tokens of which sequence and value head a block takes.
#pragma once

#include "common/half_types.cuh"
#include "common/loads.cuh"
#include "generated/stage_params.cuh"

// Macros from the host: K_DIM, V_DIM (recompute only), HALF_F16.
constexpr int K = K_DIM;
constexpr int C = 64;

struct Chunk {
  int hv, h, rows;         // value head, query/key head, tokens (0: an unused slot of the bound)
  long long batch, first;  // batch row, first token in it
};

// Finds the chunk of slot `slot` in a pack, where each sequence has as many slots as chunks. All
// lanes of a warp together, several sequences a lane.
template <typename Params>
__device__ __forceinline__ void find_packed(const Params& p, int slot, Chunk& c) {
  constexpr int LANE_SEQUENCES = 4;
  const bool wide = p.flags & FLAG_CU64;
  const int lane = thread_index() & 31;
  c.batch = 0;
  c.rows = 0;
  c.first = 0;
  for (int n0 = 0; n0 < p.N; n0 += 32 * LANE_SEQUENCES) {
    int start[LANE_SEQUENCES + 1], lane_chunks = 0;  // sequences past the last one are empty
#pragma unroll
    for (int i = 0; i <= LANE_SEQUENCES; ++i) {
      const int n = n0 + LANE_SEQUENCES * lane + i;
      start[i] = (int)load_index(p.cu_seqlens, n < p.N ? n : p.N, wide);
    }
#pragma unroll
    for (int i = 0; i < LANE_SEQUENCES; ++i) lane_chunks += (start[i + 1] - start[i] + C - 1) / C;
    int before = lane_chunks;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int other = shuffle(before, lane >= d ? lane - d : lane);
      if (lane >= d) before += other;
    }
    const int total = shuffle(before, 31);
    // At most one lane has found it; the sum broadcasts it.
    int first = 0, rows = 0, inside = slot - (before - lane_chunks);
#pragma unroll
    for (int i = 0; i < LANE_SEQUENCES; ++i) {
      const int chunks = (start[i + 1] - start[i] + C - 1) / C;
      if (inside >= 0 && inside < chunks) {
        const int left = start[i + 1] - start[i] - inside * C;
        first = start[i] + inside * C;
        rows = left < C ? left : C;
      }
      inside -= chunks;
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) {
      first += shuffle_xor(first, d);
      rows += shuffle_xor(rows, d);
    }
    if (rows) {
      c.first = first;
      c.rows = rows;
      return;
    }
    slot -= total;
  }
}

// Which chunk and value head item `item` is. Items of neighbouring value heads are neighbours, so
// that rows of one token are loaded together and q, k are shared in L2.
template <typename Params>
__device__ __forceinline__ Chunk make_chunk(const Params& p, int item) {
  Chunk c;
  const int slot = item / p.HV;
  c.hv = item - slot * p.HV;
  c.h = p.HV == p.H ? c.hv : c.hv / (p.HV / p.H);
  if (p.cu_seqlens) {
    find_packed(p, slot, c);
    return c;
  }
  const int batch = slot < p.NT ? 0 : slot / p.NT;
  c.batch = batch;
  c.first = (long long)(slot - batch * p.NT) * C;
  const long long left = p.T - c.first;
  c.rows = left < C ? (int)left : C;
  return c;
}

// Address of row `first` of an input; bytes from one token to the next.
struct Rows {
  const unsigned char* at;
  int step;
};
__device__ __forceinline__ Rows make_rows(u64 base, long long sb, long long st, long long sh, int size,
                                          const Chunk& c, int head) {
  const long long offset = c.batch * sb + c.first * st + head * sh;
  return {reinterpret_cast<const unsigned char*>(base) + offset * size, (int)(st * size)};
}
__device__ __forceinline__ const unsigned char* row_at(const Rows& r, int row) {
  return r.at + (long long)row * r.step;
}

// Offset in elements of row `row` of a contiguous [B, T, HV, width] output.
template <typename Params>
__device__ __forceinline__ long long output_at(const Params& p, const Chunk& c, int row, int width) {
  return ((c.batch * p.T + c.first + row) * p.HV + c.hv) * width;
}
