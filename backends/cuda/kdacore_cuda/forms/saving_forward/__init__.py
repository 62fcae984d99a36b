"""``chunk_kda`` with what its backward would recompute saved by the forward (``disable_recompute``)."""
