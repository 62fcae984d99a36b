// A CPU stand-in for csrc/common/ptx.cuh: every CUDA thread is a fiber, warp instructions are rendezvous of 32 fibers,
// barriers block, asynchronous copies land late. Deterministic for a seed, which also shuffles the order threads run in;
// a pass in which nothing can run is reported as a deadlock.
#ifndef KDACORE_EMULATE_H
#define KDACORE_EMULATE_H

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define KDA_KERNEL(threads, blocks) static void
#define KDA_CLUSTER(size)
#define KDA_SHARED(name) unsigned char* name = emu::me->block->shared.data()
#define KDA_PARAM

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emu {

struct Slot { u32 w[16]; };
struct Warp {
  u32 generation = 0, arrived = 0;
  Slot slots[2][32];
};
struct Rendezvous { u32 generation = 0, arrived = 0; };
struct Barrier { u32 phase = 0; int expected = 0, pending = 0, bytes = 0; };
struct Block {
  int index, rank;
  std::vector<unsigned char> shared;
  std::map<u32, Barrier> barriers;
  std::map<int, Rendezvous> named;
};
struct Copy { u32 dst; const void* src; bool real; };
struct Fiber {
  jmp_buf context;
  ucontext_t start;
  bool started = false, done = false;
  const u32* wait_on = nullptr;
  u32 wait_mask = 0, wait_value = 0;
  int thread;
  Block* block;
  Warp* warp;
  std::vector<std::vector<Copy>> groups{1};
};
struct Late { u32 dst, src; u32 bytes, bar; int src_rank; };

inline Fiber* me;
inline jmp_buf scheduler;
inline std::vector<Block>* cluster;
inline std::vector<Late> late;
inline std::function<void()> entry;
inline int block_threads;
inline Rendezvous cluster_rendezvous;

[[noreturn]] inline void fail(const char* what, u32 value) {
  fprintf(stderr, "emulation: %s (%x), block %d thread %d\n", what, value, me->block->index, me->thread);
  abort();
}
inline void yield() {
  if (!_setjmp(me->context)) _longjmp(scheduler, 1);
}
inline void block_while(const u32* word, u32 mask, u32 value) {
  while ((*word & mask) == value) {
    me->wait_on = word;
    me->wait_mask = mask;
    me->wait_value = value;
    yield();
  }
  me->wait_on = nullptr;
}
inline void meet(Rendezvous& r, u32 count) {
  const u32 generation = r.generation;
  if (++r.arrived == count) {
    r.arrived = 0;
    ++r.generation;
  } else {
    block_while(&r.generation, ~0u, generation);
  }
}
inline Slot* exchange(const Slot& mine) {
  Warp& w = *me->warp;
  const u32 generation = w.generation;
  Slot* slots = w.slots[generation & 1];
  slots[me->thread & 31] = mine;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
  } else {
    block_while(&w.generation, ~0u, generation);
  }
  return slots;
}
inline unsigned char* memory(u32 a, u32 bytes) {
  const u32 rank = a >> 24, offset = a & 0xffffff;
  if (rank >= cluster->size() || offset + bytes > (*cluster)[rank].shared.size()) fail("shared address", a);
  if (offset % (bytes > 16 ? 16 : bytes)) fail("misaligned shared address", a);
  return (*cluster)[rank].shared.data() + offset;
}
inline Barrier& barrier(u32 a) {
  Block& b = (*cluster)[a >> 24];
  auto it = b.barriers.find(a & 0xffffff);
  if (it == b.barriers.end()) fail("no such barrier", a);
  return it->second;
}
inline void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.expected;
  }
}
inline void arrive(u32 a) {
  Barrier& b = barrier(a);
  if (--b.pending < 0) fail("too many arrivals", a);
  settle(b);
}
inline void trampoline() {
  entry();
  me->done = true;
  _longjmp(scheduler, 1);
}
inline void land(const Late& c) {
  memcpy(memory(c.dst, c.bytes), memory(c.src, c.bytes), c.bytes);
  Barrier& b = barrier(c.bar);
  b.bytes -= c.bytes;
  settle(b);
}

constexpr size_t STACK = 128 * 1024;

