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
// Grid: at most a block a multiprocessor; block b takes units b, b + grid, ... Warps: a warpgroup for what q is
// multiplied with, one for what k is, four warps that load. Shared memory and barriers: grads_shared_memory.cuh.
#include "sm90/gated_delta/grads_gate.cuh"
#include "sm90/gated_delta/grads_loads.cuh"
#include "sm90/gated_delta/grads_pairs.cuh"

KDA_SHARED_BYTES(sizeof(SharedMemory));

// Where this value head's arrays are, and factors of the lane's rows.
struct Head {
  u32 stage, scalars;
  float decay[2], last;  // 2^G, 2^G_last
};
__device__ __forceinline__ Head make_head(u32 shared, const HeadRing& heads, const Lane& l) {
  Head x;
  x.stage = heads.stage();
  x.scalars = shared + OFFSET(SharedMemory, head) + heads.slot * (u32)sizeof(HeadScalars);
  const u32 sums = x.scalars + OFFSET(HeadScalars, sum);
  x.decay[0] = exp2_fast(load_shared1(sums + 4 * l.row(0)));
  x.decay[1] = exp2_fast(load_shared1(sums + 4 * l.row(1)));
  x.last = exp2_fast(load_shared1(sums + 4 * (C - 1)));
  return x;
}

__device__ __forceinline__ void store_beta_gradients(const GatedDeltaBackwardParams& p, const KeyUnit& u,
                                                     int hv, const Head& x, const Lane& l) {
  float dot[2];
  dot_rows(dot, x.stage + OFFSET(HeadStage, u), x.stage + OFFSET(HeadStage, side[KEYS]), l);
  add_over_row(dot);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (l.t || l.row(i) >= u.rows) continue;
    const float beta = load_shared1(x.scalars + OFFSET(HeadScalars, beta) + 4 * l.row(i));
    store_scalar(p.dbeta, (u.batch * p.T + u.first + l.row(i)) * p.HV + hv, p.beta_type,
                 limit(beta_gradient(p, dot[i], beta), largest_of(p.beta_type)));
  }
}

// What the last product with a state leaves in the side's sums.
struct Parts {
  float rows[2], whole;
};

__device__ __forceinline__ void store_sums(u32 sums, float (&columns)[4 * C_TILES], const Parts& x,
                                           const Lane& l) {
  store_shared(sums + OFFSET(SideSums, columns) + 4 * C * l.block + 8 * l.lane, columns[0], columns[1]);
  if (l.t == 0) {
    store_shared(sums + OFFSET(SideSums, rows) + 4 * l.row(0), __float_as_uint(x.rows[0]));
    store_shared(sums + OFFSET(SideSums, rows) + 4 * l.row(1), __float_as_uint(x.rows[1]));
  }
  if (l.lane == 0) store_shared(sums + OFFSET(SideSums, whole) + 4 * l.block, __float_as_uint(x.whole));
}

