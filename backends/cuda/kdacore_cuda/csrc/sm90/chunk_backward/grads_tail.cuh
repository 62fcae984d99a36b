// Zeros for the gradients of rows that belong to no sequence: those beyond a pack's last offset.
#pragma once

#include "common/clear_rows.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/head_dims.cuh"

// By all threads of the grid. `qk_bytes`: of a head of dq and dk; `g_size`: bytes of an element of dg.
__device__ __forceinline__ void clear_gradient_tail(const ChunkBackwardParams& p, int qk_bytes, int g_size,
                                                    const Share& own) {
  if (!(p.flags & FLAG_CLEAR_TAIL)) return;
  const long long end = load_index(p.cu_seqlens, p.N, p.flags & FLAG_CU64);
  if (end >= p.T) return;
  const auto clear = [&](u64 array, long long row_bytes) {
    clear_bytes(array + end * row_bytes, array + p.T * row_bytes, own);
  };
  const long long heads = p.HV;
  clear(p.dq, heads * qk_bytes);
  clear(p.dk, heads * qk_bytes);
  clear(p.dv, heads * values_of(p) * 2);
  clear(p.dg, heads * channels_of(p) * g_size);
#pragma unroll 1
  for (long long i = end * p.HV + own.thread; i < p.T * p.HV; i += own.threads)
    store_scalar(p.dbeta, i, p.beta_type, 0.0f);
}
