// State [K, V]: a block holds COLUMNS columns of V, its warps split K between them. A lane holds
// VECTOR neighbouring columns of ROWS channels; a load of a warp is GROUPS pieces of COLUMNS
// elements. Sums over K are completed in shared memory, with one barrier a token. Used by
// recurrent.cu.
//
// A warp adds its channels up in PARTS parts. For several tokens half as many warps as for one do the
// work of two each, in two parts: the same sums in the same order, with what every warp does for itself
// (gates, norms, completing the sums) done half as often.
#pragma once

#include "common/recurrent/token.cuh"

constexpr int LANES = COLUMNS / VECTOR;  // lanes along V
constexpr int GROUPS = 32 / LANES;       // channels side by side
constexpr int WARP_K = K / WARPS;        // channels of a warp
constexpr int PART_K = WARP_K / PARTS, PART_ROWS = ROWS / PARTS;
static_assert(ROWS * GROUPS == WARP_K && PART_ROWS % 4 == 0 && WARP_K <= 32,
              "a lane a channel, four channels a read");
static_assert(PARTS == 1 || PARTS == GROUPS, "each group of lanes ends with the sums of one part");

constexpr int TOKEN_CHANNELS = 1;
constexpr int OUT = VECTOR;  // outputs of a lane

// A token's inputs, and each part's sums over its channels of k S, q S, and q q, k k, q k.
struct TokenInputs {
  float q[K], k[K], decay[K];
};
struct PartSums {
  float k[COLUMNS], q[COLUMNS], norms[4];
};
struct TokenMemory {
  TokenInputs inputs;
  PartSums sums[WARPS * PARTS];
};
struct SharedMemory {
  TokenMemory tokens[2];  // even and odd ones
};
constexpr u32 STEP_BYTES = sizeof(SharedMemory);
constexpr u32 TOKEN_BYTES = sizeof(TokenInputs), SUM_BYTES = sizeof(PartSums),
              HALF_BYTES = sizeof(TokenMemory);

struct LanePosition {
  int lane;
  int v;        // first of this lane's columns
  bool writes;  // does this lane write the output of its columns?
  int channel;  // this lane's channel of the token
  int first;    // first channel of its part of the state
  u32 shared;
};

__device__ __forceinline__ LanePosition make_position(int first, u32 shared) {
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  return {lane,
          first + VECTOR * (lane % LANES),
          warp == 0 && lane < LANES,
          warp * WARP_K + lane % WARP_K,
          warp * WARP_K + lane / LANES * PART_ROWS,
          shared};
}

// From a lane's first channel to that of its row i: rows of a part follow each other.
__device__ __forceinline__ constexpr int row_channel(int i) { return i % PART_ROWS + i / PART_ROWS * PART_K; }
// Offset in elements of a lane's first piece of state, and from there to piece i.
__device__ __forceinline__ int first_element(const LanePosition& at) { return at.first * V + at.v; }
__device__ __forceinline__ constexpr int piece_offset(int i) { return V * row_channel(i); }

// The sums of this lane's part of a token; the rest is in shared memory.
struct Tokens {
  float qq, kk, qk, beta;
};

__device__ __forceinline__ void stage_token(Tokens& tokens, const LanePosition& at, const Token<1>& x,
                                            int odd) {
  const u32 to = at.shared + odd * HALF_BYTES + 4 * at.channel;
  sync_warp();  // every lane has used the token before last
  if (at.lane < WARP_K) {
    store_shared(to, __float_as_uint(x.q[0]));
    store_shared(to + OFFSET(TokenInputs, k), __float_as_uint(x.k[0]));
    store_shared(to + OFFSET(TokenInputs, decay), __float_as_uint(x.d[0]));
  }
  tokens = {sum_lanes<PART_K>(x.qq), sum_lanes<PART_K>(x.kk), sum_lanes<PART_K>(x.qk), x.beta};
  sync_warp();
}

__device__ __forceinline__ void store_vector(u32 to, const float (&x)[VECTOR]) {
#pragma unroll
  for (int c = 0; c < VECTOR; c += 4) {
    store_shared(to + 4 * c, __float_as_uint(x[c]), __float_as_uint(x[c + 1]), __float_as_uint(x[c + 2]),
                 __float_as_uint(x[c + 3]));
  }
}
__device__ __forceinline__ void add_vector(float (&x)[VECTOR], u32 from) {
#pragma unroll
  for (int c = 0; c < VECTOR; c += 4) {
    const float4 y = load_shared4(from + 4 * c);
    x[c] += y.x, x[c + 1] += y.y, x[c + 2] += y.z, x[c + 3] += y.w;
  }
}

