// As recurrent.cu, with records of candidates (records.cuh). A sequence with a row of records first
// applies those that precede the call, and leaves that state; its tokens write their updates into the
// row. Their keys and decays, which other blocks may still read, are left to record_tokens.cu.
#include "common/recurrent/decode.cuh"

KDA_KERNEL(WARPS * 32, MIN_BLOCKS) recurrent_records(KDA_PARAM RecurrentRecordsParams p) {
  KDA_SHARED(memory);
  decode(p, shared_address(memory));
}
