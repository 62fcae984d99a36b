// A scan warp carries 16 * ROW_TILES columns of the state through the sequence. The state lies
// transposed (V by K) in float32 accumulators, so that its bf16 copy is the next product's left
// operand as it is; tokens are the product's short dimension.
#pragma once

#include "common/chunk_forward/scan_warp.cuh"
#include "common/chunk_forward/scan_warpgroup.cuh"

__device__ __forceinline__ ScanLane make_scan_lane(u32 shared, int warp, int rank) {
  ScanLane l;
  l.lane = thread_index() & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.v0 = rank * BLOCK_V + warp * WARP_V;
  l.values = shared + OFFSET(SharedMemory, values) + warp * V_DEPTH * ROW_TILES * TILE_BYTES;
  l.out = shared + OFFSET(SharedMemory, out) + warp * ROW_TILES * TILE_BYTES;
  if constexpr (WARPGROUP) {
    l.kq = operand_descriptor(shared + OFFSET(SharedMemory, stages) + OFFSET(ChunkImage, kq), 16, 1024);
    l.kg = operand_descriptor(shared + OFFSET(SharedMemory, stages) + OFFSET(ChunkImage, kg), ROWS_BYTES, 1024);
  }
  return l;
}

// All chunks of a sequence and value head, this warp's columns of V.
__device__ __forceinline__ void scan_warp(const ChunkForwardParams& p, const SequenceHead& sequence,
                                          u32 shared, int warp, int rank) {
  const ScanLane l = make_scan_lane(shared, warp, rank);
  // This lane's 16 bytes of a chunk's V and o.
  const int token = l.lane >> 1, at_v = l.v0 + 8 * (l.lane & 1);
  const long long v_chunk = 2ll * C * p.v_st, o_chunk = 2ll * C * p.HV * V;
  const unsigned char* v = reinterpret_cast<const unsigned char*>(
      p.v + 2 * (sequence.batch * p.v_sb + (sequence.first + token) * p.v_st + sequence.hv * p.v_sh + at_v));
  unsigned char* o = reinterpret_cast<unsigned char*>(
      p.o + 2 * (((sequence.batch * p.T + sequence.first + token) * p.HV + sequence.hv) * V + at_v));
  const unsigned char* none = reinterpret_cast<const unsigned char*>(p.v);  // a valid address, not read
  int left = sequence.length - token;                                       // real if positive
#pragma unroll
  for (int c = 0; c < V_DEPTH - 1; ++c) {
    fetch_values(l, left > c * C ? v : none, c, left > c * C);
    copy_async_commit();
    v += v_chunk;
  }
  const long long matrix = (long long)K * V * state_size(p);
  ScanState state = {};
  if (const u64 from = initial_state_at(p, sequence.n, sequence.hv, K * V))
    read_state(state, l, from, p.flags);
  u64 ckpt = 0;
  if (p.ckpt_every) ckpt = p.ckpt + (first_checkpoint(p, sequence, l.lane) * p.HV + sequence.hv) * matrix;
  u32 slot = 0, parity = 0;
  int ring = 0, c = 0;
  const int block = p.ckpt_every ? p.ckpt_every / C : 1 << 30;  // chunks between states written
  const auto mark_from = [&](int step) {
    return p.marks ? next_mark<C>(p, sequence.first, sequence.length, step) : 1 << 30;
  };
  int next = 0, mark = mark_from(0);  // chunks where a state is written
  while (true) {
    u64 to = 0;
    if (c == sequence.chunks) {
      to = final_state_at(p, sequence.n, sequence.hv, K * V);
    } else if (c == next) {
      to = ckpt;
      ckpt += p.ckpt_every ? p.HV * matrix : 0;
      next += block;
    }
    if (to) write_state(state, l, to, p.flags);
    if (c == sequence.chunks) break;
    if (c == mark) {
      each_mark<C>(p, sequence.first, sequence.length, c, sequence.hv, K * V,
                   [&](u64 at, int flags) { write_state(state, l, at, flags); });
      mark = mark_from(c + 1);
    }
    const int stop = next < mark ? next : mark, end = sequence.chunks < stop ? sequence.chunks : stop;
#pragma unroll 1
    for (; c < end; ++c) {
      copy_async_wait<V_DEPTH - 2>();
      sync_warp();
      const u32 stage = shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH;
      Tokens tok = {};
      scan_chunk(ProductsBy<WARPGROUP>(), state, tok, l,
                 {slot, stage, shared + OFFSET(SharedMemory, full) + 8 * slot, parity,
                  l.values + ring * ROW_TILES * TILE_BYTES});
      const bool ahead = left > (V_DEPTH - 1) * C;
      fetch_values(l, ahead ? v : none, (ring + V_DEPTH - 1) % V_DEPTH, ahead);
      copy_async_commit();
      v += v_chunk;
      store_output(tok, l, columns(stage, OFFSET(TokenScalars, q_factor), l.t), o, left > 0);
      finish_chunk(ProductsBy<WARPGROUP>(), state);
      const u32 empty = shared + OFFSET(SharedMemory, empty) + 8 * slot;
      if constexpr (CLUSTER > 1)
        warp_arrive_remote(cluster_address(empty, slot % CLUSTER), l.lane);
      else
        warp_arrive(empty, l.lane);
      o += o_chunk;
      left -= C;
      ring = (ring + 1) % V_DEPTH;
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
  copy_async_wait<0>();
}
