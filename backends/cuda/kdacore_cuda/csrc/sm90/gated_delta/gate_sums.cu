// Gradients of A_log and dt_bias of the gated delta rule, [HV] each: sums over all chunks of the parts that the
// gradients kernel wrote for each, [slots, HV], in one fixed order. Chunks without a gradient add zeros, so that their
// number changes no bit of the sum.
//
// Grid: a block of two warps a value head, one warp for each of the two.
#include "sm90/chunk_backward/slot_sums.cuh"

constexpr int THREADS = 64;
KDA_SHARED_BYTES(0);

KDA_KERNEL(THREADS, 1) gate_sums(KDA_PARAM SumsParams p) {
  wait_for_inputs();
  const int lane = thread_index() & 31, hv = block_index();
  const bool of_bias = thread_index() >= 32;
  const u64 out = of_bias ? p.d_bias : p.d_A;
  if (out)
    sum_head(of_bias ? p.dbias_part : p.dA_part, p.HV, hv, p.slots, out, of_bias ? p.bias_type : p.A_type,
             lane);
}
