// A CPU stand-in for the instructions of csrc (common/ptx.cuh and those of sm90): every CUDA thread is a fiber, warp
// instructions are rendezvous of 32 fibers, barriers block, what is asynchronous happens as late as it may. Deterministic
// for a seed, which also shuffles the order threads run in; a pass in which nothing can run is reported as a deadlock.
#ifndef KDACORE_EMULATE_H
#define KDACORE_EMULATE_H

typedef unsigned int u32;  // as ptx.cuh has them: this header is compiled before all others
typedef unsigned long long u64;
typedef unsigned short u16;

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __global__
#define KDA_KERNEL(threads, blocks) \
  constexpr u32 block_threads = threads; \
  static void
#define KDA_CLUSTER(size)
#define OFFSET(structure, field) ((u32)offsetof(structure, field))
#define KDA_SHARED(name) unsigned char* name = emu::me->block->shared.data()
#define KDA_SHARED_BYTES(...) constexpr u32 shared_bytes[] = {__VA_ARGS__}
#define KDA_PARAM

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

#include "emulate_banks.h"
#include "emulate_copies.h"
#include "emulate_fibers.h"
#include "emulate_products.h"
#include "emulate_schedule.h"
#include "emulate_shared.h"

namespace emu {

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
inline int grid_blocks() { return emu::grid; }

inline int opaque(int x) { return x; }
inline float opaque_float(float x) { return x; }
inline void wait_for_inputs() {}
inline void launch_dependents() {}
inline void pause(u32) {}
inline float exp2_fast(float x) { return emu::flush(exp2f(emu::flush(x))); }
inline float min_or_nan(float x, float y) { return x != x || y != y ? NAN : std::fmin(x, y); }
inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : std::fmax(x, y); }
inline float reciprocal(float x) { return emu::flush(1.0f / emu::flush(x)); }
inline float inverse_sqrt(float x) { return emu::flush(1.0f / sqrtf(emu::flush(x))); }
inline u32 pack_bf16(float low, float high) { return emu::round_bf16(low) | emu::round_bf16(high) << 16; }
inline u32 __float_as_uint(float x) { return emu::as_u32(x); }
inline float __uint_as_float(u32 x) { return emu::as_float(x); }
inline float bf16_low(u32 x) { return emu::as_float(x << 16); }
inline float bf16_high(u32 x) { return emu::as_float(x & 0xffff0000u); }
inline float half_to_float(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline u16 float_to_half(float x) { const _Float16 h = (_Float16)x; u16 r; memcpy(&r, &h, 2); return r; }
inline u32 pack_f16(float low, float high) { return (u32)float_to_half(low) | (u32)float_to_half(high) << 16; }
inline u32 pack_f16_saturated(float low, float high) {
  const auto limit = [](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };
  return pack_f16(limit(low), limit(high));
}
inline float multiply_add(float x, float y, float z) { return std::fma(x, y, z); }
inline uint4 zero_bits() { return {0, 0, 0, 0}; }
inline u32 multiply_bf16(u32 x, u32 y) { return pack_bf16(bf16_low(x) * bf16_low(y), bf16_high(x) * bf16_high(y)); }
inline u32 max_bf16(u32 x, u32 y) {
  return pack_bf16(std::fmax(bf16_low(x), bf16_low(y)), std::fmax(bf16_high(x), bf16_high(y)));
}

inline float shuffle_xor(float x, int mask) {
  return emu::as_float(emu::exchange({{emu::as_u32(x)}})[(emu::me->thread & 31) ^ mask].w[0]);
}
inline u32 shuffle_xor(u32 x, int mask) { return emu::exchange({{x}})[(emu::me->thread & 31) ^ mask].w[0]; }
inline int shuffle_xor(int x, int mask) { return (int)emu::exchange({{(u32)x}})[(emu::me->thread & 31) ^ mask].w[0]; }
inline float shuffle(float x, int lane) { return emu::as_float(emu::exchange({{emu::as_u32(x)}})[lane & 31].w[0]); }
inline int shuffle(int x, int lane) { return (int)emu::exchange({{(u32)x}})[lane & 31].w[0]; }
inline u32 warp_max(u32 x) {
  const auto all = emu::exchange({{x}});
  for (int lane = 0; lane < 32; ++lane) x = std::max(x, all[lane].w[0]);
  return x;
}
inline bool warp_any(bool x) { return warp_max((u32)x); }
inline int uniform(int x) { return x; }
inline u32 transpose(u32 x) {
  const auto all = emu::exchange({{x}});
  const int g = (emu::me->thread & 31) >> 2, t = emu::me->thread & 3;
  const auto number = [&](int row) { return all[4 * row + (g >> 1)].w[0] >> 16 * (g & 1) & 0xffffu; };
  return number(2 * t) | number(2 * t + 1) << 16;
}

template <class T>
inline T load(u32 a, const emu::Site& site) {
  emu::note(a, sizeof(T), site);
  T r;
  memcpy(&r, emu::read(a, sizeof(T)), sizeof(T));
  return r;
}
template <class T>
inline void store(u32 a, const T& x, const emu::Site& site) {
  emu::note(a, sizeof(T), site);
  memcpy(emu::write(a, sizeof(T)), &x, sizeof(T));
}
inline void store_shared(u32 a, u32 x, u32 y, u32 z, u32 w, KDA_SITE) { store(a, uint4{x, y, z, w}, site); }
inline void store_shared(u32 a, float x, float y, KDA_SITE) { store(a, float2{x, y}, site); }
inline void store_shared(u32 a, u32 x, KDA_SITE) { store(a, x, site); }
inline void store_shared16(u32 a, u32 x, KDA_SITE) { store(a, (u16)x, site); }
inline void store_cluster_shared(u32 a, u32 x, KDA_SITE) { store(a, x, site); }
inline float4 load_shared4(u32 a, KDA_SITE) { return load<float4>(a, site); }
inline float load_shared1(u32 a, KDA_SITE) { return load<float>(a, site); }
inline float2 load_shared2(u32 a, KDA_SITE) { return load<float2>(a, site); }
inline uint4 load_shared_u4(u32 a, KDA_SITE) { return load<uint4>(a, site); }

inline void load_sixteen(uint4& r, const void* p, bool real) {
  if (!real) return;
  if ((uintptr_t)p % 16) emu::fail("misaligned global address", (u32)(uintptr_t)p);
  memcpy(&r, p, 16);
}
inline void load_eight(u32 (&r)[2], const void* p, bool real) {
  if (!real) return;
  if ((uintptr_t)p % 8) emu::fail("misaligned global address", (u32)(uintptr_t)p);
  memcpy(r, p, 8);
}
inline void prefetch_l2(const void*) {}
template <class T>
inline T load_global(u64 a) {
  if (a % sizeof(T)) emu::fail("misaligned global address", (u32)a);
  return *(const T*)a;
}
template <class T>
inline void store_global_as(u64 a, const T& x) {
  if (a % sizeof(T)) emu::fail("misaligned global address", (u32)a);
  *(T*)a = x;
}
inline u32 load_global1(u64 a) { return load_global<unsigned char>(a); }
inline u32 load_global2(u64 a) { return load_global<u16>(a); }
inline u32 load_global4(u64 a) { return load_global<u32>(a); }
inline uint2 load_global8(u64 a) {
  if (a % 8) emu::fail("misaligned global address", (u32)a);
  return {load_global4(a), load_global4(a + 4)};
}
inline uint4 load_global16(u64 a) {
  uint4 r;
  load_sixteen(r, (const void*)a, true);
  return r;
}
inline void store_global2(u64 a, u32 x) { store_global_as(a, (u16)x); }
inline void store_global4(u64 a, u32 x) { store_global_as(a, x); }
inline void store_global8(u64 a, u32 x, u32 y) {
  if (a % 8) emu::fail("misaligned global address", (u32)a);
  store_global4(a, x), store_global4(a + 4, y);
}
// A policy is whether the line is kept; a test asks for how many bytes were written so.
namespace emu { inline size_t kept_bytes = 0; }
inline u64 write_policy(bool kept) { return kept; }
inline void store_global(void* p, uint4 v, u64 kept = 0) {
  if ((uintptr_t)p % 16) emu::fail("misaligned global address", (u32)(uintptr_t)p);
  emu::kept_bytes += kept ? 16 : 0;
  memcpy(p, &v, 16);
}
inline void store_state_bits(u64 a, const uint4& x) { store_global((void*)a, x); }
inline void store_global_if(bool real, void* p, uint4 v) {
  if (real) store_global(p, v);
}

inline uint4 load_written(u64 p) { uint4 r; memcpy(&r, (const void*)p, 16); return r; }
inline void set_flag(u64 flag, u64 value) {
  for (int lane = 0; lane < 32; ++lane)
    if (emu::me->warp->lanes[lane].storing) emu::fail("a flag before copies of its warp have arrived", (u32)flag);
  *(u64*)flag = value;
}
inline void wait_and_clear_flag(u64 flag, u64 value) {
  while (*(u64*)flag != value) emu::block_while((const u32*)flag, ~0u, *(u32*)flag, "flag", (u32)flag);
  *(u64*)flag = 0;
}
inline bool barrier_try_briefly(u32 bar, u32 parity) {
  emu::yield();
  emu::me->warp->polling = true;
  return barrier_test(bar, parity);
}
inline bool take_flag(u64 flag, u64 value) {
  if (*(u64*)flag != value) return false;
  *(u64*)flag = 0;
  emu::me->warp->polling = false;
  return true;
}

inline u64 atomic_add(u64 at, u64 x) { const u64 before = load_global<u64>(at); store_global_as(at, before + x); return before; }
inline void atomic_maximum(u64 at, long long x) { store_global_as(at, std::max(load_global<long long>(at), x)); }
inline u64 atomic_replace(u64 at, u64 expected, u64 x) {
  const u64 before = load_global<u64>(at);
  if (before == expected) store_global_as(at, x);
  return before;
}
inline void atomic_store(u64 at, u64 x) { store_global_as(at, x); }

// Lane 8i + r names row r of matrix i.
inline u32 row_address(const emu::Slot* s, int lane) {
  emu::memory(s[lane].w[0], 16);
  return s[lane].w[0];
}
inline void load_matrix4(u32 (&r)[4], u32 a, KDA_SITE) {
  emu::note(a, 16, site);
  emu::Slot* s = emu::exchange({{a}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) memcpy(&r[i], emu::read(row_address(s, 8 * i + lane / 4) + 4 * (lane % 4), 4), 4);
}
inline void load_matrix4_transposed(u32 (&r)[4], u32 a, KDA_SITE) {
  emu::note(a, 16, site);
  emu::Slot* s = emu::exchange({{a}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) {
    u16 x[2];
    for (int j = 0; j < 2; ++j) memcpy(&x[j], emu::read(row_address(s, 8 * i + 2 * (lane % 4) + j) + 2 * (lane / 4), 2), 2);
    r[i] = x[0] | (u32)x[1] << 16;
  }
}
inline void store_matrix4(u32 a, const u32 (&r)[4], KDA_SITE) {
  emu::note(a, 16, site);
  emu::Slot* s = emu::exchange({{a, r[0], r[1], r[2], r[3]}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) memcpy(emu::write(row_address(s, 8 * i + lane / 4) + 4 * (lane % 4), 4), &r[i], 4);
  emu::exchange({});
}
inline void store_matrix4_transposed(u32 a, const u32 (&r)[4], KDA_SITE) {
  emu::note(a, 16, site);
  emu::Slot* s = emu::exchange({{a, r[0], r[1], r[2], r[3]}});
  const int lane = emu::me->thread & 31;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const u16 x = (u16)(r[i] >> 16 * j);
      memcpy(emu::write(row_address(s, 8 * i + 2 * (lane % 4) + j) + 2 * (lane / 4), 2), &x, 2);
    }
  }
  emu::exchange({});
}

inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::warp_product(d, a, b0, b1, [](u32 word, int i) { return half_to_float((u16)(word >> 16 * i)); });
}

#endif
