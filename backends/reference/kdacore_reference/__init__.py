"""The reference backend: a float64 step-by-step oracle and a chunked implementation on the array
API standard.

Nothing heavy is imported here; :mod:`kdacore_reference.oracle` is the entry point for tests and
benchmarks.
"""
