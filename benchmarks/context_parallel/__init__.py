"""``chunk_kda`` and ``chunk_gated_delta_rule`` on a row that several GPUs share (context parallelism): checked, then
timed. ``python -m benchmarks.context_parallel --help``."""
