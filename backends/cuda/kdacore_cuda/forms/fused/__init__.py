"""``chunk_kda`` in one launch; on Hopper with clusters of blocks that share a sequence and value head."""
