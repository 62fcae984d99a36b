// What csrc/common/half_types.cuh adds to ptx.cuh, on the CPU.
#ifndef KDACORE_EMULATE_HALF_H
#define KDACORE_EMULATE_HALF_H

inline u32 pack_f16(float low, float high) { return (u32)float_to_half(low) | (u32)float_to_half(high) << 16; }
inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::Slot* s = emu::exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const int lane = emu::me->thread & 31;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, column = 2 * (lane % 4) + e % 2;
    double sum = d[e];
    for (int k = 0; k < 16; ++k) {
      const u32 x = s[4 * row + k % 8 / 2].w[(k / 8) * 2 + e / 2], y = s[4 * column + k % 8 / 2].w[4 + k / 8];
      sum += (double)half_to_float((u16)(x >> 16 * (k % 2))) * half_to_float((u16)(y >> 16 * (k % 2)));
    }
    d[e] = (float)sum;
  }
}
inline int shuffle_int(int x, int lane) { return (int)emu::exchange({{(u32)x}})[lane & 31].w[0]; }
inline void load_eight(u32 (&r)[2], const void* p, bool real) {
  if (!real) return;
  if ((uintptr_t)p % 8) emu::fail("misaligned global address", (u32)(uintptr_t)p);
  memcpy(r, p, 8);
}
inline void store_eight(u64 address, u32 x, u32 y) {
  if (address % 8) emu::fail("misaligned global address", (u32)address);
  const u32 v[2] = {x, y};
  memcpy((void*)address, v, 8);
}
inline void prefetch_l2(const void*) {}
inline void load_cached(uint4& r, const void* p, bool real) { load_stream(r, p, real); }

#endif