// Runs one cluster of blocks to completion.
inline void run_cluster(int first, int size, int threads, int shared, std::mt19937& random, unsigned char* stacks) {
  std::vector<Block> blocks(size);
  std::vector<Warp> warps(size * threads / 32);
  std::vector<Fiber> fibers(size * threads);
  cluster = &blocks;
  cluster_rendezvous = {};
  late.clear();
  block_threads = threads;
  for (int r = 0; r < size; ++r) {
    blocks[r].index = first + r;
    blocks[r].rank = r;
    blocks[r].shared.assign(shared, 0xff);  // NaN in every format
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    fibers[i].thread = i % threads;
    fibers[i].block = &blocks[i / threads];
    fibers[i].warp = &warps[i / 32];
  }
  std::vector<int> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  size_t left = fibers.size();
  while (left) {
    bool progress = false;
    for (size_t i = order.size() - 1; i; --i) std::swap(order[i], order[random() % (i + 1)]);
    for (int w : order) {
      for (int lane = 0; lane < 32; ++lane) {
        Fiber& f = fibers[w * 32 + lane];
        if (f.done || (f.wait_on && (*f.wait_on & f.wait_mask) == f.wait_value)) continue;
        progress = true;
        me = &f;
        if (!_setjmp(scheduler)) {
          if (f.started) _longjmp(f.context, 1);
          f.started = true;
          getcontext(&f.start);
          f.start.uc_stack.ss_sp = stacks + STACK * (&f - fibers.data());
          f.start.uc_stack.ss_size = STACK;
          makecontext(&f.start, trampoline, 0);
          setcontext(&f.start);
        }
        left -= me->done;
      }
    }
    while (!late.empty() && (!progress || random() % 4 == 0)) {
      const size_t i = random() % late.size();
      me = &fibers[0];
      land(late[i]);
      late.erase(late.begin() + i);
      progress = true;
    }
    if (!progress) {
      for (Fiber& f : fibers) {
        if (!f.done && f.thread % 32 == 0) fprintf(stderr, "block %d warp %d waits\n", f.block->index, f.thread / 32);
      }
      me = &fibers[0];
      fail("deadlock", 0);
    }
  }
}

inline void run(std::function<void()> kernel, int grid, int cluster_size, int threads, int shared, u32 seed) {
  std::mt19937 random(seed);
  const size_t bytes = STACK * cluster_size * threads;
  void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  entry = std::move(kernel);
  for (int b = 0; b < grid; b += cluster_size) {
    run_cluster(b, cluster_size, threads, shared, random, static_cast<unsigned char*>(stacks));
  }
  munmap(stacks, bytes);
}

