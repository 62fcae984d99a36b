// fused_recurrent_kda: the recurrence token by token, the state in registers, read and written once.
//
// A block takes one sequence and value head and COLUMNS columns of V. How lanes hold the state follows its layout, so that
// a warp always reads whole 128-byte lines: state_columns.cuh, state_rows.cuh. Decays, normalisation and sigmoids of up to
// 16 tokens are computed together, one warp a token, into shared memory, while the state is on its way.
#include "common/decode_token.cuh"

// Macros from the host: K_DIM, WARPS, MIN_BLOCKS, V_FIRST, STATE_BF16.
constexpr int COLUMNS = 16 * WARPS;
constexpr int TOKENS = 16;

#if V_FIRST
#include "common/state_rows.cuh"
#else
#include "common/state_tiles.cuh"
#endif

KDA_KERNEL(WARPS * 32, MIN_BLOCKS) decode(KDA_PARAM DecodeParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory), tokens = shared + SUMS_BYTES;
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  constexpr int slices = V / COLUMNS;
  const int slice = block_index() % slices, item = block_index() / slices;
  const int hv = item % p.HV, n = item / p.HV;
  const Sequence s = sequence_of(p, n);
  const long long head = (long long)hv * K * V;
  const Place place = make_place(slice * COLUMNS, warp, lane, shared);
  const int block_tokens = p.T < TOKENS ? (int)p.T : TOKENS;

  // Tokens first: the state waits for the index of its row, and what is behind it in the queue would wait as well.
  const long long from = start_row(p, n);
  const bool early = warp < block_tokens && warp < s.length;
  RawToken raw = {};
  if (early) raw = load_token(p, s, s.first + warp, hv, lane);
  State state;
  if (from >= 0) {
    load_state(state, place, p.h0, from * p.h0_row + head);
  } else {
    clear_state(state);
  }
  for (long long t0 = 0; t0 < s.length; t0 += block_tokens) {
    const int count = s.length - t0 < block_tokens ? (int)(s.length - t0) : block_tokens;
    if (t0) sync_block();
    for (int i = warp; i < count; i += WARPS) {
      if (t0 || i != warp) raw = load_token(p, s, s.first + t0 + i, hv, lane);
      finish_token(p, raw, lane, tokens + 4 * TOKEN_FLOATS * i);
    }
    const long long v_at = s.batch * p.v_sb + (s.first + t0) * p.v_st + hv * p.v_sh + place.v;
    Values v = load_values(p.v, v_at, p.qkv_type);
    sync_block();
    for (int i = 0; i < count; ++i) {
      Values next = v;
      if (i + 1 < count) next = load_values(p.v, v_at + (i + 1) * p.v_st, p.qkv_type);
      const auto o = step(state, place, tokens + 4 * TOKEN_FLOATS * i, values_of(v, p.qkv_type));
      v = next;
      if (place.writes) {
        const long long row = s.batch * p.T + s.first + t0 + i;
        store_values(p.o, (row * p.HV + hv) * V + place.v, p.qkv_type, o);
      }
      if (p.flags & FLAG_SCATTER_TOKENS) {
        const long long to = load_index(p.indices, n * p.indices_row + t0 + i, p.flags & FLAG_INDEX64);
        if (to >= 0) store_state(state, place, p.ht, to * p.ht_row + head);
      }
    }
  }
  if (!p.ht || (p.flags & FLAG_SCATTER_TOKENS)) return;
  const long long to = p.flags & FLAG_INDEXED_OUT ? from : n;
  if (to >= 0) store_state(state, place, p.ht, to * p.ht_row + head);
}
