// Backward of the gated delta rule on Hopper, last launch: gradients of a chunk and key head, looping over its value
// heads. With the formulas of record.cuh and backward_workspace.cuh, S the state at the chunk's start and R the
// gradient of the state at its end, for each value head:
//
//   x_ij = beta_j 2^(G_i - G_j) d_o_i . u_j,   y_ij = -beta_j 2^(G_i - G_j) dv_i . u_j
//   dq += output_i S^T d_o_i,   dk += to_end_j R^T u_j - state_j S^T dv_j     and their products with q and k, which
//                                                                             are what the decays get
//   dbeta_j = u_j . dv_j / beta_j
//
// and for all of them together, with c and r the factors of q and k,
//
//   dq_i += c_i sum over j of x_ij r_j k_j
//   dk_j += r_j sum over i of (x_ij c_i q_i + y_ij r_i k_i),  dk_i += r_i sum over j of y_ij r_j k_j
//
// which then go through the norms. A decay gets x and y weighed with q . k and k . k, by rows less by columns; these
// are summed as they are, for what is left is small against its parts where decays are fast.
//
// Grid: at most a block a multiprocessor; block b takes units b, b + grid, ... Warps: a warpgroup for pairs of tokens,
// one for what q is multiplied with, one for what k is, and four warps that load. Each goes ahead of the others as far as
// the stages allow; they meet for a unit's last products. Shared memory and barriers: grads_shared_memory.cuh.
#include "sm90/gated_delta/grads_gate.cuh"
#include "sm90/gated_delta/grads_loads.cuh"
#include "sm90/gated_delta/grads_pairs.cuh"

KDA_SHARED_BYTES(sizeof(SharedMemory));

// Where a role is.
struct Position {
  u32 shared;
  HeadRing heads;
  KeyRing keys;
  StateRing states;
  StateGradRing state_grads;
  SumsRing sums;
  PairsRing pairs;
  __device__ __forceinline__ u32 tile(u32 offset) const { return heads.stage() + offset; }
  __device__ __forceinline__ u32 head_scalars() const {
    return shared + OFFSET(SharedMemory, head) + heads.slot * (u32)sizeof(HeadScalars);
  }
  __device__ __forceinline__ u32 key_scalars() const {
    return shared + OFFSET(SharedMemory, key) + keys.slot * (u32)sizeof(KeyScalars);
  }
};
__device__ __forceinline__ Position make_position(u32 shared) {
  return {shared, {shared}, {shared}, {shared}, {shared}, {shared}, {shared}};
}
// Calls head(unit, value head, whether it is the first, whether it is the last) and unit(unit) for all of the block's.
template <class Head, class End>
__device__ __forceinline__ void each_unit(const GatedDeltaBackwardParams& p, Position& at, Head head,
                                          End end) {
  const int group = divide(p.HV, p.h_factor, p.h_shift);
#pragma unroll 1
  for (;;) {
    at.heads.wait_full();
    const KeyUnit u = load_unit(at.shared, at.keys.slot);
    if (!u.rows) break;
#pragma unroll 1
    for (int i = 0; i < group; ++i) {
      if (i) at.heads.wait_full();
      head(u, u.h * group + i, i == 0, i == group - 1);
    }
    end(u);
  }
}
__device__ __forceinline__ void release_head(Position& at, const Lane& l) {
  warp_arrive(at.heads.empty(), l.lane);
  at.heads.next();
}
__device__ __forceinline__ void release_keys(Position& at, const Lane& l) {
  warp_arrive(at.keys.empty(), l.lane);
  at.keys.next();
}
__device__ __forceinline__ void load_row_factors(float (&x)[2], u32 from, const Lane& l) {
  x[0] = load_shared1(from + 4 * l.row(0)), x[1] = load_shared1(from + 4 * l.row(1));
}

