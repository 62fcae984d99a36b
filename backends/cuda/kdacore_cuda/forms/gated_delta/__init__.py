"""``chunk_gated_delta_rule`` in two launches on Hopper."""
