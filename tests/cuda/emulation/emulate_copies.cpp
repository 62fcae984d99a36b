#include "emulate_copies.h"

#include "emulate_shared.h"

namespace emu {

bool at_once() { return chance() % 4 == 0; }

Barrier& barrier(u32 a) {
  Block& b = (*cluster)[a >> 24];
  auto it = b.barriers.find(a & 0xffffff);
  if (it == b.barriers.end()) fail("no such barrier", a);
  return it->second;
}
void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.done = b.coming;
    b.pending = b.expected;
  }
}
void count_arrival(u32 a) {
  Barrier& b = barrier(a);
  if (--b.pending < 0) fail("too many arrivals", a);
  settle(b);
}
void arrive(u32 a) {
  release(barrier(a).coming);
  count_arrival(a);
}

void put(const Copy& c) {
  if (c.real) memcpy(memory(c.dst, 16), c.src, 16);
  else memset(memory(c.dst, 16), 0, 16);
}
// Of a thread that waits for it, or of one that does not (then `me` is it all the same).
void finish(const Copy& c) {
  if (!c.landed) put(c);
  Piece& piece = piece_at(c.dst);
  --piece.coming;
  mark(piece, ALL, c.tick ? c.tick : me->warp->tick);
}
// The barrier has written it; of other words of the same 16 bytes it is then the last writer, too.
void land_word(const Late& c) {
  memcpy(memory(c.dst, 4), &c.word, 4);
  Barrier& b = barrier(c.bar);
  ++piece_at(c.dst).coming;
  came_by_bulk(c.dst & ~15u, 16, b);
  b.bytes -= 4;
  settle(b);
}
void land(const Late& c) {
  me = c.owner;
  if (!c.pieces.empty()) {
    for (const Copy& piece : c.pieces) finish(piece);
    count_arrival(c.bar);
    return;
  }
  if (c.is_word) return land_word(c);
  memcpy(memory(c.dst, c.bytes), c.global ? c.global : memory(c.src, c.bytes), c.bytes);
  Barrier& b = barrier(c.bar);
  came_by_bulk(c.dst, c.bytes, b);
  if (!c.global) left(c.src, c.bytes);
  b.bytes -= c.bytes;
  settle(b);
}
void send(Late c) {
  if (c.bytes % 16 || c.dst % 16 || (uintptr_t)c.global % 16 || c.src % 16) fail("bulk copy size or alignment", c.bytes);
  const Barrier& b = barrier(c.bar);
  if (b.maker->fences == b.fences && !b.maker->barrier_fences) fail("a barrier that the async proxy has not heard of", c.bar, b.maker);
  if (!c.global) leave(c.src, c.bytes);
  come_by_bulk(c.dst, c.bytes);
  if (at_once()) land(c);
  else late.push_back(std::move(c));
}

// Neighbouring lanes that bring a sector's halves to different ones: it is read from L2 twice.
void keep_together(const Copy& c) {
  std::vector<Copy>& mine = me->copies;
  const int lane = me->thread & 31;
  mine.push_back(c);
  for (int other : {lane - 1, lane + 1}) {
    if (!c.real || other < 0 || other > 31) continue;
    const std::vector<Copy>& others = me->warp->lanes[other].copies;
    if (others.size() < mine.size()) continue;
    const Copy& d = others[mine.size() - 1];
    if (d.real && c.src != d.src && (uintptr_t)c.src / 32 == (uintptr_t)d.src / 32 && c.dst / 32 != d.dst / 32) {
      fail("a sector split by a copy", c.dst);
    }
  }
}

u32 own(u32 a) { return (u32)me->block->rank << 24 | (a & 0xffffff); }

}  // namespace emu

