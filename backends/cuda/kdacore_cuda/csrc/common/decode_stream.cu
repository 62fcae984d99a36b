// fused_recurrent_kda for one token a sequence and many sequences: a stream of states through shared memory.
//
// A block walks over (sequence, head, 64 columns of V) in steps of the grid. While four warps compute one item, the states
// of the next two are on their way and a fifth warp makes the next item's token ready, so device memory never waits for
// arithmetic. Two neighbouring lanes own a column of V, half of K each; states leave as they came, in 16-byte pieces of
// whole lines.
#include "common/decode_token.cuh"

// Macros from the host: K_DIM, V_FIRST, STATE_BF16 (0).
constexpr int COLUMNS = 64;
constexpr int COMPUTE_WARPS = 4;
constexpr int THREADS = 32 * (COMPUTE_WARPS + 1);
constexpr int HALF = K / 2;
constexpr int BUFFERS = 3;
constexpr int PIECES = K * COLUMNS / 4;                          // of 16 bytes, an item
constexpr int ROW_PIECES = V_FIRST ? K / 4 : COLUMNS / 4;        // an item's contiguous run in device memory
constexpr u32 BUFFER_BYTES = 16 * PIECES;
constexpr u32 TOKENS_AT = BUFFERS * BUFFER_BYTES;

struct Item {
  long long from, to;  // pool rows, -1: none
  int n, hv, slice;
  bool real;
};

__device__ __forceinline__ Item make_item(const DecodeParams& p, int index) {
  constexpr int slices = V / COLUMNS;
  Item item;
  item.real = index < p.N * p.HV * slices;
  item.slice = index % slices;
  item.hv = index / slices % p.HV;
  item.n = index / slices / p.HV;
  item.from = item.to = -1;
  if (!item.real) return item;
  item.from = start_row(p, item.n);
  if (p.ht) item.to = p.flags & FLAG_INDEXED_OUT ? item.from : item.n;
  return item;
}

// Byte offset of piece `i` of an item in one head's [K, V] or [V, K] matrix.
__device__ __forceinline__ long long piece_offset(const Item& item, int i) {
  const int row = i / ROW_PIECES, piece = i % ROW_PIECES;
  return V_FIRST ? 4ll * K * (COLUMNS * item.slice + row) + 16 * piece : 4ll * (V * row + COLUMNS * item.slice) + 16 * piece;
}
// Where it lies in a buffer. The two lanes of a column read their halves at once, and so do neighbouring columns: the
// second half of K is shifted by 64 bytes, rows of V are swizzled as well.
__device__ __forceinline__ u32 piece_place(int i) {
  const int row = i / ROW_PIECES, piece = i % ROW_PIECES;
#if V_FIRST
  return 16 * (row * ROW_PIECES + (piece ^ (row & (ROW_PIECES - 1)) ^ (piece >= HALF / 4 ? 4 : 0)));
#else
  return 16 * (row * ROW_PIECES + (piece ^ (row >= HALF ? 4 : 0)));
#endif
}

__device__ __forceinline__ void fetch(const DecodeParams& p, const Item& item, u32 buffer) {
  if (item.real) {
    const bool some = item.from >= 0;
    const u64 base = some ? p.h0 + 4 * (item.from * p.h0_row + (long long)item.hv * K * V) : p.q;  // q: valid, not read
#pragma unroll 4
    for (int i = thread_index(); i < PIECES; i += THREADS) {
      copy_async16(buffer + piece_place(i), reinterpret_cast<const void*>(base + (some ? piece_offset(item, i) : 0)), some);
    }
  }
  copy_async_commit();
}

__device__ __forceinline__ void store(const DecodeParams& p, const Item& item, u32 buffer) {
  if (item.to < 0) return;
  const u64 base = p.ht + 4 * (item.to * p.ht_row + (long long)item.hv * K * V);
#pragma unroll 4
  for (int i = thread_index(); i < PIECES; i += THREADS) {
    store_global(reinterpret_cast<void*>(base + piece_offset(item, i)), load_shared_u4(buffer + piece_place(i)));
  }
}

// A lane's half of a column; element j is channel HALF * half + j with neighbouring groups of four swapped in the second
// half, which spreads what the two lanes of a column read of a token over the banks.
struct Column {
  float s[HALF];
  int column, half;
};

// Start of the half in units of `step` bytes a channel, for groups of four that are swapped forward and backward. Two bases
// and constant offsets, rather than an address for every element.
struct Bases {
  u32 at[2];
};
__device__ __forceinline__ Bases half_bases(u32 base, int half, u32 step) {
  const u32 start = base + half * HALF * step;
  return {{start + half * 4 * step, start - half * 4 * step}};
}

#if V_FIRST
// Piece `c` of the half: 16-byte pieces of a row of V, swizzled as piece_place says.
__device__ __forceinline__ u32 half_piece(const Column& x, u32 buffer, int c) {
  const int swizzle = (x.column & (ROW_PIECES - 1)) ^ (x.half * (HALF / 4 ^ 5));
  return buffer + 16 * (x.column * ROW_PIECES + (c ^ swizzle));
}

