// Forward of chunk_kda on Hopper where it keeps for the backward what that would recompute. Between
// prepare and the end of the forward this is the only launch: the walk forward of scan.cu, which
// also makes the outputs. With S the state (V by K) and the chunk's matrices of workspace.cuh:
//
//   h = S;   v = u - S w^T (stored in place of u);   o = S qg^T + v aqk^T;   S' = S diag(last) + v kg
//
// h and v have the bits of scan.cu: the same products in the same order.
//
// Grid: for each sequence and value head one block (WARPGROUPS 2) or two that have 64 rows of V each
// (WARPGROUPS 1). Warps: as in scan.cu, but those that load d_o there clear rows that belong to no
// sequence here. o is computed transposed (V by tokens) and stored one chunk later, while the matrix
// unit works, through the next chunk's rows of u, which no other warp reads.
//
// Macros from the host: WARPGROUPS.
#include "common/clear_rows.cuh"
#include "generated/scan_outputs_params.cuh"
#include "sm90/chunk_backward/scan_state.cuh"
#include "sm90/chunk_forward/segments/output_rows.cuh"

// Operands of one chunk.
struct OutputsStage {
  TileImage kg, w, qg;
  SquareImage aqk;
  u16 u[BLOCK_V][64];  // this block's rows
  float decay[K];      // of the whole chunk
};
constexpr u32 STAGE_BYTES = sizeof(OutputsStage);
constexpr int STAGES = WARPGROUPS == 2 ? 2 : 3;
struct OutputsMemory {
  Aligned<OutputsStage> stages[STAGES];
  OutputStaging out[STATE_WARPS];
  u64 full[STAGES], empty[STAGES];  // barriers
};
// Without the padding that the alignment of stages adds.
KDA_SHARED_BYTES(OFFSET(OutputsMemory, empty) + sizeof(u64[STAGES]));
using OutputsRing = Ring<STAGES, OFFSET(OutputsMemory, stages), sizeof(Aligned<OutputsStage>),
                         OFFSET(OutputsMemory, full), 8 * STAGES>;

