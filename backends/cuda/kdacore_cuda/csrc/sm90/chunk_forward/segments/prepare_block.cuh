// A block that makes the operands of one unit.
#pragma once

#include "sm90/chunk_forward/segments/prepare_unit.cuh"

__device__ __forceinline__ void make_only_unit(const ChunkBackwardParams& p, const Unit& u, u32 shared) {
  const int thread = thread_index();
  const auto address = [&](u64 base, long long sb, long long st, long long sh, int head, int size) {
    return base +
           ((u64)(u32)u.batch * (u64)sb + (u64)(u32)u.first * (u64)st + (u64)(u32)head * (u64)sh) * size;
  };
  // Parameters first: what is requested after rows comes after them. They are used in basic blocks of their own,
  // so that the assembler does not wait for one of them before the last rows have been requested.
  const long long beta = (long long)address(0, p.beta_sb, p.beta_st, p.beta_sh, u.hv, 1);
  const Parameter parameter = load_parameter(p, beta, u.rows, u.hv, thread);
  fetch_inputs(p, address(p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2), address(p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2),
               address(p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2), u.rows, shared, thread);
  store_beta(p, parameter, u.rows, shared, thread);
  const Gate gate = gate_from(p, parameter.A_log);
  store_bias(p, parameter, shared, thread);
  make_unit(p, u.rows, gate, shared);
  if (thread == 0) {
    store_products(p, shared);
    copy_out_wait_read<0>();
  }
}