// A record, as a token applies it. Its inputs go where those of odd tokens go, of which none is there yet.
__device__ __forceinline__ void apply(float (&s)[ROWS][VECTOR], const LanePosition& at,
                                      const RecordOf<TOKEN_CHANNELS, OUT>& x) {
  const u32 to = at.shared + HALF_BYTES + 4 * at.channel, from = at.shared + HALF_BYTES + 4 * at.first;
  sync_warp();  // every lane has used the record before
  if (at.lane < WARP_K) {
    store_shared(to + OFFSET(TokenInputs, k), __float_as_uint(x.key[0]));
    store_shared(to + OFFSET(TokenInputs, decay), __float_as_uint(x.decay[0]));
  }
  sync_warp();
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    const u32 row = from + 4 * row_channel(i);
    const float4 k4 = load_shared4(row + OFFSET(TokenInputs, k)), d4 = load_shared4(row + OFFSET(TokenInputs, decay));
    const float k[4] = {k4.x, k4.y, k4.z, k4.w}, d[4] = {d4.x, d4.y, d4.z, d4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) {
        s[i + j][c] *= d[j];
        s[i + j][c] = multiply_add(k[j], x.update[c], s[i + j][c]);
      }
    }
  }
}

// One token: decay, delta rule; the output of the lane's columns, and the update `u` of the state there.
// `prepare_next` prepares the next token.
template <typename Next>
__device__ __forceinline__ void step(const RecurrentParams& p, float (&s)[ROWS][VECTOR],
                                     const LanePosition& at, Tokens& tokens, const float (&v)[OUT],
                                     float (&o)[OUT], float (&u)[OUT], int odd, Next prepare_next) {
  const u32 token = at.shared + odd * HALF_BYTES + 4 * at.first,
            sums = at.shared + odd * HALF_BYTES + TOKEN_BYTES;
  const u32 lane_offset = 4 * VECTOR * (at.lane % LANES);
  float part_ks[PARTS][VECTOR] = {}, part_qs[PARTS][VECTOR] = {};
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    float (&ks)[VECTOR] = part_ks[i / PART_ROWS], (&qs)[VECTOR] = part_qs[i / PART_ROWS];
    const u32 row = token + 4 * row_channel(i);
    const float4 q4 = load_shared4(row), k4 = load_shared4(row + 4 * K), d4 = load_shared4(row + 8 * K);
    const float q[4] = {q4.x, q4.y, q4.z, q4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w},
                d[4] = {d4.x, d4.y, d4.z, d4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) {
        s[i + j][c] *= d[j];
        ks[c] = multiply_add(k[j], s[i + j][c], ks[c]);
        qs[c] = multiply_add(q[j], s[i + j][c], qs[c]);
      }
    }
  }
  float (&ks)[VECTOR] = part_ks[0], (&qs)[VECTOR] = part_qs[0];
  const int part = PARTS > 1 ? at.lane / LANES : 0;
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
    if constexpr (PARTS == 1) {
#pragma unroll
      for (int mask = 16; mask >= LANES; mask >>= 1) {
        ks[c] += shuffle_xor(ks[c], mask);
        qs[c] += shuffle_xor(qs[c], mask);
      }
    } else {
      const float k_other = shuffle_xor(part ? part_ks[0][c] : part_ks[PARTS - 1][c], LANES),
                  q_other = shuffle_xor(part ? part_qs[0][c] : part_qs[PARTS - 1][c], LANES);
      ks[c] = (part ? part_ks[PARTS - 1][c] : part_ks[0][c]) + k_other;
      qs[c] = (part ? part_qs[PARTS - 1][c] : part_qs[0][c]) + q_other;
    }
  }
  const u32 own_sums = sums + ((thread_index() >> 5) * PARTS + part) * SUM_BYTES;
  if (PARTS > 1 || at.lane < LANES) {
    store_vector(own_sums + lane_offset, ks);
    store_vector(own_sums + OFFSET(PartSums, q) + lane_offset, qs);
  }
  if (PARTS > 1 ? at.lane % LANES == 0 : at.lane == 0) {
    store_shared(own_sums + OFFSET(PartSums, norms), __float_as_uint(tokens.qq), __float_as_uint(tokens.kk),
                 __float_as_uint(tokens.qk), 0);
  }
  const float beta = tokens.beta;
  prepare_next();
  sync_block();
  float norms[4] = {};
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) ks[c] = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS * PARTS; ++w) {
    const float4 y = load_shared4(sums + w * SUM_BYTES + OFFSET(PartSums, norms));
    norms[0] += y.x, norms[1] += y.y, norms[2] += y.z;
    add_vector(ks, sums + w * SUM_BYTES + lane_offset);
  }
  const Factors f = factors_of(p, norms[0], norms[1]);
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) u[c] = f.k * beta * multiply_add(-f.k, ks[c], v[c]);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    const float4 k4 = load_shared4(token + 4 * (K + row_channel(i)));
    const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) s[i + j][c] = multiply_add(k[j], u[c], s[i + j][c]);
    }
  }
  if (at.writes) {
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) qs[c] = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS * PARTS; ++w)
      add_vector(qs, sums + w * SUM_BYTES + OFFSET(PartSums, q) + lane_offset);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) o[c] = f.q * multiply_add(norms[2], u[c], qs[c]);
  }
}