template <Side SIDE>
__device__ __forceinline__ void compute(const GatedDeltaBackwardParams& p, u32 shared, const Lane& l) {
  HeadRing heads = {shared};
  KeyRing keys = {shared};
  StateRing states = {shared};
  StateGradRing state_grads = {shared};
  const int group = divide(p.HV, p.h_factor, p.h_shift);
#pragma unroll 1
  for (;;) {
    heads.wait_full();
    const KeyUnit u = load_unit(shared, keys.slot);
    if (!u.rows) break;
    const u32 own = keys.stage() + OFFSET(KeyTiles, side) + SIDE * TILE_BYTES,
              other = keys.stage() + OFFSET(KeyTiles, side) + (1 - SIDE) * TILE_BYTES,
              k = keys.stage() + OFFSET(KeyTiles, side[KEYS]);
    const u32 factors = shared + OFFSET(SharedMemory, key) + keys.slot * (u32)sizeof(KeyScalars),
              k_norms = factors + OFFSET(KeyScalars, k_norm),
              own_factors = SIDE == QUERIES ? factors + OFFSET(KeyScalars, q_factor) : k_norms;
    const float own_factor[2] = {load_shared1(own_factors + 4 * l.row(0)),
                                 load_shared1(own_factors + 4 * l.row(1))};
    KeyPairs key_pairs;
    {
      PairSums x;
      multiply_rows(x, own, k);
      pack_key_pairs(key_pairs, x, own_factors, k_norms, l);
    }
    RowSums d = {};
    PairSums all = {};
    u32 images[SIDES];  // of the pairs of both sides
#pragma unroll 1
    for (int i = 0; i < group; ++i) {
      const int hv = u.h * group + i;
      if (i) heads.wait_full();
      const Head x = make_head(shared, heads, l);
      const u32 place = x.stage + OFFSET(HeadStage, side) + SIDE * (u32)sizeof(SidePlace),
                of_u = x.stage + OFFSET(HeadStage, u);
      GateInputs gate;
      if (SIDE == QUERIES && l.block == 0) gate = load_gate(p, u, hv, l.lane);
      Parts parts;
      float columns[4 * C_TILES];
      {
        PairSums pairs;
        multiply_rows(pairs, place, of_u);
        weigh_pairs<SIDE>(all, parts.rows, columns, pairs, key_pairs, x.scalars, l);
        add_over_columns(columns, l);
      }
      states.wait_full();
      RowSums of_state;
      multiply_state(of_state, place, states.stage());
      if (SIDE == KEYS) store_beta_gradients(p, u, hv, x, l);
      warpgroup_wait<0>();
      fence_registers(of_state);
      const float sign = SIDE == QUERIES ? 1.0f : -1.0f,
                  by[2] = {sign * own_factor[0] * x.decay[0], sign * own_factor[1] * x.decay[1]};
      float dot[2];
      add_scaled(d, dot, of_state, by, own, l);
      parts.rows[0] += dot[0], parts.rows[1] += dot[1];
      state_grads.wait_full();
      if (SIDE == QUERIES) {
        parts.whole = add_over_warp(dot_states(states.stage(), state_grads.stage(), 32 * l.block + l.lane));
      } else {
        multiply_state(of_state, of_u, state_grads.stage());
        const u32 scalars = x.scalars;
        float to_end[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
          to_end[n] = exp2_fast(load_shared1(scalars + OFFSET(HeadScalars, sum) + 4 * (C - 1)) -
                                load_shared1(scalars + OFFSET(HeadScalars, sum) + 4 * l.row(n))) *
                      load_shared1(scalars + OFFSET(HeadScalars, beta) + 4 * l.row(n)) * own_factor[n];
        warpgroup_wait<0>();
        fence_registers(of_state);
        add_scaled(d, dot, of_state, to_end, own, l);
        parts.rows[0] -= dot[0], parts.rows[1] -= dot[1];
        parts.whole = add_over_warp(dot[0] + dot[1]);
      }
      warp_arrive(states.empty(), l.lane);
      warp_arrive(state_grads.empty(), l.lane);
      states.next();
      state_grads.next();
      add_over_row(parts.rows);
      sync_side((Side)SIDE);  // the tile in whose place the sums go has been read
      store_sums(place, columns, parts, l);
      if (i == group - 1) {
        images[QUERIES] = x.stage + OFFSET(HeadStage, side[QUERIES].pairs);
        images[KEYS] = x.stage + OFFSET(HeadStage, side[KEYS].pairs);
        store_pairs(images[SIDE], all, own_factors, k_norms, l);
      }
      sync_sides();
      if (SIDE == QUERIES && l.block == 0)
        store_gate_gradient(p, u, hv, gate, x.stage + OFFSET(HeadStage, side[QUERIES]),
                            x.stage + OFFSET(HeadStage, side[KEYS]), x.last, l.lane);
      if (i < group - 1) {
        warp_arrive(heads.empty(), l.lane);
        heads.next();
      }
    }
    TokenOperand a, b;
    if (SIDE == QUERIES) {
      load_pairs(a, images[QUERIES], l);
    } else {
      load_pairs_transposed(a, images[QUERIES], l);
      load_symmetric_pairs(b, images[KEYS], l);
    }
    fence_registers(a.a);
    if (SIDE == KEYS) fence_registers(b.a);
    fence_registers(d);
    warpgroup_fence();
    add_pairs(d, a, other);
    if (SIDE == KEYS) add_pairs(d, b, k);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(d);
    if (p.flags & FLAG_L2NORM) {
      float norm[2] = {own_factor[0], own_factor[1]};
      if (SIDE == QUERIES) {
        const float by = p.scale == 0.0f ? 0.0f : 1.0f / p.scale;
        norm[0] *= by, norm[1] *= by;
      }
      pass_norm(d, norm, own, l);
    }
    sync_sides();  // all images and sums have been read
    const u32 staging = SIDE == QUERIES ? heads.stage() + OFFSET(HeadStage, u)
                                        : heads.stage() + OFFSET(HeadStage, side[KEYS]);
    const long long row_bytes = 2ll * p.H * K;
    store_rows(d, staging,
               (SIDE == QUERIES ? p.dq : p.dk) + (u.batch * p.T + u.first) * row_bytes + 2ll * u.h * K,
               row_bytes, u.rows, l);
    fence_async_proxy();  // a bulk copy overwrites what has been staged
    warp_arrive(heads.empty(), l.lane);
    heads.next();
    warp_arrive(keys.empty(), l.lane);
    keys.next();
  }
}

KDA_KERNEL(THREADS, 1) unit_grads(KDA_PARAM GatedDeltaBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  if (warp < COMPUTE_WARPS) {
    set_registers<COMPUTE_REGISTERS, START_REGISTERS>();
    if (warp < SIDE_WARPS)
      compute<QUERIES>(p, shared, make_lane(warp));
    else
      compute<KEYS>(p, shared, make_lane(warp));
  } else {
    set_registers<LOAD_REGISTERS, START_REGISTERS>();
    const int thread = thread_index() - 32 * COMPUTE_WARPS;
    load_units(p, shared, thread);
    clear_gradients(
        p, {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
  }
}
