// Records in rows whose channels and columns lie together, at multiples of 16 bytes: read and written by address.
#pragma once

#include "common/decode/tokens_memory.cuh"

// What a thread has of a record: its channel's key and decay, its column's update, as loaded.
struct ThreadRecord {
  u32 update, key, decay;
};
// The same of up to PASS_RECORDS records, from the first one's addresses.
struct ThreadRecords {
  ThreadRecord records[PASS_RECORDS];
};
__device__ __forceinline__ ThreadRecords load_records(const DecodeRecordsParams& p, const Records& r, int column,
                                                      int first, int count) {
  ThreadRecords x = {};
  const u64 update = r.update + 4 * (first * p.update_st + column),
            key = r.key + 4 * (first * p.key_st + thread_index()),
            decay = r.decay + 4 * (first * p.decay_st + (scalar_gate(p) ? 0 : thread_index()));
#pragma unroll
  for (int i = 0; i < PASS_RECORDS; ++i) {
    if (i >= count) continue;
    x.records[i] = {load_global4(update + 4 * i * p.update_st), load_global4(key + 4 * i * p.key_st),
                    load_global4(decay + 4 * i * p.decay_st)};
  }
  return x;
}
__device__ __forceinline__ void share_records(const ThreadRecords& x, u32 memory) {
  const int thread = thread_index();
#pragma unroll
  for (int i = 0; i < PASS_RECORDS; ++i) {
    store_shared(record_place(memory, i, thread, OFFSET(WarpRecord, update)), x.records[i].update);
    store_shared(record_place(memory, i, thread, OFFSET(WarpRecord, key)), x.records[i].key);
    store_shared(record_place(memory, i, thread, OFFSET(WarpRecord, decay)), x.records[i].decay);
  }
}

template <int N>
__device__ __forceinline__ void store_part(u64 to, const float (&u)[N]) {
  if constexpr (N == 1) store_global4(to, __float_as_uint(u[0]));
#pragma unroll
  for (int i = 0; i + 3 < N; i += 4)
    store_global(reinterpret_cast<void*>(to + 4 * i), make_uint4(__float_as_uint(u[i]), __float_as_uint(u[i + 1]),
                                                                 __float_as_uint(u[i + 2]), __float_as_uint(u[i + 3])));
}
