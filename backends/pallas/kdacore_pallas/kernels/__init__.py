"""Pallas TPU kernels: chunk forward and backward, decode over a state pool."""
