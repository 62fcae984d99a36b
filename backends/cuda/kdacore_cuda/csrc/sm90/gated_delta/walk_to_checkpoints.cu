// The gated delta rule on Hopper, after the launches that walk: checkpoints at chosen tokens. From the state at the
// start of their chunk, which a walk has left (walk_checkpoints.cuh), through the chunk's tokens before the checkpoint;
// walk_states.cuh has the products.
//
// The inverse of a chunk's system and the factors of the state are those of the chunk's record, as what a token has
// depends on earlier ones alone. Factors to the end are those of a chunk that ends at the checkpoint.
//
// Grid: two blocks a checkpoint and value head, with half of the value rows each. Warps: walk_block.cuh.
//
// Macros from the host: WARPGROUPS, 1.
#include "sm90/gated_delta/walk_checkpoints.cuh"
#include "sm90/gated_delta/walk_states.cuh"

KDA_SHARED_BYTES(sizeof(StatesStage));  // of one chunk; nothing is staged

struct CheckpointItem : Item {  // `s`: the chunk's tokens before the checkpoint
  int slot;                     // the row of the pool; negative: there is no such checkpoint
  u64 start;                    // the state at the chunk's start
};
__device__ __forceinline__ CheckpointItem find_checkpoint(const GatedDeltaParams& p, int block) {
  CheckpointItem x;
  const int index = block / PARTS;
  const int mark = index / p.HV, position = mark_token(p, mark, 0);
  x.hv = index - mark * p.HV, x.part = block % PARTS;
  x.n = 0, x.slot = -1;
  if (position < 0) return x;
  if (p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    int beyond = p.N;  // the last sequence that begins at or before the checkpoint
    while (beyond - x.n > 1) {
      const int middle = (x.n + beyond) >> 1;
      if (load_index(p.cu_seqlens, middle, wide) <= position)
        x.n = middle;
      else
        beyond = middle;
    }
  }
  const Sequence s = find_read_sequence(p, x.n);
  const int token = (int)(position - s.first), chunk = token / C;
  if (token >= s.length) return x;
  x.slot = slot_at(p, p.mark_rows, mark, p.flags & FLAG_MARK_ROWS64);
  x.start = marked_state_at(p, s, chunk, x.hv);
  x.s = {s.batch, s.first + chunk * C, token % C, token % C > 0, s.slot + chunk};
  return x;
}

__device__ __forceinline__ void begin_alone(State& state, const GatedDeltaParams& p, const CheckpointItem& item,
                                            int row, const Lane& l) {
  read_pairs(state.s, row, 2 * l.t, item.start);
  make_opaque(state);
}
__device__ __forceinline__ void end_alone(State& state, const GatedDeltaParams& p, const CheckpointItem& item,
                                          int row, const Lane& l) {
  write_own_state(state, p, row, l.t, state_at(p, p.ht, item.slot, p.ht_row, item.hv, state_elements(p)));
}

// The record's numbers of tokens.
__device__ __forceinline__ const HeadScalars& head_scalars(const GatedDeltaParams& p, const Item& item) {
  return *reinterpret_cast<const HeadScalars*>(record_at(p, item.s.slot, item.hv) + OFFSET(ChunkRecord, head));
}
__device__ __forceinline__ const KeyScalars& key_scalars(const GatedDeltaParams& p, const Item& item) {
  return *reinterpret_cast<const KeyScalars*>(record_at(p, item.s.slot, item.hv) + OFFSET(ChunkRecord, key));
}
__device__ __forceinline__ float decay_to_end(const GatedDeltaParams& p, const CheckpointItem& item, u32) {
  return exp2_fast(head_scalars(p, item).sum[item.s.length - 1]);
}
__device__ __forceinline__ ColumnFactors factors_to_end(const GatedDeltaParams& p, const CheckpointItem& item,
                                                        u32, const Lane& l) {
  const HeadScalars& head = head_scalars(p, item);
  const KeyScalars& key = key_scalars(p, item);
  const float end = head.sum[item.s.length - 1];
  ColumnFactors f;
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    const int token = 8 * j + 2 * l.t;
    const auto factor = [&](int i) {
      return i < item.s.length ? head.beta[i] * key.k_norm[i] * exp2_fast(end - head.sum[i]) : 0.0f;
    };
    f.x[j] = {factor(token), factor(token + 1)};
  }
  return f;
}

KDA_KERNEL(THREADS, 1) walk_to_checkpoints(KDA_PARAM GatedDeltaParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  make_states_barriers(shared, 1);
  wait_for_inputs();
  const CheckpointItem x = find_checkpoint(p, opaque(block_index()));
  if (x.slot < 0) return;
  const int warp = uniform(thread_index() >> 5);
  if (warp < STATE_WARPS)
    carry_state_alone<false>(p, x, shared, warp, make_lane(warp, x.part));
  else
    load_states(p, x, shared, thread_index() - 32 * STATE_WARPS);
}
