// A block that makes the operands of one unit.
#pragma once

#include "sm90/chunk_backward/prepare_unit.cuh"

__device__ __forceinline__ void make_only_unit(const ChunkBackwardParams& p, const Unit& u, u32 shared) {
  const int thread = thread_index();
  const auto address = [&](u64 base, long long sb, long long st, long long sh, int head, int size) {
    return reinterpret_cast<u64>(make_rows(u, base, sb, st, sh, head, size).at);
  };
  // Parameters first: what is requested after rows comes after them. They are used in basic blocks of their own,
  // so that the assembler does not wait for one of them before the last rows have been requested.
  const long long beta = u.batch * p.beta_sb + u.first * p.beta_st + u.hv * p.beta_sh;
  const float A_log = load_A_log(p, u.hv);
  const u32 parameter = load_parameter(p, beta, u.rows, u.hv, thread);
  const u64 g = address(p.g, p.g_sb, p.g_st, p.g_sh, u.hv, G_FLOAT ? 4 : 2);
  fetch_first_inputs(p, address(p.k, p.k_sb, p.k_st, p.k_sh, u.h, 2), g, u.rows, shared, thread);
  fetch_other_inputs(p, address(p.q, p.q_sb, p.q_st, p.q_sh, u.h, 2), g,
                     address(p.v, p.v_sb, p.v_st, p.v_sh, u.hv, 2), u.rows, (u32)u.at, shared, thread);
  store_beta(p, parameter, u.rows, shared, thread);
  const Gate gate = gate_from(p, A_log);
  store_bias(p, parameter, shared, gate, thread);
  make_unit(p, u.rows, gate, shared, [] {});
  if (thread == 0) store_products(p, shared);
  if constexpr (NARROW) make_further_values(p, shared);
  if (thread == 0) copy_out_wait_read<0>();
}
