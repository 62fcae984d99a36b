// commit_records: the convolution's window behind the last record that is applied goes to the first columns of a
// sequence's row of `conv_state`: from the row itself, whose columns move to the left, or from its row of `conv_windows`.
// Grid: a thread for each channel of each sequence; `tasks`: channels.
#include "common/decode/decode_records.cuh"

constexpr int THREADS = 256;
KDA_SHARED_BYTES(0);

KDA_KERNEL(THREADS, 1) commit_windows(KDA_PARAM DecodeOf<RECORDS> p) {
  wait_for_inputs();
  launch_dependents();
  const u64 index = (u64)block_index() * THREADS + thread_index();
  Item it = {};
  it.n = (int)(index / p.tasks);
  if (it.n >= p.N) return;
  const int channel = (int)(index - it.n * p.tasks), own = row_of(p, start_of(p, it));
  const RecordRow bits = load_record_row(p, it);
  const int record = number_of(bits.row, p.wide_records);
  const int count = replayed_of(p, number_of(bits.replayed, p.wide_counts));
  const int row = p.conv_indices ? load_number(p.conv_indices, it.n, p.wide_conv) : own;
  if (!is_slot(p, own) || !is_slot(p, record) || !is_slot(p, row) || count == 0) return;

  const int last = count - 1;
  const Window to = state_window(p, row);
  Window from = {window_element(p, to, 0, last), to.token, to.channel};
  int columns = p.taps - 1 - last;
  if (has_candidate_windows(p)) from = candidate_window(p, record, last), columns = p.taps - 1;
#pragma unroll 1
  for (int i = 0; i < columns; ++i)
    store_bits(p, window_element(p, to, channel, i),
               load_elements<1>(window_element(p, from, channel, i), 0, x_type(p)));
}
