// Where the records of a sequence and value head are. See records.cuh.
#pragma once

#include "common/recurrent/token.cuh"
#include "generated/recurrent_records_params.cuh"

__device__ __forceinline__ float load_float(u64 base, long long index) {
  return __uint_as_float(load_global4(base + 4 * index));
}
__device__ __forceinline__ void store_float(u64 base, long long index, float x) {
  reinterpret_cast<float*>(base)[index] = x;
}

// The parameters of a kernel with and without records. What reads those of records is a template, as a
// kernel without them compiles it, too, but for its body.
template <bool WITH_RECORDS>
struct ChooseParams {
  using type = RecurrentParams;
};
template <>
struct ChooseParams<true> {
  using type = RecurrentRecordsParams;
};
template <bool WITH_RECORDS>
using RecurrentOf = typename ChooseParams<WITH_RECORDS>::type;

// The records of one sequence and value head, by the addresses of the first one.
struct Records {
  bool exist;
  int replayed;  // how many are applied before the first token
  u64 update, key, decay;
};

// The addresses of the records in a row that exists.
template <class Params>
__device__ __forceinline__ void find_records(const Params& p, const Item& it, int row, Records& r) {
  const int h = (int)((u64)it.hv * p.group_factor >> p.group_shift);  // hv / (HV / H)
  r.update = p.record_update + 4 * (row * p.update_sr + it.hv * p.update_sh);
  r.key = p.record_key + 4 * (row * p.key_sr + h * p.key_sh);
  r.decay = p.record_decay + 4 * (row * p.decay_sr + it.hv * p.decay_sh);
}
// How many records of a row are applied: a count beyond those that there are is wrong, but reads no other memory.
template <class Params>
__device__ __forceinline__ int replayed_of(const Params& p, int count) {
  return count < 0 ? 0 : count < p.records ? count : (int)p.records;
}

template <class Params>
__device__ __forceinline__ Records records_of(const Params& p, const Item& it) {
  const int row = load_number(p.record_indices, it.n + it.zero, p.wide_records);
  Records r = {is_slot(p, row), 0, 0, 0, 0};
  if (!r.exist) return r;
  if (p.num_replayed) r.replayed = replayed_of(p, load_number(p.num_replayed, it.n + it.zero, p.wide_counts));
  find_records(p, it, row, r);
  return r;
}
