// The gated delta rule in one launch on Hopper: every block makes records and walks, both at the same time, with warps of
// its own for each. The same outputs as those of chunk_records and walk_records, bit for bit.
//
// Records go through device memory, where a block's walks find those of all blocks: units (chunks of a key head) are
// given out by tickets, in the order of unit_order.cuh, as blocks have time for them. A record's flags say that it has
// arrived. Walks are shared out beforehand: the block's halves of states, one after another.
//
// Those that make records wait for nobody, and take units until none is left. So walks wait only for records that some
// block which runs makes or will make, also where not all blocks run at once, and there is no deadlock.
//
// Grid: one block for each multiprocessor, or fewer. Warps: four that walk and four that load for them (walk_block.cuh),
// then eight that make a unit (unit_records.cuh).
//
// Macros from the host: WARPGROUPS, 1.
#include "sm90/gated_delta/flagged_records.cuh"
#include "sm90/gated_delta/place_threads.cuh"
#include "sm90/gated_delta/unit_order.cuh"
#include "sm90/gated_delta/walk_forward.cuh"
#include "sm90/ticket_counter.cuh"

static_assert(WARPGROUPS == 1, "half a state");
constexpr int BLOCK_THREADS = THREADS + UNIT_THREADS, RING_STAGES = 2;
// Of a thread: to begin with, and of each role.
constexpr int ALL_START = 65536 / BLOCK_THREADS, WALKING = 232, LOADING = 56, MAKING = 112;
static_assert(128 * (WALKING + LOADING) + UNIT_THREADS * MAKING <= 65536, "more than a multiprocessor has");

// The unit of a ticket. rows: below 0 where there is none.
struct alignas(16) SharedUnit {
  int h, rows;
  long long slot, batch, first;
};
struct BlockMemory {
  ForwardMemory<false, RING_STAGES> walk;
  alignas(1024) UnitMemory unit;
  OrderTable order;
  SharedUnit units[2];  // by turns
};
KDA_SHARED_BYTES(sizeof(BlockMemory));

// Sequences of a group of the order: as many as are walked at a time. Each role finds it anew.
__device__ __forceinline__ int sequences_together(const GatedDeltaParams& p) {
  const int items = PARTS * p.HV, together = (opaque(grid_blocks()) + items / 2) / items;
  return together < 1 ? 1 : together < p.N ? together : p.N;
}

// Tickets are positions of the order; each block draws one behind the last.
__device__ __forceinline__ TicketCounter<20> unit_tickets(const GatedDeltaBesideParams& p) {
  return {p.tickets, (u64)p.launch};
}
// One warp: the unit of the ticket that lane 0 has drawn, to all; its tiles are asked for in L2.
__device__ __forceinline__ void share_unit(const GatedDeltaBesideParams& p, u32 shared, u64 drawn, int turn,
                                           int lane) {
  const u32 order = shared + OFFSET(BlockMemory, order), at = shared + OFFSET(BlockMemory, units) + 32 * turn;
  const int together = sequences_together(p);
  int ticket = 0;
  if (lane == 0)
    ticket = unit_tickets(p).finish(drawn, (u64)ordered_units(p, order, together) + grid_blocks());
  const OrderedUnit x = find_ordered_unit(p, order, together, shuffle(ticket, 0));
  const KeyUnit& u = x.unit;
  const u64 slot = u.slot, batch = u.batch, first = u.first;
  if (lane == 0) {
    store_shared(at, (u32)u.h, x.past ? ~0u : (u32)u.rows, (u32)slot, (u32)(slot >> 32));
    store_shared(at + 16, (u32)batch, (u32)(batch >> 32), (u32)first, (u32)(first >> 32));
  }
  if (x.past) return;
  const int half = lane >> 4 & 1;  // of a row's 128 channels
#pragma unroll 1
  for (int row = lane & 15; row < u.rows; row += 16) {
    prefetch_l2(reinterpret_cast<const void*>(key_tile(p, u) + 2 * row * p.k_st + 128 * half));
    prefetch_l2(reinterpret_cast<const void*>(query_tile(p, u) + 2 * row * p.q_st + 128 * half));
  }
}
__device__ __forceinline__ KeyUnit shared_unit(u32 shared, int turn) {
  const u32 at = shared + OFFSET(BlockMemory, units) + 32 * turn;
  const uint4 x = load_shared_u4(at), y = load_shared_u4(at + 16);
  return {(int)x.x, uniform((int)x.y), (long long)((u64)x.w << 32 | x.z), (long long)((u64)y.y << 32 | y.x),
          (long long)((u64)y.w << 32 | y.z)};
}

