// The backward in segments. Over a segment of p.segment chunks the state (V by K) and its gradient
// change by affine maps with one matrix A [K, K] and its transpose:
//
//   S_end = S_start A + B;   dS_start = dS_end A^T + B'
//
// Segments begin at fixed tokens of a sequence (chunk_forward/segments/segment.cuh), whatever its
// length. Arrays by place, slot * HV + hv:
//
//   maps    A as two state images (workspace.cuh), the two bfloat16 parts of it. Of every segment
//           but a sequence's first and last
//   starts  float [V][K], the state at a segment's start; none for a sequence's first. B of the
//           segment before lies there first, except where the forward kept the states
//   ends    float [V][K], the gradient of the state at a segment's end; none for a sequence's last.
//           B' of the segment behind lies there first
//
// B of a first segment includes the initial state, B' of a last one the final state's gradient. A
// slot that no segment fills is never read or written.
#pragma once

#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
