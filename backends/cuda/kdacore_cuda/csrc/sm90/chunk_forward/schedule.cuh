// Which chunks a cluster works on, in which order.
//
// A task is a sequence and value head. Its steps are its chunks, or one if it has none, as its
// state must still be copied. With p.clusters == 0 every cluster has one task. Otherwise a task
// longer than an equal part of all work has a cluster of its own, and the others are laid end to
// end and cut into equal intervals, one a cluster; no task is longer than an interval (McNaughton's
// wrap-around rule). A task that lies across a border is cut in two: the later interval has the
// first chunks and does them before everything else, the earlier interval has the rest and does it
// after everything else. So both parts never run at the same time, and the state passes from one
// cluster to the other in float32. Later intervals belong to clusters of lower number, which have begun
// before (tickets.cuh); a cluster waits only for what such a one does first.
#pragma once

#include "common/chunk_forward/sequences.cuh"
#include "generated/steps.cuh"
#include "sm90/chunk_forward/shared_memory.cuh"
#include "sm90/warp.cuh"

struct Task {
  int n, hv;
  int offset;  // where it lies in the interval: below 0 if it began in the one before
  int stop;    // the step of this cluster after its last
};

// The tasks of a cluster. Kept in shared memory.
struct Interval {
  Task first;
  int size;   // of the interval
  int limit;  // sequences of more steps have clusters of their own
};

// Behind an interval in shared memory.
constexpr u32 OWN_CLUSTER = OFFSET(SharedMemory, interval) + 24, OWN_HELPS = OWN_CLUSTER + 4;
static_assert(sizeof(Interval) <= INTERVAL_BYTES, "an interval does not fit");

__device__ __forceinline__ int minimum(int x, int y) { return x < y ? x : y; }
__device__ __forceinline__ int maximum(int x, int y) { return x > y ? x : y; }

__device__ __forceinline__ int steps_of_length(int length) { return maximum((u32)(length + C - 1) / C, 1); }
__device__ __forceinline__ int steps_of(const ChunkForwardParams& p, int n) {
  return maximum((opaque(length_of(p, n)) + C - 1) / C, 1);
}

// The chunks of a task of `steps` steps that belong to the interval: from `chunk` to `end`.
struct Range {
  int chunk, end;
};
__device__ __forceinline__ Range range_of(const Task& task, int steps, int size) {
  return {maximum(task.offset + steps - size, 0), steps + minimum(task.offset, 0)};
}

// A sequence of a call without offsets, none of which is padding, and a value head.
__device__ __forceinline__ SequenceHead dense_sequence(const ChunkForwardParams& p, int n, int hv) {
  SequenceHead x;
  x.n = n;
  x.hv = hv;
  x.h = key_head(p, hv);
  x.batch = n;
  x.first = 0;
  x.length = (int)p.T;
  return x;
}

// The sequence that contains position `point` if sequences of length(m) are laid end to end, and
// the sum of the lengths before it. Every lane adds up a range of sequences; then the range with
// the point is divided among the lanes, until it is one sequence.
struct FoundSequence {
  int n, before;
};
template <class F>
__device__ __forceinline__ FoundSequence find_sequence(const ChunkForwardParams& p, int point, F length) {
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
    count = minimum(end - low, each);
  }
}

constexpr int MAX_PASSES = 8;  // limit of the search for the long tasks

// All tasks of a call, as clusters divide them.
struct Work {
  int own;    // clusters that have one long task
  int total;  // of the other tasks
  int size;   // of an interval
  int limit;  // sequences of more steps have clusters of their own
};

// All lanes of one warp call this.
__device__ __forceinline__ Work measure_work(const ChunkForwardParams& p) {
  if (!p.clusters) return {};
  const int lane = thread_index() & 31;
  int limit = 1 << 30, own = 0, total = 0, size = 0;
  for (int pass = 0;; ++pass) {
    int longer = 0, sum = 0, longest = 0;
    for (int m = lane; m < p.N; m += 32) {
      const int steps = steps_of(p, m);
      if (steps > limit) {
        ++longer;
      } else {
        sum += steps + SEQUENCE_OVERHEAD_STEPS;
        longest = maximum(longest, steps + SEQUENCE_OVERHEAD_STEPS);
      }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      longer += shuffle_xor(longer, mask);
      sum += shuffle_xor(sum, mask);
      longest = maximum(longest, shuffle_xor(longest, mask));
    }
    own = longer * p.HV;
    total = sum * p.HV;
    const int equal = (total + p.clusters - own - 1) / (p.clusters - own);
    size = maximum(equal, longest);
    if (size == equal || pass == MAX_PASSES) break;
    limit = equal - SEQUENCE_OVERHEAD_STEPS;
  }
  return {own, total, size, limit};
}

