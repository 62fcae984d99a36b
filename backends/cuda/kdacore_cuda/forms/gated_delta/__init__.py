"""``chunk_gated_delta_rule`` on Hopper: in two launches, or in up to four with few heads."""
