// The gate forward and backward.
#pragma once

#include "sm90/chunk_backward/grads_loads.cuh"
#include "sm90/chunk_backward/grads_token_sums.cuh"

// dt_bias of a channel or, by one thread, A_log of the head: requested early, used later by the same thread, so that no
// thread waits for it in between.
struct GateLoads {
  float x;
};
__device__ __forceinline__ GateLoads load_gate(const ChunkBackwardParams& p, int hv, const Lane& l) {
  GateLoads r = {0.0f};
  if (l.thread < channels_of(p) && p.dt_bias)
    r.x = load_scalar(p.dt_bias, (long long)hv * channels_of(p) + l.thread, p.bias_type);
  if (l.thread == K && p.A_log) r.x = reinterpret_cast<const float*>(p.A_log)[hv];
  return r;
}
__device__ __forceinline__ void store_gate_parameters(const ChunkBackwardParams& p, const GateLoads& gate, u32 to,
                                                      const Lane& l) {
  if (l.thread < K) store_shared(to + 4 * l.thread, __float_as_uint(held_bias(gate.x)));
  if (l.thread != K) return;
  store_shared(to + OFFSET(GateParameters, rate), __float_as_uint(gate_rate<BOUNDED>(p.gate, gate.x)));
  if (is_softplus<BOUNDED>(p.gate))
    store_shared(to + OFFSET(GateParameters, shift), __float_as_uint(gate_shift<BOUNDED>(p.gate, gate.x)));
}

// The gate's raw inputs, float32 or packed.
template <bool FLOAT>
struct RawGatesOf {
  float x[4][4];
};
template <>
struct RawGatesOf<false> {
  Operand x;
};
using RawGates = RawGatesOf<G_FLOAT>;
__device__ __forceinline__ float raw_gate(const RawGatesOf<true>& r, int j, int e) { return r.x[j][e]; }
__device__ __forceinline__ float raw_gate(const RawGatesOf<false>& r, int j, int e) { return element(r.x, j, e); }
__device__ __forceinline__ void load_raw_gates(RawGatesOf<true>& r, u32 shared, const Lane& l) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    // Rows 8 further have the same order of pieces, and the channel 8 further is two pieces on.
    const u32 piece = gate_piece(HALF * l.token_half + 2 * l.t + (e & 1), l.channel >> 2) ^ 32 * (e >> 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      r.x[j][e] = load_shared1(shared + OFFSET(SharedMemory, g) + piece + 4 * (l.channel & 3) + 8 * GATE_ROW * j);
  }
}
__device__ __forceinline__ void load_raw_gates(RawGatesOf<false>& r, u32 shared, const Lane& l) {
  load_own(r.x, shared + OFFSET(SharedMemory, g), l);
}
__device__ __forceinline__ float2 load_biases(u32 gate, const Lane& l) {
  return make_float2(load_shared1(gate + 4 * l.channel), load_shared1(gate + 4 * l.channel + 32));
}
// With dt_bias, and the shift of a softplus.
__device__ __forceinline__ void add_biases(float (&x)[4][4], const RawGates& raw, const ChunkBackwardParams& p,
                                           u32 gate, const Lane& l) {
  const float shift = is_softplus<BOUNDED>(p.gate) ? load_shared1(gate + OFFSET(GateParameters, shift)) : 0.0f;
  const float2 biases = load_biases(gate, l);
  const float bias[2] = {biases.x + shift, biases.y + shift};
  each([&](int j, int e) { x[j][e] = raw_gate(raw, j, e) + bias[e >> 1]; });
}

// exp(-rate (g + bias)) of a bounded sigmoid as 2^(slope g + shift), where rates are neither large nor small and biases
// not large: the shift is then exact to 2^-18, and no product infinite but that with an infinite g.
struct UsualGate {
  float slope, shift[2];  // of the lane's two channels
  bool usual;             // the same in all lanes
};
constexpr float LARGEST_USUAL_SLOPE = 1048576.0f, LARGEST_USUAL_SHIFT = 64.0f;
constexpr float SMALLEST_USUAL_SLOPE = 1.0f / LARGEST_USUAL_SLOPE;
__device__ __forceinline__ UsualGate usual_gate(const ChunkBackwardParams& p, u32 gate, const Lane& l) {
  const float slope = slope_of(load_shared1(gate + OFFSET(GateParameters, rate)));
  const float2 biases = load_biases(gate, l);
  UsualGate r = {slope, {slope * biases.x, slope * biases.y}, false};
  const bool usual = p.gate == GATE_SIGMOID && slope <= -SMALLEST_USUAL_SLOPE && slope >= -LARGEST_USUAL_SLOPE &&
                     fabsf(r.shift[0]) <= LARGEST_USUAL_SHIFT && fabsf(r.shift[1]) <= LARGEST_USUAL_SHIFT;
  r.usual = BOUNDED && !warp_any(!usual);
  return r;
}

