// Shared memory, watched in pieces of 16 bytes.
//
// - What one warp writes and another reads or writes, or the other way round, needs a barrier in between; what one lane writes
//   and another reads or writes needs sync_warp(), the other way round any instruction that the warp takes together.
// - What an asynchronous copy will still write, or read, may not be touched before that has been waited for.
// - What the generic proxy wrote (stores, cp.async) and the async proxy reads or overwrites (products, bulk copies) needs
//   fence_async_proxy() in between: by the thread that wrote, or by one whose warp has met the writer's at a barrier since.
#ifndef KDACORE_EMULATE_SHARED_H
#define KDACORE_EMULATE_SHARED_H

#include "emulate_fibers.h"

namespace emu {

inline unsigned char* memory(u32 a, u32 bytes) {
  const u32 rank = a >> 24, offset = a & 0xffffff;
  if (rank >= cluster->size() || offset + bytes > (*cluster)[rank].shared.size()) fail("shared address", a);
  if (offset % (bytes > 16 ? 16 : bytes)) fail("misaligned shared address", a);
  return (*cluster)[rank].shared.data() + offset;
}
inline Piece& piece_at(u32 a) { return (*cluster)[a >> 24].pieces[(a & 0xffffff) / 16]; }
template <class F>
inline void each_piece(u32 a, u32 bytes, F f) {
  memory(a, bytes);
  for (u32 at = a; at < a + bytes; at += 16) f(piece_at(at), at);
}

constexpr u32 ALL = 0xffff;
inline u32 bytes_of(u32 a, u32 bytes) { return ((1u << bytes) - 1) << a % 16; }

// Has this thread's warp heard, through barriers, of who wrote these bytes last? Of those who read them?
inline void check_written(const Piece& piece, u32 a, u32 bytes, const char* what) {
  const Warp& w = *me->warp;
  if (piece.by < 0 || !(piece.bytes & bytes)) return;
  if (piece.by == w.id) {
    if (piece.syncs != me->syncs) return;
    for (int i = 0; i < 4; ++i) {
      if (!(piece.bytes & bytes & 15 << 4 * i) || piece.lanes[i] == me->thread % 32) continue;
      fail("of another lane, without sync_warp() since it was written", a, w.lanes + piece.lanes[i]);
    }
    return;
  }
  if ((size_t)piece.by >= w.seen.size() || w.seen[piece.by] < piece.tick) fail(what, a, piece.writer);
}
inline u32& tick_of_read(u32 a, int warp) { return me->block->reads[(a & 0xffffff) / 16 * (block_threads / 32) + warp]; }
inline void note_read(Piece& piece, u32 a) {
  const int warp = me->thread / 32;
  piece.readers |= 1u << warp;
  tick_of_read(a, warp) = me->warp->tick;
}
inline void check_read(Piece& piece, u32 a) {
  const Warp& w = *me->warp;
  const int own = me->thread / 32;
  for (u32 rest = piece.readers & ~(1u << own); rest; rest &= rest - 1) {
    const int warp = __builtin_ctz(rest);
    if (w.seen[w.id - own + warp] < tick_of_read(a, warp)) {
      message = ", read by warp " + std::to_string(warp);
      fail("overwritten without a barrier since it was read", a);
    }
  }
  if (piece.reader && piece.reader != me && piece.reader->warp == &w && piece.read_turn == w.generation && piece.read_syncs == me->syncs) {
    fail("overwritten without a meeting of the warp since another lane has read it", a);
  }
  piece.readers = 0;
  piece.reader = nullptr;
}

// Up to 16 bytes, aligned.
inline unsigned char* read(u32 a, u32 bytes) {
  unsigned char* from = memory(a, bytes);
  Piece& piece = piece_at(a);
  if (piece.coming) fail("read while a copy into it is on its way", a);
  check_written(piece, a, bytes_of(a, bytes), "read without a barrier since it was written");
  note_read(piece, a);
  piece.reader = me;
  piece.read_turn = me->warp->generation;
  piece.read_syncs = me->syncs;
  return from;
}
inline void mark(Piece& piece, u32 bytes, u32 tick) {
  const u32 syncs = me->syncs;
  const bool together = piece.by == me->warp->id && piece.tick == tick && piece.syncs == syncs;
  piece.bytes = bytes | (together ? piece.bytes : 0);
  for (int i = 0; i < 4; ++i) {
    if (bytes & 15 << 4 * i) piece.lanes[i] = me->thread % 32;
  }
  piece.writer = me;
  piece.fences = me->fences;
  piece.by = me->warp->id;
  piece.tick = tick;
  piece.syncs = syncs;
  piece.written = ++now;
}
inline unsigned char* write(u32 a, u32 bytes) {
  unsigned char* to = memory(a, bytes);
  Piece& piece = piece_at(a);
  if (piece.coming) fail("written while a copy into it is on its way", a);
  if (piece.leaving) fail("written while a bulk copy reads it", a);
  check_written(piece, a, bytes_of(a, bytes), "overwritten without a barrier since it was written");
  check_read(piece, a);
  mark(piece, bytes_of(a, bytes), me->warp->tick);
  return to;
}

inline void check_fenced(const Piece& piece, u32 a, const char* what) {
  if (piece.writer && piece.writer->fences == piece.fences && covered[piece.writer->warp->id] < piece.tick) fail(what, a, piece.writer);
}
// The async proxy begins to read.
inline void check_readable(u32 a, u32 bytes) {
  each_piece(a, bytes, [](Piece& piece, u32 at) {
    if (piece.coming) fail("read by the async proxy while a copy into it is on its way", at);
    check_written(piece, at, ALL, "read by the async proxy without a barrier since it was written");
    check_fenced(piece, at, "read by the async proxy without fence_async_proxy() since it was written");
  });
}
inline void leave(u32 a, u32 bytes) {
  check_readable(a, bytes);
  each_piece(a, bytes, [](Piece& piece, u32) { ++piece.leaving; });
}
inline void left(u32 a, u32 bytes) {
  each_piece(a, bytes, [](Piece& piece, u32) { --piece.leaving; });
}
// A copy into it begins, by this thread if into its own block.
inline void come(u32 a, u32 bytes) {
  each_piece(a, bytes, [](Piece& piece, u32 at) {
    if (piece.coming) fail("two copies into the same place", at);
    if (piece.leaving) fail("overwritten while a bulk copy reads it", at);
    if ((int)(at >> 24) == me->block->rank) {
      check_written(piece, at, ALL, "overwritten by a copy without a barrier since it was written");
      check_read(piece, at);
    }
    ++piece.coming;
  });
}
inline void come_by_bulk(u32 a, u32 bytes) {
  come(a, bytes);
  each_piece(a, bytes, [](Piece& piece, u32 at) {
    check_fenced(piece, at, "overwritten by a bulk copy without fence_async_proxy() since it was written");
  });
}
inline void came_by_bulk(u32 a, u32 bytes, Barrier& b) {
  ++b.tick;
  if (b.coming.size() <= (size_t)b.id) b.coming.resize(b.id + 1);
  b.coming[b.id] = b.tick;
  each_piece(a, bytes, [&](Piece& piece, u32) {
    --piece.coming;
    piece.writer = nullptr;
    piece.by = b.id;
    piece.tick = b.tick;
    piece.bytes = ALL;
    piece.written = ++now;
  });
}

// What this thread wrote, and what its warp has heard of others, is visible to the async proxy.
inline void fence_proxies() {
  ++me->fences;
  const Warp& w = *me->warp;
  for (size_t i = 0; i < covered.size(); ++i) {
    if ((int)i != w.id && covered[i] < w.seen[i]) covered[i] = w.seen[i];
  }
}

}  // namespace emu

#endif
