#include "emulate_products.h"

#include "emulate.h"

namespace emu {

constexpr u32 POISON = 0x7fdeadbe;  // NaN

// Compiled for several instruction sets, the best of which is taken when the library is loaded. Products of two bfloat16 numbers
// are exact in double precision, so that a fused multiplication and addition gives the same bits as the two after one another.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define KDA_EVERY_VECTOR_LENGTH __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define KDA_EVERY_VECTOR_LENGTH
#endif
// sum[row][n] += a[row][k] b[k][n], in the order of k; eight columns at a time stay in registers.
KDA_EVERY_VECTOR_LENGTH
void multiply_add(double (*sum)[128], const double (*a)[16], const double (*b)[128], int columns) {
  for (int row = 0; row < 16; ++row) {
    for (int first = 0; first < columns; first += 8) {
      double x[8];
      for (int n = 0; n < 8; ++n) x[n] = sum[row][first + n];
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 8; ++n) x[n] += a[row][k] * b[k][first + n];
      }
      for (int n = 0; n < 8; ++n) sum[row][first + n] = x[n];
    }
  }
}
// The last lane multiplies for all.
void warp_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float (*half)(u32, int)) {
  Slot* const slots = me->warp->slots[me->warp->generation & 1];
  u32(&mine)[16] = slots[me->thread & 31].w;
  memcpy(mine, a, 16);
  mine[4] = b0, mine[5] = b1;
  memcpy(mine + 6, d, 16);
  together([&] {
    double left[16][16], right[16][128], sum[16][128];
    for (int lane = 0; lane < 32; ++lane) {
      const u32* w = slots[lane].w;
      const int row = lane / 4, pair = 2 * (lane % 4);
      for (int i = 0; i < 2; ++i) {
        for (int r = 0; r < 4; ++r) left[row + r % 2 * 8][r / 2 * 8 + pair + i] = half(w[r], i);
        for (int r = 0; r < 2; ++r) right[r * 8 + pair + i][row] = half(w[4 + r], i);
        for (int r = 0; r < 2; ++r) sum[row + 8 * r][pair + i] = as_float(w[6 + 2 * r + i]);
      }
    }
    multiply_add(sum, left, right, 8);
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 4; ++e) {
        slots[lane].w[6 + e] = as_u32((float)sum[lane / 4 + e / 2 * 8][2 * (lane % 4) + e % 2]);
      }
    }
  });
  memcpy(d, mine + 6, 16);
}
void warp_product_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Slot* const slots = me->warp->slots[me->warp->generation & 1];
  u32(&mine)[16] = slots[me->thread & 31].w;
  memcpy(mine, a, 16);
  mine[4] = b0, mine[5] = b1;
  memcpy(mine + 6, d, 16);
  together([&] {
    const auto operand = [&](int lane, int word) { return (double)as_float(slots[lane].w[word] & 0xffffe000u); };
    u32 result[32][4];
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4, column = 2 * (lane % 4) + e % 2;
        double sum = as_float(slots[lane].w[6 + e]);
        for (int k = 0; k < 8; ++k)
          sum += operand(4 * row + k % 4, e / 2 + k / 4 * 2) * operand(4 * column + k % 4, 4 + k / 4);
        result[lane][e] = as_u32((float)sum);
      }
    }
    for (int lane = 0; lane < 32; ++lane) memcpy(slots[lane].w + 6, result[lane], 16);
  });
  memcpy(d, mine + 6, 16);
}

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
// The sums of a product, which hold poison until they are waited for.
void take_sums(float* d, int tiles) {
  for (Sums& s : me->sums) {
    if (s.at != d) continue;
    if (!poisoned(s)) fail("accumulators written before their product was waited for", (u32)tiles);
    return;
  }
  check_registers(d, 4 * tiles, "accumulators written since warpgroup_fence()");
  me->sums.push_back({d, tiles});
  memcpy(me->sums.back().x, d, 16 * tiles);
  for (int i = 0; i < 4 * tiles; ++i) memcpy(d + i, &POISON, 4);
}
void begin_product(u64 operands, int tiles, bool transposed, bool add, bool negative) {
  take_step(operands * 0x9e3779b97f4a7c15ull ^ (u64)(tiles | transposed << 8 | add << 9 | negative << 10));
  if (!me->fenced) fail("a warpgroup product without warpgroup_fence() since the last wait", 0);
}
void issue(float* d, const u32 (&a)[4], u64 b, int tiles, bool transposed, bool add, bool negative) {
  begin_product(b, tiles, transposed, add, negative);
  check_registers(a, 4, "a left operand written since warpgroup_fence()");
  take_sums(d, tiles);
  // A loop that is unrolled has other registers in each turn.
  for (Product& p : me->products) {
    if (p.from == a) p.from = nullptr;
  }
  me->products.push_back({d, a, {a[0], a[1], a[2], a[3]}, 0, b, tiles, transposed, add, negative, me->commits});
}
void issue_shared(float* d, u64 a, u64 b, int tiles, bool transposed, bool add) {
  begin_product(a * 31 + b, tiles, transposed, add, false);
  take_sums(d, tiles);
  me->products.push_back({d, nullptr, {}, a, b, tiles, transposed, add, false, me->commits});
}
// Bytes of an operand's rows: 128, or 32 with the narrow swizzle.
u32 row_bytes(u64 descriptor) { return descriptor >> 62 == 3 ? 32 : 128; }
u32 swizzled_place(u32 at, u64 descriptor) {
  return (u32)me->block->rank << 24 | (at ^ (at >> 7 & (row_bytes(descriptor) == 32 ? 1 : 7)) << 4);
}
u32 start_of(u64 descriptor) { return (u32)(descriptor & 0x3fff) << 4; }
u32 group_of(u64 descriptor) { return (u32)(descriptor >> 32 & 0x3fff) << 4; }
// f(the address of eight numbers of the right operand, their row of the sum, their first column, whether they go along the sum).
template <class F>
inline void each_operand_piece(const Product& p, F f) {
  const u32 start = start_of(p.b), column = (u32)(p.b >> 16 & 0x3fff) << 4, group = group_of(p.b), row = row_bytes(p.b),
            wide = row / 2;
  for (int outer = 0; outer < (p.transposed ? 16 : 8 * p.tiles); ++outer) {
    for (int inner = 0; inner < (p.transposed ? 8 * p.tiles : 16); inner += 8) {
      const int k = p.transposed ? outer : inner, n = p.transposed ? inner : outer;
      const u32 at = p.transposed ? start + n / wide * column + k / 8 * group + k % 8 * row + n % wide * 2
                                  : start + n / 8 * group + n % 8 * row + k * 2;
      f(swizzled_place(at, p.b), k, n);
    }
  }
}
// f(the address of eight numbers of the warp's rows of a left operand in shared memory, their row, their first place in the sum).
template <class F>
inline void each_left_piece(const Product& p, F f) {
  if (!p.left) return;
  for (int row = 0; row < 16; ++row) {
    const int all = me->thread / 32 % 4 * 16 + row;
    for (int k = 0; k < 16; k += 8)
      f(swizzled_place(start_of(p.left) + all / 8 * group_of(p.left) + all % 8 * row_bytes(p.left) + k * 2, p.left), row, k);
  }
}
// Eight numbers that a product reads, which must not have changed since it was committed.
void read_piece(const Product& p, u32 at, const char* what, double (&x)[8]) {
  Piece& piece = piece_at(at);
  if (piece.coming || piece.written > p.since) fail(what, at, piece.writer);
  note_read(piece, at);
  u16 raw[8];
  memcpy(raw, memory(at, 16), 16);
  for (int i = 0; i < 8; ++i) x[i] = operand_half(raw[i], 0);
}
// f(a number of the product's sum that a lane holds, its row, its column).
template <class F>
inline void each_sum(Fiber& lane, size_t index, F f) {
  const Product& p = lane.products[index];
  const int row = lane.thread % 32 / 4, column = 2 * (lane.thread % 4);
  for (Sums& s : lane.sums) {
    if (s.at != p.sums) continue;
    for (int i = 0; i < p.tiles; ++i) {
      for (int e = 0; e < 4; ++e) f(s.x[i][e], row + 8 * (e / 2), 8 * i + column + e % 2);
    }
  }
}
// One product, for all lanes of the warp.
void multiply(Fiber* lanes, size_t index) {
  const Product& first = lanes[0].products[index];
  double a[16][16], b[16][128], sum[16][128], x[8];
  for (int row = 0; row < 16 && !first.left; ++row) {
    for (int k = 0; k < 16; ++k) {
      const u32 word = lanes[4 * (row % 8) + k % 8 / 2].products[index].a[k / 8 * 2 + row / 8];
      a[row][k] = operand_half(word, k % 2) * (first.negative ? -1.0 : 1.0);
    }
  }
  each_left_piece(first, [&](u32 at, int row, int k) {
    read_piece(first, at, "a left operand changed before its product was waited for", x);
    for (int i = 0; i < 8; ++i) a[row][k + i] = x[i];
  });
  each_operand_piece(first, [&](u32 at, int k, int n) {
    read_piece(first, at, "a right operand changed before its product was waited for", x);
    for (int i = 0; i < 8; ++i) (first.transposed ? b[k][n + i] : b[k + i][n]) = x[i];
  });
  for (int lane = 0; lane < 32; ++lane) {
    each_sum(lanes[lane], index, [&](float x, int row, int column) { sum[row][column] = first.add ? x : 0.0f; });
  }
  multiply_add(sum, a, b, 8 * first.tiles);
  for (int lane = 0; lane < 32; ++lane) {
    each_sum(lanes[lane], index, [&](float& x, int row, int column) { x = (float)sum[row][column]; });
  }
}
void commit() {
  take_step(1);
  together([] {
    ++now;
    for (Product& p : me->warp->lanes[0].products) {
      if (p.group != me->commits) continue;
      p.since = now;
      each_left_piece(p, [](u32 at, int, int) { check_readable(at, 16); });
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
