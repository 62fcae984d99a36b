"""``chunk_kda`` in two launches that run side by side on Hopper."""
