// Shared memory of prepare, and how its matrices lie there.
//
// Regions serve several times. A barrier of the whole block stands between two columns of this
// table, except for k and q: the warp that reads a strip (32 tokens, 32 channels) of them writes
// the same strip.
//
//   region   raw rows      operands               pairs multiplied          end
//   k        k             zb                     zb                        zb
//   q        q             zq                     the system in two parts   w
//   sk       -             sk (first half; first  its diagonal, float       u, with aqk
//                          quarter)
//   aqk      g if float    staging of kg, then    aqk
//   inverse  g if float    of qg                  inverse                   inverse
//   yk       g             yk                     v                         v
//   third, fourth          sk of earlier quarters, as the third and the fourth see them (unbounded gates)
//
// With FOR_SEGMENTS, which needs no v, these differ:
//
//   q        q             zq                     the system in two parts   kt
//   sk       -             sk                     its diagonal              aqt
//   kg       g if float    kg                     kg                        kg
//   yk       g             yk                     aqk, inverse              aqk, inverse
//
// A part is the set of tokens that share an exponent anchor: a half if gates are bounded, else a
// quarter. zq = q 2^(P + centre), zb = beta k 2^(P + centre) (FOR_SEGMENTS: without beta),
// yk = k 2^(-P - centre), sk = k 2^(P_end - P): q with its norm and scale, k with its norm, P the log2
// decay from the start of the row's part, P_end that to the start of the later part which sees it.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/prepare_unit_inputs.cuh"
#include "sm90/chunk_forward/segments/chunk_operands.cuh"

constexpr int THREADS = 256;
constexpr int PARTS = BOUNDED ? 2 : 4;
constexpr int BLOCKS = BOUNDED ? 3 : 2;  // of a multiprocessor, or (SIDE_BY_SIDE) units of a block at once
constexpr u32 HALF_SQUARE = HALF * IMAGE_ROW;  // 64 channels of 32 tokens

constexpr u32 DIAGONAL_PITCH = 24;  // floats a row of a 16 x 16 block on the system's diagonal
struct Staging {                    // of one warp's strip
  u16 x[32][32];
};
constexpr u32 STRIP_BYTES = sizeof(Staging);

// The matrices, for the backward or for segments.
template <bool SEGMENTS>
struct Matrices;
template <>
struct Matrices<false> {
  TileImage k;
  union {
    TileImage q;
    TileImage w;
    struct {
      SquareImage system_high, system_low;
    };
  };
  union {
    TileImage u;
    struct {
      union {
        u16 sk[2][HALF][64];
        float diagonal[4][16][DIAGONAL_PITCH];
      };
      union {
        Staging strips[8];
        float float_g[C][K];
        struct {
          SquareImage aqk, inverse;
          union {
            TileImage yk;
            TileImage v;
            TileImage half_g;
          };
        };
      };
    };
  };
};
template <>
struct Matrices<true> {
  TileImage k;
  union {
    TileImage q;
    TileImage kt;
    struct {
      SquareImage system_high, system_low;
    };
  };
  union {
    u16 sk[2][HALF][64];
    float diagonal[4][16][DIAGONAL_PITCH];
    SquareImage aqt;
  };
  union {
    float float_g[C][K];
    struct {
      TileImage kg;
      union {
        TileImage yk;
        struct {
          SquareImage aqk, inverse;
        };
        TileImage half_g;
      };
    };
  };
};
// sk as the third and the fourth quarter see it.
template <bool BOUNDED_GATES>
struct LaterKeys {};
template <>
struct LaterKeys<false> {
  u16 third[2][HALF][64];
  TileImage fourth;
};
// One number a row or channel.
struct UnitNumbers {
  float beta[C], q_norm[C], k_norm[C];  // these three are `rows` of the workspace
  float q_factor[C];                    // scale / |q|
  float kb_factor[C];                   // beta / |k|
  float totals[PARTS][K];               // log2 decay of each part
  float bias[K];
  // The address of v's rows and their number (not FOR_SEGMENTS); the unit's place in the workspace. There are no
  // registers for them.
  u32 unit[FOR_SEGMENTS ? 1 : 4];
};
// What a block with several units needs for each.
template <bool SEVERAL_UNITS>
struct PlaceMemory {};
template <>
struct PlaceMemory<true> {
  UnitInputs inputs[2];   // of this unit and of the next one
  u64 given[2], written;  // barriers
};
struct SharedMemory : Matrices<FOR_SEGMENTS>, LaterKeys<BOUNDED>, UnitNumbers, PlaceMemory<SIDE_BY_SIDE> {};
constexpr u32 UNIT_PITCH = (sizeof(SharedMemory) + 1023) / 1024 * 1024;
KDA_SHARED_BYTES(SIDE_BY_SIDE ? BLOCKS * UNIT_PITCH : (u32)sizeof(SharedMemory));
static_assert(SIDE_BY_SIDE || BLOCKS * (sizeof(SharedMemory) + 1024) <= 228 * 1024,
              "a multiprocessor has no room for so many blocks");

