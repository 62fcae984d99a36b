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
// which then go through the norms. A decay gets x and y weighed with q . k and k . k, of the pairs that it lies between
// (sum_crossings).
//
// Grid: at most a block a multiprocessor; block b takes units b, b + grid, ... Warps: two warpgroups that compute, one
// for what q is multiplied with and one for what k is; two warps that load; two that finish gates and
// betas. Each goes ahead of the others as far as stages allow; they wait for one another with a unit's last
// products. Shared memory and barriers: grads_shared_memory.cuh.
#include "sm90/gated_delta/grads_gate.cuh"
#include "sm90/gated_delta/grads_loads.cuh"
#include "sm90/gated_delta/grads_pairs.cuh"

KDA_SHARED_BYTES(sizeof(SharedMemory));

// The last products of a unit: dq += X k, or dk += X^T q - (Y + Y^T) k; X and Y are the pairs of QUERIES and KEYS.
__device__ __forceinline__ void add_all_pairs(RowSums& d, const Position& at, int side, const Lane& l) {
  const u32 x = (at.heads().stage() + OFFSET(HeadStage, own[QUERIES])),
            y = (at.heads().stage() + OFFSET(HeadStage, own[KEYS]));
  const u32 q = at.keys().stage() + OFFSET(KeyTiles, own[QUERIES]),
            k = at.keys().stage() + OFFSET(KeyTiles, own[KEYS]);
#pragma unroll 1
  for (int n = 0; n <= side; ++n) {
    TokenOperand a;
    if (side == QUERIES)
      load_pairs(a, x, l);
    else if (n == 0)
      load_pairs_transposed(a, x, l);
    else
      load_negative_symmetric_pairs(a, y, l);
    fence_registers(a.a);
    fence_registers(d);
    warpgroup_fence();
    add_pairs(d, a, side == KEYS && n == 0 ? q : k);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(d);
  }
}

