// Backward of chunk_kda on Hopper, third launch: every input gradient of a unit (a chunk of one
// sequence and value head).
//
// From the inputs and from what the scan left in the workspace: u (here v', the values with the
// state's prediction taken off), dr, h and dh. With the operands zq, zb, yk and sk of
// grads_operands.cuh, for tokens i and j of the chunk:
//
//   dA = scale d_o v'^T, dL = -dr v'^T             matrices of token pairs, lower triangles:
//                                                  grads_pairs.cuh
//   dv = beta dr                                   grads_values.cuh
//   aq = (d_o h)^T, ax = (dr h)^T, cs = (v' dh)^T  products with the states at both ends of the
//                                                  chunk: grads_states.cuh
//   dq, dk, dgc                                    sums over pairs: grads_pair_sums.cuh
//   dg, dbeta, and parts of dA_log and ddt_bias    through the gate, the norms and the sigmoid of
//                                                  beta: grads_gate.cuh, grads_stores.cuh
//
// Sums over tokens and over channels are small products: grads_token_sums.cuh, grads_channel_sums.cuh.
//
// Grid: at most a block a multiprocessor; block b takes units b, b + grid, ... Four warpgroups: one
// for each half of the tokens and half of the channels. Shared memory: grads_shared_memory.cuh.
//
// Synchronisation: workspace images arrive as bulk copies that the barriers pairs_full and
// states_full count, once a unit; q, k, v, g and d_o as asynchronous copies, which the thread that
// issued them waits for in groups. A barrier of the block separates the steps below. The next
// unit's arrays are requested as soon as their place is free: the workspace's images and d_o once
// the states have been read, v, q, k and g as each warp is done with its own part.
#include "sm90/chunk_backward/grads_stores.cuh"
#include "sm90/chunk_backward/grads_tail.cuh"
#include "sm90/chunk_backward/grads_values.cuh"

// Loads of the arrays of unit n, if there is one, each group as soon as its place is free: the
// workspace's images and d_o, which all warps read; v; the gate.
__device__ __forceinline__ void fetch_shared(const ChunkBackwardParams& p, u32 shared, int n, const Lane& l) {
  const u32 unit = unit_at(shared, n);
  if (unit_int(unit, OFFSET(SharedUnit, rows))) {
    if (l.thread == WORKSPACE_THREAD) fetch_workspace(p, shared, n, 0);
    fetch_outputs(p, shared, unit, 0, l);
  }
  copy_async_commit();
}
__device__ __forceinline__ void fetch_values(const ChunkBackwardParams& p, u32 shared, const NextUnit& next,
                                             int n, const Lane& l) {
  if (l.thread == WORKSPACE_THREAD && next.rows) fetch_workspace_after_pairs(p, shared, n, 0);
  fetch_own(shared + OFFSET(SharedMemory, v), next.v, p.v_st, next.rows, values_of_block(p, 0), l);
  copy_async_commit();
}
// All of these for a further block of values of unit n, once every warp is done with the block before; they have arrived
// when it returns, but for those that barriers count.
__device__ __forceinline__ void fetch_block(const ChunkBackwardParams& p, u32 shared, int n, int block,
                                            const Lane& l) {
  const u32 unit = unit_at(shared, n);
  if (l.thread == WORKSPACE_THREAD) {
    fetch_workspace(p, shared, n, block);
    fetch_workspace_after_pairs(p, shared, n, block);
  }
  fetch_outputs(p, shared, unit, block, l);
  fetch_own(shared + OFFSET(SharedMemory, v), unit_long(unit, OFFSET(SharedUnit, v)) + 2 * V * block, p.v_st,
            unit_int(unit, OFFSET(SharedUnit, rows)), values_of_block(p, block), l);
  copy_async_commit();
  copy_async_wait<0>();
  fence_async_proxy();
  sync_block();
}

