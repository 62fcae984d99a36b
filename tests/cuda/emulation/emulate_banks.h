// Bank conflicts, counted where KDACORE_EMULATE_BANKS is set: of every line with an access to shared memory, how many times
// its warps went through the banks, and how few would have been enough. A developer's tool; printed at the end of a launch.
#ifndef KDACORE_EMULATE_BANKS_H
#define KDACORE_EMULATE_BANKS_H

#include "emulate_fibers.h"

namespace emu {

// Where an access is called.
struct Site {
  const char* file;
  int line;
};
#define KDA_SITE emu::Site site = {__builtin_FILE(), __builtin_LINE()}

inline bool counts_banks = getenv("KDACORE_EMULATE_BANKS") != nullptr;
void record(u32 a, u32 bytes, const Site& site);
inline void note(u32 a, u32 bytes, const Site& site) {
  if (counts_banks) record(a, bytes, site);
}
// After each cluster; after the launch.
void count_conflicts();
void report_conflicts();

}  // namespace emu

#endif