// --- pairs ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void compute_pairs(const GatedDeltaBackwardParams& p, u32 shared, const Lane& l) {
  constexpr int FINISHING = ROLE_WARPS - 1;  // the warp with the sums of all columns
  Position at = make_position(shared);
  KeyPairs of_queries, of_keys;
  PairSums x, y;
  each_unit(
      p, at,
      [&](const KeyUnit& u, int hv, bool is_first, bool is_last) {
        const u32 scalars = at.head_scalars(), of_u = at.tile(OFFSET(HeadStage, u));
        if (is_first) {
          const u32 q = at.keys.stage() + OFFSET(KeyTiles, q), k = at.keys.stage() + OFFSET(KeyTiles, k),
                    norms = at.key_scalars() + OFFSET(KeyScalars, k_norm);
          multiply_rows(x, q, k);
          pack_key_pairs(of_queries, x, at.key_scalars() + OFFSET(KeyScalars, q_factor), norms, l);
          multiply_rows(x, k, k);
          pack_key_pairs(of_keys, x, norms, norms, l);
#pragma unroll
          for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[j][e] = y[j][e] = 0.0f;
          }
        }
        GateInputs gate;
        if (l.block == FINISHING) gate = load_gate(p, u, hv, l.lane);
        const float last = exp2_fast(load_shared1(scalars + OFFSET(HeadScalars, sum) + 4 * (C - 1)));
        float rows[2] = {}, columns[4 * C_TILES] = {};
        {
          PairSums products;
          multiply_rows(products, at.tile(OFFSET(HeadStage, d_o)), of_u);
          weigh_pairs<QUERIES>(x, rows, columns, products, of_queries, scalars, l);
          multiply_rows(products, at.tile(OFFSET(HeadStage, dv)), of_u);
          weigh_pairs<KEYS>(y, rows, columns, products, of_keys, scalars, l);
        }
        if (!is_last) release_head(at, l);
        add_over_columns(columns, l);
        add_over_row(rows);
        columns[0] = -columns[0], columns[1] = -columns[1];
        add_rows(columns, rows, l);
        add_over_warps(columns, shared + OFFSET(SharedMemory, columns), l);
        if (l.block != FINISHING) return;
        float d[2] = {columns[0], columns[1]};
        at.sums.wait_full();
        sum_decay_gradients(d, shared + OFFSET(SharedMemory, of_queries),
                            shared + OFFSET(SharedMemory, of_keys), last, l.lane);
        warp_arrive(at.sums.empty(), l.lane);
        at.sums.next();
        store_gate_gradient(p, u, hv, gate, d, l.lane);
      },
      [&](const KeyUnit&) {
        TokenOperand of_x, of_y;
        const u32 norms = at.key_scalars() + OFFSET(KeyScalars, k_norm);
        pack_pairs(of_x, x, at.key_scalars() + OFFSET(KeyScalars, q_factor), norms, l);
        pack_pairs(of_y, y, norms, norms, l);
        release_keys(at, l);
        barrier_wait(at.pairs.empty(), at.pairs.parity);
        store_pairs(at.tile(OFFSET(HeadStage, d_o)), of_x, l);
        store_pairs(at.tile(OFFSET(HeadStage, dv)), of_y, l);
        warp_arrive(at.pairs.full(), l.lane);
        at.pairs.next();
        release_head(at, l);
      });
}

// --- products with the states --------------------------------------------------------------------------------

// This warp's rows of what a value head's decays get, and what all of them get.
__device__ __forceinline__ void store_sums(Position& at, u32 offset, float (&rows)[2], float whole,
                                           const Lane& l) {
  const u32 sums = at.shared + offset;
  add_over_row(rows);
  whole = add_over_warp(whole);
  at.sums.wait_empty();
  if (l.t == 0) {
    store_shared(sums + OFFSET(StateSums, rows) + 4 * l.row(0), __float_as_uint(rows[0]));
    store_shared(sums + OFFSET(StateSums, rows) + 4 * l.row(1), __float_as_uint(rows[1]));
  }
  if (l.lane == 0) store_shared(sums + OFFSET(StateSums, whole) + 4 * l.block, __float_as_uint(whole));
  warp_arrive(at.sums.full(), l.lane);
  at.sums.next();
}
__device__ __forceinline__ void wait_for_pairs(Position& at, const Lane& l) {
  warp_arrive(at.pairs.empty(), l.lane);
  at.pairs.wait_full();
  at.pairs.next();
}

