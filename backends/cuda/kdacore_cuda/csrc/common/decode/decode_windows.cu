// The windows of q and k behind decode.cu, where a key head has more value heads than a cluster of blocks takes: those all
// read the windows, in no order, so none of them can write new ones. With RECORDS the same holds for the keys of records.
// Grid: a thread for each channel of q and k of each sequence.
#include "common/decode/decode_records.cuh"
#include "common/decode/token_places.cuh"

constexpr int THREADS = 256;
KDA_SHARED_BYTES(0);

// The keys of the tokens, as decode.cu multiplies them, in the records of a channel of k.
template <class Params>
__device__ __forceinline__ void record_keys(const Params& p, const Item& it, const WindowPlace& windows,
                                            const Records& records, Channel c, Offset x_at) {
  const int first = p.H * K, channel = c.index % K;
  if (!records.exist || c.index < first) return;
  if (has_conv(p)) {
    load_weights(p, c);
    load_window(p, window_before(p, it, windows), c);
  }
#pragma unroll 1
  for (int t = 0; t < it.length && t < p.records; ++t) {
    c.x = load_elements<1>(p.x, x_at + t * (Offset)p.x_st + c.index, x_type(p));
    store_float(records.key, t * p.key_st + channel * p.key_sk, convolve(p, c));
  }
}

KDA_KERNEL(THREADS, 1) decode_windows(KDA_PARAM DecodeOf<RECORDS> p) {
  wait_for_inputs();
  launch_dependents();
  const u64 index = (u64)block_index() * THREADS + thread_index(), channels = 2 * K * p.H;
  Item it = {};
  it.n = (int)(index / channels);
  if (it.n >= p.N) return;
  const Start start = start_of(p, it);
  WindowRow row = load_window_row(p, it);
  const TokenPlaces at = locate_tokens(p, it);
  const int from = row_of(p, start);
  if (!start.known && !is_slot(p, from)) return;
  Channel c;
  c.index = (int)(index - it.n * channels);
  Records records = {};
  if constexpr (RECORDS) {
    it.hv = c.index / K % p.H * (p.HV / p.H);  // the first one that reads the channel's head
    records = use_record_row(p, it, load_record_row(p, it), row);
  }
  const WindowPlace windows = window_place(p, row, from, false, from >= 0 && start.has_initial);
  if constexpr (RECORDS) {
    record_keys(p, it, windows, records, c, at.x);
    if (!p.writes_conv) return;
  }
  write_windows(p, it, windows, c, at.x, it.length);
}
