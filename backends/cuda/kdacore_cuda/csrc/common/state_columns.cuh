// State [K, V]: a lane holds one column of V whole, so sums over K need no other lane. Part of decode.cu.

struct State {
  float s[K];
};

struct Place {
  int v;        // this lane's column
  bool writes;  // does this lane write the output of its column?
};

__device__ __forceinline__ Place make_place(int first, int warp, int lane) {
  return {first + 32 * warp + lane, true};
}

__device__ __forceinline__ void clear_state(State& state) {
#pragma unroll
  for (int k = 0; k < K; ++k) state.s[k] = 0.0f;
}

__device__ __forceinline__ void load_state(State& state, const Place& at, u64 base, long long offset) {
#if STATE_BF16
  const u16* from = reinterpret_cast<const u16*>(base) + offset + at.v;
#pragma unroll
  for (int k = 0; k < K; ++k) state.s[k] = bf16_low(from[k * V]);
#else
  const float* from = reinterpret_cast<const float*>(base) + offset + at.v;
#pragma unroll
  for (int k = 0; k < K; ++k) state.s[k] = from[k * V];
#endif
}

__device__ __forceinline__ void store_state(const State& state, const Place& at, u64 base, long long offset) {
#if STATE_BF16
  u16* to = reinterpret_cast<u16*>(base) + offset + at.v;
#pragma unroll
  for (int k = 0; k < K; ++k) to[k * V] = (u16)pack_bf16(state.s[k], 0.0f);
#else
  float* to = reinterpret_cast<float*>(base) + offset + at.v;
#pragma unroll
  for (int k = 0; k < K; ++k) to[k * V] = state.s[k];
#endif
}

// One token: decay, delta rule; the output of this lane's column.
__device__ __forceinline__ float step(State& state, const Place&, u32 token, float v) {
  float dot[4] = {0, 0, 0, 0};
#pragma unroll
  for (int c = 0; c < K; c += 4) {
    const float4 k = load_shared4(token + 4 * (K + c)), d = load_shared4(token + 4 * (2 * K + c));
    dot[0] += k.x * (state.s[c] *= d.x);
    dot[1] += k.y * (state.s[c + 1] *= d.y);
    dot[2] += k.z * (state.s[c + 2] *= d.z);
    dot[3] += k.w * (state.s[c + 3] *= d.w);
  }
  const float u = load_shared1(token + 4 * (3 * K)) * (v - ((dot[0] + dot[1]) + (dot[2] + dot[3])));
  float o[4] = {0, 0, 0, 0};
#pragma unroll
  for (int c = 0; c < K; c += 4) {
    const float4 k = load_shared4(token + 4 * (K + c)), q = load_shared4(token + 4 * c);
    o[0] += q.x * (state.s[c] += k.x * u);
    o[1] += q.y * (state.s[c + 1] += k.y * u);
    o[2] += q.z * (state.s[c + 2] += k.z * u);
    o[3] += q.w * (state.s[c + 3] += k.w * u);
  }
  return (o[0] + o[1]) + (o[2] + o[3]);
}
