// A scan warp carries 16 columns of the state through the sequence, four warps a warpgroup. The
// state lies transposed (V by K) in float32 accumulators, so that its bf16 copy is the next
// product's left operand as it is; tokens are the product's short dimension.
#pragma once

#include "common/chunk_forward/marks.cuh"
#include "common/chunk_forward/solve.cuh"
#include "common/warp_arrivals.cuh"
#include "common/mma_operands.cuh"
#include "sm90/chunk_forward/schedule.cuh"
#if SEPARATE_BLOCKS
#include "sm90/chunk_forward/stage_copies.cuh"
#endif
#include "sm90/state_tiles.cuh"
#include "sm90/wgmma.cuh"

constexpr int K_TILES = K / 16;

struct ScanState {
  float s[2 * K_TILES][4];
};

struct ScanLane {
  int lane, g, t;
  int v0;           // first column of V of this warp
  u32 values, out;  // this warp's rings in shared memory
  // Offsets of what this lane reads or writes: its row and its 16-byte piece of a tile of V or o,
  // its row of a triangle.
  u32 tile, piece, triangle;
  u64 kq, kg;  // descriptors of stage 0's operands
};

constexpr int WARP_V = 16;  // columns of V of a warp

#include "common/chunk_forward/state_decay.cuh"

__device__ __forceinline__ void read_state(ScanState& state, const ScanLane& l, u64 base, int flags) {
  read_state_tiles<K, V>(state.s, l.lane, l.v0, base, flags);
}
// Asks L2 for a state that is read soon.
__device__ __forceinline__ void prefetch_state(const ScanLane& l, u64 base, int flags) {
  prefetch_state_tiles<K, V>(l.lane, l.v0, base, flags);
}
__device__ __forceinline__ void write_state(const ScanState& state, const ScanLane& l, u64 base, int flags) {
  write_state_tiles<K, V>(state.s, l.lane, l.v0, base, flags);
}

// Left operand (16 columns of V by 16 channels) of k-tile kk.
__device__ __forceinline__ void state_operand(const ScanState& state, int kk, u32 (&a)[4]) {
  pack_tiles(state.s[2 * kk], state.s[2 * kk + 1], a);
}

__device__ __forceinline__ void decay_state(ScanState& state, int kk, const float4& d) {
  decay_tiles(state.s[2 * kk], state.s[2 * kk + 1], d);
}

// Where a chunk's image is. `full` is its barrier, waited for at `parity`.
struct StageRef {
  u32 slot, base, full, parity;
};

// Transposed products: [i] is x of tokens 8i to 8i + 7, [4 + i] their o.
struct Tokens {
  float xo[8][4];
};

// Of row `row` of a chunk's token scalars the four that this lane's columns of a half need: tokens
// 2t, 2t+1 and 8+2t, 8+2t+1.
__device__ __forceinline__ Columns columns(u32 stage, u32 row, int half, int t) {
  const u32 at = stage + OFFSET(ChunkImage, scalars) + row + 4 * HALF * half + 8 * t;
  const float2 a = load_shared2(at), b = load_shared2(at + 32);
  return {{{a.x, a.y}, {b.x, b.y}}};
}

// What solving a half needs besides x, loaded before x is complete.
struct SolveOperands {
  Columns beta, r;
  u32 inverse[4], v[4];
};

__device__ __forceinline__ void load_values(SolveOperands& s, const ScanLane& l, int half, u32 values) {
  load_matrix4_transposed(s.v, values + half * TILE_BYTES + l.tile);
}
__device__ __forceinline__ void load_solve_operands(SolveOperands& s, const ScanLane& l, u32 stage,
                                                    int half) {
  s.beta = columns(stage, OFFSET(TokenScalars, beta), half, l.t);
  s.r = columns(stage, OFFSET(TokenScalars, k_norm), half, l.t);
  load_matrix4(s.inverse, stage + OFFSET(ChunkImage, inverse) + half * TRIANGLE_BYTES + l.triangle);
}

// A half's 16 x 16 triangle (or the one across) times w, added to tiles x and y.
__device__ __forceinline__ void add_triangle(float (&x)[4], float (&y)[4], const u32 (&w)[4],
                                             const u32 (&b)[4]) {
  mma_bf16(x, w, b[0], b[1]);
  mma_bf16(y, w, b[2], b[3]);
}

// From x of a half (`x` has its tiles) to w = r T beta (v - r x), as the left operand (16 columns of V by 16 tokens)
// of what follows.
__device__ __forceinline__ void solve(const float (&x0)[4], const float (&x1)[4], const SolveOperands& s,
                                      u32 (&w)[4]) {
  float residual[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 pair = s.v[2 * i + (e >> 1)];
      const float value = e & 1 ? bf16_high(pair) : bf16_low(pair);
      residual[i][e] = s.beta.c[i][e & 1] * (value - s.r.c[i][e & 1] * (i ? x1 : x0)[e]);
    }
  }
  multiply_inverse(residual, s.r, s.inverse, w);
}

// o of a chunk times its factor, packed for storing.
struct Output {
  u32 o[2][4];
};

// `o`: tiles of 8 tokens.
__device__ __forceinline__ void pack_output(Output& out, const float (*o)[4], const Columns (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &o[2 * half + (i >> 1)][2 * (i & 1)];
      out.o[half][i] = pack_bf16(x[0] * factor[half].c[i >> 1][0], x[1] * factor[half].c[i >> 1][1]);
    }
  }
}