__device__ __forceinline__ void read_column(Column& x, u32 buffer) {
#pragma unroll
  for (int c = 0; c < HALF / 4; ++c) {
    const float4 y = load_shared4(half_piece(x, buffer, c));
    x.s[4 * c] = y.x, x.s[4 * c + 1] = y.y, x.s[4 * c + 2] = y.z, x.s[4 * c + 3] = y.w;
  }
}
__device__ __forceinline__ void write_column(const Column& x, u32 buffer) {
#pragma unroll
  for (int c = 0; c < HALF / 4; ++c) {
    store_shared(half_piece(x, buffer, c), __float_as_uint(x.s[4 * c]), __float_as_uint(x.s[4 * c + 1]),
                 __float_as_uint(x.s[4 * c + 2]), __float_as_uint(x.s[4 * c + 3]));
  }
}
#else
__device__ __forceinline__ Bases column_bases(const Column& x, u32 buffer) {
  return half_bases(buffer + 4 * (x.column ^ 16 * x.half), x.half, 4 * COLUMNS);
}

__device__ __forceinline__ void read_column(Column& x, u32 buffer) {
  const Bases from = column_bases(x, buffer);
#pragma unroll
  for (int j = 0; j < HALF; ++j) x.s[j] = load_shared1(from.at[j >> 2 & 1] + 4 * COLUMNS * j);
}
__device__ __forceinline__ void write_column(const Column& x, u32 buffer) {
  const Bases to = column_bases(x, buffer);
#pragma unroll
  for (int j = 0; j < HALF; ++j) store_shared(to.at[j >> 2 & 1] + 4 * COLUMNS * j, __float_as_uint(x.s[j]));
}
#endif

// One token: decay, delta rule; the output of the column, in both of its lanes.
__device__ __forceinline__ float step(Column& x, u32 token, float v) {
  const Bases from = half_bases(token, x.half, 4);
  float dot[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < HALF; j += 4) {
    const u32 at = from.at[j >> 2 & 1] + 4 * j;
    const float4 k = load_shared4(at + 4 * K), d = load_shared4(at + 8 * K);
    dot[0] += k.x * (x.s[j] *= d.x);
    dot[1] += k.y * (x.s[j + 1] *= d.y);
    dot[2] += k.z * (x.s[j + 2] *= d.z);
    dot[3] += k.w * (x.s[j + 3] *= d.w);
  }
  float sum = (dot[0] + dot[1]) + (dot[2] + dot[3]);
  sum += shuffle_xor(sum, 1);
  const float u = load_shared1(token + 12 * K) * (v - sum);
  float o[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < HALF; j += 4) {
    const u32 at = from.at[j >> 2 & 1] + 4 * j;
    const float4 k = load_shared4(at + 4 * K), q = load_shared4(at);
    o[0] += q.x * (x.s[j] += k.x * u);
    o[1] += q.y * (x.s[j + 1] += k.y * u);
    o[2] += q.z * (x.s[j + 2] += k.z * u);
    o[3] += q.w * (x.s[j + 3] += k.w * u);
  }
  sum = (o[0] + o[1]) + (o[2] + o[3]);
  return sum + shuffle_xor(sum, 1);
}

__device__ __forceinline__ float load_value(const DecodeParams& p, const Item& item, int column) {
  if (!item.real) return 0.0f;
  return load_scalar(p.v, item.n * p.v_sb + item.hv * p.v_sh + COLUMNS * item.slice + column, p.qkv_type);
}

__device__ __forceinline__ void ready_token(const DecodeParams& p, const Item& item, int lane, u32 to) {
  if (item.real) prepare_token(p, {0, 1, item.n}, 0, item.hv, lane, to);
}

KDA_KERNEL(THREADS, 2) decode_stream(KDA_PARAM DecodeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory), tokens = shared + TOKENS_AT;
  const int lane = thread_index() & 31, warp = thread_index() >> 5, column = thread_index() >> 1;
  int index = block_index();
  Item item = make_item(p, index), next = make_item(p, index + p.blocks);
  fetch(p, item, shared);
  fetch(p, next, shared + BUFFER_BYTES);
  if (warp == COMPUTE_WARPS) ready_token(p, item, lane, tokens);
  float v = warp < COMPUTE_WARPS ? load_value(p, item, column) : 0.0f;
  for (int turn = 0, buffer = 0; item.real; ++turn) {
    index += p.blocks;
    const Item later = make_item(p, index + p.blocks);
    const u32 here = shared + buffer * BUFFER_BYTES;
    fetch(p, later, shared + (buffer + 2) % BUFFERS * BUFFER_BYTES);
    const float next_v = warp < COMPUTE_WARPS ? load_value(p, next, column) : 0.0f;
    copy_async_wait<2>();
    sync_block();
    if (warp < COMPUTE_WARPS) {
      Column x;
      x.column = column;
      x.half = opaque(lane & 1);  // or addresses would be kept in registers from one item to the next
      read_column(x, here);
      const float o = step(x, tokens + 4 * TOKEN_FLOATS * (turn & 1), v);
      if (x.half == 0) {
        store_scalar(p.o, ((long long)item.n * p.HV + item.hv) * V + COLUMNS * item.slice + column, p.qkv_type, o);
      }
      if (item.to >= 0) write_column(x, here);
    } else if (warp == COMPUTE_WARPS) {
      ready_token(p, next, lane, tokens + 4 * TOKEN_FLOATS * (turn + 1 & 1));
    }
    sync_block();
    store(p, item, here);
    item = next;
    next = later;
    v = next_v;
    buffer = (buffer + 1) % BUFFERS;
  }
  copy_async_wait<0>();
}
