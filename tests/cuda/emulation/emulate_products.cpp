#include "emulate_products.h"

#include "emulate.h"

namespace emu {

constexpr u32 POISON = 0x7fdeadbe;  // NaN

bool poisoned(const Sums& s) {
  u32 x[64];
  memcpy(x, s.at, 16 * s.tiles);
  for (int i = 0; i < 4 * s.tiles; ++i) {
    if (x[i] != POISON) return false;
  }
  return true;
}
void take_step(u64 what) {
  auto& steps = me->block->steps[me->thread / 128];
  if (me->steps == steps.size()) steps.push_back(what);
  if (steps[me->steps++] != what) fail("not the product, commit or wait of the others in its warpgroup", me->steps - 1);
}
void fence() {
  take_step(0);
  together([] {});
  me->fenced = true;
  for (Known& k : me->known) memcpy(k.x, k.at, 4 * k.words);
}
// Registers must be as the last fence has found them; those that no product has used before cannot be told.
void check_registers(const void* at, u32 words, const char* what) {
  for (const Known& k : me->known) {
    if (k.at != at || k.words != words) continue;
    if (memcmp(k.x, at, 4 * words)) fail(what, words);
    return;
  }
  me->known.push_back({at, words});
  memcpy(me->known.back().x, at, 4 * words);
}
void issue(float* d, const u32 (&a)[4], u64 b, int tiles, bool transposed, bool add, bool negative) {
  take_step(b * 0x9e3779b97f4a7c15ull ^ (u64)(tiles | transposed << 8 | add << 9 | negative << 10));
  if (!me->fenced) fail("a warpgroup product without warpgroup_fence() since the last wait", 0);
  Sums* sums = nullptr;
  for (Sums& s : me->sums) {
    if (s.at == d) sums = &s;
  }
  check_registers(a, 4, "a left operand written since warpgroup_fence()");
  if (!sums) {
    check_registers(d, 4 * tiles, "accumulators written since warpgroup_fence()");
    me->sums.push_back({d, tiles});
    sums = &me->sums.back();
    memcpy(sums->x, d, 16 * tiles);
    for (int i = 0; i < 4 * tiles; ++i) memcpy(d + i, &POISON, 4);
  } else if (!poisoned(*sums)) {
    fail("accumulators written before their product was waited for", (u32)tiles);
  }
  // A loop that is unrolled has other registers in each turn.
  for (Product& p : me->products) {
    if (p.from == a) p.from = nullptr;
  }
  me->products.push_back({d, a, {a[0], a[1], a[2], a[3]}, b, tiles, transposed, add, negative, me->commits});
}
// f(the address of eight numbers of the right operand, their row of the sum, their first column, whether they go along the sum).
template <class F>
inline void each_operand_piece(const Product& p, F f) {
  const u32 start = (u32)(p.b & 0x3fff) << 4, column = (u32)(p.b >> 16 & 0x3fff) << 4, group = (u32)(p.b >> 32 & 0x3fff) << 4;
  for (int outer = 0; outer < (p.transposed ? 16 : 8 * p.tiles); ++outer) {
    for (int inner = 0; inner < (p.transposed ? 8 * p.tiles : 16); inner += 8) {
      const int k = p.transposed ? outer : inner, n = p.transposed ? inner : outer;
      u32 at = p.transposed ? start + n / 64 * column + k / 8 * group + k % 8 * 128 + n % 64 * 2
                            : start + n / 8 * group + n % 8 * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;
      f((u32)me->block->rank << 24 | at, k, n);
    }
  }
}
// One product, for all lanes of the warp.
void multiply(Fiber* lanes, size_t index) {
  const Product& first = lanes[0].products[index];
  double a[16][16], b[128][16];
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      const u32 x = lanes[4 * (row % 8) + k % 8 / 2].products[index].a[k / 8 * 2 + row / 8];
      a[row][k] = (k % 2 ? bf16_high(x) : bf16_low(x)) * (first.negative ? -1.0 : 1.0);
    }
  }
  each_operand_piece(first, [&](u32 at, int k, int n) {
    Piece& piece = piece_at(at);
    if (piece.coming || piece.written > first.since) fail("a right operand changed before its product was waited for", at, piece.writer);
    note_read(piece, at);
    u16 x[8];
    memcpy(x, memory(at, 16), 16);
    for (int i = 0; i < 8; ++i) (first.transposed ? b[n + i][k] : b[n][k + i]) = bf16_low(x[i]);
  });
  for (int lane = 0; lane < 32; ++lane) {
    float(*x)[4] = nullptr;
    for (Sums& s : lanes[lane].sums) {
      if (s.at == lanes[lane].products[index].sums) x = s.x;
    }
    for (int i = 0; i < first.tiles; ++i) {
      for (int e = 0; e < 4; ++e) {
        const double* left = a[lane / 4 + 8 * (e / 2)];
        const double* right = b[8 * i + 2 * (lane % 4) + e % 2];
        double sum = first.add ? x[i][e] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += left[k] * right[k];
        x[i][e] = (float)sum;
      }
    }
  }
}
void commit() {
  take_step(1);
  together([] {
    ++now;
    for (Product& p : me->warp->lanes[0].products) {
      if (p.group != me->commits) continue;
      p.since = now;
      each_operand_piece(p, [](u32 at, int, int) { check_readable(at, 16); });
    }
  });
  ++me->commits;
}
void wait(u32 open) {
  take_step(2 + open);
  const u32 covered = me->commits > open ? me->commits - open : 0;
  size_t count = 0;
  while (count < me->products.size() && me->products[count].group < covered) ++count;
  together([&] {
    for (size_t i = 0; i < count; ++i) multiply(me->warp->lanes, i);
  });
  for (size_t i = 0; i < count; ++i) {
    const Product& p = me->products[i];
    if (left_operands_stay && p.from && memcmp(p.from, p.a, 16)) fail("a left operand changed before its product was waited for", (u32)i);
  }
  me->products.erase(me->products.begin(), me->products.begin() + count);
  for (size_t i = 0; i < me->sums.size();) {
    const Sums& s = me->sums[i];
    bool running = false;
    for (const Product& p : me->products) running |= p.sums == s.at;
    if (running) {
      ++i;
      continue;
    }
    if (!poisoned(s)) fail("accumulators written before their product was waited for", (u32)s.tiles);
    memcpy(s.at, s.x, 16 * s.tiles);
    me->sums.erase(me->sums.begin() + i);
  }
  me->fenced = false;
}

}  // namespace emu
