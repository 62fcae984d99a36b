// Which chunks a cluster works on, in which order.
//
// A job is a sequence and value head; its steps are its chunks, and one where there are none: a state has to be passed on all the
// same. With p.clusters == 0 every cluster has one job. Else a job longer than an equal share of all work has a cluster of its
// own, and the others are laid end to end and cut into equal intervals, one a cluster, which none of them exceeds (McNaughton's
// wrap-around rule). Of a job that lies across a border the later interval does the first chunks, before all else, and the
// earlier interval the rest, after all else; the state goes from one to the other in float32. So both parts never want to run
// at the same time. Later intervals belong to clusters of lower number: those start earlier, and a cluster waits only for
// what such a one does first.
#pragma once

#include "common/chunk_forward/sequences.cuh"
#include "generated/steps.cuh"
#include "sm90/chunk_forward/shared_memory.cuh"
#include "sm90/warp.cuh"

constexpr bool ONE_JOB = CLUSTER > SCANNERS;  // blocks that only prepare: there are few heads, and a cluster for each

struct Job {
  int n, hv;
  int place;  // where it lies in the interval: below 0 if it began in the one before
  int stop;   // the step of this cluster after its last
};

// What a cluster does. Kept in shared memory.
struct Share {
  Job first;
  int size;   // of the interval
  int limit;  // sequences of more steps have clusters of their own
};
static_assert(sizeof(Share) <= SHARE_BYTES, "a share does not fit");

__device__ __forceinline__ int least(int x, int y) { return x < y ? x : y; }
__device__ __forceinline__ int most(int x, int y) { return x > y ? x : y; }

__device__ __forceinline__ int steps_of(const ChunkForwardParams& p, int n) { return most((opaque(length_of(p, n)) + C - 1) / C, 1); }

// The chunks of a job of `steps` steps that belong to the interval: from `chunk` to `end`.
struct Range {
  int chunk, end;
};
__device__ __forceinline__ Range range_of(const Job& job, int steps, int size) {
  return {most(job.place + steps - size, 0), steps + least(job.place, 0)};
}

// The sequence in whose part of a line point `point` lies, where sequence m takes length(m), and all that lies before it.
// Every lane adds up a range of sequences; then the range with the point is divided among the lanes, until it is one sequence.
struct Found {
  int n, before;
};
template <class F>
__device__ __forceinline__ Found find_sequence(const ChunkForwardParams& p, int point, F length) {
  const int lane = thread_index() & 31;
  int low = 0, count = p.N, before = 0;
  while (true) {
    const int each = (count + 31) / 32, end = low + count;
    int sum = 0;
    for (int i = 0, m = low + lane * each; i < each && m < end; ++i, ++m) sum += length(m);
    int upto = sum;  // of this lane's range and those before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = shuffle(upto, lane - distance);
      if (lane >= distance) upto += other;
    }
    int passed = before + upto <= point, skipped = passed ? sum : 0;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      passed += shuffle_xor(passed, mask);
      skipped += shuffle_xor(skipped, mask);
    }
    low += passed * each;
    before += skipped;
    if (each == 1) return {low, before};
    count = least(end - low, each);
  }
}

constexpr int PASSES = 8;  // at most, to find which jobs are long

