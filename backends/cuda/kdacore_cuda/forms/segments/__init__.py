"""``chunk_kda`` with few heads on Hopper: segments of a sequence are computed side by side."""