__device__ __forceinline__ float usual_exponent(const UsualGate& gate, const RawGates& raw, int j, int e) {
  return raw_gate(raw, j, e) * gate.slope + gate.shift[e >> 1];
}

// log2 decays of every token.
__device__ __forceinline__ void decay_steps(float (&x)[4][4], const ChunkBackwardParams& p, u32 gate, u32 shared,
                                            const Lane& l) {
  RawGates raw;
  load_raw_gates(raw, shared, l);
  const UsualGate usual = usual_gate(p, gate, l);
  if (usual.usual) {
    const float unit = max_or_nan(reciprocal(p.lower_bound * LOG2E), -LARGEST);
    each([&](int j, int e) { x[j][e] = reciprocal(exp2_fast(usual_exponent(usual, raw, j, e)) * unit + unit); });
    return;
  }
  add_biases(x, raw, p, gate, l);
  const float rate = load_shared1(gate + OFFSET(GateParameters, rate));
  if (is_still(p.gate, rate)) scale_by_zero(x);
  if (p.gate == GATE_SIGMOID) {
    const float slope = slope_of(rate), bound = p.lower_bound * LOG2E;
    each([&](int j, int e) { x[j][e] = sigmoid_step(bound, slope, x[j][e]); });
  } else if (!BOUNDED && p.gate == GATE_SOFTPLUS) {
    each([&](int j, int e) { x[j][e] = softplus_step(-rate, LOG2E * x[j][e]); });
  } else {
    each([&](int j, int e) { x[j][e] *= LOG2E; });
  }
  each([&](int j, int e) { x[j][e] = max_or_nan(x[j][e], p.floor); });
}

// With P the log2 decay from the first token that shares its anchor: up = 2^(P + centre) of every
// element, and at the end of each anchor's tokens of the lane's two channels.
__device__ __forceinline__ void decays(float (&up)[4][4], float (&end)[2][ANCHORS],
                                       const ChunkBackwardParams& p, u32 gate, int rows, u32 shared,
                                       const Lane& l) {
  decay_steps(up, p, gate, shared, l);
  if (rows < C) {
    const int left = rows - HALF * l.token_half - 2 * l.t;
    each([&](int j, int e) { up[j][e] = 8 * j + (e & 1) < left ? up[j][e] : 0.0f; });
  }
#pragma unroll
  for (int anchor = 0; anchor < ANCHORS; ++anchor) {
    constexpr int TILES = 4 / ANCHORS;
    float sums[4] = {p.centre, p.centre, p.centre, p.centre};
    sum_tiles<false, TILES>(&up[TILES * anchor], sums, l);
    end[0][anchor] = exp2_fast(sums[0]);
    end[1][anchor] = exp2_fast(sums[2]);
  }
  each([&](int j, int e) { up[j][e] = exp2_fast(up[j][e]); });
}

// Gradients of dt_bias of the lane's two channels, of all tokens of the half, and what the lane adds to that of A_log.
struct GateSums {
  float bias[2], rate;
};
constexpr float SMALLEST_FACTOR = 1.0f / 1.2676506e30f, LARGEST_FACTOR = 1.2676506e30f;  // 2^-100, 2^100
// The largest number of g's type.
constexpr float LARGEST_GRADIENT = G_FLOAT ? LARGEST : LARGEST_BF16;

// Where a gradient or a sum is not finite: gradients are cut off at the largest number, and so are the
// products that make A_log's. A gradient of 0 gives 0 whatever the input. Sums are SUM_SCALE times the others.
__device__ __forceinline__ GateSums saturated_sums(float (&d)[4][4], const float (&x)[4][4]) {
  GateSums sums = {};
  each([&](int j, int e) {
    d[j][e] = limit(d[j][e], LARGEST_GRADIENT);
    sums.bias[e >> 1] += SUM_SCALE * d[j][e];
    sums.rate += SUM_SCALE * (d[j][e] == 0.0f ? 0.0f : limit(d[j][e] * x[j][e], LARGEST));
  });
  return {sum_quad(sums.bias[0]), sum_quad(sums.bias[1]), sums.rate};
}