__device__ __forceinline__ void compute(const GatedDeltaBackwardParams& p, u32 shared, int side,
                                        const Lane& l) {
  const float sign = side == QUERIES ? 1.0f : -1.0f;
  Position at = {shared};
  KeyPairs key_pairs;
  PairSums all;  // pairs of the unit's value heads, but for the sign
  RowSums d;     // dq or dk
  float factor[2];
  each_unit(
      p, at,
      [&](const KeyUnit&, int, bool is_first, bool is_last) {
        const u32 own = at.keys().stage() + OFFSET(KeyTiles, own) + side * TILE_BYTES,
                  scalars = at.head_scalars(),
                  operand = (at.heads().stage() + OFFSET(HeadStage, own)) + side * TILE_BYTES,
                  of_u = (at.heads().stage() + OFFSET(HeadStage, u));
        if (is_first) {
          const u32 norms = at.key_scalars() + OFFSET(KeyScalars, k_norm),
                    factors = side == QUERIES ? at.key_scalars() + OFFSET(KeyScalars, q_factor) : norms;
          factor[0] = load_shared1(factors + 4 * l.row(0)), factor[1] = load_shared1(factors + 4 * l.row(1));
          multiply_rows(all, own, at.keys().stage() + OFFSET(KeyTiles, own[KEYS]));
          pack_key_pairs(key_pairs, all, factor, norms, l);
          clear(all);
          clear(d);
        }
        float before[2] = {}, after[2] = {};  // what decays get of the products with the states
        {
          const u32 sums = scalars + OFFSET(HeadScalars, sum), betas = scalars + OFFSET(HeadScalars, beta);
          const float sum[2] = {load_shared1(sums + 4 * l.row(0)), load_shared1(sums + 4 * l.row(1))},
                      beta[2] = {load_shared1(betas + 4 * l.row(0)), load_shared1(betas + 4 * l.row(1))},
                      end = load_shared1(sums + 4 * (C - 1));
#pragma unroll 1
          for (int n = 0; n <= side; ++n) {
            RowSums x;
            float by[2], dot[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
              by[i] = factor[i] * (n ? beta[i] * exp2_fast(end - sum[i]) * (1.0f / GRADIENT_SCALE)
                                     : sign * exp2_fast(sum[i]));
            if (n) {
              at.state_grads().wait_full();
              multiply_state(x, of_u, at.state_grads().stage());
              warp_arrive(at.state_grads().empty(), l.lane);
            } else {
              at.states().wait_full();
              multiply_state(x, operand, at.states().stage());
              warp_arrive(at.states().empty(), l.lane);
            }
            add_scaled(d, dot, x, by, own, l);
            add_over_row(dot);
            if (n)
              after[0] = dot[0], after[1] = dot[1];
            else
              before[0] = dot[0], before[1] = dot[1];
          }
        }
        TokenOperand weighed;
        {
          PairSums x;
          multiply_rows(x, operand, of_u);
          weigh_pairs(all, weighed, x, key_pairs, scalars, side == QUERIES, l);
          if (!is_last) warp_arrive(at.heads().empty(), l.lane);
        }
        float tokens[4 * C_TILES];
        // Pairs have the other sign with KEYS.
        const float from[2] = {sign * before[0], sign * before[1]},
                    to[2] = {sign * after[0], sign * after[1]};
        sum_crossings(tokens, weighed, from, to, l);
        add_over_columns(tokens, l);
        at.sums().wait_empty();
        add_over_warps(side, shared + OFFSET(SharedMemory, sums.tokens) + 4 * C * side, sign * tokens[0],
                       sign * tokens[1], l);
        warp_arrive(at.sums().full(), l.lane);
      },
      [&](const KeyUnit& u) {
        const u32 own = at.keys().stage() + OFFSET(KeyTiles, own) + side * TILE_BYTES,
                  operand = (at.heads().stage() + OFFSET(HeadStage, own)) + side * TILE_BYTES;
        warp_arrive(at.pairs().empty(), l.lane);
        barrier_wait(at.pairs().empty(), at.pairs().parity);
        store_pairs(operand, all, factor, at.key_scalars() + OFFSET(KeyScalars, k_norm), l);
        warp_arrive(at.pairs().full(), l.lane);
        at.pairs().wait_full();
        scale(d, GRADIENT_SCALE);
        add_all_pairs(d, at, side, l);
        scale(d, 1.0f / GRADIENT_SCALE);
        if (p.flags & FLAG_L2NORM) {
          const float by = side == KEYS      ? 1.0f
                           : p.scale == 0.0f ? 0.0f
                                             : 1.0f / p.scale,
                      norm[2] = {by * factor[0], by * factor[1]};
          pass_norm(d, norm, own, l);
        }
        const u32 staging = side == QUERIES ? (at.heads().stage() + OFFSET(HeadStage, u)) : operand;
        const int channels = channels_of(p);
        const long long row_bytes = key_row_bytes(p);
        sync_side(side);  // KEYS has read the pairs in whose place dk is staged
        store_rows(d, staging,
                   (side == QUERIES ? p.dq : p.dk) + (u.batch * p.T + u.first) * row_bytes +
                       2ll * u.h * channels,
                   row_bytes, u.rows, channels, l);
        fence_async_proxy();  // a bulk copy overwrites what has been staged
        warp_arrive(at.heads().empty(), l.lane);
        warp_arrive(at.keys().empty(), l.lane);
      });
}

KDA_KERNEL(THREADS, 1) unit_grads(KDA_PARAM GatedDeltaBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  if (warp < COMPUTE_WARPS) {
    set_registers<COMPUTE_REGISTERS, START_REGISTERS>();
    compute(p, shared, warp / SIDE_WARPS, make_lane(warp));
  } else {
    set_registers<OTHER_REGISTERS, START_REGISTERS>();
    const int thread = thread_index() - 32 * COMPUTE_WARPS, other = warp - COMPUTE_WARPS;
    if (other < LOAD_WARPS) {
      load_units(p, shared, thread);
      clear_gradients(
          p, {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
    } else {
      finish_gates(p, shared, other - LOAD_WARPS);
    }
  }
}
