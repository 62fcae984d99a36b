"""The ``xla`` backend: every op of the contract in plain JAX, traceable, on any platform."""
