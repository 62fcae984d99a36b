// What csrc/common/half_types.cuh adds to ptx.cuh, on the CPU.
#ifndef KDACORE_EMULATE_HALF_H
#define KDACORE_EMULATE_HALF_H

inline u32 pack_f16(float low, float high) { return (u32)float_to_half(low) | (u32)float_to_half(high) << 16; }
inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::warp_product(d, a, b0, b1, [](u32 word, int i) { return half_to_float((u16)(word >> 16 * i)); });
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

#endif
