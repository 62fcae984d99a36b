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
//   sk_third, sk_fourth    sk of earlier quarters, as the third and the fourth see them (unbounded gates)
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
#if FOR_SEGMENTS
#include "sm90/chunk_forward/segments/chunk_operands.cuh"
#endif

constexpr int THREADS = 256;
constexpr int PARTS = BOUNDED ? 2 : 4;
constexpr int BLOCKS = BOUNDED ? 3 : 2;  // of a multiprocessor, or (SIDE_BY_SIDE) units of a block at once
constexpr u32 HALF_SQUARE = HALF * IMAGE_ROW;  // 64 channels of 32 tokens

constexpr u32 DIAGONAL_PITCH = 24;  // floats a row of a 16 x 16 block on the system's diagonal
struct Staging {                    // of one warp's strip
  u16 x[32][32];
};
constexpr u32 STRIP_BYTES = sizeof(Staging);

struct SharedMemory {
  TileImage k;
  union {
    TileImage q;
#if FOR_SEGMENTS
    TileImage kt;
#else
    TileImage w;
#endif
    struct {
      SquareImage system_high, system_low;
    };
  };
#if FOR_SEGMENTS
  union {
    u16 sk[2][HALF][64];
    float diagonal[4][16][DIAGONAL_PITCH];
    SquareImage aqt;
  };
  union {
#if G_FLOAT
    float raw_g[C][K];
#endif
    struct {
      TileImage kg;
      union {
        TileImage yk;
        struct {
          SquareImage aqk, inverse;
        };
#if !G_FLOAT
        TileImage raw_g;
#endif
      };
    };
  };
#else
  union {
    TileImage u;
    struct {
      union {
        u16 sk[2][HALF][64];
        float diagonal[4][16][DIAGONAL_PITCH];
      };
      union {
        Staging strips[8];
#if G_FLOAT
        float raw_g[C][K];
#endif
        struct {
          SquareImage aqk, inverse;
          union {
            TileImage yk;
            TileImage v;
#if !G_FLOAT
            TileImage raw_g;
#endif
          };
        };
      };
    };
  };
#endif
#if !BOUNDED
  u16 sk_third[2][HALF][64];
  TileImage sk_fourth;
#endif
  float beta[C], q_norm[C], k_norm[C];  // these three are `rows` of the workspace
  float q_factor[C];                    // scale / |q|
  float kb_factor[C];                   // beta / |k|
  float totals[PARTS][K];               // log2 decay of each part
  float bias[K];
#if FOR_SEGMENTS
  u32 place;  // the unit's, in the workspace, if SIDE_BY_SIDE; there is no register for it
#else
  u32 value_rows[4];  // address of v's rows and their number, likewise
#endif
#if SIDE_BY_SIDE
  UnitInputs inputs[2];   // of this unit and of the next one
  u64 given[2], written;  // barriers
#endif
};
constexpr u32 UNIT_PITCH = (sizeof(SharedMemory) + 1023) / 1024 * 1024;
static_assert((SIDE_BY_SIDE ? BLOCKS * UNIT_PITCH : sizeof(SharedMemory)) <= SHARED_BYTES,
              "the host's shared memory size is too small");
static_assert(SIDE_BY_SIDE || BLOCKS * (SHARED_BYTES + 1024) <= 228 * 1024,
              "a multiprocessor has no room for so many blocks");

// Offset of a 16-byte piece in an image of the kernel's own. Neither eight neighbouring rows nor
// eight rows of a scan (rows 8t + 2m, 8t + 2m + 1 for t = 0..3) share a bank.
__device__ __forceinline__ u32 tile_offset(int row, int piece) {
  return row * IMAGE_ROW + ((piece ^ (row & 7) ^ (row >> 2 & 6)) << 4);
}

#include "sm90/chunk_backward/prepare_places.cuh"

#if FOR_SEGMENTS
// The unit's record.
__device__ __forceinline__ unsigned char* record_of(const ChunkBackwardParams& p) {
  return reinterpret_cast<unsigned char*>(p.last) + (u64)unit_index() * sizeof(ChunkOperands);
}
#else
// The unit in an array of the workspace.
__device__ __forceinline__ unsigned char* place_of(u64 base, u32 bytes) {
  return reinterpret_cast<unsigned char*>(base) + (u64)unit_index() * bytes;
}
#endif
