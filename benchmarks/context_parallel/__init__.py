"""Context parallelism of ``chunk_kda`` and ``chunk_gated_delta_rule``: checked, then timed."""
