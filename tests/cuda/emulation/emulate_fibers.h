// Threads of the emulator: every CUDA thread is a fiber, a warp instruction a rendezvous of 32 of them, and a scheduler runs the
// warps in a random order. Clocks follow which warp has heard of which through barriers.
#ifndef KDACORE_EMULATE_FIBERS_H
#define KDACORE_EMULATE_FIBERS_H

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace emu {

struct Fiber;

// Where a fiber, or what runs them, goes on. A launch changes fibers millions of times, so without libc where that is known how.
#if defined(__x86_64__) && defined(__gnu_linux__)
struct Context { void* stack = nullptr; };  // on it lie the registers that a call keeps
extern "C" __attribute__((visibility("hidden"))) void emu_change_stacks(void** from, void* to);
inline void change(Context& from, const Context& to) { emu_change_stacks(&from.stack, to.stack); }
#else
struct Context {
  jmp_buf at;
  ucontext_t start;
  bool begins = false;
};
inline void change(Context& from, Context& to) {
  if (_setjmp(from.at)) return;
  if (!to.begins) _longjmp(to.at, 1);
  to.begins = false;
  setcontext(&to.start);
}
#endif
// The first change to it calls `function`, which does not return.
void begin(Context& context, unsigned char* stack, size_t bytes, void (*function)());

// Of each warp of the cluster, and of each barrier that counts bytes, the last tick that is known.
using Clock = std::vector<u32>;

struct Slot { u32 w[16]; };
struct Warp {
  int id;          // in the cluster
  Fiber* lanes;
  u32 tick = 1;    // raised by every arrival at a barrier
  bool polling = false;  // looks again and again for what has not come: no progress of the launch
  Clock seen;
  u32 generation = 0, arrived = 0;
  Slot slots[2][32];
};
struct Rendezvous {
  u32 generation = 0, arrived = 0;
  Clock coming, done;  // what those who arrive know; who goes on
};
struct Barrier {
  u32 phase = 0;
  int expected = 0, pending = 0, bytes = 0;
  int id = 0;          // its place in clocks
  u32 tick = 0;        // bulk copies that have arrived
  const Fiber* maker;  // who has initialised it, and its fences then
  u32 fences;
  Clock coming, done;
};
// 16 bytes of shared memory. Ordinary stores go through the generic proxy; see emulate_shared.h.
struct Piece {
  Fiber* writer = nullptr;      // by the generic proxy; none: by a bulk copy, or never
  u32 fences = 0;               // of the writer when it wrote
  int by = -1;                  // warp or barrier that wrote, as clocks count them, and its tick
  u32 tick = 0;
  u32 syncs = 0;                // of the writer then
  u32 bytes = 0, readers = 0;   // which bytes it wrote; warps of the block that have read since
  unsigned char lanes[4] = {};  // of the warp: who wrote each word
  Fiber* reader = nullptr;      // the last thread that did, as an ordinary load
  u32 read_turn = 0, read_syncs = 0;  // its warp's generation, its syncs then
  u64 written = 0;              // when
  u16 coming = 0, leaving = 0;  // asynchronous copies on their way
};
struct Block {
  int index, rank;
  std::vector<unsigned char> shared;
  std::vector<Piece> pieces;
  std::vector<u32> reads;  // of each piece and warp: the warp's tick
  std::map<u32, Barrier> barriers;
  std::map<int, Rendezvous> named;
  std::vector<std::vector<u64>> steps;  // of each warpgroup: what it did about products, in order
};
// 16 bytes by cp.async.
struct Copy {
  u32 dst;
  const void* src;
  bool real, landed;
  u32 tick = 0;  // of a thread that does not wait for it itself
};
// A bulk copy to device memory.
struct Out {
  void* dst;
  u32 src, bytes;
};
// One lane's part of a warpgroup product on its way.
struct Product {
  float* sums;
  const u32* from;  // its left operand; none: the array has been taken by a later product, or it is in shared memory
  u32 a[4];         // what was there
  u64 left;         // its left operand in shared memory; 0: in registers
  u64 b;
  int tiles;
  bool transposed, add, negative;
  u32 group;
  u64 since;        // when it was committed
};
// Sums of products on their way; meanwhile there is poison in the accumulators.
struct Sums {
  float* at;
  int tiles;
  float x[16][4];
};
// Registers that products have used, as warpgroup_fence() last found them.
struct Known {
  const void* at;
  u32 words;
  u32 x[64];
};
struct Fiber {
  Context context;
  bool started = false, done = false, begun = false;
  const u32* wait_on = nullptr;
  u32 wait_mask = 0, wait_value = 0;
  const char* wait_name = "";
  u32 wait_at = 0;
  int thread;
  Block* block;
  Warp* warp;
  std::vector<std::vector<Copy>> groups{1};
  std::vector<Copy> copies;  // all of them, in order
  std::vector<std::vector<Out>> outs{1};
  bool storing = false;  // bulk copies to device memory that it has not waited for, or only until they were read
  std::vector<Known> known;
  u32 syncs = 0;      // meetings it has left that order lanes' accesses to memory
  u32 fences = 0;     // of proxies
  u32 barrier_fences = 0;
  bool fenced = false;  // since the last wait for products
  std::vector<Product> products;
  std::vector<Sums> sums;
  u32 commits = 0, steps = 0;
  int registers = 0;  // asked for; 0: those it began with
};
struct Late {
  Fiber* owner;
  u32 dst, src, bytes, bar;
  const void* global;
  std::vector<Copy> pieces = {};  // of one thread, which arrives with them
  bool is_word = false;           // of four bytes, no copy
  u32 word = 0;
};

inline Fiber* me;
inline Context scheduler;
inline jmp_buf ending;
inline std::string message;  // of what ended the launch
inline std::vector<Block>* cluster;
inline std::vector<Late> late;
inline std::function<void()> entry;
inline std::mt19937 chance;
inline int block_threads, grid, barriers;
inline Rendezvous cluster_rendezvous;
inline u32 not_begun;  // threads that arrive_cluster_begun() has not counted yet
inline Clock covered;  // of each warp: what another's proxy fence has made visible
inline u64 now;

// Ends the launch; `other` wrote what is wrong.
[[noreturn]] void fail(const char* what, u32 value, const Fiber* other = nullptr);
inline void yield() { change(me->context, scheduler); }
void block_while(const u32* word, u32 mask, u32 value, const char* name, u32 at);

void join(Clock& to, const Clock& from);
// What this thread's warp has done and heard of goes into a barrier; comes out of it.
void release(Clock& to);
void acquire(const Clock& from);

void meet(Rendezvous& r, u32 count, const char* name, u32 at);
// All lanes of the warp; the last one does `work` before any goes on.
template <class F>
inline void together(F work) {
  Warp& w = *me->warp;
  const u32 generation = w.generation;
  if (++w.arrived == 32) {
    work();
    w.arrived = 0;
    ++w.generation;
  } else {
    block_while(&w.generation, ~0u, generation, "its warp", 0);
  }
}
inline Slot* exchange(const Slot& mine) {
  Slot* slots = me->warp->slots[me->warp->generation & 1];
  slots[me->thread & 31] = mine;
  together([] {});
  return slots;
}

}  // namespace emu

#endif