// Barriers, the block's first two units, and all of the first unit's arrays.
__device__ __forceinline__ void start_block(const ChunkBackwardParams& p, u32 shared, const Lane& l) {
  if (l.thread == 0) {
    barrier_init(shared + OFFSET(SharedMemory, pairs_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, states_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, norms_full), NORM_WARPS * WARP_ARRIVALS);
    barrier_init(shared + OFFSET(SharedMemory, norms_full[1]), NORM_WARPS * WARP_ARRIVALS);
    fence_barrier_init();
    write_unit(p, unit_at(shared, 0), block_index(), 0, p.N);
    write_grid_step(p, shared);
    write_next_unit(p, shared, unit_at(shared, 1), unit_at(shared, 0));
  }
  sync_block();
  fetch_shared(p, shared, 0, l);
  {
    const NextUnit first = next_unit(unit_at(shared, 0));
    fetch_values(p, shared, first, 0, l);
    fetch_own(shared + OFFSET(SharedMemory, q), first.q, p.q_st, first.rows, channels_of(p), l);
    fetch_own(shared + OFFSET(SharedMemory, k), first.k, p.k_st, first.rows, channels_of(p), l);
    fetch_gate(p, shared, first, l);
    copy_async_commit();
  }
  copy_async_wait<2>();
  fence_async_proxy();
  sync_block();
}

// Asks L2 for them, while the first block is computed: they then arrive sooner.
__device__ __forceinline__ void prefetch_block(const ChunkBackwardParams& p, u32 unit, int block, const Lane& l) {
  const u64 place = value_place(p, unit_long(unit, OFFSET(SharedUnit, place)), block);
  const bool second = l.thread >= THREADS / 2;
  const int line = l.thread % (THREADS / 2), images = TILE_BYTES / 128;
  prefetch_l2(reinterpret_cast<const void*>((second ? p.dh : p.h) + place * STATE_BYTES + 128 * line));
  if (line < images) {
    prefetch_l2(reinterpret_cast<const void*>((second ? p.dr : p.u) + place * TILE_BYTES + 128 * line));
    return;
  }
  const int row = (line - images) >> 1, first = (line & 1) * 64;
  if (row >= unit_int(unit, OFFSET(SharedUnit, rows)) || first >= values_of_block(p, block)) return;
  const u64 d_o = p.d_o + 2 * values_of(p) * (unit_long(unit, OFFSET(SharedUnit, row)) + (u64)(u32)row * (u32)p.HV),
            v = unit_long(unit, OFFSET(SharedUnit, v)) + (u64)(u32)row * (2 * (u32)p.v_st);
  prefetch_l2(reinterpret_cast<const void*>((second ? v : d_o) + 2 * (V * block + first)));
}

// Products of dA and dL; while they run, dv and what v gives to dbeta. `fetched`: blocks of values before this one.
__device__ __forceinline__ void multiply_pairs(float (&pairs)[4][4], const ChunkBackwardParams& p, u32 shared,
                                               int fetched, u32 unit, u32 scalars, int block, const Lane& l) {
  u32 x[8][4];
  barrier_wait(shared + OFFSET(SharedMemory, pairs_full), fetched & 1);
  start_pairs(pairs, x, shared, l);
  copy_async_wait<1>();
  sync_warp();
  value_gradients(p, shared, unit, scalars, block, l);
  warpgroup_wait<0>();
  fence_registers(pairs);
}

// dA and dL, shrunk, to shared memory; the partial sums of the unit before, which are complete
// after this step's barrier.
__device__ __forceinline__ void share_pairs(const float (&pairs)[4][4], const ChunkBackwardParams& p, u32 shared,
                                            int n, u32 gate, const GateLoads& gate_loads, const Lane& l) {
  const PackedPairs packed = mask_pairs(pairs, p.scale, l);
  const u32 largest = largest_pair(packed);
  if (l.lane == 0) store_shared(shared + OFFSET(SharedMemory, largest) + 4 * (l.thread >> 5), largest);
  store_gate_parameters(p, gate_loads, gate, l);
  sync_block();
  const Scaling by = make_scaling(shared, p.centre, l);
  if (l.thread == 0) store_shared(shared + OFFSET(SharedMemory, scaling), by.shrink, by.grow);
  store_pairs(packed, shared, by, l);
  if (n) store_partial_sums(p, shared, unit_at(shared, n - 1), l);
}

