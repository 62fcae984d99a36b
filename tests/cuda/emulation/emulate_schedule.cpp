#include "emulate_schedule.h"

#include <sys/mman.h>

#include <algorithm>

#include "emulate_banks.h"
#include "emulate_copies.h"

namespace emu {

void meet_block(int id, u32 count) {
  if (id < 0 || id > 15 || count % 32) fail("named barrier", id);
  meet(me->block->named[id], count, "named barrier", id);
}
void meet_cluster() { meet(cluster_rendezvous, cluster->size() * block_threads, "the cluster", 0); }

void arrive_begun() {
  if (me->begun) fail("arrived twice", 0);
  me->begun = true;
  --not_begun;
  yield();  // what others wait for is this, not what comes behind it
}
void wait_cluster() {
  if (!me->begun) return meet_cluster();
  while (not_begun) block_while(&not_begun, ~0u, not_begun, "all blocks to begin", 0);
}

void trampoline() {
  entry();
  for (const auto& group : me->outs) {
    if (!group.empty()) fail("a bulk copy out not waited for", group[0].src);
  }
  if (!me->products.empty()) fail("a warpgroup product not waited for", (u32)me->products.size());
  me->done = true;
  yield();
}

constexpr size_t STACK = 128 * 1024;

// Of all threads of a cluster: kept for later launches, by whichever kernels of this process, since fresh pages take time.
struct Stacks {
  void* at;
  size_t bytes;
};
inline __attribute__((visibility("default"))) Stacks stacks;

// The cluster has ended: its warpgroups agree on what they did, and no more registers were asked for than there are.
void check_end(std::vector<Fiber>& fibers, int threads) {
  int registers = 0;
  for (Fiber& f : fibers) {
    me = &f;
    const Fiber& first = fibers[&f - fibers.data() - f.thread % 128];
    const auto& steps = f.block->steps[f.thread / 128];
    if (f.steps != steps.size()) fail("did less about products than others of its warpgroup", f.steps);
    if (f.registers != first.registers) fail("its warpgroup's warps ask for other registers", f.registers);
    const int start = 65536 / threads / 8 * 8;
    registers += f.registers ? f.registers : start < 255 ? start : 255;
    if (f.thread == threads - 1) {
      if (registers > 65536) fail("more registers than a multiprocessor has", registers);
      registers = 0;
    }
  }
}

void report_deadlock(std::vector<Fiber>& fibers) {
  char text[200];
  for (Fiber& f : fibers) {
    if (f.done || f.thread % 32) continue;
    snprintf(text, sizeof text, "\nblock %d warp %d waits for %s %x", f.block->index, f.thread / 32, f.wait_name, f.wait_at);
    message += text;
    for (const auto& [at, b] : f.block->barriers) {
      if (&b.phase != f.wait_on) continue;
      snprintf(text, sizeof text, ": %u phases done, %d arrivals and %d bytes to come", b.phase, b.pending, b.bytes);
      message += text;
    }
  }
  me = &fibers[0];
  fail("deadlock", 0);
}

void run_cluster(int first, int size, int threads, int shared, unsigned char* stacks) {
  std::vector<Block> blocks(size);
  std::vector<Warp> warps(size * threads / 32);
  std::vector<Fiber> fibers(size * threads);
  cluster = &blocks;
  cluster_rendezvous = {};
  not_begun = size * threads;
  covered.assign(warps.size(), 0);
  late.clear();
  block_threads = threads;
  barriers = warps.size();
  for (int r = 0; r < size; ++r) {
    blocks[r].index = first + r;
    blocks[r].rank = r;
    blocks[r].shared.assign(shared, 0xff);  // NaN in every format
    blocks[r].pieces.resize(shared / 16 + 1);
    blocks[r].reads.resize((shared / 16 + 1) * (threads / 32));
    blocks[r].steps.resize((threads + 127) / 128);
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    fibers[i].thread = i % threads;
    fibers[i].block = &blocks[i / threads];
    fibers[i].warp = &warps[i / 32];
  }
  std::vector<int> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    warps[i].id = i;
    warps[i].lanes = &fibers[32 * i];
    warps[i].seen.assign(warps.size(), 0);
  }
  size_t left = fibers.size();
  constexpr int LOOKS = 100;  // passes in which all who poll look at least once
  int polled = 0, stuck = 0;  // such passes since others ran, and since anything happened
  while (left) {
    bool progress = false, polls = false;
    for (size_t i = order.size() - 1; i; --i) std::swap(order[i], order[chance() % (i + 1)]);
    const auto run_warp = [&](int w) {
      for (int lane = 0; lane < 32; ++lane) {
        Fiber& f = fibers[w * 32 + lane];
        if (f.done || (f.wait_on && (*f.wait_on & f.wait_mask) == f.wait_value)) continue;
        (warps[w].polling ? polls : progress) = true;
        me = &f;
        if (!f.started) begin(f.context, stacks + STACK * (&f - fibers.data()), STACK, trampoline);
        f.started = true;
        change(scheduler, f.context);
        left -= me->done;
      }
    };
    for (int w : order) {
      if (w != starved) run_warp(w);
    }
    while (!late.empty() && (!progress || chance() % 4 == 0)) {
      const size_t i = chance() % late.size();
      land(late[i]);
      late.erase(late.begin() + i);
      progress = true;
    }
    polled = progress ? 0 : polled + polls;
    if (!progress && polls && polled < LOOKS) continue;
    if (!progress && starved >= 0 && starved < (int)warps.size()) run_warp(starved);
    stuck = progress ? 0 : stuck + 1;
    if (!progress && (!polls || stuck > LOOKS)) report_deadlock(fibers);
  }
  if (!late.empty()) {
    me = &fibers[0];
    fail("a bulk copy in that nobody waited for", late[0].dst);
  }
  check_end(fibers, threads);
  count_conflicts();
}

const char* run(std::function<void()> kernel, int grid, int cluster_size, int threads, int shared, u32 seed) {
  chance.seed(seed);
  const size_t bytes = STACK * cluster_size * threads;
  if (stacks.bytes < bytes) {
    if (stacks.at) munmap(stacks.at, stacks.bytes);
    stacks = {mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), bytes};
  }
  entry = std::move(kernel);
  emu::grid = grid;
  message.clear();
  if (!_setjmp(ending)) {
    std::vector<int> first;
    for (int b = 0; b < grid; b += cluster_size) first.push_back(b);
    if (dispatch == BACKWARDS) std::reverse(first.begin(), first.end());
    if (dispatch == SHUFFLED) std::shuffle(first.begin(), first.end(), chance);
    for (int b : first) run_cluster(b, cluster_size, threads, shared, static_cast<unsigned char*>(stacks.at));
  }
  report_conflicts();
  return message.empty() ? nullptr : message.c_str();
}

}  // namespace emu
