// The gate: from its raw input to the decay of one token and channel, a step, in log2, and from the gradient of
// a step to that of the input. In float32 throughout. All kernels take rates, shifts, steps and gradients from
// here; each loads inputs and biases in its own way.
#pragma once

#include "common/ptx.cuh"
#include "generated/constants.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
// Lowest log2 decay of one step. 2^-126 is the smallest normal float32, so anything smaller is zero
// anyway; the limit keeps sums over a chunk accurate.
constexpr float LOWEST_STEP = -126.0f;

constexpr float LARGEST = 3.4028234663852886e38f;  // float32

constexpr float LARGEST_BF16 = 3.3895313892515355e38f;

__device__ __forceinline__ float limit(float x, float largest) {
  return min_or_nan(max_or_nan(x, -largest), largest);
}

// A head's rate, exp(A_log): 0 for -inf, the largest float32 for what is larger.
__device__ __forceinline__ float rate_of(float A_log) {
  return min_or_nan(exp2_fast(LOG2E * A_log), LARGEST);
}
// -rate in units of log2. It stays finite, as zero times infinity would be NaN.
__device__ __forceinline__ float slope_of(float rate) { return max_or_nan(-LOG2E * rate, -LARGEST); }
// What a rate of 0 leaves of an input, infinite ones included: 0, or NaN.
__device__ __forceinline__ float nothing_of(float x) { return min_or_nan(fabsf(x), 0.0f); }
template <int M, int N>
__device__ __forceinline__ void scale_by_zero(float (&x)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[i][j] = nothing_of(x[i][j]);
  }
}
// dt_bias, held finite: an infinite gate input decides.
__device__ __forceinline__ float held_bias(float bias) { return limit(bias, LARGEST); }

// log2(1 + e) / e for e in [0, 1], relative error 1.4e-6. lg2(1 + e) would lose the small e of slow gates.
__device__ __forceinline__ float log2p_ratio(float e) {
  float p = 0.020401183f;
  p = p * e + -0.095797556f;
  p = p * e + 0.21528457f;
  p = p * e + -0.33908906f;
  p = p * e + 0.47766839f;
  p = p * e + -0.72115948f;
  return p * e + 1.4426932f;
}
// softplus in units of log(2): log2(1 + 2^y), relative error 1.4e-6 of its distance from max(y, 0).
__device__ __forceinline__ float softplus2(float y) {
  const float e = exp2_fast(-fabsf(y));
  return log2p_ratio(e) * e + fmaxf(y, 0.0f);
}

// A large rate makes much of a softplus that is no normal float32. But where anything is left of the state, that
// softplus is exp(x), so its rate is held to 2^24, and what that takes away is added to the input: within 1e-5 of the
// same step.
constexpr float LARGEST_SOFTPLUS_A_LOG = 16.635532f;  // log(2^24)
constexpr float LARGEST_A_LOG = 88.722839f;           // log(LARGEST)
__device__ __forceinline__ float softplus_rate_of(float A_log) {
  return rate_of(min_or_nan(A_log, LARGEST_SOFTPLUS_A_LOG));
}
__device__ __forceinline__ float softplus_shift_of(float A_log) {
  return fmaxf(fminf(A_log, LARGEST_A_LOG) - LARGEST_SOFTPLUS_A_LOG, 0.0f);
}

// 1 / (1 + exp(-x))
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }

// --- a head's gate -------------------------------------------------------------------------------

struct Gate {
  int kind;
  // log2 decay of one unit of the gate (of softplus2 for the softplus); its inverse for the sigmoid.
  float unit;
  float slope;  // -log2(e) exp(A_log)
  float shift;  // of the softplus, to be added to the bias
  bool rare;    // a rate of 0; kernels that store a softplus's biases may add those of large ones (gate_bias.cuh)
};

// The rate by which steps grow with the gate, and what a softplus adds to its input. BOUNDED_KIND: it is no softplus.
template <bool BOUNDED_KIND = false>
__device__ __forceinline__ bool is_softplus(int kind) {
  return !BOUNDED_KIND && kind == GATE_SOFTPLUS;
}
template <bool BOUNDED_KIND = false>
__device__ __forceinline__ float gate_rate(int kind, float A_log) {
  return is_softplus<BOUNDED_KIND>(kind) ? softplus_rate_of(A_log) : rate_of(A_log);
}
template <bool BOUNDED_KIND = false>
__device__ __forceinline__ float gate_shift(int kind, float A_log) {
  return is_softplus<BOUNDED_KIND>(kind) ? softplus_shift_of(A_log) : 0.0f;
}
// An input as a head's rate leaves it.
__device__ __forceinline__ float rated_input(float rate, float x) {
  return rate == 0.0f ? nothing_of(x) : x;
}
// Whether a head's rate is 0, so that nothing_of() replaces all inputs.
__device__ __forceinline__ bool is_still(int kind, float rate) { return kind != GATE_LOG && rate == 0.0f; }