__device__ __forceinline__ void pack(Operand& r, const float (&d)[4][4]) {
  make_operand(r, [&](int j, int e) { return d[j][e]; });
}
// Gradients of the raw gate from those of the decays (of the natural logarithm, `grow` smaller; replaced), and their
// sums. `packed` is d in bfloat16; dt_bias's gradients are sums of that, products with ones. `factor`: the rate, `grow`
// and the bound.
__device__ __forceinline__ GateSums usual_gate_backward(float (&d)[4][4], Operand& packed, const RawGates& raw,
                                                        const UsualGate& usual, float factor) {
  float rate = 0.0f;
  each([&](int j, int e) {
    const float exponent = usual_exponent(usual, raw, j, e), s = reciprocal(1.0f + exp2_fast(exponent));
    d[j][e] = d[j][e] * (s - s * s) * factor;
    rate += d[j][e] * exponent;
  });
  pack(packed, d);
  constexpr u32 ONES = 0x3f803f80;
  float all[4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) mma_bf16(all, packed[i], ONES, ONES);
  return {all[0], all[2], rate * reciprocal(usual.slope)};
}
// The same of other gates, of inputs x with their biases.
__device__ __forceinline__ GateSums rare_gate_backward(float (&d)[4][4], float (&x)[4][4], const ChunkBackwardParams& p,
                                                       u32 gate, float grow) {
  const float a = load_shared1(gate + OFFSET(GateParameters, rate));
  if (is_still(p.gate, a)) scale_by_zero(x);
  GateSums sums = {};
  if (p.gate == GATE_SIGMOID) {
    const float slope = slope_of(a), span = -p.lower_bound * grow, bound = p.lower_bound * LOG2E;
    each([&](int j, int e) {
      d[j][e] = sigmoid_gradient<BOUNDED>(d[j][e], x[j][e], a, slope, bound, span, p.floor, sums.rate);
    });
  } else if (!BOUNDED && p.gate == GATE_SOFTPLUS) {
    each([&](int j, int e) {
      d[j][e] = softplus_gradient(d[j][e], grow, x[j][e], a, p.floor, sums.rate);
    });
    sums.rate *= LN2;
  } else {
    each([&](int j, int e) { d[j][e] = log_gradient(d[j][e], grow, x[j][e], p.floor); });
  }
  each([&](int j, int e) { sums.bias[e >> 1] += d[j][e]; });
  return {sum_quad(sums.bias[0]), sum_quad(sums.bias[1]), sums.rate};
}
// Sums times SUM_SCALE; `packed` is d in bfloat16.
__device__ __forceinline__ GateSums gate_backward(float (&d)[4][4], Operand& packed, const ChunkBackwardParams& p,
                                                  u32 gate, float grow, int rows, u32 shared, const Lane& l) {
  RawGates raw;
  load_raw_gates(raw, shared, l);
  if (rows < C) {
    const int left = rows - HALF * l.token_half - 2 * l.t;
    each([&](int j, int e) { d[j][e] = 8 * j + (e & 1) < left ? d[j][e] : 0.0f; });
  }
  const UsualGate usual = usual_gate(p, gate, l);
  // The rate and `grow` at once, where their product has all its bits and is finite.
  const float factor = load_shared1(gate + OFFSET(GateParameters, rate)) * (p.lower_bound * grow);
  const bool quick = usual.usual && fabsf(factor) >= SMALLEST_FACTOR && fabsf(factor) <= LARGEST_FACTOR;
  GateSums sums;
  if (quick) {
    sums = usual_gate_backward(d, packed, raw, usual, factor);
  } else {
    float x[4][4];
    add_biases(x, raw, p, gate, l);
    sums = rare_gate_backward(d, x, p, gate, grow);
    pack(packed, d);
  }
  const bool finite = fabsf(sums.rate) + fabsf(sums.bias[0]) + fabsf(sums.bias[1]) <= LARGEST;
  if (warp_any(p.gate == GATE_SIGMOID && !finite)) {
    float x[4][4];
    add_biases(x, raw, p, gate, l);
    if (is_still(p.gate, load_shared1(gate + OFFSET(GateParameters, rate)))) scale_by_zero(x);
    sums = saturated_sums(d, x);
    pack(packed, d);
    return sums;
  }
  return {SUM_SCALE * sums.bias[0], SUM_SCALE * sums.bias[1], SUM_SCALE * sums.rate};
}
