// fused_recurrent_kda for one token a sequence and many sequences: a stream of states through shared memory.
//
// A block walks over (sequence, head, 64 columns of V) in steps of the grid. While eight warps compute one item, the states
// of the next two are on their way and a ninth warp makes the next item's token ready, so device memory never waits for
// arithmetic. Four neighbouring lanes own a column of V, a quarter of K each; states leave as they came, in 16-byte pieces
// of whole lines.
#include "common/decode_token.cuh"

// Macros from the host: K_DIM, V_FIRST, STATE_BF16 (0).
constexpr int COLUMNS = 64;
constexpr int PARTS = 4;
constexpr int PART = K / PARTS;
constexpr int COMPUTE_WARPS = COLUMNS * PARTS / 32;
constexpr int THREADS = 32 * (COMPUTE_WARPS + 1);
constexpr int BUFFERS = 3;
constexpr int PIECES = K * COLUMNS / 4;                          // of 16 bytes, an item
constexpr int ROW_PIECES = V_FIRST ? K / 4 : COLUMNS / 4;        // an item's contiguous run in device memory
constexpr u32 BUFFER_BYTES = 16 * PIECES;
constexpr u32 TOKENS_AT = BUFFERS * BUFFER_BYTES;

struct Item {
  int n, hv, slice;
  bool real;
};

__device__ __forceinline__ Item make_item(const DecodeParams& p, int index) {
  constexpr u32 slices = V / COLUMNS;
  const u32 head = (u32)index / slices, n = head / (u32)p.HV;
  return {(int)n, (int)(head - n * p.HV), (int)((u32)index % slices), index < p.N * p.HV * (int)slices};
}

// An item's entry of the index array as it lies in memory, and the pool row it means, -1 for none.
struct RawRow {
  u32 low, high;
};
__device__ __forceinline__ RawRow load_row(const DecodeParams& p, const Item& item) {
  RawRow raw = {(u32)item.n, 0};
  if (!item.real || !p.indices) return raw;
  const bool wide = p.flags & FLAG_INDEX64;
  const u32* from = reinterpret_cast<const u32*>(p.indices + (wide ? 8 : 4) * (item.n * p.indices_row));
  raw.low = from[0];
  if (wide) raw.high = from[1];
  return raw;
}
__device__ __forceinline__ long long row_of(const DecodeParams& p, const RawRow& raw) {
  if (!p.h0) return -1;
  return p.flags & FLAG_INDEX64 ? (long long)((u64)raw.high << 32 | raw.low) : (long long)(int)raw.low;
}

// Byte offset of piece `i` of an item in one head's [K, V] or [V, K] matrix.
__device__ __forceinline__ long long piece_offset(const Item& item, u32 i) {
  const u32 row = i / ROW_PIECES, piece = i % ROW_PIECES;
  return V_FIRST ? 4ll * K * (COLUMNS * item.slice + row) + 16 * piece : 4ll * (V * row + COLUMNS * item.slice) + 16 * piece;
}
// Where it lies in a buffer. The four lanes of a column read their parts at once, and so do neighbouring columns: parts of
// K are shifted by 32 bytes each, rows of V are swizzled as well.
__device__ __forceinline__ u32 piece_place(u32 i) {
  const u32 row = i / ROW_PIECES, piece = i % ROW_PIECES;
#if V_FIRST
  return 16 * (row * ROW_PIECES + (piece ^ (row & (ROW_PIECES - 1)) ^ 2 * (piece / (PART / 4))));
#else
  return 16 * (row * ROW_PIECES + (piece ^ 2 * (row / PART)));
#endif
}

__device__ __forceinline__ void fetch(const DecodeParams& p, const Item& item, long long row, u32 buffer) {
  if (item.real) {
    const bool some = row >= 0;
    const u64 base = some ? p.h0 + 4 * (row * p.h0_row + (long long)item.hv * K * V) : p.q;  // q: valid, not read
#pragma unroll 4
    for (u32 i = (u32)opaque(thread_index()); i < PIECES; i += THREADS) {
      copy_async16(buffer + piece_place(i), reinterpret_cast<const void*>(base + (some ? piece_offset(item, i) : 0)), some);
    }
  }
  copy_async_commit();
}