template <bool BOUNDED_KIND>
__device__ __forceinline__ Gate make_gate(int kind, float A_log, float inverse_of_bound) {
  // Not is_softplus() and gate_rate(): the compiler would order other instructions differently.
  const bool softplus = !BOUNDED_KIND && kind == GATE_SOFTPLUS;
  const float rate = softplus ? softplus_rate_of(A_log) : rate_of(A_log);
  const float unit = softplus ? -rate : max_or_nan(LN2 * inverse_of_bound, -LARGEST);
  return {kind, unit, slope_of(rate), softplus ? softplus_shift_of(A_log) : 0.0f, is_still(kind, rate)};
}

// --- steps ---------------------------------------------------------------------------------------
// x: the sum of input, bias and shift, of which a rate of 0 has left nothing; y: log2(e) times that.

// 1 / (1 + exp(-rate x)): a sigmoid's step is the lower bound times this.
__device__ __forceinline__ float sigmoid_part(float slope, float x) {
  return reciprocal(1.0f + exp2_fast(slope * x));
}
__device__ __forceinline__ float sigmoid_step(float bound, float slope, float x) {
  return bound * sigmoid_part(slope, x);
}
// The same of a gate whose unit is the bound's inverse, in fewer instructions.
__device__ __forceinline__ float sigmoid_step(const Gate& gate, float x) {
  return reciprocal(exp2_fast(x * gate.slope) * gate.unit + gate.unit);
}
// unit: -rate.
__device__ __forceinline__ float softplus_step(float unit, float y) { return unit * softplus2(y); }
// With a rate of 0.
__device__ __forceinline__ float still_step(const Gate& gate) {
  return gate.kind == GATE_SOFTPLUS ? 0.0f : reciprocal(gate.unit + gate.unit);
}

// The gates of N channels, in kernels that process one token after another.
template <int N>
struct ChannelGates {
  float bias[N];  // with the shift
  float factor;   // a sigmoid's slope, or a softplus's unit
};
// From A_log and biases without the shift.
template <int N>
__device__ __forceinline__ void finish_gates(ChannelGates<N>& gate, int kind, float A_log) {
  if (kind == GATE_SOFTPLUS) {
    gate.factor = -softplus_rate_of(A_log);
#pragma unroll
    for (int i = 0; i < N; ++i) gate.bias[i] += softplus_shift_of(A_log);
  } else {
    gate.factor = slope_of(rate_of(A_log));
  }
}
// Replaces inputs by decays. One branch on the kind of gate for all channels.
template <int N, class Params>
__device__ __forceinline__ void decays(const Params& p, float (&x)[N], const ChannelGates<N>& gate) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] += gate.bias[i];
  if (gate.factor == 0.0f) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = nothing_of(x[i]);
  }
  if (p.gate == GATE_SIGMOID) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = exp2_fast(sigmoid_step(LOG2E * p.lower_bound, gate.factor, x[i]));
  } else if (p.gate == GATE_SOFTPLUS) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = exp2_fast(softplus_step(gate.factor, LOG2E * x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = exp2_fast(LOG2E * x[i]);
  }
}

// --- gradients -----------------------------------------------------------------------------------
// From d, the gradient of a token's log decay, to that of the gate's input. Steps below `floor` were cut off
// and have none; a step that is NaN has. What an element adds to A_log's gradient is added to `A_log`.

// `bound`: the lower bound in log2, `span`: minus the lower bound. The rate last: it may be so large that only all of
// the product is finite.
template <bool BOUNDED_KIND>
__device__ __forceinline__ float sigmoid_gradient(float d, float x, float rate, float slope, float bound, float span,
                                                  float floor, float& A_log) {
  const float s = sigmoid_part(slope, x);
  if (!BOUNDED_KIND) d = bound * s >= floor ? d : 0.0f;
  d = -rate * (d * (s * (span - span * s)));
  A_log += d * x;
  return d;
}
// d is `grow` times smaller than the gradient. `A_log`: LN2 times this sum is its gradient.
__device__ __forceinline__ float softplus_gradient(float d, float grow, float x, float rate, float floor,
                                                   float& A_log) {
  const float step = softplus_step(-rate, LOG2E * x), slope = -rate * sigmoid(x), dstep = d * grow;
  const bool kept = !(step < floor);
  const float input = kept ? dstep * slope : 0.0f;
  if (kept) A_log += dstep * step;
  return input;
}
__device__ __forceinline__ float log_gradient(float d, float grow, float x, float floor) {
  return LOG2E * x >= floor ? d * grow : 0.0f;
}
