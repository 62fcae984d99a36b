// Records of candidates: what each token did to a state, S = decay S + key update^T, and how they are
// applied to it later.
//
// `update` and `key` are the very numbers that a token multiplies (token.cuh): k as it was given, and an
// update that has the factors of both. So the replay has the bits of the token.
#pragma once

#include "common/recurrent/record_rows.cuh"
#include "common/recurrent/states.cuh"

// The part of a record that a lane loads, as its part of a token.
using Record = RecordOf<TOKEN_CHANNELS, OUT>;

template <class Params>
__device__ __forceinline__ Record load_record(const Params& p, const Records& r,
                                              const LanePosition& at, int j) {
  Record x;
#pragma unroll
  for (int i = 0; i < TOKEN_CHANNELS; ++i) {
    x.key[i] = load_float(r.key, j * p.key_st + (at.channel + i) * p.key_sk);
    x.decay[i] = load_float(r.decay, j * p.decay_st + (at.channel + i) * p.decay_sk);
  }
#pragma unroll
  for (int i = 0; i < OUT; ++i) x.update[i] = load_float(r.update, j * p.update_st + (at.v + i) * p.update_sv);
  return x;
}

// Applies the records that precede the call.
template <class Params>
__device__ __forceinline__ void replay(const Params& p, float (&s)[ROWS][VECTOR], const Records& r,
                                       const LanePosition& at) {
  if (!r.replayed) return;
  Record x = load_record(p, r, at, 0);
#pragma unroll 1
  for (int j = 0; j < r.replayed; ++j) {
    const Record next = j + 1 < r.replayed ? load_record(p, r, at, j + 1) : x;
    apply(s, at, x);
    x = next;
  }
}

// The state as it is when it has been written.
__device__ __forceinline__ void round_state(float (&s)[ROWS][VECTOR]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) unpack_state(s[i], pack_state(s[i]));
}

template <class Params>
__device__ __forceinline__ void store_update(const Params& p, const Records& r,
                                             const LanePosition& at, int t, const float (&update)[OUT]) {
  if (t >= p.records) return;
#pragma unroll
  for (int i = 0; i < OUT; ++i)
    store_float(r.update, t * p.update_st + (at.v + i) * p.update_sv, update[i]);
}
