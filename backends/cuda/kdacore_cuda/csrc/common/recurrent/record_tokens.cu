// Keys and decays of the tokens of a call with records, behind recurrent_records.cu. There the blocks of
// a head's columns and those of a group's value heads read the same keys and decays, in no order, so none
// of them can write new ones. Grid: a few threads for each token of each sequence and value head.
#include "common/recurrent/record_rows.cuh"

constexpr int THREADS = 128, CHANNELS = 4, LANES = K / CHANNELS;
KDA_SHARED_BYTES(0);

KDA_KERNEL(THREADS, 1) record_tokens(KDA_PARAM RecurrentRecordsParams p) {
  wait_for_inputs();
  launch_dependents();
  const u64 token = ((u64)block_index() * THREADS + thread_index()) / LANES;
  const int channel = thread_index() % LANES * CHANNELS;
  const u64 item = token / p.record_slots;
  const int t = (int)(token - item * p.record_slots);
  Item it = {};
  it.n = (int)(item / p.HV);
  if (it.n >= p.N) return;
  locate(p, (u32)item, it);
  if (t >= it.length || !is_slot(p, row_of(p, start_of(p, it)))) return;
  const Records records = records_of(p, it);
  if (!records.exist) return;

  it.q += t * p.q_st, it.k += t * p.k_st, it.g += t * p.g_st, it.beta += t * p.beta_st;
  const ChannelGates<CHANNELS> gate = finish_gate(p, load_gate<CHANNELS>(p, it, channel));
  const Token<CHANNELS> x = finish_token(p, load_token<CHANNELS>(p, it, channel), gate);
  const bool first_of_group = it.hv % (p.HV / p.H) == 0;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    if (first_of_group) store_float(records.key, t * p.key_st + (channel + i) * p.key_sk, x.k[i]);
    if (!scalar_gate(p) || channel + i == 0)
      store_float(records.decay, t * p.decay_st + (channel + i) * p.decay_sk, x.d[i]);
  }
}
