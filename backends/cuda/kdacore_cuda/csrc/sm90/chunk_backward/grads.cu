// Backward on Hopper, third launch: every input gradient of a unit, from the inputs and the scan's u (v'), dr, h and dh.
//
// A block keeps its multiprocessor and takes every grid-th unit. What the next unit needs is on its way as soon as its place is
// free: the workspace's images and d_o once the states have been read, v, q, k and g as each warp is done with its own part.
#include "sm90/chunk_backward/grads_shared_memory.cuh"
#include "sm90/chunk_backward/grads_loads.cuh"
#include "sm90/chunk_backward/grads_pairs.cuh"
#include "sm90/chunk_backward/grads_values.cuh"
#include "sm90/chunk_backward/grads_states.cuh"
#include "sm90/chunk_backward/grads_gate.cuh"
#include "sm90/chunk_backward/grads_operands.cuh"
#include "sm90/chunk_backward/grads_pair_sums.cuh"
#if BOUNDED
#include "sm90/chunk_backward/grads_pair_sums_bounded.cuh"
#else
#include "sm90/chunk_backward/grads_pair_sums_unbounded.cuh"
#endif
#include "sm90/chunk_backward/grads_stores.cuh"

KDA_KERNEL(THREADS, 1) grads(KDA_PARAM ChunkBackwardParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  Lane l = make_lane(warp);
  if (l.thread == 0) {
    barrier_init(shared + OFFSET(SharedMemory, pairs_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, states_full), 1);
    fence_barrier_init();
    write_unit(p, unit_at(shared, 0), block_index(), 0, p.N);
    write_grid_step(p, shared);
    write_next_unit(p, shared, unit_at(shared, 1), unit_at(shared, 0));
  }
  sync_block();
  // Of unit n of the block, if there is one. In turns: d_o; v; q, k and g, one group each.
  const auto fetch_shared = [&](int n) {
    const u32 unit = unit_at(shared, n);
    if (unit_int(unit, OFFSET(SharedUnit, rows))) {
      if (l.thread == WORKSPACE_THREAD) fetch_workspace(p, shared, n);
      fetch_outputs(p, shared, unit, l);
    }
    copy_async_commit();
  };
  const auto fetch_values = [&](const NextUnit& from, int n) {
    if (l.thread == WORKSPACE_THREAD && from.rows) fetch_workspace_after_pairs(p, shared, n);
    fetch_own(shared + OFFSET(SharedMemory, v), from.v, p.v_st, from.rows, l);
    copy_async_commit();
  };
  const auto fetch_rest = [&](const NextUnit& from) {
    fetch_gate(p, shared, from, l);
    copy_async_commit();
  };
  fetch_shared(0);
  {
    const NextUnit from = next_unit(unit_at(shared, 0));
    fetch_values(from, 0);
    fetch_own(shared + OFFSET(SharedMemory, q), from.q, p.q_st, from.rows, l);
    fetch_own(shared + OFFSET(SharedMemory, k), from.k, p.k_st, from.rows, l);
    fetch_rest(from);
  }
  copy_async_wait<2>();
  fence_async_proxy();
  sync_block();

  int n = 0;
  for (;; ++n) {
    const u32 unit = unit_at(shared, n), gate = shared + OFFSET(SharedMemory, gate) + (n & 1) * GATE_PITCH;
    if (!unit_int(unit, OFFSET(SharedUnit, rows))) break;
    l = make_lane(warp);
    const u32 states = shared + OFFSET(SharedMemory, states) + (n & 1) * STATES_PITCH;
    const u32 scalars = shared + OFFSET(SharedMemory, rows) + (n & 1) * ROWS_BYTES, last = shared + OFFSET(SharedMemory, last) + (n & 1) * LAST_BYTES;
    const GateLoads gate_loads = load_gate(p, unit_int(unit, OFFSET(SharedUnit, hv)), l);
    Accumulators d;
    StateOperands a;
    {
      float pairs[4][4];
      {
        u32 x[8][4];
        barrier_wait(shared + OFFSET(SharedMemory, pairs_full), n & 1);
        start_pairs(pairs, x, shared, l);
        copy_async_wait<1>();
        sync_warp();
        value_gradients(p, shared, unit, scalars, l);
        warpgroup_wait<0>();
        fence_registers(pairs);
      }
      barrier_wait(shared + OFFSET(SharedMemory, states_full), n & 1);
      load_states(a, shared, 0, l);
      if (l.token_half == 0) multiply_states(a, states, l);
      start_states(d, a, shared, 0, l);
      const float largest = mask_pairs(pairs, l);
      if (l.lane == 0) store_shared(shared + OFFSET(SharedMemory, largest) + 4 * (l.thread >> 5), __float_as_uint(largest));
      store_gate_parameters(gate_loads, gate, l);
      sync_block();
      const Scaling by = make_scaling(shared, p.centre);
      if (l.thread == 0) store_shared(shared + OFFSET(SharedMemory, scaling), by.shrink, by.grow);
      store_pairs(pairs, shared, p.scale, by, l);
      if (n) store_partial_sums(p, shared, unit_at(shared, n - 1), l);
    }
    wait_states(d);
    load_states(a, shared, 4, l);
    if (l.token_half) multiply_states(a, states, l);
    start_states(d, a, shared, 4, l);
    copy_async_wait<0>();
    sync_warp();
    l = make_lane(warp);
    Decays saved;
    float end[2][ANCHORS];
    {
      float up[4][4];
      decays(up, end, p, gate, unit_int(unit, OFFSET(SharedUnit, rows)), shared, l);
      save_decays(saved, up, shared, l);
    }
    wait_states(d);
    scale_states(d, last, p.scale, make_scaling(shared, p.centre), l);
    if (SK_IN_U) sync_block();
    Operands o;
    make_operands(o, saved, end, shared, scalars, l);
    store_anchor_ends(end, shared, l);
    fence_async_proxy();
    sync_block();

    l = make_lane(warp);
    fetch_shared(n + 1);
    float dk[4][4];
    if (l.token_half) sum_pairs<1>(d, dk, o, saved, p, shared, scalars, l);
    else sum_pairs<0>(d, dk, o, saved, p, shared, scalars, l);
    copy_async_wait<0>();
    fence_async_proxy();
    sync_block();

    l = make_lane(warp);
    // Here or a little later, where it costs the fewest registers.
    if (BOUNDED && l.thread == UNIT_THREAD) write_next_unit(p, shared, unit_at(shared, n + 2), unit_at(shared, n + 1));
    const NextUnit from = next_unit(unit_at(shared, n + 1));
    fetch_values(from, n + 1);
    const float2 by = load_shared2(shared + OFFSET(SharedMemory, scaling));
    const OutputRows to = output_rows(p, unit, l);
    if (!BOUNDED && l.thread == UNIT_THREAD) write_next_unit(p, shared, unit_at(shared, n + 2), unit_at(shared, n + 1));
    NormBackward q_norm = {}, k_norm = {};
    if (!GROUPED) {
      q_norm = norm_backward(0, scalars + 4 * C, by.y, p, shared, l);
      k_norm = norm_backward(1, scalars + 8 * C, by.y, p, shared, l);
    }
    store_row_gradient(d.aq, q_norm, OFFSET(SharedMemory, q), by.y, p, p.dq, shared, unit, to, l);
    fetch_own(shared + OFFSET(SharedMemory, q), from.q, p.q_st, from.rows, l);
    store_row_gradient(dk, k_norm, OFFSET(SharedMemory, k), by.y, p, p.dk, shared, unit, to, l);
    fetch_own(shared + OFFSET(SharedMemory, k), from.k, p.k_st, from.rows, l);
    store_beta_gradient(p, shared, scalars, unit, l);
    float later[2];
    load_following_sums(later, shared, states, last, by.x, l);
    sum_following_tokens(d.cs, later, l);
    store_gate_gradient(d.cs, p, gate, by.y, shared, unit, to, l);
    fetch_rest(from);
  }
  if (n) {
    sync_block();
    store_partial_sums(p, shared, unit_at(shared, n - 1), l);
  }
  copy_async_wait<0>();
}
