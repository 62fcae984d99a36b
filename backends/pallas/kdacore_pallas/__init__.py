"""JAX backends of kdacore: ``xla`` (plain JAX, any platform) and ``pallas`` (TPU kernels)."""
