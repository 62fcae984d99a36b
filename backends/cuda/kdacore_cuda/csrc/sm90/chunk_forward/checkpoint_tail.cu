// chunk_kda on Hopper, after the launch that computes it: checkpoints at tokens between two steps. From the
// state at the step's start, which that launch has kept, through the remaining tokens in float32:
//
//   S = diag(d) S;   S = S + r k (beta (v - r k S))^T
//
// with the decays d and the inverse norm r of k (1 without l2norm), by groups of four tokens. With products of d over tokens of the group, from its first one to i, between j and
// i, and behind i,
//
//   x_i = (k_i d_1..d_i) S + sum over j < i of A_ij u_j,   A_ij = (k_i d_j+1..d_i) . k_j
//   u_i = r_i beta_i (v_i - r_i x_i);   S = (d_1..d_4) S + sum of (k_i d_i+1..d_4) u_i
//
// so only four sums over all channels follow one another for 16 tokens. All products are at most 1.
//
// Grid: four blocks a mark and value head, 32 columns of V each. Those whose mark lies at a step's start,
// or has no row, have nothing to do. A warp prepares a group, four channels a lane, all of its loads at
// once; then a warp holds 8 columns of the state, each lane 16 channels of two.
#include "common/chunk_forward/marks.cuh"
#include "common/gate.cuh"
#include "common/l2norm.cuh"
#include "generated/checkpoint_tail_params.cuh"

constexpr int K = 128, V = 128, COLUMNS = 32, THREADS = 128, PARTS = V / COLUMNS;
constexpr int TOKENS = 32, GROUP = 4, GROUPS = TOKENS / GROUP;  // fewer tokens remain of a step

// What the tokens of a group need besides sums over channels: A below the diagonal, r, r beta.
struct GroupFactors {
  float a[GROUP][GROUP], norm[GROUP], update[GROUP];
};
struct SharedMemory {
  float before[TOKENS][K];      // k_i d_1..d_i
  float behind[TOKENS][K];      // k_i d_i+1..d_4
  float decay[GROUPS][K];       // d_1..d_4
  u32 v[TOKENS][COLUMNS / 2];   // bfloat16
  GroupFactors factors[GROUPS];
};
KDA_SHARED_BYTES(sizeof(SharedMemory));

// What remains of a mark's step: `tokens` from row `first` of the pack on; the row of the pool.
struct Tail {
  long long first;
  int tokens, row;
};
__device__ __forceinline__ Tail find_tail(const CheckpointTailParams& p, int mark) {
  const bool wide = p.flags & FLAG_CU64;
  int n = 0;
  long long start = 0, end = p.T;
  const auto load_sequence = [&] {
    start = load_index(p.cu_seqlens, n, wide);
    end = load_index(p.cu_seqlens, n + 1, wide);
  };
  if (p.cu_seqlens) load_sequence();  // at the same time as the mark
  const int position = mark_token(p, mark, 0);
  if (position < 0) return {};
  if (p.cu_seqlens && p.N > 1) {
    int beyond = p.N;  // the last sequence that begins at or before the mark
    while (beyond - n > 1) {
      const int middle = (n + beyond) >> 1;
      if (load_index(p.cu_seqlens, middle, wide) <= position)
        n = middle;
      else
        beyond = middle;
    }
    load_sequence();
  }
  if (position >= end || is_padding(p, n)) return {};
  const int tokens = (int)(position - start) % p.step;
  return {position - tokens, tokens, slot_at(p, p.mark_rows, mark, p.flags & FLAG_MARK_ROWS64)};
}

// `bias`: with the softplus's shift.
__device__ __forceinline__ float decay_of(const CheckpointTailParams& p, float x, float bias, float rate) {
  if (p.gate == GATE_LOG) return exp2_fast(LOG2E * x);
  const float sum = rated_input(rate, x + bias);
  if (p.gate == GATE_SIGMOID)
    return exp2_fast(sigmoid_step(LOG2E * p.lower_bound, slope_of(rate), sum));
  return exp2_fast(softplus_step(-rate, LOG2E * sum));
}

// Four neighbouring numbers of a row that is aligned so.
__device__ __forceinline__ float4 load_four(u64 base, long long index, int type) {
  if (type == TYPE_FLOAT32) return *reinterpret_cast<const float4*>(base + 4 * index);
  const uint2 x = *reinterpret_cast<const uint2*>(base + 2 * index);
  return {bf16_low(x.x), bf16_high(x.x), bf16_low(x.y), bf16_high(x.y)};
}

