// Records of candidates (common/recurrent/records.cuh) in the fused decode step. A sequence's row of records is that of
// its candidates' windows too, which calls without records may name as well.
#pragma once

#include "common/decode/convolution.cuh"
#include "common/recurrent/record_rows.cuh"
#include "generated/decode_records_params.cuh"

// As RecurrentOf of record_rows.cuh.
template <bool WITH_RECORDS>
struct ChooseDecodeParams {
  using type = DecodeParams;
};
template <>
struct ChooseDecodeParams<true> {
  using type = DecodeRecordsParams;
};
template <bool WITH_RECORDS>
using DecodeOf = typename ChooseDecodeParams<WITH_RECORDS>::type;

// A sequence's row, and how many of its records precede the first token, not yet converted.
struct RecordRow {
  Number row, replayed;
};
template <class Params>
__device__ __forceinline__ RecordRow load_record_row(const Params& p, const Item& it) {
  RecordRow r = {};
  r.row = load_number_bits(p.record_indices, it.n + it.zero, p.wide_records);
  if (p.num_replayed) r.replayed = load_number_bits(p.num_replayed, it.n + it.zero, p.wide_counts);
  return r;
}

// The records of a sequence that has a slot, and what they say of its windows.
template <class Params>
__device__ __forceinline__ Records use_record_row(const Params& p, const Item& it, const RecordRow& bits,
                                                  WindowRow& windows) {
  const int row = number_of(bits.row, p.wide_records);
  Records r = {p.record_update && is_slot(p, row), 0, 0, 0, 0};
  if (r.exist) {
    r.replayed = replayed_of(p, number_of(bits.replayed, p.wide_counts));
    find_records(p, it, row, r);
  }
  windows.candidates = is_slot(p, row) ? row : -1;
  windows.keeps = r.exist || p.keeps_candidates;
  if (p.record_update) windows.preceding = r.replayed;
  return r;
}