// To global memory, through shared memory so that rows of 32 bytes are stored whole: lane l stores
// half l % 2 of the rows of tokens l / 2 and 16 + l / 2, of which `left` tells how many are real,
// at `to`. Three functions, so that other work goes between.
__device__ __forceinline__ void write_output(const Output& out, const ScanLane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    store_matrix4_transposed(l.out + half * TILE_BYTES + l.tile, out.o[half]);
}
__device__ __forceinline__ void read_output(uint4 (&rows)[2], const ScanLane& l) {
  sync_warp();
#pragma unroll
  for (int half = 0; half < 2; ++half) rows[half] = load_shared_u4(l.out + half * TILE_BYTES + l.piece);
}
__device__ __forceinline__ void store_output(const uint4 (&rows)[2], unsigned char* to, long long half_step,
                                             int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (left > HALF * half) store_global(to + half * half_step, rows[half]);
  }
}

// One lane's 16 bytes of V of the chunk's tokens l / 2 and 16 + l / 2 into ring slot `slot`; zeros
// past the end.
__device__ __forceinline__ void fetch_values(const ScanLane& l, const unsigned char* from,
                                             long long half_step, const unsigned char* unread_address,
                                             int slot, int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool real = left > HALF * half;
    copy_async16(l.values + (2 * slot + half) * TILE_BYTES + l.piece,
                 real ? from + half * half_step : unread_address, real);
  }
}

#include "sm90/chunk_forward/scan_chunk.cuh"
#if SEPARATE_BLOCKS
#include "sm90/chunk_forward/scan_chunk_split.cuh"
#endif

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

// Tells the block that prepares a stage that this warp has read it.
__device__ __forceinline__ void warp_arrive_empty(u32 shared, u32 slot, int lane) {
#if SEPARATE_BLOCKS
  warp_arrive_remote(cluster_address(shared + OFFSET(SharedMemory, room) + 8 * slot, sender_of(slot)), lane);
#elif CLUSTER > 1
  warp_arrive_remote(cluster_address(shared + OFFSET(SharedMemory, empty) + 8 * slot, slot % CLUSTER), lane);
#else
  warp_arrive(shared + OFFSET(SharedMemory, empty) + 8 * slot, lane);
#endif
}

// All chunks of this cluster's tasks, 16 columns of V: waits for a prepared chunk, advances the state, stores
// the chunk's output.
__device__ __forceinline__ void scan_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
  if (!advance_to_step(p, shared, task, 0)) return;
  const ScanLane l = make_scan_lane(shared, warp, rank);
  const long long v_chunk = 2ll * C * p.v_st, o_chunk = 2ll * C * p.HV * V;
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
  const auto find_tokens = [&] {
    const SequenceHead& sequence = part.sequence;
    const int token = part.chunk * C + (l.lane >> 1), at_v = l.v0 + 8 * (l.lane & 1);
    v = reinterpret_cast<const unsigned char*>(
        p.v +
        2 * (sequence.batch * p.v_sb + (sequence.first + token) * p.v_st + sequence.hv * p.v_sh + at_v));
    o = reinterpret_cast<unsigned char*>(
        p.o + 2 * (((sequence.batch * p.T + sequence.first + token) * p.HV + sequence.hv) * V + at_v));
  };
  const auto fetch_first_values = [&] {
    left = part.tokens - part.chunk * C - (l.lane >> 1);
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
    } else if (const u64 from = initial_state_at(p, part.sequence.n, part.sequence.hv, K * V)) {
      read_state(state, l, from, p.flags);
      if (part.sequence.hv + 1 < p.HV) prefetch_state(l, from + matrix, p.flags);
    }
    u64 ckpt = 0;
    if (p.ckpt_every)
      ckpt = p.ckpt + (first_checkpoint(p, part.sequence, l.lane) * p.HV + part.sequence.hv) * matrix;
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
          MarkedState to = {ckpt + c / block * p.HV * matrix, p.flags};
          if (i < 0 || marked_state<C>(p, i, x.first, x.length, c, x.hv, K * V, to))
            write_state(state, l, to.at, to.flags);
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
#if SEPARATE_BLOCKS
        scan_chunk_split(state, out, l, at, tiles, while_reading, while_updating);
#else
        scan_chunk<false>(state, out, l, at, tiles, false, true, while_reading, while_updating);
#endif
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
    const Move move = move_to_step(p, shared, task, uniform(part.sequence.length), step);
    more = move != NO_STEP;
    if (more) {  // the first values are loaded while this state is written
      if (move == NEXT_HEAD) {
        part.sequence.hv = task.hv;
        part.end = part.sequence.chunks;
        part.tokens = part.sequence.length;
        part.shift = maximum(part.end, 1) - task.stop;
        part.chunk = part.chunk_of(step);
        v += 2 * p.v_sh + (part.chunk - done.end - (V_DEPTH - 1)) * v_chunk;
        o += 2 * V + (part.chunk - done.end + 1) * o_chunk;
      } else {
        part = make_task_part(p, shared, task);
        find_tokens();
      }
      fetch_first_values();
    }
    if (done.end < done.sequence.chunks) {
      const int own = load_own(shared + OWN_CLUSTER);
      send_cut_state(p, state, cut_state_slot(p, own, rank, warp, l.lane), l.lane);
    } else if (const u64 to = final_state_at(p, done.sequence.n, done.sequence.hv, K * V)) {
      write_state(state, l, to, p.flags);
    }
  }
  copy_async_wait<0>();
}
