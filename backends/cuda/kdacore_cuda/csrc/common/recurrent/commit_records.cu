// commit_records: applies records to states (records.cuh) and writes them. Sequences without a slot, or
// without a row of records, are left alone. Grid: as of recurrent.cu.
#include "common/recurrent/records.cuh"

KDA_SHARED_BYTES(STEP_BYTES);

KDA_KERNEL(WARPS * 32, MIN_BLOCKS) commit_records(KDA_PARAM RecurrentRecordsParams p) {
  KDA_SHARED(memory);
  constexpr u32 slices = V / COLUMNS;
  const u32 block = block_index(), slice = block % slices;
  wait_for_inputs();
  launch_dependents();
  Item it = {};
  it.n = (int)((u64)(block / slices) * p.hv_factor >> p.hv_shift);  // (block / slices) / HV
  it.hv = (int)(block / slices) - it.n * p.HV;
  const int from = row_of(p, start_of(p, it)), to = number_of(load_row_written(p, it), p.flags & FLAG_WRITES64);
  if (!is_slot(p, from) || !is_slot(p, to)) return;
  const Records records = records_of(p, it);
  if (!records.exist) return;

  const LanePosition at = make_position(slice * COLUMNS, shared_address(memory));
  const long long own = (long long)it.hv * (K * V) + first_element(at);  // of a pool row
  uint4 bits[ROWS];
  load_state(bits, p.h0 + STATE_BYTES * (from * p.h0_row + own), whole_rows(p.h0, p.h0_row));
  float s[ROWS][VECTOR];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) unpack_state(s[i], bits[i]);
  replay(p, s, records, at);
  if (records.replayed || to != from)
    store_state(s, p.ht + STATE_BYTES * (to * p.ht_row + own), whole_rows(p.ht, p.ht_row));
}