inline float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline u32 as_u32(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline u32 round_bf16(float x) {
  const u32 u = as_u32(x);
  if (x != x) return 0x7fff;
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

}  // namespace emu

inline u32 shared_address(const void* p) {
  return (u32)emu::me->block->rank << 24 | (u32)((const unsigned char*)p - emu::me->block->shared.data());
}
inline int thread_index() { return emu::me->thread; }
inline int block_index() { return emu::me->block->index; }

inline int opaque(int x) { return x; }
inline float exp2_fast(float x) { return emu::flush(exp2f(emu::flush(x))); }
inline float log2_fast(float x) { return emu::flush(log2f(emu::flush(x))); }
inline float reciprocal(float x) { return emu::flush(1.0f / emu::flush(x)); }
inline float inverse_sqrt(float x) { return emu::flush(1.0f / sqrtf(emu::flush(x))); }
inline u32 pack_bf16(float low, float high) { return emu::round_bf16(low) | emu::round_bf16(high) << 16; }
inline u32 __float_as_uint(float x) { return emu::as_u32(x); }
inline float __uint_as_float(u32 x) { return emu::as_float(x); }
inline float bf16_low(u32 x) { return emu::as_float(x << 16); }
inline float bf16_high(u32 x) { return emu::as_float(x & 0xffff0000u); }
inline float half_to_float(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline u16 float_to_half(float x) { const _Float16 h = (_Float16)x; u16 r; memcpy(&r, &h, 2); return r; }
inline u32 multiply_bf16(u32 x, u32 y) { return pack_bf16(bf16_low(x) * bf16_low(y), bf16_high(x) * bf16_high(y)); }

inline float shuffle_xor(float x, int mask) {
  return emu::as_float(emu::exchange({{emu::as_u32(x)}})[(emu::me->thread & 31) ^ mask].w[0]);
}
inline u32 shuffle_xor(u32 x, int mask) { return emu::exchange({{x}})[(emu::me->thread & 31) ^ mask].w[0]; }
inline int shuffle_xor(int x, int mask) { return (int)emu::exchange({{(u32)x}})[(emu::me->thread & 31) ^ mask].w[0]; }
inline float shuffle(float x, int lane) { return emu::as_float(emu::exchange({{emu::as_u32(x)}})[lane & 31].w[0]); }
inline int shuffle(int x, int lane) { return (int)emu::exchange({{(u32)x}})[lane & 31].w[0]; }
inline void sync_warp() { emu::exchange({}); }
inline void sync_block() { emu::meet(emu::me->block->named[0], emu::block_threads); }
inline void sync_pair(int barrier) { emu::meet(emu::me->block->named[barrier], 64); }
inline int uniform(int x) { return x; }

inline void store_shared(u32 a, u32 x, u32 y, u32 z, u32 w) { const u32 v[4] = {x, y, z, w}; memcpy(emu::memory(a, 16), v, 16); }
inline void store_shared(u32 a, float x, float y) { const float v[2] = {x, y}; memcpy(emu::memory(a, 8), v, 8); }
inline void store_shared_unless(int not_here, u32 a, float x, float y) { if (!not_here) store_shared(a, x, y); }
inline void store_shared(u32 a, u32 x) { memcpy(emu::memory(a, 4), &x, 4); }
inline void store_shared16(u32 a, u32 x) { const u16 v = (u16)x; memcpy(emu::memory(a, 2), &v, 2); }
inline float4 load_shared4(u32 a) { float4 r; memcpy(&r, emu::memory(a, 16), 16); return r; }
inline float load_shared1(u32 a) { float r; memcpy(&r, emu::memory(a, 4), 4); return r; }
inline float2 load_shared2(u32 a) { float2 r; memcpy(&r, emu::memory(a, 8), 8); return r; }
inline uint4 load_shared_u4(u32 a) { uint4 r; memcpy(&r, emu::memory(a, 16), 16); return r; }

inline void load_stream(uint4& r, const void* p, bool real) {
  if (!real) return;
  if ((uintptr_t)p % 16) emu::fail("misaligned global address", (u32)(uintptr_t)p);
  memcpy(&r, p, 16);
}
inline void store_global(void* p, uint4 v) {
  if ((uintptr_t)p % 16) emu::fail("misaligned global address", (u32)(uintptr_t)p);
  memcpy(p, &v, 16);
}

inline uint4 load_written(u64 p) { uint4 r; memcpy(&r, (const void*)p, 16); return r; }
inline void raise_flag(u64 flag, u64 value) { *(u64*)flag = value; }
inline void take_flag(u64 flag, u64 value) {
  while (*(u64*)flag != value) emu::block_while((const u32*)flag, ~0u, *(u32*)flag);
  *(u64*)flag = 0;
}

inline void copy_async16(u32 dst, const void* src, bool real) { emu::me->groups.back().push_back({dst, src, real}); }
inline void copy_async_commit() { emu::me->groups.emplace_back(); }
template <int N>
inline void copy_async_wait() {
  auto& groups = emu::me->groups;  // the last one is still open
  while (groups.size() > N + 1) {
    for (const emu::Copy& c : groups.front()) {
      if (c.real) memcpy(emu::memory(c.dst, 16), c.src, 16);
      else memset(emu::memory(c.dst, 16), 0, 16);
    }
    groups.erase(groups.begin());
  }
}

inline void load_matrix4(u32 (&r)[4], u32 a) {
  emu::Slot* s = emu::exchange({{a}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) memcpy(&r[i], emu::memory(s[8 * i + lane / 4].w[0], 16) + 4 * (lane % 4), 4);
}
inline void load_matrix4_transposed(u32 (&r)[4], u32 a) {
  emu::Slot* s = emu::exchange({{a}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) {
    u16 x[2];
    for (int j = 0; j < 2; ++j) memcpy(&x[j], emu::memory(s[8 * i + 2 * (lane % 4) + j].w[0], 16) + 2 * (lane / 4), 2);
    r[i] = x[0] | (u32)x[1] << 16;
  }
}
inline void store_matrix4_transposed(u32 a, const u32 (&r)[4]) {
  emu::Slot* s = emu::exchange({{a, r[0], r[1], r[2], r[3]}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const u16 x = (u16)(r[i] >> 16 * j);
      memcpy(emu::memory(s[8 * i + 2 * (lane % 4) + j].w[0], 16) + 2 * (lane / 4), &x, 2);
    }
  }
  sync_warp();
}
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::Slot* s = emu::exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const int lane = emu::me->thread & 31;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, column = 2 * (lane % 4) + e % 2;
    double sum = d[e];
    for (int k = 0; k < 16; ++k) {
      const u32 x = s[4 * row + k % 8 / 2].w[(k / 8) * 2 + e / 2], y = s[4 * column + k % 8 / 2].w[4 + k / 8];
      sum += (double)(k % 2 ? bf16_high(x) : bf16_low(x)) * (k % 2 ? bf16_high(y) : bf16_low(y));
    }
    d[e] = (float)sum;
  }
}

inline void warpgroup_fence() {}
inline void warpgroup_commit() {}
template <int N>
inline void warpgroup_wait() {}
template <int N>
inline void hold(float (&d)[N][4]) {}
// A warp's 16 rows of a warpgroup product, the right operand read through its descriptor.
template <int TRANSPOSED, int N>
inline void warpgroup_mma(float (&d)[N][4], const u32 (&a)[4], u64 b, int add) {
  emu::Slot* s = emu::exchange({{a[0], a[1], a[2], a[3]}});
  const u32 start = (u32)(b & 0x3fff) << 4, column = (u32)(b >> 16 & 0x3fff) << 4, group = (u32)(b >> 32 & 0x3fff) << 4;
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < N; ++i) {
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4, n = 8 * i + 2 * (lane % 4) + e % 2;
      double sum = add ? d[i][e] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        u32 at = TRANSPOSED ? start + n / 64 * column + k / 8 * group + k % 8 * 128 + n % 64 * 2
                            : start + n / 8 * group + n % 8 * 128 + k * 2;
        at ^= (at >> 7 & 7) << 4;
        u16 y;
        memcpy(&y, emu::memory((u32)emu::me->block->rank << 24 | at, 2), 2);
        const u32 x = s[4 * row + k % 8 / 2].w[(k / 8) * 2 + e / 2];
        sum += (double)(k % 2 ? bf16_high(x) : bf16_low(x)) * bf16_low(y);
      }
      d[i][e] = (float)sum;
    }
  }
  emu::exchange({});
}

inline void barrier_init(u32 bar, u32 count) {
  emu::memory(bar, 8);
  emu::me->block->barriers[bar & 0xffffff] = {0, (int)count, (int)count, 0};
}
inline void barrier_arrive(u32 bar) { emu::arrive(bar); }
inline void barrier_wait(u32 bar, u32 parity) { emu::block_while(&emu::barrier(bar).phase, 1, parity); }

inline u32 cluster_address(u32 a, u32 rank) { return (a & 0xffffff) | rank << 24; }
inline void barrier_arrive_remote(u32 bar) { emu::arrive(bar); }
inline void barrier_expect_remote(u32 bar, u32 bytes) {
  emu::barrier(bar).bytes += bytes;
  emu::arrive(bar);
}
inline void copy_to_block(u32 dst, u32 src, u32 bytes, u32 bar) {
  if (bytes % 16) emu::fail("bulk copy size", bytes);
  emu::late.push_back({dst, src, bytes, bar, 0});
}
inline void fence_async_proxy() {}
inline void fence_barrier_init() {}
inline void sync_cluster() { emu::meet(emu::cluster_rendezvous, emu::cluster->size() * emu::block_threads); }

template <int N, int START>
inline void set_registers() {}

#endif