// What the tokens of a group need, by one warp; tokens past the end change nothing.
__device__ __forceinline__ void prepare_group(const CheckpointTailParams& p, u32 shared, const Tail& tail,
                                              int group, int hv, int column) {
  const int lane = thread_index() & 31, h = hv / (p.HV / p.H), c = 4 * lane, t0 = GROUP * group;
  const auto at = [&](int i) { return tail.first + t0 + i; };
  const auto real = [&](int i) { return t0 + i < tail.tokens; };
  float k[GROUP][4], d[GROUP][4], bias[4];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const float4 x = real(i) ? load_four(p.k, at(i) * p.k_st + h * p.k_sh + c, TYPE_BFLOAT16) : float4{};
    const float4 y = real(i) ? load_four(p.g, at(i) * p.g_st + hv * p.g_sh + c, p.g_type) : float4{};
    k[i][0] = x.x, k[i][1] = x.y, k[i][2] = x.z, k[i][3] = x.w;
    d[i][0] = y.x, d[i][1] = y.y, d[i][2] = y.z, d[i][3] = y.w;
  }
  uint2 v = {};
  if (real(lane >> 3))
    v = *reinterpret_cast<const uint2*>(p.v +
                                        2 * (at(lane >> 3) * p.v_st + hv * p.v_sh + column + 4 * (lane & 7)));
  float beta = 0.0f;  // of the token that this lane's number names
  if (lane < GROUP && real(lane))
    beta = load_scalar(p.beta, at(lane) * p.beta_st + hv * p.beta_sh, p.beta_type);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    bias[e] = p.dt_bias ? held_bias(load_scalar(p.dt_bias, (long long)hv * K + c + e, p.bias_type)) : 0.0f;
  const float A_log = p.A_log ? reinterpret_cast<const float*>(p.A_log)[hv] : 0.0f;
  const float rate = gate_rate(p.gate, A_log);
  if (is_softplus(p.gate)) {
#pragma unroll
    for (int e = 0; e < 4; ++e) bias[e] += gate_shift(p.gate, A_log);
  }

  const auto store = [&](u32 to, const float (&x)[4]) {
    store_shared(shared + to + 4 * c, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                 __float_as_uint(x[3]));
  };
  float run[4] = {1.0f, 1.0f, 1.0f, 1.0f}, back[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d[i][e] = real(i) ? decay_of(p, d[i][e], bias[e], rate) : 1.0f;
      run[e] *= d[i][e];
      x[e] = k[i][e] * run[e];
    }
    store(OFFSET(SharedMemory, before) + 4 * K * (t0 + i), x);
  }
  store(OFFSET(SharedMemory, decay) + 4 * K * group, run);
#pragma unroll
  for (int i = GROUP - 1; i >= 0; --i) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = k[i][e] * back[e];
      back[e] *= d[i][e];
    }
    store(OFFSET(SharedMemory, behind) + 4 * K * (t0 + i), x);
  }
  store_shared(shared + OFFSET(SharedMemory, v) + 4 * (COLUMNS / 2) * (t0 + (lane >> 3)) + 8 * (lane & 7),
               __uint_as_float(v.x), __uint_as_float(v.y));

  // Sums over channels: A, and squares of k on the diagonal.
  float sums[GROUP][GROUP] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      float x = k[j][e];
      sums[j][j] += x * x;
#pragma unroll
      for (int i = j + 1; i < GROUP; ++i) {
        x *= d[i][e];
        sums[i][j] += k[i][e] * x;
      }
    }
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) sums[i][j] += shuffle_xor(sums[i][j], mask);
    }
  }
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  const u32 factors = shared + OFFSET(SharedMemory, factors) + sizeof(GroupFactors) * group;
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    if (lane != i) continue;
    const float norm = p.flags & FLAG_L2NORM ? inverse_norm(sums[i][i]) : 1.0f;
    store_shared(factors + 16 * i, __float_as_uint(sums[i][0]), __float_as_uint(sums[i][1]),
                 __float_as_uint(sums[i][2]), 0);
    store_shared(factors + OFFSET(GroupFactors, norm) + 4 * i, __float_as_uint(norm));
    store_shared(factors + OFFSET(GroupFactors, update) + 4 * i, __float_as_uint(real(i) ? norm * beta : 0.0f));
  }
}

// Two columns of the state: of each, four channels from 32 j + 4 `part` on, for each j.
struct Columns {
  float s[2][4][4];
};

// Calls f(x, its offset) for pairs of columns of a channel of a [K, V] state, or g(x, its offset) for fours of
// channels of a column of a [V, K] state.
template <class F, class G>
__device__ __forceinline__ void each_piece(Columns& x, int column, int part, bool v_first, F f, G g) {
  if (v_first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) g(x.s[i][j], (column + i) * K + 32 * j + 4 * part);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(x.s[0][j][e], x.s[1][j][e], (32 * j + 4 * part + e) * V + column);
  }
}

