// Tickets for the clusters of a launch: ticket_counter.cuh.
#pragma once

#include "generated/chunk_forward_params.cuh"
#include "generated/steps.cuh"
#include "sm90/chunk_forward/shared_memory.cuh"
#include "sm90/ticket_counter.cuh"

__device__ __forceinline__ TicketCounter<12> cluster_tickets(const ChunkForwardParams& p) {
  return {p.workspace, (u64)p.launch};
}

// To the same place of all blocks of the cluster, which have begun.
__device__ __forceinline__ void share_ticket(u32 at, int ticket) {
#pragma unroll
  for (u32 rank = 0; rank < CLUSTER; ++rank) store_cluster_shared(cluster_address(at, rank), ticket);
}
