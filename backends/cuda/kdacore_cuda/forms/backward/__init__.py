"""The backward of ``chunk_kda`` on Hopper, whole or with its scan in segments."""