__device__ __forceinline__ void read_columns(Columns& x, u64 from, int column, int part, bool v_first) {
  const float* at = reinterpret_cast<const float*>(from);
  each_piece(
      x, column, part, v_first,
      [&](float& x, float& y, int i) {
        const float2 z = *reinterpret_cast<const float2*>(at + i);
        x = z.x, y = z.y;
      },
      [&](float (&x)[4], int i) {
        const float4 z = *reinterpret_cast<const float4*>(at + i);
        x[0] = z.x, x[1] = z.y, x[2] = z.z, x[3] = z.w;
      });
}
// To a row of a pool, which may begin at any element.
__device__ __forceinline__ void write_columns(Columns& x, u64 to, int column, int part, int flags) {
  const int type = flags & FLAG_STATE_BF16 ? TYPE_BFLOAT16 : TYPE_FLOAT32;
  each_piece(
      x, column, part, flags & FLAG_V_FIRST,
      [&](float& x, float& y, int i) {
        store_scalar(to, i, type, x);
        store_scalar(to, i + 1, type, y);
      },
      [&](float (&x)[4], int i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) store_scalar(to, i + e, type, x[e]);
      });
}

// Channels 32 j and on of a row in shared memory, this lane's four.
__device__ __forceinline__ float4 row_piece(u32 rows, int j) { return load_shared4(rows + 128 * j); }

__device__ __forceinline__ void advance(Columns& x, u32 shared, int group, int own_column, int part) {
  const u32 channels = shared + 16 * part, first = 4 * K * GROUP * group;
  float dot[GROUP][2];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const u32 row = channels + OFFSET(SharedMemory, before) + first + 4 * K * i;
    float even[2] = {}, odd[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 k = row_piece(row, j);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        even[n] += k.x * x.s[n][j][0] + k.y * x.s[n][j][1];
        odd[n] += k.z * x.s[n][j][2] + k.w * x.s[n][j][3];
      }
    }
    dot[i][0] = even[0] + odd[0], dot[i][1] = even[1] + odd[1];
  }
#pragma unroll
  for (int mask = 4; mask; mask >>= 1) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) dot[i][n] += shuffle_xor(dot[i][n], mask);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 d = row_piece(channels + OFFSET(SharedMemory, decay) + 4 * K * group, j);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&s)[4] = x.s[n][j];
      s[0] *= d.x, s[1] *= d.y, s[2] *= d.z, s[3] *= d.w;
    }
  }
  const u32 factors = shared + OFFSET(SharedMemory, factors) + sizeof(GroupFactors) * group;
  const float4 norm = load_shared4(factors + OFFSET(GroupFactors, norm)),
               update = load_shared4(factors + OFFSET(GroupFactors, update));
  const float norms[4] = {norm.x, norm.y, norm.z, norm.w}, updates[4] = {update.x, update.y, update.z, update.w};
  float u[GROUP][2];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const float4 row = load_shared4(factors + 16 * i);
    const float a[3] = {row.x, row.y, row.z};
    const u32 values = __float_as_uint(load_shared1(shared + OFFSET(SharedMemory, v) +
                                                    4 * (COLUMNS / 2) * (GROUP * group + i) + 2 * own_column));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float sum = dot[i][n];
#pragma unroll
      for (int j = 0; j < i; ++j) sum += a[j] * u[j][n];
      u[i][n] = updates[i] * ((n ? bf16_high(values) : bf16_low(values)) - norms[i] * sum);
    }
  }
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const u32 row = channels + OFFSET(SharedMemory, behind) + first + 4 * K * i;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 k = row_piece(row, j);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&s)[4] = x.s[n][j];
        s[0] += k.x * u[i][n], s[1] += k.y * u[i][n], s[2] += k.z * u[i][n], s[3] += k.w * u[i][n];
      }
    }
  }
}

KDA_KERNEL(THREADS, 1) checkpoint_tail(KDA_PARAM CheckpointTailParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int item = block_index() / PARTS, mark = item / p.HV, hv = item - mark * p.HV;
  const int first_column = block_index() % PARTS * COLUMNS;
  const Tail tail = find_tail(p, mark);
  if (!tail.tokens) return;

  const int warp = thread_index() >> 5, lane = thread_index() & 31, part = lane & 7;
  const int own_column = 8 * warp + 2 * (lane >> 3), column = first_column + own_column;
  Columns x;
  read_columns(x, p.mark_states + 4ull * item * (K * V), column, part, p.flags & FLAG_V_FIRST);
  const int groups = (tail.tokens + GROUP - 1) / GROUP;
#pragma unroll 1
  for (int group = warp; group < groups; group += THREADS / 32)
    prepare_group(p, shared, tail, group, hv, first_column);
  sync_block();
#pragma unroll 1
  for (int group = 0; group < groups; ++group) advance(x, shared, group, own_column, part);
  write_columns(x, state_at(p, p.ht, tail.row, p.ht_row, hv, K * V), column, part, p.flags);
}
