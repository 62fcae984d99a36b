// chunk_kda in segments on Hopper, third launch: the state at the start of every segment, S' = S A
// + B, one segment after another.
//
// S and A are split in two bfloat16 parts each and multiplied in three products, about 16 bits, as
// every later segment builds on this.
// Grid: 128 / ROWS blocks a sequence and value head, with 16 or 32 value rows each: a row of S'
// needs all channels of its row of S, but no other row. Warps: eight (or four each) share the
// channels of 16 rows.
// One more warp copies A of the next segments into a ring as soon as maps has made them, and one
// raises the flags of starts.
// Synchronisation: barriers of the ring's stages; of the eight warps, which separates writing S from
// reading it; of these and the one that raises flags, once a start has been written.
//
// Macros from the host: ROWS, SHARED_BYTES.
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

constexpr int WARPS = 8, THREADS = 32 * (WARPS + 2), BLOCKS_V = V / ROWS;
constexpr int STAGES = 3;  // of A
struct SharedMemory {
  struct {
    StateImage high, low;
  } right[STAGES];          // A
  u16 left[2][2][ROWS][K];  // S in two parts, twice: one is written while the other is read
  u64 full[STAGES], empty[STAGES];  // barriers
};
constexpr u32 PART_BYTES = sizeof(u16[ROWS][K]), RIGHT_BYTES = 2 * STATE_BYTES;
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the host's shared memory size is too small");
using MapRing = Ring<STAGES, OFFSET(SharedMemory, right), RIGHT_BYTES, OFFSET(SharedMemory, full), 8 * STAGES>;

constexpr int GROUPS = 128 / ROWS;                          // of channels: warps of 16 rows
constexpr int CHANNELS = K / GROUPS, TILES = CHANNELS / 8;  // of a warp
struct Sums {
  float x[TILES][4];
};

struct Lane {
  int lane;
  int strip, group;  // 16 rows of the block, CHANNELS channels
  int row, channel;  // of this lane's first numbers in a float [V][K]
};

// Lane 8i + r: row r of matrix i in the four of 16 rows and 16 channels; `left`: images of 32 rows.
__device__ __forceinline__ u32 left_at(u32 left, const Lane& l, int kk) {
  return left + (kk >> 2) * (PART_BYTES / 2) +
         swizzled(16 * l.strip + (l.lane & 15), 2 * (kk & 3) + (l.lane >> 4));
}

__device__ __forceinline__ void store_left(const Sums& sums, u32 left, const Lane& l) {
#pragma unroll
  for (int m = 0; m < TILES / 2; ++m) {
    const Split s = split_tiles(sums.x[2 * m], sums.x[2 * m + 1]);
    const u32 to = left_at(left, l, TILES / 2 * l.group + m);
    store_matrix4(to, s.high);
    store_matrix4(to + PART_BYTES, s.low);
  }
}

// sums += S A, without terms below 2^-16 of it.
__device__ __forceinline__ void multiply(Sums& sums, u32 left, u32 right, const Lane& l) {
  // Rows 0-7, then 8-15, of eight channels, then of the next.
  const int piece = TILES * l.group % 8 + (l.lane >> 4);
  const u32 image = right + (TILES * l.group >> 3) * (STATE_BYTES / 2);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    Split a;
    load_matrix4(a.high, left_at(left, l, kk));
    load_matrix4(a.low, left_at(left, l, kk) + PART_BYTES);
#pragma unroll
    for (int m = 0; m < TILES / 2; ++m) {
      const u32 at = image + swizzled(16 * kk + (l.lane & 15), piece + 2 * m);
      u32 b[4], b_low[4];
      load_matrix4_transposed(b, at);
      load_matrix4_transposed(b_low, at + STATE_BYTES);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_split(sums.x[2 * m + n], a, b[2 * n], b[2 * n + 1], b_low[2 * n], b_low[2 * n + 1]);
      }
    }
  }
}

