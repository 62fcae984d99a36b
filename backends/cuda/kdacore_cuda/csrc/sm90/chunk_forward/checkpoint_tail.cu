// chunk_kda on Hopper, after the launches that compute it: checkpoints at tokens between two steps. From the
// state at the step's start, which those launches have kept, the remaining tokens one by one in float32:
//
//   S = diag(2^g) S;   S = S + r k (beta (v - r k S))^T     r the inverse norm of k (1 without l2norm)
//
// Grid: four blocks a mark and value head, 32 columns of V each. Those whose mark lies at a step's start, or
// has no row, have nothing to do. First the block's warps prepare a token at a time: its decays, k, beta and
// norm. Then four lanes hold a column of the state, a quarter of its channels each.
//
// Macros from the host: SHARED_BYTES.
#include "common/chunk_forward/marks.cuh"
#include "common/gate.cuh"
#include "generated/checkpoint_tail_params.cuh"

constexpr int K = 128, V = 128, COLUMNS = 32, THREADS = 128, PARTS = V / COLUMNS;
constexpr int TOKENS = 64;  // fewer remain of a step

struct SharedMemory {
  float k[TOKENS][K], decay[TOKENS][K];
  float v[TOKENS][COLUMNS];
  float factor[TOKENS][2];  // r beta, r
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host's shared memory size is too small");

// What remains of a mark's step: `tokens` from row `first` of the pack on; the row of the pool.
struct Tail {
  long long first;
  int tokens, row;
};
__device__ __forceinline__ Tail find_tail(const CheckpointTailParams& p, int mark) {
  const int position = mark_token(p, mark, 0);
  if (position < 0) return {};
  int n = 0;
  long long start = 0, end = p.T;
  if (p.cu_seqlens) {
    const bool wide = p.flags & FLAG_CU64;
    int beyond = p.N;  // the last sequence that begins at or before the mark
    while (beyond - n > 1) {
      const int middle = (n + beyond) >> 1;
      if (load_index(p.cu_seqlens, middle, wide) <= position)
        n = middle;
      else
        beyond = middle;
    }
    start = load_index(p.cu_seqlens, n, wide);
    end = load_index(p.cu_seqlens, n + 1, wide);
  }
  if (position >= end || is_padding(p, n)) return {};
  const int tokens = (int)(position - start) % p.step;
  return {position - tokens, tokens, slot_at(p, p.mark_rows, mark, p.flags & FLAG_MARK_ROWS64)};
}

__device__ __forceinline__ float decay_of(const CheckpointTailParams& p, float x, float bias, float a) {
  if (p.gate == GATE_LOG) return exp2_fast(LOG2E * x);
  if (p.gate == GATE_SIGMOID) return exp2_fast(LOG2E * p.lower_bound * sigmoid(a * (x + bias)));
  return exp2_fast(-LOG2E * a * softplus(x + bias));
}

// A token's decays, k and factors, by one warp.
__device__ __forceinline__ void prepare_token(const CheckpointTailParams& p, u32 shared, const Tail& tail,
                                              int t, int hv, int column, float a) {
  const int lane = thread_index() & 31, h = hv / (p.HV / p.H);
  const long long at = tail.first + t;
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) {
    const int c = 32 * i + lane;
    const float k = load_scalar(p.k, at * p.k_st + h * p.k_sh + c, TYPE_BFLOAT16);
    const float x = load_scalar(p.g, at * p.g_st + hv * p.g_sh + c, p.g_type);
    const float bias = p.dt_bias ? load_scalar(p.dt_bias, (long long)hv * K + c, p.bias_type) : 0.0f;
    square += k * k;
    const u32 to = shared + 4 * (t * K + c);
    store_shared(to + OFFSET(SharedMemory, k), __float_as_uint(k));
    store_shared(to + OFFSET(SharedMemory, decay), __float_as_uint(decay_of(p, x, bias, a)));
  }
  const float v = load_scalar(p.v, at * p.v_st + hv * p.v_sh + column + lane, TYPE_BFLOAT16);
  store_shared(shared + OFFSET(SharedMemory, v) + 4 * (t * COLUMNS + lane), __float_as_uint(v));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
  const float norm = p.flags & FLAG_L2NORM ? inverse_sqrt(square + 1e-6f) : 1.0f;
  float beta = load_scalar(p.beta, at * p.beta_st + hv * p.beta_sh, p.beta_type);
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  if (lane == 0) store_shared(shared + OFFSET(SharedMemory, factor) + 8 * t, norm * beta, norm);
}

KDA_KERNEL(THREADS, 1) checkpoint_tail(KDA_PARAM CheckpointTailParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int item = block_index() / PARTS, mark = item / p.HV, hv = item - mark * p.HV;
  const int first_column = block_index() % PARTS * COLUMNS;
  const Tail tail = find_tail(p, mark);
  if (!tail.tokens) return;

  // Four channels from 16 j + 4 `quarter` on, for each j.
  const int quarter = thread_index() & 3, own = thread_index() >> 2, column = first_column + own;
  const int k_step = p.flags & FLAG_V_FIRST ? 1 : V, v_step = p.flags & FLAG_V_FIRST ? K : 1;
  const float* from = reinterpret_cast<const float*>(p.mark_states) + (long long)item * (K * V);
  float s[8][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[j][e] = from[(16 * j + 4 * quarter + e) * k_step + column * v_step];
  }
  const float a = p.A_log ? exp2_fast(LOG2E * reinterpret_cast<const float*>(p.A_log)[hv]) : 1.0f;
#pragma unroll 1
  for (int t = thread_index() >> 5; t < tail.tokens; t += THREADS / 32)
    prepare_token(p, shared, tail, t, hv, first_column, a);
  sync_block();
#pragma unroll 1
  for (int t = 0; t < tail.tokens; ++t) {
    const u32 at = shared + 4 * (t * K + 4 * quarter);
    float k[8][4], sums[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 x = load_shared4(at + 64 * j + OFFSET(SharedMemory, k)),
                   d = load_shared4(at + 64 * j + OFFSET(SharedMemory, decay));
      k[j][0] = x.x, k[j][1] = x.y, k[j][2] = x.z, k[j][3] = x.w;
      s[j][0] *= d.x, s[j][1] *= d.y, s[j][2] *= d.z, s[j][3] *= d.w;
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] += k[j][e] * s[j][e];
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    const float2 factor = load_shared2(shared + OFFSET(SharedMemory, factor) + 8 * t);
    const float v = load_shared1(shared + OFFSET(SharedMemory, v) + 4 * (t * COLUMNS + own));
    const float u = factor.x * (v - factor.y * sum);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] += k[j][e] * u;
    }
  }
  const u64 to = state_at(p, p.ht, tail.row, p.ht_row, hv, K * V);
  const int type = p.flags & FLAG_STATE_BF16 ? TYPE_BFLOAT16 : TYPE_FLOAT32;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      store_scalar(to, (16 * j + 4 * quarter + e) * k_step + column * v_step, type, s[j][e]);
  }
}