// The states' products of a block's first 64 values, until they have been started.
__device__ __forceinline__ void begin_states(Accumulators& d, StateOperands& a, u32 shared, int fetched,
                                             u32 states, int block, const Lane& l) {
  barrier_wait(shared + OFFSET(SharedMemory, states_full), fetched & 1);
  load_states(a, shared, 0, l);
  if (l.token_half == 0) multiply_states(a, states, block, l);
  start_states(d, a, shared, 0, l);
}
// Those of the other 64 values.
__device__ __forceinline__ void finish_states(Accumulators& d, StateOperands& a, u32 shared, u32 states,
                                              int block, const Lane& l) {
  wait_states(d);
  load_states(a, shared, 4, l);
  if (l.token_half) multiply_states(a, states, block, l);
  start_states(d, a, shared, 4, l);
}

// All blocks of a unit's values but the last: their dv, and their part of the products.
__device__ __forceinline__ void add_blocks(float (&pairs)[4][4], Accumulators& d, const ChunkBackwardParams& p,
                                           u32 shared, int n, int& further, u32 unit, u32 states, u32 scalars,
                                           const Lane& l) {
#pragma unroll 1
  for (int block = 0; block + 1 < p.value_blocks; ++block, ++further) {
    StateOperands a;
    multiply_pairs(pairs, p, shared, n + further, unit, scalars, block, l);
    begin_states(d, a, shared, n + further, states, block, l);
    finish_states(d, a, shared, states, block, l);
    wait_states(d);
    sync_block();
    fetch_block(p, shared, n, block + 1, l);
  }
}

// dg, dbeta, dq and dk to device memory; each array's place is given to the next unit.
__device__ __forceinline__ void store_gradients(Accumulators& d, const float (&dk)[4][4],
                                                const ChunkBackwardParams& p, u32 shared, int n, u32 unit,
                                                u32 gate, u32 states, u32 scalars, u32 last, const Lane& l) {
  // Here or a little later, where it costs the fewest registers.
  if (BOUNDED && l.thread == UNIT_THREAD)
    write_next_unit(p, shared, unit_at(shared, n + 2), unit_at(shared, n + 1));
  const NextUnit next = next_unit(unit_at(shared, n + 1));
  fetch_values(p, shared, next, n + 1, l);
  const float2 by = load_shared2(shared + OFFSET(SharedMemory, scaling));
  const OutputRows to = channel_rows(p, unit, l);
  if (!BOUNDED && l.thread == UNIT_THREAD)
    write_next_unit(p, shared, unit_at(shared, n + 2), unit_at(shared, n + 1));
  if (!GROUPED) share_norm_gradients(p, shared, scalars, by.y, l);
  store_beta_gradient(p, shared, scalars, unit, by.y, l);
  float following[2];
  load_following_sums(following, shared, states, last, by.x, l);
  sum_following_tokens(d.cs, following, l);
  store_gate_gradient(d.cs, p, gate, by.y, shared, unit, to, l);
  fetch_gate(p, shared, next, l);
  if (!GROUPED) barrier_wait(norms_full_address(shared, l), n & 1);
  store_row_gradient(d.aq, 0, OFFSET(SharedMemory, q), by.y, p, p.dq, shared, unit, to, l);
  fetch_own(shared + OFFSET(SharedMemory, q), next.q, p.q_st, next.rows, channels_of(p), l);
  store_row_gradient(dk, 1, OFFSET(SharedMemory, k), by.y, p, p.dk, shared, unit, to, l);
  fetch_own(shared + OFFSET(SharedMemory, k), next.k, p.k_st, next.rows, channels_of(p), l);
  copy_async_commit();
}

