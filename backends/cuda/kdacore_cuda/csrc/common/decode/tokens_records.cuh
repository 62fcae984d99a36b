// Records in rows whose channels and columns lie together, at multiples of 16 bytes: read and written by address.
#pragma once

#include "common/decode/tokens_memory.cuh"

// The parts of a record that a lane has, by address: of the next one.
struct RecordPlaces {
  u64 update, key, decay;
};
__device__ __forceinline__ RecordPlaces record_places(const DecodeRecordsParams& p, const Records& r, int column,
                                                      int channel) {
  return {r.update + 4 * column, r.key + 4 * channel, r.decay + (scalar_gate(p) ? 0 : 4 * channel)};
}
__device__ __forceinline__ void next_record(const DecodeRecordsParams& p, RecordPlaces& at) {
  at.update += 4 * p.update_st, at.key += 4 * p.key_st, at.decay += 4 * p.decay_st;
}

template <int N>
__device__ __forceinline__ void load_floats(float (&x)[N], u64 from) {
  if constexpr (N == 1) x[0] = __uint_as_float(load_global4(from));
#pragma unroll
  for (int i = 0; i + 3 < N; i += 4) {
    const uint4 y = load_global16(from + 4 * i);
    x[i] = __uint_as_float(y.x), x[i + 1] = __uint_as_float(y.y);
    x[i + 2] = __uint_as_float(y.z), x[i + 3] = __uint_as_float(y.w);
  }
}
__device__ __forceinline__ Record load_record(const DecodeRecordsParams& p, const RecordPlaces& at) {
  Record x;
  load_floats(x.update, at.update);
  load_floats(x.key, at.key);
  if (scalar_gate(p)) {
    float decay[1];
    load_floats(decay, at.decay);
#pragma unroll
    for (int i = 0; i < TOKEN_CHANNELS; ++i) x.decay[i] = decay[0];
  } else {
    load_floats(x.decay, at.decay);
  }
  return x;
}
// Applies the records that precede the call.
__device__ __forceinline__ void replay_records(const DecodeRecordsParams& p, float (&s)[ROWS][VECTOR], const Records& r,
                                               const LanePosition& lane) {
  if (!r.replayed) return;
  RecordPlaces at = record_places(p, r, lane.v, lane.channel);
  Record x = load_record(p, at);
#pragma unroll 1
  for (int left = r.replayed - 1;; --left) {
    Record next = x;
    if (left > 0) next_record(p, at), next = load_record(p, at);
    apply(s, lane, x);
    if (left <= 0) break;
    x = next;
  }
}

__device__ __forceinline__ void store_update(u64 to, const float (&u)[OUT]) {
  if constexpr (OUT == 1) {
    *reinterpret_cast<float*>(to) = u[0];
  } else {
#pragma unroll
    for (int i = 0; i < OUT; i += 4)
      *reinterpret_cast<float4*>(to + 4 * i) = make_float4(u[i], u[i + 1], u[i + 2], u[i + 3]);
  }
}
