// kda_recompute_w_u on Hopper, K = V = 128: w = Akk (beta k 2^G), u = Akk (beta v) and kg = k 2^(G_last - G), without q. The
// arithmetic is that of common/recompute.cu, bit for bit.
//
// Bound by memory, so reads never stop: four warps ask for the next chunks while teams of four compute one each and store it. A warp has
// 16 channels and 16 values of all tokens at a time. What it multiplies goes from the rows as they came to registers, where it is scaled
// in the layout of the matrix unit's right operand; no other warp needs it. The team meets once a chunk, as whole rows leave.
#include "sm90/stages/fetch.cuh"

constexpr int STRIPS = K / 16 / TEAM;  // of a warp

struct Lane {
  int lane, t;
  u32 half;  // where lane 8i + r finds row r of matrix i in a strip's 16 rows and columns, 16-bit rows
  u32 gate;  // where its first decay is in a strip
};

// Strips of w have 32 bytes in the 64 of their decays: places such that the eight lanes that read a row's half meet no bank twice.
__device__ __forceinline__ u32 strip_of_w(int strip) { return 64 * strip + 32 * (strip >> 1 & 1); }
__device__ __forceinline__ u32 piece_of_w(int piece) { return strip_of_w(piece >> 1) + 16 * (piece & 1); }

__device__ __forceinline__ void store_strip(const float (&d)[4][2][4], u32 to, u32 pitch) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 r[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) r[2 * n + h] = pack_half(d[i][n][2 * h], d[i][n][2 * h + 1]);
    }
    store_matrix4(to + 16 * i * pitch, r);
  }
}

// 16 channels and 16 values of a chunk, from the stage and back into it.
__device__ __forceinline__ void compute_strip(u32 stage, int rows, int strip, const Lane& l) {
  const u32 keys = stage + K_AT + l.half + 32 * strip, values = stage + V_AT + l.half + 32 * strip;
  const u32 gates = stage + G_AT + l.gate + 64 * strip, beta = stage + BETA_AT + 8 * l.t;
  const u32 end = gates + (rows - 1 - 2 * l.t) * FLOAT_PITCH;
  const float last[2] = {load_shared1(end), load_shared1(end + 32)};
  float w[4][2][4] = {}, u[4][2][4] = {};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    // Lane's tokens 2t, 2t + 1 and 8 later, channels g and 8 later.
    u32 k[4], v[4], high[4], rest[4];
    load_matrix4_transposed(k, keys + 16 * m * HALF_PITCH);
    load_matrix4_transposed(v, values + 16 * m * HALF_PITCH);
    const float2 betas[2] = {load_shared2(beta + 64 * m), load_shared2(beta + 64 * m + 32)};
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const u32 at = gates + (16 * m + 8 * (x & 1)) * FLOAT_PITCH + 32 * (x >> 1);
      const float sum0 = load_shared1(at), sum1 = load_shared1(at + FLOAT_PITCH), down0 = exp2_fast(sum0), down1 = exp2_fast(sum1);
      const float y0 = half_low(k[x]) * down0 * betas[x & 1].x, y1 = half_high(k[x]) * down1 * betas[x & 1].y;
      high[x] = pack_half(y0, y1);
      rest[x] = pack_half(y0 - half_low(high[x]), y1 - half_high(high[x]));
      k[x] = scaled(k[x], exp2_fast(last[x >> 1] - sum0), exp2_fast(last[x >> 1] - sum1));
      v[x] = scaled(v[x], betas[x & 1].x, betas[x & 1].y);
    }
    store_matrix4_transposed(keys + 16 * m * HALF_PITCH, k);
#pragma unroll
    for (int i = m; i < 4; ++i) {
      u32 a[4];
      load_matrix4(a, stage + inverse_at(16 * i) + (l.lane & 15) * (i < 2 ? SHORT_PITCH : LONG_PITCH) + 32 * m + 16 * (l.lane >> 4));
      if (i == m) a[2] = 0;  // right of the diagonal
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_half(w[i][n], a, rest[2 * n], rest[2 * n + 1]);
        mma_half(u[i][n], a, v[2 * n], v[2 * n + 1]);
        mma_half(w[i][n], a, high[2 * n], high[2 * n + 1]);
      }
    }
  }
  sync_warp();  // w takes the place of decays that other lanes have read
  store_strip(u, values, HALF_PITCH);
  store_strip(w, stage + G_AT + (l.lane & 15) * FLOAT_PITCH + 16 * (l.lane >> 4) + strip_of_w(strip), FLOAT_PITCH);
}

// This warp's rows of a result, whole: two at a time.
struct Leaving {
  uint4 x[C / 2 / TEAM];
};
__device__ __forceinline__ void load_rows(Leaving& r, u32 from, u32 pitch) {
#pragma unroll
  for (int n = 0; n < C / 2 / TEAM; ++n) r.x[n] = load_shared_u4(from + 2 * TEAM * n * pitch);
}
__device__ __forceinline__ void store_rows(const Leaving& r, u64 to, long long step, int left) {
#pragma unroll
  for (int n = 0; n < C / 2 / TEAM; ++n) {
    if (2 * TEAM * n < left) store_global(reinterpret_cast<void*>(to), r.x[n]);
    to += 2 * TEAM * step;
  }
}

__device__ __forceinline__ void consume(const RecomputeParams& p, u32 shared, int warp) {
  const int lane = thread_index() & 31, team = warp / TEAM, mine = warp - team * TEAM, t = lane & 3;
  const Lane l = {lane, t, (lane & 15) * HALF_PITCH + 16 * (lane >> 4), 2 * t * FLOAT_PITCH + 4 * (lane >> 2)};
  const int row = 2 * mine + (lane >> 4), piece = lane & 15;
  const long long step = 2ll * p.HV * K;
  Chunks ring = {shared, (u32)team};
#pragma unroll 1
  while (true) {
    ring.wait_full();
    if (ONCE) sync_warp();  // other lanes have asked for what this one reads
    const u32 stage = ring.stage();
    const uint4 info = load_shared_u4(stage + INFO_AT);
    const int rows = (int)info.x;
    if (!rows) return;
#pragma unroll 1
    for (int i = 0; i < STRIPS; ++i) compute_strip(stage, rows, mine + TEAM * i, l);
    sync_threads(1 + team, 32 * TEAM);
    const u64 at = ((u64)info.w << 32 | info.z) + row * step + 16 * piece;
    const u32 halves = stage + row * HALF_PITCH + 16 * piece;
    Leaving kg, u, w;
    load_rows(kg, halves + K_AT, HALF_PITCH);
    load_rows(u, halves + V_AT, HALF_PITCH);
    load_rows(w, stage + G_AT + row * FLOAT_PITCH + piece_of_w(piece), FLOAT_PITCH);
    if (!ONCE) warp_arrive(ring.empty(), lane);
    store_rows(kg, p.kg + at, step, rows - row);
    store_rows(u, p.u + at, step, rows - row);
    store_rows(w, p.w + at, step, rows - row);
    if (ONCE) return;
#pragma unroll
    for (int n = 0; n < TEAMS; ++n) ring.next();
  }
}

KDA_KERNEL(THREADS, MIN_BLOCKS) recompute_ring(KDA_PARAM RecomputeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  const int warp = uniform(thread_index() >> 5);
  make_barriers(shared);
  wait_for_inputs();
  if (ONCE) feed(p, shared, thread_index());
  if (warp < TEAMS * TEAM) consume(p, shared, warp);
  else feed(p, shared, thread_index() - 32 * TEAMS * TEAM);
}
