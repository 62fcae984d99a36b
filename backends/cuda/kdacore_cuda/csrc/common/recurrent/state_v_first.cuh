// State [V, K]: a warp holds ROWS * GROUPS rows of V, a lane VECTOR neighbouring channels of ROWS
// of them. A load of a warp is 512 bytes in one piece. Warps share nothing, so there is no barrier.
// Used by recurrent.cu.
#pragma once

#include "common/recurrent/token.cuh"

constexpr int LANES = K / VECTOR;   // lanes along K
constexpr int GROUPS = 32 / LANES;  // rows side by side
static_assert(COLUMNS == WARPS * ROWS * GROUPS, "as the host counts blocks");
static_assert(ROWS <= LANES, "each lane ends with the sums of one row");
constexpr u32 STEP_BYTES = 0;  // of shared memory

constexpr int TOKEN_CHANNELS = VECTOR;

struct LanePosition {
  int lane;
  int v;        // the row of V whose sums this lane ends with
  bool writes;  // does this lane write the output of that row?
  int channel;  // first of this lane's channels
  int first;    // first of this lane's rows
};

__device__ __forceinline__ LanePosition make_position(int first, u32) {
  const int lane = thread_index() & 31, base = first + (thread_index() >> 5) * ROWS * GROUPS + lane / LANES;
  const int own = lane % LANES;
  return {lane, base + GROUPS * (own * ROWS / LANES), own % (LANES / ROWS) == 0, VECTOR * own, base};
}

// Offset in elements of a lane's first piece of state, and from there to piece i.
__device__ __forceinline__ int first_element(const LanePosition& at) { return at.first * K + at.channel; }
__device__ __forceinline__ constexpr int piece_offset(int i) { return GROUPS * K * i; }

// Sums x[i] over the lanes of each row, halving the number of rows at every step; x[0] becomes the
// sum of the lane's own row. The order of the additions does not depend on ROWS.
template <int COUNT, int MASK>
__device__ __forceinline__ float fold(float (&x)[ROWS], int lane) {
  if constexpr (MASK == 0) {
    return x[0];
  } else if constexpr (COUNT == 1) {
    x[0] += shuffle_xor(x[0], MASK);
    return fold<1, MASK / 2>(x, lane);
  } else {
    const bool high = lane & MASK;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const float send = high ? x[i] : x[i + COUNT / 2], keep = high ? x[i + COUNT / 2] : x[i];
      x[i] = keep + shuffle_xor(send, MASK);
    }
    return fold<COUNT / 2, MASK / 2>(x, lane);
  }
}

constexpr int OUT = 1;  // outputs of a lane

struct Tokens {
  Token<TOKEN_CHANNELS> x;
};

__device__ __forceinline__ void stage_token(Tokens& tokens, const LanePosition&,
                                            const Token<TOKEN_CHANNELS>& x, int) {
  tokens.x = x;
}

// The number of a lane that ends with the sums of row i of this lane.
__device__ __forceinline__ int lane_of_row(const LanePosition& at, int i) {
  return (at.lane & ~(LANES - 1)) + i * (LANES / ROWS);
}

// A record, as a token applies it.
__device__ __forceinline__ void apply(float (&s)[ROWS][VECTOR], const LanePosition& at,
                                      const RecordOf<TOKEN_CHANNELS, OUT>& x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float row_u = shuffle(x.update[0], lane_of_row(at, i));
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) {
      s[i][c] *= x.decay[c];
      s[i][c] = multiply_add(x.key[c], row_u, s[i][c]);
    }
  }
}

// One token: decay, delta rule; the output of the lane's own row, and the update of the state there.
// `prepare_next` prepares the next token.
template <typename Next>
__device__ __forceinline__ void step(const RecurrentParams& p, float (&s)[ROWS][VECTOR],
                                     const LanePosition& at, Tokens& tokens, const float (&v)[OUT],
                                     float (&o)[OUT], float (&update)[OUT], int, Next prepare_next) {
  const Token<TOKEN_CHANNELS> x = tokens.x;
  const Factors f = factors_of(p, sum_lanes<LANES>(x.qq), sum_lanes<LANES>(x.kk));
  const float qk = sum_lanes<LANES>(x.qk);
  float ks[ROWS], qs[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    ks[i] = qs[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) {
      s[i][c] *= x.d[c];
      ks[i] = multiply_add(x.k[c], s[i][c], ks[i]);
      qs[i] = multiply_add(x.q[c], s[i][c], qs[i]);
    }
  }
  const float k_sum = fold<ROWS, LANES / 2>(ks, at.lane), q_sum = fold<ROWS, LANES / 2>(qs, at.lane);
  const float u = f.k * x.beta * multiply_add(-f.k, k_sum, v[0]);
  update[0] = u;
  o[0] = f.q * multiply_add(qk, u, q_sum);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float row_u = shuffle(u, lane_of_row(at, i));
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[i][c] = multiply_add(x.k[c], row_u, s[i][c]);
  }
  prepare_next();
}