__device__ __forceinline__ void make_all_records(const GatedDeltaBesideParams& p, u32 shared, int thread) {
  constexpr int FINDER = 7;  // the warp with the fewest products
  const u32 unit = shared + OFFSET(BlockMemory, unit);
  int turn = 0;
  const auto own_unit = [&] { return shared_unit(shared, turn); };
  PlaceThreads<1, decltype(own_unit)> threads = {p, thread, 0, own_unit};
  const bool finds = uniform(thread >> 5) == FINDER;
  clear_images(unit, thread);
  int rows = 0;  // of the first round, which only finds a unit
#pragma unroll 1
  do {
    threads.thread = opaque(thread);  // addresses are made anew: there are no registers for them
    u64 drawn = 0;
    if (thread == 32 * FINDER) drawn = unit_tickets(p).draw();
    TokenInputs inputs = {};
    if (rows) inputs = fetch_unit(p, own_unit(), unit, threads.thread);
    threads.end_record_before();
    if (finds) share_unit(p, shared, drawn, turn ^ 1, threads.thread & 31);
    if (rows) make_records(p, inputs, unit, threads);
    threads.sync();  // tiles come where pairs and factors were
    turn ^= 1;
    rows = own_unit().rows;
  } while (rows >= 0);
  threads.end_record_before();
}

// Calls f(item) for each of the block's halves of states. Every other round goes backwards, as a pack's sequences come by
// length.
template <class F>
__device__ __forceinline__ void each_item(const GatedDeltaParams& p, u32 order, F f) {
  const int blocks = grid_blocks(), items = PARTS * p.N * p.HV;
  bool back = false;
#pragma unroll 1
  for (int first = 0; first < items; first += blocks, back = !back) {
    const int item = first + (back ? blocks - 1 - block_index() : block_index());
    if (item >= items) continue;
    const int head = item / PARTS;
    int n = head / p.HV;
    const int hv = head - n * p.HV;
    if (p.cu_seqlens) n = load_row(order, n).n;
    f(Item{find_read_sequence(p, n), n, hv, item % PARTS});
  }
}

KDA_KERNEL(BLOCK_THREADS, 1) walk_making_records(KDA_PARAM GatedDeltaBesideParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory), order = shared + OFFSET(BlockMemory, order);
  const int warp = uniform(thread_index() >> 5);
  wait_for_inputs();
  if (p.cu_seqlens && warp == 0) make_order(p, order, sequences_together(p), thread_index());
  make_forward_barriers(shared);
  if (warp < STATE_WARPS) {
    set_registers<WALKING, ALL_START>();
    const u32 own = shared + OFFSET(BlockMemory, walk.staging) + warp * STAGING_BYTES<false>;
    StageRing<RING_STAGES> ring = {shared};
    each_item(p, order, [&](const Item& x) {
      ring = carry_state<false>(p, x, ring, own, make_lane(warp, x.part));
    });
  } else if (warp < STATE_WARPS + LOAD_WARPS) {
    set_registers<LOADING, ALL_START>();
    const int thread = thread_index() - 32 * STATE_WARPS;
    StageRing<RING_STAGES> ring = {shared};
    each_item(p, order,
              [&](const Item& x) { ring = load_forward(p, FlaggedRecords{p}, x, ring, thread); });
    clear_unused_rows(
        p, value_row_bytes(p),
        {(u32)(32 * LOAD_WARPS * block_index() + thread), (u32)(32 * LOAD_WARPS * grid_blocks())});
  } else {
    set_registers<MAKING, ALL_START>();
    make_all_records(p, shared, thread_index() - THREADS);
  }
}