__device__ __forceinline__ void store_beta_gradients(const GatedDeltaBackwardParams& p, const KeyUnit& u,
                                                     int hv, const Position& at, const Lane& l) {
  float dot[2];
  dot_rows(dot, at.tile(OFFSET(HeadStage, u)), at.tile(OFFSET(HeadStage, dv)), l);
  add_over_row(dot);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (l.t || l.row(i) >= u.rows) continue;
    const float beta = load_shared1(at.head_scalars() + OFFSET(HeadScalars, beta) + 4 * l.row(i));
    store_scalar(p.dbeta, (u.batch * p.T + u.first + l.row(i)) * p.HV + hv, p.beta_type,
                 limit(beta_gradient(p, dot[i], beta), largest_of(p.beta_type)));
  }
}

// dq or dk of all value heads: the products with pairs are complete. `norm`: 1 / |q| or 1 / |k|.
__device__ __forceinline__ void store_unit(const GatedDeltaBackwardParams& p, const KeyUnit& u, RowSums& d,
                                           const float (&norm)[2], u32 tile, u32 staging, u64 to,
                                           const Lane& l) {
  if (p.flags & FLAG_L2NORM) pass_norm(d, norm, tile, l);
  const long long row_bytes = 2ll * p.H * K;
  store_rows(d, staging, to + (u.batch * p.T + u.first) * row_bytes + 2ll * u.h * K, row_bytes, u.rows, l);
  fence_async_proxy();  // a bulk copy overwrites what has been staged
}
__device__ __forceinline__ void clear_sums(RowSums& d) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) d[j][e] = 0.0f;
  }
}

__device__ __forceinline__ void compute_queries(const GatedDeltaBackwardParams& p, u32 shared,
                                                const Lane& l) {
  Position at = make_position(shared);
  RowSums d;
  float factor[2];
  each_unit(
      p, at,
      [&](const KeyUnit& u, int hv, bool is_first, bool is_last) {
        if (is_first) {
          clear_sums(d);
          load_row_factors(factor, at.key_scalars() + OFFSET(KeyScalars, q_factor), l);
        }
        float by[2], dot[2];
        load_row_factors(by, at.head_scalars() + OFFSET(HeadScalars, sum), l);
        by[0] = factor[0] * exp2_fast(by[0]), by[1] = factor[1] * exp2_fast(by[1]);
        at.states.wait_full();
        add_state_product(d, dot, at.tile(OFFSET(HeadStage, d_o)), at.states.stage(), by,
                          at.keys.stage() + OFFSET(KeyTiles, q), l,
                          [&] { store_beta_gradients(p, u, hv, at, l); });
        if (!is_last) release_head(at, l);
        at.state_grads.wait_full();
        const float both = dot_states(at.states.stage(), at.state_grads.stage(), 32 * l.block + l.lane);
        warp_arrive(at.states.empty(), l.lane);
        at.states.next();
        warp_arrive(at.state_grads.empty(), l.lane);
        at.state_grads.next();
        store_sums(at, OFFSET(SharedMemory, of_queries), dot, both, l);
      },
      [&](const KeyUnit& u) {
        wait_for_pairs(at, l);
        TokenOperand x;
        load_pairs(x, at.tile(OFFSET(HeadStage, d_o)), l);
        fence_registers(x.a);
        fence_registers(d);
        warpgroup_fence();
        add_pairs(d, x, at.keys.stage() + OFFSET(KeyTiles, k));
        warpgroup_commit();
        warpgroup_wait<0>();
        fence_registers(d);
        const float by = p.scale == 0.0f ? 0.0f : 1.0f / p.scale, norm[2] = {by * factor[0], by * factor[1]};
        store_unit(p, u, d, norm, at.keys.stage() + OFFSET(KeyTiles, q), at.tile(OFFSET(HeadStage, u)), p.dq,
                   l);
        release_head(at, l);
        release_keys(at, l);
      });
}