void copy_async16(u32 dst, const void* src, bool real, emu::Site site) {
  emu::note(dst, 16, site);
  emu::come(dst, 16);
  emu::Copy c = {dst, src, real, emu::at_once()};
  emu::keep_together(c);
  if (c.landed) emu::put(c);
  emu::me->groups.back().push_back(c);
}
void copy_async_commit() { emu::me->groups.emplace_back(); }
void emu::wait_copies(size_t open) {
  auto& groups = emu::me->groups;  // the last one is still open
  while (groups.size() > open + 1) {
    for (const emu::Copy& c : groups.front()) emu::finish(c);
    groups.erase(groups.begin());
  }
}
void copy_async_arrive(u32 bar) {
  auto& open = emu::me->groups.back();
  if (open.empty()) return emu::arrive(bar);
  for (emu::Copy& c : open) c.tick = emu::me->warp->tick;
  emu::release(emu::barrier(bar).coming);
  emu::late.push_back({emu::me, 0, 0, 0, emu::own(bar), nullptr, std::move(open)});
  open.clear();
}

void barrier_init(u32 bar, u32 count) {
  emu::memory(bar, 8);
  emu::me->block->barriers[bar & 0xffffff] = {0, (int)count, (int)count, 0, emu::barriers++, 0, emu::me, emu::me->fences};
}
void barrier_arrive(u32 bar) { emu::arrive(bar); }
void barrier_wait(u32 bar, u32 parity) {
  emu::Barrier& b = emu::barrier(bar);
  emu::block_while(&b.phase, 1, parity, parity ? "barrier, parity 1," : "barrier, parity 0,", bar);
  emu::acquire(b.done);
}
bool barrier_test(u32 bar, u32 parity) {
  const emu::Barrier& b = emu::barrier(bar);
  if ((b.phase & 1) == parity) return false;
  emu::me->warp->polling = false;
  emu::acquire(b.done);
  return true;
}
void barrier_arrive_remote(u32 bar) { emu::arrive(bar); }
void barrier_expect_remote(u32 bar, u32 bytes) {
  emu::barrier(bar).bytes += bytes;
  emu::arrive(bar);
}
void barrier_expect(u32 bar, u32 bytes) { barrier_expect_remote(bar, bytes); }

void store_async(u32 a, u32 x, u32 bar) {
  if (a >> 24 != bar >> 24) emu::fail("a store to one block counted by another", a);
  if (!emu::barrier(bar).maker->barrier_fences) emu::fail("a barrier that other blocks have not heard of", bar);
  emu::Late c = {emu::me, a, 0, 4, bar, nullptr, {}, true, x};
  emu::memory(a, 4);
  if (emu::at_once()) emu::land(c);
  else emu::late.push_back(std::move(c));
}
void copy_to_block(u32 dst, u32 src, u32 bytes, u32 bar) { emu::send({emu::me, dst, src, bytes, bar, nullptr}); }
void copy_in(u32 dst, const void* src, u32 bytes, u32 bar) {
  emu::send({emu::me, emu::own(dst), 0, bytes, emu::own(bar), src});
}
void copy_in_to_both(u32 dst, const void* src, u32 bytes, u32 bar) {
  for (u32 rank = 0; rank < 2; ++rank) emu::send({emu::me, cluster_address(dst, rank), 0, bytes, cluster_address(bar, rank), src});
}
// Reads its source when it is waited for: what would be read earlier is the same, as nobody may write there.
void copy_out(void* dst, u32 src, u32 bytes) {
  if (bytes % 16 || (uintptr_t)dst % 16 || src % 16) emu::fail("bulk copy size or alignment", bytes);
  emu::leave(src, bytes);
  emu::me->outs.back().push_back({dst, src, bytes});
  emu::me->storing = true;
}
void copy_out_commit() { emu::me->outs.emplace_back(); }
void emu::wait_out(size_t open) {
  auto& outs = emu::me->outs;  // the last one is still open
  while (outs.size() > open + 1) {
    for (const emu::Out& c : outs.front()) {
      memcpy(c.dst, emu::memory(c.src, c.bytes), c.bytes);
      emu::left(c.src, c.bytes);
      emu::each_piece(c.src, c.bytes, emu::note_read);
    }
    outs.erase(outs.begin());
  }
}
void fence_async_proxy() { emu::fence_proxies(); }