// A block's sequence and value head, and its rows.
struct Task {
  int segments, part;
  long long first;  // place of the first segment
  int HV;
  __device__ __forceinline__ long long place(int j) const { return first + (long long)j * HV; }
};

// One thread: once a map has been made, its A, of which a sequence's first segment has none.
__device__ __forceinline__ void produce(const SegmentParams& p, const Task& task, u32 shared) {
  MapRing ring = {shared};
  for (int j = 0; j < task.segments - 1; ++j) {
    const long long place = task.place(j);
    for (int i = 0; i < ROWS / 16; ++i) {
      const u64 flags = segment_flags(p, place) + 8 * (task.part * (ROWS / 16) + i);
      if (j) wait_and_clear_flag(flags + OFFSET(SegmentFlags, a), p.launch);
      wait_and_clear_flag(flags + OFFSET(SegmentFlags, b), p.launch);
    }
    fence_async_proxy_global();
    ring.wait_empty();
    if (j) {
      barrier_expect(ring.full(), RIGHT_BYTES);
      copy_in(ring.stage(), reinterpret_cast<const void*>(p.maps + place * MAP_BYTES + OFFSET(SegmentMap, a_high)),
              RIGHT_BYTES, ring.full());
    } else {
      barrier_arrive(ring.full());
    }
    ring.next();
  }
}

// One warp: says that a start has been written.
__device__ __forceinline__ void announce(const SegmentParams& p, const Task& task) {
  for (int j = 1; j < task.segments; ++j) {
    sync_threads(2, 32 * (WARPS + 1));
    raise_flags(segment_flags(p, task.place(j)) + OFFSET(SegmentFlags, start) + 8 * (task.part * (ROWS / 16)),
                (1 << ROWS / 16) - 1, p.launch);
  }
}

__device__ __forceinline__ void walk(const SegmentParams& p, const Task& task, u32 shared, int warp, int lane) {
  const int strip = warp / GROUPS, group = warp % GROUPS;
  const Lane l = {lane, strip, group, ROWS * task.part + 16 * strip + (lane >> 2),
                  CHANNELS * group + 2 * (lane & 3)};
  MapRing ring = {shared};
  Sums sums;
#pragma unroll 1
  for (int j = 0; j < task.segments - 1; ++j) {
    const long long place = task.place(j);
    Sums b;
    ring.wait_full();
    read_pairs(b.x, l.row, l.channel, p.maps + place * MAP_BYTES + OFFSET(SegmentMap, b));
    if (j) {
      const u32 left = shared + OFFSET(SharedMemory, left) + (j & 1) * 2 * PART_BYTES;
      store_left(sums, left, l);
      sync_threads(1, 32 * WARPS);
      sums = {};
      multiply(sums, left, ring.stage(), l);
    } else {
      sums = {};
    }
    warp_arrive(ring.empty(), lane);
    ring.next();
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.x[m][e] += b.x[m][e];
    }
    write_pairs(sums.x, l.row, l.channel, p.starts + (place + p.HV) * FULL_STATE_BYTES);
    sync_threads(2, 32 * (WARPS + 1));
  }
}

KDA_KERNEL(THREADS, 1) chain(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  launch_dependents();
  const int item = block_index() / BLOCKS_V, n = item / p.HV;
  const Task task = {(find_sequence(p, n).chunks + p.segment - 1) / p.segment, block_index() % BLOCKS_V,
                     (long long)first_segment(p, n) * p.HV + (item - n * p.HV), p.HV};
  if (task.segments < 2) return end_after_earlier_launches();
  const int warp = uniform(thread_index() >> 5), lane = thread_index() & 31;
  if (thread_index() < 2 * STAGES)
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(),
                 thread_index() < STAGES ? 1 : WARPS * WARP_ARRIVALS);
  fence_async_proxy();
  sync_block();
  if (warp < WARPS) {
    walk(p, task, shared, warp, lane);
    end_after_earlier_launches();
  } else if (warp > WARPS) {
    announce(p, task);
  } else if (lane == 0) {
    produce(p, task, shared);
  }
}
