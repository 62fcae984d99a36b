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
// Grid: at most a block a multiprocessor; block b takes units b, b + grid, ... Warps: three warpgroups with roles, two
// warps that load, one for the gates. Each goes ahead of the others as far as stages allow; they wait for one another
// with a unit's last products. Shared memory, roles and barriers: grads_shared_memory.cuh.
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
// This warp has read what the ring is at.
template <class AnyRing>
__device__ __forceinline__ void release(AnyRing& ring, const Lane& l) {
  warp_arrive(ring.empty(), l.lane);
  ring.next();
}
__device__ __forceinline__ void load_row_factors(float (&x)[2], u32 from, const Lane& l) {
  x[0] = load_shared1(from + 4 * l.row(0)), x[1] = load_shared1(from + 4 * l.row(1));
}

// --- pairs ---------------------------------------------------------------------------------------------------

// The pairs of one role: products of its tile of a value head with u, weighed with products of q or k with k.
struct Pairs {
  KeyPairs keys;
  PairSums all;  // of the unit's value heads
};
// `rows`, `norms`: factors of the tile's rows, and of k's.
__device__ __forceinline__ void start_pairs(Pairs& x, u32 tile, u32 k, u32 rows, u32 norms, const Lane& l) {
  multiply_rows(x.all, tile, k);
  pack_key_pairs(x.keys, x.all, rows, norms, l);
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x.all[j][e] = 0.0f;
  }
}
// What decays get: by rows to this lane's share of its rows, by columns to tokens 2 lane and 2 lane + 1.
template <Role ROLE>
__device__ __forceinline__ void add_pairs_of_head(Pairs& x, float (&rows)[2], float (&columns)[2], u32 tile,
                                                  u32 of_u, u32 scalars, const Lane& l) {
  float sums[4 * C_TILES] = {};
  PairSums products;
  multiply_rows(products, tile, of_u);
  weigh_pairs<ROLE>(x.all, rows, sums, products, x.keys, scalars, l);
  add_over_columns(sums, l);
  columns[0] = -sums[0], columns[1] = -sums[1];
}
// A role's sums of the decays' gradients; `rows`: this lane's share.
__device__ __forceinline__ void store_decay_sums(Position& at, Role role, float (&rows)[2],
                                                 float (&columns)[2], const Lane& l) {
  add_over_row(rows);
  add_rows(columns, rows, l);
  at.sums.wait_empty();
  add_over_warps(role, at.shared + OFFSET(SharedMemory, sums.rows) + 4 * C * role, columns, l);
  warp_arrive(at.sums.full(), l.lane);
  at.sums.next();
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

__device__ __forceinline__ void compute_pairs(const GatedDeltaBackwardParams& p, u32 shared, const Lane& l) {
  Position at = make_position(shared);
  Pairs y;
  each_unit(
      p, at,
      [&](const KeyUnit& u, int hv, bool is_first, bool is_last) {
        if (is_first) {
          const u32 k = at.keys.stage() + OFFSET(KeyTiles, k),
                    norms = at.key_scalars() + OFFSET(KeyScalars, k_norm);
          start_pairs(y, k, k, norms, norms, l);
        }
        at.states.wait_full();
        at.state_grads.wait_full();
        const float both =
            add_over_warp(dot_states(at.states.stage(), at.state_grads.stage(), 32 * l.block + l.lane));
        release(at.states, l);
        release(at.state_grads, l);
        float rows[2] = {}, columns[2];
        add_pairs_of_head<PAIRS>(y, rows, columns, at.tile(OFFSET(HeadStage, dv)),
                                 at.tile(OFFSET(HeadStage, u)), at.head_scalars(), l);
        store_beta_gradients(p, u, hv, at, l);
        if (!is_last) release(at.heads, l);
        at.sums.wait_empty();
        if (l.lane == 0)
          store_shared(shared + OFFSET(SharedMemory, sums.of_states) + 4 * l.block, __float_as_uint(both));
        store_decay_sums(at, PAIRS, rows, columns, l);
      },
      [&](const KeyUnit&) {
        TokenOperand x;
        const u32 norms = at.key_scalars() + OFFSET(KeyScalars, k_norm);
        pack_pairs(x, y.all, norms, norms, l);
        release(at.keys, l);
        warp_arrive(at.pairs.empty(), l.lane);
        barrier_wait(at.pairs.empty(), at.pairs.parity);
        store_pairs(at.tile(OFFSET(HeadStage, dv)), x, l);
        warp_arrive(at.pairs.full(), l.lane);
        at.pairs.next();
        release(at.heads, l);
      });
}

// --- products with the states --------------------------------------------------------------------------------

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
  Pairs x;
  float factor[2];
  each_unit(
      p, at,
      [&](const KeyUnit&, int, bool is_first, bool is_last) {
        const u32 q = at.keys.stage() + OFFSET(KeyTiles, q), d_o = at.tile(OFFSET(HeadStage, d_o));
        if (is_first) {
          const u32 factors = at.key_scalars() + OFFSET(KeyScalars, q_factor);
          start_pairs(x, q, at.keys.stage() + OFFSET(KeyTiles, k), factors,
                      at.key_scalars() + OFFSET(KeyScalars, k_norm), l);
          clear_sums(d);
          load_row_factors(factor, factors, l);
        }
        float rows[2], columns[2], by[2];
        load_row_factors(by, at.head_scalars() + OFFSET(HeadScalars, sum), l);
        by[0] = factor[0] * exp2_fast(by[0]), by[1] = factor[1] * exp2_fast(by[1]);
        at.states.wait_full();
        add_state_product(d, rows, d_o, at.states.stage(), by, q, l);
        release(at.states, l);
        add_pairs_of_head<QUERIES>(x, rows, columns, d_o, at.tile(OFFSET(HeadStage, u)), at.head_scalars(),
                                   l);
        if (!is_last) release(at.heads, l);
        store_decay_sums(at, QUERIES, rows, columns, l);
      },
      [&](const KeyUnit& u) {
        TokenOperand own;
        pack_pairs(own, x.all, at.key_scalars() + OFFSET(KeyScalars, q_factor),
                   at.key_scalars() + OFFSET(KeyScalars, k_norm), l);
        store_pairs(at.tile(OFFSET(HeadStage, d_o)), own, l);  // no other role reads d_o
        warp_arrive(at.pairs.full(), l.lane);
        fence_registers(own.a);
        fence_registers(d);
        warpgroup_fence();
        add_pairs(d, own, at.keys.stage() + OFFSET(KeyTiles, k));
        warpgroup_commit();
        warpgroup_wait<0>();
        fence_registers(d);
        const float by = p.scale == 0.0f ? 0.0f : 1.0f / p.scale, norm[2] = {by * factor[0], by * factor[1]};
        at.pairs.wait_full();  // u, in whose place dq is staged, has been read
        at.pairs.next();
        store_unit(p, u, d, norm, at.keys.stage() + OFFSET(KeyTiles, q), at.tile(OFFSET(HeadStage, u)), p.dq,
                   l);
        release(at.heads, l);
        release(at.keys, l);
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
        add_state_product(d, rows, at.tile(OFFSET(HeadStage, dv)), at.states.stage(), by, k, l);
        release(at.states, l);
        by[0] = norm[0] * beta[0] * exp2_fast(end - sum[0]),
        by[1] = norm[1] * beta[1] * exp2_fast(end - sum[1]);
        at.state_grads.wait_full();
        add_state_product(d, dot, at.tile(OFFSET(HeadStage, u)), at.state_grads.stage(), by, k, l);
        release(at.state_grads, l);
        if (!is_last) release(at.heads, l);
        rows[0] -= dot[0], rows[1] -= dot[1];
        add_over_row(rows);
        const float to_all = add_over_warp(dot[0] + dot[1]);
        at.sums.wait_empty();
        const u32 sums = shared + OFFSET(SharedMemory, sums), to = sums + OFFSET(DecaySums, rows[KEYS]);
        if (l.t == 0) {
          store_shared(to + 4 * l.row(0), __float_as_uint(rows[0]));
          store_shared(to + 4 * l.row(1), __float_as_uint(rows[1]));
        }
        if (l.lane == 0)
          store_shared(sums + OFFSET(DecaySums, of_keys) + 4 * l.block, __float_as_uint(to_all));
        warp_arrive(at.sums.full(), l.lane);
        at.sums.next();
      },
      [&](const KeyUnit& u) {
        const u32 q = at.keys.stage() + OFFSET(KeyTiles, q), k = at.keys.stage() + OFFSET(KeyTiles, k);
        warp_arrive(at.pairs.empty(), l.lane);
        at.pairs.wait_full();
        at.pairs.next();
        TokenOperand x, y;
        load_pairs_transposed(x, at.tile(OFFSET(HeadStage, d_o)), l);
        load_symmetric_pairs(y, at.tile(OFFSET(HeadStage, dv)), l);
        fence_registers(x.a);
        fence_registers(y.a);
        fence_registers(d);
        warpgroup_fence();
        add_pairs(d, x, q);
        add_pairs(d, y, k);
        warpgroup_commit();
        sync_role(KEYS);  // all have read the pairs in whose place dk is staged
        warpgroup_wait<0>();
        fence_registers(d);
        store_unit(p, u, d, norm, k, at.tile(OFFSET(HeadStage, dv)), p.dk, l);
        release(at.heads, l);
        release(at.keys, l);
      });
}

