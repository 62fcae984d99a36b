// A warp's 16 rows of a state (V by K) in float32 accumulators: where they come from, their bf16 copy, and how that and a
// chunk's rows of v or dr leave.
#ifndef KDACORE_BACKWARD_SCAN_STATE_CUH
#define KDACORE_BACKWARD_SCAN_STATE_CUH

#include "sm90/backward/scan_layout.cuh"

constexpr int K_TILES = K / 16;  // channels of the state that one product takes
constexpr int C_TILES = C / 16;

// Tile j: channels 8j + 2t and 8j + 2t + 1 of value rows g and g + 8.
struct State {
  float s[2 * K_TILES][4];
};
// The same in bf16, as left operands: [kk] is channels 16 kk and on.
struct Operand {
  u32 a[K_TILES][4];
};
// 64 tokens instead of channels.
struct TokenOperand {
  u32 a[C_TILES][4];
};

struct ScanLane {
  u32 shared;
  int lane, g, t;
  int row;  // this warp's first row among the block's
  u32 out;  // its part of OUT
  u32 piece;  // of a 16-row tile: where lane 8i + r finds row r of matrix i in four that make 16 columns, the first ones
};

__device__ __forceinline__ ScanLane make_lane(u32 shared, int warp) {
  ScanLane l;
  l.shared = shared;
  l.lane = thread_index() & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.row = 16 * warp;
  l.out = shared + OUT_AT + warp * OUT_BYTES;
  l.piece = swizzled(l.lane & 15, l.lane >> 4);
  return l;
}

// Calls f(element, its offset) for every state element; offsets count elements of a [K, V] or [V, K] matrix.
template <class F>
__device__ __forceinline__ void each_element(State& state, const ScanLane& l, const Job& job, int flags, F f) {
  const int k_step = opaque(flags & FLAG_V_FIRST ? 1 : V), v_step = opaque(flags & FLAG_V_FIRST ? K : 1);
  const int first = 2 * l.t * k_step + (job.part * BLOCK_V + l.row + l.g) * v_step;
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(state.s[j][e], first + (8 * j + (e & 1)) * k_step + 8 * (e >> 1) * v_step);
  }
}

// The state of this sequence and head in an array of them.
__device__ __forceinline__ u64 state_at(u64 states, const Job& job, int flags) {
  return states + job.nh * (K * V * (flags & FLAG_STATE_BF16 ? 2 : 4));
}

// From an array of states, or zero where there is none.
__device__ __forceinline__ void read_state(State& state, const ScanLane& l, const Job& job, u64 states, int flags) {
  if (!states) {
    each_element(state, l, job, flags, [&](float& x, int) { x = 0.0f; });
    return;
  }
  const u64 base = state_at(states, job, flags);
  if (flags & FLAG_STATE_BF16) {
    each_element(state, l, job, flags, [&](float& x, int at) { x = bf16_low(reinterpret_cast<const u16*>(base)[at]); });
  } else {
    each_element(state, l, job, flags, [&](float& x, int at) { x = reinterpret_cast<const float*>(base)[at]; });
  }
}

__device__ __forceinline__ void write_state(State& state, const ScanLane& l, const Job& job, u64 states, int flags) {
  const u64 base = state_at(states, job, flags);
  if (flags & FLAG_STATE_BF16) {
    each_element(state, l, job, flags,
                 [&](float& x, int at) { reinterpret_cast<u16*>(base)[at] = (u16)pack_bf16(x, 0.0f); });
  } else {
    each_element(state, l, job, flags, [&](float& x, int at) { reinterpret_cast<float*>(base)[at] = x; });
  }
}

// Two neighbouring tiles as a left operand.
__device__ __forceinline__ void pack_tiles(const float (&x)[4], const float (&y)[4], u32 (&a)[4]) {
  a[0] = pack_bf16(x[0], x[1]);
  a[1] = pack_bf16(x[2], x[3]);
  a[2] = pack_bf16(y[0], y[1]);
  a[3] = pack_bf16(y[2], y[3]);
}
__device__ __forceinline__ void pack_state(Operand& to, const State& state) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) pack_tiles(state.s[2 * kk], state.s[2 * kk + 1], to.a[kk]);
}

// Sums over 64 tokens, rounded.
__device__ __forceinline__ void pack_rows(TokenOperand& to, const float (&x)[2 * C_TILES][4]) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) pack_tiles(x[2 * kk], x[2 * kk + 1], to.a[kk]);
}

// Times the chunk's decay of each channel; done here, not after the next wait.
__device__ __forceinline__ void decay_state(State& state, const ScanLane& l, u32 last) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
    const float2 d = load_shared2(last + 4 * (8 * j + 2 * l.t));
    float(&x)[4] = state.s[j];
    x[0] *= d.x, x[1] *= d.y, x[2] *= d.x, x[3] *= d.y;
  }
  hold(state.s);
}

// Descriptors of what differs by an address alone: it never carries out of its field, so adding is enough.
__device__ __forceinline__ u64 step(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Right operand of 64 tokens by 16 channels, of the k-tile kk.
__device__ __forceinline__ u64 along_channels(u64 image, int kk) { return step(image, (kk >> 2) * SQUARE_BYTES + (kk & 3) * 32); }
// Right operand of 16 tokens, those of k-tile kk, by 64 tokens or 128 channels.
__device__ __forceinline__ u64 over_tokens(u64 image, int kk) { return step(image, kk * 16 * IMAGE_ROW); }

// What leaves: rows of h or dh, and of v or dr. First wait until what left before has been read (all groups of copies but the
// last N), then put, publish, and copy as one group.
template <int N>
__device__ __forceinline__ void wait_sent(const ScanLane& l) {
  if (l.lane == 0) copy_out_wait_read<N>();
  sync_warp();
}
__device__ __forceinline__ void put_state(const ScanLane& l, const Operand& x) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) store_matrix4(l.out + (kk >> 2) * ROWS_OUT + (l.piece ^ (kk & 3) << 5), x.a[kk]);
}
__device__ __forceinline__ void put_rows(const ScanLane& l, const TokenOperand& x) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) store_matrix4(l.out + 2 * ROWS_OUT + (l.piece ^ kk << 5), x.a[kk]);
}
__device__ __forceinline__ void publish() {
  fence_async_proxy();
  sync_warp();
}
// To place `at`; one lane calls these.
__device__ __forceinline__ void copy_state(const ScanLane& l, const Job& job, u64 states, long long at) {
  const u64 to = states + at * STATE_BYTES + (job.part * BLOCK_V + l.row) * IMAGE_ROW;
  copy_out(reinterpret_cast<void*>(to), l.out, ROWS_OUT);
  copy_out(reinterpret_cast<void*>(to + V * IMAGE_ROW), l.out + ROWS_OUT, ROWS_OUT);
}
__device__ __forceinline__ void copy_rows(const ScanLane& l, const Job& job, u64 images, long long at) {
  const u64 to = images + at * TILE_BYTES + (job.part * BLOCK_V + l.row) * IMAGE_ROW;
  copy_out(reinterpret_cast<void*>(to), l.out + 2 * ROWS_OUT, ROWS_OUT);
}

// This warp has read all it will read of a stage; its barrier.
__device__ __forceinline__ void release(const ScanLane& l, u32 empty) { warp_arrive(empty, l.lane); }

#endif