__device__ __forceinline__ void compute_keys(const GatedDeltaBackwardParams& p, u32 shared, const Lane& l) {
  Position at = make_position(shared);
  RowSums d;
  float norm[2];
  each_unit(
      p, at,
      [&](const KeyUnit&, int, bool is_first, bool is_last) {
        const u32 scalars = at.head_scalars(), k = at.keys.stage() + OFFSET(KeyTiles, k);
        if (is_first) {
          clear_sums(d);
          load_row_factors(norm, at.key_scalars() + OFFSET(KeyScalars, k_norm), l);
        }
        float sum[2], beta[2], by[2], rows[2], dot[2];
        load_row_factors(sum, scalars + OFFSET(HeadScalars, sum), l);
        load_row_factors(beta, scalars + OFFSET(HeadScalars, beta), l);
        const float end = load_shared1(scalars + OFFSET(HeadScalars, sum) + 4 * (C - 1));
        by[0] = -norm[0] * exp2_fast(sum[0]), by[1] = -norm[1] * exp2_fast(sum[1]);
        at.states.wait_full();
        add_state_product(d, rows, at.tile(OFFSET(HeadStage, dv)), at.states.stage(), by, k, l, [] {});
        warp_arrive(at.states.empty(), l.lane);
        at.states.next();
        by[0] = norm[0] * beta[0] * exp2_fast(end - sum[0]),
        by[1] = norm[1] * beta[1] * exp2_fast(end - sum[1]);
        at.state_grads.wait_full();
        add_state_product(d, dot, at.tile(OFFSET(HeadStage, u)), at.state_grads.stage(), by, k, l, [] {});
        warp_arrive(at.state_grads.empty(), l.lane);
        at.state_grads.next();
        if (!is_last) release_head(at, l);
        rows[0] -= dot[0], rows[1] -= dot[1];
        store_sums(at, OFFSET(SharedMemory, of_keys), rows, dot[0] + dot[1], l);
      },
      [&](const KeyUnit& u) {
        wait_for_pairs(at, l);
        TokenOperand x, y;
        load_pairs_transposed(x, at.tile(OFFSET(HeadStage, d_o)), l);
        load_symmetric_pairs(y, at.tile(OFFSET(HeadStage, dv)), l);
        fence_registers(x.a);
        fence_registers(y.a);
        fence_registers(d);
        warpgroup_fence();
        add_pairs(d, x, at.keys.stage() + OFFSET(KeyTiles, q));
        add_pairs(d, y, at.keys.stage() + OFFSET(KeyTiles, k));
        warpgroup_commit();
        sync_role(KEYS);  // all have read the pairs, in whose place dk is staged
        warpgroup_wait<0>();
        fence_registers(d);
        store_unit(p, u, d, norm, at.keys.stage() + OFFSET(KeyTiles, k), at.tile(OFFSET(HeadStage, dv)), p.dk,
                   l);
        release_head(at, l);
        release_keys(at, l);
      });
}

KDA_KERNEL(THREADS, 1) unit_grads(KDA_PARAM GatedDeltaBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  const Lane l = make_lane(warp);
  if (warp < ROLE_WARPS) {
    set_registers<PAIR_REGISTERS, START_REGISTERS>();
    compute_pairs(p, shared, l);
  } else if (warp < 2 * ROLE_WARPS) {
    set_registers<STATE_REGISTERS, START_REGISTERS>();
    compute_queries(p, shared, l);
  } else if (warp < COMPUTE_WARPS) {
    set_registers<STATE_REGISTERS, START_REGISTERS>();
    compute_keys(p, shared, l);
  } else {
    set_registers<LOAD_REGISTERS, START_REGISTERS>();
    const int thread = thread_index() - 32 * COMPUTE_WARPS;
    load_units(p, shared, thread);
    clear_gradients(
        p, {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
  }
}
