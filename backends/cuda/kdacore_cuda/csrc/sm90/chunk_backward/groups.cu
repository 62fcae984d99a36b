// Grouped value heads: the gradient of a query or key head is the sum of its value heads'
// gradients, taken through the l2norm once.
//
//   d = sum over the group; with r = 1 / |x|: dx = r (d - r^2 (x . d) x)
//
// Grid: a warp a token and query/key head, four channels a lane. What is summed has 128 channels, x and the result
// maybe fewer. Sums are float32 until the result
// is stored as bfloat16.
#include "common/l2norm.cuh"
#include "common/loads.cuh"
#include "generated/chunk_backward_params.cuh"
#include "sm90/head_dims.cuh"

constexpr int K = 128;
KDA_SHARED_BYTES(0);

__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}

KDA_KERNEL(THREADS, 1) groups(KDA_PARAM GroupsParams p) {
  wait_for_inputs();
  const int lane = thread_index() & 31;
  const long long row = (long long)block_index() * (THREADS / 32) + thread_index() / 32;  // of [B, T, H]
  if (row >= p.rows) return;
  const int h = (int)(row % p.H), group = p.HV / p.H;
  const long long token = row / p.H, batch = token / p.T, t = token - batch * p.T;
  const float* part =
      reinterpret_cast<const float*>(p.part) + (token * p.HV + (long long)h * group) * K + 4 * lane;
  float d[4] = {};
  for (int i = 0; i < group; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(part + i * K);
    d[0] += x.x;
    d[1] += x.y;
    d[2] += x.z;
    d[3] += x.w;
  }
  // A gradient of zero stays zero whatever x holds: rows beyond a pack's last offset are not read.
  const bool real = has_piece(4 * lane, channels_of(p));
  const bool zero = d[0] == 0.0f && d[1] == 0.0f && d[2] == 0.0f && d[3] == 0.0f;
  if (p.flags & FLAG_L2NORM && sum_lanes(zero ? 0.0f : 1.0f) != 0.0f) {
    const long long at = batch * p.x_sb + t * p.x_st + h * p.x_sh + 4 * lane;
    const uint2 raw = real ? *reinterpret_cast<const uint2*>(p.x + 2 * at) : uint2{0, 0};
    const float x[4] = {bf16_low(raw.x), bf16_high(raw.x), bf16_low(raw.y), bf16_high(raw.y)};
    float square = 0.0f, inner = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      square += x[i] * x[i];
      inner += x[i] * d[i];
    }
    const float r = inverse_norm(sum_lanes(square));
    const float along = sum_lanes(inner) * r * r;
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = r * (d[i] - along * x[i]);
  }
  uint2 out;
  out.x = pack_bf16(d[0], d[1]);
  out.y = pack_bf16(d[2], d[3]);
  if (real) *reinterpret_cast<uint2*>(p.out + 2 * (row * channels_of(p) + 4 * lane)) = out;
}
