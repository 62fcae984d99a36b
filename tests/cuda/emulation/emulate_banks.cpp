#include "emulate_banks.h"

#include <algorithm>
#include <string>

namespace emu {

namespace {

struct Access {
  u32 address, bytes;
};
struct Passes {
  u64 made = 0, needed = 0, accesses = 0;
};
using Place = std::pair<std::string, int>;
std::map<std::pair<Place, const Warp*>, std::vector<std::vector<Access>>> accesses;  // of each lane, in order
std::map<Place, Passes> passes;

}  // namespace

void record(u32 a, u32 bytes, const Site& site) {
  auto& lanes = accesses[{{site.file, site.line}, me->warp}];
  lanes.resize(32);
  lanes[me->thread & 31].push_back({a & 0xffffff, bytes});
}
// Lanes go through the banks together: all with up to 4 bytes, half of them with 8, a quarter with 16.
void count_conflicts() {
  for (const auto& [key, lanes] : accesses) {
    Passes& count = passes[key.first];
    size_t times = 0;
    for (const auto& lane : lanes) times = std::max(times, lane.size());
    for (size_t n = 0; n < times; ++n) {
      u32 bytes = 4;
      for (const auto& lane : lanes) {
        if (n < lane.size()) bytes = std::max(bytes, lane[n].bytes);
      }
      ++count.accesses;
      const u32 group = 128 / bytes;
      for (u32 first = 0; first < 32; first += group) {
        std::vector<u32> words;
        for (u32 i = first; i < first + group; ++i) {
          if (n >= lanes[i].size()) continue;
          for (u32 at = 0; at < lanes[i][n].bytes; at += 4) words.push_back((lanes[i][n].address + at) / 4);
        }
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        u32 banks[32] = {}, most = 0;
        for (u32 w : words) most = std::max(most, ++banks[w % 32]);
        count.made += most;
        count.needed += !words.empty();
      }
    }
  }
  accesses.clear();
}
void report_conflicts() {
  std::vector<std::pair<u64, Place>> order;
  for (const auto& [place, count] : passes) order.push_back({count.made - count.needed, place});
  std::sort(order.rbegin(), order.rend());
  for (const auto& [extra, place] : order) {
    if (!extra) break;
    const Passes& count = passes[place];
    const char* name = strrchr(place.first.c_str(), '/');
    fprintf(stderr, "banks: %s:%d %llu accesses, %llu passes where %llu are enough\n", name ? name + 1 : place.first.c_str(),
            place.second, (unsigned long long)count.accesses, (unsigned long long)count.made, (unsigned long long)count.needed);
  }
  passes.clear();
}

}  // namespace emu
