// chunk_kda in segments on Hopper, last launch: every segment from its own start state. With S the
// state (V by K) and for each chunk its matrices of chunk_operands.cuh:
//
//   r = v - S kd^T;   o = S qg^T + r aqt^T;   S' = S diag(last) + r kt
//
// Grid: a block a segment and value head (WARPGROUPS 2), or two with half of the state's rows each, which may
// be a cluster (CLUSTER 2).
// Warps, rings and synchronisation: segment_scan.cuh. o is computed transposed (V by tokens) and
// stored one chunk later, while the matrix unit works, through the places of the next chunk's values
// that no other warp reads.
//
// Macros from the host: those of segment_scan.cuh; COMPOSES: no launch before this one made start states
// (compose_start.cuh), for sequences that begin with zeros.
#include "common/clear_rows.cuh"
#include "sm90/chunk_forward/segments/compose_start.cuh"
#include "sm90/chunk_forward/segments/inner_marks.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"

__device__ __forceinline__ Segment find_block(const SegmentParams& p, int block) {
  const int slot = block / p.HV, hv = block - slot * p.HV;
  return find_slot_segment(p, slot, [&](int n, int index) { return find_segment(p, n, index, hv); });
}

// Row of the first checkpoint of sequence n; all lanes.
__device__ __forceinline__ long long first_checkpoint(const SegmentParams& p, int n) {
  if (!p.cu_seqlens) return n * ((p.T + p.ckpt_every - 1) / p.ckpt_every);
  long long rows = 0;
  for (int m = 0; m < n; ++m) rows += (find_sequence(p, m).length + p.ckpt_every - 1) / p.ckpt_every;
  return rows;
}

// `block`: whose segment this is. What is needed only now and then is found again, so that it takes no
// registers in the loop over chunks.
__device__ __forceinline__ void scan_segment(const SegmentParams& p, u32 shared, const Lane& l) {
  const auto find_own = [&] { return find_block(p, opaque(block_index()) / PARTS); };
  const int row = l.row + l.g;
  State state;
  OperandRing ring = {shared};
  if constexpr (COMPOSES) {
    const Segment own = find_own();
    state = {};
    if (own.index) {
      compose_start(p, own, state, ring, l);
      if (p.flags & FLAG_KEEP_STARTS)
        write_pairs(state.s, row, 2 * l.t, p.starts + own.place * FULL_STATE_BYTES);
    }
  }
  const Segment x = find_own();
  if constexpr (!COMPOSES) {
    if (x.index || (!x.last() && keeps_initial_state(p)))
      read_pairs(state.s, row, 2 * l.t, p.starts + x.place * FULL_STATE_BYTES);
    else
      read_state(state, row, l.t, initial_state_at(p, x.n, x.hv, K * V), p.flags);
  }
  const auto every = [&] { return opaque(p.ckpt_every) / C; };  // chunks between checkpoints
  u64 checkpoint = 0;                                           // the next one
  const auto write_checkpoint = [&] {
    write_state(state, row, l.t, checkpoint, p.flags);
    checkpoint += (u64)p.HV * matrix_bytes(p.flags);
  };
  if (p.ckpt_every) {
    // One where the segment begins comes from the segment before it (inner_marks.cuh).
    const long long i = first_checkpoint(p, x.n) + (x.index ? x.begin / every() + 1 : 0);
    checkpoint = matrix_at(p.ckpt, i * p.HV + x.hv, p.flags);
    if (x.index == 0 && x.end) write_checkpoint();
  }
  const long long token_bytes = 2ll * p.HV * V;
  // Of the chunk before, whose output is stored while this one's products are computed.
  OutputPlace to = output_place<ValueRows>(
      reinterpret_cast<unsigned char*>(p.o) +
          (x.s.batch * p.T + x.s.first + (x.begin - 1ll) * C) * token_bytes + 2 * (x.hv * V + l.row),
      (int)token_bytes, l);
  int left = x.s.length - x.begin * C;  // tokens from this chunk on
  Operand s;
  pack_state(s, state);
  TokenOperand out = {};  // of the chunk before
  int out_tokens = 0;
  int c = x.begin;
#pragma unroll 1
  while (c < x.end) {
    int stop = x.end;
    if (p.ckpt_every) {
      const int next = (c / every() + 1) * every();
      stop = next < stop ? next : stop;
    }
    if (p.marks) {
      const Segment own = find_own();
      int mark = next_mark<C>(p, own.s.first, own.s.length, c);
      if (mark == c) {
        keep_marked_states(p, own, c, state, l);
        mark = next_mark<C>(p, own.s.first, own.s.length, c + 1);
      }
      stop = mark < stop ? mark : stop;
    }
#pragma unroll 1
    for (; c < stop; ++c) {
      const u32 stage = ring.stage();
      const ValueRows rows = values_of(stage, l);
      const u64 kd = operand_descriptor(stage + OFFSET(ChunkOperands, kd), 16, 1024),
                kt = operand_descriptor(stage + OFFSET(ChunkOperands, kt), SQUARE_BYTES, 1024);
      const u64 qg = step(kd, OFFSET(ChunkOperands, qg) - OFFSET(ChunkOperands, kd)),
                aqt = step(kd, OFFSET(ChunkOperands, aqt) - OFFSET(ChunkOperands, kd));
      ring.wait_full();
      float prediction[2 * C_TILES][4] = {}, o[2 * C_TILES][4] = {};
      fence_registers(prediction);
      fence_registers(o);
      warpgroup_fence();
      multiply_channels(prediction, s, kd);
      warpgroup_commit();
      multiply_channels(o, s, qg);
      warpgroup_commit();
      end_basic_block(ring);
      TokenOperand v, r;
      load_values(v, l, rows);
      stage_output(out, rows, l);
      decay_state(state, l.t, stage + OFFSET(ChunkOperands, last));
      warpgroup_wait<1>();
      fence_registers(prediction);
      subtract(r, v, prediction);
      warpgroup_fence();
#pragma unroll
      for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, r.a[kk], over_tokens(kt, kk), 1);
      warpgroup_commit();
#pragma unroll
      for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(o, r.a[kk], step(aqt, kk * 32), 1);
      warpgroup_commit();
      const OutputRows<ValueRows> output = read_output(rows, l);
      store_output(output, to, out_tokens, l);
      warpgroup_wait<1>();
      fence_registers(state.s);
      pack_state(s, state);
      fence_registers(s.a);
      end_basic_block(ring);
      warpgroup_wait<0>();
      fence_registers(o);
      release(l, ring);
      ring.next();
      pack_rows(out, o);
      out_tokens = left < C ? left : C;
      left -= C;
      next_chunk(to);
    }
    if (p.ckpt_every && c % every() == 0 && (c < x.end || !find_own().last())) write_checkpoint();
  }
  const auto store_last_output = [&](u32 stage) {
    if (out_tokens <= 0) return;
    const ValueRows rows = values_of(stage, l);
    stage_output(out, rows, l);
    const OutputRows<ValueRows> output = read_output(rows, l);
    store_output(output, to, out_tokens, l);
    out_tokens = 0;
  };
  const Segment own = find_own();
  if (own.last()) {
    if (const u64 final = final_state_at(p, own.n, own.hv, K * V))
      write_state(state, row, l.t, final, p.flags);
  }
  if (p.marks) {
    keep_states_at_end(p, own, state, l);
    take_marked_steps(p, own, ring, l, store_last_output);
  }
  if constexpr (COMPOSES) {  // another stage may still have a map, which other warps read
    store_last_output(shared + STAGE_LEAD + (ring.slot ? ring.slot - 1 : STAGES - 1) * STAGE_PITCH);
  } else {
    store_last_output(shared + STAGE_LEAD);  // if not before; then the producer uses no stage any more
  }
}

