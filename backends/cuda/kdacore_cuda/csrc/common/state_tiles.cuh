// State [K, V]: a warp holds 32 columns of V and half of K; a lane 4 neighbouring columns (lane % 8) and every fourth group
// of 4 channels of its half (lane / 8). Every load is whole 128-byte lines. Sums over K go over four lanes and the partner
// warp, through shared memory. Part of decode.cu.

static_assert(WARPS % 2 == 0, "warps come in pairs that split K");
constexpr int ROWS = K / 8;  // channels of a lane
constexpr u32 SUMS_BYTES = 2 * WARPS * 128;

struct State {
  float4 s[ROWS];
};

struct Place {
  int v;        // first of this lane's columns
  bool writes;  // does this lane write the output of its columns?
  int channel;  // first channel; the others follow in fours, 16 apart
  u32 sums, partner;  // where this warp and its partner leave partial sums
  bool second;  // of the pair
  bool leaves;  // does this lane write the warp's partial sums?
};

__device__ __forceinline__ Place make_place(int first, int warp, int lane, u32 scratch) {
  const int v = 4 * (lane & 7), half = warp & 1;
  const u32 at = scratch + 4 * v;
  return {first + 32 * (warp >> 1) + v, lane < 8 && !half, K / 2 * half + 4 * (lane >> 3), at + 128 * warp,
          at + 128 * (warp ^ 1), half != 0, lane < 8};
}

__device__ __forceinline__ int channel_of(const Place& at, int i) { return at.channel + 16 * (i >> 2) + (i & 3); }

__device__ __forceinline__ void clear_state(State& state) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) state.s[i] = make_float4(0, 0, 0, 0);
}

__device__ __forceinline__ void load_state(State& state, const Place& at, u64 base, long long offset) {
  constexpr int type = STATE_BF16 ? TYPE_BFLOAT16 : TYPE_FLOAT32;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) state.s[i] = load_four(base, offset + channel_of(at, i) * V + at.v, type);
}

__device__ __forceinline__ void store_state(const State& state, const Place& at, u64 base, long long offset) {
  constexpr int type = STATE_BF16 ? TYPE_BFLOAT16 : TYPE_FLOAT32;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) store_four(base, offset + channel_of(at, i) * V + at.v, type, state.s[i]);
}

__device__ __forceinline__ float4 times(const float4& x, float f) { return make_float4(x.x * f, x.y * f, x.z * f, x.w * f); }
__device__ __forceinline__ float4 plus(const float4& x, const float4& y) {
  return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}
__device__ __forceinline__ float4 plus_times(const float4& x, const float4& y, float f) {
  return make_float4(x.x + y.x * f, x.y + y.y * f, x.z + y.z * f, x.w + y.w * f);
}
__device__ __forceinline__ float4 plus_lane(const float4& x, int mask) {
  return make_float4(x.x + shuffle_xor(x.x, mask), x.y + shuffle_xor(x.y, mask), x.z + shuffle_xor(x.z, mask),
                     x.w + shuffle_xor(x.w, mask));
}

// The sum over all of K; both warps of a pair add in the same order. `area` alternates, so one barrier is enough.
__device__ __forceinline__ float4 sum_channels(float4 x, const Place& at, u32 area) {
  x = plus_lane(plus_lane(x, 8), 16);
  if (at.leaves) {
    store_shared(at.sums + area, __float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
  }
  sync_block();
  const float4 other = load_shared4(at.partner + area);
  return at.second ? plus(other, x) : plus(x, other);
}

// One token: decay, delta rule; the output of this lane's columns.
__device__ __forceinline__ float4 step(State& state, const Place& at, u32 token, const float4& v) {
  float4 dot = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    const u32 from = token + 4 * (at.channel + 4 * i);
    const float4 k = load_shared4(from + 4 * K), d = load_shared4(from + 8 * K);
    dot = plus_times(dot, state.s[i] = times(state.s[i], d.x), k.x);
    dot = plus_times(dot, state.s[i + 1] = times(state.s[i + 1], d.y), k.y);
    dot = plus_times(dot, state.s[i + 2] = times(state.s[i + 2], d.z), k.z);
    dot = plus_times(dot, state.s[i + 3] = times(state.s[i + 3], d.w), k.w);
  }
  dot = sum_channels(dot, at, 0);
  const float4 u = times(plus_times(v, dot, -1.0f), load_shared1(token + 12 * K));
  float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    const u32 from = token + 4 * (at.channel + 4 * i);
    const float4 k = load_shared4(from + 4 * K), q = load_shared4(from);
    o = plus_times(o, state.s[i] = plus_times(state.s[i], u, k.x), q.x);
    o = plus_times(o, state.s[i + 1] = plus_times(state.s[i + 1], u, k.y), q.y);
    o = plus_times(o, state.s[i + 2] = plus_times(state.s[i + 2], u, k.z), q.z);
    o = plus_times(o, state.s[i + 3] = plus_times(state.s[i + 3], u, k.w), q.w);
  }
  return sum_channels(o, at, SUMS_BYTES / 2);
}

// What a lane reads of v and writes of o.
using Values = RawFour;
__device__ __forceinline__ Values load_values(u64 base, long long at, int type) { return load_raw_four(base, at, type); }
__device__ __forceinline__ float4 values_of(const Values& raw, int type) { return from_raw(raw, type); }
__device__ __forceinline__ void store_values(u64 base, long long at, int type, const float4& x) { store_four(base, at, type, x); }