__device__ __forceinline__ void init_barriers(u32 shared) {
  if (thread_index() < 2 * STAGES) {
    barrier_init(shared + OFFSET(OutputsMemory, full) + 8 * thread_index(),
                 thread_index() < STAGES ? 1 : WARP_ARRIVALS * STATE_WARPS);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

__device__ __forceinline__ void produce(const ScanOutputsParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  OutputsRing ring = {shared};
  for (int c = task.begin; c < task.end; ++c) {
    const long long at = task.at + (long long)c * p.HV;
    const u32 stage = ring.stage(), full = ring.full();
    ring.wait_empty();
    barrier_expect(full, STAGE_BYTES);
    copy_in(stage + OFFSET(OutputsStage, w), image_of(p.w, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(OutputsStage, qg), image_of(p.qg, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(OutputsStage, u), u_of(p, task, at), U_BYTES, full);
    copy_in(stage + OFFSET(OutputsStage, decay), image_of(p.last, at, LAST_BYTES), DECAY_BYTES, full);
    copy_in(stage + OFFSET(OutputsStage, kg), image_of(p.kg, at, TILE_BYTES), TILE_BYTES, full);
    copy_in(stage + OFFSET(OutputsStage, aqk), image_of(p.aqk, at, SQUARE_BYTES), SQUARE_BYTES, full);
    ring.next();
  }
}

// A wait for what has come already. It ends a basic block: the assembler would move loads of shared
// memory, and what needs them, between products that are requested one after another.
__device__ __forceinline__ void end_basic_block(const OutputsRing& ring) { ring.wait_full(); }

// This warp's rows of u, the block's first one at `from`.
__device__ __forceinline__ void load_u(TokenOperand& u, const Lane& rows, u32 from) {
  const u32 at = from + rows.row * IMAGE_ROW + rows.piece;
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4(u.a[kk], at ^ kk << 5);
}

// `l` places the warp's rows of the state, `rows` those of u and o in the block.
__device__ __forceinline__ void scan_outputs(const ScanOutputsParams& p, const Task& task, const ScanLane& l,
                                             const Lane& rows) {
  State state;
  read_state(state, l, task, p.h0, p.flags, p);
  Operand h;
  pack_state(h, state);
  const long long token_bytes = 2ll * p.HV * values_of(p);
  // Of the chunk before.
  OutputPlace to = output_place<PackedRows>(reinterpret_cast<unsigned char*>(p.o) +
                                                (task.s.batch * p.T + task.s.first - C) * token_bytes +
                                                2 * (task.hv * values_of(p) + task.block * V + task.part * BLOCK_V + l.row),
                                            (int)token_bytes, rows);
  TokenOperand out = {};  // of the chunk before
  int out_tokens = 0, left = task.s.length;
  const bool real = has_piece(task.part * BLOCK_V + l.row + PIECE * (l.lane & 1), values_of_block(p, task.block));
  OutputsRing ring = {l.shared};
#pragma unroll 1
  for (int c = task.begin; c < task.end; ++c) {
    long long at = task.at + (long long)c * p.HV;
    if constexpr (NARROW) at = value_place(p, task, at);
    const u32 stage = ring.stage();
    const PackedRows own = {stage + OFFSET(OutputsStage, u) + l.row * IMAGE_ROW};  // where o is staged
    const u64 w = operand_descriptor(stage + OFFSET(OutputsStage, w), 16, 1024),
              kg = operand_descriptor(stage + OFFSET(OutputsStage, kg), SQUARE_BYTES, 1024);
    const u64 qg = step(w, OFFSET(OutputsStage, qg) - OFFSET(OutputsStage, w)),
              aqk = step(w, OFFSET(OutputsStage, aqk) - OFFSET(OutputsStage, w));
    ring.wait_full();

    float prediction[2 * C_TILES][4] = {}, o[2 * C_TILES][4] = {};
    fence_registers(prediction);
    fence_registers(o);
    warpgroup_fence();
    multiply_channels(prediction, h, w);
    warpgroup_commit();
    multiply_channels(o, h, qg);
    warpgroup_commit();
    end_basic_block(ring);

    // Meanwhile: u is loaded, the outputs before are staged, the state decays, h is stored. Groups of
    // copies alternate between h and v, so waiting for all but the last one is enough.
    TokenOperand u, v;
    load_u(u, rows, stage + OFFSET(OutputsStage, u));
    stage_output(out, own, rows);
    decay_state(state, l, stage + OFFSET(OutputsStage, decay));
    wait_stores<1>(l);
    stage_state(l, h);
    fence_staged();
    if (l.lane == 0) {
      store_state_image(l, task, p.h, at);
      copy_out_commit();
    }
    warpgroup_wait<1>();
    fence_registers(prediction);
    subtract(v, u, prediction);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, v.a[kk], over_tokens(kg, kk), 1);
    warpgroup_commit();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(o, v.a[kk], step(aqk, kk * 32), 1);
    warpgroup_commit();
    const OutputRows<PackedRows> output = read_output(own, rows);
    wait_stores<1>(l);
    stage_rows(l, v);
    fence_staged();  // also before the bulk copy that will overwrite what was staged of o
    if (l.lane == 0) {
      store_rows_image(l, task, p.u, at);
      copy_out_commit();
    }
    store_output(output, to, real ? out_tokens : 0, rows);
    warpgroup_wait<1>();
    fence_registers(state.s);
    pack_state(h, state);
    fence_registers(h.a);
    end_basic_block(ring);
    warpgroup_wait<0>();
    fence_registers(o);
    release(l, ring.empty());
    ring.next();
    pack_rows(out, o);
    out_tokens = left < C ? left : C;
    left -= C;
    next_chunk(to);
  }
  if (out_tokens) {  // the producer uses no stage any more
    const PackedRows own = {l.shared + OFFSET(OutputsMemory, stages) + OFFSET(OutputsStage, u) +
                            l.row * IMAGE_ROW};
    stage_output(out, own, rows);
    store_output(read_output(own, rows), to, real ? out_tokens : 0, rows);
  }
  if (p.ht) write_state(state, l, task, p.ht, p.flags, p);
  wait_stores<0>(l);
}

// Zeros in rows of o that belong to no sequence, by the warps that have nothing else to do.
__device__ __forceinline__ void clear_share(const ScanOutputsParams& p, int warp) {
  constexpr u32 WARPS = THREADS / 32 - STATE_WARPS - 1;
  const u32 number = block_index() * WARPS + (warp - STATE_WARPS - 1);
  clear_tail(p, 2ll * p.HV * values_of(p), {32 * number + (thread_index() & 31), 32 * WARPS * grid_blocks()});
}

KDA_KERNEL(THREADS, 1) scan_outputs(KDA_PARAM ScanOutputsParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const int nh = head_of_block(p, block_index() / BLOCKS_V), n = nh / p.HV;
  const Task task = make_task(p, false, n, nh - n * p.HV, block_index() % BLOCKS_V,
                              block_in_head(p, block_index() / BLOCKS_V, nh));
  init_barriers(shared);
  if (warp < STATE_WARPS) {
    set_role_registers<1>();
    ScanLane l = make_lane(shared, warp);
    l.out = shared + OFFSET(OutputsMemory, out) + warp * OUT_BYTES;
    scan_outputs(p, task, l, make_lane(warp));
  } else {
    set_role_registers<0>();
    if (warp == STATE_WARPS)
      produce(p, task, shared);
    else
      clear_share(p, warp);
  }
}