// --- the gate ------------------------------------------------------------------------------------------------

// One warp, behind the others.
__device__ __forceinline__ void compute_gates(const GatedDeltaBackwardParams& p, u32 shared, const Lane& l) {
  Position at = make_position(shared);
  each_unit(
      p, at,
      [&](const KeyUnit& u, int hv, bool, bool is_last) {
        const GateInputs inputs = load_gate(p, u, hv, l.lane);
        const float last =
            exp2_fast(load_shared1(at.head_scalars() + OFFSET(HeadScalars, sum) + 4 * (C - 1)));
        if (!is_last) release(at.heads, l);
        float d[2];
        at.sums.wait_full();
        sum_decay_gradients(d, shared + OFFSET(SharedMemory, sums), last, l.lane);
        warp_arrive(at.sums.empty(), l.lane);
        at.sums.next();
        store_gate_gradient(p, u, hv, inputs, d, l.lane);
      },
      [&](const KeyUnit&) {
        release(at.heads, l);
        release(at.keys, l);
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
    set_registers<QUERY_REGISTERS, START_REGISTERS>();
    compute_queries(p, shared, l);
  } else if (warp < 2 * ROLE_WARPS) {
    set_registers<KEY_REGISTERS, START_REGISTERS>();
    compute_keys(p, shared, l);
  } else if (warp < COMPUTE_WARPS) {
    set_registers<PAIR_REGISTERS, START_REGISTERS>();
    compute_pairs(p, shared, l);
  } else {
    set_registers<LOAD_REGISTERS, START_REGISTERS>();
    const int thread = thread_index() - 32 * COMPUTE_WARPS;
    if (warp < GATE_WARP) {
      load_units(p, shared, thread);
      clear_gradients(
          p, {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
    } else if (warp == GATE_WARP) {
      compute_gates(p, shared, l);
    }
  }
}