// Rows of o that no sequence writes, by the warps that hold no state.
__device__ __forceinline__ void clear_share(const SegmentParams& p, int warp) {
  constexpr u32 WARPS = THREADS / 32 - STATE_WARPS;
  if (warp < STATE_WARPS) return;
  const u32 number = block_index() * WARPS + (warp - STATE_WARPS);
  clear_unused_rows(p, 2ll * p.HV * V, {32 * number + (thread_index() & 31), 32 * WARPS * grid_blocks()});
}

KDA_KERNEL(THREADS, 1) KDA_CLUSTER(CLUSTER) output(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  // The launch before this one makes start states, if sequences have more than one segment. All else that is
  // read, records and values, was there before that let this one begin, and is loaded at once.
  if (p.segments < 2) wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  {
    const Segment x = find_block(p, block_index() / PARTS);
    if (x.index && x.begin >= x.s.chunks) {
      wait_for_inputs();
      return clear_share(p, warp);
    }
  }
  make_barriers(shared);
  const int block = opaque(block_index()) / PARTS,
            part =
                opaque(block_index()) % PARTS;  // each role finds its segment: the producer has few registers
  if (warp < STATE_WARPS) {
    set_role_registers<1>();
    wait_for_inputs();
    scan_segment(p, shared, make_lane(warp, part));
  } else {
    set_role_registers<0>();
    const Segment x = find_block(p, block);
    OperandRing ring = {shared};
    if constexpr (COMPOSES) {
      if (maps_before(x.index)) {
        wait_for_inputs();
        produce_maps(p, x, ring);
      }
    }
    produce(p, x, ring, part);
    if (p.marks) produce_marks(p, x, ring, part);
    wait_for_inputs();
    clear_share(p, warp);
  }
  leave_together();
}
