// A scan warp carries 16 columns of the state through the sequence, four warps a warpgroup. The
// state lies transposed (V by K) in float32 accumulators, so that its bf16 copy is the next
// product's left operand as it is; tokens are the product's short dimension.
#pragma once

#include "sm90/chunk_forward/scan_chunk.cuh"
#include "sm90/chunk_forward/scan_chunk_split.cuh"
#include "sm90/chunk_forward/stage_copies.cuh"

// The state of a sequence cut in two: from a warp of the cluster with the first part to the same
// warp of the cluster with the rest, which has exactly the same elements; and a flag that says it
// is written. Flags are set to a number that no other launch has and cleared by the thread that
// waited, so that memory needs no clearing and a graph may be replayed.
struct CutStateSlot {
  u64 state, flag;
};
__device__ __forceinline__ CutStateSlot cut_state_slot(const ChunkForwardParams& p, int cluster, int rank,
                                                       int warp, int lane) {
  constexpr u32 BYTES = WARP_V * K * 4;
  const u64 at = ((u64)cluster * SCANNERS + rank) * SCAN_WARPS + warp,
            states = p.workspace + TICKETS_BYTES,
            flags = states + (u64)p.clusters * SCANNERS * SCAN_WARPS * BYTES;
  return {states + at * BYTES + 16 * lane, flags + 8 * at};
}
__device__ __forceinline__ void send_cut_state(const ChunkForwardParams& p, const ScanState& state,
                                               const CutStateSlot& to, int lane) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
    const float (&x)[4] = state.s[j];
    store_global(reinterpret_cast<void*>(to.state + 512 * j),
                 make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                            __float_as_uint(x[3])));
  }
  sync_warp();
  if (lane == 0) set_flag(to.flag, p.launch);
}
__device__ __forceinline__ void receive_cut_state(const ChunkForwardParams& p, ScanState& state,
                                                  const CutStateSlot& from, int lane) {
  if (lane == 0) wait_and_clear_flag(from.flag, p.launch);
  sync_warp();
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
    const uint4 x = load_written(from.state + 512 * j);
    state.s[j][0] = __uint_as_float(x.x), state.s[j][1] = __uint_as_float(x.y);
    state.s[j][2] = __uint_as_float(x.z), state.s[j][3] = __uint_as_float(x.w);
  }
}

__device__ __forceinline__ ScanLane make_scan_lane(u32 shared, int warp, int rank) {
  ScanLane l;
  l.lane = opaque(thread_index() & 31);
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.tile = opaque(tile_offset((l.lane >> 4) * 8 + (l.lane & 7), l.lane >> 3 & 1));
  l.piece = opaque(tile_offset(l.lane >> 1, l.lane & 1));
  l.triangle = opaque((l.lane >> 4) * 128 + (l.lane & 7) * 16 + (l.lane >> 3 & 1) * 256);
  l.v0 = rank * BLOCK_V + warp * WARP_V;
  l.values = opaque(shared + OFFSET(SharedMemory, values) + warp * V_DEPTH * 2 * TILE_BYTES);
  l.out = opaque(shared + OFFSET(SharedMemory, out) + warp * 2 * TILE_BYTES);
  l.kq = operand_descriptor(shared + OFFSET(SharedMemory, stages) + OFFSET(ChunkImage, kq), 16, 1024);
  l.kg = operand_descriptor(shared + OFFSET(SharedMemory, stages) + OFFSET(ChunkImage, kg), ROWS_BYTES, 1024);
  return l;
}

// Tells the block that prepares a stage that this warp has read it. If SPACED both are told: any block, or a helper, may
// prepare the next chunk of a stage.
__device__ __forceinline__ void warp_arrive_empty(u32 shared, u32 slot, int lane) {
  const u32 empty = shared + OFFSET(SharedMemory, empty) + 8 * slot;
  if constexpr (SEPARATE) {
    warp_arrive_remote(cluster_address(room_at(shared, slot), sender_of(slot)), lane);
  } else if constexpr (SPACED) {
    if constexpr (EVERY_LANE) {
      for (u32 rank = 0; rank < CLUSTER; ++rank) warp_arrive_remote(cluster_address(empty, rank), lane);
      return;
    }
    sync_warp();
    if (lane < CLUSTER) barrier_arrive_remote(cluster_address(empty, lane));  // a lane a block
  } else if constexpr (CLUSTER > 1) {
    warp_arrive_remote(cluster_address(empty, slot % CLUSTER), lane);
  } else {
    warp_arrive(empty, lane);
  }
}

