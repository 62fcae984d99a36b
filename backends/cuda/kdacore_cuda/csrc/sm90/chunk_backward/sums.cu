// Gradients of A_log and dt_bias: sums over all chunks of the parts that the gradients kernel wrote
// for each, in one fixed order.
//
// Grid: a block a value head. Groups of 128 threads, a channel each, take every GROUPS-th slot;
// their sums meet in shared memory. Chunks without a gradient add zeros, so that their number
// changes no bit of the sum.
#include "sm90/chunk_backward/slot_sums.cuh"
#include "sm90/head_dims.cuh"

constexpr int K = 128;
constexpr int GROUPS = THREADS / K;
KDA_SHARED_BYTES(sizeof(float[THREADS]));

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
      if (has_piece(channel, channels_of(p)))
        store_sum(p.d_bias, hv * channels_of(p) + channel, p.bias_type, total);
    }
  }
  if (p.d_A && thread < 32) sum_head(p.dA_part, p.HV, hv, p.slots, p.d_A, p.A_type, thread);
}