// All lanes of one warp call this.
__device__ __forceinline__ Interval find_interval(const ChunkForwardParams& p, const Work& work, int cluster) {
  if (!p.clusters) {
    if (HELPERS && cluster >= p.N * p.HV) return {};  // of a helper that has no cluster to help
    const int n = cluster / p.HV, steps = steps_of(p, n);
    return {{n, cluster % p.HV, 0, steps}, steps + SEQUENCE_OVERHEAD_STEPS, steps};
  }
  const int own = work.own, total = work.total, limit = work.limit;
  int size = work.size;
  if (cluster < own) {
    const FoundSequence found =
        find_sequence(p, cluster / p.HV, [&](int m) { return (int)(steps_of(p, m) > limit); });
    const int steps = steps_of(p, found.n);
    return {{found.n, cluster % p.HV, 0, steps}, steps + SEQUENCE_OVERHEAD_STEPS, limit};
  }
  const int from = (p.clusters - 1 - cluster) * size;
  if (from >= total) return {};
  const FoundSequence found = find_sequence(p, from / p.HV, [&](int m) {
    const int steps = steps_of(p, m);
    return steps > limit ? 0 : steps + SEQUENCE_OVERHEAD_STEPS;
  });
  const int steps = steps_of(p, found.n),
            hv = (from - p.HV * found.before) / (steps + SEQUENCE_OVERHEAD_STEPS);
  Task first = {found.n, hv, p.HV * found.before + hv * (steps + SEQUENCE_OVERHEAD_STEPS) - from, 0};
  size = minimum(size, total - from);
  const Range range = range_of(first, steps, size);
  first.stop = maximum(range.end - range.chunk, 0);
  return {first, size, limit};
}

__device__ __forceinline__ void store_task(u32 to, const Task& task) {
  store_shared(to, task.n, task.hv, task.offset, task.stop);
}
// And behind it which cluster this is, and whether it helps another.
__device__ __forceinline__ void store_interval(u32 to, const Interval& interval, int cluster, bool helps) {
  store_task(to, interval.first);
  store_shared(to + 16, interval.size, interval.limit, cluster, helps);
}
__device__ __forceinline__ int load_own(u32 at) { return uniform(__float_as_uint(load_shared1(at))); }
__device__ __forceinline__ Task load_task(u32 from) {
  const uint4 x = load_shared_u4(from);
  return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
}

// Advances `task` to the one that step `step` of this cluster belongs to. False if there is no such
// step.
__device__ __forceinline__ bool advance_to_step(const ChunkForwardParams& p, u32 shared, Task& task,
                                                int step) {
  const uint4 interval = load_shared_u4(shared + OFFSET(SharedMemory, interval) + 16);
  const int size = uniform(interval.x), limit = uniform(interval.y);
  int steps = uniform(steps_of(p, task.n));
  while (step >= task.stop) {
    task.offset += steps + SEQUENCE_OVERHEAD_STEPS;
    if (task.offset >= size) return false;
    if (++task.hv == p.HV) {
      task.hv = 0;
      do steps = uniform(steps_of(p, ++task.n));
      while (steps > limit);
    }
    const Range range = range_of(task, steps, size);
    task.stop += range.end - range.chunk;
  }
  return true;
}

// The part of a task that this cluster does: chunks `chunk` to `end` of its sequence. Tokens from
// `tokens` on are not its own.
struct TaskPart {
  SequenceHead sequence;
  int chunk, end, tokens;
  int shift;  // from a step of this cluster to the chunk
  __device__ __forceinline__ int chunk_of(int step) const { return step + shift; }
};
__device__ __forceinline__ TaskPart make_task_part(const ChunkForwardParams& p, u32 shared,
                                                   const Task& task) {
  TaskPart part;
  part.sequence = make_sequence_head(p, task.n, task.hv, C);
  const int chunks = part.sequence.chunks,
            size = uniform(__float_as_uint(load_shared1(shared + OFFSET(SharedMemory, interval) + 16)));
  const Range range = range_of(task, maximum(chunks, 1), size);
  part.chunk = range.chunk;
  part.end = minimum(range.end, chunks);
  part.tokens = minimum(part.end * C, part.sequence.length);
  part.shift = range.end - task.stop;
  return part;
}

// What move_to_step found.
enum Move { NO_STEP, NEXT_HEAD, NEXT_SEQUENCE };

// From a finished task, of a sequence of `length` tokens, to that of step `step`. The next task is mostly
// another head of the same sequence, which takes a tenth of make_task_part's instructions to find: with
// short sequences the instructions of all roles have to fit into the cache together.
__device__ __forceinline__ Move move_to_step(const ChunkForwardParams& p, u32 shared, Task& task, int length,
                                             int step) {
  const int steps = steps_of_length(length),
            size = uniform(__float_as_uint(load_shared1(shared + OFFSET(SharedMemory, interval) + 16)));
  while (step >= task.stop) {
    if (task.hv + 1 == p.HV) return advance_to_step(p, shared, task, step) ? NEXT_SEQUENCE : NO_STEP;
    task.offset += steps + SEQUENCE_OVERHEAD_STEPS;
    if (task.offset >= size) return NO_STEP;
    ++task.hv;
    task.stop += steps - maximum(task.offset + steps - size, 0);
  }
  return NEXT_HEAD;
}
// The shift of such a neighbour, which is done to its end.
__device__ __forceinline__ int shift_to_end(const Task& task, int length) {
  return steps_of_length(length) - task.stop;
}
