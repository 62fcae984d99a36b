"""The training stages ``kda_chunk_intra`` and ``kda_recompute_w_u``, one launch each."""
