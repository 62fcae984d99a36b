// Gates without a bound: the triangles' levels to the image and to scratch. Part of solve.cuh.

__device__ __forceinline__ void store_pair(u32 stage, u32 scratch, int half, int i, int j, float kk, float qk) {
  const u32 norms = stage + SCALARS_AT + 4 * HALF * half;
  const float factor = load_shared1(norms + 4 * i) * load_shared1(norms + 4 * C + 4 * i) * load_shared1(norms + 4 * C + 4 * j);
  store_shared(scratch + 4 * (SCRATCH_PITCH * i + j), __float_as_uint(kk * factor));
  store_shared16(stage + Q_AT + TRIANGLE_BYTES * half + (j >> 3) * 256 + i * 16 + (j & 7) * 2, pack_bf16(qk, 0.0f));
}

__device__ __forceinline__ void store_triangles(u32 stage, u32 scratch, int half, const Lane& l, const Scalars& s, Products& sums) {
#pragma unroll
  for (int i = 0; i < SCRATCH_PITCH * HALF / 4; i += 32) {
    if (i + l.lane < SCRATCH_PITCH * HALF / 4) store_shared(scratch + 16 * (i + l.lane), 0u, 0u, 0u, 0u);
  }
  store_shared(stage + Q_AT + TRIANGLE_BYTES * half + 16 * l.lane, 0u, 0u, 0u, 0u);
  sync_warp();
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const int bit = level ? 1 << (level - 1) : 0;
    const int i = level ? 2 * (l.p | bit) + ((l.p & bit) != 0) : 2 * l.p + 1;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int n = pair_of(2 * l.t + c);
      const int j = level ? 2 * (n & ~bit) + ((n & bit) != 0) : 2 * n;
      if (l.p >> level == n >> level) store_pair(stage, scratch, half, i, j, sums.tile[level][c], sums.tile[level][2 + c]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x = sums.diagonal[i];
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    const int row = 2 * l.p + i;
    if (l.t == 0) store_shared16(stage + Q_AT + TRIANGLE_BYTES * half + (row >> 3) * 256 + row * 16 + (row & 7) * 2, pack_bf16(x, 0.0f));
  }
}
