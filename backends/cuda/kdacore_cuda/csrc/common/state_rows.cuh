// State [V, K]: a warp holds 16 rows of V, a lane 4 neighbouring channels of each (of every second row when K is 64).
// Sums over K fold 16 rows onto the lanes; each lane ends with one row's. Part of decode.cu.

constexpr int LANES = K / 4;         // lanes along K
constexpr int GROUPS = 32 / LANES;   // rows side by side
constexpr int ROWS = 16 / GROUPS;    // rows of a lane

constexpr u32 SUMS_BYTES = 0;

struct State {
  float4 s[ROWS];
};

struct Place {
  int v;        // the row of V whose sums this lane ends with
  bool writes;  // does this lane write the output of that row?
  int lane, first, channel;
};

// Row i of a lane is row GROUPS * i + lane / LANES of the warp.
__device__ __forceinline__ Place make_place(int first, int warp, int lane, u32) {
  const int base = first + 16 * warp;
  return {base + GROUPS * ((lane % LANES) >> 1) + lane / LANES, (lane & 1) == 0, lane, base + lane / LANES, 4 * (lane % LANES)};
}

__device__ __forceinline__ void clear_state(State& state) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) state.s[i] = make_float4(0, 0, 0, 0);
}

__device__ __forceinline__ void load_state(State& state, const Place& at, u64 base, long long offset) {
  constexpr int type = STATE_BF16 ? TYPE_BFLOAT16 : TYPE_FLOAT32;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) state.s[i] = load_four(base, offset + (at.first + GROUPS * i) * K + at.channel, type);
}

__device__ __forceinline__ void store_state(const State& state, const Place& at, u64 base, long long offset) {
  constexpr int type = STATE_BF16 ? TYPE_BFLOAT16 : TYPE_FLOAT32;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) store_four(base, offset + (at.first + GROUPS * i) * K + at.channel, type, state.s[i]);
}

// Sums x[i] over the lanes of each row, halving the rows held at every step; x[0] ends as the sum of the lane's own row.
template <int HALF>
__device__ __forceinline__ void fold_rows(float (&x)[ROWS], int lane) {
  const bool high = lane & (2 * HALF);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float send = high ? x[i] : x[i + HALF], keep = high ? x[i + HALF] : x[i];
    x[i] = keep + shuffle_xor(send, 2 * HALF);
  }
  if constexpr (HALF > 1) fold_rows<HALF / 2>(x, lane);
}

__device__ __forceinline__ float fold(float (&x)[ROWS], int lane) {
  fold_rows<ROWS / 2>(x, lane);
  return x[0] + shuffle_xor(x[0], 1);
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b) {
  return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

// One token: decay, delta rule; the output of the lane's own row.
__device__ __forceinline__ float step(State& state, const Place& at, u32 token, float v) {
  const float4 q = load_shared4(token + 4 * at.channel), k = load_shared4(token + 4 * (K + at.channel));
  const float4 d = load_shared4(token + 4 * (2 * K + at.channel));
  float x[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float4& s = state.s[i];
    s = make_float4(s.x * d.x, s.y * d.y, s.z * d.z, s.w * d.w);
    x[i] = dot4(k, s);
  }
  const float u = load_shared1(token + 4 * (3 * K)) * (v - fold(x, at.lane));
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float row_u = shuffle(u, (at.lane & ~(LANES - 1)) | 2 * i);
    float4& s = state.s[i];
    s = make_float4(s.x + k.x * row_u, s.y + k.y * row_u, s.z + k.z * row_u, s.w + k.w * row_u);
    x[i] = dot4(q, s);
  }
  return fold(x, at.lane);
}

// What a lane reads of v and writes of o.
using Values = u32;
__device__ __forceinline__ Values load_values(u64 base, long long at, int type) {
  return load_bits(base + type_size(type) * at, type);
}
__device__ __forceinline__ float values_of(Values raw, int type) { return from_bits(raw, type); }
__device__ __forceinline__ void store_values(u64 base, long long at, int type, float x) { store_scalar(base, at, type, x); }
