// Gradients of A_log and dt_bias: sums over all chunks of the parts that the gradients kernel wrote
// for each, in one fixed order.
//
// Grid: a block a value head. Groups of 128 threads, a channel each, take every GROUPS-th slot;
// their sums meet in shared memory. Chunks without a gradient add zeros, so that their number
// changes no bit of the sum. Parts are SUM_SCALE times what they stand for; a sum is cut off at the
// largest number of its type.
#include "common/gate.cuh"
#include "common/loads.cuh"
#include "generated/chunk_backward_params.cuh"

constexpr int K = 128;
constexpr int GROUPS = THREADS / K;
constexpr int AHEAD = 4;  // loads in flight
KDA_SHARED_BYTES(sizeof(float[THREADS]));

__device__ __forceinline__ void store_sum(u64 base, long long index, int type, float parts) {
  const float largest = type == TYPE_FLOAT32 ? LARGEST : type == TYPE_BFLOAT16 ? LARGEST_BF16 : 65504.0f;
  store_scalar(base, index, type, limit(parts * (1.0f / SUM_SCALE), largest));
}

// The sum of part[slot * step] over slots first, first + stride, ...
__device__ __forceinline__ float sum_slots(const float* part, long long step, int first, int stride,
                                           int slots) {
  float total = 0.0f;
  int slot = first;
  for (; slot + (AHEAD - 1) * stride < slots; slot += AHEAD * stride) {
    float x[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) x[i] = part[(slot + i * stride) * step];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) total += x[i];
  }
  for (; slot < slots; slot += stride) total += part[slot * step];
  return total;
}

KDA_KERNEL(THREADS, 1) sums(KDA_PARAM SumsParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int thread = thread_index(), channel = thread % K, group = thread / K, hv = block_index();
  if (p.d_bias) {
    const float* part = reinterpret_cast<const float*>(p.dbias_part) + (long long)hv * K + channel;
    store_shared(shared + 4 * thread,
                 __float_as_uint(sum_slots(part, (long long)p.HV * K, group, GROUPS, p.slots)));
    sync_block();
    if (group == 0) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) total += load_shared1(shared + 4 * (i * K + channel));
      store_sum(p.d_bias, hv * K + channel, p.bias_type, total);
    }
  }
  if (p.d_A && thread < 32) {
    float total = sum_slots(reinterpret_cast<const float*>(p.dA_part) + hv, p.HV, thread, 32, p.slots);
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) total += shuffle_xor(total, mask);
    if (thread == 0) store_sum(p.d_A, hv, p.A_type, total);
  }
}
