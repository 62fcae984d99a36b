// Matrix products. Those of a warp happen where they are called. Those of a warpgroup happen when they are waited for: until then
// their accumulators hold poison, and neither those, nor the left operand's registers, nor the right operand's shared memory
// may change.
#ifndef KDACORE_EMULATE_PRODUCTS_H
#define KDACORE_EMULATE_PRODUCTS_H

#include "emulate_shared.h"

inline float bf16_low(u32);
inline float bf16_high(u32);
inline float half_to_float(u16);

namespace emu {

// d[16x8] += a[16x16] b[16x8], of a warp; half(word, i) is 16-bit number i of a register.
void warp_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float (*half)(u32, int));
// d[16x8] += a[16x8] b[8x8], of a warp, of TF32 operands.
void warp_product_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

}  // namespace emu

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::warp_product(d, a, b0, b1, [](u32 word, int i) { return i ? bf16_high(word) : bf16_low(word); });
}
inline void mma_bf16_half(float (&d)[4], u32 a0, u32 a1, u32 b) { mma_bf16(d, {a0, a1, 0, 0}, b, 0); }
inline void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  for (int e = 0; e < 4; ++e) d[e] = c[e];
  emu::warp_product_tf32(d, a, b0, b1);
}

namespace emu {

// Do the arrays of left operands live until their products have been waited for?
inline bool left_operands_stay = true;
// Are the operands of a warpgroup's products float16? Else they are bfloat16.
inline bool operands_are_f16 = false;
// 16-bit number i of an operand's register.
inline float operand_half(u32 word, int i) {
  return operands_are_f16 ? half_to_float((u16)(word >> 16 * i)) : i ? bf16_high(word) : bf16_low(word);
}

// All warps of a warpgroup do the same in the same order.
void take_step(u64 what);

// One lane's part of d[64 x 8 tiles] (+)= a[64 x 16] b[16 x 8 tiles].
void issue(float* d, const u32 (&a)[4], u64 b, int tiles, bool transposed, bool add, bool negative);
// The same with all 64 rows of a in shared memory.
void issue_shared(float* d, u64 a, u64 b, int tiles, bool transposed, bool add);

void fence();
void commit();
void wait(u32 open);  // until as many groups at most are open

}  // namespace emu

inline void warpgroup_fence() {
  emu::fence();
}
inline void warpgroup_commit() { emu::commit(); }
template <int N>
inline void warpgroup_wait() { emu::wait(N); }
template <int N>
inline void fence_registers(float (&)[N][4]) {}
template <int N>
inline void fence_registers(u32 (&)[N][4]) {}
template <int TRANSPOSED, int N>
inline void warpgroup_mma(float (&d)[N][4], const u32 (&a)[4], u64 b, int add) {
  emu::issue(&d[0][0], a, b, N, TRANSPOSED, add, false);
}
template <int TRANSPOSED, int N>
inline void warpgroup_mma_shared(float (&d)[N][4], u64 a, u64 b, int add) {
  emu::issue_shared(&d[0][0], a, b, N, TRANSPOSED, add);
}
template <int N>
inline void warpgroup_subtract(float (&d)[N][4], const u32 (&a)[4], u64 b) {
  emu::issue(&d[0][0], a, b, N, true, true, true);
}

#endif
