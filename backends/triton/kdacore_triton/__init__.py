"""kdacore's Triton backend: chunked prefill and training, decode, and the five stage ops."""
