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

struct BlockMemory {
  ForwardMemory<false, RING_STAGES> walk;
  alignas(1024) UnitMemory unit;
  OrderTable order;
  alignas(16) int tickets[2][4];  // by turns; the first number of each
};
KDA_SHARED_BYTES(sizeof(BlockMemory));

// Tickets are positions of the order; each block draws one behind the last.
struct UnitTickets {
  TicketCounter<20> counter;
  u64 draws;
  u32 at;  // the block's tickets
  __device__ __forceinline__ void share(u64 drawn, int turn) const {
    store_shared(at + 16 * turn, (u32)counter.finish(drawn, draws));
  }
  __device__ __forceinline__ int shared(int turn) const {
    return uniform((int)__float_as_uint(load_shared1(at + 16 * turn)));
  }
};

__device__ __forceinline__ void make_all_records(const GatedDeltaBesideParams& p, u32 shared, int together,
                                                 const UnitTickets& tickets, int thread) {
  const u32 unit = shared + OFFSET(BlockMemory, unit), order = shared + OFFSET(BlockMemory, order);
  PlaceThreads<1> threads = {p, thread, 0};
  if (thread == 0) tickets.share(tickets.counter.draw(), 0);
  clear_images(unit, thread);
  threads.sync();
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const OrderedUnit x = find_ordered_unit(p, order, together, tickets.shared(turn));
    if (x.past) break;
    u64 drawn = 0;
    if (thread == 0) drawn = tickets.counter.draw();
    TokenInputs inputs = {};
    if (x.unit.rows) inputs = fetch_unit(p, x.unit, unit, thread);
    threads.end_record_before();
    if (thread == 0) tickets.share(drawn, turn ^ 1);
    if (x.unit.rows) make_records(p, x.unit, inputs, unit, threads);
    threads.sync();  // tiles come where pairs and factors were
  }
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
  // As many sequences as are walked at a time.
  const int of_sequence = PARTS * p.HV, rounded = (grid_blocks() + of_sequence / 2) / of_sequence;
  const int together = rounded < 1 ? 1 : rounded < p.N ? rounded : p.N;
  wait_for_inputs();
  if (p.cu_seqlens && warp == 0) make_order(p, order, together, thread_index());
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
    const u64 draws = (u64)ordered_units(p, order, together) + grid_blocks();
    const UnitTickets tickets = {{p.tickets, (u64)p.launch}, draws, shared + OFFSET(BlockMemory, tickets)};
    make_all_records(p, shared, together, tickets, thread_index() - THREADS);
  }
}