__device__ __forceinline__ void store(const DecodeParams& p, const Item& item, long long row, u32 buffer) {
  if (row < 0) return;
  const u64 base = p.ht + 4 * (row * p.ht_row + (long long)item.hv * K * V);
#pragma unroll 4
  for (u32 i = (u32)opaque(thread_index()); i < PIECES; i += THREADS) {
    store_global(reinterpret_cast<void*>(base + piece_offset(item, i)), load_shared_u4(buffer + piece_place(i)));
  }
}

// A lane's part of a column. Element j is channel PART * part + (j ^ 4 * part): what the four lanes of a column read of a
// token then lies in different banks.
struct Column {
  float s[PART];
  int column, part;
};

// Bytes from `base` to element j when channels are `step` bytes apart: one base for each group of four in sixteen, and
// constant offsets, rather than an address for every element.
struct Bases {
  u32 at[4];
};
__device__ __forceinline__ Bases part_bases(u32 base, int part, int step) {
  Bases b;
#pragma unroll
  for (int i = 0; i < 4; ++i) b.at[i] = base + (PART * part + 4 * ((i ^ part) - i)) * step;
  return b;
}

#if V_FIRST
// Piece `c` of the part: 16-byte pieces of a row of V, swizzled as piece_place says.
__device__ __forceinline__ u32 part_piece(const Column& x, u32 buffer, int c) {
  const int piece = PART / 4 * x.part + (c ^ x.part);
  return buffer + 16 * (x.column * ROW_PIECES + (piece ^ (x.column & (ROW_PIECES - 1)) ^ 2 * x.part));
}

__device__ __forceinline__ void read_column(Column& x, u32 buffer) {
#pragma unroll
  for (int c = 0; c < PART / 4; ++c) {
    const float4 y = load_shared4(part_piece(x, buffer, c));
    x.s[4 * c] = y.x, x.s[4 * c + 1] = y.y, x.s[4 * c + 2] = y.z, x.s[4 * c + 3] = y.w;
  }
}
__device__ __forceinline__ void write_column(const Column& x, u32 buffer) {
#pragma unroll
  for (int c = 0; c < PART / 4; ++c) {
    store_shared(part_piece(x, buffer, c), __float_as_uint(x.s[4 * c]), __float_as_uint(x.s[4 * c + 1]),
                 __float_as_uint(x.s[4 * c + 2]), __float_as_uint(x.s[4 * c + 3]));
  }
}
#else
__device__ __forceinline__ Bases column_bases(const Column& x, u32 buffer) {
  return part_bases(buffer + 4 * (x.column ^ 8 * x.part), x.part, 4 * COLUMNS);
}

__device__ __forceinline__ void read_column(Column& x, u32 buffer) {
  const Bases from = column_bases(x, buffer);
#pragma unroll
  for (int j = 0; j < PART; ++j) x.s[j] = load_shared1(from.at[j >> 2 & 3] + 4 * COLUMNS * j);
}
__device__ __forceinline__ void write_column(const Column& x, u32 buffer) {
  const Bases to = column_bases(x, buffer);
#pragma unroll
  for (int j = 0; j < PART; ++j) store_shared(to.at[j >> 2 & 3] + 4 * COLUMNS * j, __float_as_uint(x.s[j]));
}
#endif

// One token: decay, delta rule; the output of the column, in all its lanes.
__device__ __forceinline__ float step(Column& x, u32 token, float v) {
  const Bases from = part_bases(token, x.part, 4);
  float dot = 0.0f;
#pragma unroll
  for (int j = 0; j < PART; j += 4) {
    const u32 at = from.at[j >> 2 & 3] + 4 * j;
    const float4 k = load_shared4(at + 4 * K), d = load_shared4(at + 8 * K);
    dot += (k.x * (x.s[j] *= d.x) + k.y * (x.s[j + 1] *= d.y)) + (k.z * (x.s[j + 2] *= d.z) + k.w * (x.s[j + 3] *= d.w));
  }
  dot += shuffle_xor(dot, 1);
  dot += shuffle_xor(dot, 2);
  const float u = load_shared1(token + 12 * K) * (v - dot);
  float o = 0.0f;
#pragma unroll
  for (int j = 0; j < PART; j += 4) {
    const u32 at = from.at[j >> 2 & 3] + 4 * j;
    const float4 k = load_shared4(at + 4 * K), q = load_shared4(at);
    o += (q.x * (x.s[j] += k.x * u) + q.y * (x.s[j + 1] += k.y * u)) + (q.z * (x.s[j + 2] += k.z * u) + q.w * (x.s[j + 3] += k.w * u));
  }
  o += shuffle_xor(o, 1);
  return o + shuffle_xor(o, 2);
}