// All lanes of one warp call this.
__device__ __forceinline__ Share find_share(const ChunkForwardParams& p, int cluster) {
  if (ONE_JOB || !p.clusters) {
    const int n = cluster / p.HV, steps = steps_of(p, n);
    return {{n, cluster % p.HV, 0, steps}, steps + SEQUENCE_OVERHEAD_STEPS, steps};
  }
  const int lane = thread_index() & 31;
  int limit = 1 << 30, own = 0, total = 0, size = 0;  // own: clusters with one long job
  for (int pass = 0;; ++pass) {
    int longer = 0, sum = 0, longest = 0;
    for (int m = lane; m < p.N; m += 32) {
      const int steps = steps_of(p, m);
      if (steps > limit) {
        ++longer;
      } else {
        sum += steps + SEQUENCE_OVERHEAD_STEPS;
        longest = most(longest, steps + SEQUENCE_OVERHEAD_STEPS);
      }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      longer += shuffle_xor(longer, mask);
      sum += shuffle_xor(sum, mask);
      longest = most(longest, shuffle_xor(longest, mask));
    }
    own = longer * p.HV;
    total = sum * p.HV;
    const int equal = (total + p.clusters - own - 1) / (p.clusters - own);
    size = most(equal, longest);
    if (size == equal || pass == PASSES) break;
    limit = equal - SEQUENCE_OVERHEAD_STEPS;
  }
  if (cluster < own) {
    const Found found = find_sequence(p, cluster / p.HV, [&](int m) { return (int)(steps_of(p, m) > limit); });
    const int steps = steps_of(p, found.n);
    return {{found.n, cluster % p.HV, 0, steps}, steps + SEQUENCE_OVERHEAD_STEPS, limit};
  }
  const int from = (p.clusters - 1 - cluster) * size;
  if (from >= total) return {};
  const Found found = find_sequence(p, from / p.HV, [&](int m) {
    const int steps = steps_of(p, m);
    return steps > limit ? 0 : steps + SEQUENCE_OVERHEAD_STEPS;
  });
  const int steps = steps_of(p, found.n), hv = (from - p.HV * found.before) / (steps + SEQUENCE_OVERHEAD_STEPS);
  Job first = {found.n, hv, p.HV * found.before + hv * (steps + SEQUENCE_OVERHEAD_STEPS) - from, 0};
  size = least(size, total - from);
  const Range range = range_of(first, steps, size);
  first.stop = most(range.end - range.chunk, 0);
  return {first, size, limit};
}

__device__ __forceinline__ void store_job(u32 to, const Job& job) { store_shared(to, job.n, job.hv, job.place, job.stop); }
__device__ __forceinline__ void store_share(u32 to, const Share& share) {
  store_job(to, share.first);
  store_shared(to + 16, share.size, share.limit, 0, 0);
}
__device__ __forceinline__ Job load_job(u32 from) {
  const uint4 x = load_shared_u4(from);
  return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
}

// To the job that step `step` of this cluster belongs to, from an earlier one. False: there is no such step.
__device__ __forceinline__ bool seek(const ChunkForwardParams& p, u32 shared, Job& job, int step) {
  if (ONE_JOB) return step < job.stop;
  const uint4 share = load_shared_u4(shared + SHARE_AT + 16);
  const int size = uniform(share.x), limit = uniform(share.y);
  int steps = uniform(steps_of(p, job.n));
  while (step >= job.stop) {
    job.place += steps + SEQUENCE_OVERHEAD_STEPS;
    if (job.place >= size) return false;
    if (++job.hv == p.HV) {
      job.hv = 0;
      do steps = uniform(steps_of(p, ++job.n));
      while (steps > limit);
    }
    const Range range = range_of(job, steps, size);
    job.stop += range.end - range.chunk;
  }
  return true;
}

// A job as this cluster does it: chunks `chunk` to `end` of its sequence, of which the first `tokens` tokens count.
struct Part {
  Work work;
  int chunk, end, tokens;
  int shift;  // from a step of this cluster to the chunk
  __device__ __forceinline__ int chunk_of(int step) const { return step + shift; }
};
__device__ __forceinline__ Part make_part(const ChunkForwardParams& p, u32 shared, const Job& job) {
  Part part;
  part.work = make_work(p, job.n, job.hv, C);
  const int chunks = part.work.chunks, size = uniform(__float_as_uint(load_shared1(shared + SHARE_AT + 16)));
  const Range range = range_of(job, most(chunks, 1), size);
  part.chunk = range.chunk;
  part.end = least(range.end, chunks);
  part.tokens = least(part.end * C, part.work.length);
  part.shift = range.end - job.stop;
  return part;
}
