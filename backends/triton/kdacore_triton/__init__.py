"""kdacore's Triton backend: chunked forward and backward, the recurrent op, the gate, and the five stage ops."""
