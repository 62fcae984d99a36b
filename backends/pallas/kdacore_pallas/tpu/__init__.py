"""The ``pallas`` backend: TPU kernels for the chunked ops, forward and backward, and for the
recurrent ops."""
