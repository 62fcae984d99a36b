// Waiting beside other work (sm_90a). Like ptx.cuh: the emulator has the same functions.
#pragma once

#include "common/ptx.cuh"

// Whether a barrier's phase has completed; waits for about 300 ns at most.
__device__ __forceinline__ bool barrier_try_briefly(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(bar), "r"(parity), "r"(300u)
      : "memory");
  return done != 0;
}
// Whether a flag holds `value`; clears it then.
__device__ __forceinline__ bool take_flag(u64 flag, u64 value) {
  u64 found;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
  if (found != value) return false;
  asm volatile("st.global.b64 [%0], 0;" ::"l"(flag) : "memory");
  return true;
}