// A state of the caller's, or a block of one: its address, if there is one, and what is read from it and written to it.
__device__ __forceinline__ u64 own_initial_state(const ChunkForwardParams& p, int n, int hv) {
  if constexpr (NARROW)
    return part_of_state(p, initial_state_at(p, n, gate_head(p, hv), state_elements(p)), hv);
  return initial_state_at(p, n, hv, K * V);
}
__device__ __forceinline__ u64 own_final_state(const ChunkForwardParams& p, int n, int hv) {
  if constexpr (NARROW) return part_of_state(p, final_state_at(p, n, gate_head(p, hv), state_elements(p)), hv);
  return final_state_at(p, n, hv, K * V);
}
__device__ __forceinline__ void read_own_state(ScanState& state, const ScanLane& l, u64 base,
                                               const ChunkForwardParams& p, int hv) {
  if constexpr (NARROW)
    read_real_elements(state.s, own_dims(p, hv), l.v0 + l.g, 2 * l.t, base, p.flags);
  else
    read_state(state, l, base, p.flags);
}
__device__ __forceinline__ void write_own_state(const ScanState& state, const ScanLane& l, u64 base, int flags,
                                                const ChunkForwardParams& p, int hv) {
  if constexpr (NARROW)
    write_real_elements(state.s, own_dims(p, hv), l.v0 + l.g, 2 * l.t, base, flags);
  else
    write_state(state, l, base, flags);
}

