"""Calls from JAX: the forms' launches, made by XLA's programs through a handler."""
