// chunk_kda in segments on Hopper, second launch: how each segment changes the state, S' = S A + B.
// A chunk, with its matrices of chunk_operands.cuh, takes S to S M + v^T kt with M = diag(last) - kd^T kt.
// From the segment's last chunk to its first, with A the product of the M of all chunks behind,
//
//   P = A^T kt^T;   B^T += P v;   A^T = A^T diag(last) - P kd
//
// from A = 1 and B = 0. Rows of A^T and B^T, which are channels of S', need no other row. So a warp keeps
// its rows of A, B and P in registers, and two of the three products are all that a chunk waits for.
//
// Grid: two blocks a segment and value head, 64 rows each. Warps, rings and synchronisation:
// segment_scan.cuh.
//
// Macros: OF_SLICE, for a slice of a row that several ranks share. The sequence that goes on behind the
// slice, the one that the last token belongs to, has A and B of its last segment, too; LEAVING_ONLY, no
// other sequence has any.
#include "sm90/chunk_backward/segment_map.cuh"
#include "sm90/chunk_forward/segments/segment_scan.cuh"
#include "sm90/chunk_forward/segments/transposed_map.cuh"

// A block's segment, and which half of the channels it has. Later segments come first: their operands
// were written last.
struct Task {
  Segment x;
  int part;
  bool idle;
};
__device__ __forceinline__ Task find_task(const SegmentParams& p, int block) {
  const int index = grid_blocks() - 1 - block, m = index / PARTS, slot = m / p.HV, hv = m - slot * p.HV;
  int j = opaque(slot / p.N), n = slot - j * p.N;
  if (p.cu_seqlens) find_slot_segment(p, slot, [&](int sequence, int segment) { n = sequence, j = segment; });
  Task task = {find_segment(p, n, j, hv), index % PARTS, false};
  if constexpr (OF_SLICE) {
    const Sequence& s = task.x.s;
    const bool leaves = s.first + s.length == p.T;
    task.idle = task.x.begin >= s.chunks || (!leaves && (LEAVING_ONLY || task.x.last()));
  } else {
    task.idle = task.x.last();
  }
  return task;
}

__device__ __forceinline__ void scan_segment(const SegmentParams& p, const Task& task, u32 shared,
                                             const Lane& l) {
  State a, b = {};  // rows of A^T and B^T
  unit_state(a, l.row + l.g, l.t);
  Operand left;
  pack_state(left, a);
  OperandRing ring = {shared}, before = ring;
  // Once a chunk is there; its products begin later.
  const auto begin_chunk = [&] {
    ring.wait_full();
    decay_state(a, l.t, ring.stage() + OFFSET(ChunkOperands, last));
  };
  begin_chunk();
#pragma unroll 1
  for (int left_over = task.x.end - task.x.begin; left_over > 0; --left_over) {
    const u32 stage = ring.stage();
    const u64 kt = operand_descriptor(stage + OFFSET(ChunkOperands, kt), 16, 1024),
              kd = operand_descriptor(stage + OFFSET(ChunkOperands, kd), SQUARE_BYTES, 1024),
              v = operand_descriptor(stage + STAGED_BYTES, SQUARE_BYTES, 1024);
    float products[2 * C_TILES][4] = {};  // P
    fence_registers(products);
    fence_registers(left.a);
    warpgroup_fence();
    multiply_channels(products, left, kt);
    warpgroup_commit();
    warpgroup_wait<0>();  // for B of the chunk before, too
    fence_registers(products);
    fence_registers(b.s);
    if (before.slot != ring.slot) release(l, before);
    TokenOperand r;
    pack_rows(r, products);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_subtract(a.s, r.a[kk], over_tokens(kd, kk));
    warpgroup_commit();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(b.s, r.a[kk], over_tokens(v, kk), 1);
    warpgroup_commit();
    before = ring;
    ring.next();
    warpgroup_wait<1>();
    fence_registers(a.s);
    pack_state(left, a);
    if (left_over > 1) begin_chunk();  // while B is multiplied
  }
  warpgroup_wait<0>();
  fence_registers(b.s);
  // The latency of the next kernel's launch overlaps with the stores below. Triggered before the loop, the next
  // kernel's blocks would slow this one down.
  launch_dependents();
  store_transposed_map(a, p.maps + task.x.place * MAP_BYTES, task.part, shared, l);
  write_transposed_pairs(b.s, l, p.addends + task.x.place * FULL_STATE_BYTES);
  if (thread_index() == 0) copy_out_wait_read<0>();
}

// Loads the segment's chunks, the last one first. Values are inputs of the call, older than the launch that made
// the records, so the first ones are requested before that has ended.
__device__ __forceinline__ void produce_backwards(const SegmentParams& p, const Segment& x,
                                                  OperandRing& ring) {
  const int last = x.end - 1;
  u64 from = first_record(p, x) + (last - x.begin) * record_step(p);
  Values v = find_values(p, x.s, (long long)last * C, x.hv, 0);
  v.rows = x.s.length - last * C;
  v.rows = v.rows < C ? v.rows : C;
  // Products see values that small copies brought only after a fence. The threads that copied make it, once the
  // next chunk has been requested: in the warps that multiply it would take up to 60 ns of each chunk.
  const auto show = [](const OperandRing& stage) {
    fence_async_proxy();
    barrier_arrive(stage.full());
  };
  OperandRing before = ring;
  for (int c = last; c >= x.begin; --c, from -= record_step(p)) {
    ring.wait_empty();
    ask_for_values(ring, v);
    copy_async_commit();
    if (c == last) wait_for_inputs();
    ask_for_record(ring, from, STAGED_BYTES);
    if (c < last) {
      copy_async_wait<1>();
      show(before);
    }
    before = ring;
    ring.next();
    v.at -= C * v.step;
    v.rows = C;
  }
  copy_async_wait<0>();
  show(before);
}

KDA_KERNEL(THREADS, 1) maps(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_barriers(shared);
  const Task task = find_task(p, block_index());
  if (task.idle) return wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  if (warp < STATE_WARPS) {
    wait_for_inputs();
    scan_segment(p, task, shared, make_lane(warp, task.part));
  } else {
    OperandRing ring = {shared};
    produce_backwards(p, task.x, ring);
  }
}