KDA_KERNEL(THREADS, 1) grads(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const u32 places = lane_places(warp);
  Lane l = make_lane(warp, places);  // recomputed in every step
  start_block(p, shared, l);

  int n = 0, further = 0;  // units; blocks of values beyond each unit's first
  for (;; ++n) {
    // Where shared memory has what belongs to this unit alone.
    const u32 unit = unit_at(shared, n), gate = shared + OFFSET(SharedMemory, gate) + (n & 1) * GATE_PITCH;
    if (!unit_int(unit, OFFSET(SharedUnit, rows))) break;
    l = make_lane(warp, places);
    const u32 states = shared + OFFSET(SharedMemory, states) + (n & 1) * STATES_PITCH;
    const u32 scalars = shared + OFFSET(SharedMemory, rows) + (n & 1) * ROWS_BYTES;
    const u32 last = shared + OFFSET(SharedMemory, last) + (n & 1) * LAST_BYTES;

    const int last_block = value_blocks(p) - 1;
    if constexpr (NARROW) {
#pragma unroll 1
      for (int block = 1; block <= last_block; ++block) prefetch_block(p, unit, block, l);
    }

    // 1. Gradients of the matrices of token pairs, and the products with the states h and dh.
    const GateLoads gate_loads = load_gate(p, unit_int(unit, OFFSET(SharedUnit, hv)), l);
    Accumulators d;
    StateOperands a;
    {
      float pairs[4][4];
      if constexpr (NARROW) {
        each([&](int j, int e) { pairs[j][e] = d.aq[j][e] = d.ax[j][e] = d.cs[j][e] = 0.0f; });
        add_blocks(pairs, d, p, shared, n, further, unit, states, scalars, l);
      }
      multiply_pairs(pairs, p, shared, n + further, unit, scalars, last_block, l);
      begin_states(d, a, shared, n + further, states, last_block, l);
      share_pairs(pairs, p, shared, n, gate, gate_loads, l);
    }
    finish_states(d, a, shared, states, last_block, l);
    copy_async_wait<0>();
    sync_warp();

    // 2. Gate: decays, and with them the operands of q and k.
    l = make_lane(warp, places);
    Decays saved;
    float end[2][ANCHORS];
    {
      float up[4][4];
      decays(up, end, p, gate, unit_int(unit, OFFSET(SharedUnit, rows)), shared, l);
      save_decays(saved, up, shared, l);
    }
    wait_states(d);
    scale_states(d, last, p.scale, make_scaling(shared, p.centre, l), l);
    if (SK_IN_U) sync_block();
    l = make_lane(warp, places);
    Operands o;
    make_operands(o, saved, end, shared, scalars, l);
    store_anchor_ends(end, shared, l);
    fence_async_proxy();
    sync_block();

    // 3. Sums over pairs of tokens: dq, dk and dgc.
    l = make_lane(warp, places);
    fetch_shared(p, shared, n + 1, l);
    float dk[4][4];
    if (l.token_half)
      sum_pairs<1>(d, dk, o, saved, p, shared, scalars, l);
    else
      sum_pairs<0>(d, dk, o, saved, p, shared, scalars, l);
    l = make_lane(warp, places);
    if (l.token_half)
      sum_tokens(shared + OFFSET(SharedMemory, later_sums), l, [&](int j, int e) { return d.cs[j][e]; });
    sum_channels(d, dk, p, shared, l);
    add_values(shared, l);
    copy_async_wait<0>();
    fence_async_proxy();
    sync_block();

    // 4. Through the norms and the gate to device memory.
    l = make_lane(warp, places);
    store_gradients(d, dk, p, shared, n, unit, gate, states, scalars, last, l);
  }
  if (n) {
    sync_block();
    store_partial_sums(p, shared, unit_at(shared, n - 1), l);
  }
  copy_async_wait<0>();
  clear_gradient_tail(p, GROUPED ? 4 * K : 2 * channels_of(p), G_FLOAT ? 4 : 2,
                      {(u32)(block_index() * THREADS + thread_index()), (u32)(grid_blocks() * THREADS)});
}