__device__ __forceinline__ u32 load_value(const DecodeParams& p, const Item& item, int column) {
  if (!item.real) return 0;
  const long long at = item.n * p.v_sb + item.hv * p.v_sh + COLUMNS * item.slice + column;
  return load_bits(p.v + type_size(p.qkv_type) * at, p.qkv_type);
}

__device__ __forceinline__ RawToken load_item_token(const DecodeParams& p, const Item& item, int lane) {
  return item.real ? load_token(p, {0, 1, item.n}, 0, item.hv, lane) : RawToken{};
}

// The part of a turn that differs by warp: columns of the state, or the next item's token. What a turn uses was loaded in
// the one before.
struct Computer {
  int column, part;
  u32 value;
  __device__ __forceinline__ void start(const DecodeParams& p, const Item& item, const Item&, int, u32) {
    value = load_value(p, item, column);
  }
  __device__ __forceinline__ void turn(const DecodeParams& p, const Item& item, const Item& next, const Item&, u32 buffer,
                                       u32 token, u32, int, bool keep) {
    const float v = from_bits(value, p.qkv_type);
    value = load_value(p, next, column);
    Column x;
    x.column = column;
    x.part = opaque(part);  // or addresses would be kept in registers from one item to the next
    read_column(x, buffer);
    const float o = step(x, token, v);
    if (x.part == 0) {
      store_scalar(p.o, ((long long)item.n * p.HV + item.hv) * V + COLUMNS * item.slice + column, p.qkv_type, o);
    }
    if (keep) write_column(x, buffer);
  }
};
struct Preparer {
  RawToken raw;
  __device__ __forceinline__ void start(const DecodeParams& p, const Item& item, const Item& next, int lane, u32 token) {
    finish_token(p, load_item_token(p, item, lane), lane, token);
    raw = load_item_token(p, next, lane);
  }
  __device__ __forceinline__ void turn(const DecodeParams& p, const Item&, const Item&, const Item& later, u32, u32,
                                       u32 next_token, int lane, bool) {
    finish_token(p, raw, lane, next_token);
    raw = load_item_token(p, later, lane);
  }
};

template <class Role>
__device__ __forceinline__ void walk(const DecodeParams& p, u32 shared, Role role) {
  const u32 tokens = shared + TOKENS_AT;
  const int lane = thread_index() & 31;
  int index = block_index() + 2 * p.blocks;
  Item item = make_item(p, block_index()), next = make_item(p, block_index() + p.blocks), later = make_item(p, index);
  RawRow row = load_row(p, item), next_row = load_row(p, next), later_row = load_row(p, later);
  fetch(p, item, row_of(p, row), shared);
  fetch(p, next, row_of(p, next_row), shared + BUFFER_BYTES);
  role.start(p, item, next, lane, tokens);
  for (int turn = 0, buffer = 0; item.real; ++turn) {
    index += p.blocks;
    const Item last = make_item(p, index);
    const u32 here = shared + buffer * BUFFER_BYTES, token = 4 * TOKEN_FLOATS * (turn & 1);
    fetch(p, later, row_of(p, later_row), shared + (buffer + 2) % BUFFERS * BUFFER_BYTES);
    const RawRow last_row = load_row(p, last);
    long long to = -1;
    if (p.ht) to = p.flags & FLAG_INDEXED_OUT ? row_of(p, row) : item.n;
    copy_async_wait<2>();
    sync_block();
    role.turn(p, item, next, later, here, tokens + token, tokens + (4 * TOKEN_FLOATS - token), lane, to >= 0);
    sync_block();
    store(p, item, to, here);
    item = next, next = later, later = last;
    row = next_row, next_row = later_row, later_row = last_row;
    buffer = (buffer + 1) % BUFFERS;
  }
  copy_async_wait<0>();
}

KDA_KERNEL(THREADS, 2) decode_stream(KDA_PARAM DecodeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  if (thread_index() < 32 * COMPUTE_WARPS) {
    walk(p, shared, Computer{thread_index() / PARTS, thread_index() % PARTS, 0});
  } else {
    walk(p, shared, Preparer{});
  }
}