// All chunks of this cluster's tasks, 16 columns of V: waits for a prepared chunk, advances the state, stores
// the chunk's output.
__device__ __forceinline__ void scan_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
  if (!advance_to_step(p, shared, task, 0)) return;
  const ScanLane l = make_scan_lane(shared, warp, rank);
  const long long v_chunk = 2ll * C * p.v_st, o_chunk = NARROW ? 2ll * C * value_row(p) : 2ll * C * p.HV * V;
  // A valid address, not read.
  const unsigned char* unread_address = reinterpret_cast<const unsigned char*>(p.v);
  const long long matrix = (long long)K * V * (p.flags & FLAG_STATE_BF16 ? 2 : 4);
  u32 slot = 0, parity = 0;
  const auto release = [&] {
    warp_arrive_empty(shared, slot, l.lane);
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  };
  TaskPart part = make_task_part(p, shared, task);
  const unsigned char* v;  // this lane's 16 bytes of a chunk's V and o
  unsigned char* o;
  int left;  // real if positive
  bool has_values = true;  // this lane's, of this block of them
  const auto find_tokens = [&] {
    const SequenceHead& sequence = part.sequence;
    const int token = part.chunk * C + (l.lane >> 1), at_v = l.v0 + 8 * (l.lane & 1);
    if constexpr (NARROW) {
      const int head = gate_head(p, sequence.hv), at = first_value(p, sequence.hv) + at_v;
      has_values = at < p.V;
      v = reinterpret_cast<const unsigned char*>(
          p.v + 2 * (sequence.batch * p.v_sb + (sequence.first + token) * p.v_st + head * p.v_sh + at));
      o = reinterpret_cast<unsigned char*>(
          p.o + 2 * ((sequence.batch * p.T + sequence.first + token) * value_row(p) + (long long)head * p.V + at));
      return;
    }
    v = reinterpret_cast<const unsigned char*>(
        p.v +
        2 * (sequence.batch * p.v_sb + (sequence.first + token) * p.v_st + sequence.hv * p.v_sh + at_v));
    o = reinterpret_cast<unsigned char*>(
        p.o + 2 * (((sequence.batch * p.T + sequence.first + token) * p.HV + sequence.hv) * V + at_v));
  };
  const auto fetch_first_values = [&] {
    left = part.tokens - part.chunk * C - (l.lane >> 1);
    if (NARROW && !has_values) left = 0;
#pragma unroll
    for (int i = 0; i < V_DEPTH - 1; ++i) {
      fetch_values(l, v, v_chunk / 2, unread_address, i, left - i * C);
      copy_async_commit();
      v += v_chunk;
    }
  };
  find_tokens();
  fetch_first_values();
  bool more = true;
  while (more) {
    int c = part.chunk;
    ScanState state = {};
    if (c) {
      const int from = load_own(shared + OWN_CLUSTER) - 1;
      receive_cut_state(p, state, cut_state_slot(p, from, rank, warp, l.lane), l.lane);
    } else if (const u64 from = own_initial_state(p, part.sequence.n, part.sequence.hv)) {
      read_own_state(state, l, from, p, part.sequence.hv);
      if (!NARROW && part.sequence.hv + 1 < p.HV) prefetch_state(l, from + matrix, p.flags);
    }
    u64 ckpt = 0;
    if (p.ckpt_every)
      ckpt = NARROW ? own_checkpoint(p, first_checkpoint(p, part.sequence, l.lane), part.sequence.hv)
                    : p.ckpt + (first_checkpoint(p, part.sequence, l.lane) * p.HV + part.sequence.hv) * matrix;
    int ring = 0;
    Output out = {};  // of the chunk before, stored while the matrix unit works on the next
    int out_left = 0;
    o -= o_chunk;
    while (c < part.end) {
      int end = part.end;
      if (ckpt || p.marks) {
        // Found again for every block, so that nothing of it takes registers in the loop over chunks.
        const SequenceHead x = make_sequence_head(p, opaque(part.sequence.n), part.sequence.hv, C);
        const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between states written
        int mark = 1 << 30;
        if (p.marks) mark = next_mark<C>(p, x.first, x.length, c);
        const bool marked = c == mark;
#pragma unroll 1
        for (int i = ckpt && c % block == 0 ? -1 : 0; i < (marked ? p.marks : 0); ++i) {
          MarkedState to = {NARROW ? ckpt + c / block * checkpoint_row(p) : ckpt + c / block * p.HV * matrix,
                            p.flags};
          if (i < 0 || marked_state<C>(p, i, x.first, x.length, c, x.hv, K * V, to))
            write_own_state(state, l, to.at, to.flags, p, x.hv);
        }
        if (marked) mark = next_mark<C>(p, x.first, x.length, c + 1);
        end = minimum(minimum(end, (c / block + 1) * block), mark);
      }
#pragma unroll 1
      for (; c < end; ++c) {
        const StageRef at = {slot, shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH,
                             shared + OFFSET(SharedMemory, full) + 8 * slot, parity};
        const auto while_reading = [&](const uint4(&rows)[2]) {
          store_output(rows, o, o_chunk / 2, out_left);
          o += o_chunk;
          out_left = left;
          copy_async_wait<V_DEPTH - 2>();
          sync_warp();
        };
        const auto while_updating = [&] {
          fetch_values(l, v, v_chunk / 2, unread_address, ring == 0 ? V_DEPTH - 1 : ring - 1,
                       left - (V_DEPTH - 1) * C);
          copy_async_commit();
          v += v_chunk;
          left -= C;
          ring = ring + 1 == V_DEPTH ? 0 : ring + 1;
        };
        const u32 tiles = l.values + ring * 2 * TILE_BYTES;
        if constexpr (SEPARATE)
          scan_chunk_split(state, out, l, at, tiles, while_reading, while_updating);
        else
          scan_chunk<false>(state, out, l, at, tiles, false, true, while_reading, while_updating);
        release();
      }
    }
    uint4 rows[2];
    write_output(out, l);
    read_output(rows, l);
    store_output(rows, o, o_chunk / 2, out_left);
    copy_async_wait<0>();
    sync_warp();
    const TaskPart done = part;
    if (!done.sequence.chunks) {
      barrier_wait(shared + OFFSET(SharedMemory, full) + 8 * slot, parity);
      release();
    }
    const int step = task.stop;
    // If SPACED there is one task. (Without what follows for cut ones, too, the assembler would spill.)
    const Move move = SPACED ? NO_STEP : move_to_step(p, shared, task, uniform(part.sequence.length), step);
    more = move != NO_STEP;
    if (more) {  // the first values are loaded while this state is written
      if (move == NEXT_HEAD) {
        part.sequence.hv = task.hv;
        part.end = part.sequence.chunks;
        part.tokens = part.sequence.length;
        part.shift = maximum(part.end, 1) - task.stop;
        part.chunk = part.chunk_of(step);
        if constexpr (NARROW) {
          find_tokens();
        } else {
          v += 2 * p.v_sh + (part.chunk - done.end - (V_DEPTH - 1)) * v_chunk;
          o += 2 * V + (part.chunk - done.end + 1) * o_chunk;
        }
      } else {
        part = make_task_part(p, shared, task);
        find_tokens();
      }
      fetch_first_values();
    }
    if (done.end < done.sequence.chunks) {
      const int own = load_own(shared + OWN_CLUSTER);
      send_cut_state(p, state, cut_state_slot(p, own, rank, warp, l.lane), l.lane);
    } else if (const u64 to = own_final_state(p, done.sequence.n, done.sequence.hv)) {
      write_own_state(state, l, to, p.flags, p, done.sequence.hv);
    }
  }
  copy_async_wait<0>();
}