// Offset of a 16-byte piece in an image of the kernel's own. Neither eight neighbouring rows nor
// eight rows of a scan (rows 8t + 2m, 8t + 2m + 1 for t = 0..3) share a bank.
__device__ __forceinline__ u32 tile_offset(int row, int piece) {
  return row * IMAGE_ROW + ((piece ^ (row & 7) ^ (row >> 2 & 6)) << 4);
}

__device__ __forceinline__ u32 raw_gates() {
  return G_FLOAT ? OFFSET(SharedMemory, float_g) : OFFSET(SharedMemory, half_g);
}
// Of unbounded gates.
__device__ __forceinline__ u32 third_keys() {
  return sizeof(Matrices<FOR_SEGMENTS>) + OFFSET(LaterKeys<false>, third);
}
__device__ __forceinline__ u32 fourth_keys() {
  return sizeof(Matrices<FOR_SEGMENTS>) + OFFSET(LaterKeys<false>, fourth);
}

// Which unit a thread works on, and where that lies in shared memory. A unit has THREADS threads and a
// part of shared memory: those of a block, or (SIDE_BY_SIDE) of one of several units that a block computes
// at once. Then both are computed anew wherever they are requested: there are no registers to keep them.
__device__ __forceinline__ int unit_in_block() { return opaque(thread_index()) / THREADS; }
__device__ __forceinline__ int unit_thread() {
  if constexpr (SIDE_BY_SIDE) return opaque(thread_index()) % THREADS;
  return thread_index();
}
__device__ __forceinline__ u32 place_memory(int place) {
  KDA_SHARED(memory);
  return shared_address(memory) + place * UNIT_PITCH;
}
__device__ __forceinline__ u32 unit_memory() { return place_memory(unit_in_block()); }
__device__ __forceinline__ u32 unit_index() {
  if constexpr (SIDE_BY_SIDE) return __float_as_uint(load_shared1(unit_memory() + OFFSET(SharedMemory, unit)));
  return block_index();
}
__device__ __forceinline__ void sync_unit() {
  if constexpr (SIDE_BY_SIDE)
    sync_threads(1 + unit_in_block(), THREADS);
  else
    sync_block();
}
// One half of a unit's threads.
__device__ __forceinline__ void sync_half_unit() {
  if constexpr (SIDE_BY_SIDE)
    sync_threads(1 + BLOCKS + 2 * unit_in_block(), THREADS / 2);
  else
    sync_threads(1, THREADS / 2);
}

// The unit's record.
__device__ __forceinline__ unsigned char* record_of(const ChunkBackwardParams& p) {
  return reinterpret_cast<unsigned char*>(p.last) + (u64)unit_index() * sizeof(ChunkOperands);
}
// The unit in an array of the workspace.
__device__ __forceinline__ unsigned char* place_of(u64 base, u32 bytes) {
  return reinterpret_cast<unsigned char*>(base) + (u64)unit_index() * bytes;
}
