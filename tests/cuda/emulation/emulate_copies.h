// Barriers that count, and asynchronous copies. A copy's data arrives as late as it may, or at once: chance decides.
#ifndef KDACORE_EMULATE_COPIES_H
#define KDACORE_EMULATE_COPIES_H

#include "emulate_banks.h"
#include "emulate_fibers.h"

namespace emu {

void land(const Late& c);
void wait_copies(size_t open);
void wait_out(size_t open);

}  // namespace emu

void copy_async16(u32 dst, const void* src, bool real, KDA_SITE);
inline void copy_async16_of_line(u32 dst, const void* src, bool real) { copy_async16(dst, src, real); }
inline void copy_async16_evict_first(u32 dst, const void* src, bool real) { copy_async16(dst, src, real); }
void copy_async_commit();
template <int N>
inline void copy_async_wait() { emu::wait_copies(N); }
void copy_async_arrive(u32 bar);

void barrier_init(u32 bar, u32 count);
void barrier_arrive(u32 bar);
void barrier_wait(u32 bar, u32 parity);
bool barrier_test(u32 bar, u32 parity);
inline void sleep_briefly() {
  emu::yield();
  emu::me->warp->polling = true;
}
void barrier_expect(u32 bar, u32 bytes);
inline u32 cluster_address(u32 a, u32 rank) { return (a & 0xffffff) | rank << 24; }
void barrier_arrive_remote(u32 bar);
void barrier_expect_remote(u32 bar, u32 bytes);

void store_async(u32 a, u32 x, u32 bar);
void copy_to_block(u32 dst, u32 src, u32 bytes, u32 bar);
void copy_in(u32 dst, const void* src, u32 bytes, u32 bar);
void copy_in_to_both(u32 dst, const void* src, u32 bytes, u32 bar);
inline void copy_in_to_both_evict_first(u32 dst, const void* src, u32 bytes, u32 bar) { copy_in_to_both(dst, src, bytes, bar); }
inline void copy_in_evict_first(u32 dst, const void* src, u32 bytes, u32 bar) { copy_in(dst, src, bytes, bar); }
void copy_out(void* dst, u32 src, u32 bytes);
void copy_out_commit();
template <int N>
inline void copy_out_wait_read() { emu::wait_out(N); }
inline void copy_out_wait() { emu::wait_out(0), emu::me->storing = false; }
void fence_async_proxy();
inline void fence_async_proxy_global() {}
inline void fence_barrier_init() { ++emu::me->barrier_fences; }

#endif
