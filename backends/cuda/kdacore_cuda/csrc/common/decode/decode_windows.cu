// The windows of q and k behind decode.cu, where a key head has more value heads than a cluster of blocks takes: those all
// read the windows, in no order, so none of them can write new ones. Grid: a thread for each channel of q and k of each
// sequence.
#include "common/decode/convolution.cuh"
#include "common/decode/token_places.cuh"

constexpr int THREADS = 256;
KDA_SHARED_BYTES(0);

KDA_KERNEL(THREADS, 1) decode_windows(KDA_PARAM DecodeParams p) {
  wait_for_inputs();
  launch_dependents();
  const u64 index = (u64)block_index() * THREADS + thread_index(), channels = 2 * K * p.H;
  Item it = {};
  it.n = (int)(index / channels);
  if (it.n >= p.N) return;
  const Start start = start_of(p, it);
  const WindowRow row = load_window_row(p, it);
  const TokenPlaces at = locate_tokens(p, it);
  const int from = row_of(p, start);
  if (!start.known && !is_slot(p, from)) return;
  Channel c;
  c.index = (int)(index - it.n * channels);
  write_windows(p, it, window_place(p, row, from, false, from >= 0 && start.has_initial), c, at.x, it.length);
}
